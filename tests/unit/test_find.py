"""`compare --find`: what can be searched, which values are tried, and rows at other values."""

from __future__ import annotations

import pytest
from plan_samples import GPUS, SMALL, configuration, names

from zerobench import models
from zerobench.bench.plan.find import Bounds, at_value, bounds_of, largest, next_value, too_large
from zerobench.bench.plan.names import rerun_command
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import make_plan
from zerobench.errors import ConfigError
from zerobench.results.schema import Try

ANY = Bounds(1)
LIMITED = {"device_memory_gib": 1.0}


def tries_of(limit: int, *, start: int, bounds: Bounds = ANY, whole_limit: int | None = None) -> list[Try]:
    """Return the tries of a search for ``limit``. Whole rows fit up to ``whole_limit``."""
    tries: list[Try] = []
    whole_limit = limit if whole_limit is None else whole_limit
    while True:
        while (value := next_value(tries, start=start, bounds=bounds)) is not None:
            whole = any(one.whole for one in tries)
            tries.append(one_try(value, value <= (whole_limit if whole else limit), whole=whole))
            assert len(tries) < 100
        found = largest(tries)
        if found is None or found <= whole_limit:
            return tries
        tries.append(one_try(found, False, whole=True))


def one_try(value: int, fits: bool, *, whole: bool = False) -> Try:
    return Try(value=value, status="ok" if fits else "oom", fits=fits, whole=whole)


def test_values_double_and_then_halve_the_distance() -> None:
    tries = tries_of(37, start=4)
    assert [one.value for one in tries] == [4, 8, 16, 32, 64, 48, 40, 36, 38, 37]
    assert (largest(tries), too_large(tries)) == (37, 38)


def test_values_halve_down_to_the_first_that_fits() -> None:
    tries = tries_of(5, start=64)
    assert [one.value for one in tries] == [64, 32, 16, 8, 4, 6, 5]
    assert (largest(tries), too_large(tries)) == (5, 6)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 9, 15, 16, 17, 37])
@pytest.mark.parametrize("start", [1, 3, 16])
def test_the_largest_value_and_the_next_one_are_tried(limit: int, start: int) -> None:
    tries = tries_of(limit, start=start)
    assert (largest(tries), too_large(tries)) == (limit, limit + 1)
    assert {limit, limit + 1} <= {one.value for one in tries}


def test_a_search_ends_where_not_even_the_least_value_fits() -> None:
    tries = tries_of(1, start=12, bounds=Bounds(2))
    assert [one.value for one in tries] == [12, 6, 3, 2]
    assert largest(tries) is None


def test_a_search_ends_at_the_longest_sequence_of_the_model() -> None:
    tries = tries_of(10_000, start=100, bounds=Bounds(8, 512, 8))
    assert [one.value for one in tries] == [100, 200, 400, 512]
    assert (largest(tries), too_large(tries)) == (512, None)


@pytest.mark.parametrize("limit", [8, 100, 130, 136, 511])
def test_sequences_are_found_in_multiples_of_eight(limit: int) -> None:
    tries = tries_of(limit, start=64, bounds=Bounds(8, 512, 8))
    assert largest(tries) == limit // 8 * 8
    assert too_large(tries) == limit // 8 * 8 + 8


def test_an_error_other_than_memory_ends_the_search_at_its_first_value() -> None:
    tries = [Try(value=4, status="failed", fits=False)]
    assert next_value(tries, start=4, bounds=Bounds(1)) is None


def test_a_value_that_fails_bounds_those_that_run() -> None:
    tries = [one_try(4, True), Try(value=8, status="failed", fits=False)]
    assert next_value(tries, start=4, bounds=Bounds(1)) == 6


def test_whole_rows_alone_tell_once_one_did_not_fit_where_a_few_steps_had() -> None:
    tries = tries_of(37, start=4, whole_limit=11)
    assert [one.value for one in tries if one.whole] == [37, 18, 9, 13, 11, 12]
    assert (largest(tries), too_large(tries)) == (11, 12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"find": "depth"}, "unknown --find 'depth': use one of batch, layers, seq"),
        ({"find": "batch", "batch_size": (2, 4)}, "--batch-size gives several"),
        ({"find": "batch", "device_memory_gib": None}, "would fill the memory of the host"),
        ({"find": "batch", "global_batch": 16}, "remove --global-batch"),
    ],
)
def test_a_search_that_cannot_be_is_an_error(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(CompareOptions(**{**SMALL, **LIMITED, **options}))


def test_a_file_that_sets_the_batch_cannot_be_searched(tmp_path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}'
    )
    asked = {
        "data": "synthetic", "config": [path], "strategies": (), "device": "cuda", "gpus": GPUS, "world_size": (4,),
        "precision": ("bf16",), "find": "batch",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="sets the batch that --find batch looks for"):
        make_plan(CompareOptions(**asked))


@pytest.mark.parametrize("limit", ["device_memory_gib", "memory_limit_gib", "rank_memory_gib"])
def test_cpu_ranks_are_searched_under_any_limit(limit: str) -> None:
    assert names(find="batch", **{limit: 1.0})


@pytest.mark.parametrize(
    ("find", "name"),
    [
        ("batch", "zs0_fp32_ranks2_sl64_largest-batch"),
        ("seq", "zs0_fp32_ranks2_bs4_largest-seq"),
        ("layers", "zs0_fp32_ranks2_bs4_sl64_largest-layers"),
    ],
)
def test_names_leave_open_what_is_searched(find: str, name: str) -> None:
    assert names(find=find, **LIMITED)[0] == name


def test_a_row_at_another_batch_differs_in_nothing_else() -> None:
    before = configuration(**LIMITED)
    after = at_value(before, "batch", 9)
    assert after.settings.batch_size == 9
    assert at_value(after, "batch", before.settings.batch_size) == before


def test_a_row_with_other_layers_counts_their_parameters_and_runs_again_with_them() -> None:
    before = configuration(find="layers", **LIMITED)
    after = at_value(before, "layers", 7)
    assert after.model["num_layers"] == 7
    assert after.settings.parameter_count == models.parameter_count(models.from_dict(after.model))
    command = rerun_command(after, CompareOptions(**SMALL, **LIMITED))
    assert "--model-option num_layers=7" in command and "--find" not in command


def test_sequences_are_bounded_by_the_model() -> None:
    found = configuration(find="seq", **LIMITED)
    assert bounds_of(found, "seq") == (8, found.model["max_seq_length"], 8)
    assert at_value(found, "seq", 128).settings.seq_length == 128
