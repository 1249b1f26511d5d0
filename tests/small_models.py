"""Small models of every awkward kind. A forward returns the mean loss of its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 24


class Block(nn.Module):
    """The repeated module that becomes a unit."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Chain(nn.Module):
    """Blocks in the order that the batch asks for."""

    def __init__(
        self, num_blocks: int = 3, *, block: Callable[[], nn.Module] = Block, reentrant: bool | None = None
    ) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.outlet = nn.Linear(WIDTH, 3)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor, y: torch.Tensor, order: Iterable[int] | None = None) -> torch.Tensor:
        h = self.inlet(x)
        for index in range(len(self.blocks)) if order is None else order:
            block = self.blocks[index]
            if self.reentrant is None or not torch.is_grad_enabled():
                h = block(h)
            else:
                h = checkpoint(block, h, use_reentrant=self.reentrant, preserve_rng_state=False)
        return F.mse_loss(self.outlet(h).float(), y.float())


class Stem(nn.Linear):
    """A way into a model, beside others."""


class Stems(Chain):
    """Blocks behind one of two stems, which the batch's own numbers choose."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.ModuleList([Stem(5, WIDTH), Stem(5, WIDTH)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.inlet[int(x.sum() > 0)](x)
        for block in self.blocks:
            h = block(h)
        return F.mse_loss(self.outlet(h).float(), y.float())


class HalvesBlock(Block):
    """A block of which a forward may take the second half alone; gradients of the first come last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor, is_whole: bool) -> torch.Tensor:
        return super().forward(h + torch.tanh(self.first(h)) if is_whole else h)


class Halves(Chain):
    """From HALF on an index stands for the second half of a block."""

    HALF = 10

    def __init__(self) -> None:
        super().__init__(block=HalvesBlock)

    def forward(self, x: torch.Tensor, y: torch.Tensor, order: Iterable[int]) -> torch.Tensor:
        h = self.inlet(x)
        for index in order:
            h = self.blocks[index % self.HALF](h, index < self.HALF)
        return F.mse_loss(self.outlet(h).float(), y.float())


class Odd(nn.Module):
    """Scalars, odd sizes, no elements at all, and fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.full((1,), 0.1))
        self.nothing = nn.Parameter(torch.empty(0))
        self.no_rows = nn.Parameter(torch.empty(0, 5))
        self.blocks = nn.ModuleList(OddBlock() for _ in range(2))
        self.last = nn.Linear(7, 3, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = F.pad(x, (0, 2)) * self.scale + self.shift + self.nothing.sum() + self.no_rows.sum()
        for block in self.blocks:
            h = block(h)
        return F.mse_loss(self.last(h), y.float())


class OddBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 13)
        self.outer = nn.Linear(13, 7, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.pair = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.outer(torch.tanh(self.inner(x))) + self.pair.sum()


class Unused(Chain):
    """Parameters that no forward touches, in the root and in every block."""

    def __init__(self) -> None:
        super().__init__(3)
        self.spare = nn.Parameter(torch.ones(11))
        for block in self.blocks:
            block.spare = nn.Linear(3, 5)


class LoraBlock(nn.Module):
    """A frozen base with low-rank corrections, added to its output or merged into its weight."""

    def __init__(self, *, merged: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.base = nn.Linear(WIDTH, WIDTH)
        self.a = nn.Linear(WIDTH, 2, bias=False)
        self.b = nn.Linear(2, WIDTH, bias=False)
        self.tail = nn.Linear(WIDTH, WIDTH)
        for frozen in (self.norm, self.base, self.tail):
            frozen.requires_grad_(False)
        self.merged = merged

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        if self.merged:
            h = F.linear(h, self.base.weight + self.b.weight @ self.a.weight, self.base.bias)
        else:
            h = self.base(h) + self.b(self.a(h))
        return x + self.tail(torch.tanh(h))


def lora(*, merged: bool, reentrant: bool | None = None, frozen_inlet: bool = False) -> Chain:
    model = Chain(3, block=lambda: LoraBlock(merged=merged), reentrant=reentrant)
    model.inlet.requires_grad_(not frozen_inlet)
    return model


class Mapped(Chain):
    """Blocks that torch.vmap calls, which gives them tensors of its own kind."""

    def __init__(self) -> None:
        super().__init__(block=lambda: LoraBlock(merged=False))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.inlet(x)
        for block in self.blocks:
            h = torch.vmap(block)(h)
        return F.mse_loss(self.outlet(h).float(), y.float())


class PromptedBlock(nn.Module):
    """Takes a trained parameter of the model, whose gradient is there before backward leaves the frozen parts."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.frozen[1](torch.tanh(self.frozen[0](x))))
        return x + self.last(h + self.frozen[0](prompt))


class Prompted(Chain):
    """Blocks that all get one parameter, as in prefix tuning."""

    def __init__(self) -> None:
        super().__init__(3, block=PromptedBlock)
        self.prompt = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.inlet(x)
        for block in self.blocks:
            h = block(h, self.prompt)
        return F.mse_loss(self.outlet(h).float(), y.float())


def frozen_parts() -> Chain:
    """A whole block, half of another and the outlet's bias."""
    model = Chain(4)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    model.outlet.bias.requires_grad_(False)
    return model


class NormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class ExpertBlock(nn.Module):
    """A mixture of experts: which of them work, and get gradients, changes from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        scores, chosen = self.router(h).softmax(-1).max(-1)
        for index in chosen.unique().tolist():
            rows = chosen == index
            x = x + rows[:, None] * scores[:, None] * torch.tanh(self.experts[index](h))
        return x


class Tied(nn.Module):
    """Embedding and head share a weight; two blocks share their norm; used through modules and as a plain tensor."""

    def __init__(self, *, plain: bool = False, checkpoint_head: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[2].norm = self.blocks[0].norm
        self.plain, self.checkpoint_head = plain, checkpoint_head
        if not plain:
            self.head = nn.Linear(WIDTH, 17, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        if self.plain:
            logits = F.linear(h, self.embed.weight)
        elif self.checkpoint_head:
            logits = checkpoint(self.head, h, use_reentrant=True, preserve_rng_state=False)
        else:
            logits = self.head(h)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class Twice(nn.Module):
    """One inner module called twice by its unit, each time in a checkpoint of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(checkpoint(self.inner, self.norm(x), use_reentrant=True, preserve_rng_state=False))
        return x + torch.tanh(checkpoint(self.inner, x, use_reentrant=True, preserve_rng_state=False))


@dataclass
class Parts:
    left: torch.Tensor
    right: torch.Tensor | None


class Listed(list):
    """No container that pytree knows."""


class PartsBlock(nn.Module):
    """Takes and returns dataclasses, lists, dicts and tuples, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, parts: Parts) -> tuple[dict[str, Listed], nn.Parameter]:
        right = parts.left if parts.right is None else parts.right
        left = parts.left + torch.tanh(self.left(right))
        return {"parts": Listed([Parts(left, torch.tanh(self.right(parts.left)))])}, self.left.bias


class Structured(Chain):
    def __init__(self) -> None:
        super().__init__(3, block=PartsBlock)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        parts = Parts(self.inlet(x), None)
        for block in self.blocks:
            (parts,) = block(parts=parts)[0]["parts"]
        return F.mse_loss(self.outlet(parts.left + parts.right), y.float())


class HandingBlock(Block):
    """Hands a tensor on that the first block makes, as T5's blocks do their position bias; or changes its input in
    place and returns that."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.bias = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        bias = torch.tanh(self.bias(torch.tanh(x))) if bias is None else bias
        added = super().forward(x + bias) - x
        return (x.add_(added) if self.in_place else x + added), bias


class Handing(Chain):
    """Blocks that pass tensors through."""

    def __init__(self, num_blocks: int = 4, *, in_place: bool = False) -> None:
        super().__init__(num_blocks, block=lambda: HandingBlock(in_place=in_place))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h, bias = self.inlet(x), None
        for block in self.blocks:
            h, bias = block(h, bias)
        return F.mse_loss(self.outlet(h + bias).float(), y.float())


class Carrier:
    """Two tensors in an object that torch knows nothing of."""

    def __init__(self, h: torch.Tensor, kept: torch.Tensor) -> None:
        self.h = h
        self.kept = kept


class CarryingBlock(Block):
    """Takes and returns two tensors in one thing, the second of them as it came."""

    def forward(self, given: Carrier | tuple[torch.Tensor, torch.Tensor]) -> Any:
        h, kept = vars(given).values() if isinstance(given, Carrier) else given
        h = super().forward(h) + kept
        return Carrier(h, kept) if isinstance(given, Carrier) else (h, kept)


class Carrying(Chain):
    def __init__(self, *, by_object: bool = False, block: Callable[[], nn.Module] = CarryingBlock) -> None:
        super().__init__(4, block=block)
        self.by_object = by_object

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.inlet(x)
        given = Carrier(h, torch.sin(h)) if self.by_object else (h, torch.sin(h))
        for block in self.blocks:
            given = block(given)
        h, kept = vars(given).values() if self.by_object else given
        return F.mse_loss(self.outlet(h + kept).float(), y.float())


class AsideBlock(Block):
    """Keeps a loss on the side, whose backward needs parameters and may come before that of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.aside = torch.softmax(self.gate(x), dim=-1).square().mean()
        return x


class Aside(Chain):
    def __init__(self) -> None:
        super().__init__(3, block=AsideBlock)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x, y) + 0.1 * sum(block.aside for block in self.blocks)
        for block in self.blocks:
            block.aside = None
        return loss


class ViewBlock(Block):
    """Returns a view of what it made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(-1, WIDTH)


class ChangedViews(Chain):
    """Changes in place what its blocks return."""

    def __init__(self) -> None:
        super().__init__(4, block=ViewBlock)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.inlet(x)
        for block in self.blocks:
            h = block(h)
            h += 1
            h[:, 0] *= 0.5
        return F.mse_loss(self.outlet(h).float(), y.float())


class RecursiveBlock(CarryingBlock):
    """Calls itself once before it returns."""

    def forward(self, given: tuple[torch.Tensor, torch.Tensor], depth: int = 1) -> Any:
        h, kept = super().forward(given)
        if depth:
            h = h + self((torch.tanh(h), torch.cos(kept)), depth - 1)[0]
        return h, kept


def hooked() -> Chain:
    """With forward pre-hooks that read parameters of the modules that they are on, as older weight norms do."""
    model = Chain(3)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: (args[0] * module.up.weight.norm(),))
    return model


class Bare(nn.Module):
    """No repeated block: everything is the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 9)
        self.second = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.second(torch.relu(self.first(x))), y.float())
