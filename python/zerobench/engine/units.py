"""Chooses a model's units: the modules whose parameters are gathered, and whose gradients are reduced, together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from zerobench.errors import ConfigError, did_you_mean

_LARGE_NUMEL = 1 << 24
"""An embedding or head of this many elements is worth a collective, however large the blocks are."""
_LARGE_BYTES = 64 << 20
"""A unit of so many bytes, if it is a quarter of the model as well, is told."""


@dataclass(frozen=True)
class UnitModules:
    """Units by name, the root (the whole model, named "root") first."""

    names: list[str]
    modules: list[nn.Module]

    def lone(self) -> list[int]:
        """Indices of the units in the root that are one embedding or linear layer."""
        kinds = (nn.Embedding, nn.Linear)
        return [index for index, module in enumerate(self.modules) if index and isinstance(module, kinds)]

    def cures(self) -> list[str]:
        """Return, by unit, the setting to change where a forward uses the unit without calling it; "" for no advice."""
        lone = set(self.lone())
        others = sorted({type(m).__name__ for i, m in enumerate(self.modules) if i and i not in lone})
        cure = f'set "units": {json.dumps(others)} in the configuration, which gathers it with the rest of the model'
        return [cure if index in lone else "" for index in range(len(self.modules))]

    def unit_of_parameters(self) -> dict[str, int]:
        """Unit index by parameter name. A parameter belongs to the innermost unit that holds all of its uses."""
        owners: dict[int, set[int]] = {}
        names: dict[int, str] = {}
        unit_of_module = {id(module): index for index, module in enumerate(self.modules)}

        def visit(module: nn.Module, unit: int) -> None:
            unit = unit_of_module.get(id(module), unit)
            for parameter in module._parameters.values():
                if parameter is not None:
                    owners.setdefault(id(parameter), set()).add(unit)
            for child in module._modules.values():
                if child is not None:
                    visit(child, unit)

        root = self.modules[0]
        visit(root, 0)
        for name, parameter in root.named_parameters():
            names[id(parameter)] = name
        return {
            name: (next(iter(owners[key])) if len(owners[key]) == 1 else 0) for key, name in names.items()
        }


def find_units(model: nn.Module, units: str | Sequence[str] = "auto") -> UnitModules:
    """The root and, inside it, repeated blocks ("auto") or all modules of the named classes.

    Blocks are the outermost modules of which a container holds at least two with the same class and the same parameter
    names and shapes; also those in a list of modules whose class a Hugging Face model must not have split, be there one
    only, so that a mixture of experts stays whole. A repeated module of more than a quarter of the model (a tower)
    gives way to the blocks inside it, where a forward calls each of them once ([Note: towers]). Large embeddings and
    heads that share no parameter with another module become units of their own next to blocks. Modules without a
    forward of their own (nn.ModuleList) are no units, since nobody calls them. Raises ConfigError for a class name that
    no module has, or that has no forward.
    """
    if units == "auto":
        found = _BlockSearch(model).blocks_in(model, set()).blocks
        if found:
            found += _lone_embeddings(model, found)
    else:
        found = _by_class(model, units)
    order = {id(module): position for position, module in enumerate(model.modules())}
    names = {id(module): name for name, module in model.named_modules()}
    found.sort(key=lambda module: order[id(module)])
    return UnitModules(["root", *(names[id(module)] for module in found)], [model, *found])


def large_unit_notice(units: UnitModules, *, element_bytes: int) -> str | None:
    """Return what to tell where a gather of the largest unit takes more than 64 MiB and a quarter of the model.

    None where no unit does, or where one parameter makes up most of that unit, which no choice of units splits.
    """
    sizes: dict[int, list[int]] = {}
    numels = {name: parameter.numel() for name, parameter in units.modules[0].named_parameters()}
    for name, unit in units.unit_of_parameters().items():
        sizes.setdefault(unit, []).append(numels[name])
    largest = max(sizes, key=lambda unit: sum(sizes[unit]), default=0)
    numel, total = sum(sizes.get(largest, [])), sum(numels.values())
    if numel * element_bytes <= _LARGE_BYTES or 4 * numel <= total or 2 * max(sizes[largest]) > numel:
        return None
    return (
        f"unit '{units.names[largest]}' takes {numel * element_bytes / 2**20:.1f} MiB, {numel / total:.0%} of the "
        "model, and stage 3 gathers all of a unit at once; set units in the configuration to the class names of the "
        'blocks inside it, such as "units": ["TransformerEncoderLayer"]'
    )


def _signature(module: nn.Module) -> tuple[object, ...]:
    return (type(module), tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters()))


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


# [Note: towers]
# Two equal towers (a bi-encoder) repeat, and so do the layers inside each. Experts of a mixture repeat as well, and
# must stay inside their block: a forward calls some of them only, and other ones on each rank. Shape tells them apart:
# - nn.Sequential calls its children in order, and classes that must not be split are layers.
# - Other layers normalise what they are given, so each holds a module with vectors alone. Experts are bare MLPs behind
#   their block's norm.
# - Experts have a router next to their list: a matrix with a row or column for each of them.
# Where a rule misses a tower, it stays one unit, which `large_unit_notice` tells.
class _BlockSearch:
    def __init__(self, model: nn.Module) -> None:
        self._large_numel = _numel(model) / 4
        self._whole = {
            name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()
        }

    def blocks_in(self, module: nn.Module, seen: set[int], parent: nn.Module | None = None) -> _Found:
        """Return the blocks inside ``module`` but those in modules of ``seen``, to which it adds."""
        found = _Found([])
        children = [child for child in module.children() if id(child) not in seen]
        signatures = {id(child): _signature(child) for child in children}
        counts = Counter(signatures[id(child)] for child in children if any(True for _ in child.children()))
        checked: set[tuple[object, ...]] = set()
        for child in children:
            seen.add(id(child))
            signature = signatures[id(child)]
            listed = isinstance(module, nn.ModuleList) and type(child).__name__ in self._whole
            if not ((listed or counts.get(signature, 0) >= 2) and signature[1] and _is_called(child)):
                found.add(self.blocks_in(child, seen, module))
            elif (inside := self._blocks_of_tower(child, seen)) is not None:
                found.add(inside)
            else:
                found.blocks.append(child)
                if signature not in checked:
                    found.in_order &= self._is_in_order(child, counts[signature], module, parent)
                checked.add(signature)
        return found

    def _blocks_of_tower(self, module: nn.Module, seen: set[int]) -> _Found | None:
        """Return the blocks that take the place of a repeated module, or None where it stays whole."""
        if _numel(module) <= self._large_numel or type(module).__name__ in self._whole:
            return None
        seen_inside = set(seen)
        found = self.blocks_in(module, seen_inside)
        if not found.blocks or not found.in_order:
            return None
        tables = sum(_numel(child) for child in module.modules() if isinstance(child, nn.Embedding))
        inside = sum(_numel(block) for block in found.blocks)
        if _numel(module) - tables - inside > inside:  # most of it would go to the root
            return None
        seen |= seen_inside
        return found

    def _is_in_order(self, block: nn.Module, num: int, holder: nn.Module, parent: nn.Module | None) -> bool:
        """Return whether a forward calls each of the ``num`` modules like ``block`` in ``holder`` once."""
        if type(holder).forward is nn.Sequential.forward or type(block).__name__ in self._whole:
            return True
        if isinstance(holder, nn.ModuleDict) or not any(_is_norm(module) for module in block.modules()):
            return False
        around = parent if isinstance(holder, nn.ModuleList) and parent is not None else holder
        inside = {id(module) for child in holder.children() for module in child.modules()}
        return not any(
            parameter.dim() == 2 and num in parameter.shape
            for module in around.modules()
            if id(module) not in inside and not isinstance(module, nn.Embedding)
            for parameter in module._parameters.values()
            if parameter is not None
        )


@dataclass
class _Found:
    """Blocks, and whether a forward calls each of them once."""

    blocks: list[nn.Module]
    in_order: bool = True

    def add(self, other: _Found) -> None:
        self.blocks += other.blocks
        self.in_order &= other.in_order


def _is_norm(module: nn.Module) -> bool:
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    return bool(own) and all(parameter.dim() == 1 for parameter in own)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _lone_embeddings(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update(id(parameter) for parameter in module._parameters.values() if parameter is not None)
    inside = {id(inner) for block in blocks for inner in block.modules()}
    block_numel = max(_numel(block) for block in blocks)
    lone: list[nn.Module] = []
    for module in model.modules():
        if id(module) in inside or not isinstance(module, (nn.Embedding, nn.Linear)):
            continue
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            continue  # nn.MultiheadAttention's, which reads its weight and does not call it
        own = [p for p in module._parameters.values() if p is not None]
        numel = sum(p.numel() for p in own)
        # Small ones (position embeddings, a classifier) would only add collectives.
        if own and all(uses[id(p)] == 1 for p in own) and (2 * numel >= block_numel or numel >= _LARGE_NUMEL):
            lone.append(module)
    return lone


def _by_class(model: nn.Module, classes: Sequence[str]) -> list[nn.Module]:
    known = sorted({type(module).__name__ for module in model.modules()})
    for name in classes:
        if name not in known:
            hint = did_you_mean(name, known).rstrip() or f"it has {', '.join(known)}"
            raise ConfigError(f"units: the model has no module of class '{name}'; {hint}")
    named = [
        m
        for m in model.modules()
        if type(m).__name__ in classes and m is not model and any(True for _ in m.parameters())
    ]
    for module in named:
        if not _is_called(module):
            raise ConfigError(
                f"units: a {type(module).__name__} has no forward of its own, so nothing tells when it is used; name "
                "the class of what it holds, or of the module that holds it"
            )
    return named
