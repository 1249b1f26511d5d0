"""Settings that ``--find`` searches: what it can search, rows at another value, and the value to try next. Imports no
torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from zerobench import models
from zerobench.errors import ConfigError
from zerobench.results.schema import Searched, Try
from zerobench.results.settings import flag_of

if TYPE_CHECKING:
    from zerobench.bench.plan.configuration import Configuration, Draft
    from zerobench.bench.plan.options import CompareOptions

KEYS: dict[str, str] = {"batch": "batch_size", "layers": "num_layers", "seq": "seq_length"}
"""The option that each searched setting begins at."""
SEQ_GRAIN = 8  # kernels of attention pad other lengths, so memory would not grow with the length
LIMITS = ("device_memory_gib", "rank_memory_gib", "memory_limit_gib")


class Bounds(NamedTuple):
    """Values that a search may try."""

    least: int
    most: int | None = None  # None: any
    grain: int = 1  # values between the bounds are multiples of it


def check_find(options: CompareOptions, drafts: Sequence[Draft]) -> None:
    """Raise ConfigError where ``--find`` cannot search what it names."""
    if options.find is None:
        return
    if options.find not in get_args(Searched):
        raise ConfigError(f"unknown --find {options.find!r}: use one of {', '.join(get_args(Searched))}")
    key = KEYS[options.find]
    if len(options.values(key)) > 1:
        raise ConfigError(
            f"--find {options.find} begins at one value, and {flag_of(key)} gives several: give one of them"
        )
    if options.device == "cpu" and all(getattr(options, limit) is None for limit in LIMITS):
        raise ConfigError(
            "--find on CPU ranks would fill the memory of the host: add --device-memory-gib, --rank-memory-gib or "
            "--memory-limit"
        )
    if options.find == "batch" and options.global_batch is not None:
        raise ConfigError("--find batch changes the batch of a rank: remove --global-batch")
    for _, settings, own in drafts:
        of_file = ("train_micro_batch_size_per_gpu", "train_batch_size")
        if options.find == "batch" and any(own.get(name) not in (None, "auto") for name in of_file):
            raise ConfigError(
                f"{settings.config_file} sets the batch that --find batch looks for: set {' and '.join(of_file)} to "
                '"auto"'
            )
        model = models.from_dict(settings.model_config_resolved)
        fixed = (options.find == "layers" and isinstance(model, models.PlaceConfig)) or (
            options.find == "seq" and model.seq_length_of(SEQ_GRAIN) != SEQ_GRAIN
        )
        if fixed:
            raise ConfigError(
                f"model {settings.model!r} has one number of {options.find} only, which --find cannot change: use "
                "--find batch"
            )


def value_in(find: str, settings: Any) -> int:
    """Return the value that a row's settings have."""
    if find == "layers":
        return int(settings.model_config_resolved["num_layers"])
    return int(getattr(settings, KEYS[find]))


def bounds_of(configuration: Configuration, find: str) -> Bounds:
    """Return the values that a search of the row may try."""
    model = models.from_dict(configuration.model)
    if find == "layers":
        return Bounds(model.least_layers)
    if find == "seq":
        return Bounds(SEQ_GRAIN, model.max_seq_length, SEQ_GRAIN)
    return Bounds(1)


def at_value(configuration: Configuration, find: str, value: int) -> Configuration:
    """Return the same row with another value of the searched setting."""
    settings = configuration.settings
    if value == value_in(find, settings):
        return configuration
    if find == "batch":
        changes: dict[str, Any] = {"batch_size": value}
    else:
        model = models.from_dict(configuration.model)
        model = model.with_layers(value) if find == "layers" else model
        seq_length = value if find == "seq" else settings.seq_length
        changes = {
            "seq_length": seq_length,
            "model_config_resolved": model.model_dump(),
            "parameter_count": models.parameter_count(model),
        }
    return configuration.model_copy(update={"settings": settings.model_copy(update=changes)})


def is_strict(tries: Sequence[Try]) -> bool:
    """Return whether a row did not fit at a value that a try of few steps had fitted at: then whole rows alone tell."""
    return any(one.whole and not one.fits for one in tries)


def too_large(tries: Sequence[Try]) -> int | None:
    """Return the smallest value that did not fit or run, or None."""
    return min((one.value for one in tries if not one.fits), default=None)


def largest(tries: Sequence[Try]) -> int | None:
    """Return the largest value that fitted, below all that did not, or None."""
    above, strict = too_large(tries), is_strict(tries)
    fitting = [one.value for one in tries if one.fits and (one.whole or not strict)]
    return max((value for value in fitting if above is None or value < above), default=None)


def next_value(tries: Sequence[Try], *, start: int, bounds: Bounds) -> int | None:
    """Return the value to try next, or None once the largest that fits is known: doubled until one does not fit, halved
    until one fits, then the middle between the two."""
    fitting, above = largest(tries), too_large(tries)
    least, most, grain = bounds
    if fitting is None:
        if above is None:
            return start
        if above <= least or any(one.status in ("failed", "skipped") for one in tries):
            return None  # nothing fits, or something other than memory is wrong
        return max(least, above // 2 // grain * grain)
    if above is None:
        doubled = 2 * fitting if most is None else min(2 * fitting, most)
        return doubled if doubled > fitting else None
    middle = (fitting + above) // 2 // grain * grain
    return middle if above - fitting > grain and middle > fitting else None
