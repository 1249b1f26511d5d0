"""Readings of GPUs from NVIDIA's driver, through nvidia-ml-py. A value that cannot be read is None. Imports no
torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_MILLI = 1000
_ENERGY_PERIOD_S = 0.15  # the driver counts energy anew every 20 to 100 ms
# Bits of nvml.h. The package has had two names for each and, in its older versions, none for some.
_HW_SLOWDOWN, _HW_THERMAL = 0x8, 0x40
_CLOCK_LIMITS = {
    "power_cap": 0x4,
    "thermal": 0x20 | _HW_THERMAL,
    # Clocks set by hand, a slowdown of the hardware, sync boost, a power brake, a display's clocks, the board.
    "other": 0x2 | _HW_SLOWDOWN | 0x10 | 0x80 | 0x100 | 0x200,
}


class Nvml:
    """The driver's management library, open until ``close``. ``problem`` says why there is none."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self._library: Any = None
        self._handles: dict[str, Any] = {}
        try:
            import pynvml  # type: ignore[import-untyped]
        except ImportError:
            self.problem = "nvidia-ml-py is not installed"
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.problem = str(error)
            return
        self._library = pynvml

    def close(self) -> None:
        if self._library is not None:
            self._ask("nvmlShutdown")
            self._library = None

    def driver_facts(self) -> dict[str, Any]:
        """Versions of the driver and of the CUDA that it serves."""
        if self._library is None:
            return {}
        version = self._ask("nvmlSystemGetCudaDriverVersion")
        return {
            "driver": self._ask("nvmlSystemGetDriverVersion"),
            "cuda": None if version is None else f"{version // 1000}.{version % 1000 // 10}",
        }

    def facts(self, uuid: str) -> dict[str, Any]:
        """Return the facts of a GPU that do not change while rows run; ``uuid`` as torch writes it."""
        handle = self._handle(uuid)
        if handle is None:
            return {}
        library = self._library

        def first(values: Any) -> Any:
            return values[0] if isinstance(values, (list, tuple)) else values

        def on(value: Any) -> bool | None:
            return None if value is None else bool(value)

        pci = self._ask("nvmlDeviceGetPciInfo", handle)
        return {
            "pci_bus_id": None if pci is None else _text(pci.busId),
            "power_limit_w": self._watts("nvmlDeviceGetEnforcedPowerLimit", handle),
            "power_limit_default_w": self._watts("nvmlDeviceGetPowerManagementDefaultLimit", handle),
            "sm_clock_max_mhz": self._ask("nvmlDeviceGetMaxClockInfo", handle, library.NVML_CLOCK_SM),
            "memory_clock_max_mhz": self._ask("nvmlDeviceGetMaxClockInfo", handle, library.NVML_CLOCK_MEM),
            "persistence_mode": on(self._ask("nvmlDeviceGetPersistenceMode", handle)),
            "ecc": on(first(self._ask("nvmlDeviceGetEccMode", handle))),
            "mig": on(first(self._ask("nvmlDeviceGetMigMode", handle))),
            "nvlinks_active": self._active_links(handle),
            "pcie_width": self._ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            "pcie_width_max": self._ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
            # The link's own generation falls while it is idle, so that of now is left out.
            "pcie_generation_max": self._ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            "pcie_generation_of_gpu": self._ask("nvmlDeviceGetGpuMaxPcieLinkGeneration", handle),
        }

    def sample(self, uuid: str) -> dict[str, Any] | None:
        """Return the present state of a GPU; None if the driver does not know the GPU."""
        handle = self._handle(uuid)
        if handle is None:
            return None
        library = self._library
        rates = self._ask("nvmlDeviceGetUtilizationRates", handle)
        memory = self._memory(handle)
        return {
            "utilisation_pct": None if rates is None else int(rates.gpu),
            "used_bytes": None if memory is None else int(memory.used),
            "power_w": self._watts("nvmlDeviceGetPowerUsage", handle),
            "sm_clock_mhz": self._ask("nvmlDeviceGetClockInfo", handle, library.NVML_CLOCK_SM),
            "memory_clock_mhz": self._ask("nvmlDeviceGetClockInfo", handle, library.NVML_CLOCK_MEM),
            "temperature_c": self._ask("nvmlDeviceGetTemperature", handle, library.NVML_TEMPERATURE_GPU),
            "limited_by": self._clock_limits(handle),
        }

    def energy_j(self, uuid: str) -> float | None:
        """Return the energy that a GPU has taken since the driver was loaded, waiting for the driver's next count; None
        if it is not counted."""
        handle = self._handle(uuid)
        if handle is None:
            return None
        deadline_s = time.monotonic() + _ENERGY_PERIOD_S
        first = found = self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        while found is not None and found == first and time.monotonic() < deadline_s:
            time.sleep(0.001)
            found = self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        return None if found is None else found / _MILLI

    def processes(self, uuid: str) -> list[int] | None:
        """Ids of the processes that compute on it."""
        handle = self._handle(uuid)
        found = None if handle is None else self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
        return None if found is None else [int(process.pid) for process in found]

    def _handle(self, uuid: str) -> Any:
        if self._library is None:
            return None
        if uuid not in self._handles:
            found = None
            for prefix in ("GPU-", "MIG-"):
                found = found or self._ask("nvmlDeviceGetHandleByUUID", prefix + uuid)
            self._handles[uuid] = found
        return self._handles[uuid]

    def _memory(self, handle: Any) -> Any:
        """Version 2 keeps apart what the driver itself reserves."""
        version = getattr(self._library, "nvmlMemory_v2", None)
        found = None if version is None else self._ask("nvmlDeviceGetMemoryInfo", handle, version)
        return found or self._ask("nvmlDeviceGetMemoryInfo", handle)

    def _watts(self, name: str, handle: Any) -> float | None:
        milliwatts = self._ask(name, handle)
        return None if milliwatts is None else milliwatts / _MILLI

    def _clock_limits(self, handle: Any) -> list[str] | None:
        """Return what keeps the clocks below the highest, by the names of _CLOCK_LIMITS."""
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if bits is None:  # a driver that knows the call by its former name alone
            bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return None if bits is None else clock_limits(int(bits))

    def _active_links(self, handle: Any) -> int | None:
        """NVLinks that are up; None where the GPU has none."""
        states = [
            self._ask("nvmlDeviceGetNvLinkState", handle, link)
            for link in range(self._library.NVML_NVLINK_MAX_LINKS)
        ]
        known = [state for state in states if state is not None]
        return sum(known) if known else None

    def _ask(self, name: str, *arguments: Any) -> Any:
        """The answer, or None: not supported by this GPU, forbidden here, or unknown to an older driver."""
        function: Callable[..., Any] | None = getattr(self._library, name, None)
        if function is None:
            return None
        try:
            return _text(function(*arguments))
        except self._library.NVMLError:
            return None


def clock_limits(bits: int) -> list[str]:
    """The driver's reasons for the clocks of a GPU, grouped; idleness and the silicon's own limit are none."""
    if bits & _HW_THERMAL:
        bits &= ~_HW_SLOWDOWN  # the same, said once more
    return [name for name, mask in _CLOCK_LIMITS.items() if bits & mask]


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
