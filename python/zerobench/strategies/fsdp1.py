"""FullyShardedDataParallel, FSDP2's predecessor: one flat parameter a block, the rest with the root."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from zerobench.strategies.base import StrategySettings
from zerobench.strategies.compiled import repeated_blocks
from zerobench.strategies.peer import PeerStrategy
from zerobench.strategies.pieces import Pieces
from zerobench.strategies.sharded_scaler import FusedShardedGradScaler
from zerobench.strategies.shared import make_grad_scaler, precision_dtype, torch_device


class FSDP1Strategy(PeerStrategy):
    """Sharded parameters, gradients and optimizer state, fp32 masters cast for each gather."""

    name = "fsdp1"
    stage = 3

    @classmethod
    def unsupported(cls, settings: StrategySettings) -> str | None:
        if settings.device != "cuda":
            return "FSDP1 shards on GPUs only: use fsdp2 on CPU"
        return super().unsupported(settings)

    def _wrap(self, model: nn.Module) -> nn.Module:
        dtype = precision_dtype(self.settings)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        low_precision = dtype != torch.float32
        with warnings.catch_warnings():
            # It is deprecated, which is why it is a row.
            warnings.filterwarnings("ignore", category=FutureWarning)
            return FullyShardedDataParallel(
                model,
                auto_wrap_policy=ModuleWrapPolicy({type(block) for block in repeated_blocks(model)}),
                mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=dtype)
                if low_precision
                else None,
                device_id=torch_device(self.settings),
                backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
                forward_prefetch=True,
                limit_all_gathers=True,
                use_orig_params=True,
            )

    def _make_scaler(self) -> torch.amp.GradScaler | None:
        return make_grad_scaler(self.settings, FusedShardedGradScaler)

    def _micro_batch(self, *, is_last: bool) -> AbstractContextManager[object]:
        # One rank has nothing to save, and no_sync would leave gradients in low precision, which a tied parameter does
        # not take where nothing is sharded (torch 2.11 and 2.13).
        return nullcontext() if is_last or self.settings.world_size == 1 else self._fsdp.no_sync()

    @property
    def _fsdp(self) -> FullyShardedDataParallel:
        assert isinstance(self._model, FullyShardedDataParallel)
        return self._model

    def _clip(self, clip: float | None) -> torch.Tensor:
        return self._fsdp.clip_grad_norm_(float("inf") if clip is None else clip)

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's flat pieces, by the plain model's names."""
        return {
            name.replace("_fsdp_wrapped_module.", ""): parameter
            for name, parameter in self._model.named_parameters()
        }

    def full_parameters(self) -> dict[str, torch.Tensor]:
        return Pieces(self._named_parameters(), self._shapes, torch_device(self.settings)).full_fp32()

    def first_moments(self) -> dict[str, torch.Tensor]:
        state = self._optimizer.state
        moments = {
            name: state[parameter]["exp_avg"] if parameter in state else None
            for name, parameter in self._named_parameters().items()
        }
        return Pieces(moments, self._shapes, torch_device(self.settings)).full_fp32()
