"""A rule of advice, and the rows that it speaks about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zerobench.results.rows import is_ranked
from zerobench.results.schema import Row

Topic = Literal["fastest", "memory", "no gain", "bottleneck", "basis"]
Words = dict[str, str]
"""What a place where a rule holds puts into its sentence and its cure, by name."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Rows of one workload, with at least one that may be recommended."""

    rows: Sequence[Row]
    machine: dict[str, Any]
    advised: Row
    """The best row for the goal that was asked for."""
    labels: dict[int, str]
    """Short texts that tell rows apart, by their ``id``."""

    @property
    def ranked(self) -> list[Row]:
        return [row for row in self.rows if is_ranked(row)]

    def label(self, row: Row) -> str:
        return self.labels[id(row)]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A condition on rows, and what is said where it holds."""

    id: str
    topic: Topic
    when: str
    """The condition in words, for the page."""
    find: Callable[[Scene], list[Words]]
    """Return the words of each place where it holds."""
    sentence: str
    """What is said there, with the names of the words in braces."""
    cure: str = ""
    """What would change it."""


@dataclass(frozen=True)
class Finding:
    """A rule that held, with its sentence and its cure."""

    rule: str
    text: str
    cure: str

    @property
    def whole(self) -> str:
        return f"{self.text} {self.cure}".strip()


def findings(rules: Sequence[Rule], scene: Scene) -> list[Finding]:
    """Return what the rules find, in their order."""
    return [
        Finding(rule.id, rule.sentence.format(**words), rule.cure.format(**words))
        for rule in rules
        for words in rule.find(scene)
    ]
