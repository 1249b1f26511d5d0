"""Models without memory, and memory and values for any part of them.

``on_meta`` builds a model whose parameters have shapes only; ``materialise`` gives the parameters of some
modules memory and the values they begin with, so that a model larger than one device, or one host, can be made unit by
unit. A parameter's values depend on the seed, its name and the kind of device, never on what else was materialised or
when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zerobench.errors import ConfigError
from zerobench.models.checkpoint import Checkpoint

T = TypeVar("T", bound=nn.Module)
Initialise = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Origin:
    """Source of a model's first values. ``build`` leaves it on the model as ``zerobench_origin``."""

    seed: int = 0
    weights: str | None = None  # a folder with a checkpoint; None: drawn


def on_meta(make: Callable[[], T]) -> T:
    """The model that ``make`` returns, its parameters on the meta device.

    What has values by construction (rotary frequencies, position ids, masks) stays real, so buffers keep what their
    module computed, which ``with torch.device("meta")`` would lose. Memory without values is never taken.
    """
    with _EmptyOnMeta(), torch.no_grad():
        model = make()
        for parameter in model.parameters():
            if not parameter.is_meta:
                _replace(parameter, torch.empty_like(parameter, device="meta"))
    return model


def materialise(
    model: nn.Module,
    names: Iterable[str] | None = None,
    *,
    device: str | torch.device,
    seed: int | None = None,
) -> list[str]:
    """Give parameters on the meta device memory on ``device`` and their first values; others are left alone.

    ``names``: parameters as ``model.named_parameters()`` names them, or modules, which stand for all of theirs; None
    for everything. ``seed`` replaces that of the model's Origin. Parameter objects, their ties, hooks, attributes and
    ``requires_grad`` stay. Buffers come along in the first call, all of them: they are small and belong to no unit.

    Values: those of the Origin's checkpoint, else what ``_init_weights(module)`` of the innermost model that has one
    gives (Hugging Face's protocol, and ours), else the module's ``reset_parameters()``. Returns the names of the
    parameters. Raises ConfigError for an unknown name, for a parameter or buffer that gets no value and, without a
    checkpoint, for a parameter that ``from_pretrained`` had loaded.
    """
    origin = getattr(model, "zerobench_origin", Origin())
    device = torch.empty(0, device=device).device  # "cuda" is the current GPU
    every = dict(model.named_parameters())
    chosen = [name for name in _selected(model, every, names) if every[name].is_meta]
    if origin.weights is None:
        _expect_nothing_loaded(every, chosen)
    with torch.no_grad(), device:  # whatever initialisation makes by itself is made there, whoever calls
        buffers = _move_buffers(model, device)
        for name in chosen:
            _replace(every[name], torch.empty_like(every[name], device=device))
        try:
            drawn = chosen if origin.weights is None else []
            _initialise(model, drawn, buffers, seed=origin.seed if seed is None else seed)
            if origin.weights is not None:
                Checkpoint(origin.weights).load_into(model, chosen)
        except BaseException:  # memory without values must not pass for a parameter
            for name in chosen:
                _replace(every[name], torch.empty_like(every[name], device="meta"))
            raise
    return chosen


def _selected(model: nn.Module, every: Mapping[str, nn.Parameter], names: Iterable[str] | None) -> list[str]:
    if names is None:
        return list(every)
    modules = dict(model.named_modules(remove_duplicate=False))
    name_of = {id(parameter): name for name, parameter in every.items()}
    wanted: set[str] = set()
    for name in names:
        if name in every:
            wanted.add(name)
        elif name in modules:
            wanted.update(name_of[id(parameter)] for parameter in modules[name].parameters())
        else:
            raise ConfigError(
                f"the model has no parameter or module {name!r}: take names of named_parameters()"
            )
    return [name for name in every if name in wanted]


def _expect_nothing_loaded(every: Mapping[str, nn.Parameter], chosen: list[str]) -> None:
    """transformers marks what it loaded, also onto the meta device."""
    for name in chosen:
        if getattr(every[name], "_is_hf_initialized", False):
            raise ConfigError(
                f"from_pretrained loaded {name!r}, which is on the meta device now, and new values would be drawn for "
                "it: set model.zerobench_origin = Origin(weights=FOLDER), from where they are read again"
            )


def _replace(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Other memory behind the same object, so that ties, optimizers and hooks that hold it go on."""
    other = nn.Parameter(values, requires_grad=parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)  # such as _no_weight_decay, which param groups are made by
    other._backward_hooks = parameter._backward_hooks
    torch.utils.swap_tensors(parameter, other)


def _move_buffers(model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Put buffers onto ``device``; those that had no memory, by name, must be computed by their module's model."""
    without_values = {}
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or buffer.device == device:
                continue
            if buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)
                without_values[f"{prefix}.{key}" if prefix else key] = module._buffers[key]
            else:
                module._buffers[key] = buffer.to(device)
    return without_values


def _initialise(model: nn.Module, chosen: list[str], buffers: dict[str, torch.Tensor], *, seed: int) -> None:
    every = dict(model.named_parameters())
    wanted = {name: every[name] for name in chosen} | buffers
    others = [parameter for name, parameter in every.items() if name not in wanted]
    modules = dict(model.named_modules())
    # A model's rule for a module may reach into its children, as GPT-2's for its residual projections does.
    visited = {id(modules[above]) for name in wanted for above in _path(name)[:-1]}
    with _Draws(wanted, others, seed) as draws:
        for module, initialise in _children_first(model, None, set()):
            if id(module) in visited:
                initialise(module)
        for name in [name for name in wanted if name not in draws.written]:
            _reset(modules[_path(name)[-2]])
    for name in wanted:
        if name not in draws.written:
            owner = type(modules[_path(name)[-2]]).__name__
            raise ConfigError(
                f"nothing gives {name!r} its first values: give {owner} a reset_parameters() or the model an "
                "_init_weights(module) that covers it"
            )


def _path(name: str) -> list[str]:
    """``""``, ``a``, ``a.b``, ``a.b.c`` for ``a.b.c``."""
    parts = name.split(".")
    return ["", *(".".join(parts[: end + 1]) for end in range(len(parts)))]


def _children_first(
    module: nn.Module, initialise: Initialise | None, seen: set[int]
) -> Iterator[tuple[nn.Module, Initialise]]:
    seen.add(id(module))
    own = getattr(module, "_init_weights", None)
    initialise = own if callable(own) else initialise
    for child in module.children():
        if id(child) not in seen:
            yield from _children_first(child, initialise, seen)
    yield module, initialise or _reset


def _reset(module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            reset()
            return


class _EmptyOnMeta(TorchFunctionMode):
    """``torch.empty``, which is what layers make their parameters with, takes no memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


class _Draws(TorchDispatchMode):
    """Runs initialisation: each wanted tensor draws from a generator of its own, and the other parameters of the
    model, which may hold trained values by now, are not written."""

    def __init__(self, wanted: Mapping[str, torch.Tensor], others: Iterable[nn.Parameter], seed: int) -> None:
        super().__init__()
        self.written: set[str] = set()
        self._names = {_storage(tensor): name for name, tensor in wanted.items()}
        self._protected = {_storage(tensor) for tensor in others}
        self._generators: dict[str, torch.Generator] = {}
        self._seed = seed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = None
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            storage = _storage(args[0])
            if storage in self._protected:
                return args[0]
            name = self._names.get(storage)
        if torch.Tag.nondeterministic_seeded in func.tags:
            if name is None or all(argument.name != "generator" for argument in func._schema.arguments):
                raise ConfigError(
                    f"initialisation draws with {func} into a temporary tensor, which no seed of a parameter covers: "
                    "draw in place, such as with torch.nn.init.normal_"
                )
            kwargs["generator"] = self._generator(name, args[0].device)
        if name is not None:
            self.written.add(name)
        return func(*args, **kwargs)

    def _generator(self, name: str, device: torch.device) -> torch.Generator:
        if name not in self._generators:
            digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
            generator = torch.Generator(device)
            generator.manual_seed(int.from_bytes(digest, "little") >> 1)
            self._generators[name] = generator
        return self._generators[name]


def _storage(tensor: torch.Tensor) -> int:
    """Identity of a tensor's memory; views and ``.data`` share it, and no data is touched."""
    return tensor.untyped_storage()._cdata
