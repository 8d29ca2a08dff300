"""Every op of the vocabulary: what its fake says is what its reference does, for layouts and sizes of all kinds.

A fake that promises another stride than the real op gives makes the compiler read memory in the wrong order, and an
op without a fake works in eager mode only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attn_res_cases import EPS
from torch import Tensor
from torch.utils._pytree import tree_map

from k3rewrite import _torch_private as private
from k3rewrite.finalise.hazards import MATERIALISE
from k3rewrite.graph.shapes import metadata_difference
from k3rewrite.kernels import OPS
from k3rewrite.ops.vocabulary import Op

BF16, FP32 = torch.bfloat16, torch.float32
WIDTH = 8
Make = Callable[..., Tensor]

LAYOUTS: dict[str, Make] = {
    "contiguous": lambda *shape: torch.randn(*shape),
    "transposed": lambda *shape: torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2),
    "leading dimensions exchanged": lambda *shape: torch.randn(shape[1], shape[0], *shape[2:]).transpose(0, 1),
    "every second column": lambda *shape: torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2],
    "rows further apart": lambda *shape: torch.randn(*shape[:-1], shape[-1] + 4)[..., : shape[-1]],
    "one row expanded": lambda *shape: torch.randn(*shape[1:]).expand(*shape),
}


def _norm(dtype: torch.dtype = BF16) -> tuple[torch.dtype, ...]:
    return FP32, dtype, dtype


def _calls(make: Make, *rows: int) -> dict[str, list[tuple[Any, ...]]]:
    """Op name -> arguments of calls, a mapping at the end being those by name; `make` lays out what may be laid out."""
    x, other = (make(*rows, WIDTH).to(BF16) for _ in range(2))
    w, square, logits = torch.randn(WIDTH).to(BF16), torch.randn(WIDTH, WIDTH).to(BF16), make(*rows, 16)
    sources, bank = [make(*rows, 2, WIDTH).to(BF16), other], torch.randn(*rows, 4, WIDTH).to(BF16)
    mixed = {"compute_dtype": FP32, "out_dtype": BF16}
    tokens, stacked = x.flatten(0, -2), torch.randn(4, 2 * WIDTH, WIDTH).to(BF16)
    ids, shares = torch.randint(-1, 6, (tokens.shape[0], 3)), torch.randn(tokens.shape[0], 3)
    halves = (stacked[:, :WIDTH], stacked[:, WIDTH:], stacked[:, ::2])
    nibbles, scales = torch.randint(0, 256, (4, 32, 16)).to(torch.uint8), torch.randint(120, 130, (4, 32, 1))
    packed, scaled = (nibbles,) * 3, (scales.to(torch.uint8),) * 3
    latent = torch.randn(tokens.shape[0], 32).to(BF16)
    count, slots = rows[0], torch.randperm(rows[0]) + 1
    step = (*(make(count, 3, WIDTH) for _ in range(3)), -make(count, 3, WIDTH).abs())
    beta, pools = step[0].sum(-1).sigmoid(), [torch.randn(n, 3, WIDTH, WIDTH) for n in (count, count + 3)]
    inputs, taps = make(count, WIDTH).to(BF16), torch.randn(WIDTH, 4)
    lines = [torch.randn(count + 2, 5, WIDTH).to(BF16), torch.randn(count, WIDTH, 4).to(BF16)]
    decode = (
        *(make(count, *size).to(BF16) for size in ((72,), (24,), (3,), (3, WIDTH))),
        *(torch.randn(*size) for size in ((72, 4), (3,), (24,), (WIDTH,))),
        torch.randn(count + 3, 3, 72).to(BF16), pools[1], slots - 1, True, 3, -5.0, 0.25, 1e-6, 1e-5, "sigmoid",
    )  # fmt: skip
    wide, line = torch.randn(8 * count + 1, 3, WIDTH, WIDTH), torch.randn(8 * count + 1, 7, 72).to(BF16)
    table = torch.randperm(8 * count)[: 4 * count].view(count, 4)
    past, ends = torch.tensor([[1, 2, 3]]).expand(count, 3).contiguous(), torch.arange(count) % 5
    window = (
        *(make(count, 4, 3, WIDTH) for _ in range(3)),
        -make(count, 4, 3, WIDTH).abs(),
        make(count, 4, 3).sigmoid(),
    )
    verify = (
        *(make(count, 4, *size).to(BF16) for size in ((72,), (24,), (3,), (3, WIDTH))), *decode[4:8], line, wide,
        table[:, 1], table, past,
    )  # fmt: skip
    prompt = [make(count, 70, 3, WIDTH).to(BF16) for _ in range(4)]
    joined = [make(1, 70, 3, WIDTH) for _ in range(4)]
    offsets, marks = torch.arange(0, 9 * count + 1, 9)[: count + 1], torch.zeros(count, 1, dtype=torch.int32)
    gates = (torch.randn(3), torch.randn(24), pools[1], slots - 1)
    attending = (make(count, 3, 4, 48).to(BF16), torch.randn(2 * count + 1, 8, 48), table[:, :2] // 4, ends - 1)
    normed = {"mix_dtype": BF16, "scale_dtype": FP32, **mixed}
    return {
        "rms_norm": [(x, w, EPS, *_norm()), (x.float(), None, EPS, FP32, FP32, FP32), (x, None, EPS, FP32, FP32, BF16)],
        "rms_norm_stat": [(x, w, EPS, *_norm())],
        "gated_rms_norm": [
            (x, w, other, EPS, "silu", *_norm(), FP32, FP32, BF16),
            (x, None, torch.randn(*rows, WIDTH), EPS, "sigmoid", *_norm(), FP32, FP32, BF16),
        ],
        "l2_norm": [(x, EPS, True, FP32, BF16), (x.float(), EPS, False, FP32, FP32)],
        "mlp": [
            (x, square, square, square, "silu", 0.0, 0.0, FP32),
            (x, square[:4], square[4:], square[:, ::2], "situ", 4.0, 25.0, FP32),
        ],
        "mlp_tail": [(x, other, square, "silu", 0.0, 0.0, FP32), (x, x, square[:4], "situ", 4.0, 25.0, FP32)],
        "route": [
            (logits, torch.randn(16), 4, "sigmoid", True, 1e-20, 2.5, True, FP32, FP32),
            (logits.to(BF16), None, 3, "softmax", False, 0.0, 1.0, False, FP32, BF16),
        ],
        "experts": [
            (tokens, ids, shares, *halves, None, None, None, "dense", "silu", 0.0, 0.0, 1, *(BF16,) * 6),
            (tokens, ids, shares, *halves, None, None, None, "dense", "silu", 0.0, 0.0, 0, *(FP32,) * 5, BF16),
            (latent, ids, shares, *packed, *scaled, "mxfp4", "situ", 4.0, 25.0, 0, BF16, FP32, BF16, BF16, FP32, BF16),
        ],
        "short_conv": [
            (inputs, taps, lines[0], slots, True, 3, True, True, FP32, FP32, BF16),
            (inputs, taps, lines[0].transpose(1, 2), slots, False, 4, False, False, FP32, BF16, FP32),
            (inputs, taps.to(BF16), lines[1], None, False, 4, False, True, FP32, BF16, BF16),
        ],
        "kda_step": [
            (*step, beta, pools[1], slots - 1, True, True),
            (
                *step[:3],
                step[3][..., :1],
                beta,
                pools[1].transpose(0, 1).contiguous().transpose(0, 1),
                slots,
                False,
                False,
            ),
            (*step, beta, pools[0], None, False, True),
            (*step, beta, pools[0].transpose(2, 3), None, False, False),
        ],
        "kda_decode": [(*decode, dtype, BF16) for dtype in (FP32, BF16)],
        "conv_verify": [
            (make(count, 4, 72).to(BF16), decode[4], line, table[:, 0], past, None, True, True, FP32, FP32, BF16),
            (
                make(count, 4, 72).to(BF16),
                decode[4],
                line[:, :6],
                table[:, 0] + 1,
                past,
                ends,
                False,
                False,
                FP32,
                BF16,
                FP32,
            ),
        ],
        "kda_window": [
            (*window, wide, table[:, 2], table, None, True),
            (*window[:3], window[3][..., :1], window[4], wide, table[:, 2] + 1, table + 1, ends, False),
        ],
        "kda_verify": [
            (*verify, None, True, -5.0, 0.25, 1e-6, 1e-5, "sigmoid", FP32, BF16),
            (*verify, ends, False, -5.0, 0.25, 1e-6, 1e-5, "silu", BF16, FP32),
        ],
        "mla_attend": [
            (attending[0], attending[1].to(BF16), *attending[2:], None, 0.2, 32, BF16),
            (attending[0].float(), *attending[1:], torch.tensor(0.5), 0.2, 16, FP32),
        ],
        "kda_chunk": [
            (*prompt, prompt[0].sum(-1), *gates, slots > 1, slots, None, marks, True, -5.0, 0.3, 1e-6, BF16),
            (
                *joined[:3],
                -joined[3].sigmoid(),
                joined[0].sum(-1).sigmoid(),
                None,
                None,
                pools[1],
                slots,
                None,
                None,
                offsets,
                None,
                False,
                -5.0,
                1.0,
                None,
                FP32,
            ),
            (
                *prompt,
                prompt[0].sum(-1),
                *gates[:2],
                pools[0],
                None,
                None,
                None,
                None,
                None,
                True,
                -5.0,
                0.3,
                1e-6,
                FP32,
            ),
        ],
        "pack_rows": [([square, square[:3], square[:, :WIDTH]], [0, 8, 16], 32), ([w, w[:3]], [0, 8], 16)],
        "attn_res": [(sources, w, square[:1], EPS, mixed)],
        "attn_res_norm": [(x, sources, w, square[:1], EPS, w, EPS, normed)],
        "add_attn_res_norm": [(x, other, sources, w, square[:1], EPS, w, EPS, normed)],
        "write_attn_res_norm": [(x, other, sources, bank, 3, w, square[:1], EPS, w, EPS, normed)],
        "materialise": [(x,), (logits,)],
    }


EVERY = {**OPS, "materialise": MATERIALISE}


def test_none_is_left_out() -> None:
    assert _calls(torch.randn, 2).keys() == EVERY.keys()


def _apart(call: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (call[:-1], call[-1]) if isinstance(call[-1], dict) else (call, {})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", EVERY.values(), ids=EVERY)
def test_the_fake_promises_what_the_reference_gives(op: Op, layout: str) -> None:
    for rows in ((3, 4), (2, 3, 4), (0, 4)):
        for call in _calls(LAYOUTS[layout], *rows)[op.name]:
            arguments, named = _apart(call)
            real = op.overload(*arguments, **named)
            with private.FakeTensorMode() as mode:
                fakes = tree_map(lambda v: mode.from_tensor(v) if isinstance(v, Tensor) else v, arguments)
                fake = op.overload(*fakes, **named)
            assert (difference := metadata_difference(real, fake)) is None, f"{rows}: {difference}"
            torch.library.opcheck(op.overload, arguments, named, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("op", EVERY.values(), ids=EVERY)
def test_the_fake_takes_sizes_that_are_symbols(op: Op) -> None:
    """Traced with dynamic sizes, compiled and compared with the plain call."""
    for call in _calls(LAYOUTS["contiguous"], 3, 4)[op.name]:
        with torch.no_grad():
            torch.library.opcheck(op.overload, *_apart(call), test_utils=("test_aot_dispatch_dynamic",))


def test_a_copy_that_keeps_a_transposition_has_its_strides() -> None:
    """Seen elsewhere: a fake that says contiguous for a clone that preserves strides (1, 4)."""
    x = torch.randn(3, 4).t()
    assert MATERIALISE.overload(x).stride() == x.stride() == (1, 4)
    assert MATERIALISE.fake(x).stride() == (1, 4)
