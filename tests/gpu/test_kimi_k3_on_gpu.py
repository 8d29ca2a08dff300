"""Kimi K3 compiled for the GPU at hand: the Triton kernels run (the captured graph names them), the numbers hold."""

from __future__ import annotations

import pytest
import torch

from k3rewrite.backend import Backend
from k3rewrite.capture import run_captured
from k3rewrite.models.kimi_k3 import KimiK3Config, build_kimi_k3

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


CONFIG = KimiK3Config.minimal().with_layers(6)
"""KDA with a dense MLP, KDA and MLA with experts, blocks written at layers 0 and 4"""
NAMES = CONFIG.counts()
OPTIONS = {"pipeline": "kimi-k3-decode", "names": NAMES, "finalise": "eager"}


def _kernel_names(run: object) -> list[str]:
    """Names of the kernels that a captured graph launches when it is replayed."""
    from torch.profiler import ProfilerActivity, profile

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            run()  # type: ignore[operator]
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        run()  # type: ignore[operator]
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        graph.replay()
        torch.cuda.synchronize()
    return [event.name for event in trace.events()]


@pytest.mark.parametrize(("phase", "finalise"), [("decode", "inductor"), ("decode", "eager"), ("verify", "eager")])
def test_compiled_model_runs_its_kernels(phase: str, finalise: str) -> None:
    """One compilation: its first call is checked against fp64, then it is captured and its kernels are counted."""
    config = CONFIG
    model, args, kwargs = build_kimi_k3(
        config, phase=phase, batch=5, dtype=torch.bfloat16, device="cuda", seed=0, padding_rows=1
    )
    backend = Backend({"pipeline": f"kimi-k3-{phase}", "verify": "end-to-end", "finalise": finalise, "names": NAMES})
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        compiled(*args, **kwargs)
    report = backend.reports[0]
    assert report.end_to_end is not None and report.end_to_end.passed
    assert report.end_to_end.executed_on == torch.cuda.get_device_name()
    assert {k.executed for k in report.kernels} == {torch.cuda.get_device_name()}
    names = _kernel_names(lambda: compiled(*args, **kwargs))
    fused = [n for n in names if "attn_res" in n]
    assert len(fused) == 2 * config.num_hidden_layers, sorted(set(names))
    steps = [n for n in names if "kda_decode" in n]
    assert len(steps) == (NAMES["n_kda_layers"] if phase == "decode" else 0), sorted(set(names))
    assert len(backend.reports) == 1, "it was compiled once"


def test_prefill_runs_its_kernels() -> None:
    config = CONFIG
    model, args, kwargs = build_kimi_k3(
        config, phase="prefill", batch=2, tokens=70, dtype=torch.bfloat16, device="cuda"
    )
    backend = Backend({"pipeline": "kimi-k3-prefill", "verify": "end-to-end", "finalise": "eager", "names": NAMES})
    run_captured(model, backend, args, kwargs)
    assert backend.reports[0].end_to_end is not None and backend.reports[0].end_to_end.passed


def test_several_steps_equal_eager() -> None:
    """Decode steps in a row, fp32, slots shuffled: logits and states as the eager model gives them."""
    config = CONFIG
    model, (inputs, state), _ = build_kimi_k3(config, batch=4, dtype=torch.float32, device="cuda", seed=3)
    twin = state.clone()
    compiled = torch.compile(model, backend="k3rewrite", options=OPTIONS, fullgraph=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(4):
            order = torch.randperm(4, generator=generator).cuda()
            tokens = torch.randint(0, config.vocab_size, (4,), generator=generator).cuda()
            now = type(inputs)(tokens, inputs.slots[order], inputs.positions[order])
            torch.testing.assert_close(compiled(now, twin), model(now, state), rtol=2e-3, atol=2e-3)
    for a, b in zip(torch.utils._pytree.tree_leaves(twin), torch.utils._pytree.tree_leaves(state), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)
