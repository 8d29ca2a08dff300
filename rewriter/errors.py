"""Every error a user can meet, each naming the place and the remedy.

The command line turns an error into its `exit_code`: 1 when an expectation or a verification failed, 2 when the
input (YAML, options, model, checkpoint, shapes) is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class K3RewriteError(Exception):
    """Base of all errors raised on purpose. `place` says where ("file.yaml:12"), `remedy` what to do."""

    exit_code = 2
    report: Any = None
    """the RunReport of the compilation that the error ended, if there is one: what was done up to there"""

    def __init__(self, message: str, *, place: str | None = None, remedy: str | None = None) -> None:
        self.message, self.place, self.remedy = message, place, remedy
        text = f"{place}: {message}" if place else message
        super().__init__(f"{text}\n  remedy: {remedy}" if remedy else text)


class ConfigError(K3RewriteError):
    """A pipeline, target, model configuration or option that cannot be used."""


class ModelError(K3RewriteError):
    """Code of the user's own that raises while it makes the model, or is called; the message holds its traceback."""


class CaptureError(K3RewriteError):
    """A model that cannot be captured as one graph; the message holds the user's source line."""


class CheckpointError(K3RewriteError):
    """A checkpoint whose tensors do not fit the model; all of them are listed at once."""


class EmitError(K3RewriteError):
    """A kernel that does not compile for a target."""


class UnsupportedError(K3RewriteError):
    """A dtype, shape or mode that this project does not take."""


class ExpectationError(K3RewriteError):
    """A pipeline's `expect` does not hold; the message shows the near misses."""

    exit_code = 1


class ContractError(K3RewriteError):
    """A rewrite that would change a dtype, shape, device or stride, or leave the graph ill-formed."""

    exit_code = 1


class VerificationError(K3RewriteError):
    """Outputs that differ from the reference by more than the rule allows."""

    exit_code = 1


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the nearest known name, or the list of what there is."""
    known = sorted(known)
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean '{near[0]}'?" if near else "known: " + (", ".join(known) or "none")
