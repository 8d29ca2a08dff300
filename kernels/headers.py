"""The headers that HIP kernels include: part of what such a kernel is."""

from __future__ import annotations

from pathlib import Path

HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
