"""DeepCompile: DeepSpeed ZeRO-3 whose all-gathers, releases and reductions are put into the compiled graphs by passes.

DeepSpeed's default schedule adds prefetching and selective unsharding (keeping gathered what memory allows) after five
steps. Here each combination is a row, and passes come after two steps: what they plan by (profiles of the graphs, the
memory of the optimizer's states) is there then, and the recompilation falls into the warm-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from zerobench.strategies.base import Batch, StrategySettings
from zerobench.strategies.deepspeed.strategy import DeepSpeedStrategy
from zerobench.strategies.requirements import HOST_TOOLS, Tools, abandoned_build, missing_compiler

_PASSES_FROM_STEP = 2


class DeepCompile3Strategy(DeepSpeedStrategy):
    """Gather and release at each use only."""

    name = "deepcompile3"
    stage = 3
    deepcompile = True
    prefetches: ClassVar[bool] = False
    unshards_selectively: ClassVar[bool] = False

    @classmethod
    def unplaced(cls, settings: StrategySettings, *, tools: Tools = HOST_TOOLS) -> str | None:
        if settings.offload != "none":
            return (
                "DeepCompile is compared with all state on the GPU: use deepspeed1, deepspeed2 or deepspeed3"
            )
        return super().unplaced(settings, tools=tools)

    @classmethod
    def unsupported(cls, settings: StrategySettings, *, tools: Tools = HOST_TOOLS) -> str | None:
        if settings.compile == "block":
            return "DeepCompile compiles the model as a whole: use --compile whole or remove it"
        what = "DeepCompile's operator"
        return (
            super().unsupported(settings, tools=tools)
            or missing_compiler(what, tools=tools)
            or abandoned_build(what, "dc", tools=tools)
        )

    def _compile(self) -> None:
        from deepspeed.compile.passes import prefetch, selective_gather, zero3_compile

        schedule: list[tuple[int, list[str]]] = [(0, [zero3_compile.NAME])]
        passes = [zero3_compile.NAME]
        if self.prefetches:
            passes.append(prefetch.NAME)
        if self.unshards_selectively:
            passes.append(selective_gather.NAME)
        if len(passes) > 1:
            schedule.append((_PASSES_FROM_STEP, passes))
        self._engine.compile(schedule=schedule)

    def evaluate(self, batches: Sequence[Batch]) -> None:
        """Graphs without a backward are no part of what DeepCompile's passes plan for, so it does not evaluate."""
        return None

    def communication_bytes(self) -> None:
        """Its operators have an NCCL communicator of their own, which torch's recorder does not see."""
        return None

    def compiled_graphs(self) -> float | None:
        return None  # DeepCompile's backend is its own

    def close(self) -> None:
        from deepspeed.compile import util

        super().close()
        # They belong to the process, and refer to this engine's optimizer.
        util.pre_backward_hooks.clear()
        util.post_backward_hooks.clear()


class DeepCompile3PrefetchStrategy(DeepCompile3Strategy):
    name = "deepcompile3_prefetch"
    prefetches = True


class DeepCompile3SelectiveStrategy(DeepCompile3Strategy):
    name = "deepcompile3_selective"
    unshards_selectively = True


class DeepCompile3BothStrategy(DeepCompile3Strategy):
    """DeepSpeed's own default."""

    name = "deepcompile3_both"
    prefetches = True
    unshards_selectively = True
