"""What cannot fit is found before it starts."""

from __future__ import annotations

import pytest
from plan_samples import GPUS, ON_GPUS, configuration

from zerobench.bench import fit


def test_what_cannot_fit_is_found_before_it_starts() -> None:
    row = configuration(models=("gpt2-xl",), strategies=("ddp",))
    count = row.settings.parameter_count or 0
    assert fit.least_rank_bytes(row) == fit.Need(device=16 * count)
    sharded = configuration(models=("gpt2-xl",), strategies=("zero3",))
    assert fit.least_rank_bytes(sharded).device == pytest.approx(8 * count, rel=1e-6)
    reason = fit.why_too_large(row, rank_memory_bytes=1 << 30)
    assert reason is not None and "--rank-memory-gib" in reason.reason
    assert fit.why_too_large(configuration(), rank_memory_bytes=1 << 30) is None


def test_a_model_too_large_for_the_reference_is_verified_with_fewer_layers() -> None:
    row = configuration(models=("gpt2",))
    found = fit.verification_model(row.model, rank_memory_bytes=3 << 30)
    assert 1 <= found["num_layers"] < 12
    assert {**found, "num_layers": 12} == row.model
    assert fit.verification_model(configuration().model, rank_memory_bytes=3 << 30) == configuration().model
    assert fit.verification_model(row.model, rank_memory_bytes=None, layers=5)["num_layers"] == 5
    assert fit.verification_model(row.model, rank_memory_bytes=None, layers=50)["num_layers"] == 12


def test_what_cannot_fit_a_gpu_is_found_before_it_starts() -> None:
    small = [gpu.model_copy(update={"total_bytes": 8 << 30}) for gpu in GPUS]
    row = configuration(**ON_GPUS, models=("gpt2-xl",), strategies=("ddp",))
    reason = fit.why_too_large(row, rank_memory_bytes=None, gpus=small)
    assert reason is not None and "GPU 0 has 8.00" in reason.reason
    assert fit.why_too_large(row, rank_memory_bytes=None, gpus=GPUS) is None
    found = fit.verification_model(row.model, rank_memory_bytes=None, gpus=small)
    assert 1 <= found["num_layers"] < 48
