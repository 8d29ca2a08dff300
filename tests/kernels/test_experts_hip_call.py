"""Which calls the HIP kernels of the experts take when they are made, and which they hand to Triton's."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from experts_cases import FEWEST, make_case
from test_experts_triton import K3_TP8, QWEN3, call
from torch import Tensor

from k3rewrite.emit import Provenance, emit_unit
from k3rewrite.kernels.experts import KERNELS, hip_call, hip_kernel, launch
from k3rewrite.kernels.experts.mxfp4 import bulk, choose, launching, registers, shared
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.ops.runs import noting, watching
from k3rewrite.targets import load_target

SIZES = {"experts": 8, "inner": 256, "width": 128, "outer": 64}
TOP_K = 2


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the implementations that are called; none of them computes."""
    calls: list[str] = []

    def recorded(name: str) -> Any:
        def run(*arguments: Any, **options: Any) -> Tensor:
            calls.append(name)
            return torch.zeros(1)

        return run

    monkeypatch.setattr(launch, "experts", recorded("triton"))
    monkeypatch.setattr(hip_kernel, "warp_decode", recorded("hip"))
    monkeypatch.setattr(registers, "mxfp4_registers", recorded("mxfp4"))
    monkeypatch.setattr(bulk, "mxfp4_bulk", recorded("bulk"))
    monkeypatch.setattr(shared, "mxfp4_shared", recorded("shared"))
    return calls


def arguments(format: str, tokens: int) -> dict[str, Any]:
    return make_case(tokens, TOP_K, **SIZES, format=format).arguments(FEWEST)


def shifted(tensor: Tensor) -> Tensor:
    """The same numbers at an address that is no multiple of 16 bytes."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return room[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize(("format", "kernel", "name"), [("dense", 1, "hip"), ("mxfp4", 2, "mxfp4")])
def test_few_many_none_and_odd_addresses(format: str, kernel: int, name: str, ran: list[str]) -> None:
    run = KERNELS[kernel].launch
    few, many = arguments(format, 2), arguments(format, 40)
    for made, expected in (
        (few, name),
        (many, "triton"),
        (arguments(format, 0), "triton"),
        (few | {"x": shifted(few["x"])}, "triton"),
        (few | {"w_down": shifted(few["w_down"])}, "triton"),
        (few | {"x": few["x"].t().contiguous().t()}, "triton"),
    ):
        run(**made)
        assert ran.pop() == expected
    if format == "mxfp4":
        run(**few | {"s_gate": shifted(few["s_gate"])})
        assert ran.pop() == "triton"
    one = arguments(format, 1)
    run(**one | {"x": torch.empty(1, one["x"].shape[1] + 1).bfloat16()[:, :-1]})
    assert ran.pop() == name, "the stride of one row is never gone along"
    with watching() as runs:
        noting(run, "experts", "hip")(*many.values())
        noting(run, "experts", "hip")(*few.values())
    assert {seen.by for seen in runs} == {"triton", "hip"}


def test_one_layout_for_few_results_and_one_for_more() -> None:
    facts = Facts.of(arguments("dense", 1), nvidia=True)
    few, more = hip_kernel.layout_for(facts, 1), hip_kernel.layout_for(facts, 4096)
    assert (few, more) == (hip_kernel.FEW_OUTPUTS, hip_kernel.CHOSEN)
    assert hip_kernel.layout_for(Facts.of(arguments("dense", 1), nvidia=False), 1) == hip_kernel.CHOSEN
    both = {unit.symbol for unit in hip_kernel.both_units(facts, few, 32)}
    assert both == {hip_kernel.GATE_UP, hip_kernel.DOWN}


@pytest.mark.parametrize(
    ("width", "wave", "side_by_side", "lanes"),
    [(384, 32, True, 16), (768, 32, True, 32), (384, 64, True, 16), (384, 32, False, 32), (72, 32, True, 32)],
)
def test_lanes_that_read_a_row_together(width: int, wave: int, side_by_side: bool, lanes: int) -> None:
    assert hip_kernel.Layout(side_by_side=side_by_side).lanes(width, wave) == lanes


LAUNCHED = [
    (hip_kernel, "dense", hip_kernel.PUBLISHED),
    (hip_kernel, "dense", hip_kernel.CHOSEN),
    (registers, "mxfp4", registers.Layout()),
    (bulk, "mxfp4", bulk.Layout()),
    (shared, "mxfp4", shared.Layout()),
]
DECODE = {
    hip_kernel: (hip_kernel.warp_decode, 2),
    registers: (registers.mxfp4_registers, 3),
    bulk: (bulk.mxfp4_bulk, 3),
    shared: (shared.mxfp4_shared, 4),
}
"""how a module is called, and how often it launches"""


@pytest.mark.parametrize(("module", "format", "layout"), LAUNCHED)
def test_what_is_handed_to_a_kernel_is_what_it_declares(
    module: Any, format: str, layout: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Addresses are 64 bits, all other arguments 32: the launcher passes them as they are."""
    target = load_target("h200")
    launched: dict[str, list[Any]] = {}
    emitted: dict[str, Any] = {}

    def loaded(unit: Any) -> Any:
        made = emit_unit(unit, target, tmp_path, "experts", Provenance("experts", "hip"))
        if made.object is None:
            pytest.skip(made.skipped)
        emitted[unit.symbol] = made

        def launch(*, arguments: list[Any], grid: tuple[int, ...], threads: int, **options: Any) -> None:
            launched[unit.symbol] = arguments
            assert min(grid) > 0 and threads == made.resources.threads
            assert options.get("dynamic_lds", 0) == unit.dynamic_lds

        return launch

    for asking in (hip_kernel, launching):
        monkeypatch.setattr(asking, "loaded_function", loaded)
    launching.launches.cache_clear()
    monkeypatch.setattr(hip_kernel, "load_target", lambda name: target)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    named = arguments(format, 3)
    decode, launches = DECODE[module]
    assert decode(named, Facts.of(named, nvidia=True), layout).shape == (3, SIZES["outer"])
    launching.launches.cache_clear()
    assert len(launched) == launches
    for symbol, given in launched.items():
        declared = re.findall(rf"\.param \.([a-z]+\d+)[^,)]* {symbol}_param_\d+", emitted[symbol].assembly.read_text())
        bits = ["64" if isinstance(value, Tensor) else "32" for value in given]
        assert [kind[-2:] for kind in declared] == bits, symbol
        assert [kind for kind, value in zip(declared, given, strict=True) if isinstance(value, float)] in (
            [],
            ["f32", "f32"],
        )


def test_how_many_tokens_are_few() -> None:
    """Measured on an H200: where routes of their own and shared reads take the same time."""

    def most(few: hip_call.Few, shape: tuple[int, int, int, int, int], format: str) -> int:
        facts = Facts.of(call(1, shape, format), nvidia=True)
        return max(n for n in range(1, 200) if few.takes(facts, n))

    assert most(hip_kernel.FEW, QWEN3, "dense") == 12
    assert most(hip_kernel.FEW, K3_TP8, "dense") == 23
    assert most(choose.FEW, K3_TP8, "mxfp4") == 89


def mxfp4_call(tokens: int, **changes: Any) -> tuple[dict[str, Any], Facts]:
    made = call(tokens, K3_TP8, "mxfp4") | changes
    return made, Facts.of(made, nvidia=True)


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        (1, registers.Layout()),
        (2, registers.Layout()),
        (3, registers.Layout(down_waves=4, group=1)),
        (5, registers.Layout(down_waves=4, group=1)),
        (6, bulk.Layout()),
        (44, bulk.Layout()),
        (45, shared.Layout()),
        (89, shared.Layout()),
    ],
)
def test_what_a_number_of_tokens_gets(tokens: int, wanted: choose.Layout) -> None:
    made, facts = mxfp4_call(tokens)
    assert choose.FEW.takes(facts, 89) and not choose.FEW.takes(facts, 90)
    assert choose.layout_for(made, facts, tokens) == wanted


def test_a_symbolic_batch_has_the_launches_of_every_number_of_tokens() -> None:
    """86 to 102 tokens get bulk copies here, and no power of two does."""
    made = call(1, (3, 384, 2048, 128, 2048), "mxfp4")
    facts = Facts.of(made, nvidia=True)
    few = [n for n in range(1, 5000) if choose.FEW.takes(facts, n)]
    wanted = {choose.layout_for(made, facts, n) for n in few}
    assert set(choose.layouts_of(made, facts)) == wanted and bulk.Layout() in wanted


def test_rows_that_are_fetched_many_at_a_time_lie_one_after_the_other() -> None:
    made, facts = mxfp4_call(16)
    assert bulk.objection(made, facts) is None
    for name in ("w_gate", "w_down", "s_gate", "s_down"):
        tensor = made[name]
        apart = torch.empty(*tensor.shape[:2], 2 * tensor.shape[2], dtype=tensor.dtype, device="meta")[
            ..., : tensor.shape[2]
        ]
        moved, _ = mxfp4_call(16, **{name: apart})
        assert f"rows of {name} do not lie one after the other" in str(bulk.objection(moved, facts))
        assert isinstance(choose.layout_for(moved, facts, 16), registers.Layout)


@pytest.mark.parametrize(
    ("shape", "ring", "tiles"),
    [
        ((16, 896, 3584, 384, 3584), 2, 2),
        ((8, 256, 7168, 256, 7168), 1, 2),
        ((8, 128, 2048, 768, 2048), 2, 1),
        ((16, 896, 3584, 384, 3600), 2, 1),
    ],
)
def test_three_workgroups_of_bulk_copies_fit(shape: tuple[int, ...], ring: int, tiles: int) -> None:
    facts = Facts.of(call(1, shape, "mxfp4"), nvidia=True)  # type: ignore[arg-type]
    layout = bulk.layout_for(facts)
    assert (layout.gate_up_ring, layout.tiles) == (ring, tiles)


def test_strides_beyond_32_bits_are_refused() -> None:
    h200, made = load_target("h200"), call(1, K3_TP8, "mxfp4")
    far = made["w_down"].as_strided(made["w_down"].shape, (2**31, *made["w_down"].stride()[1:]))
    assert "further apart than 32 bits" in str(KERNELS[2].accepts(made | {"w_down": far}, h200))


def test_scales_at_multiples_of_eight_bytes_are_read_without_bulk_copies(ran: list[str]) -> None:
    def moved(tensor: Tensor, by: int) -> Tensor:
        room = torch.empty(tensor.numel() + 64, dtype=tensor.dtype)
        start = -room.data_ptr() % 16 + by
        return room[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)

    many = make_case(128, 2, **SIZES | {"experts": 1024}, format="mxfp4").arguments(FEWEST)
    many |= {name: moved(many[name], 0) for name in ("s_gate", "s_up", "s_down")}
    for by, expected in ((0, "bulk"), (8, "mxfp4"), (4, "triton")):
        KERNELS[2].launch(**many | {"s_gate": moved(many["s_gate"], by)})
        assert ran.pop() == expected
