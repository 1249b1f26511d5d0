"""Limits of control groups, from files as the kernel shows them, and compared with what the core reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerobench import _native
from zerobench.host.cgroups import HostFiles, MemoryLimit, cpu_quota, memory_limits
from zerobench.host.machine import memory_available_bytes, memory_total_bytes, memory_used_bytes

GIB = 1 << 30
HOST = 24 * GIB  # of MemAvailable


class Host:
    """/proc and the mount of control groups in a folder of the test's own."""

    def __init__(self, root: Path) -> None:
        self.files = HostFiles(proc=root / "proc", cgroup=root / "cgroup")
        self.write("proc/meminfo", f"MemTotal:  {32 * GIB // 1024} kB\nMemAvailable: {HOST // 1024} kB\n")

    def write(self, name: str, text: str) -> None:
        path = self.files.proc.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def group2(self, path: str, *, limit: int | str, used: int, cached: int = 0) -> None:
        self.write(f"cgroup{path}/memory.max", str(limit))
        self.write(f"cgroup{path}/memory.current", str(used))
        self.write(f"cgroup{path}/memory.stat", f"anon 3\nfile {cached + 7}\ninactive_file {cached}")

    def group1(self, path: str, *, limit: int, used: int, cached: int = 0) -> None:
        folder = f"cgroup/memory{path}"
        self.write(f"{folder}/memory.limit_in_bytes", str(limit))
        self.write(f"{folder}/memory.usage_in_bytes", str(used))
        self.write(f"{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {cached}")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_controller_is_known_by_its_whole_name(host) -> None:
    host.write("proc/self/cgroup", "5:cpuacct,cpu:/mine\n4:cpuset:/another")
    for group, quota in (("mine", 200_000), ("another", 100_000)):
        host.write(f"cgroup/cpu/{group}/cpu.cfs_quota_us", str(quota))
        host.write(f"cgroup/cpu/{group}/cpu.cfs_period_us", "100000")
    assert cpu_quota(host.files) == 2.0


def test_files_that_a_container_does_not_show_limit_nothing(host) -> None:
    host.write("proc/self/cgroup", "0::/mine")
    host.write("cgroup/mine/memory.max", "10")
    host.write("cgroup/mine/cpu.max", "100000")
    assert memory_limits(host.files) == [] and cpu_quota(host.files) is None
    host.write("cgroup/mine/memory.current", "4")  # and nothing of what is cached
    assert memory_limits(host.files) == [MemoryLimit(limit_bytes=10, used_bytes=4)]


def test_a_group_above_its_limit_has_nothing_left() -> None:
    assert MemoryLimit(limit_bytes=10, used_bytes=12).left_bytes == 0


def test_without_control_groups_the_host_counts(host) -> None:
    assert memory_limits(host.files) == [] and cpu_quota(host.files) is None
    assert memory_available_bytes(host.files) == HOST
    assert memory_total_bytes(host.files) == 32 * GIB
    assert memory_used_bytes(host.files) == 8 * GIB


def test_cached_files_of_a_container_are_available(host) -> None:
    host.write("proc/self/cgroup", "0::/")
    host.group2("", limit=5 * GIB, used=5 * GIB - 1, cached=4 * GIB)
    assert memory_available_bytes(host.files) == 4 * GIB + 1
    assert memory_used_bytes(host.files) == GIB - 1
    assert memory_total_bytes(host.files) == 5 * GIB


def test_cached_files_count_alike_in_version_1(host) -> None:
    host.write("proc/self/cgroup", "5:cpu:/\n4:memory,blkio:/docker/0123")  # not below the container's mount
    host.group1("", limit=5 * GIB, used=5 * GIB, cached=4 * GIB)
    assert memory_available_bytes(host.files) == 4 * GIB
    assert memory_used_bytes(host.files) == GIB


def test_the_nearest_limit_counts_in_nested_groups(host) -> None:
    host.write("proc/self/cgroup", "0::/system.slice/slurm/job_7/step_0")
    host.group2("/system.slice/slurm/job_7/step_0", limit="max", used=5)
    host.group2("/system.slice/slurm/job_7", limit=2 * GIB, used=GIB, cached=GIB // 2)
    host.group2("/system.slice", limit=20 * GIB, used=2 * GIB)
    host.group2("/another", limit=1, used=1)
    assert memory_available_bytes(host.files) == 3 * GIB // 2
    assert memory_total_bytes(host.files) == 2 * GIB
    host.group2("/system.slice", limit=20 * GIB, used=19 * GIB)  # what its other groups took is missing here
    assert memory_available_bytes(host.files) == GIB
    assert memory_used_bytes(host.files) == GIB // 2


def test_nested_groups_of_version_1(host) -> None:
    host.write("proc/self/cgroup", "3:cpu,cpuacct:/other\n2:memory:/slurm/uid_1/job_2\n1:name=systemd:/x")
    host.group1("/slurm/uid_1/job_2", limit=2 * GIB, used=0)
    host.group1("", limit=0x7FFFFFFFFFFFF000, used=9 * GIB)
    assert memory_available_bytes(host.files) == 2 * GIB
    assert len(memory_limits(host.files)) == 1


def test_a_group_without_limit_limits_nothing(host) -> None:
    host.write("proc/self/cgroup", "0::/user.slice")
    host.group2("/user.slice", limit="max", used=GIB)
    host.write("cgroup/user.slice/cpu.max", "max 100000")
    assert memory_available_bytes(host.files) == HOST
    assert cpu_quota(host.files) is None


def test_the_least_quota_of_the_path_counts(host) -> None:
    host.write("proc/self/cgroup", "0::/a/b")
    host.write("cgroup/a/b/cpu.max", "800000 100000")
    assert cpu_quota(host.files) == 8
    host.write("cgroup/a/cpu.max", "250000 100000")
    host.write("cgroup/c/cpu.max", "100000 100000")
    assert cpu_quota(host.files) == 2.5


def test_the_least_quota_of_version_1_counts(host) -> None:
    host.write("proc/self/cgroup", "3:cpu,cpuacct:/job\n2:memory:/")
    host.write("cgroup/cpu/cpu.cfs_quota_us", "-1")
    host.write("cgroup/cpu/cpu.cfs_period_us", "100000")
    assert cpu_quota(host.files) is None
    host.write("cgroup/cpu/job/cpu.cfs_quota_us", "400000")
    host.write("cgroup/cpu/job/cpu.cfs_period_us", "200000")
    assert cpu_quota(host.files) == 2


def test_of_this_machine_it_is_as_the_core_says() -> None:
    core_bytes = _native.load().available_host_bytes()
    assert memory_available_bytes() == pytest.approx(core_bytes, abs=GIB // 2)
