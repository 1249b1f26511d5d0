"""Tasks of transformers' model classes: which inputs a batch has, told by the class's name. Imports no torch."""

from __future__ import annotations

from typing import Literal

from zerobench.errors import ConfigError
from zerobench.models.measured import OWN_FUNCTION

Task = Literal["tokens", "sequences", "each_token", "spans", "images"]
"""Inputs of a batch: tokens, which are the labels too; tokens, and a class for each sequence; tokens, and a class for
each of them; tokens, and the first and last position of an answer; pixels, and a class for each image."""

_BY_ENDING: dict[str, Task] = {
    "ForCausalLM": "tokens",
    "LMHeadModel": "tokens",
    "ForMaskedLM": "tokens",
    "ForConditionalGeneration": "tokens",
    "ForSequenceClassification": "sequences",
    "ForTokenClassification": "each_token",
    "ForQuestionAnswering": "spans",
    "ForImageClassification": "images",
}


def task_of(name: str, class_name: str) -> Task:
    """Return the task of ``class_name``, which the config.json of model ``name`` gives. Raises ConfigError for a class
    without batches here."""
    for ending, task in _BY_ENDING.items():
        if class_name.endswith(ending):
            return task
    if class_name.endswith("Model"):
        raise ConfigError(
            f"model {name!r}: its config.json names {class_name}, which computes no loss: name a class with a head "
            f"under architectures (classes that end in {', '.join(_BY_ENDING)}), or {OWN_FUNCTION}"
        )
    raise ConfigError(
        f"model {name!r}: its config.json names {class_name}, for which zerobench makes no batches (it does for "
        f"classes that end in {', '.join(_BY_ENDING)}): {OWN_FUNCTION}"
    )
