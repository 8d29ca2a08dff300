"""KDA against an implementation that nobody here wrote: the naive reference of flash-linear-attention.

`fla-core` is kept out of the environment, because transformers uses it as soon as it can import it. CI installs it
with `pip install --no-deps --target .peers/fla fla-core==0.6.0`; only the child process of this test sees the folder.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from k3rewrite.models.kimi_k3 import KimiK3Config
from k3rewrite.models.kimi_k3.delta_chunk import delta_chunk
from k3rewrite.models.kimi_k3.delta_rule import delta_step
from k3rewrite.models.kimi_k3.norms import l2_norm

PEER = Path(__file__).parents[2] / ".peers" / "fla"

CHILD = """
import sys, torch
from fla.ops.kda.gate import naive_kda_lowerbound_gate
from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda

cases = torch.load(sys.argv[1])
results = []
for case in cases:
    g = naive_kda_lowerbound_gate(case["f"], case["A_log"], case["dt_bias"], lower_bound=case["lower_bound"])
    common = dict(scale=case["scale"], initial_state=case["state"], output_final_state=True)
    inputs = (case["q"], case["k"], case["v"], g, case["beta"])
    out = {"g": g, "recurrent": naive_recurrent_kda(*inputs, **common)}
    if case["q"].shape[1] % 64 == 0:
        out["chunk"] = naive_chunk_kda(*inputs, **common)
    results.append(out)
torch.save(results, sys.argv[2])
"""


def cases() -> list[dict[str, object]]:
    """Lengths around a chunk, gates over all of (-5, 0), keys with a common direction, a state to start from."""
    drawn: list[dict[str, object]] = []
    for length, heads, size in ((1, 3, 16), (64, 2, 32), (100, 4, 16), (192, 2, 16)):
        generator = torch.Generator().manual_seed(length)

        def normal(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        drawn.append(
            {
                "q": l2_norm(normal(2, length, heads, size)),
                "k": l2_norm(normal(2, length, heads, size) + normal(2, 1, heads, size)),
                "v": normal(2, length, heads, size),
                "f": normal(2, length, heads, size),
                "A_log": (torch.rand(heads, generator=generator) * 15 + 1).log(),
                "dt_bias": normal(heads * size),
                "beta": normal(2, length, heads).sigmoid(),
                "state": normal(2, heads, size, size),  # [K, V] there, [V, K] here
                "scale": size**-0.5,
                "lower_bound": KimiK3Config().gate_lower_bound,
            }
        )
    return drawn


@pytest.fixture(scope="module")
def peer_results(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict, dict]]:
    if not PEER.is_dir():
        pytest.skip(f"fla-core is not in {PEER}: pip install --no-deps --target .peers/fla fla-core==0.6.0")
    folder = tmp_path_factory.mktemp("fla")
    given = cases()
    torch.save(given, folder / "cases.pt")
    paths = os.pathsep.join([str(PEER), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder / "cases.pt"), str(folder / "results.pt")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, json.dumps(done.stderr[-2000:])
    return list(zip(given, torch.load(folder / "results.pt"), strict=True))


def test_the_gate(peer_results: list[tuple[dict, dict]]) -> None:
    """Our gate is spelled inside the KDA module: the same arithmetic on the same inputs."""
    for case, theirs in peer_results:
        heads, size = case["f"].shape[2:]
        f = case["f"] + case["dt_bias"].view(heads, size)
        ours = torch.sigmoid(torch.exp(case["A_log"]).unsqueeze(1) * f) * case["lower_bound"]
        torch.testing.assert_close(ours, theirs["g"], rtol=1e-5, atol=1e-6)


def ours(case: dict, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return case["q"] * case["scale"], case["k"], case["v"], g, case["beta"], case["state"].transpose(2, 3)


def test_the_steps(peer_results: list[tuple[dict, dict]]) -> None:
    for case, theirs in peer_results:
        *inputs, state = ours(case, theirs["g"])
        outputs = []
        for token in range(inputs[0].shape[1]):
            out, state = delta_step(*(x[:, token] for x in inputs), state)
            outputs.append(out)
        expected, final = theirs["recurrent"]
        torch.testing.assert_close(torch.stack(outputs, 1), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state.transpose(2, 3), final, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_the_chunks(peer_results: list[tuple[dict, dict]], form: str) -> None:
    compared = 0
    for case, theirs in peer_results:
        if form in theirs:
            out, state = delta_chunk(*ours(case, theirs["g"]), chunk=64, block=16)
            expected, final = theirs[form]
            torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(state.transpose(2, 3), final, rtol=1e-3, atol=1e-4)
            compared += 1
    assert compared == (4 if form == "recurrent" else 2)
