"""Triton kernels run by the interpreter, in a process of their own: it is chosen when triton is imported."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
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


def patch_once() -> None:
    """To be called by such a script before its first launch: Triton's interpreter as it is, in half of the time. Every
    call of a function by another looks through all of `triton.language` for what is to be replaced there and finds
    nothing new; here once for each module. What is there at this time is no garbage."""
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set[int]()

    def patched_for_good(function: Any) -> Any:
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            patch(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patched_for_good
    gc.freeze()
    gc.set_threshold(50_000)
