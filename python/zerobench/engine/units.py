"""Chooses a model's units: the modules whose parameters are gathered, and whose gradients are reduced, together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from zerobench.errors import ConfigError, did_you_mean

_LARGE_NUMEL = 1 << 24
"""An embedding or head of this many elements is worth a collective, however large the blocks are."""


@dataclass(frozen=True)
class UnitModules:
    """Units by name, the root (the whole model, named "root") first."""

    names: list[str]
    modules: list[nn.Module]

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
    only, so that a mixture of experts stays whole. Large embeddings and heads that share no parameter with another
    module become units of their own beside blocks. Modules without a forward of their own (nn.ModuleList) are no units,
    since nobody calls them. Raises ConfigError for a class name that no module has, or that has no forward.
    """
    if units == "auto":
        found = _repeated_blocks(model)
        if found:
            found += _lone_embeddings(model, found)
    else:
        found = _by_class(model, units)
    order = {id(module): position for position, module in enumerate(model.modules())}
    names = {id(module): name for name, module in model.named_modules()}
    found.sort(key=lambda module: order[id(module)])
    return UnitModules(["root", *(names[id(module)] for module in found)], [model, *found])


def _signature(module: nn.Module) -> tuple[object, ...]:
    return (type(module), tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters()))


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    blocks: list[nn.Module] = []
    seen: set[int] = set()
    whole = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}

    def visit(module: nn.Module) -> None:
        children = [child for child in module.children() if id(child) not in seen]
        counts = Counter(_signature(child) for child in children if any(True for _ in child.children()))
        for child in children:
            seen.add(id(child))
            signature = _signature(child)
            listed = isinstance(module, nn.ModuleList) and type(child).__name__ in whole
            if (listed or counts.get(signature, 0) >= 2) and signature[1] and _is_called(child):
                blocks.append(child)
            else:
                visit(child)

    visit(model)
    return blocks


def _lone_embeddings(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update(id(parameter) for parameter in module._parameters.values() if parameter is not None)
    inside = {id(inner) for block in blocks for inner in block.modules()}
    block_numel = max(sum(p.numel() for p in block.parameters()) for block in blocks)
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
