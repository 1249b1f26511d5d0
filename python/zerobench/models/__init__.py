"""What is trained: decoder-only transformers by preset name. Importing this imports no torch."""

from zerobench.models.presets import ModelConfig, build, parameter_count, preset_names, resolve

__all__ = ["ModelConfig", "build", "parameter_count", "preset_names", "resolve"]
