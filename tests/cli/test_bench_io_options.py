"""Options that `bench io` refuses, in one line and before it measures."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["disk", "--engines", ""], "--engines ''"),
        (["disk", "--depth", ""], "--depth ''"),
        (["disk", "--block-bytes", ""], "--block-bytes ''"),
        (["disk", "--block-bytes", "100"], "--block-bytes: 100 bytes are not a block"),
        (["disk", "--chunk-mib", "0.003"], "--chunk-mib: 3145 bytes are not a block"),
        (["disk", "--output", "none/of.json"], "name one in a folder to write to"),
        (["disk", "disk/../disk"], "named twice"),
        (["disk", "--settings", "none.json"], "--settings none.json holds nothing about disk"),
        (["disk", "--settings", "empty.json"], "--settings empty.json holds nothing about disk"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_meant_is_refused_in_one_line(command, arguments, said) -> None:
    (command.folder / "disk").mkdir()
    (command.folder / "empty.json").write_text("{}")
    result = command.run("bench", "io", *arguments, "--size-gib", "0.01", "--repeats", "1", timeout_s=60)
    assert result.returncode == 2, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and said in lines[0], result.stderr
    assert list((command.folder / "disk").iterdir()) == []
