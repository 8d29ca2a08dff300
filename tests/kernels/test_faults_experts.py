"""Faults of other people's expert kernels, each with its right answer: from the reference, from the three paths of the
Triton kernels in the interpreter, and from every kernel on a GPU.

Run as a script, this file is the interpreter's process. There a buffer ends where memory begins that cannot be read, a
new one holds NaN (or the largest integer), and a later call gets the buffers as the call before has left them.

    row     where its tests are; without a file: here. Rows 21 to 30, and 40 on a CPU: backend/test_faults_routing.py
    20      CASES; test_experts_reference.py::test_what_is_outside_of_the_window_has_no_part
    24, 25  CASES, test_experts_that_fill_shared_memory; test_experts_triton.py::test_the_most_experts_do_not_spill;
            more than 2048 experts, which have no kernel: test_experts_accepts.py::test_widths_and_targets
    31, 32  CASES; test_experts_reference.py::test_no_token; collectives: test_faults_routing.py
    33, 34  CASES; test_experts_gpu.py::test_replays_of_one_graph_with_other_routings
    35      CASES; test_experts_gpu.py::test_the_last_experts_of_a_large_stack
    36      test_routes_are_counted_where_a_grid_is_long; on a GPU ON_A_GPU
    37, 38  CASES: tiles of the tables, which 256 and 330 columns, and 5 pairs, do not fill
    39      CASES; on a GPU ON_A_GPU, 384 experts, 100 times
    40      on a GPU test_a_kernel_runs_behind_what_its_stream_does_before
    41      CASES; test_lift_moe.py::test_a_window_of_local_experts_leaves_out_the_others
    42      CASES; test_k3_moe.py::test_situ_by_hand
    43      CASES, test_every_path_gives_the_right_answer; test_experts_gpu.py::test_numbers_across_the_seams
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from experts_cases import BF16, FEWEST, FP32, Case, make_case, relative_error
from interpreting import patch_once
from test_experts_triton import call
from torch import Tensor, UntypedStorage, tensor

from k3rewrite.emit import Provenance, emit_unit
from k3rewrite.kernels.experts import KERNELS, hip_kernel, launch
from k3rewrite.kernels.experts.mxfp4 import bulk, launching, registers, shared
from k3rewrite.kernels.experts.plan import Facts, plan
from k3rewrite.kernels.experts.schedule import schedules_of
from k3rewrite.targets import load_target

pytest.importorskip("triton")
H200, NAN, PAGE, TYPES = load_target("h200"), math.nan, mmap.PAGESIZE, FEWEST | {"out_dtype": FP32}
PATHS = {schedule.path: schedule for schedule in schedules_of("sm_90", 16, 16, packed=False)[:3]}
MANY = (256, 257, 514, 515, 772, 773, 262, 519, 776, 777, 266, 523, 700, 781, 254, 895)
"""16 of 896 experts; the number at place j is j more than a multiple of 16"""
ROOMY = os.sysconf("SC_PHYS_PAGES") * PAGE > 6e9
TP1, TP8 = (2 * 3072 * 3584, 768 * 3584) if ROOMY else (0, 0)
"""Elements from an expert's gate and up matrices to the next one's, of whole experts and on a rank of 8. A stack takes
4 to 5 GB of addresses and a few pages of memory."""


class Fault(NamedTuple):
    """Calls made one after the other; the right answer of each, exact or up to roundings to bf16; what others got."""

    calls: Sequence[dict[str, Any]]
    right: Sequence[Tensor]
    wrong: Tensor | None = None
    exact: bool = True


def valued(values: Tensor, ids: Any, *, weights: Any = 1.0, first: int = 0, apart: int = 0) -> dict[str, Any]:
    """Experts of which expert e gives `values[e]`, as silu(32) / 32 is 1; all of one without numbers is NaN. `apart`:
    elements from one expert to the next."""
    (experts, outer), chosen = values.shape, torch.as_tensor(ids)
    apart = max(apart, (32 + outer) * 16)
    stack = torch.empty((experts - 1) * apart + (32 + outer) * 16, dtype=BF16)
    each = stack.as_strided((experts, 32 + outer, 16), (apart, 16, 1)).zero_()
    gate, up, down = each.split([16, 16, outer], dim=1)
    gate[..., 0], up[..., 0], down[..., 0] = 32.0, 1 / 32, values
    each[values.isnan().any(1)] = NAN
    x = torch.eye(1, 16, dtype=BF16).repeat(len(chosen), 1)
    weights = torch.as_tensor(weights) * torch.ones(chosen.shape)
    stored = (gate, up, down, None, None, None)
    return Case(x, chosen, weights, stored, "dense", "silu", first, gate, up, down).arguments(TYPES)


def same(*numbers: float, outer: int = 16) -> Tensor:
    """[numbers, outer]: each number in all columns of a row."""
    return tensor(numbers, dtype=FP32).unsqueeze(1).repeat(1, outer)


def without_routes() -> Fault:
    """3 of 5 tokens have a route; the rows and weights of the others are NaN."""
    arguments = valued(same(4, 5), [[0, 1], [1, -1], [0, 0], [-1, -1], [-1, 2]])
    arguments["x"][3:] = arguments["weights"][3:] = NAN
    return Fault([arguments], [same(9, 5, 8, 0, 0)])


def columns(outer: int) -> Fault:
    values = torch.arange(2 * outer).view(2, outer) % 32 + 1.0
    return Fault([valued(values, [[1, 0], [-1, 1]])], [torch.stack([values.sum(0), values[1]])])


def empty_experts(experts: int, repeats: int) -> Fault:
    """All but four experts have no route, and nothing that could be read: equal bits in every repeat."""
    values, used = torch.full((experts, 16), NAN), [0, experts // 2, experts // 2 + 1, experts - 1]
    values[used] = same(1, 2, 3, 4)
    arguments = valued(values, [[used[t % 4], used[-t % 4]] for t in range(5)])
    return Fault([arguments] * repeats, [same(*(2 + t % 4 + -t % 4 for t in range(5)))] * repeats)


def many_experts() -> Fault:
    """16 of 896 experts, most from 256 on, the last ones (781, 895) behind 2^31 elements."""
    values, right = torch.full((896, 16), NAN), torch.zeros(1, 16)
    for column, expert in enumerate(MANY):
        values[expert] = 0
        values[expert, column] = right[0, column] = 1 + expert // 16
    return Fault([valued(values, [MANY], apart=TP8)], [right])


def situ() -> Fault:
    """g = [3, 30], u = [2, 60]: [4.83, 98.4]; SiLU gives [5.72, 1800]."""
    arguments = valued(same(0), [[0]]) | {"activation": "situ"}
    for name, numbers in (("w_gate", (3, 30)), ("w_up", (2, 60))):
        arguments[name][0, :, 0] = tensor([*numbers, *[0] * 14])
    arguments["w_down"][0] = torch.eye(16)
    right, wrong = (tensor([[*numbers, *[0.0] * 14]]) for numbers in ((4.8303, 98.37), (5.715, 1800.0)))
    return Fault([arguments], [right], wrong, exact=False)


def seam(tokens: int, layout: str) -> Fault:
    """Tokens that all name expert 0; rows of gate and up one after the other or in turns."""
    place = str(torch.get_default_device())
    with torch.device("cpu"):
        case = make_case(17, 1, 2, 16, 16, 16, activation="silu", ids=[[0]] * 17, device=place)
        arguments, right = case.arguments(TYPES), case.exact()[:tokens]
    if layout == "in turns":
        both = torch.stack((arguments["w_gate"], arguments["w_up"]), 2).flatten(1, 2)
        arguments |= {"w_gate": both[:, ::2], "w_up": both[:, 1::2]}
    arguments |= {name: arguments[name][:tokens] for name in ("x", "ids", "weights")}
    return Fault([arguments], [right], exact=False)


CASES: dict[str, Callable[[], Fault]] = {
    # Map [-1, -1, 0, 1], ids [2, -1]: the local sum is [1, 2]; map[-1] is the last expert, here NaN.
    "20: -1 in a window": lambda: Fault([valued(tensor([[1, 2], [NAN, NAN]]), [[2, -1]], first=2)], [tensor([[1, 2]])]),
    "20: -1 without one": lambda: Fault([valued(same(1, NAN), [[0, -1], [-1, -2]])], [same(1, 0)]),
    "21: ids of nobody": lambda: Fault(
        [valued(same(7, 9), [[3, -1], [5, 99], [-(2**62), 2**62], [2, 4]], first=3)], [same(7, 0, 0, 9)]
    ),
    "24, 25, 35: 16 of 896": many_experts,
    "31: k = 1, factor 1.5, output 2": lambda: Fault([valued(same(2), [[0]], weights=1.5)], [same(3)]),
    "32: no token": lambda: Fault([valued(same(1, outer=3584), torch.ones(0, 16).long())], [torch.ones(0, 3584)]),
    "33: 3 of 5 rows": without_routes,
    "34: fewer routes than before": lambda: Fault(
        [valued(same(4, 5), [ids]) for ids in ([0, 1], [0, -1], [-1, -1])], [same(9), same(4), same(0)]
    ),
    # Expert 98 is the first behind 2^31 elements.
    "35: whole experts": lambda: Fault([valued(same(*range(99)), [[98], [97], [1]], apart=TP1)], [same(98, 97, 1)]),
    "37: 256 columns": functools.partial(columns, 256),
    "37: 330 columns": functools.partial(columns, 330),
    "38: 5 pairs": lambda: Fault(
        [valued(same(NAN, 3, NAN), [[1]] * 5, weights=[[1], [2], [3], [4], [5]])], [same(3, 6, 9, 12, 15)]
    ),
    "39: 36 of 40 experts empty": functools.partial(empty_experts, 40, 2),
    # Id 40 is local expert 8 of 32 from 32 on; compared without the offset it is nobody's.
    "41: local experts": lambda: Fault(
        [valued(same(*range(1, 33)), [[40, 8], [8, 31], [64, 63]], first=32)], [same(9, 0, 32)], torch.zeros(3, 16)
    ),
    "42: SiTU": situ,
    **{f"43: {m} tokens, {how}": functools.partial(seam, m, how) for m in (16, 17) for how in ("halves", "in turns")},
}


def assert_right(what: str, results: Sequence[Tensor], fault: Fault) -> None:
    for got, right in zip(results, fault.right, strict=True):
        assert bool(got.isfinite().all()) and relative_error(got, right.double().cpu()) <= 4e-3, what
        assert not fault.exact or torch.equal(got.float(), right.float()), what
    assert fault.wrong is None or relative_error(results[-1], fault.wrong.double().cpu()) > 0.1, what


@pytest.mark.parametrize("name", CASES)
def test_the_reference_gives_the_right_answer(name: str) -> None:
    fault = CASES[name]()
    assert_right(name, [torch.ops.k3.experts.default(**arguments) for arguments in fault.calls], fault)


def fence(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """NaN, or the largest integer, up to where a page begins that cannot be read."""
    if not (size := math.prod(shape) * dtype.itemsize):
        return torch.empty(shape, dtype=dtype)
    usable = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, usable + PAGE)
    end = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + usable
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), ctypes.c_size_t(PAGE), 0) == 0
    values = torch.frombuffer(memory, dtype=dtype, offset=usable - size, count=math.prod(shape)).view(*shape)
    return values.fill_(NAN if dtype.is_floating_point else torch.iinfo(dtype).max)


def fenced(values: Tensor) -> Tensor:
    """The same view of a copy of what it is a view of; a large stack stays."""
    stored = values.untyped_storage()
    if stored.nbytes() > 1 << 22:
        return values
    copy = fence([stored.nbytes() // values.itemsize], values.dtype)
    copy.untyped_storage().copy_(stored)
    return copy.as_strided(values.shape, values.stride(), values.storage_offset())


def main(file: str) -> None:
    """Save the results of {case: {path: one for each call}}."""
    patch_once()
    new_empty, copy = Tensor.new_empty, UntypedStorage.copy_
    shelf: list[Tensor] = []
    taken = iter(shelf)

    def from_shelf(like: Tensor, size: Any, **options: Any) -> Tensor:
        if "device" in options:
            return new_empty(like, size, **options)
        if (again := next(taken, None)) is None:
            shelf.append(fence([size] if isinstance(size, int) else size, options.get("dtype", like.dtype)))
        return shelf[-1] if again is None else again

    Tensor.new_empty = from_shelf  # type: ignore[method-assign,assignment]
    # The interpreter copies every storage onto itself, also one of 5 GB that is hardly used.
    UntypedStorage.copy_ = lambda to, by, *_: to if to.data_ptr() == by.data_ptr() else copy(to, by)  # type: ignore[method-assign]
    saved: dict[str, dict[str, list[Tensor]]] = {name: {path: [] for path in PATHS} for name in CASES}
    for (name, make), (path, schedule) in itertools.product(CASES.items(), PATHS.items()):
        shelf.clear()
        for arguments in make().calls:
            taken = iter(list(shelf))
            given = arguments | {"x": arguments["x"].float()}
            given = {n: fenced(v) if isinstance(v, Tensor) else v for n, v in given.items()}
            saved[name][path].append(launch.experts(**given, schedule=schedule).clone())
    torch.save(saved, file)


@pytest.fixture
def interpreted(tmp_path: Path) -> dict[str, dict[str, list[Tensor]]]:
    file, script = tmp_path / "results.pt", Path(__file__)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(script.parent)}
    command = [sys.executable, str(script), str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{done.returncode}; -11 is an access behind a buffer\n{done.stderr[-3000:]}"
    return torch.load(file)


def test_every_path_gives_the_right_answer(interpreted: dict[str, dict[str, list[Tensor]]]) -> None:
    """Row 43 besides: a token more changes no bit within a path, and nothing but the order of sums between them."""
    for (name, make), path in itertools.product(CASES.items(), PATHS):
        assert_right(f"{name}, {path}", interpreted[name][path], make())
    first = interpreted["43: 16 tokens, halves"]["routes"][0].double()
    for path, layout in itertools.product(PATHS, ("halves", "in turns")):
        few, more = (interpreted[f"43: {m} tokens, {layout}"][path][0] for m in (16, 17))
        assert torch.equal(few, more[:16]) and relative_error(few, first) < 1e-6


@pytest.mark.parametrize(("top_k", "width"), [(16, 768), (16, 1024), (16, 1536), (32, 768)])
def test_experts_that_fill_shared_memory(top_k: int, width: int, tmp_path: Path) -> None:
    """Row 25: the routes of a token want 30, 40 and twice 60 KB, of the 48 KB that a kernel has unasked."""
    kernel, arguments = KERNELS[2], call(1, (top_k, 896, 3584, width, 3584), "mxfp4")
    units = kernel.units(arguments, H200) if kernel.accepts(arguments, H200) is None else ()
    assert bool(units) is (top_k * width < 48 * 512)
    for unit in units:
        made = emit_unit(unit, H200, tmp_path, "experts", Provenance("experts", kernel.name))
        if made.object is None:
            pytest.skip(made.skipped)
        assert made.resources is not None and made.resources.lds_bytes <= 48 * 1024


def test_routes_are_counted_where_a_grid_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 36: 4096 tokens of 16 experts are 65,536 routes; only the first number of a grid may be more than 65,535."""
    shape, grids = (16, 896, 3584, 768, 3584), []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(hip_kernel, "load_target", lambda name: H200)
    launching.launches.cache_clear()
    for module in (hip_kernel, launching):
        monkeypatch.setattr(module, "loaded_function", lambda unit: lambda *, grid, **rest: grids.append(grid))
    dense, packed = call(4096, shape, "dense"), call(4096, shape, "mxfp4")
    facts = Facts.of(dense, nvidia=True)
    hip_kernel.warp_decode(dense, facts, hip_kernel.CHOSEN)
    for layout in (registers.Layout(), bulk.Layout(tiles=1), shared.Layout()):
        layout.run(packed, Facts.of(packed, nvidia=True))
    launching.launches.cache_clear()
    for schedule in schedules_of("sm_90", 3584, 768, packed=False):
        if schedule.path != "experts":  # which looks through 1024 ids at most
            grids += [step.grid for step in plan(facts, schedule, 4096)]
    assert len(grids) == 2 + 3 + 3 + 4 + 2 + 5 + 5 and max(grids)[0] >= 65_536
    assert all(0 < first < 2**31 and 0 < second <= 65_535 for first, second in grids)


# ------------------------------------------------------------------------------------------------ on a GPU

ON_A_GPU: dict[str, Callable[[], Fault]] = CASES | {
    "36: 65,536 routes": lambda: Fault([valued(same(*[1] * 16), [[*range(16)]] * 4096)], [same(*[16] * 4096)]),
    "39: 380 of 384 experts empty": functools.partial(empty_experts, 384, 100),
}
LAYOUTS = {"published": hip_kernel.PUBLISHED, "chosen": hip_kernel.CHOSEN}


def run(how: str, arguments: dict[str, Any]) -> Tensor:
    arguments = arguments | {"out_dtype": BF16}
    if how in PATHS:
        return launch.experts(**arguments, schedule=PATHS[how])
    return hip_kernel.warp_decode(arguments, Facts.of(arguments, not torch.version.hip), LAYOUTS[how])


@pytest.fixture
def poisoned() -> Iterator[None]:
    """What is made is made on the GPU, and what is not filled holds NaN."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.device("cuda"):
        assert torch.empty(3).isnan().all()
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("how", [*PATHS, *LAYOUTS])
@pytest.mark.parametrize("name", ON_A_GPU)
def test_every_kernel_gives_the_right_answer(name: str, how: str, poisoned: None) -> None:
    fault = ON_A_GPU[name]()
    if how == "experts" and fault.calls[0]["ids"].numel() > 1024:
        pytest.skip("more ids than its programs look through")
    assert_right(name, [run(how, arguments) for arguments in fault.calls], fault)


@pytest.mark.gpu
@pytest.mark.parametrize("how", [*PATHS, *LAYOUTS])
def test_a_kernel_runs_behind_what_its_stream_does_before(how: str, poisoned: None) -> None:
    """Row 40: the input is NaN until a stream that sleeps first has gathered it."""
    arguments = valued(same(1, 2), [[0, 1]])
    run(how, arguments)  # compiled
    source, stream = arguments["x"].clone(), torch.cuda.Stream()
    arguments["x"].fill_(NAN)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        torch.index_select(source, 0, torch.zeros(1, dtype=torch.long), out=arguments["x"])
        result = run(how, arguments)
    stream.synchronize()
    assert torch.equal(result.float(), same(3))


if __name__ == "__main__":
    main(sys.argv[1])
