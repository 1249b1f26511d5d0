"""Ways to train: zerobench's own ZeRO stages and every peer, behind one protocol (base.py).

Names come from a table, so that importing this imports neither torch nor a peer. A strategy of one's own is
named by the place of its class, ``package.module:ClassName``.
"""

from __future__ import annotations

import importlib
import traceback

from zerobench._native import import_torch
from zerobench.errors import ConfigError, did_you_mean
from zerobench.strategies.base import Strategy

__all__ = ["Strategy", "available", "get"]

_PLACES = {
    "single": "zerobench.strategies.single:SingleStrategy",
    "zero0": "zerobench.strategies.zero:Zero0Strategy",
    "zero1": "zerobench.strategies.zero:Zero1Strategy",
    "zero2": "zerobench.strategies.zero:Zero2Strategy",
    "zero3": "zerobench.strategies.zero:Zero3Strategy",
    "compute_only": "zerobench.strategies.compute_only:ComputeOnlyStrategy",
    "ddp": "zerobench.strategies.ddp:DDPStrategy",
    "ddp_compress": "zerobench.strategies.ddp:DDPCompressStrategy",
    "ddp_master": "zerobench.strategies.ddp:DDPMasterStrategy",
    "fsdp1": "zerobench.strategies.fsdp1:FSDP1Strategy",
    "fsdp2": "zerobench.strategies.fsdp2:FSDP2Strategy",
    "fsdp2_keep": "zerobench.strategies.fsdp2:FSDP2KeepStrategy",
    "deepspeed0": "zerobench.strategies.deepspeed.strategy:DeepSpeed0Strategy",
    "deepspeed1": "zerobench.strategies.deepspeed.strategy:DeepSpeed1Strategy",
    "deepspeed2": "zerobench.strategies.deepspeed.strategy:DeepSpeed2Strategy",
    "deepspeed3": "zerobench.strategies.deepspeed.strategy:DeepSpeed3Strategy",
    "deepspeed3_leaves": "zerobench.strategies.deepspeed.strategy:DeepSpeed3LeavesStrategy",
    "deepspeed3_super": "zerobench.strategies.deepspeed.super_offload:DeepSpeed3SuperStrategy",
    "deepcompile3": "zerobench.strategies.deepspeed.deepcompile:DeepCompile3Strategy",
    "deepcompile3_prefetch": "zerobench.strategies.deepspeed.deepcompile:DeepCompile3PrefetchStrategy",
    "deepcompile3_selective": "zerobench.strategies.deepspeed.deepcompile:DeepCompile3SelectiveStrategy",
    "deepcompile3_both": "zerobench.strategies.deepspeed.deepcompile:DeepCompile3BothStrategy",
    "mfsdp1": "zerobench.strategies.megatron_fsdp:MegatronFSDP1Strategy",
    "mfsdp2": "zerobench.strategies.megatron_fsdp:MegatronFSDP2Strategy",
    "mfsdp3": "zerobench.strategies.megatron_fsdp:MegatronFSDP3Strategy",
}


def available() -> list[str]:
    """Names of the built-in strategies."""
    return list(_PLACES)


def check(name: str) -> None:
    """Raise ConfigError unless ``name`` is built in or has the form of a place. Imports nothing."""
    if name in _PLACES or _is_place(name):
        return
    hint = did_you_mean(name.lower(), _PLACES, cutoff=0.5)
    raise ConfigError(
        f"unknown strategy {name!r}: {hint}known: {', '.join(_PLACES)} and package.module:ClassName"
    )


def get(name: str) -> type[Strategy]:
    """The class of a built-in strategy or of ``package.module:ClassName``; imports its module, and torch."""
    check(name)
    module_name, _, class_name = _PLACES.get(name, name).partition(":")
    import_torch()
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"strategy {name!r}: no module named {error.name!r}: install it or set PYTHONPATH to its folder"
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"strategy {name!r}: {module_name} cannot be imported: {_told(error)}: put that right"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise ConfigError(f"strategy {name!r}: {module_name} has no Strategy class named {class_name!r}")
    return found


def _told(error: BaseException) -> str:
    """The error in a line, with the place that it comes from."""
    what = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):
        return what  # which names file and line
    frames = traceback.extract_tb(error.__traceback__)
    return f"{what} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else what


def _is_place(name: str) -> bool:
    module_name, colon, class_name = name.partition(":")
    return bool(colon) and class_name.isidentifier() and all(p.isidentifier() for p in module_name.split("."))
