"""Finds an installed torch by its spec, without importing it: it may lack the dependencies that importing needs.

Run as a script it prints what CMake asks for, one `key=value` a line.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path


@dataclass(frozen=True)
class Torch:
    directory: Path
    version: str  # as torch.__version__, such as 2.13.0+cpu
    cuda: str | None  # the CUDA version torch was built with, such as 13.0; None for a CPU build

    @property
    def release(self) -> tuple[int, int]:
        major, minor = re.match(r"(\d+)\.(\d+)", self.version).groups()  # type: ignore[union-attr]
        return int(major), int(minor)

    @property
    def minor(self) -> str:
        return "{}.{}".format(*self.release)


def target_site_packages() -> list[str]:
    """The site-packages of the environment that is built for, also from within pip's isolated build environment.

    pip isolates by PYTHONPATH and a sitecustomize, so sysconfig still names the target's directories.
    """
    schemes = [sysconfig.get_paths()]
    if sys.prefix == sys.base_prefix or _sees_system_packages():
        base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
        # deb_system: where Debian's own packages are, beside /usr/local of its default scheme.
        for name in ("posix_prefix", "posix_local", "deb_system", "posix_user"):
            if name in sysconfig.get_scheme_names():
                schemes.append(sysconfig.get_paths(name, vars=base if name != "posix_user" else None))
    return list(dict.fromkeys(path for paths in schemes for path in (paths["purelib"], paths["platlib"])))


def _sees_system_packages() -> bool:
    config = Path(sys.prefix, "pyvenv.cfg")
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    return (
        re.search(r"^include-system-site-packages\s*=\s*true", text, re.MULTILINE | re.IGNORECASE) is not None
    )


def find_package(name: str, paths: list[str]) -> list[Path]:
    """Directories of a package (several for a namespace package), empty when it is not there."""
    spec = PathFinder.find_spec(name, paths)
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [Path(location) for location in spec.submodule_search_locations]


def find_torch(paths: list[str]) -> Torch | None:
    for directory in find_package("torch", paths):
        # A folder without version.py is what an interrupted uninstall leaves behind.
        if (directory / "version.py").is_file() and (directory / "include").is_dir():
            return read_torch(directory)
    return None


def read_torch(directory: Path) -> Torch:
    text = (directory / "version.py").read_text(encoding="utf-8")
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    if version is None or not re.match(r"\d+\.\d+", version[1]):
        raise RuntimeError(f"{directory / 'version.py'} names no torch version; install torch again")
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return Torch(directory, version[1], cuda[1] if cuda else None)


def main() -> int:
    torch = (
        find_torch(sys.path + target_site_packages()) if len(sys.argv) < 2 else read_torch(Path(sys.argv[1]))
    )
    if torch is None:
        print(f"no torch is installed for {sys.executable}", file=sys.stderr)
        return 1
    print(
        f"directory={torch.directory}\nversion={torch.version}\nminor={torch.minor}\ncuda={torch.cuda or ''}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
