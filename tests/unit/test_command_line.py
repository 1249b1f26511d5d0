"""Behaviour that all commands share: JSON, exit codes and completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import command_line
import pytest
import typer
from report_samples import SAMPLE

from zerobench.cli import main as cli
from zerobench.cli.exit_codes import FAILED_FINDING, MEANINGS, ExitCode
from zerobench.host import interrupts

COMMANDS: dict[str, Any] = dict(command_line.leaves(typer.main.get_command(cli.app)))


class Ended(NamedTuple):
    """Output and exit code of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Ended]:
    """Return a function that runs a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(interrupts, "interrupt_on_signals", lambda: None)

    def ended(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["zerobench", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return Ended(int(end.value.code or 0), *capsys.readouterr())

    return ended


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_print_json(name: str) -> None:
    assert "--json" in {flag for parameter in COMMANDS[name].params for flag in parameter.opts}


DOCUMENTS = {
    "info": ["machine", "versions"],
    "doctor .": ["findings"],
    "chart SAMPLE --output charts": ["sentences", "differences", "charts"],
    "export SAMPLE --to torchrun": ["row", "to", "text", "notes", "file", "change"],
    "advise SAMPLE": ["goal", "workloads"],
    "network SAMPLE": ["rows", "strategies", "model_error"],
    "launch --hostfile hosts -- train.py": ["lines"],
    "launch --hostfile hosts --write slurm -- train.py": ["text"],
    "recipe list": ["recipes"],
    "recipe show precision --quick": ["commands", "options", "row_commands"],
}


@pytest.mark.slow
@pytest.mark.parametrize("line", DOCUMENTS)
def test_json_is_one_document_with_a_line_of_verdict_first(run: Any, tmp_path: Path, line: str) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    name, *words = line.replace("SAMPLE", str(SAMPLE)).split()
    at = 1 if name == "recipe" else 0  # before --, and after a command's own name
    ended = run(name, *words[:at], "--json", *words[at:])
    document = json.loads(ended.out)
    assert list(document) == ["verdict", *DOCUMENTS[line]]
    assert document["verdict"] and "\n" not in document["verdict"]
    assert ended.err == ""


@pytest.mark.slow
def test_the_verdict_on_results_is_their_first_advice(run: Any) -> None:
    found = json.loads(run("show", str(SAMPLE), "--plots", "plots", "--json").out)
    assert list(found) == ["verdict", "results", "plots"]
    assert all(Path(path).is_file() for path in found["plots"])
    assert found["verdict"] == found["results"][0]["advice"][0]
    assert [row["name"] for row in found["results"][0]["rows"]]


@pytest.mark.slow
def test_show_begins_with_the_verdict(run: Any) -> None:
    first, *_ = run("show", str(SAMPLE), "--plots", "plots").out.splitlines()
    assert first.startswith("zero2 and zero1 tie as the fastest of 7 correct rows")


def test_info_begins_with_the_machine_in_one_line(run: Any) -> None:
    first, *_ = run("info").out.splitlines()
    assert first.startswith("zerobench ") and " cores, " in first


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_no_error(run: Any, name: str) -> None:
    assert run(*name.split(), "--help").code == ExitCode.OK


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_is_a_mistake_in_usage(run: Any, name: str) -> None:
    ended = run(*name.split(), "--no-such-option")
    assert (ended.code, ended.out) == (ExitCode.USAGE, "")
    assert ended.err.count("\n") == 1 and ended.err.startswith("zerobench: ")


@pytest.mark.parametrize(
    "line",
    [
        "compare --strategies zreo3",
        "report nowhere",
        "show nowhere",
        "chart nowhere",
        "advise nowhere",
        "diff nowhere nowhere",
        "doctor nowhere",
        "export nowhere --to torchrun",
        "network nowhere",
        "launch --hostfile nowhere -- train.py",
        "launch --hostfile hosts --ssh --json -- train.py",
        "bench comm --world-size 0",
        "bench adam --device cpu --repeats 0",
        "bench pinned --device cpu --copy-bytes 0",
        "bench io nowhere",
        "tune io nowhere",
        "recipe show nothing",
        "recipe run nothing",
    ],
)
def test_what_cannot_start_ends_with_the_code_for_usage(run: Any, line: str) -> None:
    ended = run(*line.split())
    assert (ended.code, ended.out) == (ExitCode.USAGE, ""), ended
    assert ended.err.startswith("zerobench: ")


def test_an_error_leaves_standard_output_empty(run: Any) -> None:
    ended = run("show", "nowhere", "--json")
    assert (ended.code, ended.out) == (ExitCode.USAGE, "")


def test_a_failure_on_the_way_ends_with_its_own_code(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    Path("hosts").write_text("a slots=1\n")
    ended = run("launch", "--hostfile", "hosts", "--ssh", "--", "train.py")
    assert ended.code == ExitCode.FAILED and "ssh cannot be started" in ended.err


def test_a_diff_ends_with_the_code_for_regressions_and_json(run: Any, tmp_path: Path) -> None:
    content = json.loads(SAMPLE.read_text(encoding="utf-8"))
    content["rows"][1].update(status="failed", error="rank 1 was killed by signal 9")
    (tmp_path / "broken.json").write_text(json.dumps(content))
    ended = run("diff", str(SAMPLE), "broken.json", "--json")
    assert ended.code == ExitCode.REGRESSION
    assert next(iter(json.loads(ended.out))) == "verdict"


def test_codes_are_told_for_commands_that_exist() -> None:
    assert FAILED_FINDING.keys() <= COMMANDS.keys()
    assert MEANINGS.keys() == set(ExitCode)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"), [("zerobench rec", "recipe"), ("zerobench show --pl", "--plots")]
)
def test_bash_completes(words: str, expected: str) -> None:
    """Complete by the same call that the script of --install-completion makes."""
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    ended = subprocess.run(
        [sys.executable, "-c", "from zerobench.cli.main import main; main()"],
        env={**os.environ, **asked, "_ZEROBENCH_COMPLETE": "complete_bash"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert expected in ended.stdout.split(), ended.stderr
