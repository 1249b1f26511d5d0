"""The table of settings: one field a setting or an option of ``compare``, and all that is known of it.

A field of ``Settings`` is recorded in every row; a field of ``Options`` is an option that rows record under no name of
their own. Everything else is derived from the two: the command line, the grid, names of rows, the command that runs a
row again, which rows may be held against each other, words and hidden defaults of tables. Imports neither torch nor the
core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, Flag, auto
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field

from zerobench.results.setting_values import (
    clip_norm,
    name,
    on_or_off,
    precision,
    run_num,
    share,
    stage_name,
)

Number = Annotated[int, Field(ge=1)]


class Changes(Flag):
    """Effects of another value of a setting. Rows whose values differ are compared only where that allows it."""

    NOTHING = 0
    """Neither what is trained nor how fast: how it is measured, or what follows from other settings."""
    WORKLOAD = auto()
    """The task: rows are ranked within one workload."""
    RESULT = auto()
    """The parameters that training ends with: rows with equal values share a reference."""
    MICRO_BATCHES = auto()
    """How many micro-batches a step has: only the product over settings changes the parameters."""
    BITS = auto()
    """The order of sums: rows with equal values, of the engine's own, end with equal bits."""
    FLOOR = auto()
    """Time or memory of forward and backward: a row shares the value with its floor."""
    STEP = auto()
    """Time or memory of the rest of a step: an offloaded row shares the value with the row that it is held against."""
    WORK = auto()
    """How much work a step is: a row shares the value with its baseline."""
    PLACE = auto()
    """Where state lives, or when it is updated: what sharding saves is told among rows with equal values."""
    RATE = auto()
    """How fast the same work goes."""


class Takes(Enum):
    """How an option is written on the command line."""

    LIST = "a comma-separated list of values to compare"
    WORDS = "the same, with commas or spaces between"
    ONE = "one value"
    SWITCH = "no value: it is given or not"
    REPEATED = "values one after the other"

    @property
    def is_list(self) -> bool:
        """True if its values are compared."""
        return self in (Takes.LIST, Takes.WORDS)

    @property
    def is_spaced(self) -> bool:
        """True if spaces separate values."""
        return self in (Takes.WORDS, Takes.REPEATED)


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of ``compare``."""

    help: str
    help_at: int
    """Place in ``--help``, and in the command that runs a row again."""
    takes: Takes = Takes.ONE
    convert: Callable[[str], Any] = str
    """Makes one value from its text; of ``Takes.ONE`` one of ``str``, ``int``, ``float`` and ``Path``."""
    flag: str | None = None
    """None: the field's name with dashes."""
    default: Any = None
    """As it would be typed, which ``--help`` shows. None: there is none, or it depends on the device. An empty text: an
    empty list."""
    on_cpu: str | None = None
    """The default on CPU ranks, where it depends on the device."""
    on_gpus: str | None = None
    metavar: str | None = None
    grid_at: int | None = None
    """Place in the grid, whose combinations are compared; the innermost comes last."""
    above_zero: bool = False
    is_of_model: bool = False
    """Whether it is a field of the model, which ``--model-option`` gives in the command that runs a row again."""
    is_of_comparison: bool = False
    """Whether it is about the comparison as a whole, so that the command that runs a row again leaves it out."""
    must_reach: bool = False
    """Giving a value that no row has is an error."""


class _AsTheRow:
    """The reference of a row has the row's value."""


AS_THE_ROW = _AsTheRow()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A recorded setting."""

    changes: Changes
    option: Option | None = None
    """None: no option asks for it."""
    is_as_asked: bool = True
    """Whether rows record what was asked for. Otherwise the plan or the run decides what a row has."""
    reference: Any = AS_THE_ROW
    """The value that the reference runs with, where that is another one than the row's."""
    word: str | None = None
    """Word for it in tables; None: the field's name."""
    axis: str | None = None
    """Word for it in ``--x`` of charts; None: it is no horizontal axis."""
    off: Any = ...
    """The value that neither tables nor names of rows mention."""
    suffix: str | None = None
    """Its part of a row's name, such as ``bs{value}``."""
    name_at: int = 0
    """Place in a row's name."""
    leads: bool = False
    """Whether the settings line begins with it, whatever its value."""
    follows: bool = False
    """Whether other settings decide it, so that labels of rows leave it out."""
    may_follow: bool = False
    """Whether other settings may decide it: labels give it only to rows that nothing else tells apart."""
    known_after_run: bool = False
    """Whether a row that did not run says nothing about it."""
    free_on_resume: bool = False
    """Whether a row of an earlier comparison may have another value: a run fills it in, or a row can be measured more
    often than before."""
    quiet: bool = False
    """Whether the settings line leaves it out."""
    speaks_for_itself: bool = False
    """Whether labels give its value without its name."""


class ResultModel(BaseModel):
    """A part of a result file. Newer files may carry more."""

    model_config = ConfigDict(extra="allow")


# fmt: off
class Settings(ResultModel):
    """All settings of a row, resolved."""

    model: Annotated[str, Setting(
        changes=Changes.WORKLOAD, is_as_asked=False, axis="model", leads=True, speaks_for_itself=True,
        option=Option(
            takes=Takes.LIST, convert=name, on_cpu="tiny", on_gpus="gpt2", help_at=20, grid_at=1,
            help="Presets (tiny, gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt-64m, and gpt-512m, which has the shape of "
            "gpt2-medium), llama-1.3b, llama, names of the Hugging Face hub (facebook/opt-1.3b, hf:gpt2), a folder "
            "with a config.json, or package.module:function of your own. Default: tiny, on GPUs gpt2.",
        ),
    )]
    model_config_resolved: Annotated[dict[str, Any], Setting(changes=Changes.RESULT, quiet=True)] = Field(
        default_factory=dict
    )
    parameter_count: Annotated[int | None, Setting(
        changes=Changes.NOTHING, follows=True, free_on_resume=True, quiet=True,
    )] = None
    world_size: Annotated[Number, Setting(
        changes=Changes.MICRO_BATCHES | Changes.BITS | Changes.STEP, is_as_asked=False, word="ranks", axis="world_size",
        leads=True, suffix="{ranks}{value}", name_at=2,
        option=Option(
            takes=Takes.LIST, convert=int, on_cpu="2", help_at=280, grid_at=9, above_zero=True,
            help="Ranks. Default: all visible GPUs; on CPU 2, or 1 on a single core; under torchrun or srun the "
            "ranks that they started.",
        ),
    )]
    precision: Annotated[str, Setting(
        changes=Changes.WORKLOAD | Changes.RESULT, axis="precision", leads=True, speaks_for_itself=True,
        suffix="{value}", name_at=1,
        option=Option(
            takes=Takes.LIST, convert=name, on_cpu="fp32", on_gpus="bf16", help_at=110, grid_at=4, must_reach=True,
            help="fp32, bf16 or fp16. Default: fp32, on GPUs bf16.",
        ),
    )]
    batch_size: Annotated[Number, Setting(  # per rank and micro-batch
        changes=Changes.RESULT | Changes.FLOOR, word="batch", axis="batch", leads=True, suffix="bs{value}",
        name_at=3,
        option=Option(
            takes=Takes.LIST, convert=int, on_cpu="4", on_gpus="8", help_at=80, grid_at=6, above_zero=True,
            must_reach=True, help="Sequences per rank and micro-batch. Default: 4, on GPUs 8.",
        ),
    )]
    seq_length: Annotated[Number, Setting(
        changes=Changes.WORKLOAD | Changes.RESULT, word="seq", axis="seq", leads=True, suffix="sl{value}",
        name_at=4,
        option=Option(
            takes=Takes.LIST, convert=int, on_cpu="128", on_gpus="1024", help_at=90, grid_at=5, above_zero=True,
            help="Tokens per sequence. Default: 128, on GPUs 1024.",
        ),
    )]
    grad_accum: Annotated[Number, Setting(
        changes=Changes.MICRO_BATCHES | Changes.FLOOR, word="accum", axis="accum", leads=True, off=1,
        suffix="ga{value}", name_at=5, may_follow=True,
        option=Option(
            takes=Takes.LIST, convert=int, default="1", help_at=100, grid_at=7, above_zero=True, must_reach=True,
            help="Micro-batches per optimizer step.",
        ),
    )]
    offload: Annotated[str, Setting(
        changes=Changes.PLACE, is_as_asked=False, reference="none", axis="offload", off="none",
        suffix="offload-{value}", name_at=9,
        option=Option(
            takes=Takes.LIST, convert=name, default="none", help_at=130, grid_at=11, must_reach=True,
            help="State to offload: none, cpu_optimizer (optimizer state, to host memory), cpu_full (parameters "
            "too), nvme (optimizer state, to NVMe) or nvme_full (parameters too).",
        ),
    )] = "none"
    offload_ratio: Annotated[float | Literal["auto"] | None, Setting(  # share of the optimizer state; null: all of it
        changes=Changes.PLACE, is_as_asked=False, reference=None, word="ratio", off=None, suffix="ratio{value}",
        name_at=10,
        option=Option(
            takes=Takes.LIST, convert=share, help_at=140, grid_at=12, must_reach=True,
            help="Share of the optimizer state that leaves the device, above 0 to 1 (DeepSpeed's rows take 0 "
            "too), or auto: the share that the device cannot hold. Default: all of it.",
        ),
    )] = None
    nvme_paths: Annotated[list[str], Setting(
        changes=Changes.RATE, is_as_asked=False, reference=[], word="NVMe paths", off=[], follows=True,
        option=Option(
            takes=Takes.REPEATED, convert=Path, flag="--nvme-path", metavar="FOLDER...", help_at=150, must_reach=True,
            help="Folders for the files of --offload nvme and nvme_full; several are striped.",
        ),
    )] = Field(default_factory=list)
    host_memory_gib: Annotated[float | None, Setting(  # all ranks of a host, for what is offloaded
        changes=Changes.RATE, is_as_asked=False, reference=None, word="host GiB", off=None, follows=True,
        option=Option(
            convert=float, help_at=170, above_zero=True, must_reach=True,
            help="GiB of host memory for the offloaded state of all ranks. State beyond it goes to NVMe; a row "
            "without NVMe is oom. Default: all host memory for cpu_optimizer and cpu_full; only the swap "
            "buffers for nvme and nvme_full, so state is swapped unless it fits into them.",
        ),
    )] = None
    optimizer_in_backward: Annotated[bool, Setting(
        changes=Changes.PLACE, is_as_asked=False, reference=False, word="in backward", off=False, suffix="inbackward",
        name_at=11,
        option=Option(
            takes=Takes.LIST, convert=on_or_off, default="off", help_at=180, grid_at=13, must_reach=True,
            help="Whether updates begin during backward: on, off, or both as a list.",
        ),
    )] = False
    device_memory_gib: Annotated[float | None, Setting(  # that a rank may use of its device
        changes=Changes.RATE, reference=None, word="device GiB", off=None, quiet=True,
        option=Option(
            convert=float, help_at=190, above_zero=True,
            help="GiB of its device that a rank may use; a row that needs more is oom.",
        ),
    )] = None
    memory_limit_gib: Annotated[float | None, Setting(  # a row with a higher peak counts as one that does not fit
        changes=Changes.NOTHING, word="memory limit GiB", off=None,
        option=Option(
            convert=float, flag="--memory-limit", metavar="GIB", help_at=192, above_zero=True,
            help="Most GiB of its device that a rank should need: a row with a higher peak still runs, but "
            "counts as one that does not fit (verdicts, --find).",
        ),
    )] = None
    bind: Annotated[str, Setting(  # "numa": each rank runs on cores of its node
        changes=Changes.RATE, reference="none", off="none",
        option=Option(
            default="none", help_at=210,
            help="none, or numa: each rank runs on its share of its NUMA node's cores.",
        ),
    )] = "none"
    compile: Annotated[str, Setting(
        changes=Changes.FLOOR | Changes.BITS, is_as_asked=False, reference="none", axis="compile", off="none",
        suffix="compile-{value}", name_at=8,
        option=Option(
            takes=Takes.LIST, convert=name, default="none", help_at=120, grid_at=10,
            help="What torch.compile compiles: none, block (each repeated block) or whole.",
        ),
    )] = "none"
    device: Annotated[str, Setting(
        changes=Changes.RESULT, quiet=True,
        option=Option(
            default="auto", on_cpu="cpu", on_gpus="cuda", help_at=10,
            help="auto, cpu or cuda. auto: cuda where torch sees a GPU, one rank on each.",
        ),
    )] = "cpu"
    attention: Annotated[str | None, Setting(  # how the model computes attention
        changes=Changes.FLOOR, is_as_asked=False,
        option=Option(help_at=220, is_of_model=True, help="sdpa, eager or flash_attention_2. Default: sdpa."),
    )] = None
    dropout: Annotated[float, Setting(  # of the measured pass; verification has none
        changes=Changes.FLOOR, is_as_asked=False, off=0.0,
        option=Option(
            convert=float, help_at=230, is_of_model=True,
            help="Dropout of the timed pass; verification has none. Default: 0.",
        ),
    )] = 0.0
    tf32: Annotated[bool | None, Setting(  # fp32 matrix products with ten bits of mantissa; null where no question
        changes=Changes.RESULT | Changes.FLOOR, is_as_asked=False, word="TF32",
        option=Option(
            takes=Takes.SWITCH, help_at=240, must_reach=True, help="Multiply fp32 matrices in TF32 on GPUs.",
        ),
    )] = None
    clip: Annotated[float | None, Setting(
        changes=Changes.RESULT | Changes.STEP | Changes.WORK, off=None, suffix="clip{value}", name_at=6,
        option=Option(
            takes=Takes.LIST, convert=clip_norm, default="none", help_at=290, grid_at=8, above_zero=True,
            must_reach=True, help="Maximum global gradient norm, or none.",
        ),
    )] = None
    checkpointing: Annotated[bool, Setting(
        changes=Changes.FLOOR | Changes.WORK | Changes.BITS, reference=False, off=False, suffix="ckpt", name_at=7,
        option=Option(
            takes=Takes.SWITCH, help_at=300, help="Recompute every block's activations in backward.",
        ),
    )] = False
    num_steps: Annotated[Number, Setting(
        changes=Changes.NOTHING, word="steps",
        option=Option(
            convert=int, default=20, help_at=250, above_zero=True, help="Measured optimizer steps.",
        ),
    )] = 20
    warmup_steps: Annotated[int, Setting(
        changes=Changes.NOTHING, word="warm-up",
        option=Option(
            convert=int, on_cpu="5", on_gpus="20", help_at=260,
            help="Steps before the measured ones. Default: 5, on GPUs 20.",
        ),
    )] = 5
    repeats: Annotated[Number | Literal["auto"], Setting(
        changes=Changes.NOTHING, off=1, free_on_resume=True,
        option=Option(
            convert=run_num, default="1", help_at=270,
            help="Measure every row this many times, interleaved, in fresh processes. auto: until --ratio-precision is "
            "met, 20 times at most.",
        ),
    )] = 1
    rounds: Annotated[int, Setting(
        changes=Changes.NOTHING, off=15, quiet=True,
        option=Option(
            convert=int, default=15, help_at=275,
            help="Rounds in which the rows that fit into memory together take turns, a window of some ten steps each; "
            "0 measures each row alone only.",
        ),
    )] = 0
    verify_steps: Annotated[int, Setting(changes=Changes.NOTHING, word="verified steps", free_on_resume=True)] = 0
    seed: Annotated[int, Setting(
        changes=Changes.RESULT,
        option=Option(convert=int, default=0, help_at=330, help="Seed of weights and data."),
    )] = 0
    data: Annotated[str, Setting(
        changes=Changes.WORKLOAD | Changes.RESULT,
        option=Option(
            default="stdlib", help_at=320,
            help="A file of text, JSON lines or Parquet, a folder of them (hidden files and folders of results "
            "are ignored), stdlib (the interpreter's own Python sources) or synthetic. It must not change "
            "while the comparison runs.",
        ),
    )] = "stdlib"
    text_field: Annotated[str | None, Setting(
        changes=Changes.WORKLOAD | Changes.RESULT, word="text field", off=None,
        option=Option(
            help_at=322, help="Field of JSON lines and Parquet that holds the text. Default: text.",
        ),
    )] = None
    tokens: Annotated[str | None, Setting(
        changes=Changes.WORKLOAD | Changes.RESULT, word="token ids", off=None,
        option=Option(
            help_at=324,
            help="u16 or u32: the file of --data holds token ids of this width, little-endian, without a header.",
        ),
    )] = None
    communicator: Annotated[str | None, Setting(
        changes=Changes.RATE, is_as_asked=False, known_after_run=True, may_follow=True,
        option=Option(
            takes=Takes.LIST, convert=name, default="auto", help_at=200, grid_at=14, must_reach=True,
            help="Communicator of zerobench's own rows: auto, shm or c10d on CPU, nccl or peer (copy engines, "
            "GPUs of one host) on GPUs.",
        ),
    )] = None
    network: Annotated[str, Setting(  # between ranks, each a host of its own unless native
        changes=Changes.WORKLOAD | Changes.BITS, reference="native", axis="network", off="native", suffix="{value}",
        name_at=15,
        option=Option(
            takes=Takes.LIST, convert=name, default="native", help_at=206, grid_at=18,
            help="native, or the speed of each rank's link, such as 10gbit, 1gbit or 1gbit:0.2ms with a latency. Each "
            "rank is then a host of one device.",
        ),
    )] = "native"
    pipeline_stages: Annotated[int | None, Setting(  # null where the row is no pipeline, as of the next two
        changes=Changes.RATE, is_as_asked=False, reference=None, word="stages", off=None, suffix="pp{value}",
        name_at=12,
        option=Option(
            takes=Takes.LIST, convert=int, default="2", help_at=212, grid_at=15, above_zero=True, must_reach=True,
            help="Stages that pipeline cuts the model into, one per rank. Further ranks hold replicas under DDP.",
        ),
    )] = None
    pipeline_schedule: Annotated[str | None, Setting(
        changes=Changes.RATE, is_as_asked=False, reference=None, word="schedule", off=None, suffix="{value}",
        name_at=13,
        option=Option(
            takes=Takes.LIST, convert=name, default="1f1b", help_at=214, grid_at=16, must_reach=True,
            help="Schedule of pipeline: gpipe, 1f1b or interleaved (1F1B with two parts of the model on each "
            "rank).",
        ),
    )] = None
    micro_batches: Annotated[int | None, Setting(
        changes=Changes.RATE, is_as_asked=False, reference=None, word="micro-batches", off=None, suffix="mb{value}",
        name_at=14,
        option=Option(
            takes=Takes.LIST, convert=int, help_at=216, grid_at=17, above_zero=True, must_reach=True,
            help="Micro-batches of a pipeline's step. Together they hold the sequences of another row's step. Default: "
            "stages x grad-accum, of batch-size sequences each.",
        ),
    )] = None
    threads_per_rank: Annotated[int | None, Setting(
        changes=Changes.RATE, word="torch threads/rank", known_after_run=True, may_follow=True,
    )] = None
    optimizer: Annotated[dict[str, Any], Setting(changes=Changes.RESULT, quiet=True)] = Field(default_factory=dict)
    config_file: Annotated[str | None, Setting(changes=Changes.NOTHING, word="config", off=None)] = None


class Options:
    """Options of a comparison that rows record under no name of their own."""

    num_layers: Annotated[int | None, Option(
        takes=Takes.LIST, convert=int, help_at=30, grid_at=2, is_of_model=True,
        help="Number of layers, instead of the model's own.",
    )]
    hidden_size: Annotated[int | None, Option(
        takes=Takes.LIST, convert=int, help_at=40, grid_at=3, is_of_model=True,
        help="Hidden size, instead of the model's own.",
    )]
    model_option: Annotated[dict[str, Any], Option(
        takes=Takes.REPEATED, convert=dict, metavar="FIELD=VALUE", help_at=50,
        help="Any other field of the model, such as num_heads=8 or tied_embeddings=false; may be repeated.",
    )]
    strategies: Annotated[str, Option(
        takes=Takes.WORDS, convert=name, default="", metavar="NAME...", help_at=60, grid_at=100,
        help="single, compute_only, zero0 to zero3, ddp, ddp_compress, ddp_master, pipeline, fsdp1, fsdp2, "
        "fsdp2_keep, deepspeed0 to deepspeed3, deepspeed3_leaves, deepspeed3_super, deepcompile3 (also with "
        "the suffix _prefetch, _selective or _both), mfsdp1 to mfsdp3, or package.module:ClassName of your "
        "own. Default: single, zero0 to zero3, ddp and fsdp2; on GPUs compute_only to fsdp2_keep, and "
        "deepspeed0 to deepspeed3_leaves and mfsdp1 to mfsdp3 where they are installed. Commas or spaces "
        "separate them.",
    )]
    stages: Annotated[str, Option(
        takes=Takes.WORDS, convert=stage_name, default="", metavar="STAGE...", help_at=70,
        is_of_comparison=True,
        help="Short for strategies zero0 to zero3: --stages 0,3. Joins --strategies. Commas or spaces separate them.",
    )]
    io_engine: Annotated[str | None, Option(
        help_at=160, must_reach=True,
        help="How zerobench's own rows read and write NVMe: io_uring or threads. Default: the setting that `tune "
        "io` found, else io_uring.",
    )]
    global_batch: Annotated[int | None, Option(
        convert=int, help_at=105, above_zero=True,
        help="Sequences of an optimizer step over all ranks. Accumulation follows from it, --batch-size and the "
        "number of ranks; a row for which that is not a whole number is skipped.",
    )]
    network_how: Annotated[str, Option(
        default="auto", help_at=207,
        help="How --network slows links: shaped (network namespaces and tc, for every strategy; needs root), paced "
        "(waits in zerobench's own communicators, for its own rows alone) or auto: shaped where that is possible.",
    )]
    lr: Annotated[float, Option(
        convert=float, default=1e-3, help_at=310, above_zero=True, must_reach=True,
        help="Learning rate of AdamW (betas 0.9 and 0.999, weight decay 0.1). A file of --config may set other "
        "values.",
    )]
    timeout_s: Annotated[float, Option(
        convert=float, flag="--timeout", default=300.0, help_at=340, above_zero=True,
        help="Seconds without progress after which a configuration has failed.",
    )]
    rank_memory_gib: Annotated[float | None, Option(
        convert=float, help_at=350, above_zero=True,
        help="GiB of private memory that a rank may take beyond what importing torch took; a row that needs more "
        "is oom.",
    )]
    verify_layers: Annotated[int | None, Option(
        convert=int, help_at=360, above_zero=True,
        help="Verify the model with this many layers at most; rows say so. Default: all that fit.",
    )]
    find: Annotated[str | None, Option(
        metavar="SETTING", help_at=194, is_of_comparison=True,
        help="batch, layers or seq: find the largest value that fits for every row, by tries of a few steps in fresh "
        "processes, and measure the row with it. The search begins at --batch-size, --num-layers or --seq-length. CPU "
        "ranks need --device-memory-gib, --rank-memory-gib or --memory-limit with it.",
    )]
    baseline: Annotated[str | None, Option(
        help_at=370, is_of_comparison=True,
        help="Strategy or row that speedup and memory change refer to. Default: the first of ddp, ddp_master and "
        "single that has a row which is ok and comparable.",
    )]
    config: Annotated[Path, Option(
        takes=Takes.REPEATED, convert=Path, metavar="FILE...", help_at=380,
        help="Configurations of zerobench or DeepSpeed, one row a file, instead of --strategies and --stages. "
        "Options apply to what a file does not set, and may not contradict what it sets.",
    )]
    ratio_precision: Annotated[float, Option(
        convert=precision, default="1%", help_at=276,
        help="Precision at which --repeats auto stops: half the width of the 95 % interval of the ratio of the "
        "two fastest rows, relative to the ratio.",
    )]
    max_minutes: Annotated[float | None, Option(
        convert=float, help_at=382, above_zero=True, is_of_comparison=True,
        help="Start no new work after this many minutes; continue later with --resume.",
    )]
    trace: Annotated[bool, Option(
        takes=Takes.SWITCH, help_at=395, is_of_comparison=True,
        help="Write a trace of one step of each row into traces/ of the results, for Perfetto and `zerobench "
        "trace`.",
    )]
    resume: Annotated[str | None, Option(
        convert=Path, metavar="FOLDER", help_at=384, is_of_comparison=True,
        help="Continue the comparison in this folder: run the rows of the grid that are missing, and keep the "
        "others.",
    )]
    dry_run: Annotated[bool, Option(
        takes=Takes.SWITCH, help_at=400, is_of_comparison=True,
        help="Run nothing. Print the rows, which of them would be skipped and why, and the expected time if "
        "there are earlier results of this machine in results/ or next to --output-dir.",
    )]
    as_json: Annotated[bool, Option(
        takes=Takes.SWITCH, flag="--json", help_at=410, is_of_comparison=True,
        help="Print one JSON document, its verdict first; the table and the advice go to standard error.",
    )]
    output_dir: Annotated[str | None, Option(
        convert=Path, metavar="FOLDER", help_at=390, is_of_comparison=True,
        help="Where results go. Default: a new results/compare_<time>.",
    )]
# fmt: on


SETTINGS: dict[str, Setting] = {
    key: next(item for item in field.metadata if isinstance(item, Setting))
    for key, field in Settings.model_fields.items()
}
"""Each recorded setting by its name, in the order of result files."""


def _all_options() -> dict[str, Option]:
    recorded = {key: setting.option for key, setting in SETTINGS.items() if setting.option is not None}
    hints = get_type_hints(Options, include_extras=True)
    others = {key: next(item for item in hint.__metadata__) for key, hint in hints.items()}
    return dict(sorted({**recorded, **others}.items(), key=lambda item: item[1].help_at))


OPTIONS: dict[str, Option] = _all_options()
"""Every option of ``compare`` by its field's name, in the order of ``--help``."""


def flag_of(key: str) -> str:
    """Return what the command line calls an option: ``--nvme-path`` for ``nvme_paths``."""
    return OPTIONS[key].flag or "--" + key.replace("_", "-")


def axes() -> list[str]:
    """Return the options whose values span the grid, the outermost first."""
    places = {key: option.grid_at for key, option in OPTIONS.items() if option.grid_at is not None}
    return sorted(places, key=lambda key: places[key])


def settings_that_change(kinds: Changes) -> tuple[str, ...]:
    """Return the settings that change at least one of ``kinds``."""
    return tuple(key for key, setting in SETTINGS.items() if setting.changes & kinds)


def reference_values() -> dict[str, Any]:
    """Return the settings that the reference does not take from its rows, with the values that it has."""
    found = {key: setting.reference for key, setting in SETTINGS.items()}
    return {key: value for key, value in found.items() if value is not AS_THE_ROW}


def named_settings() -> list[str]:
    """Return the settings that names of rows are made of, in their order there."""
    found = {key: setting.name_at for key, setting in SETTINGS.items() if setting.suffix is not None}
    return sorted(found, key=lambda key: found[key])


def chart_axes() -> dict[str, str]:
    """Return what can be the horizontal axis of a chart: dotted keys of settings by their word for ``--x``."""
    found = {setting.axis: key for key, setting in SETTINGS.items() if setting.axis is not None}
    return found | {"layers": "model_config_resolved.num_layers"}


def leading_settings() -> list[str]:
    """Return the settings that a settings line begins with, in their order there: that of rows' names."""
    found = {key: setting.name_at for key, setting in SETTINGS.items() if setting.leads}
    return sorted(found, key=lambda key: found[key])
