"""Plans of models whose sizes only building them tells."""

from __future__ import annotations

import folders
import pytest
from plan_samples import GPUS, ON_GPUS, SMALL, verification_model, why_too_large

from zerobench import models
from zerobench.bench.mfu import likely_compute_s
from zerobench.bench.plan.configuration import Configuration
from zerobench.bench.plan.fit import least_rank_bytes, logits_bytes
from zerobench.bench.plan.names import rerun_values
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import make_plan
from zerobench.bench.swap.plan import unit_numels
from zerobench.errors import ConfigError

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

from zerobench.models.trial import tried

pytestmark = pytest.mark.slow  # imports transformers


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch) -> None:
    """Examine models here, where torch is loaded already."""

    def examine(config, **options):
        return (
            tried(config, **options)
            if isinstance(config, models.FolderConfig | models.PlaceConfig)
            else config
        )

    monkeypatch.setattr(models, "examine", examine)


def configuration(**options) -> Configuration:
    return make_plan(CompareOptions(**{**SMALL, "seq_length": (16,), **options})).configurations[0]


@pytest.fixture
def qwen3(tmp_path) -> Configuration:
    return configuration(model=(str(folders.write(tmp_path, "qwen3", num_hidden_layers=4)),))


OWN = ("own_models:regression",)


def test_the_command_that_runs_a_row_again_gives_the_same_model(tmp_path) -> None:
    folder = str(folders.write(tmp_path, "t5"))
    options = {"model": (folder,), "num_layers": (1,), "model_option": {"d_ff": 64}, "dropout": 0.2}
    row = configuration(**options)
    again = rerun_values(row, CompareOptions(**{**SMALL, **options}))
    assert configuration(model=(folder,), model_option=again["model_option"]).model == row.model


def test_rows_of_several_models_are_named_by_what_is_known(qwen3) -> None:
    found = make_plan(
        CompareOptions(
            **{**SMALL, "strategies": ("ddp",), "seq_length": (16,), "model": (qwen3.settings.model, *OWN)}
        )
    )
    assert [row.name for row in found.configurations] == [
        "ddp_fp32_ranks2_bs4_sl16_qwen3_l4_h32",
        "ddp_fp32_ranks2_bs4_sl16_own_models-regression",
    ]


def test_memory_follows_from_the_counted_parameters(qwen3) -> None:
    count = qwen3.settings.parameter_count
    assert least_rank_bytes(qwen3).device == 16 * count
    assert sum(unit_numels(qwen3)) == pytest.approx(count, abs=4)
    own = configuration(model=OWN)
    assert unit_numels(own) == [own.settings.parameter_count]


def test_logits_and_flops_that_are_unknown_limit_nothing() -> None:
    own = configuration(model=OWN, strategies=("ddp",))
    assert logits_bytes(own) == 0
    assert likely_compute_s(own.settings, GPUS[0].name) is None
    assert own.settings.attention is None


def test_verification_takes_fewer_layers_where_there_are_some(qwen3) -> None:
    tight = {"memory_available_bytes": 40 * qwen3.settings.parameter_count}
    found = models.from_dict(verification_model(qwen3.model, **tight))
    assert found.num_layers == 2 and models.parameter_count(found) < qwen3.settings.parameter_count
    own = configuration(model=OWN)
    assert verification_model(own.model, memory_available_bytes=1)["num_layers"] == 1


def test_every_token_goes_to_all_experts_where_rounding_would_choose(tmp_path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    folder = folders.write(
        tmp_path, "qwen3", model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], **sizes
    )
    row = configuration(model=(str(folder),))
    found = models.from_dict(verification_model(row.model, rounded_tokens=100))
    assert found.experts_per_token == 4
    assert models.build(found, 0, device="meta").config.num_experts_per_tok == 4


def test_a_model_that_every_rank_makes_whole_must_fit_on_a_gpu() -> None:
    own = configuration(model=OWN, strategies=("zero3",), **ON_GPUS)
    whole_bytes = 4 * own.settings.parameter_count
    small = [gpu.__class__(**{**vars(gpu), "total_bytes": whole_bytes - 1}) for gpu in GPUS]
    assert "begins with the whole fp32 model" in why_too_large(own, gpus=small).reason


def test_options_that_a_model_cannot_follow_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="num_layers does not reach"):
        configuration(model=OWN, num_layers=(2,))
    images = (str(folders.write(tmp_path, "vit")),)
    with pytest.raises(ConfigError, match="--tokens has no effect: no model here takes tokens"):
        configuration(model=images, tokens="u16")
    assert configuration(model=images).settings.seq_length == 1
