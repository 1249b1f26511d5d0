"""How far a correct strategy may be from the reference, by precision. Reasons: docs/explain/verification.md."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType

from zerobench.results.schema import Deviation, RowDtypes

VERIFY_STEPS = 4

MAX_PIECE_NUM = 256
MIN_PIECE_NUMEL = 256
"""A parameter is compared in this many pieces, or fewer of this size: a single row deviates honestly now and then, and
the more rows there are the further the worst one, but a stale shard is a good part of some parameter."""

TOLERANCES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "fp32": {
            "loss": 1e-5,
            "norm": 1e-4,
            "gradient": 1e-3,
            "update": 0.01,
            "piece": 0.01,
            "optimizer": 0.001,
            "evaluation": 1e-5,
            "reads": 0.0,
        },
        "fp16": {
            "loss": 5e-4,
            "norm": 2e-3,
            "gradient": 0.03,
            "update": 0.06,
            "piece": 0.03,
            "optimizer": 0.001,
            "evaluation": 1e-4,
            "reads": 0.0,
        },
        "bf16": {
            "loss": 1e-3,
            "norm": 5e-3,
            "gradient": 0.10,
            "update": 0.15,
            "piece": 0.08,
            "optimizer": 0.001,
            "evaluation": 1e-3,
            "reads": 0.0,
        },
    }
)

GRADIENT_FLOOR: Mapping[str, float] = MappingProxyType({"fp32": 1e-3, "fp16": 0.02, "bf16": 0.1})
"""A parameter's gradient counts as at least this share of the model's root mean square gradient."""

PIECE_FLOOR: Mapping[str, float] = MappingProxyType({"fp32": 1e-4, "fp16": 0.01, "bf16": 0.03})
"""Pieces whose first moments lie below this share of the model's are noise: Adam turns noise into full steps."""

PIECE_SHARE = 0.5
"""So are those below this share of the median piece of their parameter: rounding errors are as large in quiet rows."""

# The largest relative error of a loss in these, which is rounded twice: the logarithm of softmax, and the mean.
_LOSS_ROUNDING = {"bfloat16": 2.0**-7, "float16": 2.0**-10}

_LOOSEST_FIRST = ("bf16", "fp16", "fp32")
# TF32 has the mantissa of fp16.
_PRECISIONS = {"float32": "fp32", "tf32": "fp16", "bfloat16": "bf16", "float16": "fp16"}

_QUANTITIES = ("loss", "norm", "gradient", "update", "piece", "optimizer", "evaluation", "reads")


def tolerance_precision(precision: str, dtypes: RowDtypes) -> str:
    """The coarsest precision that a row's arithmetic uses: that of the settings, or of what it reduces in."""
    used = {
        precision,
        *(_PRECISIONS.get(name, precision) for name in (dtypes.param, dtypes.compute, dtypes.reduce)),
    }
    return next(name for name in _LOOSEST_FIRST if name in used)


def tolerances(
    precision: str, *, loss_dtype: str | None = None, reference_loss_dtype: str | None = None
) -> dict[str, float]:
    """Return tolerances by quantity. Losses may differ, in addition, by what their dtypes round: BERT's loss has the
    dtype of its logits, which is fp32 only under autocast. Two losses of one dtype that are computed alike are rounded
    alike."""
    rounding = sum(_LOSS_ROUNDING.get(dtype or "", 0.0) for dtype in (loss_dtype, reference_loss_dtype))
    found = dict(TOLERANCES[precision])
    found["loss"] += rounding
    if loss_dtype != reference_loss_dtype:
        found["evaluation"] += rounding
    return found


def nan_last(value: float) -> float:
    """A key by which NaN is the worst deviation of all."""
    return math.inf if math.isnan(value) else value


def exceeded(deviation: Deviation) -> list[str]:
    """The quantities beyond their tolerance, in the order of the list above. NaN is beyond any."""
    found = []
    for name in _QUANTITIES:
        value = getattr(deviation, name)
        if value is not None and not value <= deviation.tolerance[name]:
            found.append(name)
    return found


def describe(deviation: Deviation, quantity: str) -> str:
    """One clause: what was found and what is allowed."""
    value, allowed = getattr(deviation, quantity), deviation.tolerance[quantity]
    if quantity == "reads":
        return (
            f"{100 * value:.3g} % of what forward reads of {deviation.reads_worst} is not the master's value"
        )
    place = getattr(deviation, f"{quantity}_worst", None)
    return f"{quantity}{f' of {place}' if place else ''} deviates by {value:.2g} (allowed {allowed:g})"


def rate_hint(found: Collection[str], learning_rate: float) -> str:
    """Return how to tell rounding from a fault if only updates exceed their tolerance (``found``), else "".

    If gradients agree at step 1 and updates differ after the last step, either a part of a parameter missed an update,
    or the rate is so high that each step magnifies the rounding of the steps before it."""
    if not {"update", "piece"}.issuperset(found):
        return ""
    return (
        f". Gradients of step 1 agree, so rounding may have grown at this learning rate: run with --lr "
        f"{learning_rate / 10:g} to tell it from a fault"
    )
