"""zerobench._cuda on real devices. Skips with a reason where there is no GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from zerobench import _cuda

DEVICES = [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def test_versions_agree_with_torch() -> None:
    assert _cuda.driver_version() >= _cuda.runtime_version() > 0
    assert _cuda.nccl_version() >= 20000


def test_devices_are_those_of_torch() -> None:
    assert _cuda.device_count() == torch.cuda.device_count()
    for index in range(_cuda.device_count()):
        info, properties = _cuda.device_info(index), torch.cuda.get_device_properties(index)
        assert info.name == properties.name
        assert (info.compute_major, info.compute_minor) == (properties.major, properties.minor)
        assert info.multiprocessor_num == properties.multi_processor_count
        assert info.total_bytes == properties.total_memory


def test_an_unknown_device_is_an_error() -> None:
    with pytest.raises(ValueError, match="this machine has"):
        _cuda.device_info(torch.cuda.device_count())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("numel", [0, 1, 255, 256, 257, 4096 * 256 + 3, 5_000_001])
def test_fill_writes_every_element_and_no_other(device: str, numel: int) -> None:
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        tensor = torch.zeros(numel + 2, device=device)
        stream.wait_stream(torch.cuda.current_stream())
        _cuda.fill(tensor.data_ptr() + 4, value=1.5, numel=numel, stream=stream.cuda_stream)
        stream.synchronize()
        assert tensor[0] == 0 and tensor[-1] == 0
        assert bool((tensor[1:-1] == 1.5).all())


def test_fill_refuses_an_address_that_is_not_a_floats() -> None:
    tensor = torch.zeros(4, device="cuda")
    with pytest.raises(ValueError, match="not the address of a float"):
        _cuda.fill(tensor.data_ptr() + 1, value=0.0, numel=1, stream=0)
