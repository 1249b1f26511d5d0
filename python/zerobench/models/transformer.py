"""A decoder-only transformer in plain PyTorch: GPT-2's shape and initialisation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerobench.errors import ConfigError
from zerobench.models.presets import PresetConfig

INIT_STD = 0.02


class CausalLMOutput(NamedTuple):
    """A named tuple: wrappers (DDP, FSDP2) look for the tensors of an output in tuples, not dataclasses."""

    loss: torch.Tensor | None
    logits: torch.Tensor  # (batch_size, seq_length, vocab_size)


class ResidualLinear(nn.Linear):
    """A projection into the residual stream, initialised smaller the deeper the model."""

    def __init__(self, inputs: int, outputs: int, *, num_layers: int) -> None:
        super().__init__(inputs, outputs)
        self.init_std = INIT_STD / math.sqrt(2 * num_layers)


class Attention(nn.Module):
    def __init__(self, config: PresetConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = ResidualLinear(config.hidden_size, config.hidden_size, num_layers=config.num_layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch_size, seq_length, hidden_size = x.shape
        qkv = self.qkv(x).view(batch_size, seq_length, 3, self.num_heads, hidden_size // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, heads, S, H / heads)
        y = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.proj(y.transpose(1, 2).reshape(batch_size, seq_length, hidden_size))


class FeedForward(nn.Module):
    def __init__(self, config: PresetConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.hidden_size, config.ffn_size)
        self.proj = ResidualLinear(config.ffn_size, config.hidden_size, num_layers=config.num_layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(F.gelu(self.fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: PresetConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x)))
        return x + self.dropout(self.mlp(self.ln_2(x)))


class Transformer(nn.Module):
    def __init__(self, config: PresetConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_seq_length, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()
        self._checkpointing: bool = False
        self._use_reentrant: bool = False

    def tie_weights(self) -> None:
        if self.config.tied_embeddings:
            self.lm_head.weight = self.wte.weight

    def _init_weights(self, module: nn.Module) -> None:
        """GPT-2's initialisation of one module's own parameters (the protocol of models/materialise.py)."""
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear | nn.Embedding):
            std = module.init_std if isinstance(module, ResidualLinear) else INIT_STD
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def gradient_checkpointing_enable(self, *, use_reentrant: bool = False) -> None:
        """Keep only each block's input in forward and compute the block again in backward."""
        self._checkpointing, self._use_reentrant = True, use_reentrant

    def gradient_checkpointing_disable(self) -> None:
        self._checkpointing = False

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the first block's input (batch_size, seq_length, hidden_size)."""
        seq_length = input_ids.shape[1]
        if seq_length > self.config.max_seq_length:
            raise ConfigError(
                f"input of {seq_length} tokens exceeds max_seq_length {self.config.max_seq_length}: "
                "shorten the sequence or override max_seq_length"
            )
        positions = torch.arange(seq_length, device=input_ids.device)
        embedded: torch.Tensor = self.dropout(self.wte(input_ids) + self.wpe(positions))
        return embedded

    def run(self, blocks: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last of ``blocks``, each checkpointed where that is on."""
        for block in blocks:
            if self._checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(
                    block, x, use_reentrant=self._use_reentrant, preserve_rng_state=self.config.dropout > 0
                )
            else:
                x = block(x)
        return x

    def loss(self, x: torch.Tensor, labels: torch.Tensor | None) -> CausalLMOutput:
        """Return logits and loss from the last block's output."""
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutput(loss, logits)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> CausalLMOutput:
        """``labels`` is laid out as ``input_ids`` (the shift by one happens here); -100 is left out."""
        return self.loss(self.run(self.blocks, self.embed(input_ids)), labels)
