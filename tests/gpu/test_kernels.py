"""The kernels of a CUDA device against what torch computes on the CPU, bit for bit."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from device_arrays import (
    DEVICE,
    DTYPES,
    SIZES,
    SMALL,
    Array,
    dtype_of,
    hard_values,
)

from zerobench import _native

cuda = _native.load_cuda()
# Aligned alike, or apart by less than a group of 16 bytes, or by whole groups of float32 only.
SHIFTS = ((0, 0), (3, 3), (0, 1), (5, 2), (1, 5), (8, 4))


@pytest.fixture(scope="module")
def device():
    return cuda.make_device(0, on_out_of_memory=torch.cuda.empty_cache)


def generator_of(*seeds: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(seeds))


def convert(device, how: str, destination: Array, source: Array) -> None:
    getattr(device, how)(
        "compute",
        destination=destination.address,
        destination_dtype=destination.dtype,
        source=source.address,
        source_dtype=source.dtype,
        numel=source.numel,
    )


@pytest.mark.parametrize("source_dtype", DTYPES)
@pytest.mark.parametrize("destination_dtype", DTYPES)
def test_casts_are_those_of_torch(device, destination_dtype: str, source_dtype: str) -> None:
    for numel in SIZES:
        for shifts in SHIFTS if numel < 100_000 else SHIFTS[:3]:
            values = hard_values(numel, source_dtype, generator_of(numel, *shifts))
            destination = Array(torch.zeros(numel, dtype=dtype_of(destination_dtype)), shifts[0])
            source = Array(values, shifts[1])
            convert(device, "cast", destination, source)
            wanted = values.float().to(dtype_of(destination_dtype))
            destination.assert_holds(wanted, f"{numel} elements, shifts {shifts}")
            source.assert_holds(values, "the source")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_value_is_cast_and_comes_back(device, dtype: str) -> None:
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype_of(dtype))
    source, wide = Array(values), Array(torch.zeros(2**16))
    convert(device, "cast", wide, source)
    wide.assert_holds(values.float(), "to float32")
    back = Array(torch.zeros(2**16, dtype=dtype_of(dtype)))
    convert(device, "cast", back, wide)
    back.assert_holds(values, "and back")


@pytest.mark.parametrize("source_dtype", DTYPES)
@pytest.mark.parametrize("destination_dtype", DTYPES)
def test_sums_are_rounded_once(device, destination_dtype: str, source_dtype: str) -> None:
    for numel in SIZES:
        for shifts in SHIFTS if numel < 100_000 else SHIFTS[:3]:
            generator = generator_of(numel, *shifts)
            values = hard_values(numel, source_dtype, generator)
            before = hard_values(numel, destination_dtype, generator)
            destination = Array(before, shifts[0])
            convert(device, "add", destination, Array(values, shifts[1]))
            wanted = (before.float() + values.float()).to(before.dtype)
            destination.assert_holds(wanted, f"{numel} elements, shifts {shifts}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_copies(device, dtype: str) -> None:
    for numel in SIZES:
        for shift in (0, 1, 5):
            values = hard_values(numel, dtype, generator_of(numel, shift))
            source, destination = Array(values, shift), Array(values, shift)
            size_bytes = numel * values.element_size()
            device.zero("compute", destination=destination.address, size_bytes=size_bytes)
            destination.assert_holds(torch.zeros_like(values), f"{numel} elements, shift {shift}")
            device.copy(
                "compute", destination=destination.address, source=source.address, size_bytes=size_bytes
            )
            destination.assert_holds(values, f"{numel} elements, shift {shift}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("item_num", [1, 12, 120, 121, 300])
def test_many_items_into_one_flat_buffer(device, dtype: str, item_num: int) -> None:
    """Items of all source dtypes, zeros and sums among them, of sizes up to several tiles, with gaps between them."""
    generator = generator_of(item_num)
    largest = torch.randint(0, item_num, (3,), generator=generator).tolist()
    sizes = torch.randint(0, 200, (item_num,), generator=generator).tolist()
    for index, numel in zip(largest, (4096, 9001, 4 if SMALL else 300_007), strict=True):
        sizes[index] = numel
    gaps = torch.randint(0, 5, (item_num,), generator=generator).tolist()
    flat = hard_values(sum(sizes) + sum(gaps), dtype, generator)
    wanted, buffer = flat.clone(), Array(flat)
    items, sources, offset = [], [], 0
    for index, (numel, gap) in enumerate(zip(sizes, gaps, strict=True)):
        offset += gap
        target = wanted[offset : offset + numel]
        source_dtype = DTYPES[index % 3]
        kind = ("zero", "cast", "add")[int(torch.randint(0, 3, (1,), generator=generator))]
        source = Array(hard_values(numel, source_dtype, generator), shift=index % 7)
        sources.append(source)
        if kind == "zero":
            target.zero_()
        else:
            before = target.float() if kind == "add" else 0.0
            added = before + source.values().float() if kind == "add" else source.values().float()
            target.copy_(added.to(target.dtype))
        items.append(
            cuda.PackItem(
                destination=buffer.address + offset * flat.element_size(),
                destination_dtype=dtype,
                source=None if kind == "zero" else source.address,
                source_dtype=source_dtype,
                numel=numel,
                accumulate=kind == "add",
            )
        )
        offset += numel
    device.pack("compute", items)
    buffer.assert_holds(wanted, f"{item_num} items")


def sums_of_squares(device, *sums: Sequence[Array], lane: str = "compute") -> torch.Tensor:
    """One sum for each sequence of pieces, by one call."""
    results = torch.full((len(sums),), -1.0, dtype=torch.float64, device=DEVICE)
    device.wait(lane, device.mark("compute"))
    places = [[(piece.address, piece.numel) for piece in pieces] for pieces in sums]
    addresses = [results[index:].data_ptr() for index in range(len(sums))]
    device.sums_of_squares(lane, dtype=sums[0][0].dtype, sums=list(zip(addresses, places, strict=True)))
    device.wait("compute", device.mark(lane))
    return results.cpu()


def sum_of_squares(device, array: Array, lane: str = "compute") -> torch.Tensor:
    return sums_of_squares(device, [array], lane=lane)


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.int64), wanted.view(torch.int64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_squares_are_near_and_always_the_same(device, dtype: str) -> None:
    """The order depends on dtype and numel: not on the address, the lane or the call."""
    for numel in (*SIZES, *(() if SMALL else (8_388_609, 20_000_003))):
        values = torch.randn(numel, generator=generator_of(numel)).mul_(100).to(dtype_of(dtype))
        aligned, shifted = Array(values), Array(values, shift=3)
        found = sum_of_squares(device, aligned)
        wanted = values.to(DEVICE).double().square().sum().item()
        assert abs(found.item() - wanted) <= 1e-12 * wanted, f"{numel} elements"
        for again in (
            sum_of_squares(device, aligned),
            sum_of_squares(device, shifted),
            sum_of_squares(device, aligned, lane="reduce"),
        ):
            assert same_bits(again, found), f"{numel} elements"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("piece_nums", [(2,), (120,), (121,), (400,), (13, 110), (50,) * 4, (1,) * 65])
def test_sums_of_squares_of_pieces(device, dtype: str, piece_nums: tuple[int, ...]) -> None:
    """A launch takes 120 pieces and 30 sums. No sum depends on the others, or on where its pieces lie."""
    generator = generator_of(sum(piece_nums))
    values = [
        [
            torch.randn(SIZES[(3 * first + index) % len(SIZES)] % 70_001, generator=generator).to(
                dtype_of(dtype)
            )
            for index in range(piece_num)
        ]
        for first, piece_num in enumerate(piece_nums)
    ]
    found = sums_of_squares(device, *([Array(piece) for piece in pieces] for pieces in values))
    for index, pieces in enumerate(values):
        wanted = sum(piece.double().square().sum().item() for piece in pieces)
        assert abs(found[index].item() - wanted) <= 1e-12 * wanted
        alone = sums_of_squares(device, [Array(piece, shift=place % 4) for place, piece in enumerate(pieces)])
        assert same_bits(alone, found[index : index + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_reaches_the_sum(device, dtype: str, value: float) -> None:
    for numel in SIZES[1:]:
        for index in {0, numel // 2, numel - 1}:
            values = torch.ones(numel, dtype=dtype_of(dtype))
            values[index] = value
            found = sum_of_squares(device, Array(values)).item()
            assert math.isnan(found) if math.isnan(value) else found == math.inf, (numel, index)


def test_squares_of_large_and_tiny_floats_are_exact(device) -> None:
    for value in (3e38, 1e-45, 2.0**-126, 65504.0):
        exact = torch.tensor([value]).double().item()
        assert sum_of_squares(device, Array(torch.tensor([value]))).item() == exact * exact


def norm_in_python(partial_sums: list[list[float]], divisor: float, clip: float):
    """The arithmetic that kernels/device.h states."""
    flat_sums = []
    for of_ranks in zip(*partial_sums, strict=True):
        of_flat = 0.0
        for partial in of_ranks:
            of_flat += partial
        flat_sums.append(of_flat)
    total = 0.0
    for of_flat in flat_sums:
        total += of_flat
    norm, factor = math.sqrt(total) / divisor, 1.0 / divisor
    if clip > 0.0:
        factor *= min(1.0, clip / (norm + 1e-6))
    return flat_sums, norm, factor, 0 if math.isfinite(total) else 1


def combine(device, partial_sums: list[list[float]], divisor: float, clip: float):
    rank_num, flat_num = len(partial_sums), len(partial_sums[0])
    partials = torch.tensor(partial_sums, dtype=torch.float64).to(DEVICE)
    flat_sums = torch.full((flat_num,), -1.0, dtype=torch.float64, device=DEVICE)
    scalars = device.allocate(16, what="the scalars of a test")
    device.combine_norm(
        "compute",
        partial_sums=partials.data_ptr(),
        rank_num=rank_num,
        flat_num=flat_num,
        divisor=divisor,
        clip=clip,
        flat_sums=flat_sums.data_ptr(),
        scalars=scalars.address,
    )
    return flat_sums.tolist(), *struct.unpack("<dfI", device.download(scalars.address, size_bytes=16))


@pytest.mark.parametrize("rank_num", [1, 2, 3, 8])
@pytest.mark.parametrize("flat_num", [1, 2, 31, 255, 256, 257, 600])
def test_norms_are_combined_in_the_stated_order(device, rank_num: int, flat_num: int) -> None:
    generator = generator_of(rank_num, flat_num)
    sums = torch.randn((rank_num, flat_num), generator=generator, dtype=torch.float64).mul(6).exp().tolist()
    divisor = rank_num * 4 * 1.7
    norm = norm_in_python(sums, divisor, 0.0)[1]
    for clip in (0.0, norm / 3, norm, norm * 3, 1e-3):
        flat_sums, wanted_norm, factor, is_skipped = norm_in_python(sums, divisor, clip)
        wanted = (flat_sums, wanted_norm, struct.unpack("<f", struct.pack("<f", factor))[0], is_skipped)
        assert combine(device, sums, divisor, clip) == wanted, clip


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_norm_that_is_not_finite_skips_the_step(device, value: float, clip: float) -> None:
    for rank, flat in ((0, 0), (1, 2), (0, 300)):
        sums = [[1.0] * 301 for _ in range(2)]
        sums[rank][flat] = value
        flat_sums, norm, _, is_skipped = combine(device, sums, 2.0, clip)
        assert is_skipped == 1 and not math.isfinite(norm)
        assert [math.isfinite(of_flat) for of_flat in flat_sums] == [i != flat for i in range(301)]
    assert combine(device, [[1.0] * 301] * 2, 2.0, clip)[3] == 0


def test_an_address_between_elements_is_refused(device) -> None:
    array = Array(torch.zeros(16))
    for destination, source in ((1, 0), (0, 2)):
        with pytest.raises(ValueError, match="is not one of a float32"):
            device.cast(
                "compute",
                destination=array.address + destination,
                destination_dtype="float32",
                source=array.address + source,
                source_dtype="float32",
                numel=1,
            )
