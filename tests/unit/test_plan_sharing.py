"""Which rows share a reference, and which a checksum."""

from __future__ import annotations

import json

from plan_samples import ON_GPUS, SMALL, configuration

from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import make_plan
from zerobench.results.schema import Settings


def test_rows_share_a_reference_when_they_train_the_same_global_batches() -> None:
    row = configuration(world_size=(4,))
    same = [
        configuration(world_size=(4,), strategies=("ddp",)),
        configuration(world_size=(2,), grad_accum=(2,)),
        configuration(world_size=(4,), checkpointing=True),
        configuration(world_size=(4,), num_steps=7),
    ]
    other = [
        configuration(world_size=(2,)),
        configuration(world_size=(4,), precision=("bf16",)),
        configuration(world_size=(4,), batch_size=(2,)),
        configuration(world_size=(4,), clip=(1.0,)),
        configuration(world_size=(4,), seed=1),
        configuration(world_size=(4,), lr=0.1),
        configuration(world_size=(4,), num_layers=(2,)),
    ]
    assert {one.reference_group() for one in same} == {row.reference_group()}
    assert row.reference_group() not in {one.reference_group() for one in other}


# Another value of each setting, by what it changes.
OTHER_BATCHES_OR_PARAMETERS = {
    "model_config_resolved": {"num_layers": 1}, "world_size": 4, "precision": "bf16", "batch_size": 3, "seq_length": 32,
    "device": "cuda", "tf32": True, "clip": 0.5, "seed": 1, "data": "stdlib", "optimizer": {"lr": 0.5},
}  # fmt: skip
OTHER_BITS = {"compile": "block", "checkpointing": True}
NOTHING = {
    "model": "same by another name", "parameter_count": 1, "offload": "cpu_optimizer", "offload_ratio": 0.5,
    "nvme_paths": ["/disk"], "host_memory_gib": 1.0, "optimizer_in_backward": True, "device_memory_gib": 1.0,
    "bind": "numa", "num_steps": 7, "warmup_steps": 7, "repeats": 7, "rounds": 7, "config_file": "file.json",
    # Of the model, of this version, of the whole plan, and of an option that is looked at itself.
    "attention": "sdpa", "dropout": 0.1, "verify_steps": 7, "threads_per_rank": 7, "communicator": "gloo",
}  # fmt: skip


def test_every_setting_is_known_to_change_what_is_trained_or_how_it_rounds_or_nothing() -> None:
    row = configuration()

    def groups(name: str, value: object) -> tuple[bool, bool]:
        """Return whether the groups of its reference and of its checksum stay the row's."""
        other = row.model_copy(update={"settings": row.settings.model_copy(update={name: value})})
        return (
            other.reference_group() == row.reference_group(),
            other.checksum_group() == row.checksum_group(),
        )

    named = {*OTHER_BATCHES_OR_PARAMETERS, *OTHER_BITS, *NOTHING}
    assert named < set(
        Settings.model_fields
    )  # newer settings say in the table what they change (test_settings.py)
    for values, same in (
        (OTHER_BATCHES_OR_PARAMETERS, (False, False)), (OTHER_BITS, (True, False)), (NOTHING, (True, True)),
    ):  # fmt: skip
        for name, value in values.items():
            assert groups(name, value) == same, name


def test_rows_under_autocast_share_no_reference_with_others() -> None:
    def group(strategy: str, precision: str) -> str:
        return configuration(strategies=(strategy,), precision=(precision,)).reference_group()

    assert group("ddp", "fp32") == group("zero0", "fp32")
    assert group("ddp", "bf16") == group("ddp_compress", "bf16") != group("zero0", "bf16")
    assert group("ddp_master", "bf16") == group("zero0", "bf16")


def test_stages_share_a_checksum_where_the_design_promises_it() -> None:
    stage0, stage3, ddp = make_plan(
        CompareOptions(**{**SMALL, "strategies": ("zero0", "zero3", "ddp")})
    ).configurations
    assert stage0.checksum_group() == stage3.checksum_group() is not None
    assert ddp.checksum_group() is None
    assert configuration(grad_accum=(2,)).checksum_group() is None
    # Never across world sizes: the order of a reduction differs.
    assert configuration(world_size=(4,)).checksum_group() != stage0.checksum_group()


def test_a_file_that_changes_arithmetic_shares_no_checksum(tmp_path) -> None:
    def group(**keys) -> str | None:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"stage": 2, "precision": "bf16", **keys}))
        (row,) = make_plan(CompareOptions(**{**SMALL, "config": (path,)})).configurations
        return row.checksum_group()

    assert group() == configuration(strategies=("zero3",), precision=("bf16",)).checksum_group()
    assert group(prefetch_bytes=0) == group(reduce_dtype="bfloat16") == group()
    for keys in ({"reduce_dtype": "float32"}, {"units": ["Block"]}, {"cast_forward_inputs": False}):
        assert group(**keys) not in (None, group())
    scale = {"loss_scale": {"initial_scale": 256}}  # by which gradients round
    assert group(**scale) == group()
    assert group(precision="fp16", **scale) not in (None, group(precision="fp16"))


def test_compiled_rows_share_a_reference_and_bits_with_their_own_kind() -> None:
    eager, block, whole = (configuration(**ON_GPUS, compile=(mode,)) for mode in ("none", "block", "whole"))
    assert eager.reference_group() == block.reference_group() == whole.reference_group()
    groups = {row.checksum_group() for row in (eager, block, whole)}
    assert len(groups) == 3 and None not in groups
