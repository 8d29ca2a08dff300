"""The gfx950 prologue of k3::kda_chunk without a GPU: emulated against fp64, compiled, its assembly read."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hip_emulation import COMPILER, emulated
from kda_chunk_cases import BY_TOKEN, make_call, near_parallel, relative
from torch import Tensor

from k3rewrite.emit import Provenance, emit_unit, summarise_assembly
from k3rewrite.kernels.kda_chunk import hip_kernel, launch
from k3rewrite.kernels.kda_chunk.form import CHUNK, score_parts
from k3rewrite.kernels.kda_chunk.kernel import KERNELS
from k3rewrite.kernels.kda_chunk.launch import Between, shape_of
from k3rewrite.kernels.kda_chunk.op import LOWEST_BOUND
from k3rewrite.kernels.kda_chunk.plan import Plan
from k3rewrite.targets import lds_use, load_target

KERNEL = KERNELS[1]
NAMES = ("values", "keys", "queries", "scores", "ends", "decay")
PLAN = Plan(tile=64)


def chunks_of(call: dict[str, Any]) -> list[tuple[int, int, int, int]]:
    """(number, batch, first token, tokens) of every chunk that the prologue has to do."""
    found = []
    offsets = call["offsets"]
    tokens = call["q"].shape[1]
    offsets = None if offsets is None else offsets.clamp(0, tokens)
    lengths = (call["lengths"] if offsets is None else offsets[1:] - offsets[:-1]).clamp(0, tokens).tolist()
    each = shape_of(call)["chunks"]
    for row, length in enumerate(lengths):
        null = call["slots"] is not None and call["null_slot"] and int(call["slots"][row]) <= 0
        begin = 0 if offsets is None else int(offsets[row])
        base = row * each if offsets is None else begin // CHUNK + row
        if length > 1 and not null:
            for i in range(-(-length // CHUNK)):
                batch = row if offsets is None else 0
                found.append((base + i, batch, begin + i * CHUNK, min(CHUNK, length - i * CHUNK)))
    return found


def expected_of(call: dict[str, Any], batch: int, first: int, tokens: int) -> dict[str, Tensor]:
    """What the prologue leaves of a chunk, by form.py in fp64, [H, ...]."""

    def part(name: str) -> Tensor:
        rows = call[name][batch, first : first + tokens].double().transpose(0, 1)
        return torch.nn.functional.pad(rows, (0, 0) * (rows.dim() - 2) + (0, CHUNK - tokens))

    q, k, v, f, b = (part(name) for name in ("q", "k", "v", "f", "b"))
    live = (torch.arange(CHUNK) < tokens).double()
    if call["l2_eps"] is not None:
        q, k = (x * (x.square().sum(-1, keepdim=True) + call["l2_eps"]).rsqrt() for x in (q, k))
    beta, g = b, f
    if call["a_log"] is not None:
        bias = call["dt_bias"].double().view(-1, 1, f.shape[-1])
        g = torch.sigmoid(call["a_log"].double().exp().view(-1, 1, 1) * (f + bias)) * call["bound"]
        beta = torch.sigmoid(b)
    g, beta = g * live.unsqueeze(1), (beta * live).unsqueeze(-1)
    total = g.cumsum(1)
    keys, queries = score_parts(q * call["q_scale"], k, total)
    system = (beta * keys).tril(-1) + torch.eye(CHUNK, dtype=torch.float64)
    inverse = torch.linalg.solve_triangular(
        system, torch.eye(CHUNK, dtype=torch.float64).expand_as(system), upper=False, unitriangular=True
    )
    last = total[:, -1:]
    return {
        "values": (inverse @ (beta * v)).transpose(1, 2),
        "keys": -(inverse @ (beta * k * total.exp())),
        "queries": q * call["q_scale"] * total.exp(),
        "scores": queries.tril(),
        "ends": k * (last - total).exp(),
        "decay": last.exp().squeeze(1),
    }


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def run(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def prologue(call: dict[str, Any]) -> Between:
        monkeypatch.setattr(hip_kernel, "loaded_function", lambda unit: emulated(unit, compiled, 64))
        hip_kernel._function.cache_clear()
        heads, size = call["q"].shape[2:]
        between = Between(shape_of(call)["numbers"], heads, size, size, torch.device("cpu"), torch.bfloat16)
        for result in between.results:
            result.fill_(math.nan)
        hip_kernel.prologue(call, between, PLAN)
        hip_kernel._function.cache_clear()
        return between

    return prologue


def errors(between: Between, call: dict[str, Any]) -> dict[str, float]:
    """Relative error of each result, the worst of all chunks and heads; `elsewhere`: cells written beyond them."""
    worst = dict.fromkeys(NAMES, 0.0)
    chunks = chunks_of(call)
    for number, batch, first, tokens in chunks:
        for name, value in expected_of(call, batch, first, tokens).items():
            found = getattr(between, name)[number].double()
            each = [relative(found[h], value[h]) for h in range(len(value))]
            if name == "decay":  # each by itself, down to where fp32 ends
                each = [float(((found - value).abs() / (value + 1e-35)).max())]
            worst[name] = max(worst[name], *each)
    others = [n for n in range(len(between.keys)) if n not in [chunk[0] for chunk in chunks]]
    written = sum(float((~result[others].isnan()).sum()) for result in between.results)
    return worst | {"elsewhere": written}


CASES: dict[str, dict[str, Any]] = {
    "ragged rows": make_call([150, 1, 64, 0, 70], 2, 128, slots=[3, 1, 5, 2, 0], width=160),
    "one line": make_call([65, 1, 0, 66, 3], 1, 128, slots=[4, 2, 6, 1, 0], packed=True, width=150, bias=-6.0),
    "slot 0 is a slot": make_call([33, 64], 1, 128, slots=[0, 2], null_slot=False, bias=-2.0),
    "normalised, not raw": make_call([40], 2, 128, raw=False, normed=True),
    "lengths outside": make_call([64, 64, 64], 1, 128) | {"lengths": torch.tensor([70, -40, 1 << 33])},
    "offsets outside": make_call([64, 64], 1, 128, packed=True) | {"offsets": torch.tensor([-3, 64, 300])},
}


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", list(CASES))
def test_near_fp64(name: str, run: Any) -> None:
    """One rounding to bf16 is 1.7e-3; of scores both operands and the result are rounded, of U and W three things."""
    call = CASES[name]
    found = errors(run(call), call)
    assert max(found["queries"], found["ends"]) <= 2.5e-3, found
    assert max(found["values"], found["keys"], found["scores"]) <= 5e-3 and found["decay"] <= 5e-5, found
    assert found["elsewhere"] == 0, found


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(("bound", "scores"), [(-5.0, 5e-3), (LOWEST_BOUND, 2e-2)])
def test_saturated_gates_and_long_keys(bound: float, scores: float, run: Any) -> None:
    """At the lowest bound the last query of a block, 0.008 · exp(-86), has only some bits of bf16 left."""
    call = make_call([64], 1, 128, bias=30.0)
    call |= {"k": call["k"] * 100, "bound": bound}
    found = errors(run(call), call)
    assert found["scores"] <= scores and max(found["values"], found["keys"]) <= 5e-3, found


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("bias", [-40.0, -7.8, -4.0, -1.4, 1.4])
def test_nearly_parallel_keys(bias: float, run: Any) -> None:
    """A doubling inverse fails here in fp32 by 2e10; rounded operands leave a few percent of what cancels."""
    call = near_parallel(make_call([64], 1, 128, bias=bias))
    found = errors(run(call), call)
    assert max(found[name] for name in NAMES) <= 5e-2, found
    assert max(found["queries"], found["ends"]) <= 2.5e-3 and found["decay"] <= 5e-5, found


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_later_gates_leave_earlier_rows_bit_equal(run: Any) -> None:
    call = make_call([64], 1, 128, bias=-3.0)
    before = run(call)
    for t in (17, 32, 47, 63):
        f = call["f"].clone()
        f[:, t:] = 3.0
        after = run(call | {"f": f})
        for name, rows in (("queries", 2), ("scores", 2), ("keys", 2), ("values", 3)):
            old, new = (getattr(x, name).movedim(rows, 0) for x in (before, after))
            assert torch.equal(old[:t], new[:t]) and not torch.equal(old[t:], new[t:]), (name, t)


@pytest.mark.parametrize("packed", [False, True])
def test_assembly_for_gfx950(packed: bool, tmp_path: Path) -> None:
    """Products of the triangle in fp32, of operands in bf16; two workgroups a CU; no spills; 16 bytes a lane."""
    pytest.importorskip("ziglang")
    pytest.importorskip("triton")
    call, goal = make_call([1024], 12, 128, slots=[1], packed=packed), load_target("mi355x")
    call = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in call.items()}
    assert KERNEL.accepts(call, goal) is None
    prologue, *others = KERNEL.units(call, goal)
    assert [unit.symbol for unit in others][-1] == "kda_chunk_scan"
    assert "kda_chunk_prologue" not in [unit.symbol for unit in others]
    made = emit_unit(prologue, goal, tmp_path, "kda_chunk", Provenance("kda_chunk", KERNEL.name))
    if made.object is None:
        pytest.skip(made.skipped)
    found = made.resources
    assert found is not None and made.assembly is not None
    assert (found.spills, found.scratch_bytes) == (0, 0) and found.registers <= 256
    assert found.lds_bytes == hip_kernel.LDS_BYTES <= 81408 and found.occupancy.workgroups_per_cu >= 2
    assert lds_use(goal, found.lds_bytes).workgroups_per_cu == 4
    text = made.assembly.read_text()
    seen = summarise_assembly(text)
    assert len(re.findall(r"\bv_mfma_f32_16x16x4_f32\b", text)) >= 28  # of ten blocks' products, four each
    assert len(re.findall(r"\bv_mfma_f32_16x16x32_bf16\b", text)) == 2 * 4 * 4 + 2 * 2 * 6
    assert seen.scratch_accesses == 0 and seen.dpp > 0
    assert seen.wide_loads >= 16 and seen.wide_loads >= 0.5 * seen.global_loads  # q, k, f and v: four each
    assert seen.wide_stores == 8 and "global_store_short" not in text  # queries and ends; the others by 8 bytes


def test_what_it_does_not_take() -> None:
    pytest.importorskip("triton")
    mi355x, call = load_target("mi355x"), make_call([70, 3], 2, 128, slots=[1, 2])
    assert KERNEL.accepts(call, mi355x) is None
    assert KERNEL.cost_us(call, mi355x) > KERNELS[0].cost_us(call, mi355x) > 0  # until it is measured
    for target, arch in (("mi325x", "gfx942"), ("h200", "sm_90"), ("b200", "sm_100")):
        assert f"160 KiB of LDS are gfx950's; {arch} has Triton's" in str(KERNEL.accepts(call, load_target(target)))
    assert "cpu runs the reference" in str(KERNEL.accepts(call, load_target("cpu")))
    small = make_call([70], 2, 64, values=128)
    assert "heads of 128 values and 64 keys; 128 of each" in str(KERNEL.accepts(small, mi355x))
    narrow = make_call([70], 2, 128, dtype=torch.float16)
    assert "q is float16; bfloat16 is read" in str(KERNEL.accepts(narrow, mi355x))
    odd = torch.zeros(1, 70, 2 * 128 + 4, dtype=torch.bfloat16)[..., :256].unflatten(2, (2, 128))
    assert "tokens of q do not begin at multiples of 16 bytes" in str(KERNEL.accepts(call | {"q": odd}, mi355x))


def test_grid_of_millions_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first number of a grid may be more than 65,535."""
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(hip_kernel, "_function", lambda *wanted: lambda **launched: grids.append(launched["grid"]))
    monkeypatch.setattr(Tensor, "data_ptr", lambda self: 0)
    call = make_call([2], 12, 128, packed=True)  # else a batch is more than 2^31 elements from the next: Triton's
    for name in BY_TOKEN:
        call[name] = torch.empty(1, 1 << 23, *call[name].shape[2:], dtype=torch.bfloat16, device="meta")
    hip_kernel.prologue(call, Between(1, 1, 128, 128, torch.device("meta"), torch.bfloat16), PLAN)
    assert grids == [(12 * ((1 << 17) + 1),)]


def test_odd_addresses_go_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only the call shows: where tensors begin, and strides of more than 31 bits."""
    ran: list[str] = []
    monkeypatch.setattr(launch, "launch_prologue", lambda *call: ran.append("triton"))
    monkeypatch.setattr(hip_kernel, "_function", lambda *wanted: lambda **launched: ran.append("hip"))
    call = make_call([70], 2, 128)
    between = Between(2, 2, 128, 128, torch.device("cpu"), torch.bfloat16)
    hip_kernel.prologue(call, between, PLAN)
    for name in ("q", "dt_bias"):
        room = torch.zeros(call[name].numel() + 1, dtype=call[name].dtype)
        hip_kernel.prologue(call | {name: room[1:].view(call[name].shape)}, between, PLAN)
    far = torch.empty_strided((2, 70, 2, 128), (1 << 31, 256, 128, 1), dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(Tensor, "data_ptr", lambda self: 0)
    hip_kernel.prologue(call | {"v": far}, between, PLAN)
    assert ran == ["hip", "triton", "triton", "triton"]
