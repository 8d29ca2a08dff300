"""When, from which commit and with which versions a run was made."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("k3rewrite", "torch", "triton", "transformers", "ziglang")


def describe_versions() -> dict[str, Any]:
    """`date` (ISO 8601 with offset), `commit` of the current folder's checkout ("" outside git), `versions`."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": installed_versions(),
    }


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what is compiled."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, cwd=Path.cwd(), check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
