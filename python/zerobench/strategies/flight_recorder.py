"""Bytes that torch.distributed's collectives moved, read from torch's flight recorder. It records the collectives of
every process group, also those that a peer calls from C++, and is on after `switch_recorder_on` was called
(https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html)."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # two recorders in some versions, one in others
_LENGTHS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # in the environment; 0 switches it off
_ITEM_BYTES = {
    "Byte": 1, "Char": 1, "Bool": 1, "Half": 2, "BFloat16": 2, "Short": 2, "Int": 4, "Float": 4, "Long": 8, "Double": 8,
}  # fmt: skip
# What a recorded name ("nccl:_reduce_scatter_base", "gloo:all_reduce", "nccl:ALLGATHER_coalesced") contains, by its
# letters alone; the first that fits.
_COLLECTIVES = {
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
}


def switch_recorder_on() -> None:
    """Before a process's first process group: give the recorder torch's usual length, unless the environment has one.
    Without one torch 2.9 records nothing of gloo, torch 2.11 and later do."""
    if not any(name in os.environ for name in _LENGTHS):
        os.environ[_LENGTHS[0]] = "2000"


class StepTraffic:
    """Traffic of the latest step, which stands for all since ``reset``: the recorder holds some two thousand
    collectives."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._step_num = 0
        self._began_ns = 0

    def begin_step(self) -> None:
        self._step_num += 1
        self._began_ns = time.time_ns()

    def moved_bytes(self) -> dict[str, int] | None:
        """Return the bytes moved since ``reset``, by collective, by the accounting of docs/reference/metrics.md. None
        if nothing is recorded, or the recorder no longer reaches back to the beginning of the step."""
        if dist.get_world_size() == 1:
            return {}
        entries, rank_nums = recorded()
        step = [entry for entry in entries if entry["time_created_ns"] >= self._began_ns]
        if not step or len(step) == len(entries):  # what was recorded while building is forgotten first
            return None
        try:
            moved = moved_bytes(step, rank_nums)
        except KeyError:  # a dtype of few bits, or a recorder of another torch
            return None
        return {name: self._step_num * step_bytes for name, step_bytes in moved.items()}


def recorded() -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Collectives of this process, oldest first, and the number of ranks of each process group by name."""
    entries: dict[tuple[int, int], dict[str, Any]] = {}
    rank_nums = {}
    for name in _DUMPS:
        if hasattr(c10d, name):
            found = json.loads(getattr(c10d, name)(includeCollectives=True, onlyActive=False))
            for entry in found.get("entries", []):
                entries[entry["time_created_ns"], entry["record_id"]] = entry
            for group, config in found.get("pg_config", {}).items():
                rank_nums[group] = len(json.loads(config["ranks"]))
    return [entries[key] for key in sorted(entries)], rank_nums


def moved_bytes(entries: Sequence[Mapping[str, Any]], rank_nums: Mapping[str, int]) -> dict[str, int]:
    """Bytes that a rank moves, by collective. A group that is not in ``rank_nums`` (gloo's have no name there) is taken
    for the whole world."""
    moved: Counter[str] = Counter()
    for entry in entries:
        collective = _collective(entry["profiling_name"])
        if collective is None:
            continue
        rank_num = rank_nums.get(entry["process_group"][0]) or dist.get_world_size()
        full_bytes = max(_bytes(entry, "input"), _bytes(entry, "output"))
        moved[collective] += _rank_bytes(collective, full_bytes, rank_num)
    return {name: rank_bytes for name, rank_bytes in moved.items() if rank_bytes}


def _rank_bytes(collective: str, full_bytes: int, rank_num: int) -> int:
    if rank_num == 1:
        return 0
    if collective in ("broadcast", "reduce"):
        return full_bytes
    passes = 2 if collective == "all_reduce" else 1
    return passes * (rank_num - 1) * full_bytes // rank_num


def _collective(recorded_name: str) -> str | None:
    letters = "".join(letter for letter in recorded_name.partition(":")[2].lower() if letter.isalpha())
    if "barrier" in letters:
        return None
    return next((name for word, name in _COLLECTIVES.items() if word in letters), None)


def _bytes(entry: Mapping[str, Any], side: str) -> int:
    shapes, dtypes = entry[f"{side}_sizes"], entry[f"{side}_dtypes"]
    return sum(math.prod(shape) * _ITEM_BYTES[dtype] for shape, dtype in zip(shapes, dtypes, strict=True))
