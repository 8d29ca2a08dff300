"""`k3::kda_decode`, token by token, against flash-linear-attention's naive gate and recurrence over a whole sequence.

`fla-core` lies in .peers/fla, which only the child process sees (models/test_k3_fla.py says why). Convolution, unit
length and output norm are torch's own functions there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from k3rewrite.kernels.kda_decode.op import kda_decode

PEER = Path(__file__).parents[2] / ".peers" / "fla"
HEADS, SIZE, ROWS, LENGTH = 3, 16, 2, 40
WIDTH = HEADS * SIZE
CHILD = """
import sys, torch
import torch.nn.functional as F
from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
from fla.ops.kda.naive import naive_recurrent_kda

results = []
for case in torch.load(sys.argv[1]):
    rows, length, heads, size = case["f"].shape
    window = torch.cat([case["line"], case["qkv"]], 1).transpose(1, 2)
    mixed = F.silu(F.conv1d(window, case["taps"][:, None], groups=window.shape[1])).transpose(1, 2)
    q, k, v = mixed.reshape(rows, length, 3, heads, size).unbind(2)
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    gate = [case["f"], case["A_log"], case["dt_bias"]]
    g = naive_kda_gate(*gate) if case["bound"] is None else naive_kda_lowerbound_gate(*gate, lower_bound=case["bound"])
    o, final = naive_recurrent_kda(q, k, v, g, case["b"].sigmoid(), scale=size**-0.5, initial_state=case["state"],
                                   output_final_state=True)
    results.append((F.rms_norm(o, (size,), case["norm"], 1e-5) * case["gate"].sigmoid(), final))
torch.save(results, sys.argv[2])
"""


def _case(bound: float | None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(int(bound or 0) + 7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "qkv": normal(ROWS, LENGTH, 3 * WIDTH), "line": normal(ROWS, 3, 3 * WIDTH), "taps": normal(3 * WIDTH, 4) * 0.5,
        "f": normal(ROWS, LENGTH, HEADS, SIZE) * 2, "A_log": (torch.rand(HEADS, generator=generator) * 3 + 0.5).log(),
        "dt_bias": normal(WIDTH), "b": normal(ROWS, LENGTH, HEADS), "gate": normal(ROWS, LENGTH, HEADS, SIZE),
        "norm": normal(SIZE), "state": normal(ROWS, HEADS, SIZE, SIZE), "bound": bound,
    }  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], tuple[torch.Tensor, ...]]]:
    if not PEER.is_dir():
        pytest.skip(f"fla-core is not in {PEER}: pip install --no-deps --target .peers/fla fla-core==0.6.0")
    folder, cases = tmp_path_factory.mktemp("fla"), [_case(-5.0), _case(None)]
    torch.save(cases, folder / "cases.pt")
    paths = os.pathsep.join([str(PEER), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", CHILD, str(folder / "cases.pt"), str(folder / "results.pt")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return list(zip(cases, torch.load(folder / "results.pt"), strict=True))


def test_a_sequence_token_by_token(results: list[tuple[dict[str, Any], tuple[torch.Tensor, ...]]]) -> None:
    """In a pool with slots of nobody, and rows that change places from token to token."""
    for case, (expected, final) in results:
        lines, states = torch.full((5, 3, 3 * WIDTH), torch.nan), torch.full((5, HEADS, SIZE, SIZE), torch.nan)
        homes = torch.tensor([4, 2])
        lines[homes], states[homes] = case["line"], case["state"].transpose(2, 3)
        for token in range(LENGTH):
            order = [0, 1] if token % 3 else [1, 0]
            qkv, f, b, gate = (case[name][order, token] for name in ("qkv", "f", "b", "gate"))
            y, lines, states = kda_decode(
                qkv, f.flatten(1), b, gate, case["taps"], case["A_log"], case["dt_bias"], case["norm"], lines, states,
                homes[order], True, 3, case["bound"], SIZE**-0.5, 1e-6, 1e-5, "sigmoid", torch.float32, torch.float32,
            )  # fmt: skip
            torch.testing.assert_close(y, expected[order, token], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[homes].transpose(2, 3), final, rtol=1e-4, atol=1e-5)
        assert torch.equal(lines[homes], case["qkv"][:, -3:]) and bool(states[[0, 1, 3]].isnan().all())
