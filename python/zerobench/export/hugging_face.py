"""Configurations of a row for accelerate and TRL."""

from __future__ import annotations

from typing import Any

from zerobench.export import deepspeed
from zerobench.export.document import Document, yaml_text
from zerobench.export.settings import zero_stage
from zerobench.results.schema import Results, Row
from zerobench.strategies.catalogue import Tool, ours_at, tool_of

_MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def is_fsdp(row: Row) -> bool:
    return tool_of(row.strategy) in (Tool.FSDP1, Tool.FSDP2)


def accelerate(_: Results, row: Row) -> Document:
    """Return a file for ``accelerate launch --config_file``."""
    settings = row.settings
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": settings.world_size,
        "main_training_function": "main",
        "mixed_precision": _MIXED[settings.precision],
        "use_cpu": settings.device == "cpu",
    }
    if is_fsdp(row):
        return Document(
            text=yaml_text(values | {"distributed_type": "FSDP", "fsdp_config": fsdp_section(row)})
        )
    if tool_of(row.strategy) is Tool.DDP:
        kind = "MULTI_CPU" if settings.device == "cpu" else "MULTI_GPU"
        return Document(text=yaml_text(values | {"distributed_type": kind}), notes=batch_notes(row))
    section = deepspeed_section(row)
    return Document(
        text=yaml_text(values | {"distributed_type": "DEEPSPEED", "deepspeed_config": section}),
        notes=[*deepspeed.notes(row), *batch_notes(row)],
    )


def fsdp_section(row: Row) -> dict[str, Any]:
    """Return accelerate's section for FSDP, of the version that the row has."""
    first = tool_of(row.strategy) is Tool.FSDP1
    section: dict[str, Any] = {
        "fsdp_version": 1 if first else 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": row.settings.offload != "none",
        "fsdp_activation_checkpointing": row.settings.checkpointing,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    if first:
        return section | {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_use_orig_params": True}
    return section | {"fsdp_reshard_after_forward": zero_stage(row) == 3}


def deepspeed_section(row: Row) -> dict[str, Any]:
    """Return accelerate's section for DeepSpeed."""
    zero = deepspeed.deepspeed_values(row)["zero_optimization"]
    optimizer, parameters = zero.get("offload_optimizer", {}), zero.get("offload_param", {})
    section: dict[str, Any] = {
        "zero_stage": zero_stage(row),
        "gradient_accumulation_steps": row.settings.grad_accum,
        "offload_optimizer_device": optimizer.get("device", "none"),
        "offload_param_device": parameters.get("device", "none"),
        "zero3_init_flag": zero_stage(row) == 3,
        "zero3_save_16bit_model": zero_stage(row) == 3,
    }
    if row.settings.clip is not None:
        section["gradient_clipping"] = row.settings.clip
    for kind, of_kind in (("optimizer", optimizer), ("param", parameters)):
        if "nvme_path" in of_kind:
            section[f"offload_{kind}_nvme_path"] = of_kind["nvme_path"]
    return section


def batch_notes(row: Row) -> list[str]:
    settings = row.settings
    return [
        f"set the batch in the script: {settings.batch_size} x {settings.seq_length} tokens per rank and micro-batch, "
        f"gradient accumulation {settings.grad_accum}"
    ]


def trl(_: Results, row: Row) -> Document:
    """Return a file for ``trl sft --config``: training arguments, and which accelerate configuration of TRL's own."""
    settings, optimizer = row.settings, row.settings.optimizer
    values: dict[str, Any] = {
        "accelerate_config": trl_launch(row),
        "num_processes": settings.world_size,
        "per_device_train_batch_size": settings.batch_size,
        "gradient_accumulation_steps": settings.grad_accum,
        "max_length": settings.seq_length,
        "gradient_checkpointing": settings.checkpointing,
        "bf16": settings.precision == "bf16",
        "fp16": settings.precision == "fp16",
        "max_grad_norm": settings.clip or 0.0,
        "optim": "adamw_torch_fused",
        "learning_rate": optimizer["lr"],
        "adam_beta1": optimizer["beta1"],
        "adam_beta2": optimizer["beta2"],
        "adam_epsilon": optimizer["eps"],
        "weight_decay": optimizer["weight_decay"],
    }
    found = ["add model_name_or_path and dataset_name"]
    if settings.offload != "none":
        found.append(
            f"TRL's {values['accelerate_config']} does not offload, and the row does ({settings.offload}): export it "
            "--to accelerate, and give that file as accelerate_config"
        )
    return Document(text=yaml_text(values), notes=[*([] if is_fsdp(row) else deepspeed.notes(row)), *found])


def trl_launch(row: Row) -> str:
    """Return the name of TRL's own accelerate configuration that divides state as the row does."""
    if row.settings.world_size == 1:
        return "single_gpu"
    if is_fsdp(row):
        return tool_of(row.strategy).value
    stage = zero_stage(row)
    return ours_at(stage) if stage else "multi_gpu"  # TRL numbers its names as ours are
