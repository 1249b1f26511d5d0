"""The verification pass inside a rank: a few deterministic steps whose gradients and updates are compared with the
reference's. docs/explain/verification.md says why these quantities and these tolerances."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.serialization import config as serialization

from zerobench.bench.protocol.job import TensorDeviation, Verification
from zerobench.bench.protocol.tolerances import (
    GRADIENT_FLOOR,
    MAX_PIECE_NUM,
    MIN_PIECE_NUMEL,
    PIECE_FLOOR,
    PIECE_SHARE,
    VERIFY_STEPS,
    nan_last,
)
from zerobench.bench.rank.reads import WorstRead, watched
from zerobench.bench.rank.replay import optimizer_deviation, sample
from zerobench.errors import Error, VerificationError
from zerobench.results.sizes import MIB
from zerobench.strategies.base import Batch, ModelFactory, OptimizerSettings, Strategy, StrategySettings
from zerobench.strategies.shared import checksum

Tensors = Mapping[str, torch.Tensor]
BatchesOfStep = Callable[[int], Sequence[Batch]]

_MAX_SKIPPED = 40  # a loss scale of 2**16 halves to one in 16 overflows
_TINY = 1e-30
_ROUNDING = 128 * 2.0**-24  # of a parameter: an update below it is lost in the parameter's own rounding
_DEVICE_SHARE = 0.1  # of what is free; seven sets of tensors are compared


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Results of a strategy's short deterministic run."""

    loss: float  # this rank's mean, step 1
    norm: float | None  # global, before clipping, step 1
    gradients: Tensors  # full, averaged, unclipped, step 1
    parameters: Tensors  # full, after VERIFY_STEPS
    moments: Tensors  # full exp_avg, after VERIFY_STEPS
    moment_samples: Sequence[Tensors]  # of each step
    # The following of a held-out batch after VERIFY_STEPS; None where a peer cannot evaluate or be watched.
    evaluation: float | None = None
    read: WorstRead | None = None
    loss_dtype: str | None = None


class Reference(NamedTuple):
    gradients: Tensors
    updates: Tensors  # parameters after VERIFY_STEPS less the first ones
    parameters: Tensors
    moments: Tensors


class OnDevice(Mapping[str, torch.Tensor]):
    """Tensors that move to a device one by one, each time that they are looked at. ``tick`` hears of each."""

    def __init__(self, tensors: Tensors, device: torch.device, tick: Callable[[], None]) -> None:
        self.where_they_are, self._device, self._tick = tensors, device, tick

    def __getitem__(self, name: str) -> torch.Tensor:
        self._tick()
        return self.where_they_are[name].to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self.where_they_are)

    def __len__(self) -> int:
        return len(self.where_they_are)


def in_place(tensors: Tensors) -> Tensors:
    """To look at their shapes alone."""
    return tensors.where_they_are if isinstance(tensors, OnDevice) else tensors


def on_device(tensors: Tensors, device: torch.device, tick: Callable[[], None]) -> Tensors:
    """All at once where they take little of a GPU, which compares them in a fraction of the time."""
    if device.type == "cpu":
        return tensors
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > _DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]:
        return OnDevice(tensors, device, tick)
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def gather_evidence(
    strategy: Strategy,
    batches: BatchesOfStep,
    *,
    held_out: Batch,
    watch: bool = True,
    keep: bool = True,
    tick: Callable[[int], None] = lambda step: None,
) -> Evidence:
    """Train VERIFY_STEPS steps, then evaluate a held-out batch, where asked to ``watch`` with an eye on what forward
    reads. Collective. A step that fp16 overflow skipped is run again on the same data, so that strategies that skip at
    different scales still make the same updates. Tensors are the same on every rank, and on those that do not ``keep``
    them they are let go."""

    def kept(tensors: Tensors) -> Tensors:
        return tensors if keep else {}

    loss, norm = math.nan, None
    gradients: Tensors = {}
    moments: Tensors = {}
    samples = []
    for step in range(VERIFY_STEPS):
        moments = {}  # let go before the next ones are gathered
        result = strategy.step(batches(step), norm=True)
        for _ in range(_MAX_SKIPPED):
            if result.applied:
                break
            result = strategy.step(batches(step), norm=True)
        if not result.applied:
            raise VerificationError(
                f"step {step + 1} overflowed fp16 {_MAX_SKIPPED + 1} times in a row: nothing to compare"
            )
        moments = kept(strategy.first_moments())
        samples.append({name: sample(moment) for name, moment in moments.items()})
        if step == 0:
            loss = float(result.loss)
            norm = None if result.grad_norm is None else float(result.grad_norm)
            gradients = gradients_of_first_step(moments, strategy.settings, norm)
        tick(step + 1)
    parameters: Tensors = strategy.full_parameters()
    evaluation, read, loss_dtype = evaluate(strategy, held_out, parameters if watch else {})
    tick(VERIFY_STEPS)
    parameters = kept(parameters)
    return Evidence(
        loss=loss,
        norm=norm,
        gradients=gradients,
        parameters=parameters,
        moments=moments,
        moment_samples=samples,
        evaluation=evaluation,
        read=read,
        loss_dtype=loss_dtype,
    )


def evaluate(
    strategy: Strategy, batch: Batch, masters: Tensors
) -> tuple[float | None, WorstRead | None, str | None]:
    """The batch's loss, whether that forward read ``masters``, and the loss's dtype. Collective. All None for a model
    that evaluates with statistics of the batches it trained on: each rank has its own, and no reference has them."""
    module = strategy.module()
    if module is not None and keeps_statistics(module):
        return None, None, None
    with nullcontext() if module is None else watched(module, masters) as reads:
        loss = strategy.evaluate([batch])
    if reads is None or reads.loss_dtype is None:
        return loss, None, None
    return loss, reads.worst(), str(reads.loss_dtype).removeprefix("torch.")


def keeps_statistics(module: nn.Module) -> bool:
    """Return whether a batch norm of the module keeps running statistics."""
    norms = (inner for inner in module.modules() if isinstance(inner, nn.modules.batchnorm._NormBase))
    return any(norm.track_running_stats for norm in norms)


def evaluate_parameters(
    reference_class: type[Strategy],
    row_settings: StrategySettings,
    model_factory: ModelFactory,
    parameters: Tensors,
    batches: Sequence[Batch],
    *,
    tick: Callable[[], None] = lambda: None,
) -> list[float]:
    """Return what a row's evaluation should have been: the losses of ``batches`` by a reference that has the row's
    ``parameters``. It stands alone on the row's device, and neither checkpoints nor compiles."""
    settings = replace(
        row_settings, rank=0, world_size=1, local_world_size=1, checkpointing=False, compile="none"
    )
    reference = reference_class(settings)

    def trained_model(*, device: str | None = None) -> nn.Module:
        model = model_factory(device=device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(parameters[name])
        return model

    reference.build(trained_model)
    losses = []
    for batch in batches:
        loss = reference.evaluate([batch])
        assert loss is not None
        losses.append(loss)
        tick()
    reference.close()
    return losses


def gradients_of_first_step(moments: Tensors, settings: StrategySettings, norm: float | None) -> Tensors:
    """After one step exp_avg is (1 - beta1) times the clipped gradient. The moments become gradients where they lie."""
    factor = 1 - settings.optimizer.beta1
    if settings.clip is not None:
        if norm is None:
            raise Error("the strategy clips and gave no gradient norm, so its gradients cannot be checked")
        factor *= min(1.0, settings.clip / (norm + 1e-6))
    return {name: moment.div_(factor) for name, moment in moments.items()}


def write_reference(path: Path, evidence: Evidence, initial: Tensors) -> None:
    """VerificationError where the reference has diverged: nothing could be held against it."""
    if not all(bool(parameter.isfinite().all()) for parameter in evidence.parameters.values()):
        raise VerificationError(
            f"parameters are not finite after {VERIFY_STEPS} steps, so there is nothing to compare with: give a lower "
            "--lr"
        )
    updates = {name: parameter - initial[name] for name, parameter in evidence.parameters.items()}
    reference = Reference(evidence.gradients, updates, evidence.parameters, evidence.moments)
    try:
        # CRC-32 takes longer than the writing, and who maps the file, as read_reference does, looks at none.
        with serialization.patch("save.compute_crc32", False):  # type: ignore[attr-defined]  # torch adds it
            torch.save(reference._asdict(), path)
    except (OSError, RuntimeError) as error:  # torch's, for a file that could not be written whole
        needed = sum(tensor.nbytes for tensors in reference for tensor in tensors.values())
        raise Error(
            f"the reference of {needed / MIB:.0f} MiB could not be written to {path.parent}: free some space, "
            "raise the limit on the size of files (ulimit -f), or choose another folder by TMPDIR"
        ) from error


def read_reference(path: Path) -> Reference:
    return Reference(**torch.load(path, weights_only=True, mmap=True))


def compare(
    evidence: Evidence, reference: Reference, *, precision: str, optimizer: OptimizerSettings
) -> TensorDeviation:
    """Tensor by tensor, on the device that they are on. Raises where the two do not hold the same parameters."""
    check_names(evidence.parameters, reference.parameters)
    check_names(evidence.gradients, reference.gradients)
    gradient, gradient_worst = gradient_deviation(
        evidence.gradients, reference.gradients, floor=GRADIENT_FLOOR[precision]
    )
    piece, piece_worst = piece_deviation(evidence.parameters, reference, floor=PIECE_FLOOR[precision])
    difference, update, max_abs = 0.0, 0.0, 0.0
    own: dict[str, float] = {}
    for name, parameter in reference.parameters.items():
        found, moved = evidence.parameters[name], reference.updates[name]
        error = found.double() - parameter.double()
        difference += squares(error)
        update += squares(moved)
        samples = [of_step[name] for of_step in evidence.moment_samples]
        initial = sample(parameter) - sample(moved)
        own[name] = optimizer_deviation(sample(found), initial, samples, optimizer)
        max_abs = nan_max(max_abs, float(error.abs().max()) if error.numel() else 0.0)
    own_worst = max(own, key=lambda name: nan_last(own[name]), default="")
    return TensorDeviation(
        gradient=gradient,
        gradient_worst=gradient_worst,
        update=math.sqrt(difference / max(update, _TINY)),
        piece=piece,
        piece_worst=piece_worst,
        optimizer=own.get(own_worst, 0.0),
        optimizer_worst=own_worst,
        max_abs=max_abs,
    )


def check_names(found: Tensors, expected: Tensors) -> None:
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        raise VerificationError(
            f"parameter names differ from the reference's: missing {missing[:3]}, unknown {extra[:3]}"
        )
    found, expected = in_place(found), in_place(expected)
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            raise VerificationError(
                f"{name} has shape {tuple(found[name].shape)}, the reference {tuple(tensor.shape)}"
            )


def gradient_deviation(found: Tensors, expected: Tensors, *, floor: float) -> tuple[float, str]:
    """Largest relative L2 over parameters, and whose it is. A gradient that vanishes (the bias of attention keys has
    none in theory) is held against ``floor`` times the model's root mean square gradient instead of its own noise."""
    mean_square = mean_square_of(expected)
    worst, worst_name = 0.0, ""
    for name, gradient in expected.items():
        least = floor**2 * mean_square * gradient.numel()
        size = max(squares(gradient), least, _TINY)
        relative = math.sqrt(squares(found[name].double() - gradient.double()) / size)
        if not relative <= worst:
            worst, worst_name = relative, name
            if math.isnan(relative):
                break
    return worst, worst_name


def piece_deviation(parameters: Tensors, reference: Reference, *, floor: float) -> tuple[float, str]:
    """The worst piece of a parameter, and which parameter that is.

    A piece's deviation is the median over its elements of |difference of update| / |update|, counting the half with the
    larger first moments: Adam turns the rounding noise of small gradients into full steps, and a shard that missed one
    update of four moves every element of its pieces by about a quarter. Pieces count that are not quiet beside the
    model and beside their own parameter, and those without any gradient, which decay alone moves."""
    least = floor**2 * mean_square_of(reference.moments)
    worst, worst_name = 0.0, ""
    for name, expected in reference.parameters.items():
        error = (parameters[name] - expected).abs()
        size = reference.updates[name].abs() + _ROUNDING * expected.abs() + _TINY
        ratio, weight = in_pieces(error / size), in_pieces(reference.moments[name].abs())
        mean_square = weight.square().nanmean(dim=1)
        typical = mean_square[mean_square > 0].nanmedian()  # NaN where there is none
        counted = (mean_square >= least) & (mean_square >= PIECE_SHARE**2 * typical) | (mean_square == 0)
        if not bool(counted.any()):
            continue
        ratio, weight = ratio[counted], weight[counted]
        # NaN parameters are wrong; padding is NaN in weight and drops out below.
        ratio = ratio.nan_to_num(nan=math.inf)
        ratio[~(weight >= weight.nanmedian(dim=1, keepdim=True).values)] = math.nan
        largest = float(ratio.nanmedian(dim=1).values.max())
        if not largest <= worst:
            worst, worst_name = largest, name
    return worst, worst_name


def in_pieces(tensor: torch.Tensor) -> torch.Tensor:
    """(pieces, consecutive elements of each) float; the last piece is filled with NaN."""
    flat = tensor.reshape(-1).float()
    piece_numel = max(MIN_PIECE_NUMEL, -(-flat.numel() // MAX_PIECE_NUM))
    piece_num = -(-flat.numel() // piece_numel)
    filled = flat.new_full((piece_num * piece_numel,), math.nan)
    filled[: flat.numel()] = flat
    return filled.view(piece_num, piece_numel)


def mean_square_of(tensors: Tensors) -> float:
    """Over the elements of all."""
    total, numel = 0.0, 0
    for tensor in tensors.values():
        total += squares(tensor)
        numel += tensor.numel()
    return total / max(numel, 1)


def squares(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())


def nan_max(a: float, b: float) -> float:
    return b if math.isnan(b) or b > a else a


def verify_row(
    evidence: Evidence,
    *,
    reference_file: Path | None,
    precision: str,
    optimizer: OptimizerSettings,
    is_first: bool,
    device: torch.device,
    tick: Callable[[], None],
) -> Verification:
    """This rank's part of the verdict; rank 0 compares the tensors on ``device``."""
    verification = Verification(
        loss=evidence.loss,
        norm=evidence.norm,
        evaluation=evidence.evaluation,
        reads=evidence.read and evidence.read.share,
        reads_worst=evidence.read and evidence.read.name,
        loss_dtype=evidence.loss_dtype,
    )
    if not is_first:
        return verification
    deviation = None
    if reference_file is not None:
        deviation = compare(
            replace(
                evidence,
                gradients=on_device(evidence.gradients, device, tick),
                parameters=on_device(evidence.parameters, device, tick),
            ),
            Reference(*(on_device(tensors, device, tick) for tensors in read_reference(reference_file))),
            precision=precision,
            optimizer=optimizer,
        )
    return verification.model_copy(update={"checksum": checksum(evidence.parameters), "deviation": deviation})
