"""Writing files that are complete or not there: each is written beside its place first and moved into it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from k3rewrite.errors import EmitError


def write_files(folder: Path, files: Mapping[str, bytes], *, keep: bool) -> None:
    """Write files by name into `folder`, which is made if it is not there. With `keep`, one that is there stays.

    `EmitError` if the folder cannot be written; an interruption leaves complete files only.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as name:
            staged = [entry for entry in files if not (keep and (folder / entry).exists())]
            for entry in staged:
                (Path(name) / entry).write_bytes(files[entry])
            for entry in staged:
                os.replace(Path(name) / entry, folder / entry)
    except OSError as error:
        raise EmitError(
            f"cannot write: {error}", place=str(folder), remedy="give a folder that can be written"
        ) from None
