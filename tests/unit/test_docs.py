"""The pages name what the code has: keys of files, defaults, strategies, presets, limits, and each other."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel

from zerobench import models, strategies
from zerobench.bench.protocol.tolerances import TOLERANCES
from zerobench.cli import bench_io as io_commands
from zerobench.cli import main as cli
from zerobench.cli import recipe
from zerobench.engine import config
from zerobench.results import schema as result
from zerobench.strategies.base import Strategy
from zerobench.strategies.catalogue import Facts

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted((ROOT / "benchmarks").glob("*.md")), *sorted(DOCS.rglob("*.md"))]
SCHEMA = [
    kind
    for _, kind in inspect.getmembers(result, inspect.isclass)
    if issubclass(kind, BaseModel) and kind.model_fields
]


def named_in(path: Path) -> set[str]:
    """Return the names in backticks."""
    return set(re.findall(r"`([\w:.]+)`", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("kind", SCHEMA, ids=lambda kind: kind.__name__)
def test_every_key_of_a_result_file_is_explained(kind: type[BaseModel]) -> None:
    assert not kind.model_fields.keys() - named_in(DOCS / "reference" / "metrics.md")


@pytest.mark.parametrize(
    ("page", "sections"),
    [
        ("reference/configuration.md", [config.Config, config.OptimizerConfig, config.LossScaleConfig]),
        ("reference/offload.md", [config.OffloadOptimizerConfig]),
    ],
)
def test_every_key_of_a_configuration_stands_with_its_default(
    page: str, sections: list[type[BaseModel]]
) -> None:
    text, _, _ = (DOCS / page).read_text(encoding="utf-8").partition("## Files for compare")
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]*) \|", text, re.MULTILINE)
    defaults = {key: default.strip("` ") for keys, default in rows for key in re.findall(r"`(\w+)`", keys)}
    for section in sections:
        for key, field in section.model_fields.items():
            if not isinstance(field.default, BaseModel):  # whose keys stand in a table of their own
                assert defaults[key] == json.dumps(field.default), key


def test_every_strategy_is_explained() -> None:
    assert not set(strategies.available()) - named_in(DOCS / "reference" / "comparing.md")


def test_the_sample_is_a_strategy() -> None:
    page = DOCS / "how-to" / "own-strategy.md"
    sample = re.search(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert sample is not None
    names: dict[str, type[Strategy]] = {}
    exec(sample[1], names)
    assert issubclass(names["Mine"], Strategy) and not inspect.isabstract(names["Mine"])
    assert names["Mine"].name == "mine" and names["Mine"].facts.autocast


def test_every_fact_of_a_strategy_stands_with_its_default() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| `([^|]+)` \|", (DOCS / "reference" / "comparing.md").read_text("utf-8"), re.MULTILINE
    )
    assert dict(rows) == {
        fact.name: repr(fact.default).replace("'", '"') for fact in dataclasses.fields(Facts)
    }


def test_presets_have_the_sizes_of_the_page() -> None:
    text = (DOCS / "reference" / "models.md").read_text(encoding="utf-8")
    rows = {
        name: sizes
        for name, sizes in re.findall(r"^\| `([\w-]+)` \|((?: [\d,]+ \|){6})$", text, re.MULTILINE)
    }
    assert rows.keys() == set(models.preset_names())
    for name, sizes in rows.items():
        config = models.resolve(name)
        layers, hidden, heads, sequence, vocabulary, parameters = (
            int(size.replace(",", "")) for size in re.findall(r"[\d,]+", sizes)
        )
        assert (layers, hidden, heads) == (config.num_layers, config.hidden_size, config.num_heads)
        assert (sequence, vocabulary) == (config.max_seq_length, config.vocab_size)
        assert parameters == models.parameter_count(config)


def test_limits_of_verification_are_those_of_the_page() -> None:
    text = (DOCS / "explain" / "verification.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` honest, \*\*limit\*\* \|(.*)\|$", text, re.MULTILINE)
    limits = {name: [float(limit) for limit in re.findall(r"\*\*(.*?)\*\*", cells)] for name, cells in rows}
    assert limits == {
        name: [TOLERANCES[precision][name] for precision in ("fp32", "fp16", "bf16")]
        for name in TOLERANCES["fp32"]
    }


def commands_of(text: str) -> Iterator[list[str]]:
    """Words behind `zerobench`, in blocks and between backticks."""
    blocks = "".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    lines = [*blocks.replace("\\\n", " ").splitlines(), *(" ".join(each.split()) for each in inline)]
    for line in lines:
        found = re.search(
            r"(?:^|\s)zerobench ((?:compare|show|chart|diff|info|bench|tune|recipe)\b[^|>]*)", line
        )
        if found:
            yield shlex.split(found[1], comments=True)


def parse(words: list[str]) -> None:
    """Raises for a command or an option that there is none of."""
    apps = {"bench": io_commands.app, "tune": io_commands.tune_app, "recipe": recipe.app}
    first, *others = words
    command = typer.main.get_command(apps.get(first, cli.app))
    name = others.pop(0) if first in apps and others else first
    if hasattr(command, "commands") and name not in apps:
        command = command.commands[name]
    if others and "--help" not in others:  # else a page names the command
        command.make_context(name, cli.gather_values(others))


@pytest.mark.parametrize("words", ["compare --num-step 3", "bench com", "tune io . --second 3"])
def test_what_is_no_command_is_found(words: str) -> None:
    with pytest.raises((KeyError, cli.UsageError)):
        parse(words.split())


def test_command_lines_of_the_pages_can_be_given() -> None:
    found = [words for page in PAGES for words in commands_of(page.read_text(encoding="utf-8"))]
    assert len(found) > 40
    for words in found:
        parse(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for place, anchor in re.findall(
        r"\]\((?!\w+://)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8")
    ):
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), place
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{place}#{anchor}"
