"""A CUDA device's lanes, marks and memory."""

from __future__ import annotations

import ctypes
import threading

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from zerobench import _native, errors

cuda = _native.load_cuda()
LANES = ("compute", "gather", "reduce")
FLOATS_BYTES = 4 * 1024
SLEEP_CYCLES = 200_000_000  # about 0.1 s


@pytest.fixture(scope="module")
def device():
    device = cuda.make_device(0, on_out_of_memory=torch.cuda.empty_cache)
    for lane in LANES:  # what the driver loads at first use would wait for a lane that sleeps
        sleep(device, lane, cycles=1000)
        copy(device, lane, floats(0.0), floats(1.0))
        device.wait("compute", device.mark(lane))
        device.synchronize()
    return device


def floats(value: float) -> torch.Tensor:
    tensor = torch.full((FLOATS_BYTES // 4,), value, device="cuda")
    torch.cuda.synchronize()
    return tensor


def sleep(device, lane: str, cycles: int = SLEEP_CYCLES) -> None:
    handle = device.stream(lane)
    stream = torch.cuda.ExternalStream(handle) if handle else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


def copy(device, lane: str, destination: torch.Tensor, source: torch.Tensor) -> None:
    device.copy(lane, destination=destination.data_ptr(), source=source.data_ptr(), size_bytes=source.nbytes)


def test_the_compute_lane_is_the_callers_stream(device) -> None:
    assert device.ordinal == 0
    assert device.stream("compute") == torch.cuda.default_stream().cuda_stream
    handles = {device.stream(lane) for lane in LANES}
    assert len(handles) == 3
    stream = torch.cuda.Stream()
    try:
        device.set_compute_stream(stream.cuda_stream)
        assert device.stream("compute") == stream.cuda_stream
        source, middle, late, early = floats(1.0), floats(0.0), floats(0.0), floats(0.0)
        sleep(device, "compute")
        copy(device, "compute", middle, source)
        copy(device, "gather", early, middle)
        with torch.cuda.stream(stream):
            late.copy_(middle)
        device.synchronize()
    finally:
        device.set_compute_stream(torch.cuda.default_stream().cuda_stream)
    assert float(late.sum()) == late.numel() and float(early.sum()) == 0.0


def test_an_unknown_lane_or_device_is_refused(device) -> None:
    with pytest.raises(ValueError, match="'forward' is not a lane"):
        device.stream("forward")
    with pytest.raises(ValueError, match="this machine has"):
        cuda.make_device(torch.cuda.device_count(), on_out_of_memory=torch.cuda.empty_cache)


@pytest.mark.parametrize("first", LANES)
@pytest.mark.parametrize("second", LANES)
def test_lanes_run_beside_each_other_but_for_marks(device, first: str, second: str) -> None:
    if first == second:
        pytest.skip("one lane runs in order")
    source, middle, late, early = floats(1.0), floats(0.0), floats(0.0), floats(0.0)
    sleep(device, first)
    copy(device, first, middle, source)
    mark = device.mark(first)
    assert not device.has_passed(mark)
    copy(device, second, early, middle)
    device.wait(second, mark)
    copy(device, second, late, middle)
    after = device.mark(second)
    assert not device.has_passed(after)
    device.synchronize(after)
    assert device.has_passed(mark) and device.has_passed(after)
    device.synchronize()
    assert float(late.sum()) == late.numel(), "the copy behind the mark ran before the mark"
    assert float(early.sum()) == 0.0, "the copy before the wait was held back, or the sleep was too short"


def test_a_mark_that_is_dropped_still_holds_back(device) -> None:
    """Its event is recorded again, elsewhere, before the point that the lane waits for is reached."""
    source, middle, late = floats(1.0), floats(0.0), floats(0.0)
    for _ in range(100):
        device.mark("compute")  # dropped at once
    sleep(device, "gather")
    copy(device, "gather", middle, source)
    mark = device.mark("gather")
    device.wait("reduce", mark)
    del mark
    others = [device.mark("compute") for _ in range(3)]
    device.synchronize(others[-1])
    copy(device, "reduce", late, middle)
    device.synchronize()
    assert float(late.sum()) == late.numel()


def test_any_thread_may_call(device) -> None:
    source, destination = floats(1.0), floats(0.0)
    problems = []

    def call() -> None:
        try:
            copy(device, "reduce", destination, source)
            device.synchronize(device.mark("reduce"))
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert not problems and float(destination.sum()) == destination.numel()


@pytest.mark.parametrize("size_bytes", [0, 1, 255, 256, 1_000_003])
def test_memory_is_zero_and_aligned(device, size_bytes: int) -> None:
    for _ in range(3):  # memory that was given back is given out again
        memory = device.allocate(size_bytes, what="a test")
        assert memory.address % 256 == 0
        assert device.download(memory.address, size_bytes=size_bytes) == bytes(size_bytes)
        device.upload(memory.address, b"\xff" * size_bytes)
        assert device.download(memory.address, size_bytes=size_bytes) == b"\xff" * size_bytes
        del memory


@pytest.mark.parametrize("lane", LANES)
def test_blocking_copies_come_after_all_lanes(device, lane: str) -> None:
    source, middle = floats(1.0), floats(0.0)
    sleep(device, lane)
    copy(device, lane, middle, source)
    found = device.download(middle.data_ptr(), size_bytes=middle.nbytes)
    assert found == bytes(source.cpu().numpy().tobytes())
    sleep(device, lane)
    copy(device, lane, middle, source)
    device.upload(middle.data_ptr(), bytes(middle.nbytes))
    assert float(middle.sum()) == 0.0


def test_pinned_memory_is_filled_without_blocking(device) -> None:
    source = floats(3.0)
    pinned = device.allocate_pinned(source.nbytes)
    sleep(device, "reduce")
    device.copy_to_pinned("reduce", host=pinned.address, source=source.data_ptr(), size_bytes=source.nbytes)
    mark = device.mark("reduce")
    assert not device.has_passed(mark), "the copy blocked"
    device.synchronize(mark)
    assert ctypes.string_at(pinned.address, source.nbytes) == source.cpu().numpy().tobytes()


def test_the_parts_go_to_the_core_in_a_capsule(device) -> None:
    assert type(device.parts()).__name__ == "PyCapsule"


def test_ranges_for_profilers_nest(device) -> None:
    device.push_range("gather layers.0")
    device.push_range("a very long operation of a very long unit " * 20)
    device.pop_range()
    device.pop_range()


def test_started_ranges_end_in_any_order(device) -> None:
    first, second = device.start_range("forward layers.0"), device.start_range("forward layers.1")
    device.end_range(first)
    device.end_range(second)


def test_memory_that_is_not_there_is_an_error_after_the_caches_were_emptied() -> None:
    calls = []
    device = cuda.make_device(0, on_out_of_memory=lambda: calls.append(True))
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(errors.OutOfMemoryError, match=r"the optimizer state needs [\d.]+ MiB, and [\d.]+ of"):
        device.allocate(2 * total, what="the optimizer state")
    assert calls == [True]
    memory = device.allocate(1000, what="a test")
    assert device.download(memory.address, size_bytes=1000) == bytes(1000)
    assert calls == [True]


def test_an_allocation_takes_what_torch_holds_unused(device) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    held = torch.empty(int(free * 0.6), dtype=torch.uint8, device="cuda")
    del held
    reserved = torch.cuda.memory_reserved()
    assert reserved >= int(free * 0.6)
    memory = device.allocate(int(free * 0.6), what="a test")
    assert torch.cuda.memory_reserved() < reserved
    assert device.download(memory.address + int(free * 0.6) - 16, size_bytes=16) == bytes(16)


def test_an_error_of_the_callback_arrives() -> None:
    def fail() -> None:
        raise KeyError("from the callback")

    device = cuda.make_device(0, on_out_of_memory=fail)
    with pytest.raises(KeyError, match="from the callback"):
        device.allocate(1 << 50, what="a test")
