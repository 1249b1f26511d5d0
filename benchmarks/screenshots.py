"""Take the pictures of the report's page that the docs show: on a desktop, and on a phone in dark colours.

    python benchmarks/screenshots.py benchmarks/results/cpu-grid-1 docs/images

Needs Chromium (Debian's package `chromium`) and playwright, which `pip install '.[test]'` brings.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerobench.page.write import page_text
from zerobench.results.files import read_results

LARGEST_BYTES = 200_000
VIEWS: dict[str, dict[str, Any]] = {
    "report_desktop": {"viewport": {"width": 1280, "height": 2300}},
    "report_phone": {
        "viewport": {"width": 390, "height": 844},
        "device_scale_factor": 2,
        "color_scheme": "dark",
    },
}


def take(browser: Any, results: Path, folder: Path) -> list[Path]:
    """Write a picture of each view into `folder` and return the files. Raise SystemExit for one that is too large."""
    paths = []
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "report.html"
        file.write_text(page_text([(results.name, read_results(results))]), encoding="utf-8")
        for name, options in VIEWS.items():
            page = browser.new_page(**options)
            page.goto(file.as_uri())
            page.wait_for_function("document.documentElement.dataset.drawn", timeout=60_000)
            paths.append(folder / f"{name}.png")
            page.screenshot(path=paths[-1])
            page.close()
            shrink(paths[-1])
    return paths


def shrink(path: Path) -> None:
    """Keep 256 colours of a picture. Raise SystemExit if it is too large for the docs all the same."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(256)
    small.save(path, optimize=True)
    if path.stat().st_size > LARGEST_BYTES:
        raise SystemExit(f"{path} has {path.stat().st_size} bytes, and {LARGEST_BYTES} are allowed")


def main(arguments: Sequence[str] | None = None) -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description="Take the pictures of the report's page that the docs show.")
    parser.add_argument("results", type=Path, help="folder of results")
    parser.add_argument("folder", type=Path, help="folder for the pictures")
    given = parser.parse_args(arguments)
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium was not found: install Debian's package chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for path in take(browser, given.results, given.folder):
            print(path)


if __name__ == "__main__":
    main()
