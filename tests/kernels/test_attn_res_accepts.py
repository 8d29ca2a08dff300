"""What the AttnRes kernels do not take: one reason each, and no guard on a symbolic batch."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
import torch
from test_attn_res_triton import BY_NAME, call

from k3rewrite.errors import UnsupportedError
from k3rewrite.kernels.attn_res_norm import hip_kernel, launch
from k3rewrite.targets import load_target

H200, MI355X, CPU = (load_target(name) for name in ("h200", "mi355x", "cpu"))


def reason(kernel: str, target: Any = H200, rows: int = 4, **changes: Any) -> str | None:
    return BY_NAME[kernel].accepts(call(rows, 2) | changes, target)


def test_k3_calls_are_taken() -> None:
    for kernel in ("attn_res_norm.triton", "add_attn_res_norm.triton", "add_attn_res_norm.hip"):
        for target in (H200, MI355X):
            assert reason(kernel, target) is None
    arguments = call(4, 2)
    with torch.device("meta"):
        bank = torch.empty(4, 8, 7168, dtype=torch.bfloat16)
    written = arguments | {"bank": bank, "slot": 2, "delta": None, "blocks": [bank[:, :2]]}
    for kernel in ("write_attn_res_norm.triton", "write_attn_res_norm.hip"):
        assert BY_NAME[kernel].accepts(written, H200) is None
    mixed = {"sources": [bank[:, :3], arguments["prefix"]]} | {
        name: arguments[name] for name in ("score_norm", "score_proj", "score_eps", "compute_dtype", "out_dtype")
    }
    for kernel in ("attn_res.triton", "attn_res.hip"):
        assert BY_NAME[kernel].accepts(mixed, MI355X) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"compute_dtype": torch.float64}, "computes in float32, not float64"),
        ({"mix_dtype": torch.float64}, "mix_dtype is float64; bfloat16, float16 and float32 are written"),
        ({"out_dtype": torch.float8_e4m3fn}, "out_dtype is float8_e4m3fn"),
        ({"norm_weight": torch.empty(7168, dtype=torch.float64)}, "norm_weight is float64"),
        ({"delta": torch.empty(4, 7168 * 2)[:, ::2]}, r"delta is not contiguous in its last dimension \(stride 2\)"),
        ({"blocks": [torch.empty(4, 2, 7168)]}, "source 0 is float32, the prefix bfloat16"),
        ({"blocks": [torch.empty(4, 16, 7168, dtype=torch.bfloat16)]}, "17 sources; at most 16 are taken"),
    ],
)
def test_reasons_of_the_triton_kernel(changes: dict[str, Any], expected: str) -> None:
    found = reason("add_attn_res_norm.triton", **changes)
    assert found is not None
    assert re.match(expected, found), found


def test_long_rows_and_odd_leading_strides_are_refused() -> None:
    assert "rows of 32768 elements" in str(BY_NAME["add_attn_res_norm.triton"].accepts(call(2, 1, columns=32768), H200))
    arguments = call(4, 2)
    with torch.device("meta"):
        prefix = torch.empty(6, 2, 7168, dtype=torch.bfloat16)[:, :1].expand(6, 2, 7168)
        delta = torch.empty(6, 2, 7168, dtype=torch.bfloat16)
    changed = arguments | {"prefix": prefix, "delta": delta, "blocks": [delta]}
    assert "leading dimensions of prefix do not collapse" in str(
        BY_NAME["add_attn_res_norm.triton"].accepts(changed, H200)
    )


@pytest.mark.parametrize(
    ("target", "rows", "changes", "expected"),
    [
        (H200, 65, {}, "for up to 64 rows; there are 65"),
        (MI355X, 65, {}, None),
        (MI355X, 4, {"out_dtype": torch.float32}, "writes bfloat16"),
        (MI355X, 4, {"norm_weight": torch.empty(7168)}, "norm_weight is float32; everything is bfloat16"),
        (MI355X, 4, {"mix_dtype": torch.float16}, "mix_dtype is float16"),
        (MI355X, 4, {"delta": torch.empty(4, 7172, dtype=torch.bfloat16)[:, :7168]}, "rows of delta do not begin at"),
        (MI355X, 4, {"delta": torch.empty(4 * 7168 + 4, dtype=torch.bfloat16)[4:].view(4, 7168)}, "rows of delta do"),
        (MI355X, 4, {"blocks": [torch.empty(4, 15, 7168, dtype=torch.bfloat16)]}, "16 sources take 128 registers"),
    ],
)
def test_reasons_of_the_hip_kernel(target: Any, rows: int, changes: dict[str, Any], expected: str | None) -> None:
    found = reason("add_attn_res_norm.hip", target, rows, **changes)
    assert found is None if expected is None else expected in str(found)


def test_the_cpu_target_runs_references() -> None:
    for kernel in ("add_attn_res_norm.triton", "add_attn_res_norm.hip"):
        assert reason(kernel, CPU) == "the target 'cpu' has no kernels; it runs the references"


def test_a_symbolic_batch_is_taken_without_a_guard() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)

    def fake(*shape: int) -> torch.Tensor:
        dynamic = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (len(shape) - 1)]
        context = StatelessSymbolicContext(dynamic_sizes=dynamic)
        return mode.from_tensor(torch.empty(shape, dtype=torch.bfloat16, device="meta"), symbolic_context=context)

    bank, arguments = fake(6, 8, 7168), call(6, 2)
    arguments |= {"prefix": fake(6, 7168), "delta": fake(6, 7168), "blocks": [bank[:, :2]]}
    before = len(environment.guards)
    assert BY_NAME["add_attn_res_norm.triton"].accepts(arguments, H200) is None
    assert len(BY_NAME["add_attn_res_norm.triton"].units(arguments, H200)) == 2
    both = BY_NAME["add_attn_res_norm.hip"]
    assert both.accepts(arguments, H200) is None
    assert [unit.language for unit in both.units(arguments, H200)] == ["hip"] * 4 + ["triton"] * 2
    assert both.cost_us(arguments, H200) < BY_NAME["add_attn_res_norm.triton"].cost_us(arguments, H200)
    assert len(environment.guards) == before


def test_a_symbolic_batch_is_served_by_the_real_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(launch, "device_facts", lambda device: ("sm_90", 132))
    monkeypatch.setattr(launch, "mix_rows", lambda prefix, *rest, **options: ran.append("triton"))
    monkeypatch.setattr(hip_kernel, "mix_rows", lambda prefix, *rest, **options: ran.append("hip"))
    for shape in ((1, 8), (4, 8, 8), (65, 8), (5, 13, 8)):
        hip_kernel.mix_rows_by_call(torch.empty(shape))
    monkeypatch.setattr(launch, "device_facts", lambda device: ("gfx950", 256))
    hip_kernel.mix_rows_by_call(torch.empty(4096, 8))
    assert ran == ["hip", "hip", "triton", "triton", "hip"]


@pytest.mark.parametrize("which", ["prefix", "delta", "block", "weight"])
def test_tensors_at_odd_addresses_are_not_read_sixteen_bytes_at_a_time(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a graph knows of alignment holds for the call that it was captured with; nothing guards it later."""
    ran = []
    monkeypatch.setattr(launch, "device_facts", lambda device: ("sm_90", 132))
    monkeypatch.setattr(launch, "mix_rows", lambda prefix, *rest, **options: ran.append("triton"))
    monkeypatch.setattr(hip_kernel, "mix_rows", lambda prefix, *rest, **options: ran.append("hip"))
    whole = torch.empty(2 * 64 + 1, dtype=torch.bfloat16)
    even, odd = whole[:-1].view(2, 64), whole[1:].view(2, 64)
    rows = {name: odd if name == which else even for name in ("prefix", "delta", "block", "weight")}
    call_ = (rows["prefix"], rows["delta"], [even, rows["block"]], None, rows["weight"][0], even[0], 1e-5, None, 0.0)
    hip_kernel.mix_rows_by_call(*call_)
    hip_kernel.mix_rows_by_call(even, None, [even], None, even[0], even[0], 1e-5, None, 0.0)
    assert ran == ["triton", "hip"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="multiple of 16 bytes"):
        hip_kernel.mix_rows_by_call(*call_)


def test_few_rows_get_the_cluster_kernel_and_many_the_triton_kernel() -> None:
    for rows, wanted in ((1, "hip"), (64, "hip"), (65, "triton"), (4096, "triton")):
        arguments = call(rows, 8)
        taking = [k for k in BY_NAME.values() if k.op == "add_attn_res_norm" and k.accepts(arguments, H200) is None]
        assert min(taking, key=lambda k: k.cost_us(arguments, H200)).language == wanted
