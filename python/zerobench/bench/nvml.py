"""What NVIDIA's driver says about GPUs, through nvidia-ml-py. Whatever cannot be had is None. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MILLIWATTS = 1000


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
        """What does not change while rows run; ``uuid`` as torch writes it."""
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
        }

    def sample(self, uuid: str) -> dict[str, Any] | None:
        """What it does now; None where the driver does not know the GPU."""
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
        }

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
        return None if milliwatts is None else milliwatts / _MILLIWATTS

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


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
