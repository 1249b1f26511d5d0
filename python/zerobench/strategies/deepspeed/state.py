"""Masters, moments and memory of a DeepSpeed engine, whichever of its optimizers runs. Written against 0.19.8.

Where nothing is wrapped around the optimizer (stage 0 in fp32) the parameters themselves are the masters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._utils import _unflatten_dense_tensors

from zerobench.strategies.deepspeed.partitions import gathered, set_partitions
from zerobench.strategies.shared import full_fp32, storage_bytes


def masters(engine: Any) -> dict[str, torch.Tensor]:
    """Full fp32 CPU copies by name. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    flat = gathered(engine.optimizer, None) if _offloads_stage3(engine) else _flat_masters(engine)
    found = {}
    for name, parameter in engine.module.named_parameters():
        master = flat.get(id(parameter))
        if master is None:
            master = safe_get_full_fp32_param(parameter)
        found[name] = _full(parameter) if master is None else full_fp32(master)
    return found


def set_masters(engine: Any, full: Mapping[str, torch.Tensor]) -> None:
    """Copy full fp32 tensors into the masters. Collective."""
    from deepspeed.utils import safe_set_full_fp32_param

    # Stage 3, whose own writer knows no padding.
    if hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):
        named = engine.module.named_parameters()
        set_partitions(engine.optimizer, {id(parameter): full[name] for name, parameter in named})
        return
    flat = _flat_masters(engine)
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if id(parameter) in flat:
                flat[id(parameter)].copy_(full[name])
            else:
                safe_set_full_fp32_param(parameter, full[name].to(parameter.device))


def moments(engine: Any, *, stepped: bool) -> dict[str, torch.Tensor]:
    """Full exp_avg by name, zeros where there is none. Collective."""
    from deepspeed.utils import safe_get_full_optimizer_state

    flat = _flat_state(engine, "exp_avg")
    if stepped and _offloads_stage3(engine):
        flat = gathered(engine.optimizer, "exp_avg")
    found = {}
    for name, parameter in engine.module.named_parameters():
        moment = flat.get(id(parameter))
        if moment is None and stepped and parameter.requires_grad:
            moment = safe_get_full_optimizer_state(parameter, "exp_avg")
        found[name] = torch.zeros(_shape(parameter)) if moment is None else full_fp32(moment)
    return found


def held_bytes(engine: Any) -> dict[str, dict[str, int]]:
    """Bytes of this rank by tier and category as they are now. "staging" are buckets of gradients on their way, where
    they stay (stages 1 and 2 make theirs anew in every backward), and buffers of transfers."""
    optimizer = engine.optimizer
    parameters = list(engine.module.parameters())
    held = {
        "parameters": [getattr(p, "ds_tensor", p) for p in parameters if not _is_swapped(p)],
        "gradients": [
            *(p.grad for p in parameters),
            *_averaged_gradients(optimizer),
            *_host_gradients(optimizer),
        ],
        "master": list(_master_buffers(optimizer)),
        "exp_avg": _states(optimizer, "exp_avg"),
        "exp_avg_sq": _states(optimizer, "exp_avg_sq"),
        "staging": list(_staging(optimizer, parameters)),
    }
    tiers: dict[str, dict[str, int]] = {"device": {}, "host": {}}
    for category, tensors in held.items():
        known = [tensor for tensor in tensors if tensor is not None]
        for tier, on_host in (("device", False), ("host", True)):
            found = storage_bytes(tensor for tensor in known if (tensor.device.type == "cpu") == on_host)
            if found or (tier == "device" and category != "staging"):
                tiers[tier][category] = found
    swapped = _swapped_bytes(optimizer)
    if parameter_bytes := sum(p.ds_tensor.ds_numel * p.element_size() for p in parameters if _is_swapped(p)):
        swapped["parameters"] = parameter_bytes
    return {**tiers, **({"nvme": swapped} if swapped else {})}


def undo_first_step(engine: Any) -> None:
    """DeepSpeed's wrappers of stage 0 step once over zero gradients to make the optimizer's state, which decays the
    masters and counts as a step. Take both back, so that training starts at step one as everywhere else."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, "fp32_groups_flat"):
        return
    for flat, master in zip(optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True):
        master.data.copy_(flat)
    for group in optimizer.optimizer.param_groups:
        if "step" in group:
            group["step"] = 0
    for state in optimizer.optimizer.state.values():
        state["step"] = torch.zeros_like(state["step"]) if torch.is_tensor(state["step"]) else 0


def _flat_masters(engine: Any) -> dict[int, torch.Tensor]:
    """Views into stage 0's flat masters by the identity of their parameter, which has no reader of its own."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, "fp32_groups_flat"):
        return {}
    return _views(optimizer.fp16_groups, [master.detach() for master in optimizer.fp32_groups_flat])


def _flat_state(engine: Any, key: str) -> dict[int, torch.Tensor]:
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_flat"):
        flats = [optimizer.optimizer.state[master][key] for master in optimizer.fp32_groups_flat]
        return _views(optimizer.fp16_groups, flats)
    if not hasattr(optimizer, "optimizer"):  # the plain optimizer over the parameters themselves
        return {id(parameter): state[key] for parameter, state in optimizer.state.items() if key in state}
    return {}


def _views(groups: list[list[nn.Parameter]], flats: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    return {
        id(parameter): view
        for group, flat in zip(groups, flats, strict=True)
        for parameter, view in zip(group, _unflatten_dense_tensors(flat, group), strict=True)
    }


def _full(parameter: nn.Parameter) -> torch.Tensor:
    """A parameter without a master: frozen, or fp32 at stage 0."""
    if not hasattr(parameter, "ds_id"):
        return full_fp32(parameter)
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return full_fp32(parameter)


def _shape(parameter: nn.Parameter) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _averaged_gradients(optimizer: Any) -> Iterator[torch.Tensor]:
    for gradients in getattr(optimizer, "averaged_gradients", {}).values():
        yield from _tensors(gradients)


def _host_gradients(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the buffers in which gradients of offloaded masters arrive."""
    if not _offloads(optimizer):
        return
    yield from _tensors(getattr(optimizer, "grad_partitions_flat_buffer", None))
    for master in _master_buffers(optimizer):
        yield from _tensors(master.grad)


def _is_swapped(parameter: Any) -> bool:
    """Its low-precision shard has a file, whether or not a buffer holds it now, too."""
    return getattr(getattr(parameter, "ds_tensor", None), "final_location", None) == "nvme"


def _staging(optimizer: Any, parameters: Sequence[Any]) -> Iterator[torch.Tensor]:
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        yield from _tensors(getattr(bucket, "buffer", None))
    yield from _tensors(getattr(optimizer, "temp_grad_buffer_for_cpu_offload", None))
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is not None:
        yield from _tensors(swapper.swap_buffer_manager.all_buffers)
    swapper = next((p.nvme_swapper for p in parameters if _is_swapped(p)), None)
    if swapper is not None:
        yield from _tensors([swapper.buffers, swapper.partitioned_swap_buffer])


def _swapped_bytes(optimizer: Any) -> dict[str, int]:
    """Return the bytes of what has swap files, by category."""
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is None:
        return {}
    infos = list(swapper.swap_params_info.values())
    master = sum(info.numel() for info in infos) * swapper.swap_element_size
    with_states = sum(info.numel() for info in infos if info.has_state_tensors) * swapper.swap_element_size
    gradients = sum(piece.length for info in infos for piece in info.swapped_gradients.values())
    return {
        "master": master,
        "exp_avg": with_states,
        "exp_avg_sq": with_states,
        "gradients": gradients * swapper.swap_element_size,
    }


def _offloads(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "offload_optimizer", False) or getattr(optimizer, "cpu_offload", False))


def _offloads_stage3(engine: Any) -> bool:
    """Stages 1 and 2 have their masters in one place, which DeepSpeed's own readers know."""
    return bool(getattr(engine.optimizer, "offload_optimizer", False))


def _master_buffers(optimizer: Any) -> Iterator[torch.Tensor]:
    for name in ("fp32_groups_flat", "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        yield from _tensors(getattr(optimizer, name, None))
    # Stage 1 in bf16 with fp32 sums.
    yield from _tensors(getattr(optimizer, "fp32_groups_flat_partition", None))


def _states(optimizer: Any, key: str) -> list[torch.Tensor]:
    owners = [getattr(optimizer, "optimizer", optimizer), getattr(optimizer, "backup_optimizer", None)]
    states = [state for owner in owners if owner is not None for state in owner.state.values()]
    return [state[key] for state in states if key in state]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
