"""Tensor parallelism, form A: real processes against one device, and what a captured rank holds."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from k3_cases import decode, empty_state, prefill, random_model, random_tokens, verify
from torch.testing._internal.distributed.fake_pg import FakeStore

from k3rewrite.errors import ConfigError
from k3rewrite.models.kimi_k3 import (
    KimiK3,
    KimiK3Config,
    KimiK3State,
    TensorParallel,
    build_kimi_k3,
    load_checkpoint,
    save_checkpoint,
)

TABLE = torch.tensor([[1, 3, 5, 7], [2, 4, 6, 8]])


def all_phases(model: KimiK3, state: KimiK3State) -> torch.Tensor:
    """Prefill, a decode step with a padding row, a verify window."""
    tokens = random_tokens(model, 2, 24)
    parts = [prefill(model, state, tokens[:, :18], [1, 2], lengths=[18, 17])]
    step = decode(model, state, torch.cat([tokens[:, 18], tokens[:1, 0]]), [1, 2, 0], [18, 17, 0])
    parts += [step[:2].unsqueeze(1), verify(model, state, tokens[:, 19:23], TABLE, [1, 1], [19, 18])]
    return torch.cat(parts, dim=1)


def rank_main(rank: int, size: int, folder: str, config: KimiK3Config, by_name: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    group: Any = dist.group.WORLD.group_name if by_name else dist.group.WORLD
    with torch.no_grad():
        model = load_checkpoint(KimiK3(config, dtype=torch.float64, group=group), f"{folder}/weights")
        state = KimiK3State.zeros(
            config, slots=9, max_context=24, speculative=3, dtype=torch.float64, parallel=model.parallel
        )
        logits = all_phases(model, state)
    torch.save((logits, state), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def run_ranks(folder: Path, config: KimiK3Config, size: int, *, by_name: bool = False) -> None:
    """Logits on every rank and the split and replicated parts of the state equal a single device's."""
    model = random_model(config)
    save_checkpoint(model, folder / "weights")
    torch.multiprocessing.spawn(rank_main, (size, str(folder), config, by_name), nprocs=size)
    state = empty_state(model, slots=9, max_context=24, speculative=3)
    expected = all_phases(model, state)
    results = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(size)]
    for rank, (logits, own) in enumerate(results):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
        for a, b in zip(own.recurrent, state.recurrent, strict=True):
            torch.testing.assert_close(a, b.chunk(size, dim=1)[rank], rtol=0, atol=1e-10)
        for a, b in zip(own.latent, state.latent, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.distributed
@pytest.mark.parametrize("experts", ["mxfp4", "bf16"])
def test_two_ranks_equal_one_device(tmp_path: Path, experts: str) -> None:
    run_ranks(tmp_path, KimiK3Config.tiny(experts=experts), 2, by_name=experts == "bf16")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8])
def test_many_ranks_equal_one_device(tmp_path: Path, size: int) -> None:
    run_ranks(tmp_path, KimiK3Config.tiny_tp8(), size)


@pytest.fixture
def rank_3_of_8() -> Any:
    """A process group whose collectives do nothing: enough to capture what rank 3 of 8 computes."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_captured_rank_holds_its_shard_and_its_collectives(rank_3_of_8: Any) -> None:
    """Full-size layers at TP8: local shapes of the layout table, and one or two all-reduces where they belong."""
    from test_k3_capture import capture
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model, args, _ = build_kimi_k3(KimiK3Config().with_layers(4), batch=8, group=rank_3_of_8)
        graph, logits = capture(model, args)
    targets = Counter(str(n.target).removeprefix("_c10d_functional.") for n in graph.graph.nodes)
    # embedding 1, attention 4, dense MLP 1, MoE 2 * 3
    assert targets["all_reduce.default"] == 12 and targets["all_gather_into_tensor.default"] == 1
    assert targets["wait_tensor.default"] == 13 and logits.shape == (8, 163840)
    widths = [n.args[0].meta["val"].shape[1] for n in graph.graph.nodes if "all_reduce" in str(n.target)]
    assert Counter(widths) == {7168: 9, 3584: 3}

    kda, mla = model.model.layers[1], model.model.layers[3]
    shapes = {
        "embed_tokens": (model.model.embed_tokens.weight, [20480, 7168]),
        "lm_head": (model.lm_head.weight, [20480, 7168]),
        "kda q": (kda.self_attn.q_proj.weight, [1536, 7168]),
        "kda b": (kda.self_attn.b_proj.weight, [12, 7168]),
        "kda f_a": (kda.self_attn.f_a_proj.weight, [128, 7168]),
        "kda f_b": (kda.self_attn.f_b_proj.weight, [1536, 128]),
        "kda A_log": (kda.self_attn.A_log, [12]),
        "kda dt_bias": (kda.self_attn.dt_bias, [1536]),
        "kda conv": (kda.self_attn.q_conv1d.weight, [1536, 1, 4]),
        "kda o": (kda.self_attn.o_proj.weight, [7168, 1536]),
        "mla q_a": (mla.self_attn.q_a_proj.weight, [1536, 7168]),
        "mla q_b": (mla.self_attn.q_b_proj.weight, [2304, 1536]),
        "mla kv_b": (mla.self_attn.kv_b_proj.weight, [3072, 512]),
        "mla g": (mla.self_attn.g_proj.weight, [1536, 7168]),
        "dense gate": (model.model.layers[0].mlp.gate_proj.weight, [4224, 7168]),
        "dense down": (model.model.layers[0].mlp.down_proj.weight, [7168, 4224]),
        "shared gate": (kda.block_sparse_moe.shared_experts.gate_proj.weight, [768, 7168]),
        "shared down": (kda.block_sparse_moe.shared_experts.down_proj.weight, [7168, 768]),
        "w13": (kda.block_sparse_moe.experts.w13_packed, [896, 768, 1792]),
        "w2": (kda.block_sparse_moe.experts.w2_packed, [896, 3584, 192]),
        "w2 scale": (kda.block_sparse_moe.experts.w2_scale, [896, 3584, 12]),
        "up": (kda.block_sparse_moe.routed_expert_up_proj.weight, [7168, 3584]),
        "conv state": (args[1].conv[0][0], [3, 4608]),
        "kda state": (args[1].recurrent[0][0], [12, 128, 128]),
    }
    assert {name: list(tensor.shape) for name, (tensor, _) in shapes.items()} == {n: s for n, (_, s) in shapes.items()}


def test_norms_are_not_linear() -> None:
    """Fault 97: norming the partials [3, 0] and [0, 4] and adding gives 1.414s, norming their sum .849 and 1.131."""
    from k3rewrite.models.kimi_k3.norms import RMSNorm

    norm = RMSNorm(2, 0.0, dtype=torch.float64)
    norm.weight.fill_(1.0)
    parts = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    torch.testing.assert_close(norm(parts.sum(0)).tolist(), [0.849, 1.131], rtol=0, atol=1e-3)
    torch.testing.assert_close(norm(parts).sum(0).tolist(), [1.414, 1.414], rtol=0, atol=1e-3)


@pytest.mark.parametrize(("size", "what"), [(5, "vocab_size"), (64, "heads"), (16, "heads")])
def test_sizes_that_do_not_split(size: int, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        KimiK3(KimiK3Config.tiny(), group=TensorParallel(size=size, rank=0, group_name="unused"))


def test_scale_groups_are_not_torn() -> None:
    """48 columns a rank would split a group of 32."""
    config = KimiK3Config.tiny(moe_intermediate_size=96, kda_num_heads=12)
    with pytest.raises(ConfigError, match="MXFP4 groups"):
        KimiK3(config, group=TensorParallel(size=2, rank=0, group_name="unused"))
