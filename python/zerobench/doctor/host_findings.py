"""Examine cores, memory, disks, network and environment: one function a subject, which yields what it finds."""

from __future__ import annotations

from collections.abc import Iterator

from zerobench.doctor.finding import Facts, Finding
from zerobench.host.numa import parse_list
from zerobench.results.sizes import GIB, MIB

LEAST_OPEN_FILES = 4096
LEAST_LOCKABLE_BYTES = GIB
LEAST_SHARED_BYTES = GIB  # Docker gives 64 MiB
LEAST_FREE_BYTES = 20 * GIB
MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}
NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph", "lustre", "glusterfs"}
VIRTUAL_DISKS = ("vd", "xvd")
SLOWING_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel"),
    "NCCL_P2P_DISABLE": ("1", "GPUs exchange data through host memory"),
    "NCCL_DEBUG": ("TRACE", "NCCL writes a line for every call"),
    "TORCH_COMPILE_DISABLE": ("1", "torch.compile compiles nothing"),
}


def cores_suffice(facts: Facts) -> Iterator[Finding]:
    """Find a quota below the cores that are visible, and GPUs whose NUMA node's cores are out of reach."""
    machine = facts["machine"]
    quota, cores = (
        machine["details"].get("cpu_quota"),
        len(parse_list(machine["details"].get("affinity", ""))),
    )
    if quota is not None and cores and quota < cores:
        yield Finding(
            level="warning",
            subject="CPU",
            what=f"The control group allows {quota:g} cores' worth of time on {cores} visible cores.",
            cost="Programs that start a thread for every visible core are stopped in turns.",
            cure="Set OMP_NUM_THREADS to the quota over the number of ranks, or raise the quota (`docker run --cpus`).",
        )
    allowed = machine.get("limits", {}).get("numa_cpus_allowed", {})
    for gpu in machine.get("gpus", []):
        node = gpu.get("numa_node")
        if node is not None and allowed.get(str(node)) == 0:
            yield Finding(
                level="warning",
                subject=f"GPU {gpu['index']}",
                what=f"It is on NUMA node {node}, and none of that node's cores may be used.",
                cost="Offload and kernel launches cross the link between sockets.",
                cure=f"Start with `numactl --cpunodebind={node}`, or widen the container's cpuset.",
            )
    isa = machine["details"].get("isa", [])
    if machine["details"].get("architecture") == "x86_64" and isa and "avx2" not in isa:
        yield Finding(
            level="warning",
            subject="CPU",
            what="The processor has no AVX2, or the hypervisor hides it.",
            cost="Optimizer updates on the CPU run several times slower.",
            cure="Pass the host's processor through to the virtual machine (`-cpu host`).",
        )


def memory_is_free(facts: Facts) -> Iterator[Finding]:
    """Find limits on memory, locked memory, shared memory and open files that offload and ranks run into."""
    machine = facts["machine"]
    limits = machine.get("limits", {})
    group_limit = machine["details"].get("cgroup_memory_limit_bytes")
    if group_limit is not None:
        yield Finding(
            level="note",
            subject="memory",
            what=f"The control group allows {group_limit / GIB:.1f} GiB of host memory.",
            cost="The kernel kills ranks whose offloaded state exceeds it.",
            cure="Raise it (`docker run --memory`, `--mem` of Slurm), or offload less (`--host-memory-gib`).",
        )
    lockable = limits.get("lockable_bytes")
    if lockable is not None and lockable < LEAST_LOCKABLE_BYTES:
        yield Finding(
            level="warning",
            subject="locked memory",
            what=f"RLIMIT_MEMLOCK leaves {lockable / MIB:.0f} MiB.",
            cost="Swap files cannot use io_uring with registered buffers, and rows that need them are not started.",
            cure="`ulimit -l unlimited`, LimitMEMLOCK=infinity, or `docker run --ulimit memlock=-1`.",
        )
    shared = limits.get("shared_memory_bytes")
    if shared is not None and shared < LEAST_SHARED_BYTES:
        yield Finding(
            level="warning",
            subject="/dev/shm",
            what=f"It holds {shared / MIB:.0f} MiB.",
            cost="NCCL without peer access and data loaders with workers fail when it is full.",
            cure="`docker run --shm-size=8g` or `--ipc=host`.",
        )
    files = limits.get("open_files")
    if files is not None and files < LEAST_OPEN_FILES:
        yield Finding(
            level="warning",
            subject="open files",
            what=f"A process may open {files} files.",
            cost="Many ranks, swap files on several disks and data loaders may run out of descriptors.",
            cure=f"`ulimit -n {min(65536, max(files, limits.get('open_files_most') or 65536))}`",
        )


def disks_are_fast(facts: Facts) -> Iterator[Finding]:
    """Find what keeps state on files slow: no io_uring, no O_DIRECT, a slow or full file system."""
    io_uring = facts["machine"].get("storage", {}).get("io_uring", "usable")
    if io_uring != "usable":
        yield Finding(
            level="warning",
            subject="io_uring",
            what=f"It is {io_uring}.",
            cost="State on files is swapped by threads, which takes more CPU time.",
            cure="Use Linux 5.5 or later, and allow io_uring_setup in the container's seccomp profile.",
        )
    direct = facts["machine"].get("storage", {}).get("gpu_direct_storage")
    if direct:
        yield Finding(
            level="note",
            subject="GPUDirect Storage",
            what=f"It is {direct}.",
            cost="None: optimizer state is updated on the CPU.",
            cure="None is needed.",
        )
    if (disk := facts.get("path")) is not None:
        yield from disk_is_fast(disk)


def disk_is_fast(disk: Facts) -> Iterator[Finding]:
    """Find what is wrong with one folder's disk."""
    subject, kind, free = disk["path"], disk["file_system"], disk["free_bytes"]
    if kind in MEMORY_FILE_SYSTEMS:
        yield Finding(
            level="warning",
            subject=subject,
            what=f"It is on {kind}, which keeps files in memory.",
            cost="State that is swapped there frees no memory, and figures are not a disk's.",
            cure="Give a folder on an NVMe disk.",
        )
    elif kind in NETWORK_FILE_SYSTEMS or rotates(disk):
        where = f"a network file system ({kind})" if kind in NETWORK_FILE_SYSTEMS else "a rotating disk"
        yield Finding(
            level="warning",
            subject=subject,
            what=f"It is on {where}.",
            cost="Steps wait for the disk: a rotating disk or a network moves a tenth or less of what NVMe does.",
            cure="Give a folder on an NVMe disk of this machine.",
        )
    if disk["o_direct"] is False and kind not in MEMORY_FILE_SYSTEMS:
        yield Finding(
            level="warning",
            subject=subject,
            what=f"Its file system ({kind}) does not allow O_DIRECT.",
            cost="State cannot be swapped there past the page cache.",
            cure="Give a folder on ext4 or XFS.",
        )
    if free < LEAST_FREE_BYTES:
        yield Finding(
            level="warning",
            subject=subject,
            what=f"{free / GIB:.1f} GiB are free.",
            cost=f"Optimizer state of about {free / 12e9:.2f} billion parameters fits (12 bytes each).",
            cure="Free space there, or give a folder on a larger disk.",
        )


def rotates(disk: Facts) -> bool:
    """Return whether the disk is a rotating one. Virtual disks say so whatever lies below them."""
    return bool(disk.get("rotational")) and not str(disk.get("device", "")).startswith(VIRTUAL_DISKS)


def network_is_ready(facts: Facts) -> Iterator[Finding]:
    """Find what keeps ranks of several hosts from meeting, or lets them meet over a slow interface."""
    network = facts["machine"].get("network")
    if network is None:
        return
    environment = facts["machine"]["details"].get("environment", {})
    outward = {name: speed for name, speed in network["interfaces"].items() if name != "lo"}
    if not outward:
        yield Finding(
            level="note",
            subject="network",
            what="No interface but the loopback is up.",
            cost="Ranks of this host alone can train together.",
            cure="None on one host; else bring an interface up, or start the container with `--network host`.",
        )
    speeds = {speed for speed in outward.values() if speed}
    if len(speeds) > 1 and "NCCL_SOCKET_IFNAME" not in environment and not network["infiniband"]:
        best = max(outward, key=lambda name: outward[name] or 0)
        yield Finding(
            level="note",
            subject="network",
            what=f"Interfaces differ in speed: {', '.join(f'{n} {s or 0} Mbit/s' for n, s in outward.items())}.",
            cost="Training over several hosts may use the slower one.",
            cure=f"Set NCCL_SOCKET_IFNAME={best} and GLOO_SOCKET_IFNAME={best}.",
        )
    if not network["name_resolves_here"] and "GLOO_SOCKET_IFNAME" not in environment:
        yield Finding(
            level="warning",
            subject="network",
            what="This host's name does not resolve to one of its own addresses.",
            cost="Process groups on gloo that a script makes may fail to connect.",
            cure="Add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME (lo on one host).",
        )


def environment_is_clean(facts: Facts) -> Iterator[Finding]:
    """Find variables of the environment that slow every run."""
    environment = facts["machine"]["details"].get("environment", {})
    for name, (value, cost) in SLOWING_VARIABLES.items():
        if str(environment.get(name, "")).upper() == value:
            yield Finding(
                level="warning",
                subject="environment",
                what=f"{name}={environment[name]} is set.",
                cost=f"With it {cost}.",
                cure=f"`unset {name}`",
            )
