"""`zerobench launch`: the hostfile, torchrun's lines, job files, and processes on hosts that ssh would reach."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path

import pytest

from zerobench.errors import ConfigError, Error
from zerobench.hosts.hostfile import Host, read_hostfile
from zerobench.hosts.job_files import WRITERS
from zerobench.hosts.ssh import run_over_ssh
from zerobench.hosts.torchrun import program_words, torchrun_lines

TWO = [Host("alice@a", 4), Host("b", 4)]
COMMAND = ["python", "-m", "zerobench", "compare", "--stages", "0,3"]


def hostfile(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hostfile"
    path.write_text(text)
    return path


def test_a_hostfile_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    text = "# our two\nworker-1 slots=4  # old\n\nalice@10.0.0.2   slots=8\n"
    assert read_hostfile(hostfile(tmp_path, text)) == [Host("worker-1", 4), Host("alice@10.0.0.2", 8)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no host"),
        ("a\n", "line 1: 'a' is not `host slots=N`"),
        ("a slots=4\nb slots=x\n", "line 2"),
        ("a slots=0\n", "N of 1 or more"),
        ("a slots=4\na slots=4\n", "names a twice"),
        ("a slots=4; rm -rf /\n", "is not `host slots=N`"),
    ],
)
def test_a_wrong_hostfile_is_refused_with_the_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_hostfile(hostfile(tmp_path, text))
    assert words in str(raised.value)


def test_each_host_has_its_line_and_all_meet_at_the_first() -> None:
    lines = [shlex.split(line) for line in torchrun_lines(TWO, COMMAND, port=1234)]
    for index, words in enumerate(lines):
        assert words[:5] == [
            "torchrun", "--nnodes=2", f"--node-rank={index}", "--nproc-per-node=4", "--master-addr=a",
        ]  # fmt: skip
        assert words[5:] == ["--master-port=1234", "-m", "zerobench", "compare", "--stages", "0,3"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["python3", "train.py", "--lr", "1"], ["train.py", "--lr", "1"]),
        (["./train.py"], ["./train.py"]),
        (["zerobench", "compare"], ["-m", "zerobench", "compare"]),
        (["bash", "run.sh"], ["--no-python", "bash", "run.sh"]),
    ],
)
def test_torchrun_is_told_what_kind_of_program_it_starts(command: list[str], words: list[str]) -> None:
    assert program_words(command) == words


@pytest.mark.parametrize("command", [[], ["python", "-c", "print()"]])
def test_a_program_that_torchrun_cannot_start_is_refused(command: list[str]) -> None:
    with pytest.raises(ConfigError):
        program_words(command)


def test_a_slurm_script_starts_the_ranks_by_srun() -> None:
    text = WRITERS["slurm"](TWO, COMMAND, gpu="h100", image="")
    options = dict(
        line.removeprefix("#SBATCH --").split("=")
        for line in text.splitlines()
        if "SBATCH" in line and "=" in line
    )
    assert options["nodes"] == "2" and options["ntasks-per-node"] == "4"
    assert options["gpus-per-node"] == "h100:4"
    assert shlex.join(COMMAND) in text and text.startswith("#!/bin/bash\n")


def test_a_skypilot_task_asks_for_the_gpus_and_is_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    task = yaml.safe_load(WRITERS["skypilot"](TWO, COMMAND, gpu="H100", image=""))
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"] == "H100:4"
    assert "-m zerobench compare --stages 0,3" in task["run"]
    with pytest.raises(ConfigError, match="--gpu"):
        WRITERS["skypilot"](TWO, COMMAND, gpu="", image="")


def test_a_kubeflow_job_has_a_master_and_workers() -> None:
    job = json.loads(WRITERS["kubeflow"](TWO, COMMAND, gpu="", image="registry/zerobench:1"))
    specs = job["spec"]["pytorchReplicaSpecs"]
    assert {name: spec["replicas"] for name, spec in specs.items()} == {"Master": 1, "Worker": 1}
    (container,) = specs["Worker"]["template"]["spec"]["containers"]
    assert container["command"][:3] == ["torchrun", "-m", "zerobench"]
    with pytest.raises(ConfigError, match="--image"):
        WRITERS["kubeflow"](TWO, COMMAND, gpu="", image="")


@pytest.mark.parametrize("kind", WRITERS)
def test_job_files_need_equal_slots(kind: str) -> None:
    with pytest.raises(ConfigError, match="hosts have 2 and 4 slots"):
        WRITERS[kind]([Host("a", 4), Host("b", 2)], COMMAND, gpu="H100", image="x")


# In place of ssh: a shell on this machine that takes the same words, and does not know the host "nowhere".
LOCAL_SSH = ["sh", "-c", 'test "$0" != nowhere || { echo no route >&2; exit 255; }; exec sh -c "$1"']


def start(lines: list[str], tmp_path: Path, hosts: tuple[str, ...] = ("a", "b")) -> list[str]:
    shown: list[str] = []
    places = [Host(name, 1) for name in hosts]
    try:
        run_over_ssh(places, lines, show=shown.append, ssh=LOCAL_SSH, folder=tmp_path)
    except Error as error:
        shown.append(str(error))
    return shown


def test_output_of_every_host_is_shown_with_its_name(tmp_path: Path) -> None:
    shown = start(["pwd", "printf 'one\\ntwo'"], tmp_path)
    assert sorted(shown) == [f"a: {tmp_path}", "b: one", "b: two"]


def test_a_host_that_fails_ends_the_others_and_is_named(tmp_path: Path) -> None:
    begin = time.monotonic()
    shown = start([f"{sys.executable} -c 'print(\"boom\"); raise SystemExit(3)'", "sleep 100"], tmp_path)
    assert time.monotonic() - begin < 20
    assert shown[-1] == "host a: the command ended with exit code 3 (boom); all hosts were ended"


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    shown = start(["sleep 100", "true"], tmp_path, hosts=("a", "nowhere"))
    assert shown[-1].startswith("host nowhere cannot be reached by ssh (no route)")


def test_a_host_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    shown = start(["sleep 100", "sh -c 'kill -9 $$'"], tmp_path)
    assert shown[-1].startswith("host b: the command was ended by signal 9")


def test_a_missing_ssh_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(Error, match="install an ssh client"):
        run_over_ssh([Host("a", 1)], ["true"], show=print, ssh=["/nowhere/ssh"], folder=tmp_path)
