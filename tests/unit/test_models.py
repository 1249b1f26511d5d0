"""Presets, their errors, the closed-form parameter count, and the transformer itself."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
from builders import SMALL, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from zerobench import models
from zerobench.errors import ConfigError

small_model = partial(tiny_model, **SMALL | {"num_layers": 2})


def tokens(batch_size: int = 3, seq_length: int = 12, vocab_size: int = 31) -> torch.Tensor:
    return torch.randint(vocab_size, (batch_size, seq_length), generator=torch.Generator().manual_seed(1))


def test_import_costs_no_torch():
    code = (
        "import sys, zerobench.models, zerobench.data, zerobench.strategies; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@settings(max_examples=25, deadline=None)
@given(
    num_layers=st.integers(1, 3),
    num_heads=st.integers(1, 3),
    head_size=st.integers(1, 9),
    max_seq_length=st.integers(1, 9),
    vocab_size=st.integers(1, 40),
    ffn_multiplier=st.integers(1, 5),
    tied_embeddings=st.booleans(),
)
def test_parameter_count_is_exact(num_heads, head_size, **fields):
    config = models.resolve("tiny", {**fields, "num_heads": num_heads, "hidden_size": num_heads * head_size})
    built = models.build(config, seed=0)
    assert models.parameter_count(config) == sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_presets_have_the_published_sizes(name, count):
    assert models.parameter_count(models.resolve(name)) == count


@pytest.mark.parametrize(
    ("name", "shape"),
    [("gpt-64m", (12, 512, 8, 512)), ("gpt-512m", (24, 1024, 16, 1024)), ("tiny", (4, 64, 4, 256))],
)
def test_preset_shapes(name, shape):
    config = models.resolve(name)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.max_seq_length) == shape


def test_every_field_is_overridable_and_none_leaves_the_preset():
    fields = {**SMALL, "ffn_multiplier": 3, "tied_embeddings": False, "dropout": 0.1}
    config = models.resolve("gpt2", fields)
    assert config.model_dump(exclude={"name"}) == fields
    assert models.resolve("gpt2", {"num_layers": None}) == models.resolve("gpt2")


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("gpt2-medum", {}, ["gpt2-medum", "did you mean 'gpt2-medium'", "tiny"]),
        ("tiny", {"num_layer": 2}, ["num_layer", "did you mean 'num_layers'"]),
        ("tiny", {"num_heads": 5}, ["hidden_size 64", "num_heads 5"]),
        ("tiny", {"num_layers": 0}, ["num_layers", "0"]),
        ("tiny", {"vocab_size": -3}, ["vocab_size", "-3"]),
        ("tiny", {"hidden_size": 64.0}, ["hidden_size", "64.0"]),
        ("tiny", {"num_layers": True}, ["num_layers", "True"]),
        ("tiny", {"dropout": 1.0}, ["dropout"]),
        ("tiny", {"name": "mine"}, ["name"]),
    ],
)
def test_errors_are_one_line_that_names_the_field(name, overrides, words):
    with pytest.raises(ConfigError) as caught:
        models.resolve(name, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_sequence_length_against_positions():
    config = models.resolve("tiny")
    config.check_seq_length(256)
    for seq_length in (257, 1, 0, -4):
        with pytest.raises(ConfigError, match="seq_length"):
            config.check_seq_length(seq_length)
    with pytest.raises(ConfigError, match="max_seq_length"):
        small_model()(tokens(seq_length=13))


def test_seed_fixes_the_bits_and_global_random_state_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = small_model(3), small_model(3), small_model(4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    third = small_model(3)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
        assert torch.equal(parameter, third.get_parameter(name))
    assert not torch.equal(first.wte.weight, other.wte.weight)


def test_initialisation_is_gpt2s():
    model = tiny_model(num_layers=8)
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[0].mlp.fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[7].mlp.proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert model.blocks[0].attn.qkv.bias.abs().max() == 0
    assert torch.equal(model.ln_f.weight, torch.ones(64))


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_tied_as_asked(tied):
    model = small_model(tied_embeddings=tied)
    assert (model.lm_head.weight is model.wte.weight) is tied
    assert ("lm_head.weight" in dict(model.named_parameters())) is not tied
    model(tokens(), tokens()).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_loss_shifts_labels_ignores_minus_100_and_is_fp32():
    model, ids = small_model().bfloat16(), tokens()
    labels = ids.clone()
    labels[:, 5] = -100
    output = model(ids, labels=labels)
    assert output.loss.dtype == torch.float32
    assert output.logits.shape == (3, 12, 31)
    log_probs = output.logits.float().log_softmax(-1)
    picked = [log_probs[b, t - 1, ids[b, t]] for b in range(3) for t in range(1, 12) if t != 5]
    torch.testing.assert_close(output.loss, -torch.stack(picked).mean())
    assert model(ids).loss is None


def test_attention_is_causal():
    model, ids = small_model().eval(), tokens()
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 31
    logits, other = model(ids).logits, model(changed).logits
    torch.testing.assert_close(logits[:, :7], other[:, :7])
    assert not torch.allclose(logits[:, 7:], other[:, 7:])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients_and_recomputes(use_reentrant):
    plain, recomputed = small_model(), small_model()
    recomputed.gradient_checkpointing_enable(use_reentrant=use_reentrant)
    forwards = []
    recomputed.blocks[0].register_forward_pre_hook(lambda *_: forwards.append(1))
    ids = tokens()
    for model in (plain, recomputed):
        model(ids, labels=ids).loss.backward()
    assert len(forwards) == 2
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.grad, recomputed.get_parameter(name).grad), name
    recomputed.gradient_checkpointing_disable()
    recomputed(ids)
    assert len(forwards) == 3


def test_dropout_acts_in_training_only():
    model, ids = small_model(dropout=0.5), tokens()
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)
