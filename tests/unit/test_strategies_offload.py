"""Offload by peers: what they are given, what they are skipped for, and the folders that their files are in."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from builders import make_settings
from test_strategies_peers import WELL_EQUIPPED, on_gpus

from zerobench import strategies
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import make_plan
from zerobench.bench.rank.limits import judge_host
from zerobench.host.locked_folder import LockedFolder
from zerobench.micro.adam import deepspeed_peer
from zerobench.strategies import requirements
from zerobench.strategies.deepspeed.config import deepspeed_config
from zerobench.strategies.deepspeed.strategy import DeepSpeedStrategy
from zerobench.strategies.requirements import HOST_TOOLS

PLACED = {"host": {"exp_avg": 3, "master": 2}, "device": {"parameters": 100}}
DISK = tempfile.gettempdir()  # a folder that takes files
EVERYWHERE = [name for name in strategies.available() if not name.startswith("zero")]


def unplaced(name, settings, tools=WELL_EQUIPPED):
    """Return why a strategy has no place for state, on a machine that has all that DeepSpeed compiles with."""
    kind = strategies.get(name)
    given = {"tools": tools} if issubclass(kind, DeepSpeedStrategy) else {}
    return kind.unplaced(settings, **given)


@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("offload", ["none", "cpu_optimizer", "cpu_full", "nvme", "nvme_full"])
def test_every_peer_runs_what_it_is_asked_for_or_says_why_not(name, offload):
    runs = {
        "none": set(EVERYWHERE) - {"deepspeed3_super"},
        "cpu_optimizer": {"deepspeed1", "deepspeed2", "deepspeed3", "deepspeed3_super"},
        "cpu_full": {"fsdp2", "fsdp2_keep", "deepspeed3"},
        "nvme": {"deepspeed3"},
        "nvme_full": {"deepspeed3"},
    }
    paths = ("/disk",) if offload.startswith("nvme") else ()
    reason = unplaced(name, on_gpus(offload=offload, nvme_paths=paths))
    assert (reason is None) == (name in runs[offload])
    assert reason is None or ("\n" not in reason and len(reason) > 20)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("ddp", {"optimizer_in_backward": True}, "never during backward"),
        ("fsdp2", {"optimizer_in_backward": True}, "no optimizer step during backward"),
        ("fsdp2", {"offload": "cpu_full", "offload_ratio": 0.5}, "--offload-ratio"),
        ("fsdp2", {"offload": "nvme_full", "nvme_paths": ("/a",)}, "host memory only"),
        ("deepspeed1", {"offload": "nvme_full", "nvme_paths": ("/a",)}, "at stage 3 only"),
        ("fsdp2", {"offload": "cpu_full", "precision": "fp16"}, "GradScaler"),
        ("deepspeed3", {"optimizer_in_backward": True}, "deepspeed3_super"),
        ("deepspeed2", {"offload": "cpu_optimizer", "offload_ratio": 0.5}, "stage 3 only"),
        ("deepspeed3", {"offload": "cpu_optimizer", "offload_ratio": "auto"}, "a number"),
        (
            "deepspeed3",
            {"offload": "nvme", "nvme_paths": ("/a",), "host_memory_bytes": 1},
            "--host-memory-gib",
        ),
        ("deepspeed3", {"offload": "nvme", "nvme_paths": ("/a", "/b")}, "one --nvme-path"),
        ("deepspeed3", {"offload": "nvme", "nvme_paths": ("/a",), "offload_ratio": 0.5}, "GPU and host"),
        ("deepspeed3_super", {"offload": "cpu_optimizer", "precision": "fp16"}, "unscaled"),
        ("deepcompile3", {"offload": "cpu_full"}, "DeepCompile"),
    ],
)
def test_settings_that_a_peer_has_no_place_for_are_skipped_with_a_reason(name, fields, words):
    base = {"device": "cuda", "precision": "bf16"}
    assert words in unplaced(name, make_settings(**{**base, **fields}))


def test_superoffload_updates_during_backward_unless_it_clips():
    plan = make_plan(
        CompareOptions(
            data="synthetic", seq_length=(64,), strategies=("deepspeed3_super",), offload=("cpu_optimizer",),
            clip=(None, 1.0), optimizer_in_backward=(False, True),
        )
    )  # fmt: skip
    found = [(c.settings.clip, c.settings.optimizer_in_backward) for c in plan.configurations]
    assert found == [(None, True), (1.0, False)]


def test_superoffload_says_when_shared_memory_is_too_small():
    strategy = strategies.get("deepspeed3_super")(on_gpus(offload="cpu_optimizer"))
    strategy._check_room(1000)
    with pytest.raises(MemoryError, match="/dev/shm"):
        strategy._check_room(10**15)


def test_deepspeed_offloads_pinned_and_with_its_own_adam():
    config = deepspeed_config(on_gpus(offload="cpu_optimizer"), stage=2, parameter_count=100_000_000)
    zero = config["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert "offload_param" not in zero and "sub_group_size" not in zero
    assert "compute_grad_norm" not in zero  # which 0.19.8 refuses with offload
    assert config["optimizer"]["type"] == "AdamW"
    full = deepspeed_config(on_gpus(offload="cpu_full"), stage=3, parameter_count=1)["zero_optimization"]
    assert full["offload_param"] == full["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


def test_deepspeed_splits_in_sub_groups_that_can_meet_the_ratio():
    settings = on_gpus(offload="cpu_optimizer", offload_ratio=0.25, world_size=2)
    zero = deepspeed_config(settings, stage=3, parameter_count=400_000_000)["zero_optimization"]
    assert zero["offload_optimizer"]["ratio"] == 0.25
    assert zero["sub_group_size"] == 10_000_000  # a twentieth of a rank's share
    super_zero = deepspeed_config(
        on_gpus(offload="cpu_optimizer"), stage=3, parameter_count=400_000_000, super_offload=True
    )["zero_optimization"]
    assert super_zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "super_offload": True}


def test_deepspeed_swaps_to_its_own_folder_also_where_a_file_names_one():
    options = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}
    }
    for given in ({}, options):
        settings = on_gpus(offload="nvme", nvme_paths=("/disk",), options=given)
        config = deepspeed_config(settings, stage=3, parameter_count=1, swap_folder="/disk/own")
        section = config["zero_optimization"]["offload_optimizer"]
        assert (section["device"], section["nvme_path"], section["pipeline_write"]) == (
            "nvme",
            "/disk/own",
            False,
        )
        assert config["aio"]["intra_op_parallelism"] == 4


def test_deepspeed_swaps_parameters_through_buffers_that_hold_the_largest():
    settings = on_gpus(offload="nvme_full", nvme_paths=("/disk",), world_size=2)
    zero = deepspeed_config(
        settings, stage=3, parameter_count=1_000_000, largest_numel=301, swap_folder="/disk/own"
    )["zero_optimization"]
    assert zero["offload_optimizer"]["device"] == "nvme"
    assert zero["offload_param"] == {
        "device": "nvme", "nvme_path": "/disk/own", "pin_memory": True,
        "buffer_count": 16, "buffer_size": 151, "max_in_cpu": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "strategy", "placed"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, "deepspeed3", ("cpu_optimizer", None, [])),
        ({"offload_optimizer": {"device": "none"}}, "deepspeed3", ("none", None, [])),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.3}}, "deepspeed3", ("cpu_optimizer", 0.3, [])),
        (
            {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            "deepspeed3",
            ("cpu_full", None, []),
        ),
        (
            {"offload_optimizer": {"device": "nvme", "nvme_path": DISK}},
            "deepspeed3",
            ("nvme", None, [DISK]),
        ),
        (
            {
                "offload_optimizer": {"device": "nvme", "nvme_path": DISK},
                "offload_param": {"device": "nvme", "nvme_path": DISK},
            },
            "deepspeed3",
            ("nvme_full", None, [DISK]),
        ),
        (
            {"offload_optimizer": {"device": "cpu", "super_offload": True}},
            "deepspeed3_super",
            ("cpu_optimizer", None, []),
        ),
    ],
)
def test_a_deepspeed_file_that_offloads_is_a_row_that_says_so(tmp_path, sections, strategy, placed):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, **sections}}))
    (row,) = make_plan(CompareOptions(config=(path,), data="synthetic")).configurations
    settings = row.settings
    assert row.strategy == strategy
    assert (settings.offload, settings.offload_ratio, settings.nvme_paths) == placed
    assert settings.optimizer_in_backward == (strategy == "deepspeed3_super")


def test_a_missing_library_names_what_installs_it():
    assert requirements.missing_library("c", "this", install="nothing", tools=HOST_TOOLS) is None
    reason = requirements.missing_library(
        "no-such-thing", "Swapping", install="no-such-thing-dev", tools=HOST_TOOLS
    )
    assert reason == "Swapping needs libno-such-thing, which is not installed: install no-such-thing-dev"


def test_what_is_held_on_the_host_is_judged_by_its_budget():
    judge_host(PLACED, 5)
    judge_host(PLACED, None)
    with pytest.raises(MemoryError, match=r"^5 bytes of host memory .* --host-memory-gib leaves a rank 4$"):
        judge_host(PLACED, 4)


def test_locked_folders_go_with_their_run_and_those_of_killed_runs_with_the_next(tmp_path):
    keep = tmp_path / "data"
    keep.mkdir()
    code = (
        "import os, sys\n"
        "from zerobench.host.locked_folder import LockedFolder\n"
        "found = LockedFolder(sys.argv[1], prefix='swap-')\n"
        "open(os.path.join(found.path, 'state.swp'), 'w').write('x' * 4096)\n"
        "print(found.path, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    left = Path(killed.stdout.strip())
    assert killed.returncode == -9 and (left / "state.swp").exists()
    first = LockedFolder(str(tmp_path), prefix="swap-")
    assert not left.exists()
    second = LockedFolder(str(tmp_path), prefix="swap-")  # the first one's lives
    assert first.path != second.path and Path(first.path).exists()
    fd = os.open(first.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)
    for folder in (first, second):
        (Path(folder.path) / "state.swp").write_text("x")
        folder.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_the_lock_of_a_build_that_was_killed_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    tools = WELL_EQUIPPED._replace(build_folder=HOST_TOOLS.build_folder)
    offloads = on_gpus(offload="cpu_optimizer")
    assert unplaced("deepspeed1", offloads, tools) is None
    lock = tmp_path / "cpu_adam" / "lock"
    lock.touch()
    assert unplaced("deepspeed1", offloads, tools) is None  # someone may be compiling
    an_hour_ago = lock.stat().st_mtime - 3600
    os.utime(lock, (an_hour_ago, an_hour_ago))
    assert f"delete {lock}" in unplaced("deepspeed1", offloads, tools)
    peer, why_not = deepspeed_peer(tools)
    assert peer is None and f"delete {lock}" in why_not
    swaps = on_gpus(offload="nvme", nvme_paths=("/disk",))
    (tmp_path / "async_io").mkdir()
    lock.rename(tmp_path / "async_io" / "lock")
    assert unplaced("deepspeed1", offloads, tools) is None
    assert "async_io" in unplaced("deepspeed3", swaps, tools)
