"""Which torch a build is made against, and what the wheel then requires."""

from __future__ import annotations

import os
import sys

from torch_finder import Torch, find_torch, target_site_packages

# The range that is tested; the upper bound is exclusive. The newest minor in it is what a build without torch brings.
OLDEST_TESTED = (2, 9)
FIRST_UNTESTED = (2, 15)
TESTED_RANGE = "torch>={}.{},<{}.{}".format(*OLDEST_TESTED, *FIRST_UNTESTED)
NEWEST_TESTED = f"torch=={FIRST_UNTESTED[0]}.{FIRST_UNTESTED[1] - 1}.*"
# The CUDA version of the registry's build of NEWEST_TESTED.
NEWEST_TESTED_CUDA = "13.0"
_PERMITS_OLDER = "ZEROBENCH_ALLOW_UNTESTED_TORCH"


def installed_torch() -> Torch | None:
    """The torch of the target environment; one older than the tested range ends the build unless it is permitted."""
    return _checked(find_torch(target_site_packages()))


def torch_to_build_against() -> Torch:
    """The target environment's torch, else the one that the build environment was given."""
    torch = installed_torch() or _checked(find_torch(sys.path))
    if torch is None:
        raise SystemExit(
            f"zerobench: no torch is installed for {sys.executable}; run `pip install '{TESTED_RANGE}'` first, or "
            f"build without --no-build-isolation, which brings {NEWEST_TESTED}."
        )
    return torch


def wheel_requirement(torch: Torch) -> str:
    """A wheel belongs to one torch minor: another one has other classes behind the same names."""
    return f"torch=={torch.minor}.*"


def newer_warning(torch: Torch) -> str | None:
    """The warning about a torch newer than the tested range, None for a tested one."""
    if torch.release < FIRST_UNTESTED:
        return None
    return (
        f"zerobench: warning: torch {torch.version} in {torch.directory} is newer than the tested range "
        f"{TESTED_RANGE}; the build goes on. If it or its tests fail, install a torch of that range."
    )


def _checked(torch: Torch | None) -> Torch | None:
    if torch is None or torch.release >= OLDEST_TESTED or os.environ.get(_PERMITS_OLDER) == "1":
        return torch
    raise SystemExit(
        f"zerobench: torch {torch.version} in {torch.directory} is older than the tested range {TESTED_RANGE}; "
        f"install a torch of that range, or set {_PERMITS_OLDER}=1 to build against this one."
    )
