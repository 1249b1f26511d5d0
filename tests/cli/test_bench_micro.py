"""The micro-benchmarks at sizes that take a moment: what they say, what they write, and what they refuse."""

from __future__ import annotations

import csv
import json
import os
import signal
import time

import pytest
from conftest import until

COMM = ["bench", "comm", "--device", "cpu", "--min-bytes", "4096", "--max-bytes", "16384", "--repeats", "6"]
ADAM = ["bench", "adam", "--device", "cpu", "--min-numel", "1000", "--max-numel", "4001", "--repeats", "3"]


def rows_of(path, benchmark: str) -> list[dict]:
    content = json.loads(path.read_text())
    assert content["benchmark"] == benchmark
    assert content["machine"]["cores"] >= 1
    assert content["versions"]["torch"]
    return content["rows"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_comm_measures_every_collective_beside_gloo(command, world_size: int) -> None:
    result = command.run(*COMM, "--world-size", str(world_size), "--output", "comm.json")
    assert result.returncode == 0, result.stderr
    assert f"{world_size} ranks, float32" in result.stdout
    rows = rows_of(command.folder / "comm.json", "comm")
    # One barrier, and for each collective a latency, 4 KiB and 16 KiB.
    assert [row["collective"] for row in rows] == ["barrier"] + [
        name for name in ("all_gather", "reduce_scatter", "all_reduce") for _ in range(3)
    ]
    for row in rows:
        assert row["world_size"] == world_size
        assert row["wrong"] == row["wrong_gloo"] == 0
        assert len(row["samples_us"]["shm"]["samples"]) == len(row["samples_us"]["gloo"]["samples"]) == 6
        assert row["ratio_to_gloo"]["low"] <= row["ratio_to_gloo"]["value"] <= row["ratio_to_gloo"]["high"]
        has_limit = row["size_bytes"] >= 4096
        assert (row["ratio_to_limit"] is not None) == has_limit
        assert ("memcpy" in row["samples_us"]) == has_limit
        assert row["size_bytes"] % (4 * world_size) == 0
    assert command.leaves_nothing()


def test_comm_prints_one_json_document_with_all_samples(command) -> None:
    result = command.run(*COMM, "--world-size", "2", "--collectives", "all_reduce", "--json")
    document = json.loads(result.stdout)
    assert next(iter(document)) == "verdict"
    assert document["verdict"] == "comm: 4 rows measured, all of them right"
    assert all(len(row["samples_us"]["shm"]["samples"]) == 6 for row in document["rows"])
    assert "2 ranks, float32" in result.stderr


def test_comm_derives_bandwidths_from_times(command) -> None:
    result = command.run(*COMM, "--world-size", "2", "--collectives", "all_reduce", "--output", "comm.csv")
    assert result.returncode == 0, result.stderr
    with (command.folder / "comm.csv").open() as file:
        large = [row for row in csv.DictReader(file) if row["algbw_gb_s"]]
    assert [int(row["size_bytes"]) for row in large] == [4096, 16384]
    for row in large:
        size, time_s = float(row["size_bytes"]), float(row["time_us.shm"]) * 1e-6
        assert float(row["algbw_gb_s"]) == pytest.approx(size / time_s / 1e9)
        assert float(row["busbw_gb_s"]) == pytest.approx(float(row["algbw_gb_s"]))  # 2 (n - 1) / n is 1 for 2
        assert float(row["touched_bytes"]) == 2.5 * size
        pairs = float(row["ratio_to_limit.low"]), float(row["ratio_to_limit.high"])
        assert pairs[0] <= float(row["ratio_to_limit.value"]) <= pairs[1]


def test_comm_measures_nothing_twice(command) -> None:
    result = command.run(
        *COMM, "--world-size", "2", "--collectives", "all_gather,all_gather", "--min-bytes", "8", "--max-bytes", "40",
        "--output", "comm.json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = rows_of(command.folder / "comm.json", "comm")
    assert [(row["collective"], row["size_bytes"]) for row in rows] == [
        ("barrier", 0),
        ("all_gather", 8),
        ("all_gather", 32),
    ]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is all there is")
@pytest.mark.parametrize(
    "arguments", [[*COMM, "--world-size", "2"], [*ADAM, "--threads", "2"]], ids=["comm", "adam"]
)
def test_all_cores_are_used_where_openmp_binds_threads(command, monkeypatch, arguments) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    result = command.run(*arguments)
    assert result.returncode == 0, result.stderr
    assert "more than the" not in result.stdout  # cores


def test_adam_measures_every_mix_with_every_thread_count(command) -> None:
    result = command.run(*ADAM, "--output", "adam.json")
    assert result.returncode == 0, result.stderr
    rows = rows_of(command.folder / "adam.json", "adam")
    thread_nums = sorted({1, len(os.sched_getaffinity(0))} & {row["threads"] for row in rows})
    assert {row["threads"] for row in rows} == set(thread_nums)
    assert 1 in thread_nums
    assert {row["numel"] for row in rows} == {1000, 4000, 4001}
    assert {(row["gradient_dtype"], row["low_precision_dtype"]) for row in rows} == {
        ("float32", None),
        ("float32", "bfloat16"),
        ("bfloat16", "bfloat16"),
    }
    for row in rows:
        assert row["wrong"] == 0
        assert row["ratio_to_torch"]["value"] > 0
        assert row["ratio_to_torch"]["low"] is row["ratio_to_torch"]["high"] is None  # of 3 pairs
        # DeepSpeed's only where it is installed and its operator compiles; the notes say why it is missing.
        deepspeed = {"deepspeed"} if "without DeepSpeed" not in result.stderr else set()
        assert set(row["samples_us"]) == {"adam", "torch", "mix", "triad"} | deepspeed
        assert (row["ratio_to_deepspeed"] is not None) == bool(deepspeed)
        per_element = {"fp32 / none": 28, "fp32 / bf16": 30, "bf16 / bf16": 28}[row["dtypes"]]
        assert row["bytes_per_step"] == per_element * row["numel"]
        assert row["gb_s"]["adam"] == pytest.approx(row["bytes_per_step"] / row["time_ms"]["adam"] / 1e6)


def test_a_write_up_holds_the_command_and_the_table(command) -> None:
    result = command.run(*ADAM, "--threads", "1", "--output", "adam.md")
    assert result.returncode == 0, result.stderr
    text = (command.folder / "adam.md").read_text()
    assert text.startswith("`python -m zerobench bench adam --device cpu --min-numel 1000")
    assert text.count("| fp32 / bf16 |") == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["comm", "--device", "cpu", "--world-size", "1"], "--world-size 1"),
        (["comm", "--world-size", "two"], "'two'"),
        (["comm", "--world-size", ""], "--world-size ''"),
        (["comm", "--device", "cpu", "--timeout", "1e300"], "--timeout 1e+300"),
        (["comm", "--device", "cpu", "--timeout", "1e-9"], "--timeout 1e-09"),
        (["comm", "--collectives", "all_together"], "'all_together'"),
        (["comm", "--min-bytes", "100", "--max-bytes", "10"], "--min-bytes 100"),
        (["comm", "--max-bytes", str(1 << 50)], "--max-bytes"),
        (["comm", "--repeats", "0"], "--repeats 0"),
        (["comm", "--device", "tpu"], "'tpu'"),
        (["comm", "--device", "cpu", "--symmetric"], "--symmetric"),
        (["comm", "--device", "cpu", "--communicator", "peer"], "--communicator"),
        (["comm", "--device", "cpu", "--communicator", "nccl"], "--communicator"),
        (["adam", "--device", "cpu", "--threads", "0"], "--threads 0"),
        (["adam", "--device", "cpu", "--threads", "100000"], "--threads 100000"),
        (["adam", "--device", "tpu"], "'tpu'"),
        (["adam", "--min-numel", "0"], "--min-numel 0"),
        (["adam", "--output", "results.txt"], "results.txt"),
        (["adam", "--output", "taken.json"], "taken.json"),
        (["adam", "--output", "no/folder.json"], "no/folder.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_refused_in_one_line(command, arguments, said) -> None:
    (command.folder / "taken.json").write_text("{}")
    result = command.run("bench", *arguments, timeout_s=60)
    assert result.returncode == 2, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and said in lines[0], result.stderr
    assert (command.folder / "taken.json").read_text() == "{}"


def rank_processes(command, pid: int) -> list[int]:
    """The ranks that the command has forked."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def started(command, *arguments: str):
    """A running `bench comm` of two ranks that would take long."""
    process = command.start(
        "bench", "comm", "--device", "cpu", "--world-size", "2", "--repeats", "100000", *arguments
    )
    until(
        process,
        lambda: len(rank_processes(command, process.pid)) >= 2,
        else_="the ranks did not start",
        within_s=60,
    )
    return process


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_ends_every_rank_and_leaves_no_empty_file(command, signum) -> None:
    process = started(command, "--output", "comm.json")
    time.sleep(1)
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + signum, stderr
    assert stderr.strip().splitlines() == ["zerobench: interrupted"]
    assert command.leaves_nothing()
    assert not (command.folder / "comm.json").exists()


def test_a_killed_rank_ends_the_benchmark_with_one_line(command) -> None:
    process = started(command)
    os.kill(rank_processes(command, process.pid)[1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stderr
    assert len(stderr.strip().splitlines()) == 1
    assert "rank" in stderr and "Traceback" not in stderr
    assert command.leaves_nothing()
