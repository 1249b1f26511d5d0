"""Parts that the benchmarks of Adam share: sizes, dtypes, arrays, the peers' steps, and the comparison of results.

torch is imported when arrays are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from zerobench.errors import ConfigError, Error
from zerobench.micro.checks import check_repeats
from zerobench.micro.output import size_text
from zerobench.micro.sampling import Call

ADAM, TORCH, DEEPSPEED = "adam", "torch", "deepspeed"
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
CHECK_STEPS = 3
CHECK_FACTOR = 0.37  # on the gradients of the check


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Dtypes of one step."""

    gradient: str
    low_precision: str | None
    remainders: bool = False  # for masters, of which the copy in low precision is the other half

    @property
    def text(self) -> str:
        short = {"float32": "fp32", "bfloat16": "bf16", None: "none"}
        text = f"{short[self.gradient]} / {short[self.low_precision]}"
        return f"{text}, remainders" if self.remainders else text


MIXES = (
    Mix(gradient="float32", low_precision=None),
    Mix(gradient="float32", low_precision="bfloat16"),
    Mix(gradient="bfloat16", low_precision="bfloat16"),
)


@dataclass(frozen=True, kw_only=True)
class AdamSizes:
    """Elements of a step. Each size is four times the one before it."""

    min_numel: int
    max_numel: int
    repeats: int

    def check(self) -> None:
        if not 1 <= self.min_numel <= self.max_numel:
            raise ConfigError(
                f"--min-numel {self.min_numel} and --max-numel {self.max_numel} are not a range: give 1 <= min <= max"
            )
        check_repeats(self.repeats)

    def sizes_within(self, free_bytes: int, *, bytes_per_element: int, notes: Console) -> list[int]:
        """Return the sizes that fit into half of what is free, and name the others in the notes."""
        sizes = [self.min_numel]
        while sizes[-1] * 4 <= self.max_numel:
            sizes.append(sizes[-1] * 4)
        if sizes[-1] != self.max_numel:
            sizes.append(self.max_numel)
        most = free_bytes // 2 // bytes_per_element
        for size in sizes:
            if size > most:
                needed = size_text(size * bytes_per_element)
                notes.print(
                    f"left out: {size} elements need {needed}, more than half of the free memory",
                    style="yellow",
                )
        if self.min_numel > most:
            raise Error(f"no size fits into memory: give --min-numel below {self.min_numel}")
        return [size for size in sizes if size <= most]


class Arrays:
    """One flat shard: what a step reads and writes."""

    def __init__(self, numel: int, mix: Mix, *, device: str = "cpu") -> None:
        import torch

        def empty(dtype: str) -> Any:
            return torch.empty(numel, dtype=getattr(torch, dtype), device=device)

        self.mix = mix
        self.master, self.exp_avg, self.exp_avg_sq = (empty("float32") for _ in range(3))
        self.gradient = empty(mix.gradient)
        self.low_precision = None if mix.low_precision is None else empty(mix.low_precision)
        self.fill()

    def fill(self) -> None:
        """Ordinary values that many steps and streams keep ordinary."""
        for tensor, value in (
            (self.master, 0.5),
            (self.exp_avg, 1e-3),
            (self.exp_avg_sq, 1e-4),
            (self.gradient, 1e-3),
            (self.low_precision, 0.5),
        ):
            if tensor is not None:
                tensor.fill_(value)

    def fill_hard(self) -> None:
        """Random magnitudes with denormals, infinities, NaN and zeros among them."""
        import torch

        generator = torch.Generator().manual_seed(0)
        numel = self.master.numel()
        for tensor in (self.master, self.exp_avg, self.exp_avg_sq, self.gradient):
            values = torch.randn(numel, generator=generator)
            for offset, special in enumerate((0.0, -0.0, 1e-40, 3e38, float("inf"), float("nan"), 1e-20)):
                values[offset * 13 :: 997] = special
            tensor.copy_(values.abs_() if tensor is self.exp_avg_sq else values)

    def copy(self) -> Arrays:
        """Outputs of their own; the gradient, which a step leaves as it is, is shared."""
        result = object.__new__(Arrays)
        result.mix, result.gradient = self.mix, self.gradient
        result.master, result.exp_avg, result.exp_avg_sq = (
            tensor.clone() for tensor in (self.master, self.exp_avg, self.exp_avg_sq)
        )
        result.low_precision = None if self.low_precision is None else self.low_precision.clone()
        return result

    def runner(self, core: Any, hyperparameters: Any) -> Any:
        return core.AdamRunner(
            master=self.master,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            gradient=self.gradient,
            low_precision=self.low_precision,
            hyperparameters=hyperparameters,
        )

    def outputs(self) -> Iterator[Any]:
        yield from (self.master, self.exp_avg, self.exp_avg_sq)
        if self.low_precision is not None:
            yield self.low_precision


def differing_num(actual: Arrays, expected: Arrays) -> int:
    """Elements whose bits differ after some steps; any NaN equals any NaN."""
    import torch

    differing = 0
    for got, wanted in zip(actual.outputs(), expected.outputs(), strict=True):
        words = torch.int32 if wanted.dtype == torch.float32 else torch.int16
        found = got.to(wanted.device)
        differs = found.view(words) != wanted.view(words)
        differing += int((differs & ~(found.isnan() & wanted.isnan())).sum())
    return differing


def torch_step(arrays: Arrays) -> Call:
    """torch's fused AdamW with the same inputs and outputs."""
    import torch

    parameter = torch.nn.Parameter(arrays.master.clone())
    optimizer = torch.optim.AdamW(
        [parameter], lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )
    return step_with_casts(arrays, parameter, optimizer)


def deepspeed_step(arrays: Arrays) -> Call:
    """DeepSpeed's CPU Adam with the same inputs and outputs. Its operator is compiled at the first use; raises
    RuntimeError where that fails, ImportError where it is not installed."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(arrays.master.clone())
    optimizer = DeepSpeedCPUAdam(
        [parameter], lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
    )
    return step_with_casts(arrays, parameter, optimizer)


def step_with_casts(arrays: Arrays, parameter: Any, optimizer: Any) -> Call:
    """One step of an optimizer of float32; casts are part of it where a dtype is another one."""
    import torch

    gradient, low_precision = arrays.gradient, arrays.low_precision
    parameter.grad = gradient if gradient.dtype == torch.float32 else gradient.float()
    low_copy = None if low_precision is None else torch.empty_like(low_precision)

    def step() -> None:
        if parameter.grad is not gradient:
            parameter.grad.copy_(gradient)
        optimizer.step()
        if low_copy is not None:
            low_copy.copy_(parameter.detach())

    return step
