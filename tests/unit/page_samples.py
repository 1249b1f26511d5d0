"""Pages and result files that the tests of the page begin with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from report_samples import SAMPLE, gpus, grid

from zerobench.results.files import read_results
from zerobench.results.schema import Results

HOSTILE = "</script><script>window.hacked = 1</script><img src=http://x.invalid/ onerror='window.hacked=1'>\"&{{7*7}}"


def forty() -> Results:
    """Rows of a grid with as many samples and losses as three runs of 100 steps."""
    results = grid()
    rows = [row.model_copy(deep=True) for row in (results.rows * 2)[:40]]
    for index, row in enumerate(rows):
        row.name = f"{row.name}_{index}"
        row.settings.seed = index
        row.settings.num_steps, row.settings.repeats = 100, 3
        assert row.step_time_ms is not None and row.loss is not None
        row.step_time_ms.samples = (row.step_time_ms.samples * 15)[:300]
        row.loss = (row.loss * 15)[:300]
    results.rows = rows
    return results


def scaled() -> Results:
    """ZeRO rows on 2 and 4 GPUs, with power."""
    results = gpus()
    for row in [row for row in results.rows if row.settings.world_size == 2]:
        more = row.model_copy(deep=True)
        more.name = f"{row.name}_of_4"
        more.settings.world_size = 4
        results.rows.append(more)
    return results


def changed(content: Any, text: str) -> Any:
    """Return JSON with ``text`` after every string that is not one of a few words."""
    if isinstance(content, dict):
        return {key: changed(value, text) for key, value in content.items()}
    if isinstance(content, list):
        return [changed(value, text) for value in content]
    return content + text if isinstance(content, str) else content


def hostile(folder: Path) -> Results:
    """Rows with script in names, errors, warnings, machine, versions, keys and commands."""
    content = json.loads(SAMPLE.read_text(encoding="utf-8"))
    content["warnings"] = [HOSTILE]
    content["command"] += HOSTILE
    content["machine"] = changed(content["machine"], HOSTILE) | {HOSTILE: HOSTILE}
    content["versions"] = changed(content["versions"], HOSTILE) | {HOSTILE: HOSTILE}
    for row in content["rows"]:
        row.update(name=row["name"] + HOSTILE, strategy=row["strategy"] + HOSTILE, rerun=HOSTILE)
        row["settings"]["model"] = HOSTILE
        row["settings"]["model_config_resolved"][HOSTILE] = row["name"]
        row["phases_ms"][HOSTILE] = 3.0
        row["memory_bytes"]["device"][HOSTILE] = 4096
    content["rows"][-1].update(status="failed", error=HOSTILE)
    path = folder / "results.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return read_results(path)
