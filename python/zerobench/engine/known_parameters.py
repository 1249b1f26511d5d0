"""The parameters that an engine was made with: notices where the model has others now, or trains others."""

from __future__ import annotations

from torch import nn

from zerobench.errors import StateError


class KnownParameters:
    """``named`` are parameters by the names that they had, ``trained`` and ``frozen`` those names by parameter.

    Parts that torch.compile wraps after ``zerobench.initialize`` give their parameters other names."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.named = dict(model.named_parameters())
        self.trained = {parameter: name for name, parameter in self.named.items() if parameter.requires_grad}
        self.frozen = {
            parameter: name for name, parameter in self.named.items() if not parameter.requires_grad
        }
        self._shapes = {parameter: parameter.shape for parameter in self.named.values()}

    def expect_same(self) -> None:
        """Before the first step: scripts change models between ``initialize`` and training."""
        present = {parameter: name for name, parameter in self._model.named_parameters()}
        for parameter, name in present.items():
            if parameter.requires_grad and parameter not in self._shapes:
                raise StateError(
                    f"parameter '{name}' came into the model after zerobench.initialize, and no engine trains it; make "
                    "the model whole before"
                )
            if self._shapes.get(parameter, parameter.shape) != parameter.shape:
                raise StateError(
                    f"parameter '{name}' had shape {tuple(self._shapes[parameter])} when the engine was made and has "
                    f"{tuple(parameter.shape)} now; give it its size before zerobench.initialize"
                )
        for parameter, name in (self.trained | self.frozen).items():
            if parameter not in present:
                raise StateError(
                    f"parameter '{name}' left the model after zerobench.initialize, and the engine's state still has "
                    "it; tie, replace or delete parameters before"
                )

    def late_names(self) -> list[str]:
        """Return the names of parameters that need a gradient and that the model did not have."""
        return [
            name
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and parameter not in self._shapes
        ]

    def expect_same_trained(self) -> None:
        """In every step, so by comprehensions, which take least beside what reaching each tensor takes."""
        for parameter in [each for each in self.trained if not each.requires_grad]:
            raise StateError(
                f"parameter '{self.trained[parameter]}' is trained since the engine was made and needs no gradient "
                "now; set requires_grad before zerobench.initialize, and train with a new engine after a change"
            )
        for parameter in [each for each in self.frozen if each.grad is not None]:
            parameter.grad = None
            raise StateError(
                f"parameter '{self.frozen[parameter]}' was frozen when the engine was made and got a gradient now; "
                "set requires_grad before zerobench.initialize"
            )
