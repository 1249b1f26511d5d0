"""Full tensors from pieces that ranks hold in rank order: each rank a run of a tensor's elements, of any length. Some
peers shard so and have no reader of their own that gives every rank the whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist


class Pieces:
    """This rank's pieces by name, and how many elements every rank holds. Collective, as all its methods."""

    def __init__(
        self,
        pieces: Mapping[str, torch.Tensor | None],
        shapes: Mapping[str, torch.Size],
        device: torch.device,
    ) -> None:
        self._shapes = shapes
        self._device = device
        self._pieces = {
            name: torch.empty(0, device=device) if piece is None else piece.detach().reshape(-1)
            for name, piece in pieces.items()
        }
        mine = torch.tensor([piece.numel() for piece in self._pieces.values()], device=device)
        counts = torch.empty(dist.get_world_size() * len(mine), dtype=mine.dtype, device=device)
        dist.all_gather_into_tensor(counts, mine)
        by_name = counts.view(-1, len(mine)).t().tolist()
        self._numels = dict(zip(self._pieces, by_name, strict=True))  # one a rank

    def full_fp32(self) -> dict[str, torch.Tensor]:
        """fp32 CPU tensors; zeros where no rank holds anything."""
        return {name: self._gather(name) for name in self._pieces}

    def _is_whole(self, name: str) -> bool:
        return all(numel == self._shapes[name].numel() for numel in self._numels[name])

    def _gather(self, name: str) -> torch.Tensor:
        shape, numels, piece = self._shapes[name], self._numels[name], self._pieces[name]
        if sum(numels) == 0:
            return torch.zeros(shape)
        if self._is_whole(name):
            return piece.to(device="cpu", dtype=torch.float32, copy=True).view(shape)
        padded = torch.zeros(max(numels), device=self._device)
        padded[: piece.numel()] = piece
        gathered = torch.empty(len(numels) * max(numels), device=self._device)
        dist.all_gather_into_tensor(gathered, padded)
        rows = gathered.cpu().view(len(numels), -1)
        runs = [row[:numel] for row, numel in zip(rows, numels, strict=True)]
        return torch.cat(runs).view(shape)
