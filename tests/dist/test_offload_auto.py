"""``ratio: auto``: the first step puts on the device what fits there, on all ranks alike, and changes no bit."""

from __future__ import annotations

import gc

import pytest
import ranks
import torch
import zoo

import zerobench

GIB = 1 << 30
HOST = {"chunk_numel": 128}
AUTO = HOST | {"ratio": "auto"}
CASES = ("clip", "odd sizes", "skipped on one rank", "forward in advance", "bf16", "fp16")
STAGES = (1, 2, 3)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_engine(
    rank: ranks.Rank, case: zoo.Case, stage: int, offload: dict | None, **config
) -> zerobench.Engine:
    settings = zoo.optimizer_config(case) | config
    return zerobench.initialize(
        zoo.make(case), config=rank.config(stage=stage, offload_optimizer=offload, **settings)
    )


def half_fits_bytes(rank: ranks.Rank, case: zoo.Case, stage: int, **config) -> int:
    """Return the bytes that a device needs for half of the state, next to those of a step."""
    engine = make_engine(rank, case, stage, HOST, **config)
    engine.reset_counters()  # what building takes is not of a step
    core = zerobench._native.load()
    core.reset_process_usage_peak()
    zoo.run_plan(engine, case, 0, rank.rank, [])
    engine.full_parameters()
    peak_bytes = core.process_usage_peak_bytes()
    state_bytes = 12 * sum(flat["shard_numel"] for unit in engine.units() for flat in unit["flats"])
    gather_bytes = max(unit["gather_bytes"] for unit in engine.units()) if stage == 3 else 0
    engine.close()
    del engine
    gc.collect()  # parameters of a closed engine count as long as their model lives
    return round((peak_bytes + gather_bytes + 0.5 * state_bytes) / 0.98)


def placements_of(rank: ranks.Rank, case: zoo.Case, stage: int) -> dict[str, dict | None]:
    half = {"device_memory_bytes": half_fits_bytes(rank, case, stage)}
    return {
        "none": None, "nothing fits": AUTO | {"device_memory_bytes": 1}, "half fits": AUTO | half,
        "all fits": AUTO | {"device_memory_bytes": GIB}, "no limit": AUTO,
    }  # fmt: skip


def train_placements(rank: ranks.Rank, case: zoo.Case, stage: int) -> dict[str, dict]:
    return {
        placement: zoo.train_engine(case, rank, stage=stage, offload_optimizer=offload)
        for placement, offload in placements_of(rank, case, stage).items()
    }


def train_all(rank: ranks.Rank) -> dict[tuple[str, int], dict]:
    """Return results by case and stage, then by placement."""
    return {
        (name, stage): zoo.or_error(train_placements, rank, zoo.CASES[name], stage)
        for name in CASES
        for stage in STAGES
    }


@pytest.fixture(scope="module")
def results():
    return ranks.run(train_all, world_size=2)


@pytest.mark.parametrize("placement", ["nothing fits", "half fits", "all fits", "no limit"])
@pytest.mark.parametrize("case", CASES)
def test_ends_with_the_bits_of_state_on_the_device(results, case, placement):
    for rank in results:
        for stage in STAGES:
            found = rank[case, stage]
            assert "error" not in found, found["error"]
            zoo.assert_same_end(found[placement], found["none"], stage=stage)


def choose(rank: ranks.Rank, stage: int, own_limits: bool, in_backward: bool) -> dict:
    """The choice of a rank whose device is smaller than the other's, and what then lies where."""
    case = zoo.CASES["bf16"]
    backward = {"optimizer_in_backward": True, "gradient_clipping": None} if in_backward else {}
    limit = half_fits_bytes(rank, case, stage, **backward)
    if own_limits and rank.rank == 0:
        limit *= 2
    engine = make_engine(rank, case, stage, AUTO | {"device_memory_bytes": limit}, **backward)
    before = engine.offload_ratio
    masters = engine.full_parameters()
    core = zerobench._native.load()
    core.reset_process_usage_peak()
    engine.reset_counters()
    for step in range(3):
        zoo.run_plan(engine, case, step, rank.rank, [])
    held = engine.memory_bytes(peak=False)
    numel = sum(flat["shard_numel"] for unit in engine.units() for flat in unit["flats"])
    found = {
        "before": before,
        "ratio": engine.offload_ratio,
        "held": held,
        "numel": numel,
        "peak_bytes": core.process_usage_peak_bytes(),
        "limit_bytes": limit,
        "changed": zoo.digest(engine.full_parameters()) != zoo.digest(masters),
    }
    engine.close()
    return found


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_agree_and_the_choice_fills_the_device_within_its_limit(stage, in_backward):
    found = ranks.run(choose, stage, False, in_backward)
    assert len({rank["ratio"] for rank in found}) == 1
    for rank in found:
        ratio, held = rank["ratio"], rank["held"]
        assert rank["before"] is None and rank["changed"]
        assert 0.3 < ratio < 0.75, "about half of the state fits"
        assert held["host"]["exp_avg"] + held["device"]["exp_avg"] == 4 * rank["numel"]
        on_host = held["host"]["exp_avg"] / (4 * rank["numel"])
        assert ratio <= on_host < ratio + 0.1  # whole cache lines of small shards
        assert held["host"]["master"] == held["host"]["exp_avg"], "masters of the trial are gone"
        assert rank["peak_bytes"] <= rank["limit_bytes"]


def test_the_smallest_device_decides():
    one, other = ranks.run(choose, 2, True, False)
    assert one["limit_bytes"] > other["limit_bytes"]
    assert 0.3 < one["ratio"] == other["ratio"] < 0.75


def trial(rank: ranks.Rank) -> dict:
    """Do what a user may do before the first step: reads, writes, evaluates, loses a backward."""
    case = zoo.CASES["bf16"]
    digests = []
    for offload in (None, AUTO | {"device_memory_bytes": 2 * half_fits_bytes(rank, case, 2)}):
        engine = make_engine(rank, case, 2, offload)
        with engine.gather(modifier_rank=1), torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(0.5 if rank.rank == 1 else 3.0)
        moments = engine.full_optimizer_state("exp_avg")
        assert all(not values.any() for values in moments.values())
        with pytest.raises(zerobench.errors.StateError, match="without gradients"):
            engine.step()
        loss = engine(**case.batch(0, rank.rank, 0))
        loss.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.backward(loss)
        zoo.run_plan(engine, case, 0, rank.rank, [])
        zoo.run_plan(engine, case, 1, rank.rank, [])
        digests.append(zoo.state_of(engine)["digest"])
        ratio = engine.offload_ratio
        engine.close()
    return {"digests": digests, "ratio": ratio}


def test_what_comes_before_the_first_step_is_kept():
    for found in ranks.run(trial):
        assert len(set(found["digests"])) == 1
        assert found["ratio"] < 1


def kept_state(engine: zerobench.Engine) -> dict:
    moments = {kind: engine.full_optimizer_state(kind) for kind in ("exp_avg", "exp_avg_sq")}
    facts = {"step": engine.global_steps, "loss_scale": engine.loss_scale_state()}
    return {"parameters": engine.full_parameters()} | facts | moments


def go_on(
    rank: ranks.Rank, case: zoo.Case, stage: int, offload: dict | None, kept: dict
) -> tuple[str, float]:
    """Return the end of training from a state loaded before the first step, and the share off the device."""
    gc.collect()  # parameters of a closed engine count as long as their model lives
    engine = make_engine(rank, case, stage, offload)
    engine.load_full_state(**kept)
    for kind in ("exp_avg", "exp_avg_sq"):
        assert zoo.digest(engine.full_optimizer_state(kind)) == zoo.digest(kept[kind])
    for step in (10, 11):
        zoo.run_plan(engine, case, step, rank.rank, [])
    end = zoo.state_of(engine)
    if offload is not None:
        held = engine.memory_bytes(peak=False).get("host", {})
        assert held.get("exp_avg", 0) == held.get("exp_avg_sq", 0) == held.get("master", 0), (
            "what waited is gone"
        )
    ratio = engine.offload_ratio or 0.0
    found = f"{end['digest']} {end['served']} {engine.global_steps} {engine.loss_scale_state()}"
    engine.close()
    return found, ratio


def load_first(rank: ranks.Rank) -> dict[tuple[str, int], dict[str, tuple[str, float]]]:
    """Return the results of `go_on` by case and stage, then by placement."""
    ends: dict[tuple[str, int], dict[str, tuple[str, float]]] = {}
    for name in ("bf16", "fp16"):
        case = zoo.CASES[name]
        for stage in STAGES:
            engine = make_engine(rank, case, stage, None)
            for step in range(case.steps):
                zoo.run_plan(engine, case, step, rank.rank, [])
            kept = kept_state(engine)
            assert any(values.any() for values in kept["exp_avg"].values())
            engine.close()
            del engine
            gc.collect()
            ends[name, stage] = {
                placement: go_on(rank, case, stage, offload, kept)
                for placement, offload in placements_of(rank, case, stage).items()
            }
    return ends


def test_a_state_that_is_loaded_before_the_first_step_is_what_training_goes_on_with():
    for ends in ranks.run(load_first):
        for point, by_placement in ends.items():
            assert len({found for found, _ in by_placement.values()}) == 1, point
            ratios = {placement: ratio for placement, (_, ratio) in by_placement.items()}
            assert ratios["nothing fits"] == 1.0 and ratios["all fits"] == 0.0
            assert 0.0 < ratios["half fits"] < 1.0


def spoiled(rank: ranks.Rank) -> None:
    """A gradient that is not finite in the trial: nothing was updated, so the engine goes on."""
    case = zoo.CASES["blocks"]
    engine = make_engine(rank, case, 2, AUTO, optimizer_in_backward=True)
    before = zoo.digest(engine.full_parameters())
    batch = case.batch(0, rank.rank, 0)
    with pytest.raises(zerobench.errors.NonFiniteGradientError, match="nothing was updated"):
        engine.backward(engine(**batch) * float("inf"))
        engine.step()
    assert zoo.digest(engine.full_parameters()) == before
    zoo.run_plan(engine, case, 1, rank.rank, [])
    assert zoo.digest(engine.full_parameters()) != before
    engine.close()


def test_a_trial_without_a_finite_gradient_leaves_the_engine_whole():
    ranks.run(spoiled)
