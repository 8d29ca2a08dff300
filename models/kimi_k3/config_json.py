"""Reading a published config.json into a `KimiK3Config`.

The file is either the text configuration itself (`"model_type": "kimi_linear"`) or the multimodal one that nests it
under `text_config`. Every field is accounted for: read, required to have the one value that this decoder computes, or
known to be irrelevant to it. Anything else is an error, and all errors of a file come at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any

from k3rewrite.errors import ConfigError, did_you_mean
from k3rewrite.models.kimi_k3.config import MXFP4_GROUP, KimiK3Config

LARGEST_NUMBER = sys.float_info.max
"""also infinity and NaN, which Python reads in JSON, are above it or not below"""
_LINEAR_ATTN = {  # linear_attn_config.<key> -> field
    "kda_layers": "kda_layers",
    "full_attn_layers": "full_attn_layers",
    "num_heads": "kda_num_heads",
    "head_dim": "kda_head_dim",
    "short_conv_kernel_size": "short_conv_kernel_size",
    "gate_lower_bound": "gate_lower_bound",
}
_OURS = {"chunk_size", "chunk_block", "lora_norm_eps", "experts", "moe_form", "attn_res_storage", "mla_decode"}
_READ = {f.name: f.name for f in fields(KimiK3Config) if f.name not in _OURS and f.name not in _LINEAR_ATTN.values()}
_OPTIONAL = {"max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "moe_layer_freq"}

_FIXED: dict[str, tuple[Any, ...]] = {  # what this decoder computes; absent is fine where None is listed
    "model_type": ("kimi_linear",),
    "hidden_act": ("situ",),
    "mla_use_nope": (True,),
    "mla_use_output_gate": (True,),
    "latent_moe_use_norm": (True,),
    "moe_router_activation_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "num_expert_group": (1, None),
    "topk_group": (1, None),
    "tie_word_embeddings": (False, None),
    "num_nextn_predict_layers": (0, None),
    "attention_bias": (False, None),
}
_FIXED_LINEAR_ATTN: dict[str, tuple[Any, ...]] = {"use_full_rank_gate": (True,)}

_IRRELEVANT = {
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "name_or_path"),
    *("use_cache", "initializer_range", "attention_dropout", "hidden_dropout", "pretraining_tp", "head_dim"),
    *("rope_theta", "rope_scaling", "rope_parameters", "num_key_value_heads", "use_grouped_topk"),
    *("quantization_config", "model_max_length", "media_placeholder_token_id", "is_encoder_decoder", "is_decoder"),
    *("output_attentions", "output_hidden_states", "return_dict", "tie_encoder_decoder", "add_cross_attention"),
    *("chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id", "finetuning_task"),
    *("id2label", "label2id", "prefix", "problem_type", "pruned_heads", "sep_token_id", "task_specific_params"),
    *("tokenizer_class", "torchscript", "use_bfloat16", "tf_legacy_loss", "unk_token_id", "aux_loss_alpha"),
}
_FETCH = "fetch the config.json of the checkpoint again"


def read_config_json(path: str | PathLike[str]) -> KimiK3Config:
    """The configuration in the file at `path`. Raises one `ConfigError` that lists every unusable field."""
    text, place = _text_config(Path(path))
    problems: list[str] = []
    values = _take(text, _READ, _FIXED, "", problems, known=_IRRELEVANT | {"linear_attn_config"})
    linear = text.get("linear_attn_config")
    if isinstance(linear, Mapping):
        values |= _take(linear, _LINEAR_ATTN, _FIXED_LINEAR_ATTN, "linear_attn_config.", problems, known=set())
    else:
        problems.append("field 'linear_attn_config' is missing or no mapping")
    values["experts"] = _experts(text.get("quantization_config"), problems)
    if "num_key_value_heads" in text and text["num_key_value_heads"] not in (None, text.get("num_attention_heads")):
        problems.append("num_key_value_heads must equal num_attention_heads")
    if problems:
        raise ConfigError(
            "not a Kimi K3 configuration:\n  - " + "\n  - ".join(problems),
            place=place,
            remedy="correct the fields, or use the config.json that belongs to the checkpoint",
        )
    try:
        return KimiK3Config(**values)
    except ConfigError as error:
        raise ConfigError(error.message, place=place, remedy=error.remedy) from None


def _text_config(path: Path) -> tuple[Mapping[str, Any], str]:
    """The mapping that describes the text decoder, and the words by which an error names it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror or error}",
            place=str(path),
            remedy="give the path of a checkpoint's config.json",
        ) from None
    except (ValueError, RecursionError) as error:  # no JSON, no text, a number of thousands of digits, nested deeply
        raise ConfigError(f"is no JSON: {error}", place=str(path), remedy=_FETCH) from None
    if not isinstance(content, Mapping):
        raise ConfigError("holds no JSON object", place=str(path), remedy=_FETCH)
    if "text_config" not in content:
        return content, str(path)
    nested = content["text_config"]
    if not isinstance(nested, Mapping):
        raise ConfigError("'text_config' is no JSON object", place=str(path), remedy=_FETCH)
    if "quantization_config" not in nested and "quantization_config" in content:
        nested = {**nested, "quantization_config": content["quantization_config"]}
    return nested, f"{path}, text_config"


def _take(
    given: Mapping[str, Any],
    read: Mapping[str, str],
    fixed: Mapping[str, tuple[Any, ...]],
    prefix: str,
    problems: list[str],
    known: set[str],
) -> dict[str, Any]:
    """The values of the `read` fields by our names; everything wrong is appended to `problems`."""
    values = {}
    for name, value in given.items():
        if name in read:
            ok, wanted, value = _typed(value, _TYPES[read[name]])
            if ok:
                values[read[name]] = value
            else:
                problems.append(f"{prefix}{name} is {value!r}, must be {wanted}")
        elif name in fixed:
            if not any(value is allowed or value == allowed for allowed in fixed[name]):
                problems.append(f"{prefix}{name} is {value!r}, this decoder computes {fixed[name][0]!r} only")
        elif name not in known:
            problems.append(f"unknown field '{prefix}{name}', {did_you_mean(name, {*read, *fixed, *known})}")
    for name, field in read.items():
        if name not in given and field not in _OPTIONAL:
            problems.append(f"field '{prefix}{name}' is missing")
    for name, allowed in fixed.items():
        if name not in given and None not in allowed:
            problems.append(f"field '{prefix}{name}' is missing, must be {allowed[0]!r}")
    return values


def _typed(value: Any, type_name: str) -> tuple[bool, str, Any]:
    """(fits, what is wanted, the value as the dataclass holds it). A bool is no number here."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER
    if type_name == "int":
        return number and isinstance(value, int), "an integer", value
    if type_name == "bool":
        return isinstance(value, bool), "true or false", value
    if type_name == "float":
        return number, "a number", float(value) if number else value
    if type_name == "float | None":
        return number or value is None, "a number or null", float(value) if number else value
    layers = isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    return layers, "a list of 1-indexed layer numbers", tuple(value) if layers else value


def _experts(quantisation: Any, problems: list[str]) -> str:
    """Storage of the routed experts: MXFP4 if the file says so, bf16 without a quantisation record."""
    if quantisation is None:
        return "bf16"
    if not isinstance(quantisation, Mapping):
        problems.append("quantization_config is no mapping")
        return "bf16"
    weights = []
    groups = quantisation.get("config_groups") or {}
    for group in groups.values() if isinstance(groups, Mapping) else [groups]:
        described = group.get("weights") or {} if isinstance(group, Mapping) else group
        if isinstance(described, Mapping):
            weights.append(described)
        else:
            problems.append("quantization_config.config_groups must be a mapping of groups, each with its 'weights'")
    if quantisation.get("format") != "mxfp4-pack-quantized":
        problems.append(
            f"quantization_config.format is {quantisation.get('format')!r}, must be 'mxfp4-pack-quantized' (or absent)"
        )
    for weight in weights:
        if (weight.get("num_bits", 4), weight.get("group_size", MXFP4_GROUP)) != (4, MXFP4_GROUP):
            problems.append(f"quantization_config: weights must have num_bits 4 and group_size {MXFP4_GROUP}")
    return "mxfp4"


_TYPES = {f.name: str(f.type) for f in fields(KimiK3Config)}
