"""The factory: shapes, seeds, padding, fake tensors, refusals."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from k3rewrite.errors import ConfigError
from k3rewrite.models.kimi_k3 import KimiK3Config, TensorParallel, build_kimi_k3

TINY = KimiK3Config.minimal().with_layers(4)


@pytest.mark.parametrize(("phase", "tokens"), [("decode", 1), ("verify", 4), ("prefill", 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_defaults_run(phase: str, tokens: int, dtype: torch.dtype) -> None:
    model, (inputs, state), kwargs = build_kimi_k3(TINY, phase=phase, batch=3, dtype=dtype, padding_rows=1)
    logits = model(inputs, state, **kwargs)
    assert logits.shape == ((3, 128) if phase == "decode" else (3, tokens, 128))
    assert logits.dtype is dtype and torch.isfinite(logits).all()
    assert logits[0].any() and not logits[2].any()
    slots = inputs.slots.flatten()
    live = slots[slots > 0]
    assert len(live.unique()) == len(live) and live.max() < state.recurrent[0].shape[0]


def test_the_state_is_filled_up_to_the_context() -> None:
    _, (inputs, state), _ = build_kimi_k3(TINY, batch=2, context=10)
    assert inputs.positions.tolist() == [10, 10]
    for pool in state.latent:
        assert pool.shape[1] == 11 and pool[:, :10].any(-1).all() and not pool[:, 10:].any()
    assert all(pool.any() for pool in (*state.conv, *state.recurrent))


def test_a_seed_is_a_model_and_another_one_is_not() -> None:
    models = [build_kimi_k3(TINY, seed=seed)[0].state_dict() for seed in (0, 0, 1)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert all(not torch.equal(models[0][n], models[2][n]) for n in models[0] if models[0][n].numel() > 64)


def test_dtypes_with_one_seed_are_roundings_of_each_other() -> None:
    wide, narrow = (build_kimi_k3(TINY, dtype=dtype)[0].state_dict() for dtype in (torch.float64, torch.bfloat16))
    assert all(torch.equal(wide[name].to(narrow[name].dtype), narrow[name]) for name in wide)


def test_weights_exercise_the_clips_and_the_gates() -> None:
    """SiTU's inputs pass 4 and 25, A_log is log U(1, 16) with zeros behind the heads."""
    model, (inputs, state), _ = build_kimi_k3(KimiK3Config.tiny(), batch=8, dtype=torch.float64)
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(("gate_proj", "up_proj")) and "shared" in name:
            module.register_forward_hook(lambda _m, _i, o, name=name: seen.__setitem__(name, o.abs().max()))
    model(inputs, state)
    assert all(v > 4 for n, v in seen.items() if "gate" in n) and any(v > 25 for n, v in seen.items() if "up" in n)
    a_log = model.model.layers[0].self_attn.A_log
    assert a_log[:12].min() >= 0 and 2 < a_log[:12].max() < 2.78 and not a_log[12:].any()


def test_replicated_weights_are_equal_on_all_ranks_and_split_ones_differ() -> None:
    ranks = [build_kimi_k3(TINY, group=TensorParallel(size=2, rank=r, group_name="x"))[0].state_dict() for r in (0, 1)]
    same = {name for name in ranks[0] if torch.equal(ranks[0][name], ranks[1][name])}
    assert {n for n in ranks[0] if n.endswith(("norm.weight", "gate.weight", "routed_expert_up_proj.weight"))} <= same
    split = ("q_proj.weight", "o_proj.weight", "A_log", "w13_packed", "w2_packed", "embed_tokens.weight")
    assert not {n for n in ranks[0] if n.endswith(split)} & same


def test_fake_tensors_are_not_filled() -> None:
    with FakeTensorMode():
        model, (inputs, state), _ = build_kimi_k3(KimiK3Config(), phase="prefill", batch=2, context=4096)
        everything = [*model.parameters(), *model.buffers(), *inputs, *state.tensors()]
    assert all(isinstance(tensor, FakeTensor) for tensor in everything)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"phase": "decod"}, "did you mean 'decode'"),
        ({"batch": 0}, "batch is 0"),
        ({"tokens": 2}, "use phase 'verify'"),
        ({"context": -1}, "context is -1"),
        ({"padding_rows": 9}, "padding_rows is 9"),
    ],
)
def test_refusals(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_kimi_k3(TINY, **arguments)  # type: ignore[arg-type]
