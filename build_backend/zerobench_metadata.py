"""Dynamic metadata: the runtime requirements of pyproject.toml, and the torch that the wheel belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_requirement import TESTED_RANGE, torch_to_build_against, wheel_requirement


class Provider:
    """One instance serves one build, so the state told first is still known when the fields are asked for."""

    state = "sdist"

    def build_state(self, build_state: str) -> None:
        self.state = build_state

    def dynamic_metadata(
        self, settings: Mapping[str, Any], project: Mapping[str, Any]
    ) -> dict[str, list[str]]:
        torch = TESTED_RANGE if self.state == "sdist" else wheel_requirement(torch_to_build_against())
        return {"dependencies": [torch, *settings["dependencies"]]}

    def dynamic_wheel(self, settings: Mapping[str, Any]) -> dict[str, bool]:
        return {"dependencies": True}
