"""The ladder from data parallelism to NVMe: what each rung keeps where, and what it is for."""

from __future__ import annotations

from dataclasses import dataclass

from zerobench.strategies.catalogue import PARTS, Facts, Part, ours_at

PART_BYTES: dict[Part, int] = dict(zip(PARTS, (2, 2, 12), strict=True))
"""Bytes a parameter in bf16 with Adam: the parameter, its gradient, and the fp32 master with two moments."""
COMFORTABLE, FULL = 0.6, 0.95
"""Shares of a device that state may take: up to the first a model fits comfortably, above the second it does not."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A stage and a tier of state."""

    stage: int
    offload: str = "none"
    when: str
    cost: str

    @property
    def name(self) -> str:
        strategy = ours_at(self.stage)
        return strategy if self.offload == "none" else f"{strategy}, {self.offload}"

    @property
    def options(self) -> str:
        offload = "" if self.offload == "none" else f" --offload {self.offload}"
        folder = " --nvme-path FOLDER" if self.offload.startswith("nvme") else ""
        return f"--strategies {ours_at(self.stage)}{offload}{folder}"

    def device_bytes(self, parameters: int, ranks: int) -> float:
        """Return the bytes of state on a rank's device, without activations and buffers."""
        facts = Facts(stage=self.stage)
        return sum(
            parameters * PART_BYTES[part] / (ranks if facts.divides(part) else 1)
            for part in PARTS
            if part not in self._moved()
        )

    def host_bytes(self, parameters: int) -> int:
        """Return the bytes of state in host memory, of all ranks together. Gradients pass through."""
        held = [part for part in self._moved() if part != "gradients"]
        return 0 if self.offload.startswith("nvme") else sum(parameters * PART_BYTES[part] for part in held)

    def _moved(self) -> tuple[Part, ...]:
        """Return the parts that leave the device: gradients go where the optimizer is, as they come."""
        if self.offload == "none":
            return ()
        return PARTS if self.offload.endswith("_full") else PARTS[1:]


LADDER = (
    Rung(
        stage=0,
        when="All state fits on each device, with room for activations.",
        cost="One all-reduce of the gradients a step. `ddp` is the same rung in PyTorch.",
    ),
    Rung(
        stage=1,
        when="Optimizer state does not fit on each device, or its memory is better used for a larger batch.",
        cost="Moves as many bytes as stage 0: a reduce-scatter and an all-gather in place of the all-reduce.",
    ),
    Rung(
        stage=2,
        when="Gradients do not fit next to the parameters either.",
        cost="Without accumulation the same as stage 1. With accumulation, every micro-batch reduces its "
        "gradients.",
    ),
    Rung(
        stage=3,
        when="The parameters alone fill a device.",
        cost="Moves 1.5 times the bytes of stage 0: parameters are gathered in forward and in backward.",
    ),
    Rung(
        stage=2,
        offload="cpu_optimizer",
        when="Few ranks: optimizer state does not fit on their devices together, parameters do on each.",
        cost="Gradients and parameters cross PCIe in every step, and the CPUs update: more accumulation hides both.",
    ),
    Rung(
        stage=3,
        offload="cpu_optimizer",
        when="As above, and the parameters have to be sharded, too.",
        cost="The all-gathers of stage 3 in addition.",
    ),
    Rung(
        stage=3,
        offload="cpu_full",
        when="Not even a shard of the parameters fits on a device.",
        cost="Parameters cross PCIe in forward and in backward.",
    ),
    Rung(
        stage=3,
        offload="nvme",
        when="Host memory cannot hold the optimizer state.",
        cost="A step reads and writes the optimizer state, 24 bytes a parameter: the disk sets the pace.",
    ),
    Rung(
        stage=3,
        offload="nvme_full",
        when="Neither host memory nor the devices can hold the parameters.",
        cost="Parameters are read from files in forward and in backward, too.",
    ),
)
"""The rungs in the order to try them: each one below saves memory that the one above needs, for more time."""


def first_rung(parameters: int, ranks: int, *, device_bytes: float, host_bytes: float) -> Rung | None:
    """Return the first rung on which a model fits comfortably, or None."""
    for rung in LADDER:
        fits = rung.device_bytes(parameters, ranks) <= COMFORTABLE * device_bytes
        if fits and rung.host_bytes(parameters) <= COMFORTABLE * host_bytes:
            return rung
    return None
