"""transformers' architectures: sizes, units, training at stages 0 and 3, building on the meta device."""

from __future__ import annotations

import json
import math

import pytest
import torch

import zerobench
from zerobench import models
from zerobench.engine.units import find_units
from zerobench.errors import ConfigError
from zerobench.models.materialise import materialise

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install '.[hf]'"
)
import hf_zoo  # noqa: E402

LAYERS = {
    "hf:gpt2": "transformer.h",
    "facebook/opt-1.3b": "model.decoder.layers",
    "facebook/opt-350m": "model.decoder.layers",
    "google-bert/bert-large-uncased": "bert.encoder.layer",
}
UNTIED = ("meta-llama/Meta-Llama-3-8B", "mistralai/Mistral-7B-v0.1", "Qwen/Qwen2.5-7B")
ENGINE = {"threads": 1, "pin_threads": False, "optimizer": {"lr": 1e-3}}
every_model = pytest.mark.parametrize("name", hf_zoo.MODELS)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("name", models.hub_models())
def test_full_size_models_have_the_published_parameters(name):
    model = models.build(models.find(name, {"weights": "random"}), 0, device="meta")
    assert sum(p.numel() for p in model.parameters()) == models.hub_models()[name]["parameters"]
    assert all(parameter.is_meta for parameter in model.parameters())


@every_model
def test_units_are_whole_blocks_and_large_embeddings(name):
    layers = LAYERS.get(name, "model.layers")
    blocks = [f"{layers}.0", f"{layers}.1"]
    expected = ["root", *blocks]
    if name in UNTIED:
        expected = ["root", "model.embed_tokens", *blocks, "lm_head"]
    model = hf_zoo.build(name, device="meta")
    assert find_units(model).names == expected
    unit_of = find_units(model).unit_of_parameters()
    assert all(unit for parameter, unit in unit_of.items() if parameter.startswith(layers))


def test_units_at_full_size():
    names = find_units(models.build(models.find("mistralai/Mixtral-8x7B-v0.1"), 0, device="meta")).names
    assert names == ["root", "model.embed_tokens", *(f"model.layers.{i}" for i in range(32)), "lm_head"]
    single = hf_zoo.build("mistralai/Mixtral-8x7B-v0.1", device="meta", num_layers=1)
    assert "model.layers.0" in find_units(single).names
    assert not any("experts" in name for name in find_units(single).names)


@every_model
def test_forward_and_backward(name):
    model = hf_zoo.build(name)
    assert models.parameter_count(hf_zoo.config(name)) == sum(p.numel() for p in model.parameters())
    output = model(**hf_zoo.batch())
    assert output.loss.item() == pytest.approx(math.log(256), rel=0.05)
    assert getattr(output, "past_key_values", None) is None
    output.loss.backward()
    without = [n for n, p in model.named_parameters() if p.grad is None]
    assert all("experts" in parameter for parameter in without), without


@every_model
def test_materialising_unit_by_unit_gives_the_whole_build(name):
    expected = hf_zoo.build(name, seed=2)
    model = hf_zoo.build(name, seed=2, device="meta")
    units = find_units(model)
    unit_of = units.unit_of_parameters()
    for index in reversed(range(len(units.names))):
        materialise(model, [parameter for parameter, unit in unit_of.items() if unit == index], device="cpu")
    values, wanted = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (model, expected))
    assert values.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(values[key], value), key
    batch = hf_zoo.batch()
    assert torch.equal(model(**batch).loss, expected(**batch).loss)


@every_model
def test_first_values_are_distributed_as_transformers_draws_them(name):
    model = hf_zoo.build(name, hidden_size=64, vocab_size=512)
    theirs = type(model)(model.config)
    for key, parameter in theirs.named_parameters():
        ours = model.get_parameter(key)
        assert ours.requires_grad == parameter.requires_grad
        if parameter.std() > 0:
            # The standard deviation of n normal draws is off by 1 / sqrt(2 n) of itself; two are compared.
            six_sigma = 6 / parameter.numel() ** 0.5
            assert ours.std().item() == pytest.approx(parameter.std().item(), rel=six_sigma), key
        else:
            assert torch.equal(ours, parameter), key
    for key, buffer in theirs.named_buffers():
        assert torch.equal(model.get_buffer(key), buffer), key


@every_model
@pytest.mark.parametrize("stage", [0, 3])
def test_trains_through_the_engine(name, stage):
    model, plain = hf_zoo.build(name), hf_zoo.build(name)
    engine, *_ = zerobench.initialize(model=model, config=ENGINE | {"stage": stage})
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=1e-3, weight_decay=engine.config.optimizer.weight_decay
    )
    losses = []
    for step in range(3):
        batch = hf_zoo.batch(seed=step % 2)
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        expected = plain(**batch).loss
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), expected.item()))
    engine.close()
    for ours, expected in losses:
        assert ours == pytest.approx(expected, rel=1e-4)
    assert losses[2][0] < losses[0][0]


@every_model
def test_checkpointing_in_the_engine_gives_the_same_bits(name):
    ends = []
    for checkpointing in (False, True):
        model = hf_zoo.build(name, checkpointing=checkpointing)
        engine, *_ = zerobench.initialize(model=model, config=ENGINE | {"stage": 3})
        for step in range(2):
            engine.backward(engine(**hf_zoo.batch(seed=step)).loss)
            engine.step()
        ends.append(engine.full_parameters())
        engine.close()
    for key, value in ends[0].items():
        assert torch.equal(value, ends[1][key]), key


def test_bert_scores_every_position_and_nothing_is_masked():
    model, batch = hf_zoo.build("google-bert/bert-large-uncased"), hf_zoo.batch()
    output = model(**batch)
    expected = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())
    torch.testing.assert_close(output.loss, expected)


@every_model
def test_attention_is_what_was_asked_for(name):
    model, eager = hf_zoo.build(name), hf_zoo.build(name, attention="eager")
    assert (model.config._attn_implementation, eager.config._attn_implementation) == ("sdpa", "eager")
    batch = hf_zoo.batch()
    torch.testing.assert_close(model(**batch).loss, eager(**batch).loss)


@every_model
def test_dropout_is_off_unless_asked_for(name):
    """Compares logits: two masks now and then give the same loss, to the last bit."""
    batch = hf_zoo.batch()
    model = hf_zoo.build(name)
    assert torch.equal(model(**batch).logits, model(**batch).logits)
    model = hf_zoo.build(name, dropout=0.5)
    assert not torch.equal(model(**batch).logits, model(**batch).logits)
    model.eval()
    assert torch.equal(model(**batch).logits, model(**batch).logits)


@every_model
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_recomputes_and_changes_nothing(name, dropout):
    batch, models_ = hf_zoo.batch(), []
    for checkpointing in (False, True):
        model = hf_zoo.build(name, checkpointing=checkpointing, dropout=dropout)
        forwards = []
        block = model.get_submodule(f"{LAYERS.get(name, 'model.layers')}.0")
        inner = next(block.children())  # newer versions recompute inside the block's own hooks
        inner.register_forward_pre_hook(lambda *_, forwards=forwards: forwards.append(1))
        torch.manual_seed(0)
        model(**batch).loss.backward()
        assert len(forwards) == 1 + checkpointing
        models_.append(model)
    for key, parameter in models_[0].named_parameters():
        other = models_[1].get_parameter(key).grad
        assert (parameter.grad is None) == (other is None), key
        assert parameter.grad is None or torch.equal(parameter.grad, other), key


def test_own_models_checkpoint_too():
    model = models.build(models.resolve("tiny"), 0, checkpointing=True)
    forwards = []
    model.blocks[0].register_forward_pre_hook(lambda *_: forwards.append(1))
    model(**hf_zoo.batch()).loss.backward()
    assert len(forwards) == 2


def test_shapes_of_the_peer_benchmark():
    """llama-1.3b and llama as transformers builds them from the arguments that the benchmark states."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32000, "attn_implementation": "sdpa"}
    wide = LlamaConfig(
        hidden_size=2048, intermediate_size=5504, num_hidden_layers=24, num_attention_heads=16,
        max_position_embeddings=2048, **sizes,
    )  # fmt: skip
    layers = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=3, num_attention_heads=32, **sizes
    )
    gpt2 = GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="sdpa")
    told_apart = {
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "n_inner",
    }  # n_inner: none means four times the width
    for name, overrides, config, kind in (
        ("llama-1.3b", {}, wide, LlamaForCausalLM),
        ("llama", {"num_layers": 3}, layers, LlamaForCausalLM),
        ("hf:gpt2", {}, gpt2, GPT2LMHeadModel),
    ):
        model = models.build(models.find(name, overrides | {"weights": "random"}), 0, device="meta")
        assert type(model) is kind
        ours, theirs = model.config.to_dict(), config.to_dict()
        assert {k: v for k, v in ours.items() if theirs[k] != v}.keys() <= told_apart
        with torch.device("meta"):
            expected = kind(config)
        assert {k: v.shape for k, v in model.state_dict().items()} == {
            k: v.shape for k, v in expected.state_dict().items()
        }


@pytest.mark.parametrize("name", [*UNTIED, "mistralai/Mixtral-8x7B-v0.1"])
def test_rotary_embeddings_are_scaled_as_transformers_scales_them(name, tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    published = models.hub_models()[name]["config"] | {"num_hidden_layers": 1, "rope_scaling": scaling}
    published["head_dim"] = published["hidden_size"] // published["num_attention_heads"]
    (tmp_path / "config.json").write_text(json.dumps(published))
    model = models.build(models.find(str(tmp_path)), 0, device="meta")
    rotary = model.model.rotary_emb
    assert torch.equal(
        rotary.inv_freq, type(rotary)(transformers.AutoConfig.from_pretrained(tmp_path)).inv_freq
    )


def test_a_refusal_of_transformers_names_the_model():
    config = hf_zoo.config("hf:gpt2").model_copy(update={"other": {"activation_function": "no such"}})
    with pytest.raises(
        ConfigError, match=r"model 'openai-community/gpt2': transformers refuses it: .*no such"
    ):
        models.build(config, 0)


def test_a_refusal_of_several_lines_is_one():
    config = hf_zoo.config("meta-llama/Meta-Llama-3-8B").model_copy(update={"other": {"rms_norm_eps": "x"}})
    with pytest.raises(ConfigError, match="transformers refuses it: ") as caught:
        models.build(config, 0)
    assert "\n" not in str(caught.value)
