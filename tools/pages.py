"""Write the pages that are generated: the commands, the engine's calls, the support matrix, decisions and results.

`python tools/pages.py` writes them; `python tools/pages.py --check` exits with 1 if one is not current.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import command_line
import support

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
NOTE = "<!-- Written by tools/pages.py. -->\n"


def engine_page() -> str:
    """Return the page of the engine's public calls, with their signatures and docstrings."""
    import zerobench
    from zerobench.engine.engine import Engine, initialize
    from zerobench.engine.facts import EngineFacts
    from zerobench.engine.gathering import EngineGathering
    from zerobench.engine.state import EngineState
    from zerobench.engine.window import EngineWindow

    parts = [
        "# Engine\n",
        NOTE,
        "The calls of `zerobench`, with what they return and raise. Which call to use for what, with examples: "
        "[training scripts](training.md).\n",
        "## zerobench.initialize\n",
        _signature("initialize", initialize),
        _prose(initialize),
        "## Engine\n",
        _prose(Engine),
    ]
    for title, kind in [
        ("Training", Engine),
        ("Gradients between backward and step", EngineWindow),
        ("Parameters and buffers between steps", EngineGathering),
        ("Full state", EngineState),
        ("What happened and what is held", EngineFacts),
    ]:
        parts.append(f"## {title}\n")
        for name, member in vars(kind).items():
            if not name.startswith("_") and name != "forward":
                parts += [f"### {name}\n", _member(name, member)]
    parts += ["## ZeroOptimizer\n", _prose(zerobench.ZeroOptimizer)]
    return "\n".join(parts)


def _member(name: str, member: Any) -> str:
    if isinstance(member, property):
        kind = inspect.signature(member.fget).return_annotation  # type: ignore[arg-type]
        return f"```text\nengine.{name}: {kind}\n```\n\n{_prose(member)}"
    return f"{_signature(f'engine.{name}', member)}\n{_prose(member)}"


def _signature(name: str, call: Any) -> str:
    signature = inspect.signature(call)
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    text = f"{name}{signature.replace(parameters=parameters)}".replace("'", "")
    if len(text) > 100:
        inside = "".join(f"    {each},\n" for each in _spread(parameters)).replace("'", "")
        text = f"{name}(\n{inside}) -> {signature.return_annotation}"
    return f"```text\n{text}\n```\n"


def _spread(parameters: list[inspect.Parameter]) -> list[str]:
    """Return the parameters, with the star before the first that is given by name only."""
    lines = []
    for each in parameters:
        if each.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in lines:
            lines.append("*")
        lines.append(str(each))
    return lines


def _prose(described: Any) -> str:
    text = inspect.getdoc(described) or ""
    return re.sub(r"(?<!`)``([^`]+)``(?!`)", r"`\1`", text) + "\n"


def support_page() -> str:
    """Return the support matrix: features by stage, and the pairs that are refused."""
    rows = [
        "| "
        + " | ".join([feature.title, *("yes" if s in feature.stages else "no" for s in support.STAGES)])
        + " |"
        for feature in support.FEATURES.values()
    ]
    refused = [
        f"| {support.FEATURES[first].title} | {support.FEATURES[second].title} | {support.REFUSED[pair]} |"
        for first, second in support.pairs()
        if (pair := frozenset({first, second})) in support.REFUSED
    ]
    return "\n".join(
        [
            "# Support matrix\n",
            NOTE,
            "Which features of training work at which ZeRO stage. `tests/docs/test_support.py` trains every cell "
            "on two ranks.\n",
            "| feature | stage 0 | stage 1 | stage 2 | stage 3 |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "\nA `no` is a `ConfigError` in `zerobench.initialize` or in the call, which names what to use instead.\n",
            "## Pairs\n",
            "Any two features work together at every stage that takes both, except these, which are refused:\n",
            "| feature | with | because |",
            "| --- | --- | --- |",
            *refused,
            "",
        ]
    )


def decisions_page() -> str:
    """Return the list of decisions with their dates."""
    rows = []
    for page in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        text = page.read_text(encoding="utf-8")
        title = text.partition("\n")[0].removeprefix("# ")
        date, status = re.search(r"^Date: ([\d-]+)\. Status: ([^.]+)\.", text, re.MULTILINE).groups()  # type: ignore[union-attr]
        rows.append(f"| {page.name[:4]} | [{title}]({page.name}) | {date} | {status} |")
    head = ["# Decisions\n", NOTE, "Why zerobench is built the way it is, and what was tried.\n"]
    return "\n".join([*head, "| number | decision | date | status |", "| --- | --- | --- | --- |", *rows, ""])


def results_pages(folder: Path = RESULTS) -> dict[Path, str]:
    """Return a page for each result file in the folder, and their list."""
    from zerobench.results.files import read_results

    pages = {}
    rows = []
    for file in sorted(folder.rglob("results.json")):
        name = file.parent.relative_to(folder).as_posix().replace("/", "-")
        results = read_results(file)
        pages[DOCS / "results" / f"{name}.md"] = _result_page(name, results)
        rows.append(f"| [{name}]({name}.md) | {results.created[:10]} | {_machine(results)} |")
    head = ["# Results\n", NOTE, "Each page is written from a result file under `benchmarks/results/`.\n"]
    reports = [
        "Reports written by hand stand in `benchmarks/`: `gpu_h200x4.md`, `gpu_h200x2.md`, `gpu_h100x2.md`.",
        "",
    ]
    table = ["| result | date | machine |", "| --- | --- | --- |", *rows, ""] if rows else []
    return pages | {DOCS / "results" / "index.md": "\n".join([*head, *table, *reports])}


def _result_page(name: str, results: Any) -> str:
    from zerobench.report.tables import table_text

    return "\n".join(
        [
            f"# {name}\n",
            NOTE,
            f"Measured {results.created[:10]} by:\n",
            f"```text\n{results.command}\n```\n",
            f"```text\n{table_text(results, width=100).rstrip()}\n```",
            "",
        ]
    )


def _machine(results: Any) -> str:
    gpus = results.machine.get("gpus") or []
    return f"{len(gpus)} x {gpus[0]['name']}" if gpus else str(results.machine.get("cpu"))


def pages() -> dict[Path, str]:
    """Return every generated page by its path."""
    return {
        DOCS / "reference" / "command-line.md": command_line.page(),
        DOCS / "reference" / "engine.md": engine_page(),
        DOCS / "reference" / "support.md": support_page(),
        DOCS / "decisions" / "index.md": decisions_page(),
        **results_pages(),
    }


def main(arguments: list[str]) -> int:
    """Write the pages, or with --check name those that are not current."""
    old = [
        path
        for path, text in pages().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in old:
        print(path.relative_to(ROOT).as_posix())
        if "--check" not in arguments:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pages()[path], encoding="utf-8")
    return 1 if old and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
