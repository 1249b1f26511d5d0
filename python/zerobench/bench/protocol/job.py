"""Messages between the command and the ranks of one configuration: what it hands to them and what each rank hands back.
Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from zerobench.results.schema import RowDtypes, Settings

NUM_PASSES = 2  # verification and measurement, each with a strategy built anew


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Job(_Message):
    """One configuration for one group of fresh processes."""

    name: str
    kind: Literal["row", "reference"]
    strategy: str
    settings: Settings
    model: dict[str, Any]
    verify_model: dict[str, Any]  # the same, or with fewer layers where the reference would not fit
    # Processes to start; a reference is one process that trains settings.world_size ranks' batches.
    num_ranks: int
    verify: bool
    measure: bool
    reference_strategy: str | None = None  # what a row is held against
    reference_file: str | None = None  # a reference writes it, a row reads it
    trace_file: str | None = None  # rank 0 writes the trace of a measured step there
    profile_steps: int = 5
    validation_batches: int = 8
    timeout_s: float
    rank_memory_bytes: int | None = None
    data_digest: str | None = None  # of the bytes that every rank must find
    options: dict[str, Any] = Field(default_factory=dict)
    network_how: Literal["shaped", "paced"] | None = (
        None  # what makes settings.network; None: it is not slowed
    )
    # Folder of the row for what torch.compile makes, empty before the first run; not of the verification pass.
    compile_cache: str | None = None
    # Asks for turns, in place of both passes: ranks train a window of so many steps at each order.
    steps_per_window: int | None = None


class Progress(_Message):
    """A rank is alive and at ``step`` of ``phase``."""

    phase: str
    step: int


class RankError(_Message):
    """An exception ended a rank."""

    type: str
    message: str
    phase: str
    out_of_memory: Literal["device", "host"] | None = None  # whose memory ran out
    communication: bool = False
    at_s: float  # time.time() when it was raised, which tells cause from effect


class Skipped(_Message):
    """The strategy says that it cannot run these settings."""

    reason: str


class Turn(_Message):
    """A rank waits for the next order."""

    step_ms: float | None = None  # mean time of a step in the window that it trained; None before the first


class TensorDeviation(_Message):
    """Deviations that rank 0 found when it compared tensors with the reference file."""

    gradient: float
    gradient_worst: str
    update: float
    piece: float
    piece_worst: str
    optimizer: float
    optimizer_worst: str
    max_abs: float


class Verification(_Message):
    """One rank's part of the verification pass; the fields that need all parameters are rank 0's only."""

    loss: float  # this rank's, step 1
    norm: float | None
    evaluation: float | None = None  # loss of this rank's held-out batch after the last step
    # The reference's with the row's parameters, by rank.
    expected_evaluations: list[float] = Field(default_factory=list)
    reads: float | None = None
    reads_worst: str | None = None
    loss_dtype: str | None = None
    checksum: str | None = None
    deviation: TensorDeviation | None = None


class DeviceMemory(_Message):
    """One rank's device over the measured window; docs/reference/metrics.md says how each figure is made."""

    peak_bytes: int
    allocated_bytes: int  # at the end
    torch_allocated_peak_bytes: int | None = None
    torch_reserved_peak_bytes: int | None = None
    outside_torch_bytes: int | None = None


class WindowTransfers(_Message):
    """Transfers of offloaded state over the measured window, in bytes per step."""

    to_host_bytes: int | None = None
    to_device_bytes: int | None = None
    nvme_read_bytes: int | None = None
    nvme_written_bytes: int | None = None
    pinned_bytes: int | None = None
    pinned_requested_bytes: int | None = None
    offload_ratio: float | None = None
    io_engine: str | None = None
    chunk_numel: int | None = None
    limit_gb_s: dict[str, float] = Field(default_factory=dict)  # by direction
    limit_note: str | None = None  # why those of files are not there


class MovedCollective(_Message):
    """The calls of one collective in one phase of a profiled step. None where it cannot be told."""

    phase: str
    name: str
    bytes: int
    calls: int | None = None
    ms: float | None = None


class Window(_Message):
    """One rank's measured window."""

    first_steps_s: float | None = None  # the warm-up steps before the last, to the end of their work
    step_times_ms: list[float]
    losses: list[float]
    began_s: float  # time.time()
    ended_s: float
    validation_loss: float | None
    memory: DeviceMemory
    peak_host_bytes: int | None
    communication_bytes: dict[str, int] | None  # per step, by collective
    collectives: list[MovedCollective] | None = None
    memory_bytes: dict[str, dict[str, int]]
    activation_bytes: int | None = None
    activation_and_shard_bytes: int | None = None
    phases_ms: dict[str, float]
    device_busy_pct: float | None = None  # of the profiled steps
    # Of a pipeline's schedule: forward and backward, and all of it.
    schedule_busy_ms: float | None = None
    schedule_ms: float | None = None
    transfers: WindowTransfers | None = None
    energy_per_step_j: float | None = None  # of this rank's GPU
    compiled_graphs: float | None = None  # per step
    # In fp16, of the window's steps and the last warm-up step.
    applied_steps: int | None = None
    skipped_steps: int | None = None
    threads: int
    communicator: str | None = None
    binding: str | None = None  # the node and the cores that the rank was bound to
    update_cpus: str | None = None  # what updates on CPUs, and why there


class Report(_Message):
    """All that one rank has to say when it ended well."""

    dtypes: RowDtypes
    verification: Verification | None = None
    window: Window | None = None
