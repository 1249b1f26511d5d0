"""Full gradients by parameter name, which a script reads and changes between backward and step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

import torch

from zerobench.errors import ConfigError, StateError

_CHECKSUM_NUMEL = 1 << 24


class Gradients(MutableMapping[str, "torch.Tensor | None"]):
    """Averaged, unscaled float32 gradients by parameter name. Change them in place or assign others.

    ``gradients[name] = None`` holds a parameter: the step leaves it and its moments alone and does not count for it.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, is_read_only: bool) -> None:
        self._tensors: dict[str, torch.Tensor | None] = dict(tensors)
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._devices = {name: tensor.device for name, tensor in tensors.items()}
        self._is_read_only = is_read_only
        self._is_open = True
        self._given = self.checksums() if is_read_only else {}

    def __getitem__(self, name: str) -> torch.Tensor | None:
        self._expect_known(name)
        return self._tensors[name]

    def __setitem__(self, name: str, gradient: torch.Tensor | None) -> None:
        self._expect_known(name)
        if not self._is_open:
            raise StateError(
                f"the gradient of '{name}' was assigned after the block of engine.gradients() had ended; assign it "
                "inside the block"
            )
        if self._is_read_only:
            raise StateError(
                f"the gradient of '{name}' was assigned in engine.gradients(modifier_rank=None), which only reads; "
                'name the rank whose changes count, or "all" where every rank makes the same ones'
            )
        if gradient is None:
            self._tensors[name] = None
            return
        if not isinstance(gradient, torch.Tensor) or not gradient.is_floating_point():
            what = gradient.dtype if isinstance(gradient, torch.Tensor) else type(gradient).__name__
            raise ConfigError(
                f"the gradient of '{name}' must be a floating-point tensor, or None to leave the parameter out of the "
                f"step, not {what}"
            )
        if gradient.shape != self._shapes[name]:
            raise ConfigError(
                f"the gradient of '{name}' must have the parameter's shape {tuple(self._shapes[name])}, not "
                f"{tuple(gradient.shape)}"
            )
        self._tensors[name] = gradient.detach().to(device=self._devices[name], dtype=torch.float32)

    def __delitem__(self, name: str) -> None:
        raise StateError(
            f"the gradient of '{name}' cannot be deleted; assign None to leave the parameter out of the step"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def close(self) -> None:
        """End the block: nothing can be assigned any more."""
        self._is_open = False

    def kept(self) -> dict[str, torch.Tensor]:
        """Return the gradients that the step uses, contiguous."""
        return {name: tensor.contiguous() for name, tensor in self._tensors.items() if tensor is not None}

    def held(self) -> list[str]:
        """Return the names of the parameters that the step leaves alone."""
        return [name for name, tensor in self._tensors.items() if tensor is None]

    def checksums(self) -> dict[str, int]:
        """Return a number for each gradient, which in practice differs when any bit differs."""
        return {name: _checksum(tensor) for name, tensor in self._tensors.items()}

    def changed_name(self) -> str | None:
        """Return the name of the first gradient that was changed in place since a read-only block began, or None."""
        now = self.checksums()
        return next((name for name, given in self._given.items() if now[name] != given), None)

    def _expect_known(self, name: str) -> None:
        if name not in self._tensors:
            raise KeyError(
                f"no trained parameter is named {name!r}: names are those of model.named_parameters() when the engine "
                "was made, tied parameters by their first name"
            )


def _checksum(gradient: torch.Tensor | None) -> int:
    """Return the sum of the bits, each multiplied by an odd number of its place, modulo 2**63."""
    if gradient is None:
        return -1
    total = 0
    for index, piece in enumerate(gradient.contiguous().view(-1).view(torch.int32).split(_CHECKSUM_NUMEL)):
        places = torch.arange(len(piece), device=piece.device).add_(index * _CHECKSUM_NUMEL)
        total += int(places.mul_(0x9E3779B1).bitwise_or_(1).mul_(piece).sum())
    return total & (2**63 - 1)
