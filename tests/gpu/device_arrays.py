"""Arrays on the device at any alignment, with hard values, and their comparison in bits.

ZEROBENCH_SMALL=1 keeps sizes small and puts arrays at the very end of their memory, for compute-sanitizer
(docs/reference/building.md).
"""

from __future__ import annotations

import os

import torch

SMALL = os.environ.get("ZEROBENCH_SMALL") == "1"
DEVICE = "cuda"
DTYPES = ("float32", "bfloat16", "float16")
SIZES = (0, 1, 2, 3, 7, 8, 9, 127, 128, 129, 4097, 12_289 if SMALL else (1 << 20) + 3)
ALIGNED_NUMEL = 8  # 16 bytes of any dtype
GUARD = 9.0


class Array:
    """Values on the device, ``shift`` elements past an address of 16 bytes; what lies around them is known."""

    def __init__(self, values: torch.Tensor, shift: int = 0) -> None:
        begin = ALIGNED_NUMEL + shift
        whole = torch.full((begin + values.numel() + (0 if SMALL else ALIGNED_NUMEL),), GUARD)
        whole = whole.to(values.dtype)
        whole[begin : begin + values.numel()] = values
        self._whole = whole.to(DEVICE)
        self._begin = begin
        self.numel = values.numel()
        self.dtype = str(values.dtype).removeprefix("torch.")
        self.address = self._whole.data_ptr() + begin * values.element_size()

    def values(self) -> torch.Tensor:
        return self._whole[self._begin : self._begin + self.numel].cpu()

    def assert_guarded(self) -> None:
        whole = self._whole.cpu()
        assert bool((whole[: self._begin] == GUARD).all()), "elements before the array were written"
        assert bool((whole[self._begin + self.numel :] == GUARD).all()), (
            "elements past the array were written"
        )

    def assert_holds(self, wanted: torch.Tensor, what: str = "") -> None:
        """The same bits; any NaN equals any NaN."""
        assert_same_bits(self.values(), wanted, what)
        self.assert_guarded()


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()])


def assert_same_bits(got: torch.Tensor, wanted: torch.Tensor, what: str = "") -> None:
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, what
    same = (words(got) == words(wanted)) | (got.isnan() & wanted.isnan())
    if not bool(same.all()):
        index = int((~same).nonzero()[0])
        raise AssertionError(
            f"{what}: element {index} of {got.numel()} is {got[index].item()!r}, not {wanted[index].item()!r}; "
            f"{int((~same).sum())} differ"
        )


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


def hard_values(numel: int, dtype: str, generator: torch.Generator) -> torch.Tensor:
    """A third each: ordinary, of any magnitude, and any bits at all, so zeros, denormals, infinities and NaN too."""
    ordinary = torch.randn(numel, generator=generator)
    scaled = ordinary * torch.randn(numel, generator=generator).mul(30).exp2()
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(torch.int32)
    # Few exponents of 32 bits fall into the range of 16; these do.
    tiny = ordinary * torch.randint(-30, 18, (numel,), generator=generator).float().exp2()
    kind = torch.randint(0, 8, (numel,), generator=generator)
    values = torch.where(kind < 3, ordinary, scaled)
    values = torch.where(kind > 5, tiny, values)
    values = torch.where(kind == 5, bits.view(torch.float32), values)
    values[5::11] = 0.0
    values[7::13] = -0.0
    return values.to(dtype_of(dtype))
