"""Models to train: our own presets, transformers' models and a user's own, by name. Importing this imports no torch."""

from zerobench.models.batches import open_batches
from zerobench.models.building import build
from zerobench.models.checkpointing import enable_checkpointing
from zerobench.models.config import ModelConfig
from zerobench.models.counts import flops_per_token, logits_numel, parameter_count
from zerobench.models.examine import examine
from zerobench.models.folder_config import FolderConfig
from zerobench.models.hf_config import HFConfig
from zerobench.models.parse import find, from_dict, hub_models, resolve
from zerobench.models.place_config import PlaceConfig
from zerobench.models.presets import PresetConfig, preset_names
from zerobench.models.source import ModelSource

__all__ = [
    "FolderConfig",
    "HFConfig",
    "ModelConfig",
    "ModelSource",
    "PlaceConfig",
    "PresetConfig",
    "build",
    "enable_checkpointing",
    "examine",
    "find",
    "flops_per_token",
    "from_dict",
    "hub_models",
    "logits_numel",
    "open_batches",
    "parameter_count",
    "preset_names",
    "resolve",
]
