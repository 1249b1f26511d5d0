"""Check, before any process starts, whether a configuration can fit at all. The need is a lower bound: most
activations, buffers and gathered parameters come on top. What passes here may still run out of memory, but what does
not pass cannot fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from zerobench import models
from zerobench.bench.plan.configuration import Configuration
from zerobench.engine.config import parse as parse_config
from zerobench.host.gpus import Gpu
from zerobench.results.sizes import GIB, KIB, MIB
from zerobench.strategies.catalogue import FLOOR, OURS, PARTS

# Bytes a parameter of what the reference needs: to train on its device (parameters and gradients in low precision,
# fp32 sums of gradients, masters and moments), and fp32 copies on the host (first and last parameters, gradients,
# moments, updates, a file).
_REFERENCE_DEVICE_BYTES = 20
_REFERENCE_HOST_BYTES = 24
_GATHERED_HOST_BYTES = 4  # of each set of fp32 copies that a row gathers: one on every rank, three on rank 0
# Masters, moments, gradients and parameters of an offloading row that is compared with it.
_OFFLOADED_HOST_BYTES = 20
_MANY_TOKENS_OF_AN_EXPERT = 1024  # among which those that rounding sends elsewhere hardly count
_FILLED = 0.9  # of a GPU, at most, before activations


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes that one rank cannot do without, by tier; what may lie in either counts in none."""

    device: int
    host: int = 0


class TooLarge(NamedTuple):
    reason: str
    tier: Literal["device", "host"]


def least_rank_bytes(configuration: Configuration) -> Need:
    """Return the least memory of a rank for parameters, gradients and optimizer state. Gradients of offloaded state
    leave the device as they are produced."""
    settings, facts = configuration.settings, configuration.facts
    count = models.parameter_count(models.from_dict(configuration.model))
    low = settings.precision != "fp32" and not facts.autocast
    remainders = low and _stores_remainders(configuration)
    parts = (2, 2, 10 if remainders else 12) if low else (4, 4, 8)
    if configuration.strategy == FLOOR:
        return Need(device=count * (parts[0] + parts[1]))
    parameters, gradients, state = (
        count * element_bytes // (1 if facts.divides(part) is False else settings.world_size)
        for element_bytes, part in zip(parts, PARTS, strict=True)
    )
    if settings.offload == "none":
        from_masters = configuration.strategy in OURS and facts.divides("parameters") and not remainders
        if from_masters and low and settings.world_size > 1:
            parameters = 0  # they may be rounded from the masters for each gather
        if settings.optimizer_in_backward and settings.grad_accum == 1:
            gradients = 0  # they may end as they come
        return Need(device=parameters + gradients + state)
    if settings.offload == "nvme_full":
        return Need(device=0)
    if settings.offload == "nvme" or settings.offload_ratio == "auto":
        return Need(device=parameters)
    gone = int(state * (1.0 if settings.offload_ratio is None else settings.offload_ratio))
    if settings.offload == "cpu_full":
        return Need(device=state - gone, host=gone + parameters)
    return Need(device=parameters + state - gone, host=gone)


def _stores_remainders(configuration: Configuration) -> bool:
    """Return whether the row's engine keeps remainders instead of masters; only our engine can."""
    settings = configuration.settings
    if configuration.strategy not in OURS or settings.offload != "none":
        return False
    keys = ("param_dtype", "keep_parameter_shards", "store_param_remainders")
    given = {key: configuration.options[key] for key in keys if key in configuration.options}
    engine = parse_config({"stage": configuration.stage, "precision": settings.precision, **given})
    return engine.stores_param_remainders(on_gpu=settings.device == "cuda")


def logits_bytes(configuration: Configuration) -> int:
    """Return the bytes of a micro-batch's logits on a rank; 0 for a strategy that need not hold all at once."""
    if not configuration.facts.whole_logits:
        return 0
    settings = configuration.settings
    logits_numel = models.logits_numel(models.from_dict(configuration.model), settings.seq_length)
    itemsize = 4 if settings.precision == "fp32" else 2
    return settings.batch_size * logits_numel * itemsize


def why_too_large(
    configuration: Configuration,
    *,
    memory_available_bytes: int,
    rank_memory_bytes: int | None,
    gpus: Sequence[Gpu] = (),
    host_ranks: int | None = None,
) -> TooLarge | None:
    """Return one sentence when the configuration cannot fit into the memory that this host has available or on one of
    ``gpus``, else None. ``host_ranks``: of this host, where others have some, too."""
    settings = configuration.settings
    ranks, on_gpus = settings.world_size, settings.device == "cuda"
    host_ranks = min(ranks, host_ranks or (len(gpus) if on_gpus else ranks))
    ranks_text = "one rank" if host_ranks == 1 else f"{host_ranks} ranks"
    smallest = min(gpus, key=lambda gpu: gpu.total_bytes, default=None) if on_gpus else None
    if smallest is not None:
        config = models.from_dict(configuration.model)
        whole_bytes = 4 * models.parameter_count(config)
        begins_whole = configuration.facts.begins_whole or config.begins_whole
        if begins_whole and whole_bytes > smallest.total_bytes:
            return TooLarge(
                f"{configuration.strategy} begins with the whole fp32 model on each rank, which needs "
                f"{whole_bytes / GIB:.2f} GiB, and GPU {smallest.index} has {smallest.total_bytes / GIB:.2f}: "
                "not started",
                "device",
            )

    def on_host(need: Need) -> int:  # CPU ranks have the host's memory for both
        return need.host if on_gpus else need.device + need.host

    limits: list[tuple[Callable[[Need], int], float, str, Literal["device", "host"]]] = []
    if settings.device_memory_gib is not None:
        limit = settings.device_memory_gib * GIB
        limits.append(
            (lambda need: need.device, limit, "on each rank and --device-memory-gib allows", _tier(on_gpus))
        )
    if smallest is not None:
        has = f"on each rank and GPU {smallest.index} has"
        limits.append((lambda need: need.device, smallest.total_bytes, has, "device"))
    if rank_memory_bytes is not None:
        limits.append((on_host, rank_memory_bytes, "on each rank and --rank-memory-gib allows", "host"))
    if settings.host_memory_gib is not None:
        limit = settings.host_memory_gib * GIB
        allows = "of host memory and --host-memory-gib allows"
        limits.append((lambda need: need.host * host_ranks, limit, allows, "host"))
    has = f"for {ranks_text} and the host has available"
    limits.append((lambda need: on_host(need) * host_ranks, memory_available_bytes, has, "host"))
    for what, need in (
        ("parameters, gradients and optimizer state", least_rank_bytes(configuration)),
        ("the logits of one micro-batch", Need(device=logits_bytes(configuration))),
    ):
        for needed_of, limit, sentence, tier in limits:
            if (needed := needed_of(need)) > limit:
                needs, allowed = two_amounts(needed, limit)
                return TooLarge(f"{what} alone need {needs} {sentence} {allowed}: not started", tier)
    return None


def two_amounts(more_bytes: float, fewer_bytes: float) -> tuple[str, str]:
    """In the largest unit that tells them apart, and shows of each two digits or more."""
    for unit, unit_bytes in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        more, fewer = f"{more_bytes / unit_bytes:.2f}", f"{fewer_bytes / unit_bytes:.2f}"
        if more != fewer and fewer_bytes >= 0.095 * unit_bytes:
            return f"{more} {unit}", fewer
    return f"{more_bytes:.0f} bytes", f"{fewer_bytes:.0f}"


def _tier(on_gpus: bool) -> Literal["device", "host"]:
    return "device" if on_gpus else "host"


def verification_model(
    model: Mapping[str, Any],
    *,
    memory_available_bytes: int,
    rank_memory_bytes: int | None,
    gpus: Sequence[Gpu] = (),
    layers: int | None = None,
    host_ranks: int = 1,
    offloads: bool = False,
    rounded_tokens: int | None = None,
) -> dict[str, Any]:
    """The model itself, or the same with fewer layers where the reference, or what ``host_ranks`` of a row gather on
    this host, would not fit, or ``layers`` asks for it. Dropout is off, since every strategy draws other masks.
    ``offloads``: a row to compare keeps state on the host.
    ``rounded_tokens``: of a step in a precision in which experts are mistaken; where each would get few of them, every
    token goes to all."""
    config = models.from_dict(dict(model)).model_copy(update={"dropout": 0.0})
    kinds = (models.HFConfig, models.FolderConfig)
    if isinstance(config, kinds) and config.num_experts and rounded_tokens is not None:
        tokens_each = rounded_tokens * config.experts_per_token / config.num_experts
        if tokens_each < _MANY_TOKENS_OF_AN_EXPERT:
            config = config.model_copy(update={"experts_per_token": config.num_experts})
    fewest = config.least_layers
    config = config.with_layers(max(fewest, min(layers or config.num_layers, config.num_layers)))
    limits = (memory_available_bytes, rank_memory_bytes)
    host_bytes = min(limit for limit in limits if limit is not None)
    offloaded_bytes_each = _OFFLOADED_HOST_BYTES if offloads else 0
    host_bytes_each = _REFERENCE_HOST_BYTES + offloaded_bytes_each
    gathered_bytes_each = _GATHERED_HOST_BYTES * (host_ranks + 2) + offloaded_bytes_each
    device_bytes = min((gpu.total_bytes for gpu in gpus), default=None)

    def fits(config: models.ModelConfig) -> bool:
        count = models.parameter_count(config)
        if count * gathered_bytes_each > memory_available_bytes:
            return False
        if device_bytes is None:  # the device's memory is the host's
            return count * (_REFERENCE_DEVICE_BYTES + host_bytes_each) <= host_bytes
        on_device = count * _REFERENCE_DEVICE_BYTES <= _FILLED * device_bytes
        return on_device and count * host_bytes_each <= host_bytes

    while config.num_layers > fewest and not fits(config):
        config = config.with_layers(max(fewest, config.num_layers // 2))
    return config.model_dump()
