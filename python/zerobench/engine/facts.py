"""Facts that an engine tells about itself: how its last step went, dtypes, memory, bytes moved, time waited."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerobench._core import Engine as CoreEngine
    from zerobench.engine.placement import Place


STREAMS = ("gather", "reduce", "to_host", "from_host")


class EngineFacts:
    """The part of an engine that answers and changes no parameter."""

    _core: CoreEngine
    _place: Place
    _dtypes: dict[str, str]
    _communicator_bytes: int
    _update_cpus: str | None
    _offload_ratio: float | None
    _stepped: bool

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of the last step's averaged gradient over all parameters and ranks, before clipping.

        None before the first step; not finite when fp16 overflowed. Waits for the device where it is not known yet.
        """
        return self._core.outcome()[1] if self._stepped else None

    def was_step_applied(self) -> bool:
        """False when the last step was skipped because fp16 overflowed. Waits for the device as above."""
        return self._stepped and self._core.outcome()[0]

    def was_step_skipped(self) -> bool:
        """True when the last step was skipped because fp16 overflowed."""
        return self._stepped and not self._core.outcome()[0]

    @property
    def offload_ratio(self) -> float | None:
        """Share of the optimizer state that is off the device; None where none is, and with ``ratio: auto`` until the
        first step has chosen it."""
        return self._offload_ratio

    @property
    def loss_scale(self) -> float:
        """Current loss scale (1 outside fp16)."""
        return self._core.loss_scale

    def loss_scale_state(self) -> dict[str, float] | None:
        """The loss scale and the good steps since it changed, for ``load_full_state``; None outside fp16."""
        state = self._core.loss_scale_state
        return None if state is None else {"scale": state[0], "good_steps": state[1]}

    @property
    def global_steps(self) -> int:
        """Optimizer steps that were applied."""
        return self._core.steps_applied

    def dtypes(self) -> dict[str, str]:
        """Effective dtypes by role: param, compute, reduce, accumulate, master, state."""
        return dict(self._dtypes)

    def memory_bytes(self, *, peak: bool = True) -> dict[str, dict[str, int]]:
        """The ledger: {tier: {category: bytes}} of this rank, each category's peak or (``peak=False``) now.

        On CUDA "communicators" has in it what the device held more after connecting than before, by the driver's
        count."""
        tiers = self._core.ledger.bytes(peak=peak)
        if self._communicator_bytes:
            device = tiers.setdefault("device", {})
            device["communicators"] = device.get("communicators", 0) + self._communicator_bytes
        return tiers

    def communication_bytes(self) -> int:
        """Bytes this rank moved in collectives since ``reset_counters`` (docs/reference/metrics.md)."""
        return sum(self.communication_by_collective().values())

    def communication_by_collective(self) -> dict[str, int]:
        """The same, by collective."""
        return self._core.communication_bytes()

    def swap_stats(self) -> dict[str, Any]:
        """Return what optimizer state on NVMe moved since the engine was made: ``read_bytes``, ``written_bytes``,
        ``wait_s`` (in which updates waited for it), the ``engine`` that moves it, and ``notes`` on what is not as
        configured."""
        return self._core.swap_stats()

    def offload_traffic(self) -> dict[str, int]:
        """Return what offloaded state moved over the device's link since the engine was made: ``to_host_bytes`` and
        ``to_device_bytes``. Waits for updates and transfers of files that are under way."""
        return self._core.store_traffic()

    def offload_waited_ms(self) -> float:
        """Milliseconds that the computing thread was blocked for offloaded updates since the engine was made."""
        return self._core.store_waited_ms()

    def offload_waited_for_files_ms(self) -> float:
        """Milliseconds of ``offload_waited_ms`` in which the updates themselves waited for files."""
        return self._core.store_waited_for_files_ms()

    def offload_pinned(self) -> dict[str, Any]:
        """This rank's host memory for offloaded state: ``requested_bytes``, ``mapped_bytes`` as taken, ``huge_bytes``
        of them in huge pages, and whether a device's driver has it registered (``is_registered``)."""
        return self._core.store_pinned()

    @property
    def update_cpus(self) -> str | None:
        """The threads that update on this rank's CPUs, with those CPUs, their NUMA node and why it is these, in words;
        None where a GPU updates everything."""
        return self._update_cpus

    @property
    def offload_chunk_numel(self) -> int | None:
        """Elements that one stage of the pipeline of offloaded state works on (docs/reference/offload.md); None where
        nothing is offloaded, and with ``ratio: auto`` until the first step."""
        return self._core.store_chunk_numel or None

    @contextlib.contextmanager
    def record_timeline(self) -> Iterator[list[tuple[str, str, str, int, int]]]:
        """Fills the list, at the end of the block, with what updates, transfers and collectives did: (place, what,
        unit, begin, end), in nanoseconds of ``time.perf_counter_ns``. Outside of such blocks nothing is recorded."""
        spans: list[tuple[str, str, str, int, int]] = []
        self._core.start_timeline()
        try:
            yield spans
        finally:
            spans.extend(self._core.stop_timeline())

    def streams(self) -> dict[str, int]:
        """The CUDA streams that the engine owns, next to the caller's: native handles by ``gather``, ``reduce``,
        ``to_host`` and ``from_host``. Empty on CPUs."""
        device = self._place.device
        return {} if device is None else {name: device.stream(name) for name in STREAMS}

    def communication_ms(self) -> float:
        """Milliseconds that the computing thread spent in collectives since ``reset_counters``."""
        return self._core.communication_ms()

    def reset_counters(self) -> None:
        """Zero communication counters and ledger peaks."""
        self._core.reset_counters()

    def units(self) -> list[dict[str, Any]]:
        """The units, the root first: ``name``, ``is_root``, ``gather_bytes``, ``gradient_bytes`` and ``flats``, their
        flat buffers (docs/explain/memory.md): ``parameters`` by name, ``param_dtype``, ``reduce_dtype`` (as gradients
        are reduced: at stages 0 and 1 and on one rank that is ``accumulate_dtype``), ``accumulate_dtype``,
        ``trainable`` and, in elements, ``numel``, ``padded_numel`` and ``shard_numel``. ``is_awaited_early``: whether
        forwards wait for its updates at their beginning, since something once used its parameters before its module was
        called."""
        return self._core.units()
