"""`zerobench doctor`: every finding, by changing one fact of a machine that has none."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from zerobench.doctor.examine import EXAMINATIONS, examine
from zerobench.doctor.show import finding_lines, findings_content, verdict
from zerobench.host import inventory

GIB = 1 << 30


def gpu(index: int, **changes: Any) -> dict[str, Any]:
    return {
        "index": index, "name": "NVIDIA H100", "nvlinks_active": 18, "pcie_width": 16, "pcie_width_max": 16,
        "pcie_generation_max": 5, "pcie_generation_of_gpu": 5, "power_limit_w": 700.0,
        "power_limit_default_w": 700.0, "mig": False, "persistence_mode": True, "numa_node": index,
    } | changes  # fmt: skip


def healthy() -> dict[str, Any]:
    """Return facts of a machine with two GPUs and nothing to find."""
    return {
        "versions": {"torch": "2.13.0+cu130"},
        "machine": {
            "gpus": [gpu(0), gpu(1)],
            "driver": "580.1",
            "cuda": "13.0",
            "cuda_module": {"built": True, "loads": True},
            "storage": {"io_uring": "usable"},
            "limits": {
                "open_files": 65536, "open_files_most": 65536, "lockable_bytes": None,
                "shared_memory_bytes": 64 * GIB, "numa_cpus_allowed": {"0": 8, "1": 8},
            },
            "network": {"interfaces": {"eth0": 25000, "lo": None}, "infiniband": [], "name_resolves_here": True},
            "details": {
                "affinity": "0-15", "cpu_quota": None, "isa": ["avx2"], "architecture": "x86_64",
                "cgroup_memory_limit_bytes": None, "environment": {},
                "build": {"torch_minor": "2.13", "torch_cuda": "13.0"},
            },
        },
        "path": {
            "path": "/nvme", "file_system": "ext4", "device": "nvme0n1", "rotational": False, "o_direct": True,
            "free_bytes": 900 * GIB,
        },
    }  # fmt: skip


# The fact that changes (keys down to it), its value, then the finding's level, subject and words.
CASES: list[tuple[str, Any, str, str, str]] = [
    ("machine.no_gpus", "torch 2.13.0 is a build without CUDA", "error", "GPUs", "build without CUDA"),
    ("machine.no_gpus", "this machine has no NVIDIA driver", "note", "GPUs", "CPU ranks"),
    (
        "machine.cuda_module", {"built": True, "loads": False, "problem": "libnccl.so.2: cannot open"},
        "error", "zerobench._cuda", "does not load: libnccl.so.2",
    ),
    (
        "machine.cuda_module", {"built": False, "loads": False, "reason": "nvcc was not found"},
        "error", "zerobench._cuda", "was not built: nvcc was not found",
    ),
    ("versions.torch", "2.14.1+cu130", "error", "torch", "built for torch 2.13, and torch 2.14.1+cu130"),
    ("machine.cuda", "12.4", "error", "driver", "torch uses CUDA 13.0, and driver 580.1 serves CUDA 12.4"),
    (
        "machine.gpus", [gpu(0, nvlinks_active=None), gpu(1, nvlinks_active=None)],
        "note", "NVLink", "The 2 GPUs have no NVLink",
    ),
    ("machine.gpus", [gpu(0), gpu(1, nvlinks_active=9)], "warning", "GPU 1", "about 50 % of the bandwidth"),
    ("machine.gpus", [gpu(0, pcie_width=8)], "warning", "GPU 0", "8 of 16 lanes"),
    ("machine.gpus", [gpu(0, pcie_generation_max=3)], "note", "GPU 0", "at about 25 % of the bandwidth"),
    ("machine.gpus", [gpu(0, power_limit_w=450.0)], "warning", "GPU 0", "nvidia-smi -i 0 -pl 700"),
    ("machine.gpus", [gpu(0, mig=True)], "warning", "GPU 0", "split by MIG"),
    ("machine.gpus", [gpu(0, persistence_mode=False)], "note", "GPU 0", "Persistence mode is off"),
    ("machine.details.cpu_quota", 4.0, "warning", "CPU", "4 cores' worth of time on 16 visible cores"),
    ("machine.limits.numa_cpus_allowed", {"0": 16, "1": 0}, "warning", "GPU 1", "numactl --cpunodebind=1"),
    ("machine.details.isa", ["sse4_2"], "warning", "CPU", "no AVX2"),
    ("machine.details.cgroup_memory_limit_bytes", 32 * GIB, "note", "memory", "32.0 GiB"),
    ("machine.limits.lockable_bytes", 8 << 20, "warning", "locked memory", "leaves 8 MiB"),
    ("machine.limits.shared_memory_bytes", 64 << 20, "warning", "/dev/shm", "--shm-size"),
    ("machine.limits.open_files", 1024, "warning", "open files", "ulimit -n 65536"),
    ("machine.storage.io_uring", "not available: EPERM", "warning", "io_uring", "not available: EPERM"),
    ("machine.storage.gpu_direct_storage", "not available", "note", "GPUDirect Storage", "not available"),
    ("path.file_system", "tmpfs", "warning", "/nvme", "keeps files in memory"),
    ("path.file_system", "nfs4", "warning", "/nvme", "a network file system (nfs4)"),
    ("path.rotational", True, "warning", "/nvme", "a rotating disk"),
    ("path.o_direct", False, "warning", "/nvme", "does not allow O_DIRECT"),
    ("path.free_bytes", 12 * 10**9, "warning", "/nvme", "about 1.00 billion parameters"),
    ("machine.network.interfaces", {"lo": None}, "note", "network", "No interface but the loopback"),
    (
        "machine.network.interfaces", {"eth0": 1000, "eth1": 100000, "lo": None},
        "note", "network", "NCCL_SOCKET_IFNAME=eth1",
    ),
    ("machine.network.name_resolves_here", False, "warning", "network", "/etc/hosts"),
    (
        "machine.details.environment", {"CUDA_LAUNCH_BLOCKING": "1"},
        "warning", "environment", "unset CUDA_LAUNCH_BLOCKING",
    ),
]  # fmt: skip


def changed(key: str, value: Any) -> dict[str, Any]:
    facts = copy.deepcopy(healthy())
    *folders, last = key.split(".")
    at = facts
    for folder in folders:
        at = at[folder]
    at[last] = value
    return facts


def test_a_healthy_machine_has_no_finding() -> None:
    assert examine(healthy()) == []
    assert finding_lines([]) == ["nothing found"]


@pytest.mark.parametrize(
    ("key", "value", "level", "subject", "words"), CASES, ids=lambda part: str(part)[:30]
)
def test_a_changed_fact_is_one_finding(key: str, value: Any, level: str, subject: str, words: str) -> None:
    found = examine(changed(key, value))
    assert [(finding.level, finding.subject) for finding in found] == [(level, subject)]
    assert words in " ".join((found[0].what, found[0].cost, found[0].cure))


def test_every_examination_has_a_case() -> None:
    silent = {
        examination.__name__
        for examination in EXAMINATIONS
        if not any(list(examination(changed(key, value))) for key, value, *_ in CASES)
    }
    assert silent == set()


def test_a_virtual_disk_is_not_called_rotating() -> None:
    facts = changed("path.rotational", True)
    facts["path"]["device"] = "vda"
    assert examine(facts) == []


def test_facts_that_cannot_be_had_are_no_findings() -> None:
    facts = healthy()
    facts["machine"]["gpus"] = [{"index": 0}, {"index": 1, "nvlinks_active": 18}]
    facts["machine"]["limits"] = {}
    del facts["machine"]["network"], facts["path"]
    assert examine(facts) == []


def test_errors_come_first_and_the_verdict_counts() -> None:
    facts = changed("machine.limits.open_files", 1024)
    facts["versions"]["torch"] = "2.14.1"
    facts["machine"]["details"]["cgroup_memory_limit_bytes"] = GIB
    found = examine(facts)
    assert [finding.level for finding in found] == ["error", "warning", "note"]
    assert verdict(found) == "1 error, 1 warning, 1 note"
    assert [finding["level"] for finding in findings_content(found)["findings"]] == [
        "error",
        "warning",
        "note",
    ]


def test_the_facts_of_this_machine_can_be_examined(tmp_path: Path) -> None:
    facts = inventory.collect_facts(tmp_path)
    assert facts["path"]["free_bytes"] > 0
    assert "lo" in facts["machine"]["network"]["interfaces"]
    assert {finding.level for finding in examine(facts)} <= {"error", "warning", "note"}
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_says_nothing_of_o_direct() -> None:
    assert inventory.allows_o_direct(Path("/proc")) is None
