"""The logger of notices: its ranks, its level, and who prints its records."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from zerobench.engine import notices
from zerobench.errors import ConfigError

BEGIN = "import logging, os; from zerobench.engine import notices\n"
GIVE = (
    "notices.configure(os.environ); notices.Notices(2).warn('100 % told'); notices.Notices(0).info('found')\n"
)
TOLD = "[rank 2] 100 % told"
FOUND = "[rank 0] found"


def printed(code: str, level: str | None = None) -> list[str]:
    """Return what an application of its own prints to stderr."""
    environment = {} if level is None else {"ZEROBENCH_LOG": level}
    run = subprocess.run(
        [sys.executable, "-c", f"import os; os.environ.update({environment!r})\n{BEGIN}{code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not run.stdout
    return run.stderr.splitlines()


def test_warnings_are_printed_once_where_nothing_is_configured():
    assert printed(GIVE + "notices.configure(os.environ)") == [f"zerobench: WARNING: {TOLD}"]


@pytest.mark.parametrize(
    ("level", "lines"),
    [
        ("debug", [f"zerobench: WARNING: {TOLD}", f"zerobench: INFO: {FOUND}"]),
        ("INFO", [f"zerobench: WARNING: {TOLD}", f"zerobench: INFO: {FOUND}"]),
        ("warning", [f"zerobench: WARNING: {TOLD}"]),
        ("error", []),
        ("", [f"zerobench: WARNING: {TOLD}"]),
    ],
)
def test_the_environment_sets_the_level(level, lines):
    assert printed(GIVE, level) == lines


@pytest.mark.parametrize(
    "code",
    [
        "logging.basicConfig(format='mine: %(message)s')\n" + GIVE,
        "notices.configure(os.environ); logging.basicConfig(format='mine: %(message)s')\n" + GIVE,
    ],
    ids=["before", "after"],
)
def test_an_application_that_configures_logging_gets_each_record_once(code):
    assert printed(code) == [f"mine: {TOLD}"]


def test_an_application_decides_what_it_shows():
    own = "logging.basicConfig(format='mine: %(message)s', level=logging.INFO)\n"
    assert printed(own + GIVE) == [f"mine: {TOLD}", f"mine: {FOUND}"]
    assert printed("logging.getLogger('zerobench').addHandler(logging.NullHandler())\n" + GIVE) == []


def test_a_level_that_does_not_exist_is_an_error():
    with pytest.raises(ConfigError, match=r"ZEROBENCH_LOG=loud is not .* debug, info, warning, error"):
        notices.configure({"ZEROBENCH_LOG": "loud"})


def test_what_is_the_same_on_all_ranks_comes_from_rank_0(caplog):
    for rank in range(3):
        notices.Notices(rank).warn("once", same_on_all_ranks=True)
        notices.Notices(rank).warn("each")
    assert caplog.record_tuples == [
        ("zerobench", logging.WARNING, text)
        for text in ("[rank 0] once", "[rank 0] each", "[rank 1] each", "[rank 2] each")
    ]
