"""Models that a user's own function makes: built, given batches, and refused with the reason."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from zerobench import models
from zerobench.errors import ConfigError, DataError
from zerobench.models.trial import tried

pytestmark = pytest.mark.slow  # starts processes

SEQ_LENGTH = 16


def examined(name: str, **overrides):
    """As ``examine`` does it, in this process."""
    return tried(models.find(f"own_models:{name}", overrides), seq_length=SEQ_LENGTH)


def batches(config, *, seed: int = 0):
    return models.open_batches(config, "synthetic", seed=seed, seq_length=SEQ_LENGTH)


def test_its_values_follow_from_the_seed() -> None:
    config = examined("regression")
    states = [models.build(config, seed).state_dict() for seed in (3, 3, 4)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert not torch.equal(states[0]["model.inlet.weight"], states[2]["model.inlet.weight"])
    assert torch.equal(states[0]["model.scale"], torch.full((16,), 0.5))


def test_its_own_batches_are_split_by_rank() -> None:
    data = batches(examined("regression"))
    whole = data.global_micro_batches(3, world_size=2, batch_size=4, grad_accum=2)
    for rank in range(2):
        own = data.micro_batches(3, rank=rank, world_size=2, batch_size=4, grad_accum=2)
        assert all(torch.equal(a["points"], b["points"]) for a, b in zip(own, whole[rank::2], strict=True))


def test_held_out_batches_of_its_own_are_others() -> None:
    data = batches(examined("regression"))
    trained = data.micro_batches(0, rank=0, world_size=1, batch_size=4)[0]
    (held_out,) = data.validation_batches(rank=0, world_size=1, batch_size=4, num_batches=1)
    assert not torch.equal(trained["points"], held_out["points"])


def test_a_module_that_returns_its_loss_trains_on_tokens() -> None:
    config = examined("language")
    batch = batches(config).micro_batches(0, rank=0, world_size=1, batch_size=2)[0]
    assert batch.keys() == {"input_ids", "labels"}
    assert models.build(config, 0)(**batch).loss.item() == pytest.approx(5.5, abs=0.5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_dropout_is_as_asked_for(dropout) -> None:
    model = models.build(examined("language", dropout=dropout), 0)
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {dropout}


def test_what_is_not_known_of_it_is_none() -> None:
    config = examined("regression")
    assert models.parameter_count(config) == sum(p.numel() for p in models.build(config, 0).parameters())
    assert models.flops_per_token(config, SEQ_LENGTH) is None
    assert models.logits_numel(config, SEQ_LENGTH) == 0
    assert config.begins_whole and config.least_layers == config.num_layers == 1


def test_statistics_of_batch_norms_follow_the_precision() -> None:
    config = examined("regression")
    model = models.build(config, 0)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    batch = batches(config).micro_batches(0, rank=0, world_size=1, batch_size=4)[0]
    assert model(**batch).loss.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("noisy", ["on the same batch", "draw random numbers in the batch function"]),
        ("unused", ["no gradient reaches 'left_out.weight' and 1 more", "freeze them"]),
        ("rounded", ["parameter 'scale' is torch.bfloat16", "float32"]),
        ("without_loss", ["loss of shape (2, 4)", "mean loss"]),
        ("loss_of_each", ["loss of shape (2, 4)", "mean loss"]),
        ("other_inputs", ["fails on a batch of input_ids (2, 16)", "unexpected keyword"]),
        ("nothing", ["returned a NoneType", "ModelSource"]),
        ("broken", ["its function failed: RuntimeError: no such checkpoint", "own_models.py, line"]),
        ("number", ["has a int and no function named 'number'"]),
        ("absent", ["own_models has no function named 'absent'"]),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(name, words) -> None:
    with pytest.raises(ConfigError) as caught:
        examined(name)
    assert all(word in str(caught.value) for word in words), caught.value


def test_batches_that_are_no_tensors_are_refused() -> None:
    with pytest.raises(DataError, match="return a dict of tensors"):
        examined("lists")


def test_options_that_only_its_function_could_follow_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_layers does not reach: remove num_layers"):
        models.find("own_models:regression", {"num_layers": 2})


def test_a_prefix_of_the_hub_is_no_module() -> None:
    with pytest.raises(ConfigError, match="unknown model 'hf:nothing'"):
        models.find("hf:nothing")


@pytest.mark.slow
def test_a_fresh_process_examines_it() -> None:
    """This process would import torch, and the user's code, for sizes alone."""
    code = """
import sys
from zerobench import models
config = models.examine(models.find("own_models:regression"), seq_length=16)
assert not {"torch", "own_models"} & sys.modules.keys()
print(config.parameters, config.own_batches)
for name in ("own_models:broken", "nowhere:model"):
    try:
        models.examine(models.find(name), seq_length=16)
    except models.parse.ConfigError as error:
        print(error)
"""
    path = [path for path in sys.path if path]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    facts, broken, nowhere = run.stdout.splitlines()
    assert facts == f"{examined('regression').parameters} True"
    assert "no such checkpoint" in broken and "no module named 'nowhere'" in nowhere
