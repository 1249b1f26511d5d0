"""The reference page of the command line, made from the commands; tools/pages.py writes it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import typer

from zerobench.cli.exit_codes import FAILED_FINDING, MEANINGS
from zerobench.cli.main import app
from zerobench.results.settings import OPTIONS

_WIDTH = 118
_INTRODUCTION = """\
# Command line

<!-- Written by tools/pages.py. -->

Write a command after `zerobench` or `python -m zerobench`.

## Output

- Results go to standard output. Progress, notes and errors go to standard error.
- With `--json`, a command prints one JSON document. Its first key, `verdict`, is one line that says what was found.
- Without `--json`, `info`, `doctor` and `show` begin with that line, and `recipe show` with the recipe's question.

## Shell completion

Bash, Zsh, Fish and PowerShell complete commands and options once you have run this and opened a new shell:

```bash
zerobench --install-completion
```

`zerobench --show-completion` prints the script instead, so that you can put it where your shell looks for it.

## Exit codes
"""


def page() -> str:
    """Return the page as Markdown."""
    root: Any = typer.main.get_command(app)
    parts = [_INTRODUCTION, *_exit_codes(), "\n## Options of every command\n", *_parameters(root)]
    for name, command in leaves(root):
        parts += [f"\n## {name}\n", *_paragraphs(command.help or "")]
        parts += _parameters(command, hidden=set(OPTIONS) if name == "recipe run" else set())
    return "\n".join(parts) + "\n"


def leaves(command: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full name of each command that does something, and the command."""
    for name, found in command.commands.items():
        if hasattr(found, "commands"):
            yield from leaves(found, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", found


def _exit_codes() -> Iterator[str]:
    yield "| code | meaning |\n| --- | --- |"
    for code, meaning in MEANINGS.items():
        yield f"| {code.value} | {meaning} |"
    yield "\nBeyond a failure on the way, such as a full disk, code 1 says:\n"
    for name, meaning in FAILED_FINDING.items():
        yield f"- `{name}`: {meaning}"


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        yield f"{_wrapped(_escaped(paragraph))}\n"


def _parameters(command: Any, hidden: AbstractSet[str] = frozenset()) -> Iterator[str]:
    """Yield a line for each argument and option, without those that are called as in ``hidden``."""
    for parameter in command.params:
        if parameter.name not in hidden:
            yield _wrapped(f"- {_usage(parameter)}: {_described(parameter)}", indent="  ")
    if hidden:
        yield "- all options of [compare](#compare), with the recipe's values as defaults"


def _usage(parameter: Any) -> str:
    if not parameter.opts[0].startswith("-"):
        return f"`{parameter.metavar or parameter.name.upper()}`"
    flag = parameter.opts[0]
    return f"`{flag}`" if parameter.is_flag else f"`{flag} {parameter.metavar or 'VALUE'}`"


def _described(parameter: Any) -> str:
    text = _escaped(parameter.help or "")
    if parameter.required and parameter.opts[0].startswith("-"):
        return f"{text} Required."
    is_named = parameter.opts[0].startswith("-") and not parameter.is_flag
    is_shown = is_named and parameter.default not in (None, "")
    return f"{text} Default: {parameter.default}." if is_shown else text


def _escaped(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return " ".join(text.split()).replace("<", "&lt;")


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
