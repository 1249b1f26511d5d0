"""Values that a forward reads, compared with their masters."""

from __future__ import annotations

from types import SimpleNamespace

import hf_zoo
import pytest
import torch
from builders import tiny_model
from torch import nn

from zerobench.bench.rank.reads import differing, watched


def make_model(dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """In low precision, with its fp32 masters."""
    model = tiny_model(num_layers=2, hidden_size=32, num_heads=2, max_seq_length=16)
    masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return model.to(dtype), masters


def forward(model: nn.Module) -> None:
    ids = torch.arange(16).view(1, 16)
    model(input_ids=ids, labels=ids)


def test_rounded_masters_are_read_as_they_are() -> None:
    model, masters = make_model()
    with watched(model, masters) as reads:
        forward(model)
    assert reads.names == masters.keys()
    assert reads.worst().share == 0.0
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks]
    assert not hooks and not model._forward_hooks


@pytest.mark.parametrize("name", ["wte.weight", "ln_f.weight", "blocks.1.attn.qkv.weight"])
def test_one_element_that_is_off_is_seen(name) -> None:
    model, masters = make_model()
    assert name in masters
    parameter = model.get_parameter(name).detach().view(-1)
    parameter[-1] = torch.nextafter(parameter[-1], torch.tensor(9.0, dtype=parameter.dtype))
    with watched(model, masters) as reads:
        forward(model)
    assert reads.worst() == (1 / parameter.numel(), name)


def test_values_that_come_just_before_a_module_are_what_counts() -> None:
    """As gathering engines do it: a pre-hook makes them, and nothing is there before and behind."""
    model, masters = make_model()
    head = model.ln_f
    right = head.weight.detach().clone()
    head.weight.data = torch.empty(0, dtype=right.dtype)

    def gather(module: nn.Module, args: object) -> None:
        module.weight.data = right.clone()

    head.register_forward_pre_hook(gather)
    with watched(model, masters) as reads:
        forward(model)
    assert reads.worst().share == 0.0 and "ln_f.weight" in reads.names
    right += 1
    with watched(model, masters) as reads:
        forward(model)
    assert reads.worst() == (1.0, "ln_f.weight")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.head(self.wte(ids)).mean())


def test_a_tie_that_broke_is_seen() -> None:
    model = Tied()
    masters = {"wte.weight": model.wte.weight.detach().clone()}
    with watched(model, masters) as reads:
        model.head.weight = nn.Parameter(model.wte.weight.detach() + 1)  # while forwards are looked at
        model(torch.arange(8))
    assert reads.worst() == (1.0, "wte.weight")


class Wrapper(nn.Module):
    """As FSDP1 wraps: the inner module is an attribute whose attributes show through."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._fsdp_wrapped_module, name)

    def forward(self, *args: object, **kwargs: object) -> object:
        return self._fsdp_wrapped_module(*args, **kwargs)


def test_modules_inside_wrappers_have_their_plain_names() -> None:
    model, masters = make_model()
    model.blocks[0] = Wrapper(model.blocks[0])
    whole = Wrapper(model)
    with watched(whole, masters) as reads:
        forward(whole)
    assert reads.names == masters.keys()
    assert reads.worst().share == 0.0


def test_what_is_not_gathered_is_not_counted() -> None:
    model = Tied()
    with watched(model, {"wte.weight": torch.zeros(9, 4)}) as reads:
        model(torch.arange(8))
    assert reads.worst() is None and not reads.names


def test_nan_is_never_the_masters() -> None:
    master = torch.tensor([1.0, float("nan"), 3.0])
    assert int(differing(master.clone(), master)) == 1


def test_large_tensors_are_compared_in_chunks() -> None:
    master = torch.randn(5, 10, generator=torch.Generator().manual_seed(0))
    tensor = master.bfloat16()
    tensor[::2] += 1
    assert int(differing(tensor, master, chunk_numel=7)) == 30
    assert int(differing(master.t().bfloat16(), master.t(), chunk_numel=7)) == 0
    assert int(differing(torch.empty(0), torch.empty(0), chunk_numel=7)) == 0


@pytest.mark.parametrize(
    ("name", "dtype"), [("google-bert/bert-large-uncased", torch.bfloat16), ("hf:gpt2", torch.float32)]
)
def test_the_dtype_of_the_loss_is_the_models(name, dtype) -> None:
    model = hf_zoo.build(name)
    masters = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    with watched(model, masters) as reads, torch.no_grad():
        model(**hf_zoo.batch())
    assert reads.loss_dtype == dtype
    assert reads.worst().share == 0.0
