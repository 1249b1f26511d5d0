"""Verification of a row on GPUs compares on one of them, and finds what the host would find."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from zerobench.bench.protocol.tolerances import VERIFY_STEPS
from zerobench.bench.rank import deviation
from zerobench.bench.rank.evidence import Evidence, Reference
from zerobench.bench.rank.replay import sample
from zerobench.strategies.base import OptimizerSettings


def test_deviations_on_the_gpu_are_those_on_the_host(monkeypatch) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(scale: float) -> dict[str, torch.Tensor]:
        shapes = {"embedding": (3001, 1024), "matrix": (512, 512), "bias": (70,), "nothing": (0,)}
        return {
            name: scale * torch.randn(shape, generator=generator, dtype=torch.float32)
            for name, shape in shapes.items()
        }

    gradients, parameters = random(1.0), random(0.02)
    expected = Reference(
        gradients, random(4e-3), parameters, {name: 0.3 * g for name, g in gradients.items()}
    )
    found = Evidence(
        loss=5.0,
        norm=1.0,
        gradients={name: gradients[name] + off for name, off in random(0.01).items()},
        parameters={name: parameters[name] + off for name, off in random(1e-5).items()},
        moments=expected.moments,
        moment_samples=[{name: sample(g) for name, g in gradients.items()}] * VERIFY_STEPS,
    )
    monkeypatch.setattr(deviation, "_GPU_NUMEL", 1 << 18)  # so that the embedding goes in several parts

    def compared(device: str):
        return deviation.compare(
            found,
            expected,
            precision="bf16",
            optimizer=OptimizerSettings(lr=1e-3),
            device=torch.device(device),
        )

    on_host, on_gpu = compared("cpu"), compared("cuda")
    assert on_host.gradient > 0 and on_host.piece > 0 and on_host.max_abs > 0
    assert on_gpu == on_host.model_copy(
        update={
            name: pytest.approx(getattr(on_host, name), rel=1e-5)
            for name in ("gradient", "update", "piece", "max_abs")
        }
    )
