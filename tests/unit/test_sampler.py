"""The process beside the ranks, on a machine with or without GPUs, and what becomes of its samples."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from zerobench.bench import sampler
from zerobench.bench.sampler import Sampler, is_shared, shared_warning, summarise
from zerobench.host.gpus import driver_present, visible_gpus
from zerobench.host.nvml import Nvml, clock_limits


def wait_for(found, *, within_s: float = 30.0):
    deadline = time.monotonic() + within_s
    while not (value := found()):
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.05)
    return value


def test_host_figures_are_sampled_until_the_end(tmp_path) -> None:
    start_s = time.time()
    with Sampler(tmp_path / "samples.jsonl") as watching:
        assert wait_for(watching.first)["gpus"] == []
        samples = wait_for(lambda: watching.between(start_s, time.time())[1:])
        process = watching._process
    assert process is not None and process.poll() is not None
    assert samples[0]["host_used_bytes"] > 1 << 20
    assert 0 <= samples[0]["cpu_pct"] <= 100
    assert watching.between(0.0, start_s - 1) == []
    found = summarise(samples, begin_s=start_s, gpu_num=0)
    assert found is not None and found.sample_num == len(samples)
    assert found.host_used_peak_bytes == max(sample["host_used_bytes"] for sample in samples)
    assert found.power_w is None and found.shared_gpus is None
    alone = summarise(samples[:1], begin_s=start_s, gpu_num=0)
    assert alone is not None and alone.cpu_pct is None


def test_the_sampler_ends_with_the_command(tmp_path) -> None:
    path = tmp_path / "samples.jsonl"
    code = (
        "import sys, time; from pathlib import Path; from zerobench.bench.sampler import Sampler\n"
        "with Sampler(Path(sys.argv[1])) as watching:\n"
        "    print(watching._process.pid, flush=True); time.sleep(100)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None
        pid = int(command.stdout.readline())
        wait_for(lambda: path.exists() and path.stat().st_size)
        command.send_signal(signal.SIGKILL)
    wait_for(lambda: not os.path.exists(f"/proc/{pid}/status") or _is_zombie(pid), within_s=10)


def _is_zombie(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "Z"


def test_a_path_that_cannot_be_written_gives_no_samples(tmp_path) -> None:
    with Sampler(tmp_path / "no" / "folder") as watching:
        assert watching.between(0.0, time.time()) == []


def gpu(**figures):
    return {
        "utilisation_pct": 90, "used_bytes": 10, "power_w": 500.0, "sm_clock_mhz": 1900, "memory_clock_mhz": 2600,
        "temperature_c": 50, "limited_by": ["power_cap"], "pids": [7], "shared": False, **figures,
    }  # fmt: skip


def sample(time_s: float, *gpus, **figures):
    return {"time_s": time_s, "cpu_pct": 20.0, "host_used_bytes": 5, "gpus": list(gpus), **figures}


def test_a_row_has_the_figures_of_its_own_gpus() -> None:
    samples = [
        sample(10.05, gpu(utilisation_pct=3), gpu(utilisation_pct=5), gpu(utilisation_pct=77), cpu_pct=99.0),
        sample(
            10.95,
            gpu(used_bytes=40, sm_clock_mhz=1500, memory_clock_mhz=2000),
            gpu(power_w=90.0, temperature_c=60),
            gpu(),
        ),
        sample(
            11.40,
            gpu(utilisation_pct=None),
            gpu(shared=True, power_w=700.0),
            gpu(used_bytes=99),
            cpu_pct=40.0,
        ),
    ]
    found = summarise(samples, begin_s=10.0, gpu_num=2)
    assert found is not None
    assert found.gpu_utilisation_pct == 90.0  # readings right after the beginning are about the time before
    assert found.gpu_used_peak_bytes == 40
    assert (found.power_w, found.power_peak_w) == (600, 700)  # readings are means of the second before them
    assert found.sm_clock_mhz == pytest.approx((5 * 1900 + 1500) / 6) and found.sm_clock_min_mhz == 1500
    assert found.memory_clock_mhz == 2500
    assert found.temperature_peak_c == 60
    assert (found.power_cap_pct, found.thermal_limit_pct, found.other_limit_pct) == (100, 0, 0)
    assert found.cpu_pct == 30.0  # a reading is of the time since the one before it
    assert found.shared_gpus == [1]
    short = summarise(samples[:2], begin_s=10.0, gpu_num=2)
    assert short is not None and short.power_w is None and short.power_peak_w is None


def test_shares_of_samples_in_which_clocks_were_held_down() -> None:
    samples = [
        sample(10.0, gpu(), gpu(limited_by=[])),
        sample(10.3, gpu(limited_by=["power_cap", "thermal"]), gpu(limited_by=None)),
        sample(10.6, gpu(), gpu(limited_by=["other"]), gpu(limited_by=["thermal"])),
    ]
    found = summarise(samples, begin_s=10.0, gpu_num=2)
    assert found is not None
    assert (found.power_cap_pct, found.thermal_limit_pct, found.other_limit_pct) == (60.0, 20.0, 20.0)


def test_reasons_for_clocks_are_grouped() -> None:
    assert clock_limits(0) == clock_limits(0x1) == clock_limits(0x400) == []
    assert clock_limits(0x4) == ["power_cap"]
    assert clock_limits(0x4 | 0x20) == ["power_cap", "thermal"]
    assert clock_limits(0x8 | 0x40) == ["thermal"]  # a slowdown of the hardware for that reason
    assert clock_limits(0x8) == clock_limits(0x8 | 0x80) == clock_limits(0x2) == ["other"]


class CountsEnergy(Nvml):
    """A driver that counts anew at every third question."""

    def __init__(self, *millijoules: int | None) -> None:
        super().__init__()
        self.questions = [count for count in millijoules for _ in range(3)]

    def _handle(self, uuid: str) -> object:
        return uuid

    def _ask(self, name: str, *arguments: object) -> int | None:
        assert name == "nvmlDeviceGetTotalEnergyConsumption"
        return self.questions.pop(0) if len(self.questions) > 1 else self.questions[0]


def test_energy_is_read_when_the_driver_has_just_counted_it() -> None:
    nvml = CountsEnergy(5_000, 12_500, 20_000)
    assert nvml.energy_j("x") == 12.5
    assert nvml.energy_j("x") == 20.0
    assert nvml.energy_j("x") == 20.0  # it has stopped counting, and is not waited for
    assert CountsEnergy(None).energy_j("x") is None


def test_what_the_driver_does_not_know_is_null() -> None:
    found = summarise([sample(1.0, None, cpu_pct=None), sample(1.5, None)], begin_s=0.0, gpu_num=1)
    assert found is not None
    assert found.gpu_utilisation_pct is None and found.power_w is None and found.shared_gpus is None
    assert found.power_cap_pct is None and found.thermal_limit_pct is None
    assert found.cpu_pct == 20.0
    assert summarise([], begin_s=0.0, gpu_num=1) is None


def test_processes_of_others_are_told_from_our_ranks() -> None:
    ours, foreign, elsewhere = {1: True}.get, {1: True, 2: False}.get, {}.get
    assert is_shared([1], ours) is False
    assert is_shared([1, 2], foreign) is True
    assert is_shared([], ours) is False
    # In a container the driver's numbers mean nothing here, but a GPU has one rank of ours at most.
    assert is_shared([4711], elsewhere) is False
    assert is_shared([4711, 4712], elsewhere) is True
    assert is_shared(None, ours) is None


def test_a_gpu_in_use_before_the_first_row_is_a_warning() -> None:
    idle = gpu(pids=[], utilisation_pct=0, used_bytes=1 << 20)
    assert shared_warning(sample(0.0, idle, None)) is None
    for used in ({"pids": [3]}, {"utilisation_pct": 60}, {"used_bytes": 3 << 30}):
        text = shared_warning(sample(0.0, idle, {**idle, **used}))
        assert text is not None and "GPU 1" in text and "GPU 0" not in text
    assert shared_warning(sample(0.0, {**idle, "utilisation_pct": None, "pids": None})) is None


def test_a_machine_without_gpus_says_why() -> None:
    if driver_present():
        pytest.skip("this machine has an NVIDIA driver")
    seen = visible_gpus()
    assert seen.gpus == () and seen.reason == "this machine has no NVIDIA driver"
    nvml = Nvml()
    assert nvml.problem
    assert nvml.facts("x") == nvml.driver_facts() == {}
    assert nvml.sample("x") is None and nvml.processes("x") is None and nvml.energy_j("x") is None
    nvml.close()


class FewProcesses(Nvml):
    """Counts how often it is asked for the processes on a GPU."""

    asked = 0

    def processes(self, uuid: str) -> list[int] | None:
        self.asked += 1
        return [os.getpid()] if uuid == "a" else None


def test_processes_are_listed_once_a_second() -> None:
    nvml = FewProcesses()
    processes = sampler.ProcessList(nvml, ["a", "b"], whose={os.getpid(): True}.get)
    found = [processes.entries() for _ in range(100)]
    assert nvml.asked == 2
    assert found[0] == found[-1] == {
        "a": {"pids": [os.getpid()], "shared": False},
        "b": {"pids": None, "shared": None},
    }  # fmt: skip
    nvml.close()


@pytest.mark.slow
def test_torch_is_asked_in_another_process(tmp_path) -> None:
    seen = visible_gpus(has_driver=lambda: True)
    assert bool(seen.gpus) != bool(seen.reason)
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho it broke >&2\nexit 3\n")
    broken.chmod(0o755)
    seen = visible_gpus(has_driver=lambda: True, python=str(broken))
    assert seen.reason == "torch could not be asked for GPUs: it broke"


def test_the_sampler_imports_no_torch() -> None:
    code = "import sys, zerobench.bench.sampler, zerobench.host.gpus; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert sampler.GPU_INTERVAL_S < sampler.HOST_INTERVAL_S
