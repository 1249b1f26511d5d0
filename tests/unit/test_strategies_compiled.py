"""torch.compile in strategies: the same training, and a count of the graphs that ran."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from builders import SMALL, make_settings, tiny_model
from test_strategies import make_batches

from zerobench import models, strategies
from zerobench.errors import ConfigError
from zerobench.strategies.compiled import Compiler, cache_in, repeated_blocks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # the compiler's own code warns
    pytest.mark.usefixtures("own_process_group"),
]

factory = partial(tiny_model, **SMALL | {"num_layers": 2})


def trained(name: str, **fields):
    strategy = strategies.get(name)(make_settings(rendezvous=f"{name}-{os.getpid()}", **fields))
    strategy.build(factory)
    for batch in make_batches(2):
        strategy.step([batch])
    strategy.reset_counters()
    result = strategy.step(make_batches(1), norm=True)
    graphs = strategy.compiled_graphs()
    assert torch.isfinite(torch.tensor(strategy.evaluate(make_batches(2))))  # eager: nothing new is compiled
    assert strategy.compiled_graphs() == graphs
    parameters = strategy.full_parameters()
    strategy.close()
    return float(result.loss), graphs, parameters


@pytest.fixture(scope="module")
def eager():
    return trained("single")


def test_an_eager_strategy_has_no_graphs(eager):
    assert eager[1] is None


@pytest.mark.parametrize(
    ("name", "mode", "graphs"),
    [
        ("single", "block", 2),
        ("zero1", "block", 2),
        ("zero0", "whole", 1),
        ("zero2", "whole", 1),
        ("zero3", "block", 2),
        ("ddp", "block", 2),
        ("ddp", "whole", 1),
        ("fsdp2", "block", 2),
        ("compute_only", "whole", 1),
    ],
)
def test_compiled_strategies_train_as_eager_ones_and_count_their_graphs(eager, name, mode, graphs):
    loss, executed, parameters = trained(name, compile=mode)
    assert executed == graphs
    if name == "compute_only":
        assert all(torch.equal(parameters[key], value) for key, value in factory().named_parameters())
        return
    assert loss == pytest.approx(eager[0], rel=1e-4)
    for key, expected in eager[2].items():
        torch.testing.assert_close(parameters[key], expected, rtol=1e-3, atol=2e-4)


def saved_bytes(name: str, **fields) -> int:
    """For the backward of a step of transformers' GPT-2."""
    strategy = strategies.get(name)(make_settings(rendezvous=f"{name}-{os.getpid()}", **fields))
    strategy.build(partial(models.build, models.resolve("hf:gpt2", SMALL | {"num_layers": 3}), 0))
    saved = 0

    def pack(tensor):
        nonlocal saved
        saved += tensor.nbytes
        return tensor

    for batch in make_batches(2):
        saved = 0
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            strategy.step([batch])
    strategy.close()
    return saved


@pytest.mark.parametrize("name", ["fsdp2", "zero3"])
def test_compiled_blocks_are_checkpointed_under_every_wrapper(name):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")
    checkpointed = saved_bytes(name, compile="block", checkpointing=True)
    assert checkpointed < 0.7 * saved_bytes(name, compile="block")
    assert checkpointed < 1.3 * saved_bytes(name, checkpointing=True)


def test_stage_3_gathers_between_blocks_so_it_is_no_single_graph():
    settings = make_settings(compile="whole")
    assert "use --compile block" in strategies.get("zero3").unsupported(settings)
    assert strategies.get("zero2").unsupported(settings) is None


def test_blocks_are_found_in_lists_of_one_class_and_outermost_only():
    inner = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(2))
    outer = torch.nn.ModuleList([torch.nn.Sequential(inner), torch.nn.Sequential(inner)])
    mixed = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.ReLU()])
    assert repeated_blocks(torch.nn.Sequential(outer, mixed)) == list(outer)


def test_modes_that_cannot_be_are_errors():
    with pytest.raises(ConfigError, match="none, block, whole"):
        Compiler(make_settings(compile="all"))
    with pytest.raises(ConfigError, match="Linear has no repeated blocks"):
        Compiler(make_settings(compile="block")).apply(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_code_is_compiled_for_the_threads_of_its_row(num_threads):
    import torch._inductor.config as config

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with config.patch({"cpp.threads": -1}):
            compiled = Compiler(make_settings(compile="whole")).backend(
                torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(3)]
            )
            assert config.cpp.threads == num_threads  # which its cache goes by
    finally:
        torch.set_num_threads(before)
    assert torch.equal(compiled(torch.tensor([-1.0, 2.0, 3.0])), torch.tensor([0.0, 2.0, 3.0]))


def test_a_cache_of_its_own_holds_what_is_compiled_within(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with cache_in(tmp_path / "compiled"):
        Compiler(make_settings(compile="whole")).backend(
            torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(5)]
        )
    assert list((tmp_path / "compiled").rglob("*.py"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path) and "TRITON_CACHE_DIR" not in os.environ
