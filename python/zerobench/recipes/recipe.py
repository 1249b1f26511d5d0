"""A recipe: the question, the options of ``compare`` that answer it, charts, and sentences to conclude with."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from zerobench.bench.plan.options import value_of
from zerobench.errors import ConfigError, did_you_mean
from zerobench.recipes.known import KNOWN
from zerobench.results.setting_values import typed
from zerobench.results.settings import OPTIONS, Takes, flag_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Texts = dict[str, Any]
"""Options by their field's name, as the command line gives them: a text, several texts or True."""
AND_SO_ON = "..."
"""Last of the ranks: they double up to those of the machine."""
_BY_FLAG = {flag_of(key).removeprefix("--"): key for key in OPTIONS}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Chart(_Part):
    """A chart, with the values that the options of `zerobench chart` take."""

    metric: str
    x: str = "batch"
    by: str = "strategy"


class Recipe(_Part):
    """The contents of a recipe's file."""

    question: str = Field(min_length=1)
    options: dict[str, Any]
    quick: dict[str, Any] = {}
    cases: list[dict[str, Any]] = []
    """Options laid over ``options``, a grid each, where one grid cannot hold what belongs together. Not of the quick
    form."""
    charts: list[Chart] = []
    conclude: list[str] = []

    @field_validator("options", "quick")
    @classmethod
    def _are_options(cls, values: dict[str, Any]) -> dict[str, Any]:
        for flag, value in values.items():
            text_of(flag, value)
        return values

    @field_validator("cases")
    @classmethod
    def _hold_options(cls, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for values in cases:
            for flag, value in values.items():
                text_of(flag, value)
        return cases

    @field_validator("conclude")
    @classmethod
    def _are_known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in KNOWN:
                raise ValueError(f"{name!r} is unknown: use some of {', '.join(KNOWN)}")
        return names

    def grids(self, *, quick: bool, most_ranks: int) -> list[Texts]:
        """Return the options of each grid as texts by field. ``most_ranks``: of the machine, up to which ``...`` goes
        on."""
        parts = [self.quick] if quick else self.cases or [{}]
        return [self._texts({**self.options, **part}, most_ranks) for part in parts]

    def _texts(self, chosen: dict[str, Any], most_ranks: int) -> Texts:
        ranks = chosen.get("world-size")
        if isinstance(ranks, list) and ranks[-1:] == [AND_SO_ON]:
            chosen["world-size"] = doubled(ranks[:-1], most_ranks)
        return {_BY_FLAG[flag]: text_of(flag, value) for flag, value in chosen.items()}


def doubled(ranks: list[int], most: int) -> list[int]:
    """Return the ranks that a machine has, doubled from the last one on; at least the first."""
    found = list(ranks)
    while 2 * found[-1] <= most:
        found.append(2 * found[-1])
    return [num for num in found if num <= most] or found[:1]


def text_of(flag: str, value: Any) -> Any:
    """Return an option's value in a file as the command line gives it. Raise ValueError where it is none."""
    if flag not in _BY_FLAG:
        hint = did_you_mean(flag, _BY_FLAG)
        raise ValueError(
            f"{flag!r} is not an option of compare: {hint}options are named as in `compare --help`"
        )
    key = _BY_FLAG[flag]
    option = OPTIONS[key]
    if option.takes is Takes.SWITCH:
        if not isinstance(value, bool):
            raise ValueError(f"{flag} is {value!r}: use true or false")
        return value
    if option.convert is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{flag} is {value!r}: use a table of fields, such as {{ num_heads = 8 }}")
        return [f"{field}={json.dumps(each)}" for field, each in value.items()]
    values = value if isinstance(value, list) else [value]
    several = option.takes.is_list or option.takes is Takes.REPEATED
    if not values or (len(values) > 1 and not several):
        raise ValueError(f"{flag} is {value!r}: give one value{' or a list of them' if several else ''}")
    if key == "world_size" and values[-1:] == [AND_SO_ON] and len(values) > 1:
        values = values[:-1]
    if not all(isinstance(each, str | int | float) for each in values):
        raise ValueError(f"{flag} is {value!r}: use texts and numbers")
    texts = [typed(each) for each in values]
    found = texts if option.takes is Takes.REPEATED else ",".join(texts)
    try:
        value_of(key, found)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    except ValueError:
        kind = "whole number" if option.convert is int else "number"
        raise ValueError(f"{flag} is {value!r}: use a {kind}") from None
    return found


def names() -> list[str]:
    """Return the names of the recipes of the package."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.toml"))


def find(name: str) -> Recipe:
    """Return a recipe of the package. Raise ConfigError for an unknown name."""
    if name not in names():
        raise ConfigError(
            f"unknown recipe {name!r}: {did_you_mean(name, names())}use one of {', '.join(names())}, or --recipe FILE"
        )
    return read(Path(__file__).with_name(f"{name}.toml"))


def read(path: Path) -> Recipe:
    """Return the recipe in a file. Raise ConfigError that names the file, the key and what is allowed."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"{path} cannot be read ({reason}): give a recipe's TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_problem(error)}") from None


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        fields = Chart.model_fields if first["loc"][0] == "charts" else Recipe.model_fields
        return f"{place} is unknown: the keys are {', '.join(fields)}"
    return f"{place}: {first['msg'].removeprefix('Value error, ')}"


# Options of which the command line replaces all where it gives one.
_INSTEAD = (("strategies", "stages", "config"), ("grad_accum", "global_batch"))


def merged(recipe: Texts, given: Mapping[str, Any], named: frozenset[str]) -> tuple[Texts, frozenset[str]]:
    """Return the texts of all options and the flags that were given, where the command line wins over the recipe.

    ``given``: of the command line, defaults included; ``named``: the flags that stand on it."""
    typed_keys = {key for key in OPTIONS if flag_of(key) in named}
    replaced = {key for group in _INSTEAD if typed_keys & set(group) for key in group}
    used = {key: text for key, text in recipe.items() if key not in typed_keys | replaced}
    offload = given["offload"] if "offload" in typed_keys else recipe.get("offload", "none")
    if "nvme" not in offload:  # then the recipe's folders have no use
        used.pop("nvme_paths", None)
    return {**given, **used}, named | {flag_of(key) for key in used}


def command_words(texts: Texts) -> list[str]:
    """Return the options as words of a command line."""
    words: list[str] = []
    for key, option in OPTIONS.items():
        text, flag = texts.get(key), flag_of(key)
        if option.takes is Takes.SWITCH:
            words += [flag] if text else []
        elif option.convert is dict:
            words += [word for pair in text or () for word in (flag, pair)]
        elif text is not None:
            words += [flag, *([text] if isinstance(text, str) else text)]
    return words
