"""Hooks and fixtures that tests of several folders share."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ON_GPUS = "tests/gpu/"  # from the root of the repository
UNITS = "tests/unit/"
OTHERS = ("cli", "dist", "gpu")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip folders without a quick test: importing what they test takes seconds in every worker."""
    is_other = collection_path.name in OTHERS and collection_path.parent == Path(__file__).parent
    return True if config.option.markexpr == "quick" and is_other else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark as quick what runs in the inner loop."""
    if (
        item.nodeid.startswith(UNITS)
        and not any(item.iter_markers("slow"))
        and not any(item.iter_markers("long"))
    ):
        item.add_marker("quick")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests by file, those of GPUs to one worker: some measure memory and time, and need the GPUs alone."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneWorkerForGpus(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return ON_GPUS if nodeid.startswith(ON_GPUS) else super()._split_scope(nodeid)

    return OneWorkerForGpus(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """For "-n auto", a worker more than cores: with as many, cores wait for processes and timeouts."""
    if config.option.numprocesses != "auto" or "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed each test by its own name, so that its draws do not depend on tests that its worker ran before.

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


@pytest.fixture
def own_process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the environment in which torch's process group can be made in this process; the group ends with the test."""
    import torch

    from zerobench.bench.launch.environments import free_ports

    monkeypatch.setenv("MASTER_PORT", str(free_ports(1)[0]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    # The first group of a process decides whether torch 2.9 records collectives, and another test may make it.
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
