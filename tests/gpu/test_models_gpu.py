"""Models made on a GPU: unit by unit the same bits as whole, buffers and all, and they train in bf16."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)
pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

import hf_zoo

from zerobench import models
from zerobench.engine.units import find_units
from zerobench.models.materialise import materialise

WIDE = {"hidden_size": 64, "max_seq_length": 64}


def tensors(model) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("name", [*hf_zoo.MODELS, "tiny"])
def test_unit_by_unit_is_the_whole_build(name):
    config = models.resolve("tiny") if name == "tiny" else hf_zoo.config(name)
    with torch.device("cuda"):  # as strategies call it
        expected = models.build(config, 3)
    model = models.build(config, 3, device="meta")
    units = find_units(model)
    unit_of = units.unit_of_parameters()
    for index in reversed(range(len(units.names))):
        materialise(model, [key for key, unit in unit_of.items() if unit == index], device="cuda")
    wanted = tensors(expected)
    assert all(value.is_cuda for value in wanted.values())
    found = tensors(model)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", hf_zoo.MODELS)
def test_forward_and_backward_in_bf16(name):
    model = hf_zoo.build(name, device="cuda", **WIDE)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    batch = {key: value.cuda() for key, value in hf_zoo.batch(seq_length=32).items()}
    output = model(**batch)
    assert output.logits.dtype == torch.bfloat16
    assert output.loss.item() == pytest.approx(math.log(256), rel=0.05)
    output.loss.backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert all(gradient is not None or "experts" in key for key, gradient in gradients.items())
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values() if gradient is not None)


def test_a_large_model_takes_memory_unit_by_unit_only():
    model = models.build(models.find("meta-llama/Llama-2-7b-hf", {"weights": "random"}), 0, device="meta")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    done = materialise(model, ["model.layers.5"], device="cuda")
    made = sum(parameter.numel() for parameter in model.model.layers[5].parameters())
    assert len(done) == 9 and made == 202_383_360
    # Buffers and rounding of the allocator aside.
    assert 4 * made <= torch.cuda.memory_allocated() - before <= 4 * made + (1 << 20)
    assert model.model.layers[6].mlp.up_proj.weight.is_meta
