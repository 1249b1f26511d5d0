"""Conditions of advice on speed: which row is the fastest, how sure that is, and what it rests on."""

from __future__ import annotations

from collections.abc import Sequence

from zerobench.report.advice.rule import Scene, Words
from zerobench.report.words import all_ranks_text
from zerobench.results.rows import (
    NOISE_SIGMAS,
    TOO_NOISY,
    fastest,
    noise,
    run_num,
    setting_text,
    step_rate,
    ties_with_fastest,
)
from zerobench.results.schema import Row
from zerobench.results.sizes import count_text, join_words, ms_text, range_text, rate_text
from zerobench.results.stats import FEWEST_SAMPLES, median


def time_text(row: Row) -> str:
    rate = step_rate(row)
    assert row.step_time_ms is not None and rate is not None
    return f"{rate_text(rate)} tokens/s ({ms_text(row.step_time_ms.median)} a step)"


def only_row(scene: Scene) -> list[Words]:
    best, rows, _ = _contest(scene)
    return [_words(scene, best, rows)] if len(rows) == 1 else []


def too_few_samples(scene: Scene) -> list[Words]:
    best, rows, _ = _contest(scene)
    if len(rows) == 1 or not noise_unknown(best, rows):
        return []
    fewest = min(len(row.step_time_ms.samples) for row in rows if row.step_time_ms is not None)
    what, option = "measured step", "--num-steps"
    if best.turns is not None:
        what, option = "window", "--rounds" if best.turns.how == "in turn" else "--repeats"
    steps = f"1 {what} tells" if fewest == 1 else f"{fewest} {what}s tell"
    enough = (
        f"{FEWEST_SAMPLES} or more" if fewest < FEWEST_SAMPLES else "more"
    )  # windows, of which too few are in pairs
    return [{**_words(scene, best, rows), "steps": steps, "enough": enough, "option": option}]


def clearly_fastest(scene: Scene) -> list[Words]:
    best, rows, _ = _contest(scene)
    settled = len(rows) > 1 and not noise_unknown(best, rows) and not tied_with(best, rows)
    return [_words(scene, best, rows)] if settled else []


def too_noisy_to_rank(scene: Scene) -> list[Words]:
    return [words for words, noisy in _ties(scene) if noisy]


def tie_for_fastest(scene: Scene) -> list[Words]:
    return [words for words, noisy in _ties(scene) if not noisy]


def measured_apart(scene: Scene) -> list[Words]:
    _, _, apart = _contest(scene)
    if not apart:
        return []
    names = join_words([scene.label(row) for row in apart])
    return [{"names": names, "were": "was" if len(apart) == 1 else "were"}]


def tied_with(best: Row, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row is not best and ties_with_fastest(row)]


def noise_unknown(best: Row, rows: Sequence[Row]) -> bool:
    """Return whether there are too few samples to tell noise from difference."""
    return any(noise(row) is None for row in rows if row is not best and not _is_apart(row, best))


def too_noisy(tied: Sequence[Row]) -> bool:
    return any((noise(row) or 0.0) >= TOO_NOISY for row in tied)


def order_unclear(scene: Scene) -> bool:
    """Return whether noise leaves open which row is the fastest, so that nothing is said of what slower ones cost."""
    best = fastest(scene.ranked)
    assert best is not None
    return noise_unknown(best, scene.ranked) or too_noisy(tied_with(best, scene.ranked))


def _contest(scene: Scene) -> tuple[Row, list[Row], list[Row]]:
    """Return the fastest row, the rows that it is ranked with, and those measured in too few passes for that."""
    best = fastest(scene.ranked)
    assert best is not None
    apart = [row for row in scene.ranked if _is_apart(row, best)]
    return best, [row for row in scene.ranked if not _is_apart(row, best)], apart


def _is_apart(row: Row, best: Row) -> bool:
    in_turn = best.turns is not None and best.turns.how == "in turn"
    return in_turn and row.turns is not None and row.turns.how == "passes" and noise(row) is None


def _words(scene: Scene, best: Row, rows: Sequence[Row]) -> Words:
    return {"best": scene.label(best), "time": time_text(best), "count": str(len(rows))}


def _ties(scene: Scene) -> list[tuple[Words, bool]]:
    """Return the words of a tie, and whether its errors are so large that it says nothing; empty without a tie."""
    best, rows, _ = _contest(scene)
    tied = tied_with(best, rows)
    if len(rows) == 1 or noise_unknown(best, rows) or not tied:
        return []
    found = sorted(rate for row in (best, *tied) if (rate := step_rate(row)) is not None)
    words = _words(scene, best, rows) | {
        "names": join_words([scene.label(row) for row in (best, *tied)]),
        "rates": f"{rate_text(found[0])} to {rate_text(found[-1])} tokens/s",
        "error": f"{100.0 * max(noise(row) or 0.0 for row in tied):.0f} %",
        "more": _more_text(best),
    }
    return [(words, too_noisy(tied))]


def _more_text(best: Row) -> str:
    if best.turns is None:
        return "steps (--num-steps)"
    return "rounds (--rounds)" if best.turns.how == "in turn" else "runs (--repeats)"


def basis(scene: Scene) -> list[Words]:
    rows = scene.ranked
    settings = rows[0].settings
    parts = [settings.model]
    if settings.parameter_count is not None:
        parts[0] += f" ({count_text(settings.parameter_count)} parameters)"
    parts += [all_ranks_text(rows), settings.precision]
    batches = [setting_text(size) for size in sorted({row.settings.batch_size for row in rows})]
    parts.append(f"batch {join_words(batches)} x sequence {settings.seq_length}")
    rows_text = f"{len(rows)} row{'s' if len(rows) != 1 else ''}"
    return [
        {
            "rows": rows_text,
            "runs": _runs_text(rows),
            "what": ", ".join(parts),
            "certainty": "; ".join(filter(None, [_intervals_text(rows), _samples_text(rows)])),
        }
    ]


def _runs_text(rows: Sequence[Row]) -> str:
    """Return such as "1 run each" or "2 to 3 runs each"."""
    runs = [run_num(row) for row in rows]
    text = range_text(runs)
    return f"{text} run{'s' if max(runs) != 1 else ''}{' each' if len(rows) > 1 else ''}"


def _intervals_text(rows: Sequence[Row]) -> str:
    """Return how wide the 95 % intervals of ratios to the fastest row are, at most; empty without any."""
    widths = []
    for row in rows:
        if row.relative is not None and row.relative_low is not None and row.relative_high is not None:
            widths.append((row.relative_high - row.relative_low) / (2 * row.relative))
        elif (error := noise(row)) is not None:
            widths.append(NOISE_SIGMAS * error)
    return f"ratios to the fastest within {100 * max(widths):.1f} % (95 % intervals)" if widths else ""


def _samples_text(rows: Sequence[Row]) -> str:
    times = [row.step_time_ms for row in rows if row.step_time_ms is not None]
    fewest, most = min(len(time.samples) for time in times), max(len(time.samples) for time in times)
    spreads = [100.0 * time.mad / time.median for time in times if len(time.samples) >= FEWEST_SAMPLES]
    spread = f", MAD {median(spreads):.1f} % of the median" if spreads else ""
    what = "measured step" if any(row.turns is None for row in rows) else "window"
    return f"{range_text((fewest, most))} {what}{'s' if most != 1 else ''} a row{spread}"
