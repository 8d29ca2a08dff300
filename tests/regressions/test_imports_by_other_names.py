"""With the root of the repository on the import path the folders import by their own names; transformers does so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("first", ["k3rewrite.kernels", "kernels"])
def test_the_folder_of_kernels_is_imported_twice(first: str) -> None:
    """transformers imports any `kernels` that it finds to see its version; the ops were registered twice then."""
    code = f"import {first}, k3rewrite.kernels, kernels; assert kernels.OPS == k3rewrite.kernels.OPS"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
