"""The engine's configuration: pydantic models. Unknown keys are errors that suggest the nearest known one."""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from zerobench.errors import ConfigError, did_you_mean

Precision = Literal["fp32", "bf16", "fp16"]
DtypeName = Literal["float32", "bfloat16", "float16"]
DTYPE_OF_PRECISION: dict[str, DtypeName] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
LONG_WINDOW = 8  # micro-batches; sums of more lose too much in a low-precision dtype

MIN_TIMEOUT_S = 0.001  # the core counts whole milliseconds
MAX_TIMEOUT_S = 1e6  # eleven days; clocks that count nanoseconds end at 292 years
_EXPECTED = "Input should be "  # how pydantic's messages begin
DEEPSPEED_MARKS = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic takes it for 1."""
        if info.field_name is not None and _is_number(cls.model_fields[info.field_name].annotation):
            for one in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(one, bool):
                    raise ValueError(f"give a number, not {json.dumps(one)}")
        return value


def _is_number(annotation: Any) -> bool:
    """Return whether a field takes one number or several, and not true or false."""
    parts = get_args(annotation)
    if not parts:
        return annotation in (int, float) or type(annotation) is int  # the last: of a Literal
    return bool not in parts and any(map(_is_number, parts))


class OptimizerConfig(_Section):
    """AdamW (decoupled weight decay, arXiv 1711.05101) or Adam (L2)."""

    type: Literal["adamw", "adam"] = "adamw"
    lr: float = Field(default=1e-3, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, ge=0)
    weight_decay: float = Field(default=0.01, ge=0)

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each beta must be at least 0 and below 1")
        return betas


class LossScaleConfig(_Section):
    """Loss scale of fp16 training; ignored in other precisions."""

    dynamic: bool = True
    initial_scale: float = Field(default=65536.0, gt=0)
    growth_factor: float = Field(default=2.0, ge=1)
    backoff_factor: float = Field(default=0.5, gt=0, lt=1)
    growth_interval_steps: int = Field(default=1000, ge=1)
    min_scale: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _starts_above_its_floor(self) -> LossScaleConfig:
        if self.dynamic and self.initial_scale < self.min_scale:
            raise ValueError(
                f"initial_scale {self.initial_scale:g} is below min_scale {self.min_scale:g}, to which an overflow "
                "would raise it: give a lower min_scale"
            )
        return self


class OffloadOptimizerConfig(_Section):
    """Optimizer state in pinned host memory or on NVMe, updated by the CPU (docs/reference/offload.md). Keys as in
    DeepSpeed where they mean the same."""

    device: Literal["cpu", "nvme"] = "cpu"
    nvme_path: list[str] = Field(
        default=[], description="directories for device nvme, over which every transfer is striped"
    )
    host_memory_bytes: int | None = Field(
        None,
        ge=0,
        description="host memory of this rank for device nvme; state that fits beside the buffers stays there. null: "
        "all state swaps, unless the buffers hold it",
    )
    io_engine: Literal["io_uring", "threads"] | None = Field(
        None,
        description="what reads and writes; null, here and for the next two, is what `zerobench tune io` found for the "
        "first path, else io_uring, 1 MiB and 32",
    )
    io_block_bytes: int | None = Field(None, ge=4096, multiple_of=4096, description="bytes of one request")
    io_depth: int | None = Field(None, ge=1, le=1024, description="requests in flight")
    io_allow_fallback: bool = Field(
        False, description="true uses threads where io_uring is refused, and buffered I/O where O_DIRECT is"
    )
    io_checksums: bool = Field(False, description="true finds corrupted state when it is read")
    ratio: float | Literal["auto"] = Field(
        1.0,
        description="share of the state on the host; the rest stays on the device. auto: the first step, before its "
        "update, puts on the device what fits there",
    )
    device_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="device memory that ratio auto may count on, by everything of this rank; null: all that is there",
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads of the updates; null is `threads`, or this rank's share of CPUs"
    )
    numa_node: Literal["auto"] | int | None = Field(
        "auto",
        description="node of the memory; auto is that of this rank's CPUs, null leaves it to the kernel",
    )
    chunk_numel: int | None = Field(
        None,
        ge=64,
        multiple_of=64,
        description="elements that one stage of the pipeline works on; null: 4194304, or fewer where buffers of that "
        "size are too large for host_memory_bytes",
    )
    lock_memory: bool = Field(
        False, description="keep the memory from being swapped out (mlock) where no GPU's driver pins it"
    )

    @field_validator("nvme_path", mode="before")
    @classmethod
    def _one_path(cls, value: Any) -> Any:
        paths = [value] if isinstance(value, str) else value
        if isinstance(paths, Sequence) and any(path == "" for path in paths):
            raise ValueError("an empty path names no directory; give one on the disk")
        return paths

    @field_validator("ratio", mode="before")
    @classmethod
    def _ratio_is_a_share(cls, value: Any) -> Any:
        if value != "auto" and not (isinstance(value, (int, float)) and 0 < value <= 1):
            raise ValueError("give a share above 0 and at most 1, or auto")
        return value

    @field_validator("numa_node", mode="before")
    @classmethod
    def _node_is_a_number(cls, value: Any) -> Any:
        if value not in ("auto", None) and not (isinstance(value, int) and value >= 0):
            raise ValueError("give a node's number, auto or null")
        return value

    @model_validator(mode="after")
    def _limit_is_for_auto(self) -> OffloadOptimizerConfig:
        if self.device_memory_bytes is not None and self.ratio != "auto":
            raise ValueError("device_memory_bytes is what ratio auto counts on; remove it or set the ratio")
        return self

    @model_validator(mode="after")
    def _device_fits(self) -> OffloadOptimizerConfig:
        if self.device == "nvme" and not self.nvme_path:
            raise ValueError("device nvme needs nvme_path, a directory on the disk or a list of them")
        given = self.model_fields_set - {
            "device",
            "ratio",
            "device_memory_bytes",
            "threads",
            "numa_node",
            "chunk_numel",
            "lock_memory",
        }
        if self.device == "cpu" and given:
            raise ValueError(
                f"{', '.join(sorted(given))} configures device nvme; remove it or set the device"
            )
        return self


class OffloadParamConfig(_Section):
    """Shards of parameters in host memory, beside their optimizer state, or on NVMe, in files beside those of the
    optimizer (paths, budget and all else are ``offload_optimizer``'s); sent to the device before each gather."""

    device: Literal["cpu", "nvme"] = "cpu"


class Config(_Section):
    """Everything that ``zerobench.initialize`` can be told; docs/reference/configuration.md explains each key.

    ``precision`` sets the dtype of parameters, of compute and of reductions at once; ``param_dtype`` and
    ``reduce_dtype`` override it by role, and ``accumulate_dtype`` is that of sums of micro-batches. Master weights and
    Adam states are always float32. ``units`` is "auto" (repeated blocks found by structure) or a list of module class
    names. Ranks come from the environment (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE as torchrun sets them) unless
    given here.
    """

    stage: Literal[0, 1, 2, 3] = 0
    precision: Precision = "fp32"
    param_dtype: DtypeName | None = None
    reduce_dtype: DtypeName | None = None
    accumulate_dtype: DtypeName | None = Field(
        None,
        description="dtype in which gradients of several micro-batches are summed: float32 or that of reduce_dtype; "
        f"null is float32 for windows of more than {LONG_WINDOW} micro-batches, else reduce_dtype",
    )
    cast_forward_inputs: bool = True
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    gradient_clipping: float | None = Field(
        None, gt=0, description="maximum global gradient norm; null is off"
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    optimizer_in_backward: bool = Field(
        False,
        description="update each unit as soon as backward has reduced its gradients, with the learning rate that "
        "backward began with; needs no clipping and no loss scale, and an error in such a backward ends the engine",
    )
    loss_scale: LossScaleConfig = LossScaleConfig()
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where to train; auto is where the model's parameters are"
    )
    reshard_after_forward: bool = Field(
        True, description="false keeps the parameters of stage 3 gathered between forward and backward"
    )
    keep_root_bytes: int = Field(
        2**29,
        ge=0,
        description="up to this size the root unit of stage 3 (what belongs to no block) stays gathered between "
        "forward and backward",
    )
    keep_parameter_shards: bool | None = Field(
        None,
        description="true keeps low-precision shards of stage 3 beside the fp32 masters, instead of rounding them "
        "before each gather: less work, more memory; null does so with the peer communicator, whose gathers in "
        "backward are then copies alone, with store_param_remainders, which are of no use without them, and with "
        "offload_optimizer, whose masters on the host are no source for a gather (offload_param keeps none on the "
        "device)",
    )
    store_param_remainders: bool | None = Field(
        None,
        description="true keeps of the fp32 masters of bf16 parameters only the 16 bits that those lack, 2 bytes a "
        "parameter instead of 4, with the same results to the last bit; for optimizer state on the device, and at "
        "stage 3 with kept shards of parameters; null does so on GPUs wherever it can",
    )
    push_gradient_bytes: int = Field(
        2**23,
        ge=0,
        description="at stages 1 to 3 over the peer communicator, units that consist mostly of gradients of at least "
        "this size copy them straight to the ranks that reduce them; others pack theirs for those to read",
    )
    offload_optimizer: OffloadOptimizerConfig | None = Field(
        None, description="optimizer state on the host, at stages 1 to 3"
    )
    offload_param: OffloadParamConfig | None = Field(
        None, description="shards of parameters on the host or on NVMe, at stage 3 with offload_optimizer"
    )
    units: Literal["auto"] | list[str] = "auto"
    prefetch_bytes: int | None = Field(
        default=None,
        ge=0,
        description="unsharded bytes gathered ahead of use at stage 3; null is one largest unit",
    )
    overlap_updates: bool = Field(
        True,
        description="true lets updates run during the next forward; false makes the caller's stream wait for them at "
        "the end of a step, so that parameters can be read right after it",
    )
    communicator: Literal["auto", "shm", "c10d", "nccl", "peer"] = Field(
        "auto",
        description="what moves data between ranks: shm or c10d (gloo) on CPU, nccl or peer (copy engines, GPUs of one "
        "host) on GPUs; auto is shm on one host and c10d on several, on GPUs peer where that can be used, else nccl; "
        "where peer is named ranks may share a GPU",
    )
    rendezvous: str | None = Field(
        None, min_length=1, description="unique text by which ranks of one host find each other"
    )
    timeout_s: float = Field(default=300.0, ge=MIN_TIMEOUT_S, le=MAX_TIMEOUT_S)
    threads: int | None = Field(
        None, ge=1, description="optimizer threads of this rank; null is its share of CPUs"
    )
    pin_threads: bool = True
    cpus: list[int] | None = Field(
        None,
        min_length=1,
        description="CPUs of this rank's threads; null is its share of the process's, on hosts with several NUMA nodes "
        "by the node of its GPU",
    )
    rank: int | None = Field(default=None, ge=0)
    world_size: int | None = Field(default=None, ge=1)
    local_rank: int | None = Field(default=None, ge=0)
    local_world_size: int | None = Field(default=None, ge=1)

    @field_validator("units", mode="before")
    @classmethod
    def _units_are_names(cls, value: Any) -> Any:
        is_names = isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)
        if value != "auto" and not is_names:
            raise ValueError("give auto, or a list of modules' class names")
        return value

    @model_validator(mode="after")
    def _ranks_fit(self) -> Config:
        for rank, world, name in (
            (self.rank, self.world_size, "rank"),
            (self.local_rank, self.local_world_size, "local_rank"),
        ):
            if rank is not None and world is not None and rank >= world:
                raise ValueError(f"{name} {rank} is not below its world size {world}")
        return self

    @model_validator(mode="after")
    def _offload_fits(self) -> Config:
        if self.offload_optimizer is not None and self.stage == 0:
            raise ValueError(
                "stage 0 keeps the whole optimizer state on every rank; use stage 1, 2 or 3 with offload_optimizer"
            )
        if self.offload_param is not None:
            if self.stage != 3:
                raise ValueError(
                    f"offload_param is for stage 3, which shards parameters; stage {self.stage} keeps them whole"
                )
            if self.offload_optimizer is None:
                raise ValueError("offload_param needs offload_optimizer, too")
            if self.offload_param.device == "nvme" and self.offload_optimizer.device != "nvme":
                raise ValueError(
                    "offload_param on nvme puts files next to those of the optimizer; set offload_optimizer's device "
                    "to nvme, too"
                )
            if self.offload_optimizer.ratio != 1.0 or self.keep_parameter_shards:
                raise ValueError(
                    "offload_param moves all shards of parameters; remove keep_parameter_shards and "
                    "offload_optimizer.ratio"
                )
        elif self.offload_optimizer is not None and self.stage == 3 and self.keep_parameter_shards is False:
            raise ValueError(
                "offload_optimizer keeps parameters' shards on the device, since masters on the host are no source for "
                "a gather; remove keep_parameter_shards, or give offload_param"
            )
        return self

    @model_validator(mode="after")
    def _sums_keep_what_is_reduced(self) -> Config:
        reduce = self.effective_dtypes()["reduce"]
        if self.accumulate_dtype not in (None, "float32", reduce):
            raise ValueError(
                f"accumulate_dtype {self.accumulate_dtype} would round gradients that are reduced in {reduce}: give "
                f"{'float32' if reduce == 'float32' else f'float32 or {reduce}'}, or remove accumulate_dtype"
            )
        return self

    @model_validator(mode="after")
    def _remainders_have_parameters(self) -> Config:
        if self.store_param_remainders and (reason := self.why_no_param_remainders()) is not None:
            raise ValueError(reason)
        return self

    @model_validator(mode="after")
    def _optimizer_in_backward_needs_no_norm(self) -> Config:
        if self.optimizer_in_backward and self.gradient_clipping is not None:
            raise ValueError(
                "optimizer_in_backward updates before the gradient norm is known: remove gradient_clipping"
            )
        if self.optimizer_in_backward and self.scales_loss():
            raise ValueError(
                "optimizer_in_backward updates before an overflow is known: use bf16 or fp32 instead of fp16"
            )
        return self

    def why_no_param_remainders(self) -> str | None:
        """The sentence that refuses ``store_param_remainders: true`` beside the other settings, or None."""
        if (param := self.effective_dtypes()["param"]) != "bfloat16":
            return (
                f"store_param_remainders is for masters of bfloat16 parameters, and these are {param}; remove it or "
                'set precision to "bf16"'
            )
        if self.offload_optimizer is not None:
            return (
                "store_param_remainders keeps masters next to parameters on the device; remove offload_optimizer or "
                "store_param_remainders"
            )
        if self.stage == 3 and self.keep_parameter_shards is False:
            return (
                "store_param_remainders needs the shards of parameters that keep_parameter_shards: false does without; "
                "remove one of the two"
            )
        return None

    def stores_param_remainders(self, *, on_gpu: bool) -> bool:
        """Return the effective ``store_param_remainders``. A GPU's update waits for memory alone, so less of it is
        faster; a CPU's waits for its arithmetic, too."""
        if self.store_param_remainders is not None:
            return self.store_param_remainders
        return on_gpu and self.why_no_param_remainders() is None

    def effective_dtypes(self) -> dict[str, str]:
        """Dtypes by role: param, compute, reduce, accumulate, master, state."""
        param = self.param_dtype or DTYPE_OF_PRECISION[self.precision]
        reduce = self.reduce_dtype or DTYPE_OF_PRECISION[self.precision]
        return {
            "param": param,
            "compute": param,
            "reduce": reduce,
            "accumulate": self._dtype_of_sums(reduce),
            "master": "float32",
            "state": "float32",
        }

    def _dtype_of_sums(self, reduce: str) -> str:
        """Return the dtype of sums of micro-batches. A window of one has nothing to sum."""
        if self.gradient_accumulation_steps == 1:
            return reduce
        return self.accumulate_dtype or (
            "float32" if self.gradient_accumulation_steps > LONG_WINDOW else reduce
        )

    def scales_loss(self) -> bool:
        """Return whether gradients are float16 anywhere, so that the loss needs a scale."""
        dtypes = self.effective_dtypes()
        return "float16" in (dtypes["param"], dtypes["reduce"])


def parse(values: Mapping[str, Any] | Config | str | Path | None) -> Config:
    """A Config from a mapping, a JSON file, a Config, or None (defaults). Raises ConfigError in one sentence."""
    if isinstance(values, Config):
        return values
    if isinstance(values, (str, Path)):
        return load(values)
    if not isinstance(values, (Mapping, NoneType)):
        raise ConfigError(
            f"a configuration is a mapping, the path of a JSON file or None, got {type(values).__name__}"
        )
    try:
        return Config.model_validate(dict(values or {}))
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from None


def load(path: str | Path) -> Config:
    """Read a JSON configuration file. Raises ConfigError naming the file."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold one JSON object, not a {type(values).__name__}")
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_sentence(error)}") from None


def read_json(path: str | Path, *, may_repeat_keys: bool = False) -> Any:
    """Return the contents of a JSON file; of keys that may repeat, the last one counts. Raises ConfigError naming the
    file."""

    def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, count in Counter(key for key, _ in pairs).items():
            if count > 1:
                raise ConfigError(f"{path} has the key '{key}' more than once: give it once")
        return dict(pairs)

    make_object = dict if may_repeat_keys else each_key_once
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=make_object)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        reason = f"byte {error.start + 1} is not UTF-8"
    except json.JSONDecodeError as error:
        reason = f"{error.msg} in line {error.lineno}"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError:  # of int(), which takes no more
        reason = "a number has too many digits"
    raise ConfigError(f"{path} is not JSON: {reason}")


def _sentence(error: ValidationError) -> str:
    first, *_ = errors = error.errors()
    for mark in DEEPSPEED_MARKS:
        if any(each["loc"] == (mark,) for each in errors):
            page = "docs/reference/configuration.md"
            return f"'{mark}' is a key of DeepSpeed's files; {page} has the keys of zerobench's"
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key '{key}' in the configuration; {_hint(first['loc'])}"
    message = first["msg"].removeprefix("Value error, ")
    if key and message.startswith(_EXPECTED):
        return f"'{key}' is {reprlib.repr(first['input'])}: it must be {message.removeprefix(_EXPECTED)}"
    return f"'{key}': {message}" if key else message


def _hint(location: tuple[int | str, ...]) -> str:
    *section, key = map(str, location)
    known = _keys_at(location[:-1])
    if hint := did_you_mean(key, known):
        return hint.rstrip()
    deeper = [] if section else [f"{name}.{key}" for name in known if key in _keys_at((name,))]
    return f"did you mean '{deeper[0]}'?" if deeper else f"known keys are {', '.join(known)}"


def _keys_at(location: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Config
    for part in location:
        annotation = model.model_fields[str(part)].annotation
        sections = [
            kind
            for kind in (annotation, *get_args(annotation))
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        if not sections:
            return []
        model = sections[0]
    return list(model.model_fields)
