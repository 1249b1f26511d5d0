"""Offloaded state takes as much host memory and file space as the formulas of docs/explain/memory.md, to the byte."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import ranks
import zoo
from test_memory import BYTES, CASES, round_up

import zerobench

STATES = ("master", "exp_avg", "exp_avg_sq")
FILES = {"device": "nvme", "io_block_bytes": 4096, "io_depth": 2, "io_allow_fallback": True}
# spare_bytes: the budget, above the least that a rank must have.
PLACEMENTS: dict[str, dict] = {
    "host": {"device": "cpu", "chunk_numel": 4096},
    "host, a third": {"device": "cpu", "chunk_numel": 4096, "ratio": 0.33},
    "files": FILES | {"chunk_numel": 1024},
    "files, a third": FILES | {"chunk_numel": 1024, "ratio": 0.33},
    "two paths": FILES | {"chunk_numel": 1024, "paths": 2},
    "budget": FILES | {"chunk_numel": 1024, "spare_bytes": 150_000},
    "budget for all": FILES | {"chunk_numel": 1024, "spare_bytes": 1 << 30},
    "one chunk": FILES,
}
NAMES = ("tiny, bf16", "tiny, bf16 accumulated in fp32", "odd sizes", "frozen, bf16")
# Stage, and whether parameters are on the host too; all of them where that is quick.
STAGES = {"odd sizes": ((1, False), (2, False), (3, False), (3, True))}


def shards(engine, ratio: float) -> list[tuple[int, dict]]:
    """Elements of every trainable flat buffer's shard that are off the device, and the flat buffer."""
    found = []
    for unit in engine.units():
        for flat in unit["flats"]:
            if not flat["trainable"]:
                continue
            numel = flat["shard_numel"]
            kept = 0 if ratio == 1.0 else int((1.0 - ratio) * numel) // 64 * 64
            found.append((numel - kept, flat))
    return found


def expected(engine, section: dict, with_parameters: bool) -> dict[str, dict[str, int]]:
    """{tier: {category: bytes}}, and under "mapping" the whole mapping on the host."""
    away = shards(engine, section.get("ratio", 1.0))
    chunk_numel = section.get("chunk_numel", 4 << 20)
    largest = min(chunk_numel, max(numel for numel, _ in away))
    gradients = [numel * BYTES[flat["accumulate_dtype"]] for numel, flat in away]
    parameters = [numel * BYTES[flat["param_dtype"]] for numel, flat in away] if with_parameters else []
    host = {"gradients": sum(gradients), "parameters": sum(parameters), "staging": 3 * 4 * largest}
    nvme = dict.fromkeys((*STATES, "staging"), 0)
    mapping = 3 * round_up(4 * largest, 4096) + sum(round_up(part, 64) for part in gradients + parameters)
    if section["device"] == "cpu":
        host |= {state: sum(4 * numel for numel, _ in away) for state in STATES}
        mapping += 3 * sum(round_up(4 * numel, 64) for numel, _ in away)
    else:
        chunks = [
            min(chunk_numel, numel - begin) for numel, _ in away for begin in range(0, numel, chunk_numel)
        ]
        paths = section.get("paths", 1)
        slot = round_up(math.ceil(3 * round_up(4 * largest, 64) / paths), 4096) * paths
        frames = 2 * math.ceil(section["io_depth"] * section["io_block_bytes"] / slot) + 2
        stay = section.get("spare_bytes", 0) // slot
        if len(chunks) <= frames + stay:
            frames, stay = 0, len(chunks)
        # Spread evenly over all.
        numels = [
            numel
            for at, numel in enumerate(chunks)
            if (at + 1) * stay // len(chunks) > at * stay // len(chunks)
        ]
        host |= {state: 4 * sum(numels) for state in STATES}
        host["staging"] += (frames + stay) * slot - 12 * sum(numels)
        mapping += (frames + stay) * slot
        swapped = sum(chunks) - sum(numels)
        nvme |= {state: 4 * swapped for state in STATES}
        nvme["staging"] = (len(chunks) - stay) * slot - 12 * swapped
    return {"host": host, "nvme": nvme, "mapping": {"bytes": round_up(mapping, 4096)}}


def measure(rank: ranks.Rank, folder: str) -> list[str]:
    """Return the differences from the formulas."""
    wrong = []
    paths = [f"{folder}/{number}" for number in range(2)]
    for path in paths:
        Path(path).mkdir(exist_ok=True)
    for name in NAMES:
        case = CASES[name]
        for placement, section in PLACEMENTS.items():
            for stage, with_parameters in STAGES.get(name, ((2, False),)):
                if with_parameters and (section["device"] != "cpu" or "ratio" in section):
                    continue
                wrong += [
                    f"{name}, {placement}, stage {stage}: {text}"
                    for text in differences(rank, case, stage, section, with_parameters, paths)
                ]
    return wrong


def differences(rank, case, stage, section, with_parameters, paths) -> list[str]:
    offload = {key: value for key, value in section.items() if key not in ("paths", "spare_bytes")}
    if section["device"] == "nvme":
        offload["nvme_path"] = paths[: section.get("paths", 1)]
    config = {"offload_param": {"device": "cpu"}} if with_parameters else {}

    def start(**more):
        settings = zoo.optimizer_config(case) | config | {"offload_optimizer": offload | more}
        return zerobench.initialize(zoo.make(case), config=rank.config(stage=stage, **settings))

    if "spare_bytes" in section:
        engine = start()
        least = round_up_to_blocks(engine, section)
        engine.close()
        engine = start(host_memory_bytes=least + section["spare_bytes"])
    else:
        engine = start()
    wanted = expected(engine, section, with_parameters)
    held = engine.memory_bytes(peak=False)
    found = []
    for tier in ("host", "nvme"):
        for category, amount in wanted[tier].items():
            has = held.get(tier, {}).get(category, 0)
            if has != amount:
                found.append(f"{tier} {category} is {has}, not {amount}")
    pinned = engine.offload_pinned()
    if pinned["mapped_bytes"] != wanted["mapping"]["bytes"]:
        found.append(f"the mapping has {pinned['mapped_bytes']} bytes, not {wanted['mapping']['bytes']}")
    if pinned["requested_bytes"] != sum(wanted["host"].values()):
        found.append(f"{pinned['requested_bytes']} were asked for, not {sum(wanted['host'].values())}")
    files = [file for path in paths for file in Path(path).iterdir() if f".rank{rank.rank}." in file.name]
    size = sum(file.stat().st_size for file in files)
    if size != sum(wanted["nvme"].values()):
        found.append(f"files have {size} bytes, not {sum(wanted['nvme'].values())}")
    engine.close()
    return found


def round_up_to_blocks(engine, section: dict) -> int:
    """Return the bytes of a rank with nothing on its device, each block rounded up. A smaller budget is refused."""
    wanted = expected(engine, {**section, "spare_bytes": 0}, False)
    away = shards(engine, 1.0)
    largest = min(section["chunk_numel"], max(numel for numel, _ in away))
    outgoing = 3 * (round_up(4 * largest, 4096) - 4 * largest)
    gradients = [numel * BYTES[flat["accumulate_dtype"]] for numel, flat in away]
    return sum(wanted["host"].values()) + outgoing + sum(round_up(part, 64) - part for part in gradients)


@pytest.mark.parametrize("world_size", [1, 2])
def test_host_and_files_are_explained_to_the_byte(tmp_path: Path, world_size: int):
    for wrong in ranks.run(measure, str(tmp_path), world_size=world_size):
        assert not wrong, "\n".join(wrong)
    assert not [file for path in tmp_path.iterdir() for file in path.iterdir()]
