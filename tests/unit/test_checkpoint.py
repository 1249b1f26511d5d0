"""Real weights from a folder: the same as transformers loads, tensor by tensor, from every form of checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from zerobench import models
from zerobench.errors import ConfigError
from zerobench.models.materialise import Origin, materialise, on_meta

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install '.[hf]'"
)
import safetensors.torch  # noqa: E402 - comes with transformers

SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "max_seq_length": 16, "vocab_size": 64}
CASES = {
    "hf:gpt2": {},
    "llama": {"ffn_size": 40},
    "mistralai/Mixtral-8x7B-v0.1": {"ffn_size": 40, "num_kv_heads": 2, "num_experts": 3},
    "Qwen/Qwen2.5-0.5B": {"ffn_size": 40, "num_kv_heads": 2},
    "facebook/opt-350m": {"embedding_size": 16},
    "google-bert/bert-large-uncased": {},
}


def original(name: str):
    return models.build(models.find(name, SIZES | CASES[name] | {"weights": "random"}), 1, device="cpu")


def saved(name: str, folder: Path, *, base_only: bool = False, **options):
    """A model that transformers wrote to ``folder``, with values that are nobody's first ones."""
    model = original(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    (model.base_model if base_only else model).save_pretrained(folder, **options)
    return model


def assert_equal(model, expected) -> None:
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("name", CASES)
def test_what_transformers_wrote_and_reads(name, tmp_path):
    expected = saved(name, tmp_path)
    config = models.find(str(tmp_path))
    assert config.weights == str(tmp_path)
    model = models.build(config, 0, device="cpu")
    assert_equal(model, expected)
    loaded = type(expected).from_pretrained(tmp_path)
    assert_equal(model, loaded)
    assert model.training
    ids = torch.randint(64, (2, 8))
    torch.testing.assert_close(
        model.eval()(input_ids=ids, labels=ids).loss, loaded(input_ids=ids, labels=ids).loss
    )


def test_unit_by_unit_from_several_files(tmp_path):
    expected = saved("mistralai/Mixtral-8x7B-v0.1", tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    model = models.build(models.find(str(tmp_path)), 0, device="meta")
    for name in ("lm_head", "model.layers.1", "model.norm"):
        materialise(model, [name], device="cpu")
    assert model.model.layers[0].input_layernorm.weight.is_meta
    materialise(model, device="cpu")
    assert_equal(model, expected)


def test_torch_files_base_models_and_old_names(tmp_path):
    expected = saved("google-bert/bert-large-uncased", tmp_path)
    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in expected.state_dict().items()
    }
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert_equal(models.build(models.find(str(tmp_path)), 0, device="cpu"), expected)


def test_checkpoints_of_the_base_model(tmp_path):
    expected = saved("hf:gpt2", tmp_path, base_only=True)
    assert_equal(models.build(models.find(str(tmp_path)), 0, device="cpu"), expected)


def test_what_from_pretrained_loaded_is_not_drawn_anew(tmp_path):
    expected = saved("llama", tmp_path)
    model = on_meta(lambda: type(expected).from_pretrained(tmp_path))
    with pytest.raises(
        ConfigError, match=r"from_pretrained loaded '.*zerobench_origin = Origin\(weights=FOLDER\)"
    ):
        materialise(model, device="cpu")
    model.zerobench_origin = Origin(weights=str(tmp_path))
    materialise(model, device="cpu")
    assert_equal(model, expected)


def test_weights_are_cast_to_fp32(tmp_path):
    expected = original("llama").bfloat16()
    expected.save_pretrained(tmp_path)
    model = models.build(models.find(str(tmp_path)), 0, device="cpu")
    assert model.lm_head.weight.dtype == torch.float32
    assert torch.equal(model.lm_head.weight, expected.lm_head.weight.float())


def test_the_first_layers_of_a_deeper_checkpoint(tmp_path):
    expected = saved("llama", tmp_path)
    config = models.find(str(tmp_path), {"num_layers": 1, "weights": str(tmp_path)})
    model = models.build(config, 0, device="cpu")
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, expected.model.layers[0].mlp.up_proj.weight)
    assert len(model.model.layers) == 1


def test_a_checkpoint_that_does_not_fit(tmp_path):
    saved("llama", tmp_path)
    wide = models.find(str(tmp_path), {"vocab_size": 65, "weights": str(tmp_path)})
    with pytest.raises(
        ConfigError, match=r"'model.embed_tokens.weight' has shape \(64, 32\) in .* and \(65, 32\)"
    ):
        models.build(wide, 0, device="cpu")
    deep = models.find(str(tmp_path), {"num_layers": 3, "weights": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"has no parameter 'model.layers.2"):
        models.build(deep, 0, device="cpu")


def test_a_mixture_that_lacks_a_part_of_an_expert(tmp_path):
    saved("mistralai/Mixtral-8x7B-v0.1", tmp_path)
    file, lost = tmp_path / "model.safetensors", "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    state = safetensors.torch.load_file(file)
    del state[lost]
    safetensors.torch.save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"has no parameter '{lost}': it is of another model"):
        models.build(models.find(str(tmp_path)), 0, device="cpu")


def test_weights_that_have_gone_since(tmp_path):
    saved("llama", tmp_path)
    config = models.find(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no weights"):
        models.build(config, 0, device="cpu")


def test_a_whole_file_counts_before_the_index_of_a_sharded_one(tmp_path):
    saved("llama", tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    newer = original("llama")
    safetensors.torch.save_file(newer.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = models.build(models.find(str(tmp_path)), 0, device="cpu")
    assert_equal(model, newer)
    assert_equal(model, type(newer).from_pretrained(tmp_path))


def test_an_index_that_names_the_wrong_file(tmp_path):
    saved("llama", tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = content["weight_map"]["model.embed_tokens.weight"]
    content["weight_map"] = dict.fromkeys(content["weight_map"], file)
    index.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"{file} lacks '.*', for which the index names it: complete"):
        models.build(models.find(str(tmp_path)), 0, device="cpu")


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ([1], r"cannot be read as weights \(it holds a list, no tensors by name\)"),
        ({"transformer.wte.weight": [1.0]}, "holds a list as 'transformer.wte.weight' and no tensor"),
    ],
)
def test_torch_files_of_something_else(tmp_path, held, words):
    saved("hf:gpt2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(held, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=words):
        models.build(models.find(str(tmp_path)), 0, device="cpu")


def test_one_weight_of_which_a_checkpoint_has_two_values(tmp_path):
    expected = saved("Qwen/Qwen2.5-0.5B", tmp_path)

    def write(head: torch.Tensor) -> None:
        state = expected.state_dict() | {"lm_head.weight": head.double()}
        safetensors.torch.save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})

    write(expected.lm_head.weight)
    assert_equal(models.build(models.find(str(tmp_path)), 0, device="cpu"), expected)
    write(expected.lm_head.weight + 1)
    with pytest.raises(ConfigError, match=r"other values for 'lm_head.weight' than for 'model.embed_tokens"):
        models.build(models.find(str(tmp_path)), 0, device="cpu")
    untied = models.find(str(tmp_path), {"tied_embeddings": False, "weights": str(tmp_path)})
    model = models.build(untied, 0, device="cpu")
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight + 1)


def test_torch_files_from_before_zip_archives(tmp_path):
    expected = saved("hf:gpt2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    file = tmp_path / "pytorch_model.bin"
    torch.save(expected.state_dict(), file, _use_new_zipfile_serialization=False)
    assert_equal(models.build(models.find(str(tmp_path)), 0, device="cpu"), expected)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_files_that_hold_no_weights_are_named(name, tmp_path):
    saved("hf:gpt2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(
        ConfigError, match=rf"{name} cannot be read as weights .*complete the download"
    ) as caught:
        models.build(models.find(str(tmp_path)), 0, device="cpu")
    assert "\n" not in str(caught.value)
