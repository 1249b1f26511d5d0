"""The table of what works together: features of training, the stages that take them, and pairs that are refused.

`tests/docs/test_support.py` trains every cell on two ranks, and `tools/pages.py` writes the page from it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Feature:
    """Something that a configuration or a script may ask for, with the stages that take it."""

    title: str
    config: dict[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = STAGES
    script: str = ""  # what the script does besides: "block", "whole", "peft" or "checkpointing"
    excludes: str = ""  # features of one kind are not combined


NVME = {"device": "nvme", "nvme_path": "SWAP", "io_allow_fallback": True}
FEATURES = {
    "bf16": Feature("bf16", {"precision": "bf16"}, excludes="precision"),
    "fp16": Feature(
        "fp16", {"precision": "fp16", "loss_scale": {"initial_scale": 8.0}}, excludes="precision"
    ),
    "host": Feature(
        "optimizer state on the host", {"offload_optimizer": {}}, stages=(1, 2, 3), excludes="tier"
    ),
    "nvme": Feature(
        "optimizer state on NVMe", {"offload_optimizer": NVME}, stages=(1, 2, 3), excludes="tier"
    ),
    "params": Feature(
        "parameters on the host",
        {"offload_optimizer": {}, "offload_param": {}},
        stages=(3,),
        excludes="tier",
    ),
    "params_nvme": Feature(
        "parameters on NVMe",
        {"offload_optimizer": NVME, "offload_param": {"device": "nvme"}},
        stages=(3,),
        excludes="tier",
    ),
    "accumulation": Feature("several micro-batches a step", {"gradient_accumulation_steps": 2}),
    "clipping": Feature("gradient clipping", {"gradient_clipping": 1.0}),
    "in_backward": Feature("optimizer in backward", {"optimizer_in_backward": True}),
    "block": Feature("blocks compiled", script="block", excludes="compile"),
    "whole": Feature("whole model compiled", stages=(0, 1, 2), script="whole", excludes="compile"),
    "peft": Feature("adapters on a frozen model (PEFT)", script="peft"),
    "checkpointing": Feature("gradient checkpointing", script="checkpointing"),
    "hosts": Feature("ranks on several hosts", {"communicator": "c10d"}),
}

# Pairs that are an error in `zerobench.initialize`, with the reason.
REFUSED = {
    frozenset(
        {"in_backward", "clipping"}
    ): "clipping needs the norm of all gradients before the first update",
    frozenset({"in_backward", "fp16"}): "a loss scale skips steps, which is known after backward",
}


def pairs() -> list[tuple[str, str]]:
    """Return the pairs of features that are not two forms of one thing."""
    return [
        (first, second)
        for first, second in itertools.combinations(FEATURES, 2)
        if not FEATURES[first].excludes or FEATURES[first].excludes != FEATURES[second].excludes
    ]


def common_stages(first: str, second: str) -> list[int]:
    """Return the stages that take both features."""
    return [stage for stage in FEATURES[first].stages if stage in FEATURES[second].stages]
