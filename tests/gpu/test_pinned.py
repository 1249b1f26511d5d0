"""Pinned pools that a device's driver knows, and the lanes to and from the host."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from zerobench import _native

core, cuda = _native.load(), _native.load_cuda()
POOL_BYTES = 64 << 20


@pytest.fixture(scope="module")
def device():
    torch.cuda.init()  # else torch calls no memory pinned
    return cuda.make_device(0, on_out_of_memory=torch.cuda.empty_cache)


def make_pool(device, size_bytes: int = POOL_BYTES, **options):
    return core.PinnedPool(size_bytes, thread_num=2, parts=device.parts(), **options)


def test_a_pool_is_pinned_for_torch_too(device) -> None:
    pool = make_pool(device)
    assert pool.stats().is_registered
    assert pool.stats().mapped_bytes == POOL_BYTES
    tensor = pool.tensor(1 << 20)
    assert tensor.is_pinned()
    tensor.fill_(7)
    there = tensor.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert bool((there == 7).all())
    there.fill_(9)
    tensor.copy_(there)
    assert bool((tensor == 9).all())


def test_memory_may_be_registered_again_when_a_pool_is_gone(device) -> None:
    for _ in range(3):
        pool = make_pool(device, 8 << 20)
        tensor = pool.tensor(4096)
        del pool
        assert tensor.is_pinned()  # a block keeps its pool
        del tensor


def test_every_device_may_copy_from_a_pool(device) -> None:
    tensor = make_pool(device).tensor(1 << 20)
    tensor.fill_(3)
    for index in range(torch.cuda.device_count()):
        there = tensor.to(f"cuda:{index}", non_blocking=True)
        torch.cuda.synchronize(index)
        assert bool((there == 3).all())


def test_more_than_the_host_has_is_refused(device) -> None:
    with pytest.raises(MemoryError, match="are missing"):
        make_pool(device, 1 << 50)


@pytest.mark.parametrize("lane", ["to_host", "from_host"])
def test_the_lanes_to_and_from_the_host_are_streams_of_their_own(device, lane: str) -> None:
    others = {device.stream(name) for name in ("compute", "gather", "reduce", "to_host", "from_host")}
    assert len(others) == 5 and device.stream(lane) != 0


def test_bench_pinned_runs(tmp_path) -> None:
    path = tmp_path / "pinned.json"
    command = [
        *(sys.executable, "-m", "zerobench", "bench", "pinned", "--ready-gib", "0.25", "--repeats", "6"),
        *("--copy-bytes", str(8 << 20), "--ready-repeats", "6", "--output", str(path)),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    ready, *copies = json.loads(path.read_text())["rows"]
    assert set(ready["time_s"]) == {"zerobench", "torch"}
    assert ready["mapped_bytes"] <= 1.01 * ready["size_bytes"] and ready["register_s"] > 0
    group_num = torch.cuda.device_count() + (torch.cuda.device_count() > 1)
    assert [row["direction"] for row in copies] == ["to device", "from device", "both ways"] * group_num
    for row in copies:
        assert all(value > 0 for value in row["gb_s"].values())
