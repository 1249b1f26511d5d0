"""Hosts and their number of ranks, from a file in DeepSpeed's format: a line ``host slots=N`` for each host."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from zerobench.errors import ConfigError

_LINE = re.compile(r"(?P<name>[\w.@:-]+)\s+slots=(?P<slots>\d+)")


class Host(NamedTuple):
    """A host as ssh names it, and how many ranks it runs."""

    name: str
    slots: int

    @property
    def address(self) -> str:
        """Its name without the user, for other hosts to connect to."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: Path) -> list[Host]:
    """Return the hosts in the order of the file; comments begin with ``#``. Raises ConfigError for a line of another
    form, a host that stands twice, and a file without hosts."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}): give a file with a line `host slots=N` a host"
        ) from None
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        found = _LINE.fullmatch(content)
        if found is None or int(found["slots"]) < 1:
            raise ConfigError(f"{path}, line {number}: {content!r} is not `host slots=N` with N of 1 or more")
        hosts.append(Host(found["name"], int(found["slots"])))
    if not hosts:
        raise ConfigError(f"{path} names no host: give a line `host slots=N` for each")
    twice = [name for name, times in Counter(host.name for host in hosts).items() if times > 1]
    if twice:
        raise ConfigError(f"{path} names {twice[0]} twice: give each host one line with all of its slots")
    return hosts
