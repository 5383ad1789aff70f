"""The browser that looks at pages of kvlab: Chromium, under any of its names."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

__all__ = ["MISSING", "browser", "dump"]

MISSING = "no Chromium: the HTML report was not looked at in a browser (make browser installs one on Debian)"
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def browser() -> str | None:
    """Path of a browser; None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name)) is not None), None)


def dump(page: Path, profile: Path, *, width: int, height: int) -> str:
    """What a page has become in a window of that size, two seconds after it was opened."""
    size = f"--window-size={width},{height}"
    command = [str(browser()), *_FLAGS, size, f"--user-data-dir={profile}", "--virtual-time-budget=2000"]
    answer = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return answer.stdout
