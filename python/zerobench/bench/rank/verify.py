"""The verification pass inside a rank: a few deterministic steps whose gradients and updates are compared with the
reference's. docs/explain/verification.md says why these quantities and these tolerances."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.utils.serialization import config as serialization

from zerobench.bench.protocol.job import Verification
from zerobench.bench.protocol.tolerances import VERIFY_STEPS
from zerobench.bench.rank.deviation import compare
from zerobench.bench.rank.evidence import Evidence, Reference, Tensors
from zerobench.bench.rank.reads import WorstRead, watched
from zerobench.bench.rank.replay import sample
from zerobench.errors import Error, VerificationError
from zerobench.results.sizes import MIB
from zerobench.strategies.base import Batch, ModelFactory, OptimizerSettings, Strategy, StrategySettings
from zerobench.strategies.shared import checksum

BatchesOfStep = Callable[[int], Sequence[Batch]]

_MAX_SKIPPED = 40  # a loss scale of 2**16 halves to one in 16 overflows


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
            evidence,
            read_reference(reference_file),
            precision=precision,
            optimizer=optimizer,
            device=device,
            tick=tick,
        )
    return verification.model_copy(update={"checksum": checksum(evidence.parameters), "deviation": deviation})
