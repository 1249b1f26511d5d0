"""Model names, their published sizes, overrides, and the FLOP count; no model is built here."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from zerobench import models
from zerobench.cli.values import model_options
from zerobench.errors import ConfigError

pytest.importorskip("huggingface_hub", reason="transformers is not installed: pip install '.[hf]'")

PUBLISHED = models.hub_models()
SIZES = {"num_layers": 3, "hidden_size": 48, "num_heads": 4, "max_seq_length": 40, "vocab_size": 300}
ASKED_FOR = {
    "openai-community/": ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"],
    "meta-llama/": [
        "Llama-2-7b-hf",
        "Llama-2-13b-hf",
        "Llama-2-70b-hf",
        "Meta-Llama-3-8B",
        "Meta-Llama-3-70B",
    ],
    "mistralai/": ["Mistral-7B-v0.1", "Mixtral-8x7B-v0.1"],
    "Qwen/Qwen2.5-": ["0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B"],
    "facebook/opt-": ["125m", "350m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b"],
    "google-bert/": ["bert-large-uncased"],
    "": ["llama-1.3b", "llama"],
}
QWEN = "Qwen/Qwen2.5-"
SHORTER = {"max_seq_length": 32768}
# Variant: its base, and the fields in which its published config.json differs.
VARIANTS = {
    "meta-llama/Llama-2-7b-chat-hf": ("meta-llama/Llama-2-7b-hf", {}),
    "meta-llama/Llama-2-13b-chat-hf": ("meta-llama/Llama-2-13b-hf", {}),
    "meta-llama/Llama-2-70b-chat-hf": ("meta-llama/Llama-2-70b-hf", {}),
    "meta-llama/Meta-Llama-3-8B-Instruct": ("meta-llama/Meta-Llama-3-8B", {}),
    "meta-llama/Meta-Llama-3-70B-Instruct": ("meta-llama/Meta-Llama-3-70B", {}),
    "mistralai/Mistral-7B-Instruct-v0.1": ("mistralai/Mistral-7B-v0.1", {}),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistralai/Mistral-7B-v0.3", {}),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": ("mistralai/Mixtral-8x7B-v0.1", {}),
    **{f"{QWEN}{size}-Instruct": (f"{QWEN}{size}", {}) for size in ("0.5B", "3B")},
    **{f"{QWEN}{size}-Instruct": (f"{QWEN}{size}", SHORTER) for size in ("1.5B", "7B")},
    **{
        f"{QWEN}{size}-Instruct": (f"{QWEN}{size}", SHORTER | {"rms_norm_eps": 1e-6})
        for size in ("14B", "32B", "72B")
    },
}


# What lies in the hub's cache of this machine must not decide.
find, resolve = (partial(each, hub_cache=Path("/nowhere")) for each in (models.find, models.resolve))


def test_every_model_asked_for_is_shipped():
    assert {start + name for start, names in ASKED_FOR.items() for name in names} <= set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_number(name):
    config = find(name)
    assert config.name == name
    assert config.dropout == 0.0 and config.attention == "sdpa" and config.weights == "random"
    assert models.parameter_count(config) == PUBLISHED[name]["parameters"]


def test_names_are_never_mistaken_for_one_another():
    assert isinstance(find("gpt2"), models.PresetConfig)
    for name in ("hf:gpt2", "hf:openai-community/gpt2", "openai-community/gpt2"):
        assert find(name).name == "openai-community/gpt2"
        assert isinstance(find(name), models.HFConfig)
    assert find("hf:bert-large-uncased").name == "google-bert/bert-large-uncased"
    assert find("hf:opt-1.3b") == find("facebook/opt-1.3b")


def test_variants_are_the_listed_ones():
    text = (Path(models.__file__).parent / "hub.json").read_text()
    shipped = {name for name, model in json.loads(text)["models"].items() if "shape_of" in model}
    assert shipped == VARIANTS.keys()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_chat_or_instruct_variant_has_the_shape_of_its_base(name):
    base, changed = VARIANTS[name]
    expected = find(base).model_dump() | {"name": name}
    for field, value in changed.items():
        (expected if field in expected else expected["other"])[field] = value
    assert find(name).model_dump() == expected
    assert find(f"hf:{name.rpartition('/')[2]}").name == name


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2.5-Math-7B",
        "Qwen/Qwen2.5-7B-Instruct-1M",
        "meta-llama/Llama-2-7b-chat",
        "meta-llama/Llama-3.1-8B-Instruct",
        "mistralai/Mistral-7B-Instruct-v0.2",
        "openai-community/gpt2-Instruct",
    ],
)
def test_a_suffix_that_is_not_shipped_is_not_guessed(name):
    with pytest.raises(ConfigError, match=rf"^unknown model '{name}': did you mean '.*'\? known: tiny, "):
        find(name)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct-AWQ", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B-Instruct"),
        ("Qwen/Qwen2.5-7B-Instruct-GGUF", "Qwen/Qwen2.5-7B-Instruct"),
        ("someone/Meta-Llama-3-8B-Instruct-FP8", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("someone/Mistral-7B-v0.3-bnb-4bit", "mistralai/Mistral-7B-v0.3"),
    ],
)
def test_quantised_variants_are_refused_and_what_they_were_made_from_is_named(name, base):
    with pytest.raises(
        ConfigError, match=rf"^model '{name}' is quantised, .*did you mean '{base}'\? use the"
    ):
        find(name)


def test_sizes_of_mixtral_and_small_opt():
    mixtral = find("mistralai/Mixtral-8x7B-v0.1")
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.num_kv_heads) == (8, 2, 8)
    assert (mixtral.head_size, mixtral.ffn_size, mixtral.sliding_window) == (128, 14336, None)
    assert find("mistralai/Mistral-7B-v0.1").sliding_window == 4096
    assert find("facebook/opt-350m").embedding_size == 512


def test_a_window_can_be_left_out_and_attention_then_sees_all_tokens():
    config = find("mistralai/Mistral-7B-v0.1", model_options(["sliding_window=null"]))
    assert config.sliding_window is None and config.hf_arguments()["sliding_window"] is None
    windowed = find("mistralai/Mistral-7B-v0.1")
    assert models.flops_per_token(config, 8192) > models.flops_per_token(windowed, 8192)
    with pytest.raises(ConfigError, match="'num_heads=null' has no value"):
        model_options(["num_heads=null"])


@pytest.mark.parametrize("name", ["hf:gpt2", "llama", "facebook/opt-1.3b", "google-bert/bert-large-uncased"])
def test_sizes_are_overridable_and_what_follows_from_them_follows(name):
    config = find(name, SIZES)
    assert {field: getattr(config, field) for field in SIZES} == SIZES
    assert (config.head_size, config.num_kv_heads, config.embedding_size) == (12, 4, 48)
    assert config.ffn_size == (11008 if name == "llama" else 4 * 48)
    assert find(name, dict.fromkeys(SIZES)) == find(name)
    assert find(name, {"attention": "eager", "dropout": 0.1}).hf_arguments()["attn_implementation"] == "eager"


def test_a_configuration_survives_json():
    for name in ("tiny", "mistralai/Mistral-7B-v0.1", "facebook/opt-350m"):
        config = find(name, {"num_layers": 2})
        assert models.from_dict(json.loads(json.dumps(config.model_dump()))) == config


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("meta-llama/Llama-2-7b", {}, ["did you mean 'meta-llama/Llama-2-7b-hf'", "tiny"]),
        ("llama-13b", {}, ["unknown model 'llama-13b'", "llama-1.3b"]),
        ("hf:gpt2", {"num_layer": 2}, ["num_layer", "did you mean 'num_layers'"]),
        ("hf:gpt2", {"num_kv_heads": 2}, ["unknown model option 'num_kv_heads'"]),
        ("hf:gpt2", {"ffn_multiplier": 3}, ["unknown model option 'ffn_multiplier'"]),
        ("hf:gpt2", {"num_heads": 5}, ["hidden_size 768", "num_heads 5"]),
        ("hf:gpt2", {"num_heads": 0}, ["num_heads", "0"]),
        ("hf:gpt2", {"hidden_size": "wide"}, ["hidden_size", "wide"]),
        ("hf:gpt2", {"attention": "flash"}, ["attention", "sdpa", "flash"]),
        ("hf:gpt2", {"weights": "./nowhere"}, ["./nowhere", "no such folder"]),
        ("meta-llama/Meta-Llama-3-8B", {"num_kv_heads": 5}, ["num_heads 32", "num_kv_heads 5"]),
        ("mistralai/Mixtral-8x7B-v0.1", {"num_experts": 1}, ["experts_per_token 2", "num_experts 1"]),
        (
            "google-bert/bert-large-uncased",
            {"tied_embeddings": False},
            ["tied_embeddings", "leave them tied"],
        ),
        ("hf:gpt2", {"weights": ""}, ["an empty name: no such folder"]),
        ("./nowhere", {}, ["./nowhere", "no such folder"]),
        ("./" + 300 * "x", {}, ["no such folder"]),
        (300 * "x", {}, ["unknown model"]),
        ("~nobody-of-that-name/model", {}, ["~nobody-of-that-name/model", "no such folder"]),
        ("llama", {"hidden_size": 96, "num_heads": 32}, ["head_size 3 is odd", "2 x num_heads"]),
        ("llama", {"head_size": 7}, ["head_size 7 is odd"]),
        ("mistralai/Mixtral-8x7B-v0.1", {"experts_per_token": 0}, ["experts_per_token 0", "1 to num_exp"]),
        ("mistralai/Mixtral-8x7B-v0.1", {"experts_per_token": 9}, ["9 is outside 1 to num_experts 8"]),
        ("mistralai/Mixtral-8x7B-v0.1", {"ffn_size": 66}, ["ffn_size 66", "multiple of 8"]),
    ],
)
def test_errors_are_one_line_that_names_the_fault(name, overrides, words):
    with pytest.raises(ConfigError) as caught:
        resolve(name, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_sequences_longer_than_the_positions():
    config = find("google-bert/bert-large-uncased")
    config.check_seq_length(512)
    with pytest.raises(ConfigError, match=r"seq_length 513 is outside 2 to 512 \(max_seq_length of model"):
        config.check_seq_length(513)


def write(folder: Path, published: dict, *files: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(published))
    for file in files:
        (folder / file).touch()
    return folder


def test_a_local_folder(tmp_path, monkeypatch):
    published = PUBLISHED["Qwen/Qwen2.5-0.5B"]["config"] | {"num_hidden_layers": 2, "torch_dtype": "bfloat16"}
    folder = write(tmp_path / "mine", published)
    config = find(str(folder))
    assert (config.name, config.num_layers, config.weights) == (str(folder), 2, "random")
    monkeypatch.chdir(tmp_path)
    assert find("./mine") == config
    with pytest.raises(ConfigError, match=r"for the folder of that name write \./mine"):
        find("mine")
    (folder / "model.safetensors").touch()
    assert find("./mine").weights == str(folder)
    assert find("./mine", {"weights": "random"}).weights == "random"
    assert find("./mine", {"num_layers": 1}).weights == "random"
    assert find("./mine", {"num_layers": 1, "weights": "./mine"}).weights == str(folder)


@pytest.mark.parametrize(
    ("published", "words"),
    [
        ({"model_type": "llama", "hidden_size": 64}, ["lacks num_hidden_layers, num_attention_heads"]),
        (PUBLISHED["llama"]["config"] | {"quantization_config": {"bits": 4}}, ["quantization_config"]),
        (PUBLISHED["Qwen/Qwen2.5-7B"]["config"] | {"use_sliding_window": True}, ["use_sliding_window True"]),
        (PUBLISHED["mistralai/Mixtral-8x7B-v0.1"]["config"] | {"router_jitter_noise": 0.1}, ["noise 0.1"]),
        (
            PUBLISHED["google-bert/bert-large-uncased"]["config"]
            | {"position_embedding_type": "relative_key"},
            ["position_embedding_type 'relative_key'"],
        ),
        (PUBLISHED["llama"]["config"] | {"hidden_size": "64"}, ["hidden_size", "integer", "'64'"]),
        (PUBLISHED["llama"]["config"] | {"num_attention_heads": 0}, ["num_heads", "greater than 0"]),
        (PUBLISHED["llama"]["config"] | {"rope_parameters": "x"}, ["rope_parameters 'x'"]),
        ({"model_type": ["llama"]}, ["architecture ['llama']"]),
        ([1], ["holds no JSON object"]),
    ],
)
def test_folders_that_cannot_be_built(tmp_path, published, words):
    with pytest.raises(ConfigError) as caught:
        find(str(write(tmp_path / "mine", published)))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_folder_without_a_config_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    with pytest.raises(ConfigError, match=r"the folder 'weights' has no config\.json: give the folder"):
        find("weights")


def test_a_folder_without_a_readable_config(tmp_path):
    with pytest.raises(ConfigError, match=r"^model '.*': cannot read .*config\.json"):
        find(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^model '.*': .*config\.json is not JSON"):
        find(str(tmp_path))


def test_keys_of_a_published_config_may_repeat(tmp_path):
    published = json.dumps(PUBLISHED["llama"]["config"])
    (tmp_path / "config.json").write_text('{"vocab_size": 7, ' + published.removeprefix("{"))
    assert find(str(tmp_path)).vocab_size == PUBLISHED["llama"]["config"]["vocab_size"]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama", "intermediate_size"),
        ("mistralai/Mistral-7B-v0.1", "sliding_window"),
        ("mistralai/Mixtral-8x7B-v0.1", "num_local_experts"),
        ("mistralai/Mixtral-8x7B-v0.1", "num_experts_per_tok"),
        ("Qwen/Qwen2.5-7B", "num_key_value_heads"),
        ("facebook/opt-125m", "ffn_dim"),
        ("google-bert/bert-large-uncased", "intermediate_size"),
    ],
)
def test_sizes_that_transformers_would_guess_are_asked_for(tmp_path, name, key):
    published = {k: value for k, value in PUBLISHED[name]["config"].items() if k != key}
    with pytest.raises(ConfigError, match=f"lacks {key}: complete it"):
        find(str(write(tmp_path / "mine", published)))


def test_an_override_that_changes_nothing_leaves_the_weights(tmp_path):
    published = PUBLISHED["Qwen/Qwen2.5-0.5B"]["config"] | {"num_hidden_layers": 2}
    folder = write(tmp_path / "mine", published, "model.safetensors")
    config = find(str(folder))
    for field in ("num_kv_heads", "head_size", "ffn_size", "hidden_size", "num_layers"):
        assert find(str(folder), {field: getattr(config, field)}).weights == str(folder), field
    assert find(str(folder), {"head_size": 2 * config.head_size}).weights == "random"


def test_weights_that_are_not_whole_are_told_before_anything_runs(tmp_path):
    published = PUBLISHED["llama"]["config"] | {"num_hidden_layers": 2}
    folder = write(tmp_path / "mine", published, "part-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}))
    with pytest.raises(ConfigError, match=r"lacks part-2\.safetensors of its weights: complete the download"):
        find(str(folder))
    assert find(str(folder), {"weights": "random"}).weights == "random"
    assert find(str(folder), {"num_layers": 1}).weights == "random"
    for content in ("{", "[]", "{}", '{"weight_map": 3}'):
        index.write_text(content)
        with pytest.raises(ConfigError, match="is not an index of weights: complete the download"):
            find(str(folder))
    empty = write(tmp_path / "empty", published)
    with pytest.raises(ConfigError, match=r"holds no weights .*weights=random"):
        find(str(folder), {"weights": str(empty)})
    repository = tmp_path / "hub/models--facebook--opt-125m"  # of a shipped name: as if it were not there
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    snapshot = write(repository / "snapshots/abc", PUBLISHED["facebook/opt-125m"]["config"])
    for content in (json.dumps({"weight_map": {"a": "b.bin"}}), "{"):
        (snapshot / "pytorch_model.bin.index.json").write_text(content)
        assert models.find("facebook/opt-125m", hub_cache=tmp_path / "hub").weights == "random"


def test_weights_of_which_a_part_is_there_are_not_passed_over(tmp_path):
    published = PUBLISHED["llama"]["config"] | {"num_hidden_layers": 2}
    folder = write(tmp_path / "mine", published, "model-00001-of-00002.safetensors")
    with pytest.raises(ConfigError, match=r"lacks model\.safetensors\.index\.json of its weights"):
        find(str(folder))
    assert find(str(folder), {"weights": "random"}).weights == "random"
    (folder / "model.safetensors").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"lacks model\.safetensors of its weights"):
        find(str(folder))
    (folder / "pytorch_model.bin").touch()  # which transformers would take, too
    assert find(str(folder)).weights == str(folder)


def test_mixtral_needs_a_transformers_that_takes_its_experts_together():
    mixtral, gpt2 = find("mistralai/Mixtral-8x7B-v0.1"), find("hf:gpt2")
    with pytest.raises(ConfigError, match=r"before transformers 5 .*pip install -U transformers"):
        models.parse.check_packages(mixtral, major_version=lambda package: 4)
    models.parse.check_packages(gpt2, major_version=lambda package: 4)
    models.parse.check_packages(mixtral, major_version=lambda package: 5)


def test_the_hubs_cache_is_used_and_nothing_is_fetched(tmp_path):
    def snapshot(name: str, published: dict, *files: str) -> Path:
        repository = tmp_path / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs/main").write_text("abc")
        return write(repository / "snapshots/abc", published, *files)

    find = partial(models.find, hub_cache=tmp_path)
    opt = snapshot("facebook/opt-125m", PUBLISHED["facebook/opt-125m"]["config"], "pytorch_model.bin")
    assert find("facebook/opt-125m").weights == str(opt)
    assert find("facebook/opt-125m", {"num_layers": 2}).weights == "random"
    other = snapshot("someone/llama", PUBLISHED["llama"]["config"] | {"num_hidden_layers": 2})
    config = find("someone/llama")
    assert (config.name, config.num_layers, config.weights) == ("someone/llama", 2, "random")
    assert other.is_dir()


@pytest.mark.slow
def test_without_transformers_names_of_the_hub_say_what_to_install():
    code = """
import sys
sys.modules["transformers"] = None
from zerobench import models
models.build(models.resolve("tiny"), 0)
assert models.parameter_count(models.find("facebook/opt-125m")) == 125_239_296
try:
    models.resolve("facebook/opt-125m")
except models.parse.ConfigError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    needed = "pip install '.[hf]' in zerobench's checkout"
    assert run.stdout == f"model 'facebook/opt-125m' needs transformers: {needed}\n"


def test_flash_attention_needs_its_package():
    config = find("hf:gpt2", {"attention": "flash_attention_2"})
    with pytest.raises(ConfigError, match="pip install flash-attn"):
        models.parse.check_packages(config, is_installed=lambda package: package != "flash_attn")
    models.parse.check_packages(config, is_installed=lambda package: True)


def test_flops_by_hand():
    # One layer, width 8, feed-forward 32, vocabulary 300; forward of one token in a sequence of 10.
    preset = find("tiny", SIZES | {"num_layers": 1, "hidden_size": 8})
    weights = 8 * 24 + 8 * 8 + 2 * 8 * 32 + 8 * 300
    attention = 2 * (2 * 8 * 10)  # queries with keys, scores with values, 10 positions
    assert models.flops_per_token(preset, 10) == 3 * (2 * weights + attention)
    assert models.flops_per_token(find("hf:gpt2", SIZES | {"num_layers": 1, "hidden_size": 8}), 10) == (
        3 * (2 * weights + attention)
    )


def test_flops_of_grouped_heads_experts_and_windows():
    sizes = SIZES | {"num_kv_heads": 2, "ffn_size": 24}
    mixtral = find("mistralai/Mixtral-8x7B-v0.1", sizes)
    attention = 48 * 48 + 2 * 48 * 24 + 48 * 48
    layer = attention + 48 * 8 + 2 * (3 * 48 * 24)  # router over 8 experts, of which 2 work
    assert models.flops_per_token(mixtral, 16) == 3 * (2 * (3 * layer + 48 * 300) + 3 * 4 * 48 * 16)
    mistral = find("mistralai/Mistral-7B-v0.1", sizes | {"sliding_window": 4})
    dense = 3 * (attention + 3 * 48 * 24) + 48 * 300
    assert models.flops_per_token(mistral, 16) == 3 * (2 * dense + 3 * 4 * 48 * 4)


def test_flops_of_published_models_are_near_six_per_parameter():
    for name in ("meta-llama/Llama-2-7b-hf", "llama-1.3b", "Qwen/Qwen2.5-72B", "facebook/opt-66b"):
        config = find(name)
        assert models.flops_per_token(config, 2048) == pytest.approx(
            6 * models.parameter_count(config), rel=0.11
        )
