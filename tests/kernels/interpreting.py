"""Triton kernels run by the interpreter, in a process of their own: it is chosen when triton is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def results_of(script: str, timeout: float = 250) -> Any:
    """What a script of this folder prints as its last line, in JSON, where Triton interprets."""
    path = Path(__file__).with_name(script)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(path.parent)}
    done = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
