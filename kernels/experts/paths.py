"""Which launches serve which numbers of tokens, in words: for the report.

8 of 128 experts on an H200  ->  "to 12 tokens warp decode, to 128 tokens shared reads, more sorted"
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from k3rewrite.kernels.experts.plan import Facts

_WORDS = {"routes": "routes apart", "experts": "shared reads", "sorted": "sorted"}
_LAST = 1 << 20
"""tokens beyond which nothing changes any more"""


def described(facts: Facts, arch: str, own: str = "", takes: Callable[[Facts, int], bool] | None = None) -> str:
    """The paths of a call. `takes` says which numbers of tokens the kernel called `own` keeps for itself; the others go
    to the Triton kernels."""
    return _described(facts, arch, own, takes)


@cache
def _described(facts: Facts, arch: str, own: str, takes: Callable[[Facts, int], bool] | None) -> str:
    def path(tokens: int) -> str:
        if takes is not None and takes(facts, tokens):
            return own
        return _WORDS[facts.schedule(arch, tokens).path]

    parts, first = [], 1
    while (name := path(first)) != path(_LAST):
        low, high = first, _LAST  # every path serves one range
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if path(middle) == name else (low, middle)
        parts.append(f"to {low} token{'s' * (low > 1)} {name}")
        first = high
    return ", ".join([*parts, f"{'more' if parts else 'always'} {name}"])
