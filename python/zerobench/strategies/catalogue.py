"""The catalogue of strategies: one row each, with all that other code asks about a strategy. Imports no torch.

A strategy of one's own is not listed here. It declares the same facts on its class (``Strategy.facts``), which
``strategies.facts`` reads. Code that has only the name in a result row uses ``known_facts``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from zerobench.errors import ConfigError, did_you_mean
from zerobench.host import imports

Part = Literal["parameters", "gradients", "optimizer_state"]
PARTS: tuple[Part, ...] = ("parameters", "gradients", "optimizer_state")
_WHOLE_AT: dict[int, tuple[Part, ...]] = {0: PARTS, 1: PARTS[:2], 2: PARTS[:1], 3: ()}
OFFLOADS = ("none", "cpu_optimizer", "cpu_full", "nvme", "nvme_full")
"""Values of ``--offload``, by what leaves the device: nothing; optimizer state, to host memory; parameters too;
optimizer state, to NVMe; parameters too."""
_NVME_OFFLOADS = ("nvme", "nvme_full")
_CPU, _GPUS, _BOTH = ("cpu",), ("cuda",), ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts that a comparison has to know of a strategy before it runs. The defaults describe an unknown one."""

    stage: int | None = None
    """The ZeRO stage, 0 to 3; None where it has none. Shown in results."""
    whole: tuple[Part, ...] | None = None
    """Which of PARTS every rank holds in full; the others are divided. None: what the stage says, unknown without a
    stage."""
    autocast: bool = False
    """In low precision it keeps fp32 parameters and runs under autocast. Then its reference does, too."""
    begins_whole: bool = False
    """Every rank holds the whole fp32 model on its GPU before anything is sharded."""
    whole_logits: bool = False
    """A rank holds all logits of its micro-batch at once."""
    compiles_whole: bool = False
    """It compiles the whole model, whatever ``--compile`` asks of the other rows."""
    in_backward_unless_clipped: bool = False
    """It updates parameters during backward unless gradients are clipped, whatever the options ask."""
    pipelines: bool = False
    """It cuts the model into stages and takes the options of pipelines."""
    nvme_offloads: tuple[str, ...] = _NVME_OFFLOADS
    """The values of ``--offload`` with which it swaps to NVMe."""
    devices: tuple[str, ...] = _BOTH
    """Where it runs: "cpu", "cuda" (GPUs). Elsewhere no warning counts what it would swap."""

    def __post_init__(self) -> None:
        if self.stage not in (None, *_WHOLE_AT):
            raise ConfigError(
                f"stage={self.stage!r} is unknown: ZeRO stages are 0, 1, 2 and 3; None means no stage"
            )
        if unknown := set(self.whole or ()) - set(PARTS):
            raise ConfigError(f"whole={self.whole!r} has {unknown.pop()!r}: the parts are {', '.join(PARTS)}")

    def divides(self, part: Part) -> bool | None:
        """Return whether each rank holds only a shard of ``part``; None if that is unknown."""
        whole = _WHOLE_AT[self.stage] if self.whole is None and self.stage is not None else self.whole
        return None if whole is None else part not in whole

    @property
    def shards(self) -> bool:
        """True if any part is known to be divided."""
        return any(self.divides(part) for part in PARTS)

    @property
    def replicates(self) -> bool:
        """True if every part is known to be held in full by every rank."""
        return all(self.divides(part) is False for part in PARTS)


OWN = Facts()
"""The facts of a strategy of one's own that declares nothing."""


class Tool(Enum):
    """Tool that trains a row; values are the names in exports."""

    ZEROBENCH = "zerobench"
    DDP = "ddp"
    FSDP1 = "fsdp1"
    FSDP2 = "fsdp2"
    DEEPSPEED = "deepspeed"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class BuiltIn(Facts):
    """A row of the catalogue. Here the defaults describe a strategy that does nothing unusual."""

    name: str
    """Name for ``--strategies`` and in results."""
    place: str
    """Its class, as ``module:ClassName``."""
    whole_logits: bool = True
    nvme_offloads: tuple[str, ...] = ()
    default_on: tuple[str, ...] = ()
    """The devices on which a comparison runs it unless told otherwise. The order is that of the catalogue, with the
    floor first."""
    package: str | None = None
    """The package to import besides torch, without which it is no default."""
    baseline_rank: int | None = None
    """Its place among the default baselines; None where it is none. The lowest rank in the results wins."""
    short_name: str | None = None
    """How names of rows begin; None: with the strategy's name."""
    tool: Tool = Tool.OTHER
    """Tool that trains the row."""
    is_ours: bool = False
    """Whether it is zerobench's engine, which takes zerobench's options and swaps with locked memory."""
    is_reference: bool = False
    """Whether all others are verified against it. It runs on one rank, at one placement of state."""
    is_floor: bool = False
    """Whether it is forward and backward alone: a limit to hold rows against, not a way to train."""
    eager_form: str | None = None
    """Name of the strategy that does the same uncompiled, where it always compiles."""
    deepspeed_file: Literal["plain", "super_offload", "deepcompile"] | None = None
    """The kind of DeepSpeed's configuration files (``--config``) that run as this row; a plain one at its stage."""


def _ours(stage: int, *, nvme_offloads: tuple[str, ...]) -> BuiltIn:
    return BuiltIn(
        name=f"zero{stage}",
        place=f"zerobench.strategies.zero:Zero{stage}Strategy",
        stage=stage,
        nvme_offloads=nvme_offloads,
        default_on=_BOTH,
        short_name=f"zs{stage}",
        tool=Tool.ZEROBENCH,
        is_ours=True,
    )


def _ddp(name: str, class_name: str, **facts: Any) -> BuiltIn:
    place = f"zerobench.strategies.ddp:{class_name}"
    return BuiltIn(name=name, place=place, whole=PARTS, tool=Tool.DDP, **facts)


def _deepspeed(name: str, place: str, *, stage: int, **facts: Any) -> BuiltIn:
    return BuiltIn(
        name=name,
        place=f"zerobench.strategies.deepspeed.{place}",
        stage=stage,
        begins_whole=True,
        devices=_GPUS,
        package="deepspeed",
        tool=Tool.DEEPSPEED,
        **facts,
    )


def _deepcompile(name: str, class_name: str, **facts: Any) -> BuiltIn:
    place = f"deepcompile:{class_name}"
    return _deepspeed(name, place, stage=3, compiles_whole=True, eager_form="deepspeed3", **facts)


def _megatron(stage: int) -> BuiltIn:
    return BuiltIn(
        name=f"mfsdp{stage}",
        place=f"zerobench.strategies.megatron_fsdp:MegatronFSDP{stage}Strategy",
        stage=stage,
        begins_whole=True,
        devices=_GPUS,
        default_on=_GPUS,
        package="megatron_fsdp",
    )


_ROWS = (
    BuiltIn(
        name="single",
        place="zerobench.strategies.single:SingleStrategy",
        whole=PARTS,
        default_on=_CPU,
        baseline_rank=2,
        is_reference=True,
    ),
    _ours(0, nvme_offloads=()),
    _ours(1, nvme_offloads=("nvme",)),
    _ours(2, nvme_offloads=("nvme",)),
    _ours(3, nvme_offloads=_NVME_OFFLOADS),
    BuiltIn(
        name="compute_only",
        place="zerobench.strategies.compute_only:ComputeOnlyStrategy",
        whole=PARTS,  # of those that it has: it keeps no optimizer state
        default_on=_GPUS,
        is_floor=True,
    ),
    # On GPUs three of DDP are defaults: as most of its users have it, with gradients reduced in low precision, and with
    # the dtypes of the other rows.
    _ddp("ddp", "DDPStrategy", autocast=True, default_on=_BOTH, baseline_rank=0),
    _ddp("ddp_compress", "DDPCompressStrategy", autocast=True, default_on=_GPUS),
    # In low precision ddp keeps fp32 parameters and is not comparable: this one has the dtypes of the other rows.
    _ddp("ddp_master", "DDPMasterStrategy", default_on=_GPUS, baseline_rank=1),
    BuiltIn(
        name="pipeline",
        place="zerobench.strategies.pipeline:PipelineStrategy",
        whole=(),
        whole_logits=False,  # the last stage alone has any, of a micro-batch of another size
        pipelines=True,
    ),
    BuiltIn(
        name="fsdp1",
        place="zerobench.strategies.fsdp1:FSDP1Strategy",
        tool=Tool.FSDP1,
        stage=3,
        begins_whole=True,
        devices=_GPUS,
        default_on=_GPUS,
    ),
    BuiltIn(
        name="fsdp2",
        place="zerobench.strategies.fsdp2:FSDP2Strategy",
        stage=3,
        tool=Tool.FSDP2,
        default_on=_BOTH,
    ),
    BuiltIn(
        name="fsdp2_keep",
        place="zerobench.strategies.fsdp2:FSDP2KeepStrategy",
        stage=2,
        tool=Tool.FSDP2,
        default_on=_GPUS,
    ),
    _deepspeed(
        "deepspeed0", "strategy:DeepSpeed0Strategy", stage=0, default_on=_GPUS, deepspeed_file="plain"
    ),
    _deepspeed(
        "deepspeed1", "strategy:DeepSpeed1Strategy", stage=1, default_on=_GPUS, deepspeed_file="plain"
    ),
    _deepspeed(
        "deepspeed2", "strategy:DeepSpeed2Strategy", stage=2, default_on=_GPUS, deepspeed_file="plain"
    ),
    _deepspeed(
        "deepspeed3",
        "strategy:DeepSpeed3Strategy",
        stage=3,
        nvme_offloads=_NVME_OFFLOADS,
        default_on=_GPUS,
        deepspeed_file="plain",
    ),
    _deepspeed("deepspeed3_leaves", "strategy:DeepSpeed3LeavesStrategy", stage=3, default_on=_GPUS),
    _deepspeed(
        "deepspeed3_super",
        "super_offload:DeepSpeed3SuperStrategy",
        stage=3,
        in_backward_unless_clipped=True,
        deepspeed_file="super_offload",
    ),
    _deepcompile("deepcompile3", "DeepCompile3Strategy"),
    _deepcompile("deepcompile3_prefetch", "DeepCompile3PrefetchStrategy"),
    _deepcompile("deepcompile3_selective", "DeepCompile3SelectiveStrategy"),
    # DeepSpeed's own choice of passes.
    _deepcompile("deepcompile3_both", "DeepCompile3BothStrategy", deepspeed_file="deepcompile"),
    _megatron(1),
    _megatron(2),
    _megatron(3),
)
CATALOGUE = {row.name: row for row in _ROWS}
OURS = tuple(row.name for row in _ROWS if row.is_ours)
(REFERENCE,) = (row.name for row in _ROWS if row.is_reference)
(FLOOR,) = (row.name for row in _ROWS if row.is_floor)
DEFAULT_BASELINES = tuple(
    name
    for _, name in sorted((row.baseline_rank, row.name) for row in _ROWS if row.baseline_rank is not None)
)
"""Default baselines, the preferred one first."""
AUTOCAST_REFERENCE = "zerobench.strategies.autocast:AutocastStrategy"
"""The class that rows under autocast are verified against; no row of a comparison."""


def available() -> list[str]:
    """Return the names of the built-in strategies."""
    return list(CATALOGUE)


def tool_of(name: str) -> Tool:
    """Return what trains the rows of a strategy."""
    return CATALOGUE[name].tool if name in CATALOGUE else Tool.OTHER


def eager_form(name: str) -> str:
    """Return the strategy that does the same uncompiled: another one where it always compiles."""
    row = CATALOGUE.get(name)
    return (row and row.eager_form) or name


def known_facts(name: str) -> Facts:
    """Return what a strategy's name alone tells: its row in the catalogue, or OWN."""
    return CATALOGUE.get(name, OWN)


def check(name: str) -> None:
    """Raise ConfigError unless ``name`` is built in or has the form of a place. Imports nothing."""
    if name in CATALOGUE or imports.is_place(name):
        return
    hint = did_you_mean(name.lower(), CATALOGUE, cutoff=0.5)
    raise ConfigError(
        f"unknown strategy {name!r}: {hint}known: {', '.join(CATALOGUE)} and package.module:ClassName"
    )


def short_name(name: str) -> str:
    """Return how the names of its rows begin: zero2's with zs2, those of a strategy of one's own with its class."""
    row = CATALOGUE.get(name)
    return (row and row.short_name) or name.rpartition(":")[2].lower()


def ours_at(stage: int) -> str:
    """Return the name of zerobench's engine at a stage."""
    return next(row.name for row in _ROWS if row.is_ours and row.stage == stage)


def of_deepspeed_file(kind: Literal["plain", "super_offload", "deepcompile"], *, stage: int) -> str:
    """Return the strategy that runs a kind of DeepSpeed's files; only a plain file's depends on the stage."""
    rows = [row for row in _ROWS if row.deepspeed_file == kind]
    return next(row.name for row in rows if kind != "plain" or row.stage == stage)


def default_strategies(device: str) -> list[BuiltIn]:
    """Return what runs on a device unless told otherwise, also what needs a package that is not installed."""
    rows = [row for row in _ROWS if device in row.default_on]
    return sorted(rows, key=lambda row: not row.is_floor)
