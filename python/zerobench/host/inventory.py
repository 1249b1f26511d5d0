"""All facts that `zerobench info` prints and `zerobench doctor` judges, collected in one place. Imports no torch."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from zerobench.host.gpus import driver_present, visible_gpus
from zerobench.host.machine import build_facts, gpu_module_facts, machine_facts, version_facts
from zerobench.host.numa import node_of_pci_device, read_nodes
from zerobench.host.storage import device_facts, free_bytes, lockable_bytes, storage_facts

SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")


def collect_facts(path: Path | None = None) -> dict[str, Any]:
    """Return facts about the machine, the installation and, where ``path`` is given, the disk that holds it."""
    seen = visible_gpus()
    machine = machine_facts(seen.gpus)
    for gpu in machine.get("gpus", []):
        gpu["numa_node"] = node_of_pci_device(gpu.get("pci_bus_id"))
    machine["cuda_module"] = gpu_module_facts(build_facts(), has_driver=driver_present())
    machine["storage"] = storage_facts()
    machine["limits"] = limit_facts()
    machine["network"] = network_facts()
    if seen.reason:
        machine["no_gpus"] = seen.reason
    facts: dict[str, Any] = {"machine": machine, "versions": version_facts(gpus=True)}
    if path is not None:
        facts["path"] = path_facts(path)
    return facts


def limit_facts() -> dict[str, Any]:
    """Return what this process may take: open files, locked memory (None: no limit) and shared memory."""
    lockable = lockable_bytes()
    open_files, open_files_most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "open_files": open_files,
        "open_files_most": open_files_most,
        "lockable_bytes": None if lockable == float("inf") else int(lockable),
        "shared_memory_bytes": shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0,
        "numa_cpus_allowed": {
            str(node): len(set(cpus) & os.sched_getaffinity(0)) for node, cpus in read_nodes().items()
        },
    }


def network_facts() -> dict[str, Any]:
    """Return the interfaces that are up with their speed in Mbit/s (None: unknown), InfiniBand devices, and whether
    this host's name resolves to an address of its own."""
    states, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    own = {address.address for of_one in addresses.values() for address in of_one}
    try:
        named = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        named = set()
    return {
        "interfaces": {name: state.speed or None for name, state in sorted(states.items()) if state.isup},
        "infiniband": sorted(entry.name for entry in INFINIBAND.glob("*")),
        "name_resolves_here": bool(named & own),
    }


def path_facts(path: Path) -> dict[str, Any]:
    """Return the file system below ``path``, its free space, and whether files there can bypass the page cache."""
    return {**device_facts(path), "free_bytes": free_bytes(path), "o_direct": allows_o_direct(path)}


def allows_o_direct(folder: Path) -> bool | None:
    """Return whether a file in ``folder`` can be opened with O_DIRECT; None where no file can be made there."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="zerobench-doctor-") as file:
            try:
                os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
            except OSError:
                return False
            return True
    except OSError:
        return None
