"""Weights from and to safetensors, under the names and dtypes of the published checkpoint.

    model.safetensors.index.json      which tensor is in which file
    model-00001-of-00096.safetensors  ...

Names are those of the modules with the prefix `language_model.`, except that experts are stored one by one
(`experts.7.w1.weight_packed`) and mixers without their module (`mlp_res_norm`, `mlp_res_proj`). A checkpoint holds
whole tensors; a tensor-parallel rank reads its part of each and nothing more.

Loading reads all headers first and refuses the checkpoint with one error that lists everything wrong with it, so that
a model is never half loaded. Then it copies one tensor at a time, file by file. Saving writes to a folder beside the
final one and renames it, so that a checkpoint is never half written.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from k3rewrite.errors import CheckpointError
from k3rewrite.models.kimi_k3.model import KimiK3
from k3rewrite.models.kimi_k3.parallel import split_dimension

PREFIX = "language_model."
INDEX = "model.safetensors.index.json"
OTHER_MODULES = ("vision_tower.", "mm_projector.")
"""Parts of the published multimodal checkpoint that are not the text decoder."""

_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_FP32 = {"A_log", "dt_bias", "o_norm", "q_conv1d", "k_conv1d", "v_conv1d", "e_score_correction_bias"}
"""Modules and parameters that are published in fp32; expert weights are bytes, everything else bf16."""


LONGEST_SHOWN = 300
"""characters of a path that a message shows"""


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of the checkpoint and where it lives in this rank's model.

    `shape` is the whole tensor's, `target` this rank's part of it: entries `start : start + n` of dimension `split`, or
    all of it (`split` None).
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    target: Tensor
    split: int | None = None
    start: int = 0

    def part(self, stored: Any) -> Tensor:
        """This rank's part, read from a safetensors slice."""
        if self.split is None:
            return stored[:] if self.shape else stored[...]
        stop = self.start + self.target.shape[self.split]
        return stored[self.start : stop] if self.split == 0 else stored[:, self.start : stop]


def checkpoint_tensors(model: KimiK3) -> Iterator[CheckpointTensor]:
    """Every tensor that a checkpoint of `model` holds, with names without the `language_model.` prefix."""
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        if "experts" in parts:
            yield from _expert_tensors(model, name, tensor)
        else:
            if parts[-2] in ("norm", "proj") and parts[-3].endswith("_res"):
                parts[-3:-1] = [f"{parts[-3]}_{parts[-2]}"]
            yield _tensor(model, ".".join(parts), tensor)


def _expert_tensors(model: KimiK3, name: str, tensor: Tensor) -> Iterator[CheckpointTensor]:
    """`experts.w13_packed` `[E, 2I, .]` -> `experts.{e}.w1.weight_packed` and `experts.{e}.w3.weight_packed`, ..."""
    path, leaf = name.rsplit(".", 1)
    stack, _, kind = leaf.partition("_")
    suffix = f"weight_{kind}" if kind else "weight"
    for expert, matrix in enumerate(tensor):
        if stack == "w2":
            yield _tensor(model, f"{path}.{expert}.w2.{suffix}", matrix)
        else:
            for part, half in zip(("w1", "w3"), matrix.chunk(2), strict=True):
                yield _tensor(model, f"{path}.{expert}.{part}.{suffix}", half)


def _tensor(model: KimiK3, name: str, target: Tensor) -> CheckpointTensor:
    parallel, shape, split, start = model.parallel, list(target.shape), None, 0
    if parallel.size > 1 and (split := split_dimension(name)) is not None:
        start = parallel.rank * shape[split]
        shape[split] *= parallel.size
        if name.endswith(".A_log"):  # stored padded with zeros, of which no rank holds any
            shape[0] = model.config.a_log_length
    return CheckpointTensor(name, tuple(shape), _accepted_dtypes(name, target), target, split, start)


def _accepted_dtypes(name: str, target: Tensor) -> tuple[str, ...]:
    """The published dtype and the model's own, which is wider in an fp32 or fp64 model and holds it exactly."""
    if target.dtype is torch.uint8:
        return ("U8",)
    parts = set(name.split("."))
    published = "F32" if parts & _FP32 else "BF16"
    return tuple(dict.fromkeys((published, _DTYPES[target.dtype])))


# ---- loading


def load_checkpoint(model: KimiK3, folder: str | PathLike[str]) -> KimiK3:
    """Copy the checkpoint in `folder` into `model`, in place, and return it.

    Accepts names with or without the `language_model.` prefix; vision tensors are left alone. Raises one
    `CheckpointError` that lists all missing, extra, wrongly shaped and wrongly typed tensors; nothing is copied then.
    """
    root = Path(folder)
    wanted = {tensor.name: tensor for tensor in checkpoint_tensors(model)}
    stored, problems = _headers(root, wanted.keys())
    for name in sorted(wanted.keys() - stored.keys()):
        problems.append(f"missing: {name} {list(wanted[name].shape)}")
    for name in sorted(stored.keys() - wanted.keys()):
        problems.append(f"extra: {name} {list(stored[name].shape)}")
    for name in sorted(wanted.keys() & stored.keys()):
        have, want = stored[name], wanted[name]
        if have.shape != want.shape:
            problems.append(f"wrong shape: {name} is {list(have.shape)}, must be {list(want.shape)}")
        if have.dtype not in want.dtypes:
            problems.append(f"wrong dtype: {name} is {have.dtype}, must be {' or '.join(want.dtypes)}")
    if problems:
        raise CheckpointError(
            f"{len(problems)} problem{'s' * (len(problems) != 1)}; nothing was loaded:\n  - " + "\n  - ".join(problems),
            place=str(root),
            remedy="use the checkpoint of this configuration (number of layers, experts='bf16' or 'mxfp4')",
        )
    for file in sorted({header.file for header in stored.values()}):
        try:
            with safe_open(file, framework="pt") as content:
                for name, header in stored.items():
                    if header.file == file:
                        wanted[name].target.copy_(wanted[name].part(content.get_slice(header.key)))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"changed while it was read, and the model holds a part of it: {error}",
                place=str(file),
                remedy="load it again",
            ) from None
    return model


@dataclass(frozen=True)
class _Header:
    """Where a stored tensor is and what its file says about it."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str


def _headers(root: Path, wanted: Set[str]) -> tuple[dict[str, _Header], list[str]]:
    """Headers of the text decoder's tensors by name without prefix, and the problems met on the way.

    `wanted` are the model's names: of these, one that is in no file is told as missing, and not here.
    """
    problems: list[str] = []
    unreadable: set[str] = set()
    files, indexed = _files(root)
    stored: dict[str, _Header] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as content:
                for key in content.keys():  # noqa: SIM118 (not a dict)
                    entry = content.get_slice(key)
                    header = _Header(file, key, tuple(entry.get_shape()), entry.get_dtype())
                    if key in stored:
                        problems.append(f"twice: {key} is in {stored[key].file.name} and in {file.name}")
                    stored[key] = header
        except (OSError, ValueError, SafetensorError) as error:  # a name with a zero byte is a ValueError
            problems.append(f"unreadable: {file.name}: {error}")
            unreadable.add(file.name)
    for key, name in sorted((indexed or {}).items()):
        if key in stored:
            if stored[key].file.name != name:
                problems.append(f"index: {key} is in {stored[key].file.name}, the index says {name}")
        elif name not in unreadable and not key.startswith(OTHER_MODULES) and key.removeprefix(PREFIX) not in wanted:
            problems.append(f"index: {key} is in no file, the index says {name}")
    if any(key.startswith(PREFIX) for key in stored):
        return _without_prefix(stored, problems), problems
    return stored, problems


def _without_prefix(stored: Mapping[str, _Header], problems: list[str]) -> dict[str, _Header]:
    """The text decoder's tensors by the model's names. Two that are one without the prefix are a problem."""
    named: dict[str, _Header] = {}
    for key, header in stored.items():
        if key.startswith(OTHER_MODULES):
            continue
        first = named.setdefault(key.removeprefix(PREFIX), header)
        if first is not header:
            problems.append(f"twice: {first.key} is in {first.file.name} and {key} is in {header.file.name}")
    return named


def _files(root: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files of a checkpoint, by its index if it has one, and the index."""
    try:
        found = sorted(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            "is no folder", place=_shown(root), remedy="give the folder with the safetensors files"
        ) from None
    except (OSError, ValueError) as error:  # may not be entered, a name that is too long or has a zero byte
        raise CheckpointError(
            f"cannot be read: {getattr(error, 'strerror', error)}",
            place=_shown(root),
            remedy="give a folder with safetensors files that can be read",
        ) from None
    index = root / INDEX
    if index in found:  # also a link to nothing, which must not pass for a checkpoint without an index
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return [root / name for name in sorted(set(weight_map.values()))], dict(weight_map)
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"no weight_map can be read: {error!r}", place=str(index), remedy="fetch the index again"
            ) from None
    files = [path for path in found if path.suffix == ".safetensors"]
    if not files:
        raise CheckpointError(
            f"holds neither {INDEX} nor *.safetensors",
            place=str(root),
            remedy="give the folder with the safetensors files",
        )
    return files, None


# ---- saving


def save_checkpoint(model: KimiK3, folder: str | PathLike[str], *, shard_bytes: int = 5 << 30) -> Path:
    """Write `model` to the new folder `folder` in files of about `shard_bytes`, and return the folder.

    A bf16 model is written with the published dtypes, others with their own. Raises `CheckpointError` when the folder
    exists (nothing is overwritten) or cannot be written, or when the model is a tensor-parallel rank, which holds parts
    only.
    """
    root = Path(folder)
    if model.parallel.size > 1:
        raise CheckpointError(
            f"this is rank {model.parallel.rank} of {model.parallel.size}, which holds a part of each tensor",
            place="save_checkpoint",
            remedy="save from a model that was built without a process group",
        )
    if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise CheckpointError(
            f"shard_bytes is {shard_bytes!r}", place="save_checkpoint", remedy="give a whole number of bytes"
        )
    if os.path.lexists(root):  # a link to nothing is there, too
        raise CheckpointError("exists", place=str(root), remedy="name a new folder; nothing is overwritten")
    shards = _shards(model, shard_bytes)
    missing = [parent for parent in root.parents if not os.path.lexists(parent)]
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        _write(shards, root)
    except (OSError, ValueError, SafetensorError) as error:
        for parent in missing:
            with contextlib.suppress(OSError):  # not made, or something else is in it by now
                parent.rmdir()
        raise CheckpointError(
            f"cannot be written: {getattr(error, 'strerror', None) or error}",
            place=_shown(root),
            remedy="name a new folder where there is room and where you may write; nothing is left of this one",
        ) from None
    return root


def _write(shards: list[list[CheckpointTensor]], root: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        root.lstat()  # a name that is too long is told before anything is written
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=root.parent) as scratch:
        work = Path(scratch) / "checkpoint"
        work.mkdir()
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            save_file({PREFIX + t.name: t.target.contiguous() for t in shard}, work / file, metadata={"format": "pt"})
            weight_map |= {PREFIX + t.name: file for t in shard}
        total = sum(t.target.numel() * t.target.element_size() for shard in shards for t in shard)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (work / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")
        os.rename(work, root)


def _shown(path: Path) -> str:
    """A path in a message, cut off where it is so long that it is none."""
    text = str(path)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _shards(model: KimiK3, shard_bytes: int) -> list[list[CheckpointTensor]]:
    """The model's tensors in order, cut into lists of at most `shard_bytes` (or of one larger tensor)."""
    shards: list[list[CheckpointTensor]] = [[]]
    size = 0
    for tensor in checkpoint_tensors(model):
        added = tensor.target.numel() * tensor.target.element_size()
        if shards[-1] and size + added > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += added
    return shards
