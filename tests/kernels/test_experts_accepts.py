"""What the experts' kernels do not take: one reason each."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from experts_cases import BF16, FP32
from test_experts_triton import K3_TP8, KERNEL, QWEN3, call

from k3rewrite.kernels.experts import KERNELS
from k3rewrite.targets import load_target


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_dtype": FP32}, "the activation is stored in bfloat16, not float32"),
        ({"route_dtype": torch.float16}, "route_dtype is float16"),
        ({"compute_dtype": BF16}, "SiTU is computed in float32, not bfloat16"),
        ({"x": torch.empty(4, 3584, device="meta")}, "x is float32; bfloat16 is read"),
        ({"ids": torch.empty(4, 16, dtype=torch.int16, device="meta")}, "ids are int16"),
        ({"ids": torch.empty(4, 40, dtype=torch.int64, device="meta")}, "40 experts a token; 1 to 32 are taken"),
        ({"weights": torch.empty(4, 16, dtype=torch.float64, device="meta")}, "weights are float64"),
        ({"w_gate": torch.empty(896, 384, 3584, device="meta")}, "w_gate is float32, not bfloat16"),
        (
            {"w_gate": torch.empty(896, 3584, 384, dtype=BF16, device="meta").transpose(1, 2)},
            "the rows of w_gate are not contiguous (strides (1376256, 1, 384))",
        ),
        (
            {"w_gate": torch.empty(896, 384, 3584, dtype=BF16, device="meta")},
            "w_gate and w_up are laid out differently",
        ),
    ],
)
def test_one_reason_each(changes: dict[str, Any], expected: str) -> None:
    reason = KERNEL.accepts(call(4, K3_TP8, "dense") | changes, load_target("h200"))
    assert reason is not None and re.search(re.escape(expected), reason), reason


def test_widths_and_targets() -> None:
    h200, cpu = load_target("h200"), load_target("cpu")
    assert "multiple of 16" in str(KERNEL.accepts(call(4, (2, 8, 3592, 384, 64), "dense"), h200))
    assert "multiple of 32" in str(KERNEL.accepts(call(4, (2, 8, 64, 32 + 16, 64), "mxfp8"), h200))
    assert KERNEL.accepts(call(4, (2, 8, 96, 48, 37), "dense"), h200) is None
    assert KERNEL.accepts(call(0, K3_TP8, "mxfp4"), h200) is None
    assert "has no kernels" in str(KERNEL.accepts(call(4, K3_TP8, "dense"), cpu))
    assert KERNEL.accepts(call(4, (2, 2048, 64, 32, 64), "dense"), h200) is None
    assert "2049 experts; 1 to 2048 are taken" in str(KERNEL.accepts(call(4, (2, 2049, 64, 32, 64), "dense"), h200))


def test_the_report_says_what_runs_for_which_numbers_of_tokens() -> None:
    def paths(kernel: int, shape: tuple[int, int, int, int, int], format: str, target: str = "h200") -> str:
        described = KERNELS[kernel].paths
        assert described is not None
        return described(call(1, shape, format), load_target(target))

    assert paths(1, QWEN3, "dense") == "to 12 tokens warp decode, to 128 tokens shared reads, more sorted"
    assert paths(1, K3_TP8, "dense") == "to 23 tokens warp decode, to 64 tokens shared reads, more sorted"
    assert paths(2, K3_TP8, "mxfp4") == "to 89 tokens integer matrix units, more sorted"
    assert paths(0, QWEN3, "dense") == "to 128 tokens shared reads, more sorted"
    assert paths(0, K3_TP8, "dense", "mi355x") == ("to 12 tokens routes apart, to 64 tokens shared reads, more sorted")


def test_widths_that_the_hip_kernels_do_not_hold() -> None:
    h200 = load_target("h200")
    assert "3072 wide" in str(KERNELS[2].accepts(call(1, (16, 896, 3584, 3072, 3584), "mxfp4"), h200))
    assert "24576 columns, do not fit" in str(KERNELS[2].accepts(call(1, (24, 64, 3584, 1024, 3584), "mxfp4"), h200))
    assert "x, 20480 columns, do not fit" in str(KERNELS[2].accepts(call(1, (4, 64, 20480, 128, 64), "mxfp4"), h200))
    assert KERNELS[2].accepts(call(1, (16, 896, 3584, 768, 3584), "mxfp4"), h200) is None
    assert "14336 wide" in str(KERNELS[1].accepts(call(1, (2, 8, 4096, 14336, 4096), "dense"), h200))
    assert KERNELS[1].accepts(call(1, (2, 8, 4096, 8192, 4096), "dense"), h200) is None
    apart = call(1, K3_TP8, "mxfp4") | {
        "s_down": torch.empty(896, 3584, 13, dtype=torch.uint8, device="meta")[..., :12]
    }
    assert "rows of s_down are not 4 apart" in str(KERNELS[2].accepts(apart, h200))
