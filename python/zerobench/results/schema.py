"""The result file: pydantic models of ``results.json``. Imports neither torch nor the core.

``OUT/results.json`` is a contract that other tools rely on. A value that cannot be had is null, never zero. Memory is
in bytes, times in ms, rates per second. docs/reference/metrics.md derives every figure.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from zerobench.results.settings import ResultModel, Settings

SCHEMA_VERSION = 1

Status = Literal["ok", "wrong", "oom", "failed", "skipped"]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ZeroOrMore = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class StepTime(ResultModel):
    """Optimizer step times over the measured window, from the last rank's end of a step to the last of the next; or
    mean step times of windows, where the row took turns."""

    median: AboveZero
    mad: ZeroOrMore
    mean: AboveZero
    std: ZeroOrMore
    samples: list[ZeroOrMore] = Field(min_length=1)
    outliers: list[int] = Field(
        default_factory=list, description="indices into samples; flagged, never dropped"
    )


class Turns(ResultModel):
    """Windows of a row that was measured while other rows were alive, or in passes with them."""

    how: Literal["in turn", "passes"]
    group: str  # rows with equal text took turns with each other, or were in the same passes
    steps_per_window: Annotated[int, Field(ge=1)]
    # Mean time of a step in each window: by run, then by round; of passes one window a run.
    windows_ms: list[list[AboveZero]]


class Run(ResultModel):
    """Figures of one run, in processes of its own. What a run did not measure is null."""

    step_time_ms: AboveZero  # median over its steps, or over its windows
    tokens_per_s: ZeroOrMore
    peak_device_bytes: int | None = None
    device_busy_pct: float | None = None
    energy_per_step_j: float | None = None


class Spread(ResultModel):
    """Median and standard deviation of a figure over runs."""

    median: float
    std: ZeroOrMore  # sample standard deviation


class RowDtypes(ResultModel):
    param: str
    compute: str
    reduce: str
    master: str
    state: str
    accumulate: str | None = None  # of zerobench's rows; peers keep theirs


class Deviation(ResultModel):
    """How far a row is from its reference; see docs/reference/metrics.md for norms and floors."""

    reference: str | None = None  # name of the row or strategy compared with
    loss: float | None = None  # |loss - reference| / |reference| at step 1
    norm: float | None = None  # the same of the global gradient norm
    gradient: float | None = None  # largest relative L2 over parameters, step 1
    gradient_worst: str | None = None  # the parameter of that
    update: float | None = None  # ||update - reference update|| / ||reference update|| after verify_steps
    piece: float | None = None  # the same of a typical element in the worst piece of a parameter
    piece_worst: str | None = None  # the parameter that holds that piece
    # The same of the worst parameter, against AdamW of the row's own gradients.
    optimizer: float | None = None
    optimizer_worst: str | None = None  # the parameter of that
    # As loss, of a held-out batch after verify_steps, beside the reference with the row's parameters.
    evaluation: float | None = None
    # Largest share of a parameter that evaluation reads and that is not the rounded master.
    reads: float | None = None
    reads_worst: str | None = None  # the parameter of that, and the rank
    max_abs: float | None = None  # largest absolute deviation of a parameter element, informative
    tolerance: dict[str, float] = Field(default_factory=dict)  # by the names above
    checksum_group: str | None = None  # rows that must share a checksum carry the same text
    verified_layers: int | None = None  # where they are fewer than the model's
    verified_experts_per_token: int | None = None  # where they are more than the model's
    verdict: str | None = None  # one line: what was compared and how it came out


class Mfu(ResultModel):
    """Model FLOP/s utilisation, and the peak that it refers to."""

    pct: float
    tflops_per_gpu: float  # achieved
    peak_tflops: float
    peak_of: str  # such as "NVIDIA H200, bf16 dense"
    flops_per_token: float


class Sampled(ResultModel):
    """Activity of GPUs and host during the measured window, by the driver's and the kernel's counters."""

    sample_num: int
    gpu_utilisation_pct: float | None = None
    gpu_used_peak_bytes: int | None = None  # of the fullest GPU, other processes included
    power_w: float | None = None  # mean of one GPU
    power_peak_w: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_min_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_peak_c: float | None = None
    # Shares of the samples in which clocks were held down, by what.
    power_cap_pct: float | None = None
    thermal_limit_pct: float | None = None
    other_limit_pct: float | None = None
    cpu_pct: float | None = None  # of all cores of the host
    other_cpu_pct: float | None = None  # of the command's cores, by processes that are not its own
    host_used_peak_bytes: int | None = None
    shared_gpus: list[int] | None = None  # that another process used too


class Transfers(ResultModel):
    """Transfers of offloaded state, per rank, and per step for what moves: the largest over ranks."""

    to_host_bytes: int | None = None  # over the device's link
    to_device_bytes: int | None = None
    nvme_read_bytes: int | None = None
    nvme_written_bytes: int | None = None  # wear
    pinned_bytes: int | None = None  # host memory for it, as taken; page-locked beside a GPU
    pinned_requested_bytes: int | None = None
    offload_ratio: float | None = None  # share of the optimizer state that is off the device
    io_engine: str | None = None
    chunk_numel: int | None = None  # elements that one stage of the pipeline works on, on rank 0
    achieved_gb_s: dict[str, float] | None = None  # bytes over the median step, by direction
    limit_gb_s: dict[str, float] | None = None  # what link and files give alone, in this run, by direction
    limit_note: str | None = None  # why those of files are not there


Searched = Literal["batch", "layers", "seq"]


class Try(ResultModel):
    """One value of a searched setting, tried in fresh processes."""

    value: int
    status: Status
    fits: bool  # ok, with a peak within --memory-limit
    peak_device_bytes: int | None = None  # largest over ranks
    error: str | None = None
    oom_tier: str | None = None
    whole: bool = False  # ran as an ordinary row; else a few steps without verification
    duration_s: float | None = None


class Search(ResultModel):
    """Result of --find for a row, and what it rests on."""

    setting: Searched
    largest: int | None = None  # that fits; None: no value does
    too_large: int | None = None  # the smallest value above it that was tried and does not run or fit
    try_num: int = 0
    tries: list[Try] = Field(default_factory=list)


class Collective(ResultModel):
    """The calls of one collective in one phase of a profiled step, on the rank that moves most."""

    phase: str
    name: str
    bytes: Annotated[int, Field(ge=0)]
    calls: int | None = None
    ms: ZeroOrMore | None = None  # that the rank was in them: not the part beside which it computed


class Row(ResultModel):
    name: str
    strategy: str
    stage: int | None = None
    status: Status
    error: str | None = None
    # How the row's network is made slower: "shaped" or "paced"; null where it is not.
    network_how: Literal["shaped", "paced"] | None = None
    oom_tier: str | None = None  # "device" or "host", where the status is oom
    settings: Settings
    dtypes: RowDtypes | None = None
    step_time_ms: StepTime | None = None  # of steps, or of windows where the row has turns
    turns: Turns | None = None  # None where the row was measured alone only
    runs: list[Run] | None = None
    over_runs: dict[str, Spread] | None = None  # by the figures of runs, where there are several
    rank_step_times_ms: list[AboveZero] | None = None  # medians by rank, each by its own clock
    tokens_per_s: ZeroOrMore | None = None
    samples_per_s: float | None = None
    tokens_per_s_per_peak_gb: float | None = None
    scaling_efficiency: float | None = None  # tokens/s of a rank over that of the same row on fewest ranks
    mfu: Mfu | None = None
    # Step time of the model's forward and backward alone over this row's.
    of_compute_only: float | None = None
    relative: AboveZero | None = None  # step time over the fastest comparable ok row's, per token
    relative_uncertainty: ZeroOrMore | None = None
    # Its 95 % interval, of rows that took turns with the fastest.
    relative_low: AboveZero | None = None
    relative_high: AboveZero | None = None
    speedup: float | None = None  # tokens/s over the baseline's
    memory_change_pct: float | None = None  # peak device bytes against the baseline's
    baseline: str | None = None
    verdict: str | None = None  # whether to take the row, and what for: see results/verdicts.py
    comparable: bool = True  # False when dtypes differ from the majority's: shown, not ranked
    busy: str | None = None  # what other processes used while it was measured, where that is too much
    loss: list[float] | None = None  # one a step, mean over ranks, measured window
    validation_loss: float | None = None
    checksum: str | None = None  # of the full parameters after verification
    deviation: Deviation | None = None
    memory_bytes: dict[str, dict[str, int]] | None = None  # {tier: {category: bytes}}
    # Of forward and backward, beside parameters and gradients; compute_only.
    activation_bytes: int | None = None
    activation_and_shard_bytes: int | None = None  # the same with the shards of gradients that live by then
    peak_device_bytes: Annotated[int, Field(ge=0)] | None = None  # largest over ranks
    peak_device_pct: float | None = None  # of the GPU's memory
    # Of that peak: the categories on the device, and the floor's activations.
    memory_explained_pct: float | None = None
    allocated_device_bytes: int | None = None  # at the end
    torch_allocated_peak_bytes: int | None = None  # by torch's allocator, on CUDA
    torch_reserved_peak_bytes: int | None = None
    # On the device and outside torch's allocator, without the bare context.
    outside_torch_bytes: int | None = None
    device_used_peak_bytes: int | None = None
    device_busy_pct: float | None = None  # of the profiled pass; mean over ranks
    device_utilisation_pct: float | None = None  # of the window, by the driver's counter
    peak_host_bytes: int | None = None
    phases_ms: dict[str, float] | None = None
    # Of a pipeline's schedule: the share in which ranks neither go forward nor backward, measured and by the formula.
    bubble_pct: float | None = None
    bubble_formula_pct: float | None = None
    compiled_graphs: float | None = None  # executed per step
    # Of a compiled row: what its first steps took beyond as many median steps, with an empty cache.
    compile_s: ZeroOrMore | None = None
    # In fp16: whose update overflow skipped, of measured steps and each window's last warm-up.
    skipped_steps: int | None = None
    energy_per_step_j: float | None = None  # of all GPUs of the row together
    tokens_per_j: float | None = None
    sampled: Sampled | None = None
    communication_bytes: int | None = None  # per rank and step
    communication_by_collective: dict[str, int] | None = None  # of the same rank
    collectives: list[Collective] | None = None  # of a profiled step, by phase
    transfers: Transfers | None = None  # where state is offloaded
    offload_practicality: float | None = None  # step time of the row that offloads nothing over this row's
    binding: list[str] | None = None  # by rank: the node and the cores that it was bound to
    update_cpus: list[str] | None = None  # by rank: what updates on CPUs, and why there
    search: Search | None = None  # of --find
    started: str | None = None  # ISO 8601 UTC
    duration_s: float | None = None
    log: str | None = None  # path relative to the output folder
    rerun: str | None = None  # the command that runs this row alone


class Results(ResultModel):
    schema_version: int = SCHEMA_VERSION
    created: str
    machine: dict[str, Any]
    versions: dict[str, str]
    command: str
    data_digest: str | None = None  # of the bytes that rows trained on
    complete: bool = False  # False while configurations are missing (running or interrupted)
    # What to know when reading the figures: a GPU in use before the first row, ...
    warnings: list[str] = Field(default_factory=list)
    # Sentences that the summary ends with: the largest setting that fits, and the command for it.
    closing: list[str] = Field(default_factory=list)
    searching: Row | None = None  # of measured.json: the row whose search is not over, with its tries so far
    rows: list[Row] = Field(default_factory=list)
