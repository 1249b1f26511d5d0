"""Colours, titles and labels that all plots share."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zerobench.report.words import all_ranks_text
from zerobench.results.rows import flat_settings, setting_text, setting_word, varying_settings
from zerobench.results.schema import Row
from zerobench.results.settings import leading_settings
from zerobench.results.sizes import count_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID = "#222222", "#6b6b6b", "#e3e3e3"


def style_axes(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelcolor=INK, labelsize=9)
    axes.xaxis.label.set(color=INK, fontsize=9.5)
    axes.yaxis.label.set(color=INK, fontsize=9.5)
    axes.set_axisbelow(True)


def shortened(labels: Sequence[str], *, limit: int = 44) -> list[str]:
    """Long ones lose their ends, but for those that would look alike then: these go on in further lines."""
    cut = [label if len(label) <= limit else f"{label[: limit - 1]}…" for label in labels]
    alike = Counter(cut)
    return [
        textwrap.fill(label, limit) if alike[short] > 1 else short
        for label, short in zip(labels, cut, strict=True)
    ]


def as_is(text: str) -> str:
    """For matplotlib, which would take what stands between dollar signs for a formula."""
    return text.replace("$", r"\$")


def head(axes: Axes, title: str, subtext: str) -> None:
    """Title and settings, flush with the axes."""
    axes.set_title(as_is(subtext), loc="left", fontsize=9, color=MUTED, pad=7)
    axes.annotate(
        title,
        (0.0, 1.0),
        xycoords="axes fraction",
        xytext=(0, 23),
        textcoords="offset points",
        fontsize=12,
        fontweight="bold",
        color=INK,
    )


def subtitle(rows: Sequence[Row]) -> str:
    """The settings that all rows share, in few words."""
    free, tied = varying_settings(rows)
    flat = flat_settings(rows[0])
    words = []
    for key in leading_settings():
        if key in free or (key in tied and key != "world_size"):
            continue
        value = flat[key]
        if key == "model":
            counts = {row.settings.parameter_count for row in rows if row.settings.parameter_count}
            words.append(
                f"{value} ({count_text(counts.pop())} parameters)" if len(counts) == 1 else str(value)
            )
        elif key == "world_size":
            words.append(all_ranks_text(rows))
        elif key == "precision":
            words.append(str(value))
        elif key != "grad_accum" or value != 1:
            words.append(f"{setting_word(key)} {setting_text(value)}")
    return ", ".join(words)
