"""Peers that zerobench compares on GPUs only, on CPU ranks: too slow to be compared there, and the same code reads and
sets their masters and moments, and watches what their forward reads.

They are named to zerobench by place, such as ``peers_on_cpu:DeepSpeed3`` with this folder on PYTHONPATH and
DS_ACCELERATOR=cpu.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from unittest import mock

from torch import nn

from zerobench.strategies import fsdp1
from zerobench.strategies.base import StrategySettings
from zerobench.strategies.deepspeed import strategy as deepspeed


class OnCpu:
    @classmethod
    def unsupported(cls, settings: StrategySettings) -> str | None:
        return None


class DeepSpeedOnCpu(OnCpu):
    def build(self, model_factory: Callable[[], nn.Module]) -> None:
        from deepspeed.accelerator import get_accelerator

        # DeepSpeed refuses fp16 where the processor has no instructions for it; torch computes it everywhere.
        get_accelerator().is_fp16_supported = lambda: True
        import_muon()
        super().build(model_factory)


def import_muon() -> None:
    """DeepSpeed imports it for its name, and with it a function that is decorated to be compiled: all of inductor, two
    or three seconds of every rank, for what no row calls."""
    with (
        mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"),
        contextlib.suppress(ImportError),  # not every DeepSpeed has it
    ):
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401


class DeepSpeed0(DeepSpeedOnCpu, deepspeed.DeepSpeed0Strategy):
    name = "deepspeed0-on-cpu"


class DeepSpeed1(DeepSpeedOnCpu, deepspeed.DeepSpeed1Strategy):
    name = "deepspeed1-on-cpu"


class DeepSpeed2(DeepSpeedOnCpu, deepspeed.DeepSpeed2Strategy):
    name = "deepspeed2-on-cpu"


class DeepSpeed3(DeepSpeedOnCpu, deepspeed.DeepSpeed3Strategy):
    name = "deepspeed3-on-cpu"


class DeepSpeed3Leaves(DeepSpeedOnCpu, deepspeed.DeepSpeed3LeavesStrategy):
    name = "deepspeed3-leaves-on-cpu"


class FSDP1(OnCpu, fsdp1.FSDP1Strategy):
    name = "fsdp1-on-cpu"
