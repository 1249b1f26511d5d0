"""Batches as a pure function of (seed, step, place in the global batch).

A step's global batch is a list of samples; sample ``i`` of the whole run has the same tokens whatever the
strategy and however the ranks split them, so one process can train on exactly what several ranks train on.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy

from zerobench.data.sources import digest, open_bytes, open_ids
from zerobench.errors import DataError

if TYPE_CHECKING:
    import torch

    from zerobench.strategies.base import Batch

_HELD_OUT_ONE_IN = 20  # the last twentieth is never trained on
_CHECKED_IDS = 1 << 26  # looked at before anything runs; all others when they are drawn


def open_data(
    spec: str,
    *,
    seed: int,
    seq_length: int,
    vocab_size: int,
    text_field: str | None = None,
    tokens: str | None = None,
    expected_digest: str | None = None,
) -> TokenDataset:
    """Open the data that ``spec`` names: "stdlib", "synthetic", or the path of a file or folder (./stdlib for a file of
    that name). ``text_field``: the field of JSON lines and Parquet that holds text, "text" by default. ``tokens``:
    "u16" or "u32" where the file holds token ids. ``expected_digest``: what ``digest_of`` said when the comparison
    began. Raises DataError where the bytes are others or cannot serve."""
    if seq_length < 2:
        raise DataError(f"seq_length {seq_length} leaves no token to predict: use at least 2")
    if spec == "synthetic":
        for option, value in (("--text-field", text_field), ("--tokens", tokens)):
            if value is not None:
                raise DataError(f"{option} {value} has no effect on synthetic data: remove it")
        return SyntheticDataset(seed=seed, seq_length=seq_length, vocab_size=vocab_size)
    content, description = _open(spec, text_field, tokens)
    if expected_digest not in (None, digest(content)):
        raise DataError(
            f"{spec} does not hold the bytes that the comparison began with: leave its files alone while it runs (the "
            "same ones on every host), or give --data a copy of them"
        )
    kind = ByteDataset if tokens is None else IdDataset
    return kind(content, description, seed=seed, seq_length=seq_length, vocab_size=vocab_size)


def digest_of(spec: str, *, text_field: str | None = None, tokens: str | None = None) -> str | None:
    """Return a digest of the bytes that ``spec`` names, or None where tokens are drawn."""
    return None if spec == "synthetic" else digest(_open(spec, text_field, tokens)[0])


def _open(spec: str, text_field: str | None, tokens: str | None) -> tuple[memoryview, str]:
    if tokens is None:
        return open_bytes(spec, text_field=text_field)
    if text_field is not None:
        raise DataError(f"--text-field {text_field} has no effect on token ids: remove it or --tokens")
    return open_ids(spec, tokens)


def draw(seed: int, stream: str, index: int) -> int:
    """64 uniform bits for sample ``index`` of ``stream``, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}/{stream}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class Dataset(ABC):
    """Makes the micro-batches of every rank. Subclasses make one by its index in the whole run."""

    description: str

    def __init__(self, *, seed: int, seq_length: int) -> None:
        self.seed = seed
        self.seq_length = seq_length

    @abstractmethod
    def _train_batch(self, index: int, batch_size: int) -> Batch:
        """Return micro-batch ``index`` of training."""

    @abstractmethod
    def _held_out_batch(self, index: int, batch_size: int, batch_num: int) -> Batch:
        """Return held-out batch ``index`` of ``batch_num`` that are spread over the held-out part."""

    def micro_batches(
        self, step: int, *, rank: int, world_size: int, batch_size: int, grad_accum: int = 1
    ) -> list[Batch]:
        """The ``grad_accum`` micro-batches of ``rank`` in optimizer step ``step`` (from 0)."""
        first = step * grad_accum * world_size
        return [
            self._train_batch(micro, batch_size)
            for micro in range(first + rank, first + grad_accum * world_size, world_size)
        ]

    def global_micro_batches(
        self, step: int, *, world_size: int, batch_size: int, grad_accum: int = 1
    ) -> list[Batch]:
        """Every rank's micro-batches of a step, for one process that stands in for all ranks."""
        return self.micro_batches(
            step, rank=0, world_size=1, batch_size=batch_size, grad_accum=grad_accum * world_size
        )

    def validation_batches(
        self, *, rank: int, world_size: int, batch_size: int, num_batches: int
    ) -> list[Batch]:
        """``num_batches`` held-out batches of ``rank``; samples overlap where the held-out part is short."""
        batch_num = num_batches * world_size
        return [
            self._held_out_batch(batch, batch_size, batch_num) for batch in range(rank, batch_num, world_size)
        ]


class TokenDataset(Dataset):
    """Batches of tokens, which are the labels too. Subclasses say what the tokens of one sample are."""

    def __init__(self, *, seed: int, seq_length: int, vocab_size: int) -> None:
        super().__init__(seed=seed, seq_length=seq_length)
        self.vocab_size = vocab_size

    @abstractmethod
    def _train_sample(self, index: int) -> torch.Tensor:
        """Tokens (seq_length,) int64 of training sample ``index``."""

    @abstractmethod
    def _validation_sample(self, index: int, num_samples: int) -> torch.Tensor:
        """Tokens of held-out sample ``index`` of ``num_samples`` that are spread over the held-out part."""

    def _train_batch(self, index: int, batch_size: int) -> Batch:
        return _stack([self._train_sample(index * batch_size + row) for row in range(batch_size)])

    def _held_out_batch(self, index: int, batch_size: int, batch_num: int) -> Batch:
        samples = range(index * batch_size, (index + 1) * batch_size)
        return _stack([self._validation_sample(sample, batch_num * batch_size) for sample in samples])


class _StreamDataset(TokenDataset):
    """Sequences at drawn offsets of one stream of tokens; the last part of it is held out for validation."""

    unit: str

    def __init__(
        self, content: memoryview, description: str, *, seed: int, seq_length: int, vocab_size: int
    ) -> None:
        super().__init__(seed=seed, seq_length=seq_length, vocab_size=vocab_size)
        needed = 2 * seq_length + 1  # one training sequence to choose by offset, one held out
        if len(content) < needed:
            raise DataError(
                f"{description} holds {len(content)} {self.unit} and sequences of {seq_length} need at least "
                f"{needed} (one to train on, one held out): give more text or a shorter seq_length"
            )
        held_out_num = max(len(content) // _HELD_OUT_ONE_IN, seq_length)
        self.description = description
        self._train = content[: len(content) - held_out_num]
        self._held_out = content[len(content) - held_out_num :]

    def _train_sample(self, index: int) -> torch.Tensor:
        offset = draw(self.seed, "train", index) % (len(self._train) - self.seq_length + 1)
        return self._tokens(self._train[offset : offset + self.seq_length])

    def _validation_sample(self, index: int, num_samples: int) -> torch.Tensor:
        offset = index * (len(self._held_out) - self.seq_length) // max(num_samples - 1, 1)
        return self._tokens(self._held_out[offset : offset + self.seq_length])

    def _tokens(self, content: memoryview) -> torch.Tensor:
        import torch

        return torch.from_numpy(numpy.asarray(content).astype(numpy.int64))


class ByteDataset(_StreamDataset):
    """Each byte of a text is a token."""

    unit = "bytes"

    def __init__(
        self, content: memoryview, description: str, *, seed: int, seq_length: int, vocab_size: int
    ) -> None:
        if vocab_size < 256:
            raise DataError(
                f"bytes of text need a vocabulary of at least 256 and vocab_size is {vocab_size}: "
                "raise vocab_size or train on synthetic data"
            )
        super().__init__(content, description, seed=seed, seq_length=seq_length, vocab_size=vocab_size)

    @property
    def train_bytes(self) -> int:
        return len(self._train)

    @property
    def held_out_bytes(self) -> int:
        return len(self._held_out)


class IdDataset(_StreamDataset):
    """A file of token ids, as a tokenizer made them."""

    unit = "tokens"

    def __init__(
        self, content: memoryview, description: str, *, seed: int, seq_length: int, vocab_size: int
    ) -> None:
        super().__init__(content, description, seed=seed, seq_length=seq_length, vocab_size=vocab_size)
        self._check(content[:_CHECKED_IDS])

    def _tokens(self, content: memoryview) -> torch.Tensor:
        self._check(content)
        return super()._tokens(content)

    def _check(self, content: memoryview) -> None:
        largest = int(numpy.asarray(content).max())
        if largest >= self.vocab_size:
            raise DataError(
                f"{self.description} holds token {largest} and the model's vocab_size is {self.vocab_size}: give the "
                "ids of the model's own tokenizer, the other width as --tokens, or raise vocab_size"
            )


class SyntheticDataset(TokenDataset):
    """Uniform random tokens: for measuring speed where text does not matter; nothing can be learned."""

    def __init__(self, *, seed: int, seq_length: int, vocab_size: int) -> None:
        if vocab_size < 1:
            raise DataError(f"vocab_size {vocab_size} leaves no token to draw: use at least 1")
        super().__init__(seed=seed, seq_length=seq_length, vocab_size=vocab_size)
        self.description = f"synthetic ({vocab_size} tokens)"

    def _random_sample(self, stream: str, index: int) -> torch.Tensor:
        import torch

        seed = draw(self.seed, stream, index) >> 1  # torch takes 63 bits without a sign
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.vocab_size, (self.seq_length,), generator=generator)

    def _train_sample(self, index: int) -> torch.Tensor:
        return self._random_sample("train", index)

    def _validation_sample(self, index: int, num_samples: int) -> torch.Tensor:
        return self._random_sample("validation", index)


def _stack(samples: Sequence[torch.Tensor]) -> Batch:
    """Labels are the inputs: the model shifts them by one."""
    import torch

    input_ids = torch.stack(list(samples))
    return {"input_ids": input_ids, "labels": input_ids}
