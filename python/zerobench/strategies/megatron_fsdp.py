"""Megatron-FSDP (the package ``megatron_fsdp``) at ZeRO stages 1 to 3: every block a unit, low-precision parameters,
fp32 masters and gradient sums, gradients communicated in low precision. It is imported in ``build`` and not before."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zerobench.errors import ConfigError
from zerobench.strategies.base import StrategySettings
from zerobench.strategies.compiled import repeated_blocks
from zerobench.strategies.peer import PeerStrategy
from zerobench.strategies.pieces import Pieces
from zerobench.strategies.requirements import HOST_TOOLS, MEGATRON_FSDP, Tools, missing_package
from zerobench.strategies.shared import (
    cast_parameters,
    clip_coefficient,
    local_tensor,
    precision_dtype,
    state_tensors,
    storage_bytes,
    torch_device,
)


class MegatronFSDPStrategy(PeerStrategy):
    """The stage that a subclass names."""

    stage: ClassVar[int]

    @classmethod
    def unsupported(cls, settings: StrategySettings, *, tools: Tools = HOST_TOOLS) -> str | None:
        if settings.device != "cuda":
            return "Megatron-FSDP runs on GPUs only"
        if settings.precision == "fp16":
            return "Megatron-FSDP has no loss scaling: use bf16 or fp32"
        if settings.compile == "whole":
            return "Megatron-FSDP's hooks stand between blocks: use --compile block"
        if settings.world_size == 1 and cls.stage > 1:
            return f"on one rank Megatron-FSDP shows no gradients at stage {cls.stage}, so they cannot be verified"
        return missing_package("megatron_fsdp", MEGATRON_FSDP, tools=tools)

    def _wrap(self, model: nn.Module) -> nn.Module:
        from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model

        settings = self.settings
        blocks = {type(block) for block in repeated_blocks(model)}
        if not blocks:
            raise ConfigError(
                f"{type(model).__name__} has no repeated blocks for Megatron-FSDP to shard by: remove {self.name}"
            )
        dtype = precision_dtype(settings)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        if dtype != torch.float32:
            for parameter in model.parameters():
                _keep_for_master(parameter)
            cast_parameters(model, dtype)
        self._net: Any = fully_shard_model(
            module=model,
            device_mesh=init_device_mesh("cuda", (settings.world_size, 1), mesh_dim_names=("dp", "tp")),
            dp_shard_dim="dp",
            tp_dim="tp",
            fsdp_unit_modules=list(blocks),
            zero_dp_strategy=self.stage,
            mixed_precision_policy=MixedPrecisionPolicy(
                main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=dtype
            ),
            disable_symmetric_registration=True,
        )
        if settings.grad_accum > 1:  # gradients are finished at the boundary only
            self._net.set_model_auto_sync(False)
        return self._net

    def _make_optimizer(self) -> torch.optim.Optimizer:
        from megatron_fsdp import fully_shard_optimizer

        wanted = self.settings.optimizer
        # Sharding makes the state by a step over zero gradients: at rate zero it changes nothing, and is not counted.
        optimizer = torch.optim.AdamW(
            self._net.parameters(), lr=0.0, betas=(wanted.beta1, wanted.beta2), eps=wanted.eps, fused=True
        )
        fully_shard_optimizer(optimizer)
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = wanted.lr, wanted.weight_decay
        for step in state_tensors(optimizer, "step"):
            step.zero_()
        return optimizer

    def _micro_batch(self, *, is_last: bool) -> AbstractContextManager[object]:
        if self.settings.grad_accum == 1:
            return nullcontext()
        self._net.is_last_microbatch = True
        return nullcontext() if is_last else self._net.no_sync()

    def _update(self, *, norm: bool) -> tuple[torch.Tensor | None, bool | None]:
        if self.settings.grad_accum > 1:
            self._net.finish_grad_sync()
        clip, total_norm = self.settings.clip, None
        if norm or clip is not None:
            total_norm = self._clip(clip)
        step: Any = self._optimizer.step  # Megatron-FSDP's, with an argument of its own
        step(sync_grad_before_optimizer_step=False)
        return total_norm, True

    def _clip(self, clip: float | None) -> torch.Tensor:
        """Clip gradients by local pieces and return their norm: a rank has no gradient of a parameter that it holds
        nothing of."""
        gradients = [local_tensor(p.grad) for p in self._named_parameters().values() if p.grad is not None]
        squares = torch.zeros((), device=torch_device(self.settings))
        if gradients:
            squares += torch.stack(torch._foreach_norm(gradients)).square().sum()
        dist.all_reduce(squares)
        total_norm = squares.sqrt()
        if clip is not None and gradients:
            torch._foreach_mul_(gradients, clip_coefficient(total_norm, clip))
        return total_norm

    def _after_step(self) -> None:
        self._optimizer.zero_grad()

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        """Masters as DTensors of uneven pieces, by the plain model's names."""
        return dict(self._net.param_and_grad_buffer.optimizer_named_parameters)

    def _pieces(self, tensors: Any) -> Pieces:
        local = {name: None if tensor is None else local_tensor(tensor) for name, tensor in tensors.items()}
        return Pieces(local, self._shapes, torch_device(self.settings))

    def module(self) -> nn.Module:
        return self._net.module

    def full_parameters(self) -> dict[str, torch.Tensor]:
        return self._pieces(self._named_parameters()).full_fp32()

    def first_moments(self) -> dict[str, torch.Tensor]:
        state = self._optimizer.state
        return self._pieces(
            {
                name: state[p]["exp_avg"] if p in state else None
                for name, p in self._named_parameters().items()
            }
        ).full_fp32()

    def memory_bytes(self) -> dict[str, dict[str, int]]:
        """Its buffers; what it gathers for a while is not counted."""
        groups = self._net.param_and_grad_buffer.parameter_groups

        def held(name: str) -> int:
            buffers = [getattr(group, name) for group in groups]
            return sum(buffer.data.nbytes for buffer in buffers if buffer is not None)

        return {
            "device": {
                "parameters": held("model_weight_buffer"),
                "gradients": held("main_grad_buffer"),
                "master": held("main_weight_buffer"),
                "exp_avg": storage_bytes(state_tensors(self._optimizer, "exp_avg")),
                "exp_avg_sq": storage_bytes(state_tensors(self._optimizer, "exp_avg_sq")),
            }
        }

    def _held_gradient_bytes(self) -> int:
        return 0  # memory_bytes reads the buffer

    def close(self) -> None:
        del self._net
        super().close()


def _keep_for_master(parameter: nn.Parameter) -> None:
    """Its master starts from the fp32 value, as in every other row, where Megatron-FSDP would take the rounded one. It
    asks parameters so, since Transformer Engine's carry a full-precision value along."""
    full = parameter.detach()

    carrier: Any = parameter

    def forget() -> None:
        del carrier.get_high_precision_init_val, carrier.clear_high_precision_init_val

    carrier.get_high_precision_init_val = lambda: full
    carrier.clear_high_precision_init_val = forget


class MegatronFSDP1Strategy(MegatronFSDPStrategy):
    name = "mfsdp1"
    stage = 1


class MegatronFSDP2Strategy(MegatronFSDPStrategy):
    name = "mfsdp2"
    stage = 2


class MegatronFSDP3Strategy(MegatronFSDPStrategy):
    name = "mfsdp3"
    stage = 3
