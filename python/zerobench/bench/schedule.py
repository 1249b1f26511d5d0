"""The order in which a comparison runs, as data: rows, repeats, and where references are needed. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerobench.bench.plan.configuration import Configuration, Plan
from zerobench.strategies.catalogue import FLOOR, REFERENCE


@dataclass(frozen=True, kw_only=True)
class Group:
    """Configurations that train the same global batches, so one reference serves all of them."""

    name: str
    most_ranks: int  # of a configuration
    offloads: bool  # whether a configuration keeps state on the host
    is_compared: bool  # False for `single` alone: it is the reference and has nothing to be compared with


@dataclass(frozen=True, kw_only=True)
class Step:
    """One run of a configuration. The first verifies and measures; each further one measures again."""

    index: int  # of the configuration, and so of its row
    configuration: Configuration
    repeat: int  # from 0
    group: Group
    needs_reference: bool
    ends_group: bool  # no later step reads the group's reference


def schedule(plan: Plan) -> list[Step]:
    """Return all steps in order. Repeats are interleaved, so that drift of the machine affects all rows alike."""
    names = [configuration.reference_group() for configuration in plan.configurations]
    groups = {name: _group(name, names, plan.configurations) for name in names}
    last = {name: index for index, name in enumerate(names)}
    return [
        Step(
            index=index,
            configuration=configuration,
            repeat=repeat,
            group=groups[name],
            needs_reference=repeat == 0 and groups[name].is_compared and configuration.strategy != FLOOR,
            ends_group=repeat == 0 and last[name] == index,
        )
        for repeat in range(1 if plan.options.repeats == "auto" else plan.options.repeats)
        for index, (name, configuration) in enumerate(zip(names, plan.configurations, strict=True))
    ]


def task_num(steps: Sequence[Step]) -> int:
    """Return how many runs the steps take, with a run for each reference."""
    return len(steps) + len({step.group.name for step in steps if step.needs_reference})


def _group(name: str, names: Sequence[str], configurations: Sequence[Configuration]) -> Group:
    members = [found for found, of in zip(configurations, names, strict=True) if of == name]
    return Group(
        name=name,
        most_ranks=max(member.settings.world_size for member in members),
        offloads=any(member.settings.offload != "none" for member in members),
        is_compared=any(member.strategy not in (REFERENCE, FLOOR) for member in members),
    )
