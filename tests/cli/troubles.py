"""Strategies that go wrong on purpose, named to zerobench as ``troubles:Class`` with this folder on PYTHONPATH.

They train as faulty.PlainDataParallel does until the trouble begins, in the middle of training."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from faulty import PlainDataParallel

from zerobench.strategies.base import Batch, StepResult, StrategySettings
from zerobench.strategies.zero import Zero2Strategy

TROUBLE_STEP = 2  # of each pass, on rank 1


class Troubled(PlainDataParallel):
    name = "troubled"

    def build(self, model_factory) -> None:
        super().build(model_factory)
        self._step_num = 0

    def step(self, micro_batches: Sequence[Batch], *, norm: bool = False) -> StepResult:
        self._step_num += 1
        if self._step_num == TROUBLE_STEP and self.settings.rank == 1:
            self.trouble()
        return super().step(micro_batches, norm=norm)

    def trouble(self) -> None:
        raise NotImplementedError


class OnOneCore(PlainDataParallel):
    """Wrong where its rank is bound to one core."""

    name = "on-one-core"

    def build(self, model_factory) -> None:
        cores = os.sched_getaffinity(0)
        if len(cores) == 1:
            raise RuntimeError(f"bound to {cores}")
        super().build(model_factory)


class Killed(Troubled):
    def trouble(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Raises(Troubled):
    def trouble(self) -> None:
        raise ValueError("the second step is cursed\nand this is the second line")


class Stalls(Troubled):
    def trouble(self) -> None:
        time.sleep(100_000)


class Stopped(Troubled):
    def trouble(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class InTurn(PlainDataParallel):
    """Trains well alone; the trouble begins on rank 1 in the second window of a row that takes turns."""

    name = "in-turn"

    def build(self, model_factory) -> None:
        super().build(model_factory)
        self._settle_num = 0

    def settle(self) -> None:
        """Called once before the measured window of a row alone; in turn before the first window and after each."""
        super().settle()
        self._settle_num += 1

    def step(self, micro_batches: Sequence[Batch], *, norm: bool = False) -> StepResult:
        if self._settle_num == 2 and self.settings.rank == 1:
            self.trouble()
        return super().step(micro_batches, norm=norm)

    def trouble(self) -> None:
        raise NotImplementedError


class KilledInTurn(InTurn):
    trouble = Killed.trouble


class RaisesInTurn(InTurn):
    def trouble(self) -> None:
        raise ValueError("cursed")


class StallsInTurn(InTurn):
    def trouble(self) -> None:
        time.sleep(100_000)


class LongTurn(InTurn):
    """Notes its process in a file of the working folder, and stays in its window."""

    def trouble(self) -> None:
        Path("long-turn.part").write_text(f"{os.getpid()}")
        Path("long-turn.part").rename("long-turn")
        time.sleep(100_000)


class FitsAlone(InTurn):
    """Finds no memory while other rows are alive."""

    def trouble(self) -> None:
        raise MemoryError


class Diverges(PlainDataParallel):
    """Its loss is not finite on rank 1, from the second step on."""

    name = "diverges"

    def build(self, model_factory) -> None:
        super().build(model_factory)
        self._step_num = 0

    def step(self, micro_batches: Sequence[Batch], *, norm: bool = False) -> StepResult:
        self._step_num += 1
        result = super().step(micro_batches, norm=norm)
        if self._step_num < TROUBLE_STEP or self.settings.rank != 1:
            return result
        return dataclasses.replace(result, loss=result.loss * float("nan"))


class LeavesAChild(Troubled):
    """Trains well, and leaves a process behind on every rank."""

    def trouble(self) -> None:
        if os.fork() == 0:
            time.sleep(100_000)


class TakesTooMuchPython(Troubled):
    def trouble(self) -> None:
        bytearray(64 << 30)


class TakesTooMuchTorch(Troubled):
    def trouble(self) -> None:
        torch.empty(64 << 30, dtype=torch.uint8)


class TakesTooMuchDevice(PlainDataParallel):
    """On every rank, in the second step."""

    name = "takes-too-much-device"

    def build(self, model_factory) -> None:
        super().build(model_factory)
        self._held: list[torch.Tensor] = []

    def step(self, micro_batches: Sequence[Batch], *, norm: bool = False) -> StepResult:
        self._held.append(
            torch.empty(8 << 30, dtype=torch.uint8, device=micro_batches[0]["input_ids"].device)
        )
        if len(self._held) == TROUBLE_STEP:
            self._held.append(torch.empty(1 << 46, dtype=torch.uint8, device=self._held[0].device))
        return super().step(micro_batches, norm=norm)


class NeedsWhatIsNotThere(PlainDataParallel):
    name = "needs"

    @classmethod
    def unsupported(cls, settings: StrategySettings) -> str | None:
        return "needs a machine that this is not"


class Swaps(Zero2Strategy):
    """Our own engine with state in files: many chunks even of a small model, few frames."""

    name = "swaps"
    LIMIT_BYTES = 16 << 10

    def build(self, model_factory) -> None:
        swap = {"chunk_numel": 128, "io_block_bytes": 4096, "io_depth": 1, "io_allow_fallback": True}
        self.settings = dataclasses.replace(self.settings, options={"offload_optimizer": swap})
        super().build(model_factory)

    def fill_the_disk(self) -> None:
        """As a full disk does, this lets rank 1's files begin and not go on."""
        if self.settings.rank == 1:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.LIMIT_BYTES, hard))


class FullAtStart(Swaps):
    def build(self, model_factory) -> None:
        self.fill_the_disk()
        super().build(model_factory)


class FullInASwap(Swaps):
    def build(self, model_factory) -> None:
        super().build(model_factory)
        self._step_num = 0

    def step(self, micro_batches: Sequence[Batch], *, norm: bool = False) -> StepResult:
        self._step_num += 1
        if self._step_num == TROUBLE_STEP:
            self.fill_the_disk()
        return super().step(micro_batches, norm=norm)


class HalvedZero2(Zero2Strategy):
    """Our own engine, fed with half of one parameter's gradient."""

    name = "halved-zero2"

    def build(self, model_factory) -> None:
        super().build(lambda **where: halve_a_gradient(model_factory()))


def halve_a_gradient(model: torch.nn.Module) -> torch.nn.Module:
    parameters = list(model.parameters())
    parameters[len(parameters) // 2].register_hook(lambda gradient: gradient / 2)
    return model


class Slow(PlainDataParallel):
    name = "slow"

    def step(self, micro_batches: Sequence[Batch], *, norm: bool = False) -> StepResult:
        print("a slow step")
        time.sleep(0.5)
        return super().step(micro_batches, norm=norm)
