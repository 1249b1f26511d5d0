"""Job files of cluster managers that start the same command on the same hosts and ranks."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any

from zerobench.errors import ConfigError
from zerobench.hosts.hostfile import Host
from zerobench.hosts.torchrun import program_words

_PORT = 29500


def slurm(hosts: Sequence[Host], command: Sequence[str], *, gpu: str, image: str) -> str:
    """Return a batch script for ``sbatch``. srun starts the ranks itself, and zerobench reads its variables."""
    slots = slots_of(hosts)
    return f"""#!/bin/bash
#SBATCH --job-name={name_of(command)}
#SBATCH --nodes={len(hosts)}
#SBATCH --ntasks-per-node={slots}
#SBATCH --gpus-per-node={f"{gpu}:" if gpu else ""}{slots}
#SBATCH --exclusive
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.log

export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)" MASTER_PORT={_PORT}
srun --kill-on-bad-exit=1 {shlex.join(command)}
"""


def skypilot(hosts: Sequence[Host], command: Sequence[str], *, gpu: str, image: str) -> str:
    """Return a task for ``sky launch``."""
    if not gpu:
        raise ConfigError("--write skypilot needs the kind of GPU: give --gpu, such as H100")
    program = shlex.join(program_words(command))
    return f"""name: {name_of(command)}
num_nodes: {len(hosts)}
resources:
  accelerators: {gpu}:{slots_of(hosts)}
workdir: .
setup: |
  pip install .
run: |
  torchrun --nnodes="$SKYPILOT_NUM_NODES" --node-rank="$SKYPILOT_NODE_RANK" \\
    --nproc-per-node="$SKYPILOT_NUM_GPUS_PER_NODE" \\
    --master-addr="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" --master-port={_PORT} \\
    {program}
"""


def kubeflow(hosts: Sequence[Host], command: Sequence[str], *, gpu: str, image: str) -> str:
    """Return a PyTorchJob (kubeflow.org/v1) for ``kubectl apply``. The operator sets torchrun's variables."""
    if not image:
        raise ConfigError("--write kubeflow needs a container image with zerobench: give --image")
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": image,
        "command": ["torchrun", *program_words(command)],
        "resources": {"limits": {"nvidia.com/gpu": slots_of(hosts)}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    template = {
        "spec": {
            "containers": [container],
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        }
    }

    def replicas(num: int) -> dict[str, Any]:
        return {"replicas": num, "restartPolicy": "Never", "template": template}

    specs = {"Master": replicas(1)} | ({"Worker": replicas(len(hosts) - 1)} if len(hosts) > 1 else {})
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name_of(command)},
        "spec": {"nprocPerNode": str(slots_of(hosts)), "pytorchReplicaSpecs": specs},
    }
    return json.dumps(job, indent=2) + "\n"


WRITERS: dict[str, Callable[..., str]] = {"slurm": slurm, "skypilot": skypilot, "kubeflow": kubeflow}


def slots_of(hosts: Sequence[Host]) -> int:
    """Return the ranks of each host. Raises ConfigError where hosts differ, which job files cannot say."""
    found = {host.slots for host in hosts}
    if len(found) > 1:
        raise ConfigError(
            f"hosts have {' and '.join(map(str, sorted(found)))} slots: job files need the same for all"
        )
    return found.pop()


def name_of(command: Sequence[str]) -> str:
    """Return a name of a job: that of the script or module."""
    words = program_words(command)
    word = words[1] if words[0] in ("-m", "--no-python") else words[0]
    stem = PurePosixPath(word).stem.lower()
    return "".join(letter if letter.isalnum() else "-" for letter in stem).strip("-") or "job"
