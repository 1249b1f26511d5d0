"""Parameters that are not there (stage 3), explicit gathers, and full states."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import ranks
import small_models
import torch
import zoo

import zerobench
from zerobench import errors

STAGES = (0, 1, 2, 3)
NAME = "blocks.1.up.weight"


def start(rank, stage, *, case=zoo.CASES["blocks"], **config):
    model = zoo.make(case)
    return zerobench.initialize(
        model, config=rank.config(stage=stage, **(zoo.optimizer_config(case) | config))
    )


def one_step(engine, rank, step, case=zoo.CASES["blocks"]):
    zoo.run_plan(engine, case, step, rank.rank, [])


def save(value):
    torch.save(value, io.BytesIO())


TOUCHES = {
    "print": str,
    "sum": torch.sum,
    "add": lambda p: p + 1,
    "multiply in place": lambda p: p.data.mul_(2),
    "clone": torch.clone,
    "copy_": lambda p: p.data.copy_(torch.zeros(p.shape)),
    "index": lambda p: p[0, 0].abs(),
    "item": lambda p: p[0, 0].item(),
    "tolist": torch.Tensor.tolist,
    "numpy": lambda p: p.detach().numpy()[0],
    "view": lambda p: p.view(-1).norm(),
    "transpose": lambda p: p.t() @ torch.ones(p.shape[0]),
    "to": lambda p: p.to(torch.bfloat16),
    "data_ptr": torch.Tensor.data_ptr,
    "storage": lambda p: p.untyped_storage()[0],
    "save": save,
    "deepcopy": copy.deepcopy,
    "linear": lambda p: torch.nn.functional.linear(torch.ones(1, p.shape[1]), p),
    "equal": lambda p: torch.equal(p, torch.zeros(p.shape)),
    "isfinite": lambda p: bool(torch.isfinite(p).all()),
}


def touching(rank, stage, touch):
    """Touch a parameter: if it is sharded, an error names it and nothing crashes; otherwise nothing happens."""
    engine = start(rank, stage)
    one_step(engine, rank, 0)
    parameter = engine.module.get_parameter(NAME)
    if stage == 3:
        with pytest.raises(RuntimeError, match=rf"'{NAME}' is sharded .*engine\.gather"):
            TOUCHES[touch](parameter)
        with pytest.raises(RuntimeError, match="is sharded"):
            save(engine.module.state_dict())
    is_lost = stage == 3 and touch in ("multiply in place", "copy_")
    told = pytest.raises(errors.StateError, match="modifier_rank") if is_lost else contextlib.nullcontext()
    with told, engine.gather():
        TOUCHES[touch](parameter)
    engine.close()


def metadata(rank, stage):
    engine = start(rank, stage)
    parameter = engine.module.get_parameter(NAME)
    assert (
        parameter.shape == (2 * small_models.WIDTH, small_models.WIDTH)
        and parameter.numel() == 2 * small_models.WIDTH**2
    )
    assert parameter.dtype == torch.float32 and parameter.requires_grad and parameter.is_contiguous()
    assert sum(p.numel() for p in engine.parameters()) == sum(
        p.numel() for p in zoo.make(zoo.CASES["blocks"]).parameters()
    )
    engine.close()


def reading(rank, stage, precision):
    engine = start(rank, stage, precision=precision)
    one_step(engine, rank, 0)
    masters = engine.full_parameters()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    with engine.gather():
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(parameter, masters[name].to(dtype)), name
    # One module, one parameter, and one inside the other.
    parameter = engine.module.get_parameter(NAME)
    with engine.gather(engine.module.blocks[1]), engine.gather([parameter]):
        assert torch.equal(parameter, masters[NAME].to(dtype))
        with engine.gather():
            assert torch.equal(engine.module.inlet.weight, masters["inlet.weight"].to(dtype))
        assert torch.equal(parameter, masters[NAME].to(dtype))
    served = engine.state_dict()
    assert list(served) == list(engine.module.state_dict())
    assert all(torch.equal(served[name], masters[name].to(dtype)) for name in masters)
    if stage == 3:
        with pytest.raises(RuntimeError, match="is sharded"):
            parameter.sum()
    engine.close()


def writing(rank, stage, precision):
    """One rank's values become everybody's; masters keep their bits where the value did not change."""
    engine = start(rank, stage, precision=precision)
    for step in range(2):
        one_step(engine, rank, step)
    before = engine.full_parameters()
    with engine.gather(engine.module.blocks[1], modifier_rank=1), torch.no_grad():
        if rank.rank == 1:
            engine.module.get_parameter(NAME)[3:5] = 0.25
        else:
            engine.module.get_parameter(NAME).fill_(99.0)  # lost
    after = engine.full_parameters()
    expected = before[NAME].clone()
    expected[3:5] = 0.25
    assert torch.equal(after[NAME], expected)
    assert all(torch.equal(after[name], before[name]) for name in before if name != NAME)
    with engine.gather():
        assert torch.equal(
            engine.module.get_parameter(NAME).float(), expected.to(engine.module.inlet.weight.dtype).float()
        )
    moments = engine.full_optimizer_state("exp_avg")[NAME]
    one_step(engine, rank, 2)
    assert not torch.equal(engine.full_optimizer_state("exp_avg")[NAME], moments)
    assert not torch.equal(engine.full_parameters()[NAME], expected)
    engine.close()


def writing_frozen(rank, stage):
    case = zoo.CASES["frozen"]
    engine = start(rank, stage, case=case, precision="bf16")
    name = "blocks.1.down.weight"
    with engine.gather(modifier_rank=0), torch.no_grad():
        engine.module.get_parameter(name).fill_(0.5 if rank.rank == 0 else 7.0)
    assert bool((engine.full_parameters()[name] == 0.5).all())
    one_step(engine, rank, 0, case=case)
    assert bool((engine.full_parameters()[name] == 0.5).all())
    engine.close()


def exception_inside(rank, stage):
    engine = start(rank, stage)
    with pytest.raises(ZeroDivisionError), engine.gather(modifier_rank=0):
        raise ZeroDivisionError
    one_step(engine, rank, 0)
    engine.close()


def what_is_not_legal(rank, stage):
    engine = start(rank, stage)
    engine.backward(engine(**zoo.points(0, rank.rank)))
    with engine.gather(), pytest.raises(errors.StateError, match="leave the block first"):
        engine.optimizer.step()
    engine.step()
    with (
        pytest.raises(errors.ConfigError, match="modifier_rank 2 is not below the world size 2"),
        engine.gather(modifier_rank=2),
    ):
        pass
    for what, words in (
        ([torch.nn.Parameter(torch.ones(3))], r"a parameter of shape \(3,\) that the model does not have"),
        (["blocks.0"], "'blocks.0' that the model does not have"),
        ("blocks.0", r"not 'blocks.0'.*engine\.module\.get_parameter"),
    ):
        with pytest.raises(errors.ConfigError, match=words), engine.gather(what):
            pass
    handle = engine.module.blocks[0].register_forward_pre_hook(lambda *_: engine.gather().__enter__())
    with pytest.raises(errors.StateError, match="cannot be called inside a training forward"):
        engine(**zoo.points(0, rank.rank))
    handle.remove()
    engine.close()


def forward_inside(rank, stage):
    """An evaluation of values that are being changed sees them."""
    engine = start(rank, stage)
    for step in range(2):
        one_step(engine, rank, step)
    with torch.no_grad(), engine.gather(modifier_rank=0):
        before = engine(**zoo.points(0, 0)).item()
        engine.module.outlet.weight.zero_()
        engine.module.outlet.bias.zero_()
        changed = engine(**zoo.points(0, 0)).item()
    assert changed != before
    with torch.no_grad():
        assert engine(**zoo.points(0, 0)).item() == changed
    one_step(engine, rank, 2)
    engine.close()


def ranks_start_alike(rank, stage):
    """Rank 0's values and buffers become everybody's, whatever the others had."""
    torch.manual_seed(rank.rank)
    model = small_models.Chain(2, block=small_models.NormBlock)
    model.register_buffer("table", torch.randn(4, 6).t())
    for block in model.blocks:
        block.norm.running_mean.normal_()
    expected = None
    torch.manual_seed(0)
    reference = small_models.Chain(2, block=small_models.NormBlock)
    expected = reference.state_dict()
    table = torch.randn(4, 6).t()
    for block in reference.blocks:
        block.norm.running_mean.normal_()
    engine = zerobench.initialize(model, config=rank.config(stage=stage))
    served = engine.state_dict()
    assert torch.equal(served.pop("table"), table)
    assert served.keys() == expected.keys()
    assert all(torch.equal(served[name], expected[name]) for name in expected)
    engine.close()


CHECKS = [
    *((touching, (touch,)) for touch in TOUCHES),
    (metadata, ()),
    (reading, ("fp32",)),
    (reading, ("bf16",)),
    (writing, ("fp32",)),
    (writing, ("bf16",)),
    (writing_frozen, ()),
    (exception_inside, ()),
    (what_is_not_legal, ()),
    (forward_inside, ()),
    (ranks_start_alike, ()),
]
RUNS = [(check, (stage, *arguments)) for stage in STAGES for check, arguments in CHECKS]
LABELS = [f"{check.__name__}-{'-'.join(map(str, arguments))}" for check, arguments in RUNS]


@pytest.fixture(scope="module")
def outcomes():
    return ranks.run(ranks.run_checks, RUNS)


@pytest.mark.parametrize("index", range(len(RUNS)), ids=LABELS)
def test_parameters(outcomes, index):
    for rank, errors_of_rank in enumerate(outcomes):
        assert errors_of_rank[index] is None, f"rank {rank}: {errors_of_rank[index]}"
