"""How far a strategy's gradients and parameters are from the reference's. docs/explain/verification.md says why these
quantities and these tolerances.

Models have billions of parameters, so one pass over the tensors computes every quantity. It takes a part of a
parameter at a time: on a GPU one that needs little of its memory, on the CPU one that fits into the caches."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from zerobench.bench.protocol.job import TensorDeviation
from zerobench.bench.protocol.tolerances import (
    GRADIENT_FLOOR,
    MAX_PIECE_NUM,
    MIN_PIECE_NUMEL,
    PIECE_FLOOR,
    PIECE_SHARE,
    nan_last,
)
from zerobench.bench.rank.evidence import Evidence, Reference, Tensors
from zerobench.bench.rank.replay import optimizer_deviation, sample
from zerobench.errors import VerificationError
from zerobench.strategies.base import OptimizerSettings

_CPU = torch.device("cpu")
_TINY = 1e-30
_ROUNDING = 128 * 2.0**-24  # of a parameter: an update below it is lost in the parameter's own rounding
_CORE_NUMEL = 1 << 16  # a core's cache holds a few tensors of this size
_GPU_NUMEL = 1 << 25  # some 2 GB in all


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Sums, maxima and pieces that one pass over a parameter finds. Squares are sums over its elements."""

    numel: int
    gradient_squares: float
    gradient_error_squares: float
    update_squares: float
    error_squares: float
    moment_squares: float
    max_abs: float
    piece_ratios: torch.Tensor  # (pieces,) median |difference of update| / |update| of each
    piece_mean_squares: torch.Tensor  # (pieces,) of first moments
    optimizer: float


def compare(
    evidence: Evidence,
    reference: Reference,
    *,
    precision: str,
    optimizer: OptimizerSettings,
    device: torch.device = _CPU,
    tick: Callable[[], None] = lambda: None,
) -> TensorDeviation:
    """Compare on ``device``, and call ``tick`` after each part. Raise VerificationError where the two do not hold the
    same parameters."""
    check_names(evidence.parameters, reference.parameters)
    check_names(evidence.gradients, reference.gradients)
    found = {
        name: _pass_over(name, evidence, reference, optimizer=optimizer, device=device, tick=tick)
        for name in reference.parameters
    }
    gradient, gradient_worst = _worst(_gradient_deviations(found, floor=GRADIENT_FLOOR[precision]))
    piece, piece_worst = _worst(_piece_deviations(found, floor=PIECE_FLOOR[precision]))
    own, own_worst = _worst((one.optimizer, name) for name, one in found.items())
    update = sum(one.update_squares for one in found.values())
    return TensorDeviation(
        gradient=gradient,
        gradient_worst=gradient_worst,
        update=math.sqrt(sum(one.error_squares for one in found.values()) / max(update, _TINY)),
        piece=piece,
        piece_worst=piece_worst,
        optimizer=own,
        optimizer_worst=own_worst,
        max_abs=_worst((one.max_abs, name) for name, one in found.items())[0],
    )


def check_names(found: Tensors, expected: Tensors) -> None:
    """Raise VerificationError where names or shapes differ."""
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        raise VerificationError(
            f"parameter names differ from the reference's: missing {missing[:3]}, unknown {extra[:3]}"
        )
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            raise VerificationError(
                f"{name} has shape {tuple(found[name].shape)}, the reference {tuple(tensor.shape)}"
            )


def _pass_over(
    name: str,
    evidence: Evidence,
    reference: Reference,
    *,
    optimizer: OptimizerSettings,
    device: torch.device,
    tick: Callable[[], None],
) -> _Found:
    tensors = (evidence.gradients, evidence.parameters, *reference)
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    max_abs = torch.zeros((), device=device)
    ratios, mean_squares = [torch.empty(0, device=device)], [torch.empty(0, device=device)]
    piece_numel = piece_numel_of(reference.parameters[name].numel())
    for own_gradient, own, gradient, update, parameter, moment in _parts(
        [tensor[name] for tensor in tensors], piece_numel, device
    ):
        error = own - parameter
        sums += torch.stack(
            [squares(each) for each in (gradient, own_gradient - gradient, update, error, moment)]
        )
        error = error.abs()
        max_abs = torch.maximum(max_abs, error.max())
        ratio = error / (update.abs() + _ROUNDING * parameter.abs() + _TINY)
        weight = in_pieces(moment.abs(), piece_numel)
        ratios.append(_typical_ratio(in_pieces(ratio, piece_numel), weight))
        mean_squares.append(weight.square().nanmean(dim=1))
        tick()
    gradient_squares, gradient_error_squares, update_squares, error_squares, moment_squares = sums.tolist()
    own, parameter = sample(evidence.parameters[name]), sample(reference.parameters[name])
    return _Found(
        numel=reference.parameters[name].numel(),
        gradient_squares=gradient_squares,
        gradient_error_squares=gradient_error_squares,
        update_squares=update_squares,
        error_squares=error_squares,
        moment_squares=moment_squares,
        max_abs=float(max_abs),
        piece_ratios=torch.cat(ratios).cpu(),
        piece_mean_squares=torch.cat(mean_squares).cpu(),
        optimizer=optimizer_deviation(
            own,
            parameter - sample(reference.updates[name]),
            [of_step[name] for of_step in evidence.moment_samples],
            optimizer,
        ),
    )


def _parts(
    tensors: Sequence[torch.Tensor], piece_numel: int, device: torch.device
) -> Iterator[list[torch.Tensor]]:
    """Yield the same consecutive elements of each, whole pieces of them, on ``device`` in one dimension."""
    least = torch.get_num_threads() if device.type == "cpu" else 1  # the median of a piece takes one core
    part_numel = piece_numel * max(_numel_at_once(device) // piece_numel, least)
    for parts in zip(*(tensor.reshape(-1).split(part_numel) for tensor in tensors), strict=True):
        if parts[0].numel():  # a tensor of no elements is split into one part
            yield [part.to(device) for part in parts]


def _numel_at_once(device: torch.device) -> int:
    return _GPU_NUMEL if device.type == "cuda" else _CORE_NUMEL * torch.get_num_threads()


def _gradient_deviations(found: Mapping[str, _Found], *, floor: float) -> Iterator[tuple[float, str]]:
    """Yield the relative L2 of each parameter's gradient. One that vanishes (the bias of attention keys has none in
    theory) is held against ``floor`` times the model's root mean square gradient instead of its own noise."""
    mean_square = _mean_square(found.values(), lambda one: one.gradient_squares)
    for name, one in found.items():
        size = max(one.gradient_squares, floor**2 * mean_square * one.numel, _TINY)
        yield math.sqrt(one.gradient_error_squares / size), name


def _piece_deviations(found: Mapping[str, _Found], *, floor: float) -> Iterator[tuple[float, str]]:
    """Yield the deviation of each parameter's worst piece.

    A piece's deviation is the median over its elements of |difference of update| / |update|, counting the half with the
    larger first moments: Adam turns the rounding noise of small gradients into full steps, and a shard that missed one
    update of four moves every element of its pieces by about a quarter. Pieces count that are not quiet beside the
    model and beside their own parameter, and those without any gradient, which decay alone moves."""
    least = floor**2 * _mean_square(found.values(), lambda one: one.moment_squares)
    for name, one in found.items():
        mean_square = one.piece_mean_squares
        typical = mean_square[mean_square > 0].nanmedian()  # NaN where there is none
        counted = (mean_square >= least) & (mean_square >= PIECE_SHARE**2 * typical) | (mean_square == 0)
        if bool(counted.any()):
            yield float(one.piece_ratios[counted].max()), name


def _typical_ratio(ratio: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the (pieces,) medians of ``ratio``, (pieces, elements), over each one's half with the larger ``weight``.
    Overwrites ``ratio``."""
    # NaN parameters are wrong; padding is NaN in weight and drops out below.
    ratio.nan_to_num_(nan=math.inf)
    ratio[~(weight >= weight.nanmedian(dim=1, keepdim=True).values)] = math.nan
    return ratio.nanmedian(dim=1).values


def piece_numel_of(numel: int) -> int:
    return max(MIN_PIECE_NUMEL, -(-numel // MAX_PIECE_NUM))


def in_pieces(flat: torch.Tensor, piece_numel: int) -> torch.Tensor:
    """Return (pieces, consecutive elements of each) of one dimension; the last piece is filled with NaN."""
    piece_num = -(-flat.numel() // piece_numel)
    if piece_num * piece_numel == flat.numel():
        return flat.view(piece_num, piece_numel)
    filled = flat.new_full((piece_num * piece_numel,), math.nan)
    filled[: flat.numel()] = flat
    return filled.view(piece_num, piece_numel)


def _mean_square(found: Collection[_Found], squares_of: Callable[[_Found], float]) -> float:
    """Return the mean over the elements of all."""
    return sum(map(squares_of, found)) / max(sum(one.numel for one in found), 1)


def _worst(deviations: Iterable[tuple[float, str]]) -> tuple[float, str]:
    """Return the largest, and which parameter has it: "" where all are zero."""
    return max([(0.0, ""), *deviations], key=lambda pair: nan_last(pair[0]))


def squares(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of an fp32 tensor's squares, in fp64: a part at a time, which stays in the caches."""
    parts = tensor.reshape(-1).split(_numel_at_once(tensor.device))
    return torch.stack([part.double().square_().sum() for part in parts]).sum()
