"""Arguments of DeepSpeed's ``initialize`` that this engine's does not take, each with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerobench.errors import ConfigError

_INSTEAD = {
    "args": "pass the configuration, or the path of its file, as config",
    "config_params": "pass it as config",
    "optimizer": "the engine has its own AdamW: set its values in config under 'optimizer', and param groups by "
    "model_parameters",
    "lr_scheduler": "make it on engine.optimizer, and step it after engine.step()",
    "training_data": "make a torch DataLoader, and pass its batches to the engine",
    "collate_fn": "make a torch DataLoader with it",
    "mpu": "pass the process group of the ranks that train this model as process_group",
    "mesh_device": "pass the process group of the ranks that train this model as process_group",
    "dist_init_required": "leave it out, since the engine uses the process group that is there and needs none",
}


def expect_none(others: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument of DeepSpeed that is not None, TypeError for one that is neither's."""
    for name, value in others.items():
        if name not in _INSTEAD:
            raise TypeError(f"initialize() got an unexpected keyword argument {name!r}")
        if value is not None:
            raise ConfigError(f"initialize takes no {name}: {_INSTEAD[name]}")
