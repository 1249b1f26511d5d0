"""Facts of `zerobench info` as text. Imports no torch."""

from __future__ import annotations

from collections import Counter
from typing import Any

from zerobench.results.sizes import GIB


def in_short(facts: dict[str, Any]) -> str:
    """Return one line on the machine and on the versions of zerobench and torch."""
    machine, versions = facts["machine"], facts["versions"]
    counted = Counter(gpu["name"] for gpu in machine.get("gpus", []))
    gpus = ", ".join(f"{num} x {name}" for name, num in counted.items()) or "no usable GPU"
    packages = ", ".join(f"{name} {versions[name]}" for name in ("zerobench", "torch") if versions.get(name))
    return f"{packages}: {gpus}, {machine['cores']} cores, {machine['memory_bytes'] / GIB:.1f} GiB"


def fact_lines(facts: dict[str, Any], prefix: str = "") -> list[str]:
    """Nested facts as dotted lines, bytes in GiB, lists with commas."""
    lines = []
    for key, value in facts.items():
        if isinstance(value, dict):
            lines += fact_lines(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                lines += fact_lines(item, f"{prefix}{key}.{index}.")
        elif key.endswith("_bytes") and isinstance(value, int):
            lines.append(f"{prefix}{key.removesuffix('_bytes')}: {value / GIB:.1f} GiB")
        elif value is None or value in ([], ()):
            lines.append(f"{prefix}{key.removesuffix('_bytes')}: none")
        elif isinstance(value, list | tuple):
            lines.append(f"{prefix}{key}: {', '.join(map(str, value))}")
        else:
            lines.append(f"{prefix}{key}: {value}")
    return lines
