"""Cases of training, on models of every awkward kind (small_models.py), and plain PyTorch to hold engines against.

A case trains on ``batch(step, rank, micro)``; its model's forward takes that and returns the mean loss.
"""

from __future__ import annotations

import copy
import hashlib
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from small_models import (
    Aside,
    Bare,
    Carrying,
    Chain,
    ChangedViews,
    ExpertBlock,
    Halves,
    Handing,
    Mapped,
    NormBlock,
    Odd,
    Prompted,
    RecursiveBlock,
    Stems,
    Structured,
    Tied,
    Twice,
    Unused,
    frozen_parts,
    hooked,
    lora,
)
from torch import nn

Batch = Mapping[str, Any]


def points(step: int, rank: int, micro: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    x = torch.randn(6, 5, generator=generator)
    return {"x": x, "y": torch.stack([x.sum(1), x[:, 0] * x[:, 1], x[:, 2].abs()], dim=1)}


def ids(step: int, rank: int, micro: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return {"ids": torch.randint(0, 17, (3, 8), generator=generator)}


def ordered(order: Callable[[int, int], list[int]]) -> Callable[[int, int, int], dict[str, Any]]:
    return lambda step, rank, micro=0: points(step, rank, micro) | {"order": order(step, rank)}


def by_kind(model: nn.Module) -> list[dict[str, Any]]:
    """Param groups with hyperparameters of their own, interleaved within every unit."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for name, p in model.named_parameters() if p.dim() == 1 and name.endswith("bias")]
    rest = [p for name, p in model.named_parameters() if p.dim() <= 1 and not name.endswith("bias")]
    return [
        {"params": rest, "weight_decay": 0.0, "eps": 1e-6},
        {"params": weights, "lr": 5e-3, "betas": (0.8, 0.95), "weight_decay": 0.1},
        {"params": biases, "lr": 2e-3, "weight_decay": 0.0, "betas": (0.7, 0.9)},
    ]


def one_group(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())}]


@dataclass(frozen=True)
class Case:
    """A model, its data, and the settings to train it with."""

    model: Callable[[], nn.Module]
    batch: Callable[[int, int, int], dict[str, Any]] = lambda step, rank, micro=0: points(step, rank, micro)
    groups: Callable[[nn.Module], list[dict[str, Any]]] = one_group
    config: Mapping[str, Any] = field(default_factory=dict)
    schedule: bool = False
    steps: int = 5
    # A step's forwards (F), evaluations (E), and backwards of the oldest pending loss (B) or of all together (S).
    plan: str = "FB"


# Optimizer state on NVMe: many chunks of these small shards, few frames.
SWAP = {
    "device": "nvme",
    "chunk_numel": 128,
    "io_block_bytes": 4096,
    "io_depth": 1,
    "io_allow_fallback": True,
}
LR = 1e-2
CASES: dict[str, Case] = {
    "blocks": Case(Chain),
    "clip": Case(Chain, config={"gradient_clipping": 0.05}),
    "adam with L2": Case(Chain, config={"optimizer": {"type": "adam", "lr": LR, "weight_decay": 0.05}}),
    "param groups and schedule": Case(Chain, groups=by_kind, schedule=True),
    "odd sizes": Case(Odd, groups=by_kind),
    "unused": Case(Unused),
    "frozen": Case(frozen_parts),
    "lora": Case(lambda: lora(merged=False)),
    "lora behind a frozen inlet": Case(lambda: lora(merged=False, frozen_inlet=True)),
    "lora called by vmap": Case(Mapped),
    "merged lora": Case(lambda: lora(merged=True)),
    "lora used twice": Case(lambda: lora(merged=False), ordered(lambda step, rank: [0, 1, 0, 2, 1])),
    "lora non-reentrant": Case(lambda: lora(merged=True, reentrant=False)),
    "lora reentrant": Case(lambda: lora(merged=False, reentrant=True)),
    "a prompt for frozen blocks": Case(
        Prompted, plan="FFBB", config={"gradient_accumulation_steps": 2, "keep_root_bytes": 0}
    ),
    "tied": Case(Tied, ids),
    "tied as a plain tensor": Case(lambda: Tied(plain=True), ids, config={"units": ["Block"]}),
    "tied with a checkpointed head": Case(lambda: Tied(checkpoint_head=True), ids),
    "used twice": Case(Chain, ordered(lambda step, rank: [0, 1, 0, 2, 1])),
    "skipped in steps": Case(Chain, ordered(lambda step, rank: [0, 2] if step % 2 else [0, 1, 2])),
    "skipped in the first step": Case(Chain, ordered(lambda step, rank: [1] if step == 0 else [0, 1, 2])),
    "skipped on one rank": Case(
        lambda: Chain(4), ordered(lambda step, rank: [0, 3] if step % 2 == rank else [0, 1, 2, 3]), steps=6
    ),
    "order changes": Case(Chain, ordered(lambda step, rank: [2, 0, 1] if step > 1 else [0, 1, 2]), steps=6),
    "order differs": Case(
        lambda: Chain(4),
        ordered(lambda step, rank: [(i * (1 if rank else 3) + step) % 4 for i in range(4)]),
        steps=6,
    ),
    "used differently": Case(
        Chain, ordered(lambda step, rank: [[0, 1, 2], [2, 2, 1], [1], []][(step + rank) % 4]), steps=6
    ),
    "experts": Case(lambda: Chain(3, block=ExpertBlock), steps=8),
    "stems that some steps use": Case(Stems, steps=8),
    "halves that some steps leave out": Case(
        Halves,
        ordered(lambda step, rank: [0, 1, 2] if step == 0 else [0, 11 if (step + rank) % 2 else 1, 12]),
        steps=6,
    ),
    "stems that some steps use, as units": Case(Stems, config={"units": ["Block", "Stem"]}, steps=8),
    "batch norm": Case(lambda: Chain(3, block=NormBlock)),
    "reentrant": Case(lambda: Chain(reentrant=True)),
    "non-reentrant": Case(lambda: Chain(reentrant=False)),
    "reentrant twice": Case(lambda: Chain(reentrant=True), ordered(lambda step, rank: [0, 1, 0, 2])),
    "non-reentrant twice": Case(lambda: Chain(reentrant=False), ordered(lambda step, rank: [0, 1, 0, 2])),
    "checkpoints inside a unit": Case(lambda: Chain(3, block=Twice)),
    "structured outputs": Case(Structured),
    "tensors handed on": Case(Handing),
    "inputs changed in place": Case(lambda: Handing(in_place=True)),
    "handed on in tuples": Case(lambda: Carrying()),
    "handed on in objects": Case(lambda: Carrying(by_object=True)),
    "losses kept aside by gathered blocks": Case(Aside, config={"reshard_after_forward": False}),
    "losses kept aside by one unit": Case(Aside, config={"units": []}),
    "views changed in place": Case(ChangedViews),
    "blocks that call themselves": Case(lambda: Carrying(block=RecursiveBlock)),
    "hooks that read parameters": Case(hooked),
    "only a root": Case(Bare),
    "nested units": Case(Chain, config={"units": ["Block", "Linear"]}),
    "no parameter left for the root": Case(Chain, config={"units": ["Linear", "LayerNorm"]}),
    "no prefetch": Case(Chain, config={"prefetch_bytes": 0}),
    "prefetch everything": Case(Chain, config={"prefetch_bytes": 1 << 30}),
    "evaluation in between": Case(Chain, plan="EFEB"),
    "two forwards, one backward": Case(Chain, plan="FFS"),
    "two forwards, two backwards": Case(Chain, plan="FFBB", config={"gradient_accumulation_steps": 2}),
    "forward in advance": Case(Chain, plan="FFBFBB", config={"gradient_accumulation_steps": 3}),
    "bf16": Case(  # masters are whole on GPUs, too
        Chain, config={"precision": "bf16", "gradient_clipping": 1.0, "store_param_remainders": False}
    ),
    "bf16 remainders": Case(
        Chain, config={"precision": "bf16", "gradient_clipping": 1.0, "store_param_remainders": True}
    ),
    "20 steps": Case(
        Chain,
        plan="FBFB",
        steps=20,
        schedule=True,
        config={"precision": "bf16", "gradient_clipping": 0.5, "gradient_accumulation_steps": 2},
    ),
    "bf16 batch norm": Case(lambda: Chain(3, block=NormBlock), config={"precision": "bf16"}),
    "bf16 reduced in fp32": Case(Chain, config={"precision": "bf16", "reduce_dtype": "float32"}),
    "bf16 accumulated in fp32": Case(
        Chain,
        plan="FBFBFB",
        config={"precision": "bf16", "gradient_accumulation_steps": 3, "accumulate_dtype": "float32"},
    ),
    "bf16 lora": Case(lambda: lora(merged=False), config={"precision": "bf16"}),
    "fp16": Case(Chain, config={"precision": "fp16", "loss_scale": {"initial_scale": 2.0**20}}, steps=8),
}


def make(case: Case) -> nn.Module:
    torch.manual_seed(7)
    return case.model()


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    hashed = hashlib.sha256()
    for name in sorted(tensors):
        hashed.update(
            name.encode()
            + tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return hashed.hexdigest()[:16]


def optimizer_config(case: Case) -> dict[str, Any]:
    return {"optimizer": {"lr": LR, "weight_decay": 0.01}} | dict(case.config)


def decay(step: int) -> float:
    return 0.8**step


def train_engine(case: Case, rank: Any, *, stage: int, device: str = "cpu", **config: Any) -> dict[str, Any]:
    """Train at a stage and return everything that must be the same at all stages."""
    import zerobench

    model = make(case).to(device)
    settings = rank.config(stage=stage, **(optimizer_config(case) | config))
    engine = zerobench.initialize(model, config=settings, model_parameters=case.groups(model))
    schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, decay) if case.schedule else None
    record: dict[str, Any] = {"losses": [], "norms": [], "scales": [], "applied": []}
    for step in range(case.steps):
        run_plan(engine, case, step, rank.rank, record["losses"], device)
        record["norms"].append(engine.get_global_grad_norm())
        record["scales"].append(engine.loss_scale)
        record["applied"].append(engine.was_step_applied())
        if schedule is not None:
            schedule.step()
    record |= state_of(engine)
    record["awaited_early"] = [unit["name"] for unit in engine.units() if unit["is_awaited_early"]]
    engine.close()
    assert not any(parameter._backward_hooks for parameter in model.parameters()), (
        "forwards leave hooks behind"
    )
    return record


def or_error(run: Callable[..., dict[Any, Any]], *arguments: Any, **named: Any) -> dict[Any, Any]:
    """Return the run's result, or {"error": traceback}, so that this process can go on."""
    try:
        return run(*arguments, **named)
    except Exception:
        return {"error": traceback.format_exc()}


def train_or_error(case: Case, rank: Any, **arguments: Any) -> dict[str, Any]:
    return or_error(train_engine, case, rank, **arguments)


def train_with_and_without(
    rank: Any, option: str, names: Iterable[str]
) -> dict[tuple[str, int, bool], dict[str, Any]]:
    """Each case at every stage, with an option of the configuration off and on."""
    return {
        (name, stage, value): train_or_error(CASES[name], rank, stage=stage, **{option: value})
        for name in names
        for stage in range(4)
        for value in (False, True)
    }


def at_every_stage(
    rank: Any, run: Callable[[Any, str, int], dict[str, Any]], names: Iterable[str]
) -> dict[tuple[str, int], dict[str, Any]]:
    """``run(rank, name, stage)`` of each, at a meeting point of its own."""
    results = {}
    for name in names:
        for stage in range(4):
            place = replace(rank, meeting_point=f"{rank.meeting_point}-{name.replace('/', '-')}-{stage}")
            results[name, stage] = or_error(run, place, name, stage)
    return results


def on_device(batch: Batch, device: str) -> dict[str, Any]:
    return {
        key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()
    }


def run_plan(engine: Any, case: Case, step: int, rank: int, losses: list[float], device: str = "cpu") -> None:
    pending: list[torch.Tensor] = []
    micro = 0
    for action in case.plan:
        if action == "E":
            engine.eval()
            with torch.no_grad():
                losses.append(engine(**on_device(case.batch(step + 77, rank, 0), device)).item())
            engine.train()
        elif action == "F":
            pending.append(engine(**on_device(case.batch(step, rank, micro), device)))
            losses.append(pending[-1].item())
            micro += 1
        else:
            engine.backward(pending.pop(0) if action == "B" else sum(pending))
            engine.step()


def state_of(engine: Any) -> dict[str, Any]:
    parameters = engine.full_parameters()
    moments = {kind: engine.full_optimizer_state(kind) for kind in ("exp_avg", "exp_avg_sq")}
    served = engine.state_dict()
    names = {name for name, _ in engine.module.named_parameters()}
    return {
        "parameters": parameters,
        "exp_avg": moments["exp_avg"],
        "digest": digest(parameters) + digest(moments["exp_avg"]) + digest(moments["exp_avg_sq"]),
        "served": digest({name: value for name, value in served.items() if name in names}),
    }


def train_plainly(case: Case, *, world_size: int) -> dict[str, Any]:
    """The same in one process: the mean over ranks and micro-batches of the same losses, torch's own optimizer."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
        case.config.get("precision", "fp32"), torch.float32
    )
    masters = make(case)
    model = copy.deepcopy(masters).to(dtype)
    groups = case.groups(masters)
    settings = {"lr": LR, "weight_decay": 0.01} | dict(case.config.get("optimizer", {}))
    kind = torch.optim.Adam if settings.pop("type", "adamw") == "adam" else torch.optim.AdamW
    kept = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]
    optimizer = kind(kept, **settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay) if case.schedule else None
    pairs = [
        (master, low)
        for master, low in zip(masters.parameters(), model.parameters(), strict=True)
        if master.requires_grad
    ]
    statistics = [{n: b.clone() for n, b in model.named_buffers()} for _ in range(world_size)]
    record: dict[str, Any] = {"losses": [[] for _ in range(world_size)], "norms": []}
    for step in range(case.steps):
        optimizer.zero_grad()
        for rank in range(world_size):
            load_buffers(model, statistics[rank])
            plain_rank(model, case, step, rank, pairs, record["losses"][rank], world_size)
            statistics[rank] = {n: b.clone() for n, b in model.named_buffers()}
        for master, _ in pairs:
            master.grad = torch.zeros_like(master) if master.grad is None else master.grad
        limit = case.config.get("gradient_clipping")
        norm = nn.utils.clip_grad_norm_([m for m, _ in pairs], limit if limit is not None else float("inf"))
        record["norms"].append(float(norm))
        optimizer.step()
        if schedule is not None:
            schedule.step()
        with torch.no_grad():
            for master, low in pairs:
                low.copy_(master)
    record["parameters"] = {name: p.detach() for name, p in masters.named_parameters()}
    record["exp_avg"] = {
        name: optimizer.state[p]["exp_avg"] for name, p in masters.named_parameters() if p.requires_grad
    }
    return record


def plain_rank(
    model: nn.Module,
    case: Case,
    step: int,
    rank: int,
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    losses: list[float],
    world_size: int,
) -> None:
    dtype = next(model.parameters()).dtype
    backwards = sum(action in "BS" for action in case.plan)
    pending: list[torch.Tensor] = []
    micro = 0
    for action in case.plan:
        if action == "E":
            model.eval()
            with torch.no_grad():
                losses.append(model(**cast(case.batch(step + 77, rank, 0), dtype)).item())
            model.train()
        elif action == "F":
            pending.append(model(**cast(case.batch(step, rank, micro), dtype)))
            losses.append(pending[-1].item())
            micro += 1
        else:
            (pending.pop(0) if action == "B" else sum(pending)).backward()
            for master, low in pairs:
                if low.grad is not None:
                    share = low.grad.float() / (backwards * world_size)
                    master.grad = share if master.grad is None else master.grad + share
                    low.grad = None


def cast(batch: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        key: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in batch.items()
    }


def load_buffers(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def relative(
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    origin: Mapping[str, torch.Tensor] | None = None,
) -> float:
    """L2 of the difference over L2 of the expected (less its origin), over all tensors together."""
    assert found.keys() == expected.keys()
    difference = sum(float((found[n].double() - expected[n].double()).square().sum()) for n in expected)
    size = sum(
        float((expected[n].double() - (0 if origin is None else origin[n].double())).square().sum())
        for n in expected
    )
    return (difference / size) ** 0.5


def assert_same_end(found: dict, expected: dict, *, stage: int) -> None:
    """Two trainings of one case at one stage, by `train_engine` or an "error" of it, ended with the same bits."""
    assert "error" not in expected, expected["error"]
    assert "error" not in found, f"stage {stage}: {found['error']}"
    for key in ("digest", "served", "norms", "scales", "applied", "losses"):
        assert repr(found[key]) == repr(expected[key]), (stage, key)
