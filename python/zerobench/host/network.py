"""Networks by name, such as ``1gbit:0.2ms``: what ``--network`` and ZEROBENCH_NETWORK take. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from zerobench.errors import ConfigError

NATIVE = "native"
NETWORK_VARIABLE = "ZEROBENCH_NETWORK"
"""Environment variable: the network whose time collectives between hosts take."""

_UNITS = {"mbit": 1e6, "gbit": 1e9}
_TIMES_S = {"us": 1e-6, "ms": 1e-3}
_FORM = re.compile(r"(\d+(?:\.\d+)?)(mbit|gbit)(?::(\d+(?:\.\d+)?)(us|ms))?")
_FRAME_BYTES, _DATA_BYTES = 1514, 1448  # of a full Ethernet frame, with TCP's timestamps


@dataclass(frozen=True)
class Link:
    """The link between a host and all others, which sends and receives at this speed at once."""

    bits_per_s: float  # of frames, as tc counts them
    latency_s: float  # from the end of a message's departure to its arrival

    @property
    def data_bytes_per_s(self) -> float:
        """Speed of what a TCP connection carries."""
        return self.bits_per_s / 8 * _DATA_BYTES / _FRAME_BYTES


def parse_network(text: str, *, source: str) -> Link | None:
    """Return the link that ``text`` names, None for ``native``. Raises ConfigError that names ``source``."""
    if text == NATIVE:
        return None
    found = _FORM.fullmatch(text)
    if found is None or not float(found[1]):
        raise ConfigError(
            f"{source} {text!r} is not a network: use native, or a speed in mbit or gbit with a latency in us or ms "
            "where it has one, such as 2.5gbit or 1gbit:0.2ms"
        )
    latency_s = float(found[3]) * _TIMES_S[found[4]] if found[3] else 0.0
    return Link(float(found[1]) * _UNITS[found[2]], latency_s)
