"""What is trained: our own presets and transformers' architectures, by name. Importing this imports no torch."""

from zerobench.models.building import build
from zerobench.models.checkpointing import enable_checkpointing
from zerobench.models.config import ModelConfig
from zerobench.models.counts import flops_per_token, parameter_count
from zerobench.models.hf_config import HFConfig
from zerobench.models.parse import find, from_dict, hub_models, resolve
from zerobench.models.presets import PresetConfig, preset_names

__all__ = [
    "HFConfig",
    "ModelConfig",
    "PresetConfig",
    "build",
    "enable_checkpointing",
    "find",
    "flops_per_token",
    "from_dict",
    "hub_models",
    "parameter_count",
    "preset_names",
    "resolve",
]
