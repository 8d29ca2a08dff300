"""The first call of a compiled graph, watched: which kernels ran, and on which device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from k3rewrite.ops.runs import Run, watching


@dataclass
class WatchedFirstCall:
    """A boxed function as AOTAutograd expects it. `done` gets what ran when the first call has ended, and whether
    it ended without an error; later calls cost no more than a look at a flag."""

    function: Callable[[list[Any]], Any]
    done: Callable[[set[Run], bool], None]
    called: bool = field(default=False, init=False)

    _boxed_call = True

    def __call__(self, inputs: list[Any]) -> Any:
        if self.called:
            return self.function(inputs)
        self.called = True
        with watching() as runs:
            try:
                result = self.function(inputs)
            except BaseException:
                self.done(runs, False)
                raise
        self.done(runs, True)
        return result
