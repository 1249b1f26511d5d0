"""`zerobench compare` on GPUs: whole comparisons by the command, and the meter of a rank by itself."""

from __future__ import annotations

import ctypes
import time
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from builders import make_settings
from comparisons import SMALL, compare

from zerobench import data, models
from zerobench.bench.mfu import peak_tflops
from zerobench.bench.rank.meters import CudaMeter
from zerobench.host.gpus import visible_gpus
from zerobench.host.nvml import Nvml
from zerobench.strategies.single import SingleStrategy

pytestmark = pytest.mark.timeout(420)
GIB = 1 << 30
MIB = 1 << 20


def by_strategy(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["strategy"].rpartition(":")[2]: row for row in results["rows"]}


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory):
    """Memory that runs out in the second row, and the rows after it."""
    folder = tmp_path_factory.mktemp("one")
    strategies = "compute_only,troubles:TakesTooMuchDevice,zero0,zero3,ddp,fsdp2"
    result, results = compare(
        folder, *SMALL, "--world-size", "1", "--strategies", strategies, "--num-steps", "200",
        "--warmup-steps", "10",
    )  # fmt: skip
    return folder / "out", result, results


OURS_AND_PEERS = ("zero0", "zero3", "ddp", "fsdp2")


def test_rows_on_one_gpu_are_ok_after_one_that_took_too_much(one_gpu) -> None:
    _, result, results = one_gpu
    rows = by_strategy(results)
    statuses = {name: (row["status"], row["error"]) for name, row in rows.items()}
    assert statuses.pop("TakesTooMuchDevice")[0] == "oom"
    assert statuses == dict.fromkeys(("compute_only", *OURS_AND_PEERS), ("ok", None))
    assert rows["TakesTooMuchDevice"]["oom_tier"] == "device"
    assert "OutOfMemoryError" in rows["TakesTooMuchDevice"]["error"]
    assert result.returncode == 0
    assert [row["name"] for row in results["rows"]][:3:2] == [
        "compute_only_bf16_gpus1_bs8_sl128",
        "zs0_bf16_gpus1_bs8_sl128",
    ]


def test_gpu_rows_are_verified_and_the_floor_has_nothing_to_verify(one_gpu) -> None:
    rows = by_strategy(one_gpu[2])
    for name in OURS_AND_PEERS:
        deviation = rows[name]["deviation"]
        assert deviation["reference"] == ("single under autocast" if name == "ddp" else "single")
        assert deviation["reads"] == 0.0
        assert deviation["optimizer"] <= deviation["tolerance"]["optimizer"]
        assert deviation["gradient"] <= deviation["tolerance"]["gradient"]
        assert rows[name]["checksum"]
    assert rows["zero0"]["checksum"] == rows["zero3"]["checksum"]
    floor = rows["compute_only"]
    assert floor["deviation"]["update"] is None and floor["checksum"] is None
    assert floor["relative"] is None and floor["of_compute_only"] is None
    assert all(0 < rows[name]["of_compute_only"] < 3 for name in OURS_AND_PEERS)


def test_gpu_rows_carry_times_phases_and_utilisation(one_gpu) -> None:
    _, _, results = one_gpu
    name = torch.cuda.get_device_name(0)
    for row in results["rows"]:
        if row["status"] != "ok":
            continue
        assert len(row["step_time_ms"]["samples"]) == 200
        assert all(time_ms > 0 for time_ms in row["step_time_ms"]["samples"])
        assert len(row["loss"]) == 200
        phases = row["phases_ms"]
        # compute_only has no optimizer step.
        optimizer = {"optimizer"} if row["strategy"] != "compute_only" else set()
        assert phases.keys() >= {"forward", "backward", "exposed_communication", "host_bound"} | optimizer
        assert all(value >= 0 for value in phases.values())
        assert phases["forward"] > 0 and phases["backward"] > 0
        assert 0 < row["device_busy_pct"] <= 100 and 0 < row["peak_device_pct"] < 100
        # A profiled step is longer than a timed one, and of its order.
        assert 0.3 < sum(phases.values()) / row["step_time_ms"]["median"] < 10
        assert (row["mfu"] is not None) == (peak_tflops(name, "bfloat16") is not None)
        if row["mfu"]:
            assert 0 < row["mfu"]["pct"] < 100
    losses = {name: row["loss"] for name, row in by_strategy(results).items() if name in ("zero0", "ddp")}
    assert losses["zero0"][-1] < losses["zero0"][0]
    assert losses["zero0"][0] == pytest.approx(losses["ddp"][0], rel=0.05)


def test_gpu_rows_weigh_what_is_outside_torch_too(one_gpu) -> None:
    for row in one_gpu[2]["rows"]:
        if row["status"] != "ok":
            continue
        assert row["peak_device_bytes"] > 0
        assert row["torch_reserved_peak_bytes"] >= row["torch_allocated_peak_bytes"] > 0
        assert 0 <= row["outside_torch_bytes"] < 4 * GIB
        # Batches that wait are not counted as the step's.
        counted = row["torch_allocated_peak_bytes"] + row["outside_torch_bytes"]
        assert counted - 64 * MIB <= row["peak_device_bytes"] <= counted
        assert row["peak_device_bytes"] < 8 * GIB  # the row that took too much left nothing behind


def test_the_driver_is_sampled_while_rows_run(one_gpu) -> None:
    out, _, results = one_gpu
    machine = results["machine"]
    assert machine["gpus"][0]["name"] == torch.cuda.get_device_name(0)
    nvml = Nvml()
    now = nvml.sample(visible_gpus().gpus[0].uuid)
    nvml.close()
    if now is None or now["used_bytes"] is None:
        pytest.skip("the driver's management library does not answer here")
    assert machine["driver"] and "power_limit_w" in machine["gpus"][0]
    assert len((out / "samples.jsonl").read_text().splitlines()) > 20
    rows = [row for row in results["rows"] if row["status"] == "ok"]
    # A window of a fast row may be shorter than the driver's own period; not all of them are.
    sampled = [row for row in rows if row["sampled"]]
    assert sampled
    for row in sampled:
        assert row["device_used_peak_bytes"] == row["sampled"]["gpu_used_peak_bytes"] > 0
        assert row["sampled"]["host_used_peak_bytes"] > 0
        if now["limited_by"] is not None:
            assert all(
                0 <= row["sampled"][f"{name}_pct"] <= 100
                for name in ("power_cap", "thermal_limit", "other_limit")
            )


def test_gpu_rows_say_what_energy_a_step_takes(one_gpu) -> None:
    results = one_gpu[2]
    nvml = Nvml()
    counted = nvml.energy_j(visible_gpus().gpus[0].uuid)
    nvml.close()
    rows = [row for row in results["rows"] if row["status"] == "ok"]
    if counted is None:
        assert {row["energy_per_step_j"] for row in rows} == {None}
        pytest.skip("the driver does not count energy here")
    limit_w = results["machine"]["gpus"][0]["power_limit_w"] or float("inf")
    for row in rows:
        assert row["energy_per_step_j"] > 0
        assert row["tokens_per_j"] == pytest.approx(8 * 128 / row["energy_per_step_j"])
        # The mean power of the window; a count may be of up to 0.1 s before or after it.
        window_s = sum(row["step_time_ms"]["samples"]) / 1e3
        power_w = row["energy_per_step_j"] * len(row["step_time_ms"]["samples"]) / window_s
        assert 20 < power_w < 1.1 * limit_w * (1 + 0.2 / window_s)


def test_files_of_a_gpu_comparison(one_gpu) -> None:
    out, result, results = one_gpu
    assert "compute_only" in result.stdout and "compute_only" in (out / "summary.txt").read_text()
    assert (out / "plots" / "step_time.png").stat().st_size > 0
    assert results["complete"] is True
    assert all("--device cuda" in row["rerun"] for row in results["rows"])


def test_fp32_rows_say_in_what_they_multiply(tmp_path) -> None:
    result, results = compare(
        tmp_path, *SMALL, "--world-size", "1", "--strategies", "zero1", "--precision", "fp32", "--tf32",
        "--num-steps", "3", "--warmup-steps", "1",
    )  # fmt: skip
    (row,) = results["rows"]
    assert row["status"] == "ok", row["error"]
    assert row["settings"]["tf32"] is True and row["dtypes"]["compute"] == "tf32"
    assert "TF32 on" in " ".join(result.stdout.split())


def test_rows_take_turns_on_a_gpu_and_what_they_use_is_that_of_the_row_alone(tmp_path) -> None:
    # --rounds is given twice: the last one counts.
    shape = ("--world-size", "1", "--strategies", "compute_only,zero1,ddp", "--num-steps", "20")
    folders = [tmp_path / "alone", tmp_path / "turns"]
    (_, alone), (result, turns) = (
        compare(folder, *SMALL, *shape, "--rounds", rounds)
        for folder, rounds in zip(folders, ("0", "6"), strict=True)
    )
    assert result.returncode == 0, result.stderr
    for strategy, row in by_strategy(turns).items():
        assert row["turns"]["how"] == "in turn" and [len(run) for run in row["turns"]["windows_ms"]] == [6]
        lonely = by_strategy(alone)[strategy]
        assert row["peak_device_bytes"] == pytest.approx(lonely["peak_device_bytes"], rel=0.02)
        assert row["phases_ms"].keys() == lonely["phases_ms"].keys()
        assert (row["energy_per_step_j"] is None) == (lonely["energy_per_step_j"] is None)
    assert by_strategy(turns)["zero1"]["of_compute_only"] > 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_two_gpus_compiled_by_block(tmp_path) -> None:
    result, results = compare(
        tmp_path, *SMALL, "--world-size", "2", "--strategies", "compute_only,zero1,zero3", "--compile", "block",
        "--num-steps", "20",
    )  # fmt: skip
    rows = by_strategy(results)
    assert {name: (row["status"], row["error"]) for name, row in rows.items()} == dict.fromkeys(
        ("compute_only", "zero1", "zero3"), ("ok", None)
    ), result.stderr
    assert rows["zero3"]["name"] == "zs3_bf16_gpus2_bs8_sl128_compile-block"
    assert rows["zero1"]["checksum"] == rows["zero3"]["checksum"]
    for name in ("zero1", "zero3"):
        assert rows[name]["settings"]["communicator"].startswith(("peer", "nccl; not peer: "))
        assert rows[name]["compiled_graphs"] == 2
        assert rows[name]["compile_s"] > 1  # nothing was compiled before
        assert rows[name]["of_compute_only"] > 0
    floor = rows["compute_only"]
    assert floor["settings"]["world_size"] == 2
    assert len(floor["rank_step_times_ms"]) == 2 and floor["communication_bytes"] == 0
    # The ledger counts what the engine holds; all of it lies within what was measured.
    held = rows["zero3"]["memory_bytes"]["device"]
    assert sum(held.values()) <= rows["zero3"]["peak_device_bytes"]
    assert held["communicators"] > 1 << 20
    assert rows["compute_only"]["activation_bytes"] > 1 << 20
    assert rows["compute_only"]["memory_explained_pct"] is None
    assert 80 < rows["zero3"]["memory_explained_pct"] < 120  # a small model: what libraries load weighs much


# The meter of a rank, in this process


@pytest.fixture(scope="module")
def meter() -> CudaMeter:
    return CudaMeter(0)


def test_events_time_what_the_device_does(meter) -> None:
    meter.settle()
    meter.start()
    # Long against what the host needs to put them in.
    for cycles in (50_000_000, 200_000_000):
        torch.cuda._sleep(cycles)
        meter.mark()
    short_ms, long_ms = meter.stop()
    assert long_ms == pytest.approx(4 * short_ms, rel=0.25)
    assert 10 < short_ms < 100


def test_memory_of_others_than_torch_is_counted(meter) -> None:
    meter.start()
    before = meter.memory()
    driver = ctypes.CDLL("libcuda.so.1")
    address = ctypes.c_uint64()
    assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(256 * MIB)) == 0
    try:
        tensor = torch.empty(64 * MIB, dtype=torch.uint8, device=meter.device)
        with_both = meter.memory()
        del tensor
    finally:
        assert driver.cuMemFree_v2(address) == 0
    assert before.outside_torch_bytes is not None and with_both.outside_torch_bytes is not None
    assert with_both.outside_torch_bytes - before.outside_torch_bytes == pytest.approx(
        256 * MIB, abs=16 * MIB
    )
    assert with_both.peak_bytes - before.peak_bytes == pytest.approx(320 * MIB, abs=16 * MIB)


def test_energy_is_power_times_time(meter) -> None:
    before_j = meter.energy_j()
    if before_j is None:
        pytest.skip("the driver does not count energy here")
    nvml, uuid = Nvml(), visible_gpus().gpus[0].uuid
    matrix = torch.randn(8192, 8192, device=meter.device, dtype=torch.bfloat16)
    watts = []
    start_s = now_s = time.monotonic()
    while now_s < start_s + 4:
        for _ in range(20):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize()
        now_s = time.monotonic()
        if now_s > start_s + 1.5:  # a reading may be the mean over the second before it
            watts.append((nvml.sample(uuid) or {})["power_w"])
    after_j = meter.energy_j()
    nvml.close()
    assert after_j is not None
    assert after_j - before_j == pytest.approx(sum(watts) / len(watts) * (now_s - start_s), rel=0.25)


def test_batches_are_placed_once_each(meter) -> None:
    ids = torch.arange(6).reshape(2, 3)
    ((batch,),) = meter.place([[{"input_ids": ids, "labels": ids}]])
    assert batch["input_ids"].device == meter.device
    assert batch["input_ids"] is batch["labels"]
    assert torch.equal(batch["labels"].cpu(), ids)


def test_a_profiled_step_is_split_by_its_kernels(meter) -> None:
    settings = make_settings(precision="bf16", batch_size=16, seq_length=512, grad_accum=2, device="cuda")
    config = models.resolve("gpt-64m", {"num_layers": 4})
    strategy = SingleStrategy(settings)
    strategy.build(partial(models.build, config, 0))
    dataset = data.open_data("synthetic", seed=0, seq_length=512, vocab_size=config.vocab_size)
    steps = meter.place(
        [dataset.micro_batches(step, rank=0, world_size=1, batch_size=16, grad_accum=2) for step in range(5)]
    )
    strategy.step(steps[0])
    phases, busy_pct = meter.profile(strategy, steps[1:], lambda phase, step: None)
    timed = strategy.profiled_step(steps[0])
    strategy.close()
    assert phases.keys() == {"forward", "backward", "optimizer", "exposed_communication", "host_bound"}
    assert phases["exposed_communication"] == 0
    assert phases["backward"] > phases["forward"] > phases["optimizer"] > 0
    # What ran and what did not add up to the step, whose phases the step's own events timed too.
    assert sum(phases.values()) == pytest.approx(sum(timed.values()), rel=0.5)
    assert phases["forward"] + phases["backward"] > 0.3 * sum(phases.values())
    assert busy_pct == pytest.approx(100 * (1 - phases["host_bound"] / sum(phases.values())), abs=10)
