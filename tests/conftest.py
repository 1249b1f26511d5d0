"""What tests of several folders share."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws depends on its own name, not on the tests that its worker happened to run before.

    ZEROBENCH_TEST_SEED draws other values: a bound that only some of them hold shows under a few seeds.
    """
    if "torch" in sys.modules:
        seed = f"{os.environ.get('ZEROBENCH_TEST_SEED', '0')}/{item.nodeid}"
        sys.modules["torch"].manual_seed(zlib.crc32(seed.encode()))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """OpenMP threads that wait for each other crawl on a machine that is busy with other things."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
