"""The registry of strategies, the parts that they share, and the single-process reference by itself."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from builders import SMALL, make_settings, tiny_model

from zerobench import strategies
from zerobench.bench.rank import verify
from zerobench.engine.config import parse
from zerobench.errors import ConfigError
from zerobench.models.materialise import materialise
from zerobench.strategies import clock, shared
from zerobench.strategies.autocast import AutocastStrategy
from zerobench.strategies.base import LossScaleSettings, OptimizerSettings, Strategy
from zerobench.strategies.deepspeed.config import loss_scaling
from zerobench.strategies.peer import ProcessGroupLease
from zerobench.strategies.single import SingleStrategy
from zerobench.strategies.zero import engine_config

make_model = partial(tiny_model, **SMALL)


def make_batches(num_batches: int = 1):
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(31, (2, 12), generator=generator) for _ in range(num_batches)]
    return [{"input_ids": each, "labels": each} for each in ids]


def built_single(model_factory=make_model, **fields) -> SingleStrategy:
    strategy = SingleStrategy(make_settings(**fields))
    strategy.build(model_factory)
    return strategy


def test_only_rows_are_watched() -> None:
    for watch in (True, False):
        ticks: list[int] = []
        evidence = verify.gather_evidence(
            built_single(),
            lambda step: make_batches(),
            held_out=make_batches()[0],
            watch=watch,
            tick=ticks.append,
        )
        assert ticks == [1, 2, 3, 4, 4]
        assert evidence.evaluation is not None and evidence.loss_dtype == "float32"
        assert (None if evidence.read is None else evidence.read.share) == (0.0 if watch else None)


def test_an_evaluation_is_held_against_the_rows_own_parameters() -> None:
    row = built_single()
    for _ in range(3):
        row.step(make_batches())
    batches = make_batches(2)
    own = [row.evaluate([batch]) for batch in batches]
    ticks: list[None] = []
    expected = verify.evaluate_parameters(
        SingleStrategy,
        make_settings(rank=1, world_size=2, compile="block", checkpointing=True),
        make_model,
        row.full_parameters(),
        batches,
        tick=lambda: ticks.append(None),
    )
    assert expected == own and own[0] != own[1] and len(ticks) == 2
    assert own[0] != built_single().evaluate(batches[:1])


def test_registry_names_every_strategy_without_importing_one():
    code = "import sys, zerobench.strategies as s; s.available(); s.check('a.b:C'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert strategies.available()[:5] == ["single", "zero0", "zero1", "zero2", "zero3"]
    for name in strategies.available():
        found = strategies.get(name)
        assert issubclass(found, Strategy)
        assert found.name == name
    assert [strategies.get(f"zero{stage}").stage for stage in range(4)] == [0, 1, 2, 3]


def test_a_strategy_of_ones_own_is_named_by_place():
    assert strategies.get("zerobench.strategies.single:SingleStrategy") is SingleStrategy


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zero4", ["unknown strategy 'zero4'", "did you mean 'zero", "fsdp2"]),
        ("", ["unknown strategy ''"]),
        (":X", ["unknown strategy"]),
        ("a-b:X", ["unknown strategy"]),
        ("no_such_package.module:X", ["no module named 'no_such_package'"]),
        ("zerobench.errors:Missing", ["no Strategy class named 'Missing'"]),
        ("zerobench.errors:ConfigError", ["no Strategy class named 'ConfigError'"]),
    ],
)
def test_unknown_strategies_are_one_clear_line(name, words):
    with pytest.raises(ConfigError) as caught:
        strategies.get(name)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class X:\n    syntax error", ["SyntaxError", "line 2"]),
        ("pass\nraise ValueError('of\\ntwo lines')", ["ValueError: of two lines", "line 2"]),
        ("raise SystemExit(3)", ["SystemExit: 3", "line 1"]),
        ("import torch.no_such_part", ["no module named 'torch.no_such_part'"]),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_clear_line(tmp_path, monkeypatch, text, words):
    (tmp_path / "broken_strategies.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        strategies.get("broken_strategies:X")
    said = str(caught.value)
    assert "\n" not in said and said.startswith("strategy 'broken_strategies:X': ")
    assert all(word in said for word in words), said


def test_peers_say_what_environment_they_miss():
    with pytest.raises(ConfigError, match=r"ddp runs .* and MASTER_ADDR is not set"):
        ProcessGroupLease(make_settings(), strategy="ddp", environ={"MASTER_PORT": "1"})


def test_single_takes_one_rank_only():
    assert SingleStrategy.unsupported(make_settings()) is None
    assert "world_size is 2" in SingleStrategy.unsupported(make_settings(world_size=2))


def test_unknown_precision_and_a_model_without_checkpointing():
    with pytest.raises(ConfigError, match="fp32, bf16, fp16"):
        built_single(precision="fp8")
    with pytest.raises(ConfigError, match="Linear has no gradient_checkpointing_enable"):
        built_single(lambda: torch.nn.Linear(2, 2), checkpointing=True)


@pytest.mark.parametrize("clip", [None, 0.1, 100.0])
def test_single_in_fp32_is_what_a_user_would_write(clip):
    batches = make_batches(6)
    strategy = built_single(clip=clip, grad_accum=2)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    for index in range(0, 6, 2):
        result = strategy.step(batches[index : index + 2], norm=True)
        for batch in batches[index : index + 2]:
            (model(**batch).loss / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(result.grad_norm, norm)
    for name, parameter in strategy.full_parameters().items():
        torch.testing.assert_close(parameter, model.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)
    assert strategy.evaluate(batches) == pytest.approx(
        sum(model(**b).loss.item() for b in batches) / 6, rel=1e-4
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_single_in_low_precision_updates_fp32_masters(precision):
    dtype = shared.PRECISION_DTYPES[precision]
    strategy = built_single(precision=precision)
    initial = strategy.full_parameters()
    assert all(torch.equal(initial[name], value) for name, value in make_model().named_parameters())
    assert strategy.step(make_batches(), norm=True).applied
    masters = strategy.full_parameters()
    for name, parameter in strategy._parameters.items():
        assert parameter.dtype == dtype
        assert torch.equal(parameter, masters[name].to(dtype))
        assert not torch.equal(masters[name], initial[name])
    assert not torch.equal(masters["wte.weight"], masters["wte.weight"].to(dtype).float())


@pytest.mark.parametrize("clip", [None, 0.1, 100.0])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_single_in_low_precision_takes_the_mean_of_micro_batches_in_fp32(precision, clip):
    batches = make_batches(3)
    model = make_model()
    shared.cast_parameters(model, shared.PRECISION_DTYPES[precision])
    scale = 2.0**16 if precision == "fp16" else 1.0
    sums = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for batch in batches:
        model.zero_grad()
        (scale * model(**batch).loss).backward()
        for name, parameter in model.named_parameters():
            sums[name] += parameter.grad.float() / scale / 3
    norm = torch.cat([gradient.reshape(-1) for gradient in sums.values()]).norm()
    factor = min(1.0, clip / float(norm)) if clip else 1.0
    strategy = built_single(precision=precision, clip=clip, grad_accum=3)
    result = strategy.step(batches, norm=True)
    assert result.applied and float(result.grad_norm) == pytest.approx(float(norm), rel=1e-4)
    for name, moment in strategy.first_moments().items():
        torch.testing.assert_close(moment, 0.1 * factor * sums[name], rtol=1e-3, atol=1e-7)


def test_models_are_evaluated_without_dropout_and_train_again_afterwards():
    model = make_model(dropout=0.5).eval()  # as checkpoints are loaded
    expected = [model(**batch).loss.item() for batch in make_batches(2)]
    strategy = built_single(lambda: model)
    assert model.training
    assert strategy.evaluate(make_batches(2)) == pytest.approx(sum(expected) / 2, rel=1e-6)
    assert model.training


def test_buffers_keep_their_dtype_where_parameters_are_cast():
    model = torch.nn.BatchNorm1d(3)
    shared.cast_parameters(model, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.running_mean.dtype == torch.float32


def test_bytes_are_of_each_storage_once():
    tensor = torch.zeros(10)
    assert shared.storage_bytes([tensor, tensor[2:], None, tensor.view(2, 5), torch.zeros(3)]) == 40 + 12


@pytest.mark.parametrize(
    ("precision", "bytes_each"),
    # In low precision a gradient lives beside its fp32 sum when that is first made.
    [("fp32", (4, 4, 0, 4, 4)), ("bf16", (2, 2 + 4, 4, 4, 4))],
)
def test_single_holds_so_many_bytes_a_parameter(precision, bytes_each):
    strategy = built_single(precision=precision)
    strategy.step(make_batches())
    count = sum(parameter.numel() for parameter in make_model().parameters())
    categories = ("parameters", "gradients", "master", "exp_avg", "exp_avg_sq")
    expected = {name: each * count for name, each in zip(categories, bytes_each, strict=True)}
    assert strategy.memory_bytes() == {"device": expected}


def test_applied_steps_are_those_of_the_parameter_that_has_most():
    """One that got its first gradient later counts from there."""
    early, late = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = shared.make_adamw([early, late], OptimizerSettings())
    scaler = shared.make_grad_scaler(make_settings(precision="fp16"))
    assert shared.scaled_steps(scaler, optimizer) == 0
    for step in range(3):
        early.grad = torch.ones(2)
        late.grad = torch.ones(2) if step == 2 else None
        optimizer.step()
    assert shared.scaled_steps(scaler, optimizer) == 3
    assert shared.scaled_steps(None, optimizer) is None


def test_an_overflow_in_fp16_skips_the_step_and_halves_the_scale():
    strategy = built_single(precision="fp16", loss_scale=LossScaleSettings(initial_scale=2.0**40))
    before = strategy.full_parameters()
    assert strategy.applied_steps() == 0
    result = strategy.step(make_batches(), norm=True)
    assert result.applied is False
    assert strategy._scaler.get_scale() == 2.0**39
    assert all(torch.equal(before[name], value) for name, value in strategy.full_parameters().items())
    strategy._scaler.update(2.0**10)
    assert strategy.applied_steps() == 0
    assert strategy.step(make_batches(), norm=True).applied is True
    assert strategy.applied_steps() == 1
    assert strategy.step(make_batches()).applied is None  # nobody asked, so no step waits for the answer


def test_fp16_starts_from_a_scale_of_two_to_the_sixteenth_and_other_precisions_have_none():
    assert shared.make_grad_scaler(make_settings(precision="fp16")).get_scale() == 2.0**16
    assert shared.make_grad_scaler(make_settings(precision="bf16")) is None


def test_one_setting_of_the_loss_scale_is_every_strategys():
    asked = LossScaleSettings(initial_scale=2.0**9, growth_interval_steps=7)
    scaler = shared.make_grad_scaler(make_settings(precision="fp16", loss_scale=asked)).state_dict()
    ours = parse(engine_config(make_settings(precision="fp16", loss_scale=asked), stage=1)).loss_scale
    for mine, of_torch in {"initial_scale": "scale", "growth_interval_steps": "growth_interval"}.items():
        assert getattr(ours, mine) == scaler[of_torch] == getattr(asked, mine)
    for factor in ("growth_factor", "backoff_factor"):
        assert getattr(ours, factor) == scaler[factor] == getattr(asked, factor)
    of_deepspeed = loss_scaling(asked)
    assert (of_deepspeed["initial_scale_power"], of_deepspeed["loss_scale_window"]) == (9, 7)
    for unsaid in ({"backoff_factor": 0.25}, {"initial_scale": 1000.0}):
        with pytest.raises(ConfigError, match="remove DeepSpeed's strategies"):
            loss_scaling(LossScaleSettings(**unsaid))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_unused_and_frozen_parameters(precision):
    """No gradient counts as a zero gradient (weight decay still applies); frozen parameters never move."""

    def factory():
        model = make_model()
        model.spare = torch.nn.Parameter(torch.ones(3))
        model.wpe.weight.requires_grad_(False)
        return model

    optimizer = OptimizerSettings(lr=0.5, weight_decay=0.5)
    strategy = built_single(factory, precision=precision, optimizer=optimizer)
    frozen = strategy.full_parameters()["wpe.weight"]
    strategy.step(make_batches())
    after = strategy.full_parameters()
    assert torch.equal(after["wpe.weight"], frozen)
    torch.testing.assert_close(after["spare"], torch.full((3,), 0.75))
    moments = strategy.first_moments()
    assert moments.keys() == after.keys()
    assert moments["wpe.weight"].abs().max() == 0
    assert moments["wte.weight"].abs().max() > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_reference_under_autocast_is_what_a_user_would_write(precision):
    batches = make_batches(4)
    strategy = AutocastStrategy(make_settings(precision=precision, clip=0.1, grad_accum=2))
    strategy.build(make_model)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    dtype = shared.PRECISION_DTYPES[precision]
    scale = 2.0**16 if precision == "fp16" else 1.0
    for index in range(0, 4, 2):
        result = strategy.step(batches[index : index + 2], norm=True)
        assert result.applied
        for batch in batches[index : index + 2]:
            with torch.autocast("cpu", dtype=dtype):
                loss = model(**batch).loss / 2
            (scale * loss).backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(result.grad_norm, norm, rtol=1e-6, atol=0.0)
    for name, parameter in strategy.full_parameters().items():
        assert strategy.module().get_parameter(name).dtype == torch.float32
        torch.testing.assert_close(parameter, model.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", dtype=dtype):
        expected = model(**batches[0]).loss.item()
    assert strategy.evaluate(batches[:1]) == pytest.approx(expected, rel=1e-4)
    assert (strategy.dtypes().param, strategy.dtypes().compute) == (
        "float32",
        str(dtype).removeprefix("torch."),
    )
    strategy.close()


def test_the_norm_of_large_gradients_is_exact_on_the_host():
    """torch's own is 6e-4 off here, which is more than fp32 rows may deviate by."""
    generator = torch.Generator().manual_seed(0)
    gradients = [1e-3 * torch.randn(size, generator=generator) for size in ((3, 5_000_000), (7,), (0, 3))]
    exact = float(torch.cat([gradient.double().reshape(-1) for gradient in gradients]).norm())
    assert float(shared.total_norm(gradients)) == pytest.approx(exact, rel=1e-6)
    assert float(shared.total_norm([])) == 0.0


def test_mean_losses_are_not_rounded_to_the_dtype_of_losses():
    losses = [torch.tensor(8.0, dtype=torch.bfloat16), torch.tensor(8.0625, dtype=torch.bfloat16)]
    assert float(shared.mean_of(losses)) == 8.03125


def test_full_parameters_are_copies():
    strategy = built_single()
    strategy.full_parameters()["wte.weight"].zero_()
    assert strategy.full_parameters()["wte.weight"].abs().max() > 0


def test_deterministic_algorithms_are_on_until_close():
    strategy = built_single(deterministic=True)
    try:
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        strategy.close()
    assert not torch.are_deterministic_algorithms_enabled()


def test_checksum_sees_every_bit_every_name_and_every_shape():
    parameters = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(2)}
    base = shared.checksum(parameters)
    assert base == shared.checksum(dict(reversed(parameters.items())))
    assert base == shared.checksum({name: value.double() for name, value in parameters.items()})
    variants = [copy.deepcopy(parameters) for _ in range(4)]
    variants[0]["b"][1] = -0.0
    variants[1]["a"] = variants[1]["a"].view(3, 2)
    variants[2]["c"] = variants[2].pop("b")
    variants[3]["a"][0, 0] = torch.finfo(torch.float32).tiny
    assert len({base, *map(shared.checksum, variants)}) == 5


def test_phases_add_up_and_exposed_time_is_taken_out_of_the_phase_it_fell_into():
    exposed_ms = iter([9.0, 0.0, 1e9, 0.0])  # what came before the clock, then each lap's
    laps = clock.PhaseClock({"exposed_communication": lambda: next(exposed_ms)})
    for phase in ("forward", "backward", "optimizer"):
        laps.lap(phase)
    assert laps.phases_ms["backward"] == 0.0  # never below zero, and no more exposed than the lap was long
    assert 0 < laps.phases_ms["exposed_communication"] < 1e9
    assert laps.phases_ms["forward"] > 0
    assert "exposed_communication" not in clock.PhaseClock().phases_ms


def test_options_are_merged_over_the_engines_configuration():
    options = {"stage": 2, "optimizer": {"lr": 0.5}, "prefetch_bytes": 123}
    config = engine_config(make_settings(clip=1.0, grad_accum=3, options=options), stage=2)
    assert config["optimizer"]["lr"] == 0.5
    assert config["optimizer"]["weight_decay"] == 0.1
    assert (config["prefetch_bytes"], config["gradient_clipping"]) == (123, 1.0)
    assert config["gradient_accumulation_steps"] == 3


def test_hyperparameters_are_those_that_the_comparison_asks_for():
    asked = OptimizerSettings(lr=0.1, beta1=0.2, beta2=0.3, eps=0.4, weight_decay=0.5)
    found = parse(engine_config(make_settings(optimizer=asked), stage=1)).optimizer
    assert (found.lr, found.betas, found.eps, found.weight_decay) == (0.1, (0.2, 0.3), 0.4, 0.5)
    optimizer = shared.make_adamw([torch.nn.Parameter(torch.ones(2))], asked)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.1, (0.2, 0.3), 0.4, 0.5)


@pytest.mark.parametrize("options", [{"stage": 1}, {"gradient_accumulation_steps": 2}])
def test_options_that_contradict_the_row_are_errors(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        engine_config(make_settings(options=options), stage=2)


@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2", "zero3", "fsdp2"])
def test_what_shards_parameters_never_holds_the_whole_model_in_fp32(
    own_process_group, name, monkeypatch
) -> None:
    two_blocks = partial(make_model, num_layers=2)
    asked, given = [], []

    def factory(*, device=None):
        asked.append(device)
        return two_blocks(device=device)

    def materialise_and_tell(model, names=None, **where):
        given.append(set(materialise(model, names, **where)))

    kind = strategies.get(name)
    monkeypatch.setattr(f"{kind.__module__}.materialise", materialise_and_tell)
    strategy = kind(make_settings(rendezvous=f"meta-{name}-{os.getpid()}"))
    strategy.build(factory)
    expected = dict(two_blocks().named_parameters())
    blocks = [{key for key in expected if key.startswith(f"blocks.{index}.")} for index in range(2)]
    assert asked == ["meta"]
    assert len(given) == 3
    assert all(names in given for names in (*blocks, set(expected) - set.union(*blocks)))
    assert shared.checksum(strategy.full_parameters()) == shared.checksum(expected)
    strategy.close()
