"""Folders with a config.json of any of transformers' architectures: read, built, given batches, and refused."""

from __future__ import annotations

import json

import folders
import pytest
import torch

from zerobench import models
from zerobench.errors import ConfigError

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

from zerobench.models.materialise import materialise
from zerobench.models.trial import tried

pytestmark = pytest.mark.slow  # imports transformers

SEQ_LENGTH = 16


def examined(folder, overrides=None, **options):
    """As ``examine`` does it, in this process."""
    config = models.find(str(folder), overrides)
    return config if isinstance(config, models.HFConfig) else tried(config, seq_length=SEQ_LENGTH, **options)


def batch_of(config) -> dict[str, torch.Tensor]:
    data = models.open_batches(config, "synthetic", seed=0, seq_length=SEQ_LENGTH)
    return data.micro_batches(0, rank=0, world_size=1, batch_size=2)[0]


@pytest.fixture(params=folders.ARCHITECTURES)
def kind(request) -> str:
    return request.param


@pytest.mark.slow
def test_every_architecture_is_built_and_computes_a_loss(tmp_path, kind) -> None:
    config = examined(folders.write(tmp_path, kind))
    model, part = models.build(config, 3), models.build(config, 3, device="meta")
    assert models.parameter_count(config) == sum(p.numel() for p in model.parameters())
    materialise(part, [next(iter(dict(model.named_parameters())))], device="cpu")
    materialise(part, device="cpu")
    values = dict(part.named_parameters())
    assert all(torch.equal(value, values[name]) for name, value in model.named_parameters())
    loss = model(**batch_of(config)).loss
    assert loss.isfinite() and loss == part(**batch_of(config)).loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "class_name", "inputs"),
    [
        ("bert", "BertForSequenceClassification", {"input_ids", "labels"}),
        ("bert", "BertForTokenClassification", {"input_ids", "labels"}),
        ("gpt_neox", "GPTNeoXForSequenceClassification", {"input_ids", "labels"}),
        ("vit", "ViTForImageClassification", {"pixel_values", "labels"}),
    ],
)
@pytest.mark.parametrize("labels", [1, 3])
def test_batches_are_those_of_the_class(tmp_path, kind, class_name, inputs, labels) -> None:
    if labels == 1 and "Token" in class_name:
        pytest.skip("a class of one is no question")
    changes = {"architectures": [class_name], "num_labels": labels, "id2label": None, "label2id": None}
    config = examined(folders.write(tmp_path, kind, **changes))
    batch = batch_of(config)
    assert batch.keys() == inputs
    assert "labels" not in batch or batch["labels"].is_floating_point() == (labels == 1)


def test_batches_of_questions_have_the_place_of_the_answer(tmp_path) -> None:
    config = examined(folders.write(tmp_path, "bert", architectures=["BertForQuestionAnswering"]))
    assert batch_of(config).keys() == {"input_ids", "start_positions", "end_positions"}


def test_known_architectures_keep_their_sizes(tmp_path) -> None:
    for kind in ("llama", "opt", "mixtral"):
        assert isinstance(models.find(str(folders.write(tmp_path, kind))), models.HFConfig)
    (tmp_path / "other").mkdir()
    masked = folders.write(tmp_path / "other", "bert", architectures=["BertForMaskedLM"])
    assert isinstance(models.find(str(masked)), models.HFConfig)


def test_images_have_no_sequence(tmp_path) -> None:
    config = models.find(str(folders.write(tmp_path, "vit")))
    assert config.seq_length_of(512) == 1 and config.vocab_size is None
    config.check_seq_length(1)


def test_flops_and_logits_are_told_where_they_are_known(tmp_path) -> None:
    config = models.find(str(folders.write(tmp_path, "qwen3")))
    assert models.flops_per_token(config, 8) is None and models.logits_numel(config, 8) == 8 * 256
    classifier = models.find(str(folders.write(tmp_path, "bert")))
    assert models.logits_numel(classifier, 8) == 0
    with pytest.raises(ConfigError, match="not counted yet: pass it to"):
        models.parameter_count(config)


def test_fewer_layers_are_fewer_everywhere(tmp_path) -> None:
    config = examined(folders.write(tmp_path, "t5", num_layers=4, num_decoder_layers=4))
    fewer = config.with_layers(3)
    assert fewer.published["num_layers"] == fewer.published["num_decoder_layers"] == fewer.num_layers == 3
    built = models.build(fewer, 0, device="meta")
    assert models.parameter_count(fewer) == sum(p.numel() for p in built.parameters())


def test_lists_with_an_entry_for_each_layer_follow(tmp_path) -> None:
    config = models.find(str(folders.write(tmp_path, "gemma2")))
    assert config.with_layers(1).published["layer_types"] == ["sliding_attention"]
    assert "layer_types" not in config.with_layers(4).published


def test_keys_of_its_config_are_options(tmp_path) -> None:
    folder = folders.write(tmp_path, "qwen3")
    (folder / "model.safetensors").touch()
    assert models.find(str(folder)).weights == str(folder)
    config = models.find(str(folder), {"num_layers": 1, "intermediate_size": 96, "hidden_size": 64})
    assert (config.num_layers, config.hidden_size, config.weights) == (1, 64, "random")
    assert config.published["intermediate_size"] == 96 and config.published["num_hidden_layers"] == 1
    with pytest.raises(ConfigError, match="unknown model option 'ffn_size'"):
        models.find(str(folder), {"ffn_size": 96})


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_dropout_is_as_asked_for(tmp_path, dropout) -> None:
    config = examined(folders.write(tmp_path, "t5"), {"dropout": dropout})
    found = {module.p for module in models.build(config, 0).modules() if isinstance(module, torch.nn.Dropout)}
    assert found == {dropout}


def test_attention_is_what_the_class_supports(tmp_path) -> None:
    folder = folders.write(tmp_path, "gemma2")
    assert examined(folder).attention == "eager"
    with pytest.raises(ConfigError, match="does not support an attention implementation"):
        examined(folder, {"attention": "sdpa"})
    phi = folders.write(tmp_path, "phi")
    assert [examined(phi).attention, examined(phi, {"attention": "eager"}).attention] == ["sdpa", "eager"]


@pytest.mark.slow
def test_weights_are_loaded_and_their_names_looked_at_before(tmp_path) -> None:
    from safetensors.torch import save_file

    folder = folders.write(tmp_path, "qwen3", tie_word_embeddings=True)
    values = dict(models.build(examined(folder), 5).named_parameters())
    save_file({name: value.detach() for name, value in values.items()}, folder / "model.safetensors")
    config = examined(folder)
    loaded = models.build(config, 0).named_parameters()
    assert config.weights == str(folder)
    assert all(torch.equal(value, values[name]) for name, value in loaded)
    values.pop("model.norm.weight")
    save_file({name: value.detach() for name, value in values.items()}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has no parameter 'model\.norm\.weight'"):
        examined(folder)


def test_a_model_that_draws_into_temporary_tensors_is_made_whole(tmp_path) -> None:
    folder = folders.write(
        tmp_path, "qwen3", model_type="mamba", architectures=["MambaForCausalLM"], state_size=4
    )
    config = examined(folder)
    assert config.begins_whole
    states = [models.build(config, 1).state_dict(), models.build(config, 1, device="meta").state_dict()]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("qwen3", {"architectures": ["Qwen3Model"]}, ["Qwen3Model", "computes no loss", "name a class"]),
        ("qwen3", {"architectures": ["WhisperForAudio"]}, ["WhisperForAudio", "package.module:function"]),
        ("qwen3", {"architectures": "Qwen3"}, ["architectures 'Qwen3'", "a list"]),
        ("qwen3", {"quantization_config": {"bits": 4}}, ["quantised weights"]),
        ("qwen3", {"text_config": {}, "vision_config": {}}, ["text_config and vision_config"]),
        ("qwen3", {"num_hidden_layers": None, "num_layers": 1}, ["no number of layers"]),
    ],
)
def test_folders_that_no_batch_fits_are_refused_when_read(tmp_path, kind, changes, words) -> None:
    folder = folders.write(tmp_path, kind, **changes)
    overrides = {"num_layers": 1} if "num_hidden_layers" in changes else None
    if overrides:
        published = json.loads((folder / "config.json").read_text())
        published.pop("num_layers")
        (folder / "config.json").write_text(json.dumps(published))
    with pytest.raises(ConfigError) as caught:
        models.find(str(folder), overrides)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}},
            ["no model_type 'mine'", "never run (no trust_remote_code)", "package.module:function"],
        ),
        ({"architectures": ["MineForCausalLM"]}, ["no class MineForCausalLM"]),
        ({"num_attention_heads": 5}, ["fails on a batch of input_ids (2, 16)", "fix that"]),
        ({"max_position_embeddings": 8}, ["seq_length 16 is outside 2 to 8"]),
        (
            {
                "model_type": "whisper",
                "architectures": ["WhisperForConditionalGeneration"],
                "pad_token_id": 0,
                "d_model": 48,
                "hidden_size": None,
                "num_attention_heads": None,
            },
            ["takes input_features", "package.module:function"],
        ),
    ],
)
def test_folders_that_cannot_be_built_are_refused_before_anything_starts(tmp_path, changes, words) -> None:
    folder = folders.write(tmp_path, "qwen3", **changes)
    with pytest.raises(ConfigError) as caught:
        examined(folder)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_folder_without_a_class_is_a_causal_language_model(tmp_path) -> None:
    config = examined(folders.write(tmp_path, "phi", architectures=None))
    assert type(models.build(config, 0, device="meta")).__name__ == "PhiForCausalLM"
    with pytest.raises(ConfigError, match="names no class, and AutoModelForCausalLM has none for 'vit'"):
        examined(folders.write(tmp_path, "vit", architectures=None))


def test_checkpointing_is_tried_before_anything_starts(tmp_path) -> None:
    examined(folders.write(tmp_path, "phi"), checkpointing=True)
    folder = folders.write(
        tmp_path, "vit", model_type="resnet", architectures=["ResNetForImageClassification"]
    )
    with pytest.raises(ConfigError, match="remove --checkpointing"):
        examined(folder, checkpointing=True)
