"""The kernel of k3::kda_decode on a GPU against fp64: heads, slots, null rows, strided views, replay of a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kda_decode_cases import errors, make_call

from k3rewrite.kernels.kda_decode import hip_kernel
from k3rewrite.kernels.kda_decode.launch import kda_decode

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("heads", [12, 24, 96])
@pytest.mark.parametrize("rows", [1, 7, 128])
@pytest.mark.parametrize("inner", [torch.float32, torch.bfloat16])
def test_shapes(heads: int, rows: int, inner: torch.dtype) -> None:
    slots = [0 if i % 5 == 4 else i + 1 for i in range(rows)][::-1]
    call = make_call(slots, heads, 128, inner=inner, spare=3, device="cuda")
    found = errors(kda_decode(**call), call)
    assert found["out"] <= (4e-3 if inner is torch.float32 else 1e-2) and found["state"] <= 1e-2
    assert (found["line"], found["untouched"], found["null"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("heads", "rows", "layout"),
    [(12, 1, None), (12, 4, None), (12, 7, None), (96, 1, None), (96, 8, None), (96, 64, None), (12, 128, None),
     (12, 16, None),
     (12, 5, (2, 4)), (12, 3, (8, 4)), (12, 9, (1, 4)), (12, 9, (1, 8, True, 16, True, True))],
)  # fmt: skip
@pytest.mark.parametrize("inner", [torch.float32, torch.bfloat16])
def test_the_hip_source(heads: int, rows: int, layout: Any, inner: torch.dtype) -> None:
    """None: the layout of the target; else clusters, or bulk copies (NVIDIA)."""
    if layout and torch.version.hip:
        pytest.skip("AMD has no clusters")
    layout = hip_kernel.Layout(*layout) if layout else None
    slots = [0 if i % 5 == 4 else i + 1 for i in range(rows)][::-1]
    for activation in ("sigmoid", "silu"):
        call = make_call(slots, heads, 128, inner=inner, spare=3, activation=activation, device="cuda")
        found = errors(hip_kernel.kda_decode(**call, layout=layout), call)
        assert found["out"] <= (4e-3 if inner is torch.float32 else 1e-2) and found["state"] <= 1e-2
        assert (found["line"], found["untouched"], found["null"]) == (0, 0, 0)


@pytest.mark.parametrize("run", [kda_decode, hip_kernel.kda_decode], ids=["triton", "hip"])
def test_a_graph_with_changed_slots(run: Any) -> None:
    """Captured once; each replay reads the slots, and writes the states, of that step."""
    call = make_call([3, 2, 5, 1], 12, 128, device="cuda")  # numbers in every row, also in those that are null later
    held = {name: call[name].clone() for name in ("conv_state", "state")}
    eager = {name: value.clone() for name, value in held.items()}
    run(**call | {name: value.clone() for name, value in held.items()}, in_place=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(**call | held, in_place=True)
    for slots in ([3, 0, 5, 2], [5, 1, 0, 3], [2, 4, 1, 0]):
        call["slots"].copy_(torch.tensor(slots))
        graph.replay()
        expected = run(**call | eager, in_place=True)
        assert torch.equal(out, expected)
        assert all(torch.equal(held[n].nan_to_num(7.0), eager[n].nan_to_num(7.0)) for n in held)


@pytest.mark.parametrize(
    "form",
    [
        {"bound": None},
        {"bound": None, "per_head": True, "activation": "silu"},
        {"bound": None, "foreign": True, "spare": 1},
        {"foreign": True, "dtype": torch.float32},
        {"strided": True, "spare": 3},
    ],
    ids=["no bound", "a decay of each head", "as transformers lays it out", "the same in fp32", "strided pools"],
)
@pytest.mark.parametrize(("heads", "rows"), [(12, 1), (32, 5)])
def test_forms_of_other_models(form: dict[str, Any], heads: int, rows: int) -> None:
    slots = [0 if i % 5 == 4 else i + 1 for i in range(rows)][::-1]
    call = make_call(slots, heads, 128, device="cuda", **form)
    found = errors(kda_decode(**call), call)
    assert found["out"] <= 4e-3 and found["state"] <= 1e-2
    assert (found["line"], found["untouched"], found["null"]) == (0, 0, 0)


@pytest.mark.parametrize(("heads", "rows"), [(12, 1), (96, 8)])
def test_the_hip_source_without_a_bound(heads: int, rows: int) -> None:
    call = make_call([*range(1, rows + 1)], heads, 128, bound=None, device="cuda")
    found = errors(hip_kernel.kda_decode(**call), call)
    assert found["out"] <= 4e-3 and found["state"] <= 1e-2
    assert (found["line"], found["untouched"], found["null"]) == (0, 0, 0)
