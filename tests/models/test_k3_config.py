"""The configuration: published values, small twins, and reading a published config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from k3rewrite.driver.kimi_k3 import check_memory
from k3rewrite.errors import ConfigError
from k3rewrite.models.kimi_k3 import KimiK3Config

PUBLISHED: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "vocab_size": 163840,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "hidden_size": 7168,
    "num_hidden_layers": 93,
    "num_attention_heads": 96,
    "num_key_value_heads": 96,
    "intermediate_size": 33792,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 12,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
    "latent_moe_use_norm": True,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "num_nextn_predict_layers": 0,
    "linear_attn_config": {
        "full_attn_layers": [*range(4, 93, 4), 93],
        "kda_layers": [i for i in range(1, 92) if i % 4],
        "head_dim": 128,
        "num_heads": 96,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "use_cache": True,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*"],
        "config_groups": {"group_0": {"input_activations": None, "weights": {"num_bits": 4, "group_size": 32}}},
    },
}


def write(folder: Path, text: dict[str, Any], *, nested: bool = True) -> Path:
    path = folder / "config.json"
    content = {"model_type": "kimi_k3", "vision_config": {"x": 1}, "text_config": text} if nested else text
    path.write_text(json.dumps(content))
    return path


def changed(**changes: Any) -> dict[str, Any]:
    """The published text config; a value of `...` removes the field, `linear__x` reaches into linear_attn_config."""
    text = json.loads(json.dumps(PUBLISHED))
    for name, value in changes.items():
        target = text["linear_attn_config"] if name.startswith("linear__") else text
        key = name.removeprefix("linear__")
        if value is ...:
            del target[key]
        else:
            target[key] = value
    return text


def test_published_values() -> None:
    config = KimiK3Config()
    assert config.full_attn_layers == (*range(4, 93, 4), 93) and len(config.kda_layers) == 69
    assert [i for i in range(93) if not config.is_kda(i)][-2:] == [91, 92]
    assert [i for i in range(93) if config.writes_block(i)] == [0, 12, 24, 36, 48, 60, 72, 84]
    assert [i for i in range(93) if not config.is_moe(i)] == [0]
    assert (config.kda_projection_size, config.a_log_length, config.latent_size) == (12288, 128, 576)
    assert (config.shared_intermediate_size, config.num_blocks) == (6144, 8)


def test_tiny_keeps_the_structure() -> None:
    config = KimiK3Config.tiny()
    assert config.full_attn_layers == (4, 8, 12, 13) and config.attn_res_block_size == 5
    assert [i for i in range(13) if config.writes_block(i)] == [0, 5, 10]
    assert config.a_log_length == 16 and config.kda_num_heads == 12
    wide = KimiK3Config.tiny_tp8()
    assert wide.kda_num_heads // 8 == 3 and wide.moe_intermediate_size // 8 == 32 and wide.a_log_length == 32
    small = KimiK3Config.minimal()
    assert small.full_attn_layers == (4, 8, 9) and not small.is_kda(8) and small.writes_block(8)


@pytest.mark.parametrize("layers", [1, 4, 13, 92, 93])
def test_fewer_layers_keep_their_kinds(layers: int) -> None:
    config = KimiK3Config().with_layers(layers)
    assert [config.is_kda(i) for i in range(layers)] == [KimiK3Config().is_kda(i) for i in range(layers)]
    assert config.num_hidden_layers == layers == len(config.kda_layers) + len(config.full_attn_layers)


@pytest.mark.parametrize("layers", [0, 94])
def test_too_few_or_many_layers(layers: int) -> None:
    with pytest.raises(ConfigError, match="from 1 to 93"):
        KimiK3Config().with_layers(layers)


@pytest.mark.parametrize("nested", [True, False])
def test_the_published_file_is_the_default(tmp_path: Path, nested: bool) -> None:
    assert KimiK3Config.from_json(write(tmp_path, PUBLISHED, nested=nested)) == KimiK3Config()


def test_without_quantisation_experts_are_bf16_and_options_pass(tmp_path: Path) -> None:
    path = write(tmp_path, changed(quantization_config=...))
    config = KimiK3Config.from_json(path, moe_form="gather", lora_norm_eps=1e-6)
    assert (config.experts, config.moe_form, config.lora_norm_eps) == ("bf16", "gather", 1e-6)


def test_quantisation_of_the_outer_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = changed(quantization_config=...)
    path.write_text(json.dumps({"text_config": text, "quantization_config": PUBLISHED["quantization_config"]}))
    assert KimiK3Config.from_json(path).experts == "mxfp4"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hiden_size": 3}, "unknown field 'hiden_size', did you mean 'hidden_size'"),
        ({"linear__num_head": 3}, "unknown field 'linear_attn_config.num_head', did you mean 'num_heads'"),
        ({"hidden_size": ...}, "field 'hidden_size' is missing"),
        ({"linear__kda_layers": ...}, "field 'linear_attn_config.kda_layers' is missing"),
        ({"linear_attn_config": ...}, "'linear_attn_config' is missing"),
        ({"num_experts": "896"}, "num_experts is '896', must be an integer"),
        ({"num_experts": True}, "num_experts is True, must be an integer"),
        ({"num_experts": 896.0}, "num_experts is 896.0, must be an integer"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None, must be a number"),
        ({"moe_renormalize": 1}, "moe_renormalize is 1, must be true or false"),
        ({"linear__full_attn_layers": "4,8"}, "must be a list of 1-indexed layer numbers"),
        ({"linear__full_attn_layers": [0, 4]}, "must name each of the layers 1..93 once"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu', this decoder computes 'situ' only"),
        ({"mla_use_nope": False}, "mla_use_nope is False"),
        ({"linear__use_full_rank_gate": False}, "use_full_rank_gate is False"),
        ({"num_expert_group": 8}, "num_expert_group is 8"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"num_key_value_heads": 8}, "num_key_value_heads must equal"),
        ({"quantization_config": {"format": "nvfp4-pack-quantized"}}, "must be 'mxfp4-pack-quantized'"),
        ({"moe_intermediate_size": 3071}, "moe_intermediate_size 3071 is no multiple of 32"),
        ({"hidden_size": -1}, "hidden_size is -1, must be a positive integer"),
        ({"hidden_size": 10**30}, "hidden_size is 1000000000000000000[0-9]*, must be at most 16777216"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers is 1000[0-9]*, must be an integer"),
        ({"linear__gate_lower_bound": -(10**400)}, "gate_lower_bound is -1000[0-9]*, must be a number"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf, must be a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, must be a number"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0, must be from 0"),
        ({"activation_situ_beta": 0.0}, "activation_situ_beta is 0.0, must be above 0"),
    ],
)
def test_unusable_fields(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write(tmp_path, changed(**change))
    with pytest.raises(ConfigError, match="(?s)config.json.*" + message.replace("(", r"\(")):
        KimiK3Config.from_json(path)


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, changed(vocabsize=1, hidden_size="x", v_head_dim=..., hidden_act="gelu"))
    with pytest.raises(ConfigError) as caught:
        KimiK3Config.from_json(path)
    for part in ("'vocabsize'", "hidden_size is 'x'", "'v_head_dim' is missing", "'gelu'", "text_config", "remedy"):
        assert part in str(caught.value)


def test_weights_that_do_not_fit_the_memory() -> None:
    config = KimiK3Config().with_layers(12)
    check_memory(config, torch.bfloat16, None, 200 * 10**9)
    message = "--config: the weights take 193 GB, and there are 25 GB of memory\n  remedy: add --no-run"
    with pytest.raises(ConfigError, match=message):
        check_memory(config, torch.bfloat16, None, 25 * 10**9)
    with pytest.raises(ConfigError, match=r"the weights take .* and there are 25 GB"):
        check_memory(KimiK3Config.tiny(num_shared_experts=2**20), torch.bfloat16, None, 25 * 10**9)
    vast = KimiK3Config.tiny(num_experts=2**24, moe_intermediate_size=2**24, routed_expert_hidden_size=2**24)
    with pytest.raises(ConfigError, match="no such model"):
        check_memory(vast, torch.bfloat16, None, 25 * 10**9)


@pytest.mark.parametrize("content", ["{", "[]", '{"text_config": 3}', "\xff", "[" * 100_000, "1" * 5000])
def test_files_that_hold_no_configuration(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config.json"):
        KimiK3Config.from_json(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        KimiK3Config.from_json(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hiddn_size": 1}, "did you mean 'hidden_size'"),
        ({"experts": "fp8"}, "experts is 'fp8', must be one of bf16, mxfp4"),
        ({"chunk_size": 60}, "chunk_size 60 is no multiple of chunk_block 16"),
        ({"chunk_block": 32}, "31 gates of -5.0 overflow fp32"),
        ({"gate_lower_bound": 1.0}, "must be negative"),
        ({"num_experts_per_token": 17}, "num_experts_per_token 17"),
        ({"routed_expert_hidden_size": 48}, "48 is no multiple of 32"),
    ],
)
def test_sizes_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KimiK3Config.tiny(**changes)
