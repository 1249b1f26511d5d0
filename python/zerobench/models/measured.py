"""Models whose sizes only building them tells: those of a folder, and those that a function makes. Imports no torch."""

from __future__ import annotations

from pydantic import Field

from zerobench.models.config import ModelConfig

OWN_FUNCTION = (
    "write a function that makes it and give --model package.module:function "
    "(docs/reference/models.md, Your own model)"
)


class MeasuredConfig(ModelConfig):
    """A model that ``examine`` builds once before anything runs, to learn what follows here."""

    parameters: int | None = Field(default=None, ge=0)  # None: not examined
    layer_parameters: int = Field(default=0, ge=0)  # that one more layer adds, about; 0: unknown
    # Made with values on every rank, since its values cannot be drawn part by part.
    whole: bool = False

    @property
    def begins_whole(self) -> bool:
        return self.whole

    @property
    def predicts_tokens(self) -> bool:
        """True if the model has a logit for each token of the vocabulary at each position."""
        return False
