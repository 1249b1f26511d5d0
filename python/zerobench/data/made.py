"""Batches that a function makes: those of one's own models, and inputs that no text gives, such as pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerobench.data.datasets import Dataset, TokenDataset, draw
from zerobench.errors import DataError

if TYPE_CHECKING:
    import torch

    from zerobench.strategies.base import Batch


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """Which micro-batch to make. The same request must give the same tensors in every process."""

    index: int
    """Place among all micro-batches of the run, over all ranks and steps; held-out batches count for themselves."""
    held_out: bool
    """Whether it is for validation: a batch that is never trained on."""
    batch_size: int
    seq_length: int
    generator: torch.Generator
    """CPU generator to draw from, seeded by --seed, ``index`` and ``held_out``."""
    tokens: Callable[[], torch.Tensor]
    """Returns the tokens of --data for this batch, int64 of shape (batch_size, seq_length)."""


class MadeDataset(Dataset):
    """Batches of a function of BatchRequests. ``tokens``: those of --data, None where the model takes none."""

    description = "made by a function"

    def __init__(
        self,
        make: Callable[[BatchRequest], Mapping[str, torch.Tensor]],
        tokens: TokenDataset | None,
        *,
        seed: int,
        seq_length: int,
    ) -> None:
        super().__init__(seed=seed, seq_length=seq_length)
        self._make, self._token_batches = make, tokens

    def _train_batch(self, index: int, batch_size: int) -> Batch:
        def tokens() -> torch.Tensor:
            return self._tokens()._train_batch(index, batch_size)["input_ids"]

        return self._made(index, batch_size, tokens, held_out=False)

    def _held_out_batch(self, index: int, batch_size: int, batch_num: int) -> Batch:
        def tokens() -> torch.Tensor:
            return self._tokens()._held_out_batch(index, batch_size, batch_num)["input_ids"]

        return self._made(index, batch_size, tokens, held_out=True)

    def _tokens(self) -> TokenDataset:
        assert self._token_batches is not None
        return self._token_batches

    def _made(
        self, index: int, batch_size: int, tokens: Callable[[], torch.Tensor], *, held_out: bool
    ) -> Batch:
        import torch

        stream = "held out" if held_out else "made"
        # torch takes 63 bits without a sign.
        generator = torch.Generator().manual_seed(draw(self.seed, stream, index) >> 1)
        batch = self._make(
            BatchRequest(
                index=index,
                held_out=held_out,
                batch_size=batch_size,
                seq_length=self.seq_length,
                generator=generator,
                tokens=tokens,
            )
        )
        if not isinstance(batch, Mapping) or not all(isinstance(v, torch.Tensor) for v in batch.values()):
            raise DataError(
                f"the batch function returned a {type(batch).__name__}, which is not a mapping of names to tensors: "
                "return a dict of tensors"
            )
        return dict(batch)
