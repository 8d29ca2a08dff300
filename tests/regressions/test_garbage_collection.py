"""While passes run, the garbage collector leaves alone what tracing left behind, and all is as before afterwards."""

from __future__ import annotations

import gc

import pytest
import torch

from k3rewrite.backend import Backend
from k3rewrite.driver import heap


def test_objects_of_before_are_frozen_inside_and_not_afterwards() -> None:
    assert gc.get_freeze_count() == 0
    with pytest.raises(ValueError, match="in the middle"), heap.left_alone():
        assert gc.get_freeze_count() > 1000
        raise ValueError("in the middle")
    assert gc.get_freeze_count() == 0


def test_what_a_process_has_frozen_stays_so() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with heap.left_alone():
            assert gc.get_freeze_count() == before
        assert gc.get_freeze_count() == before
    finally:
        gc.unfreeze()


def test_compiling_leaves_the_collector_as_it_was() -> None:
    backend = Backend({"pipeline": "default", "target": "cpu", "finalise": "eager"})
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert torch.compile(torch.nn.functional.silu, backend=backend, fullgraph=True)(x).shape == x.shape
    assert gc.get_freeze_count() == 0 and gc.isenabled()
