"""Recipes as files: what they hold, what is refused, and the comparison that they are."""

from __future__ import annotations

import io
import json
import re
import shlex

import pytest
from report_samples import grid
from rich.console import Console
from typer.testing import CliRunner

from zerobench.bench.plan.configuration import Plan
from zerobench.cli import main as cli
from zerobench.cli import recipe as command
from zerobench.errors import ConfigError
from zerobench.recipes import recipe as recipes
from zerobench.recipes.conclude import conclude
from zerobench.results.settings import OPTIONS, flag_of

cli.app.add_typer(command.app, name="recipe")
EIGHT = [
    "accumulation",
    "baseline",
    "compile",
    "offload",
    "parallelism",
    "precision",
    "scaling",
    "zero-stages",
]


def planned(*arguments: str) -> Plan:
    """Return the plan of a command line instead of running it."""
    plans: list[Plan] = []

    def run(plan: Plan, **_: object) -> int:
        plans.append(plan)
        return 0

    result = CliRunner().invoke(cli.app, cli.gather_values(list(arguments)), obj=run, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return plans[0]


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["recipe", "show", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_there_are_eight() -> None:
    assert recipes.names() == EIGHT
    listed = CliRunner().invoke(cli.app, ["recipe", "list"], catch_exceptions=False).output
    assert [line.split()[0] for line in listed.splitlines()] == EIGHT


@pytest.mark.parametrize("name", EIGHT)
@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
def test_options_are_those_of_compare(name: str, quick: bool) -> None:
    found = recipes.find(name)
    for texts in found.grids(quick=quick, most_ranks=8):
        assert texts.keys() <= OPTIONS.keys()
    assert found.charts and found.conclude
    assert found.quick["device"] == "cpu"


@pytest.mark.parametrize("name", EIGHT)
def test_show_prints_a_command_that_plans_the_same_rows(name: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(shown(name, "--quick").splitlines()[-1])
    by_hand, by_recipe = planned(*words[3:]), planned("recipe", "run", name, "--quick")
    assert by_hand.configurations == by_recipe.configurations
    assert len(by_hand.configurations) > 3
    assert by_hand.options.given == by_recipe.options.given


def test_cases_are_grids_whose_rows_join() -> None:
    found = planned("recipe", "run", "parallelism", "--device", "cpu", "--strategies", "ddp", "zero3")
    shapes = {
        (c.settings.model, c.settings.seq_length, c.settings.batch_size * c.settings.grad_accum * 2)
        for c in found.configurations
    }
    assert shapes == {("gpt-64m", 512, 8), ("gpt-512m", 1024, 16)}
    assert len(found.configurations) == len({c.name for c in found.configurations})


def test_what_the_command_line_gives_holds_in_every_case() -> None:
    found = planned("recipe", "run", "parallelism", "--device", "cpu", "--grad-accum", "1")
    models = {(c.settings.model, c.settings.grad_accum) for c in found.configurations}
    assert models == {("gpt-64m", 1), ("gpt-512m", 1)}


def test_the_quick_form_has_no_cases() -> None:
    found = planned("recipe", "run", "parallelism", "--quick")
    assert {c.settings.model for c in found.configurations} == {"tiny"}


def test_show_prints_a_command_for_each_case() -> None:
    lines = shown("parallelism").splitlines()
    assert len(lines) == 4 and "gpt-64m" in lines[2] and "gpt-512m" in lines[3]


def test_the_command_line_wins_over_the_recipe() -> None:
    found = planned(
        "recipe", "run", "accumulation", "--quick", "--batch-size", "2", "--strategies", "zero2", "ddp"
    )
    assert {c.strategy for c in found.configurations} == {"zero2", "ddp"}
    assert {c.settings.batch_size for c in found.configurations} == {2}


def test_a_global_batch_replaces_the_accumulation_of_the_recipe() -> None:
    found = planned("recipe", "run", "accumulation", "--quick", "--batch-size", "1,2", "--global-batch", "8")
    assert {(c.settings.batch_size, c.settings.grad_accum) for c in found.configurations} == {(1, 4), (2, 2)}


def test_files_replace_the_strategies_of_the_recipe(tmp_path) -> None:
    (tmp_path / "mine.json").write_text('{"stage": 2}')
    found = planned("recipe", "run", "scaling", "--quick", "--config", str(tmp_path / "mine.json"))
    assert {c.strategy for c in found.configurations} == {"zero2"}


def test_without_nvme_the_folders_of_the_recipe_are_left_out() -> None:
    found = planned("recipe", "run", "offload", "--quick", "--offload", "none,cpu_full")
    assert found.options.nvme_paths == []


def test_ranks_that_a_launcher_started_replace_those_of_the_recipe(monkeypatch) -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("zerobench.bench.launch.given.GivenRank.open_launcher", lambda _: None)
    found = planned("recipe", "run", "scaling", "--quick")
    assert {c.settings.world_size for c in found.configurations} == {3}


def test_ranks_double_up_to_those_of_the_machine() -> None:
    assert recipes.doubled([1, 2], 8) == [1, 2, 4, 8]
    assert recipes.doubled([1, 2], 6) == [1, 2, 4]
    assert recipes.doubled([2, 4], 1) == [2]


@pytest.mark.parametrize("name", ["zero-stages", "offload", "precision"])
def test_configuration_files_give_the_rows_of_the_recipe(name: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [
        line
        for line in shown(name, "--quick", "--configs", "files").splitlines()
        if " --config files/" in line
    ]
    rows = planned("recipe", "run", name, "--quick").configurations
    assert len(commands) == len(rows) == len(list((tmp_path / "files").iterdir()))
    for line, row in zip(commands, rows, strict=True):
        (found,) = planned(*shlex.split(line)[3:]).configurations
        asked = found.settings.model_copy(update={"config_file": None, "repeats": row.settings.repeats})
        assert asked == row.settings and found.strategy == row.strategy
        assert found.checksum_group() == row.checksum_group()


def test_a_file_of_ones_own_is_a_recipe(tmp_path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'question = "Which?"\n[options]\nstages = [0, 3]\nseq-length = 64\nmodel-option = { num_heads = 2 }'
    )
    found = planned("recipe", "run", "--recipe", str(file), "--device", "cpu")
    assert [c.strategy for c in found.configurations] == ["zero0", "zero3"]
    assert found.configurations[0].model["num_heads"] == 2
    assert shown("--recipe", str(file)).startswith("Which?")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("question = 3", "question: "),
        ("[options", "is not TOML"),
        ('question = "q"', "options: "),
        (
            'question = "q"\nsentences = []\n[options]',
            "sentences is unknown: the keys are question, options, quick",
        ),
        ('question = "q"\n[options]\nbatch = 3', "options: 'batch' is not an option of compare"),
        ('question = "q"\n[options]\nbatch-size = "x"', "options: --batch-size 'x' is not a whole number"),
        ('question = "q"\n[options]\nnum-steps = "x"', "options: num-steps is 'x': use a whole number"),
        ('question = "q"\n[options]\nnum-steps = [1, 2]', "options: num-steps is [1, 2]: give one value"),
        (
            'question = "q"\n[quick]\ncheckpointing = "yes"\n[options]',
            "quick: checkpointing is 'yes': use true or false",
        ),
        ('question = "q"\n[options]\nmodel-option = 3', "options: model-option is 3: use a table"),
        ('question = "q"\ncases = [{ batch = 1 }]\n[options]', "cases: 'batch' is not an option of compare"),
        ('question = "q"\nconclude = ["fast"]\n[options]', "conclude: 'fast' is unknown: use some of"),
        ('question = "q"\n[options]\n[[charts]]\ny = "m"', "charts.0.metric: "),
        (
            'question = "q"\n[options]\n[[charts]]\nmetric = "tokens"',
            "charts.0: metric 'tokens' is not a numeric column of results.csv: give one, such as tokens_per_s",
        ),
        (
            'question = "q"\n[options]\n[[charts]]\nmetric = "mfu.pct"\nx = "ranks"',
            "charts.0: x 'ranks' is unknown: give one of model, world_size",
        ),
        (
            'question = "q"\n[options]\n[[charts]]\nmetric = "mfu.pct"\nby = "rank"',
            "charts.0: by 'rank' is unknown: give one of strategy, model",
        ),
        (
            'question = "q"\n[options]\n[[charts]]\nmetric = "mfu.pct"\nby = "batch"',
            "charts.0: x and by are both batch: give two different settings",
        ),
        (
            'question = "q"\n[options]\n[[charts]]\nmetric = "phases"\nx = "batch"',
            "charts.0: x has no effect with metric phases, which is drawn as a bar for each row",
        ),
        ('question = "q"\nstudies = ["x"]\n[options]', "studies: 'x' is unknown: use some of DeepSpeed ZeRO"),
    ],
)
def test_errors_name_the_file_the_key_and_what_is_allowed(text: str, said: str, tmp_path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        recipes.read(file)
    assert str(file) in str(caught.value)


def test_a_recipe_is_named_once(tmp_path) -> None:
    for arguments in (["recipe", "run"], ["recipe", "show", "offload", "--recipe", "x.toml"]):
        with pytest.raises(ConfigError, match="name one recipe, or give --recipe"):
            CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    with pytest.raises(ConfigError, match="did you mean 'offload'"):
        recipes.find("offlod")
    with pytest.raises(ConfigError, match="cannot be read"):
        recipes.read(tmp_path / "none.toml")


def test_every_option_can_be_given_to_a_recipe() -> None:
    parameters = command.run.__signature__.parameters  # type: ignore[attr-defined]
    assert list(parameters) == ["context", "name", "recipe", "quick", "references", *OPTIONS]


def test_references_need_a_study() -> None:
    with pytest.raises(ConfigError, match="--references has no effect: this recipe names no published study"):
        planned("recipe", "run", "accumulation", "--quick", "--references")
    assert planned("recipe", "run", "precision", "--quick", "--references").configurations


def test_words_of_a_command_give_every_kind_of_option() -> None:
    texts = {
        "checkpointing": True,
        "model_option": ["num_heads=2", 'a="b"'],
        "nvme_paths": ["x", "y"],
        "batch_size": "1,2",
    }
    assert json.dumps(recipes.command_words(texts)) == json.dumps(
        [
            "--model-option", "num_heads=2", "--model-option", 'a="b"', flag_of("batch_size"), "1,2", "--nvme-path",
            "x", "y", "--checkpointing",
        ]
    )  # fmt: skip


def test_charts_of_fewer_rows_make_way_for_those_of_all(tmp_path) -> None:
    recipe = recipes.find("accumulation")
    results = grid()

    def concluded() -> set[str]:
        (tmp_path / "results.json").write_text(results.model_dump_json(), encoding="utf-8")
        conclude(recipe, results, tmp_path, console=Console(file=io.StringIO()))
        return {path.name for path in (tmp_path / "charts").iterdir()}

    of_all_rows, rows = concluded(), results.rows
    results.rows = [row for row in rows if row.settings.batch_size == 8 and row.settings.precision == "bf16"]
    (tmp_path / "charts" / "mine.svg").touch()
    of_fewer = concluded() - {"mine.svg"}
    assert of_fewer.isdisjoint(of_all_rows)
    results.rows = rows
    assert concluded() == of_all_rows | {"mine.svg"}
