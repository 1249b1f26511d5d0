"""A process beside the ranks that notes what GPUs, CPUs and memory do, a few times a second, as JSON lines in a file.

It is a process, so that it takes no time of any rank; it reads the driver's and the kernel's own counters, and what
they do not give is null. Run as a module, this is that process. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from zerobench.bench.busy import OtherUse
from zerobench.host.cpu_use import CpuUse
from zerobench.host.machine import memory_used_bytes
from zerobench.host.nvml import Nvml
from zerobench.host.processes import child_environment, die_with_parent, name_process
from zerobench.results.schema import Sampled
from zerobench.results.sizes import GIB

# A reading keeps the driver busy for a few ms; so seldom that a median of steps does not know of it.
GPU_INTERVAL_S = 0.25
PROCESSES_INTERVAL_S = 1.0
HOST_INTERVAL_S = 0.5
REACH_S = 10.0  # before a window, in which there is a reading of CPU times however late the sampler is
DRIVER_PERIOD_S = 0.2  # the driver's utilisation covers about this long before it is read
POWER_PERIOD_S = 1.0  # and its power, from Ampere on (but for A100)
BUSY_PCT = 10
HELD_BYTES = GIB

Sample = dict[str, Any]


class Sampler:
    """Owns the process. ``uuids``: the GPUs to watch, in torch's order; none of them is a host without GPUs."""

    def __init__(self, path: Path, *, uuids: Sequence[str] = ()) -> None:
        self.path = path
        self._uuids = uuids
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Sampler:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "zerobench.bench.sampler", str(self.path), *self._uuids],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            start_new_session=True,  # Ctrl-C reaches the command only
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def between(self, begin_s: float, end_s: float) -> list[Sample]:
        """Samples by time.time(); none where the process could not write."""
        samples = []
        with contextlib.suppress(OSError), self.path.open() as file:
            for line in file:
                with contextlib.suppress(ValueError):  # the last line may be under way
                    sample = json.loads(line)
                    if begin_s <= sample["time_s"] <= end_s:
                        samples.append(sample)
        return samples

    def around(self, begin_s: float, end_s: float) -> list[Sample]:
        """Samples of a window, and those before and after it that hold CPU times. Waits a moment for the latter."""
        deadline_s = time.monotonic() + 4 * HOST_INTERVAL_S
        while True:
            samples = self.between(begin_s - REACH_S, float("inf"))
            is_over = any(sample["time_s"] >= end_s and sample.get("cpu_times") for sample in samples)
            is_running = self._process is not None and self._process.poll() is None
            if is_over or not is_running or time.monotonic() > deadline_s:
                return samples
            time.sleep(0.05)

    def first(self) -> Sample | None:
        """Return the first sample, taken before anything of this command ran; None until it exists."""
        found = self.between(0.0, float("inf"))
        return found[0] if found else None


def summarise(
    samples: Sequence[Sample], *, begin_s: float, gpu_num: int, others: OtherUse | None = None
) -> Sampled | None:
    """A row's figures over its first ``gpu_num`` GPUs, from the samples of its measured window."""
    if not samples:
        return None
    by_gpu = [[sample["gpus"][gpu] for sample in samples if sample["gpus"][gpu]] for gpu in range(gpu_num)]
    gpus = [entry for entries in by_gpu for entry in entries]

    def settled(period_s: float) -> list[dict[str, Any]]:
        """Without the first readings, which are still about the time before the window."""
        within = [sample["gpus"] for sample in samples if sample["time_s"] >= begin_s + period_s]
        return [entries[gpu] for entries in within for gpu in range(gpu_num) if entries[gpu]]

    powers = settled(POWER_PERIOD_S)
    shared = [gpu for gpu, entries in enumerate(by_gpu) if any(entry["shared"] for entry in entries)]
    return Sampled(
        sample_num=len(samples),
        gpu_utilisation_pct=_over(fmean, settled(DRIVER_PERIOD_S), "utilisation_pct"),
        gpu_used_peak_bytes=_over(max, gpus, "used_bytes"),
        power_w=_over(fmean, powers, "power_w"),
        power_peak_w=_over(max, powers, "power_w"),
        sm_clock_mhz=_over(fmean, gpus, "sm_clock_mhz"),
        sm_clock_min_mhz=_over(min, gpus, "sm_clock_mhz"),
        memory_clock_mhz=_over(fmean, gpus, "memory_clock_mhz"),
        temperature_peak_c=_over(max, gpus, "temperature_c"),
        power_cap_pct=_limited_pct(gpus, "power_cap"),
        thermal_limit_pct=_limited_pct(gpus, "thermal"),
        other_limit_pct=_limited_pct(gpus, "other"),
        # A reading is since the sample before it; the first one's began before the window.
        cpu_pct=_over(fmean, samples[1:], "cpu_pct"),
        other_cpu_pct=None if others is None else others.pct,
        host_used_peak_bytes=_over(max, samples, "host_used_bytes"),
        shared_gpus=shared if any(entry["shared"] is not None for entry in gpus) else None,
    )


def _over(function: Callable[[list[Any]], Any], entries: Sequence[dict[str, Any]], key: str) -> Any:
    values = [entry[key] for entry in entries if entry[key] is not None]
    return function(values) if values else None


def _limited_pct(entries: Sequence[dict[str, Any]], limit: str) -> float | None:
    known = [entry["limited_by"] for entry in entries if entry["limited_by"] is not None]
    return 100.0 * sum(limit in limits for limits in known) / len(known) if known else None


def shared_warning(sample: Sample) -> str | None:
    """A sentence when GPUs are in use before anything of this command runs."""
    texts = []
    for gpu, entry in enumerate(sample["gpus"]):
        if entry is None:
            continue
        used, busy = entry["used_bytes"] or 0, entry["utilisation_pct"] or 0
        if entry["pids"] or used > HELD_BYTES or busy > BUSY_PCT:
            texts.append(f"GPU {gpu} ({used / GIB:.1f} GiB in use, {busy} % busy)")
    if not texts:
        return None
    return (
        f"another process uses {', '.join(texts)}: its work slows rows and its memory is counted as theirs; "
        "end it or choose other GPUs with CUDA_VISIBLE_DEVICES"
    )


def is_shared(pids: Sequence[int] | None, whose: Callable[[int], bool | None]) -> bool | None:
    """Return whether processes other than a rank of ours use a GPU. ``whose`` tells if a process is ours, and returns
    None for one outside this namespace of process ids. If all are outside, at most one of those on a GPU is ours."""
    if pids is None:
        return None
    known = [whose(pid) for pid in pids]
    if all(one is None for one in known):
        return len(pids) > 1
    return any(one is False for one in known)


class ProcessList:
    """Who is on the GPUs, asked for once a second and remembered in between."""

    def __init__(self, nvml: Nvml, uuids: Sequence[str], *, whose: Callable[[int], bool | None]) -> None:
        self._nvml = nvml
        self._uuids = uuids
        self._whose = whose
        self._next_s = 0.0
        self._found: dict[str, dict[str, Any]] = {}

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return by GPU: "pids", None if the driver does not list them, and "shared", whether a process is not ours."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + PROCESSES_INTERVAL_S
            for uuid in self._uuids:
                pids = self._nvml.processes(uuid)
                self._found[uuid] = {"pids": pids, "shared": is_shared(pids, self._whose)}
        return self._found


class CpuReadings:
    """CPU time of others, read twice a second, since it takes a look at every process."""

    def __init__(self, command: int) -> None:
        self.use = CpuUse(command)
        self._next_s = 0.0

    def due(self) -> Sample | None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + 0.9 * HOST_INTERVAL_S
        try:
            return self.use.read()._asdict()
        except OSError:  # a kernel that does not show them
            return None


def take_sample(nvml: Nvml, processes: ProcessList, cpus: CpuReadings, uuids: Sequence[str]) -> Sample:
    read_s, cpu_times = time.time(), cpus.due()  # before GPUs' processes, which it tells apart
    on_gpus = processes.entries()
    gpus: list[dict[str, Any] | None] = []
    for uuid in uuids:
        entry = nvml.sample(uuid)
        gpus.append(None if entry is None else {**entry, **on_gpus[uuid]})
    return {
        "time_s": round(read_s, 3),
        "cpu_pct": _cpu_pct(),
        "cpu_times": cpu_times,
        "host_used_bytes": memory_used_bytes(),
        "gpus": gpus,
    }


def _cpu_pct() -> float | None:
    """Return the CPU use since the last call, in percent of all cores of the host; None without psutil."""
    try:
        import psutil  # type: ignore[import-untyped]
    except ImportError:
        return None
    return float(psutil.cpu_percent())


def main() -> None:
    path, *uuids = sys.argv[1:]
    command = os.getppid()
    die_with_parent(signal.SIGTERM)
    name_process("zerobench-smpl")
    os.nice(5)
    nvml = Nvml()
    _cpu_pct()  # from now on
    cpus = CpuReadings(command)
    processes = ProcessList(nvml, uuids, whose=cpus.use.is_own)
    interval_s = GPU_INTERVAL_S if uuids and nvml.problem is None else HOST_INTERVAL_S
    with Path(path).open("a") as file:
        while os.getppid() == command:
            start_s = time.monotonic()
            file.write(json.dumps(take_sample(nvml, processes, cpus, uuids)) + "\n")
            file.flush()
            time.sleep(max(interval_s - (time.monotonic() - start_s), 0.01))


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # a full disk: rows then have no samples
        main()
