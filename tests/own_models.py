"""Modules of one's own, as ``--model own_models:NAME`` names them: right ones, and each kind of wrong one."""

from __future__ import annotations

import torch
from torch import nn

from zerobench.models import ModelSource

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class Regression(nn.Module):
    """Takes points, has a parameter that only its own code gives values, and a batch norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.inlet = nn.Linear(8, WIDTH, bias=False)  # a norm follows
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.outlet = nn.Linear(WIDTH, 4)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.inlet(points)) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


class Language(nn.Module):
    """Takes the tokens of --data, and returns its loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())


def points(request) -> dict[str, torch.Tensor]:
    drawn = torch.randn(request.batch_size, 8, generator=request.generator)
    return {"points": drawn, "values": drawn[:, :4].sin()}


def squared_error(model: nn.Module, batch) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["points"]), batch["values"])


def regression() -> ModelSource:
    print("what a function prints is no answer")
    return ModelSource(model=Regression, batch=points, loss=squared_error)


def language() -> nn.Module:
    return Language()


class Noisy(Regression):
    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return super().forward(points + torch.randn_like(points))


class Unused(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.left_out = nn.Linear(2, 2)


def of_points(model) -> ModelSource:
    return ModelSource(model=model, batch=points, loss=squared_error)


def noisy() -> ModelSource:
    return of_points(Noisy)


def unused() -> ModelSource:
    return of_points(Unused)


def rounded() -> ModelSource:
    return of_points(lambda: Regression().bfloat16())


def without_loss() -> ModelSource:
    return ModelSource(model=lambda: nn.Linear(8, 4), batch=lambda request: {"input": torch.zeros(2, 8)})


def loss_of_each() -> ModelSource:
    return ModelSource(model=Regression, batch=points, loss=lambda model, batch: model(batch["points"]))


def other_inputs() -> ModelSource:
    return ModelSource(model=Regression)


def lists() -> ModelSource:
    return ModelSource(model=Regression, batch=lambda request: {"points": [1, 2]}, loss=squared_error)


def nothing() -> None:
    return None


def broken() -> nn.Module:
    raise RuntimeError("no such checkpoint")


number = 3
