"""What `k3rewrite compile` is asked to do, with every setting resolved and checked before anything is built.

resolve_request(model="kimi-k3", config="tiny", phase="decode", known_passes=PASSES, known_targets=TARGETS)
    -> CompileRequest(pipeline=<kimi-k3-decode>, batch=4, tokens=1, context=64, dtype="bfloat16", ...)
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch

from k3rewrite.driver import kimi_k3
from k3rewrite.driver.choices import VERIFY, check_choice
from k3rewrite.driver.names import names_of_command
from k3rewrite.errors import ConfigError, did_you_mean
from k3rewrite.pipeline.config import load_pipeline
from k3rewrite.pipeline.layer import is_known_target
from k3rewrite.pipeline.settings import AUTO_TARGET, MOST_RANKS, PipelineConfig

Phase: TypeAlias = Literal["decode", "verify", "prefill"]
PHASES: tuple[Phase, ...] = get_args(Phase)

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
DTYPE_ALIASES: Mapping[str, str] = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}

DEFAULT_TOKENS: Mapping[str, int] = {"decode": 1, "verify": 4, "prefill": 128}
"""Tokens of each sequence in one call; a prefill of 128 is two 64-token chunks."""

DEFAULT_CONTEXT: Mapping[str, int] = {"decode": 64, "verify": 64, "prefill": 0}
"""Tokens of each sequence that are in the caches already."""

MAX_TOKENS = 1 << 20
"""Longest sequence of the published model (`max_position_embeddings`)."""

SHOWN_PATH = 300
"""characters that a message shows of a path that is none, which may be thousands long"""

_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class CompileRequest:
    """One compilation. `pipeline` is final: flags have been merged into it; `target`, `tp` and `verify` live there.

    model      "kimi-k3" or "package.module:factory", where factory() -> (module, args, kwargs)
    config     "tiny", "tiny-tp8", "full" or the path of a published config.json (Kimi K3 only)
    layers     keep the first N layers only; None keeps all
    batch      sequences; tokens: per sequence in this call; context: per sequence already in the caches
    dtype      "bfloat16", "float32", "float64": activations and weights (MXFP4 experts stay packed)
    tp, rank   from the pipeline; with tp > 1 and no process group a fake group stands in
    out        folder in which a fresh run-NNN is made
    run        execute the compiled model; False compiles with fake tensors, no weights are allocated
    command    the command line, for the report
    given      names of the fields that were asked for and not defaulted; a factory must take each of them
    """

    model: str
    pipeline: PipelineConfig
    out: Path
    config: str = "tiny"
    layers: int | None = None
    phase: Phase = "decode"
    batch: int = 4
    tokens: int = 1
    context: int = 64
    dtype: str = "bfloat16"
    rank: int = 0
    run: bool = True
    seed: int = 0
    command: str = ""
    given: frozenset[str] = frozenset()

    @property
    def is_kimi_k3(self) -> bool:
        return self.model == kimi_k3.NAME

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def target(self) -> str:
        """Name of a known target, or "auto"."""
        return self.pipeline.target

    @property
    def tp(self) -> int:
        return self.pipeline.parallel.tp

    @property
    def verify_regions(self) -> bool:
        return self.pipeline.verify.regions

    @property
    def verify_end_to_end(self) -> bool:
        return self.pipeline.verify.end_to_end


def resolve_request(
    *,
    model: str,
    known_passes: Mapping[str, type],
    known_targets: Iterable[str],
    config: str | None = None,
    layers: int | None = None,
    phase: str | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    context: int | None = None,
    dtype: str | None = None,
    pipeline: str | Path | Mapping[str, Any] | None = None,
    target: str | None = None,
    tp: int | None = None,
    rank: int = 0,
    out: Path | str = "k3rewrite-runs",
    verify: str | None = None,
    run: bool = True,
    seed: int | None = None,
    command: str = "",
) -> CompileRequest:
    """Check every setting, load the pipeline, merge the flags into it. `ConfigError` names the flag and the remedy.

    None means: not asked for, take the default. Without `pipeline`, Kimi K3 takes `kimi-k3-<phase>` and any other model
    `default`. `verify=None` leaves the pipeline's own setting; the other choices replace it.
    """
    targets = tuple(known_targets)
    own_model = model == kimi_k3.NAME
    _check_model(model)
    shapes = {"phase": phase, "batch": batch, "tokens": tokens, "context": context, "dtype": dtype, "seed": seed}
    given = frozenset(name for name, value in shapes.items() if value is not None)
    phase = check_choice("decode" if phase is None else phase, PHASES, "--phase")
    dtype = "bfloat16" if dtype is None else DTYPE_ALIASES.get(dtype, dtype)
    dtype = check_choice(dtype, DTYPES, "--dtype")
    checks = None if verify is None else VERIFY[check_choice(verify, VERIFY, "--verify")]
    config = _check_config(config, own_model)
    if config == "full" and layers is None and run:
        raise ConfigError(
            "the full model has 2.78 T parameters", place="--config", remedy="add --no-run (no weights) or --layers N"
        )
    layers = None if layers is None else _whole("--layers", layers, 1, 1000)
    if layers is not None and not own_model:
        raise ConfigError("only Kimi K3 can be cut to N layers", place="--layers", remedy="build fewer in the factory")
    batch = _whole("--batch", 4 if batch is None else batch, 1, 65536)
    tokens = _whole("--tokens", DEFAULT_TOKENS[phase] if tokens is None else tokens, 1, MAX_TOKENS)
    context = _whole("--context", DEFAULT_CONTEXT[phase] if context is None else context, 0, MAX_TOKENS)
    if phase == "decode" and tokens != 1:
        raise ConfigError(
            f"decode takes one token a sequence, not {tokens}", place="--tokens", remedy="use --phase verify or prefill"
        )
    if phase == "verify" and tokens < 2:
        raise ConfigError(
            "verify takes the sampled token and at least one draft token", place="--tokens", remedy="give 2 or more"
        )
    if context + tokens > MAX_TOKENS:
        raise ConfigError(f"context + tokens is {context + tokens}", place="--context", remedy=f"at most {MAX_TOKENS}")
    seed = _whole("--seed", 0 if seed is None else seed, 0, 2**63 - 1)
    if target is not None and not is_known_target(target, (*targets, AUTO_TARGET)):
        raise ConfigError(
            f"unknown target '{target}'", place="--target", remedy=did_you_mean(target, (*targets, AUTO_TARGET))
        )
    if tp is not None:
        _whole("--tp", tp, 1, MOST_RANKS)

    chosen = pipeline if pipeline is not None else (f"kimi-k3-{phase}" if own_model else "default")
    loaded = load_pipeline(
        chosen,
        known_passes=known_passes,
        known_targets=targets,
        known_names=names_of_command(model),
    )
    loaded = loaded.override(target=target, tp=tp, verify=checks)
    if not 0 <= rank < loaded.parallel.tp:
        raise ConfigError(
            f"there is no rank {rank} of {loaded.parallel.tp}",
            place="--rank",
            remedy=f"give 0 to {loaded.parallel.tp - 1}, or a larger --tp",
        )
    if not run and (loaded.verify.end_to_end or loaded.verify.regions):
        raise ConfigError(
            "checks of regions and end to end compute with real tensors: they need a run",
            place="--no-run",
            remedy="take --no-run or the check out",
        )
    return CompileRequest(
        model=model,
        pipeline=loaded,
        out=_check_out(out),
        config=config,
        layers=layers,
        phase=phase,  # type: ignore[arg-type]  # check_choice returns one of PHASES
        batch=batch,
        tokens=tokens,
        context=context,
        dtype=dtype,
        rank=rank,
        run=run,
        seed=seed,
        command=command,
        given=given,
    )


def _check_model(model: str) -> None:
    if model == kimi_k3.NAME or _FACTORY.fullmatch(model):
        return
    near = "did you mean 'kimi-k3'? " if get_close_matches(model, [kimi_k3.NAME]) else ""
    raise ConfigError(
        f"no model '{model}'", place="MODEL", remedy=f"{near}give '{kimi_k3.NAME}' or 'package.module:factory'"
    )


def _check_config(config: str | None, own_model: bool) -> str:
    if config is None:
        return "tiny" if own_model else ""
    if not own_model:
        raise ConfigError(
            "only Kimi K3 has configurations", place="--config", remedy="configure the model in its factory"
        )
    if config in kimi_k3.CONFIGS:
        return config
    if config.endswith(".json") or os.sep in config:
        try:
            is_file = Path(config).is_file()
        except (OSError, ValueError) as error:  # a folder that may not be entered, a name that is too long
            raise _no_path(config, error, "--config", "give the path of a file that can be read") from None
        if not is_file:
            raise ConfigError(f"no file '{config}'", place="--config", remedy="check the path")
        return config
    raise ConfigError(
        f"no configuration '{config}'",
        place="--config",
        remedy=f"{did_you_mean(config, kimi_k3.CONFIGS)} or give a .json file",
    )


def _check_out(given: Path | str) -> Path:
    """`Path("")` is the current folder, so an empty text is seen only before it becomes a path."""
    if not str(given):
        raise ConfigError("no folder is named", place="--out", remedy="give a folder, '.' for the current one")
    out = Path(given)
    try:
        existing = next(folder for folder in (out, *out.absolute().parents) if _is_there(folder))
    except (OSError, ValueError) as error:  # a folder that may not be entered, a name that is too long
        raise _no_path(out, error, "--out", "give a folder that can be written") from None
    if not existing.is_dir():
        raise ConfigError(
            f"'{existing}' is a file", place="--out", remedy="give a folder; each run makes a fresh one in it"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"'{existing}' cannot be written", place="--out", remedy="give a folder that can")
    return out


def _is_there(path: Path) -> bool:
    """`Path.exists`, which says False of a path that cannot be looked at in some versions of Python only."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _no_path(path: Path | str, error: Exception, flag: str, remedy: str) -> ConfigError:
    shown = str(path)
    shown = shown if len(shown) <= SHOWN_PATH else f"{shown[:SHOWN_PATH]}..."
    return ConfigError(f"'{shown}' cannot be used: {getattr(error, 'strerror', error)}", place=flag, remedy=remedy)


def _whole(flag: str, value: int, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(
            f"{value!r} is not a whole number from {low} to {high}", place=flag, remedy="correct the number"
        )
    return value
