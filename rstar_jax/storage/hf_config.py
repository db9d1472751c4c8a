"""Between `config.json` of a Hugging Face checkpoint and `ModelConfig`. What could change the computation and is not known here is
refused by name; nothing is guessed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rstar_jax.config import ModelConfig
from rstar_jax.types import UserError

FAMILIES = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "LlamaForCausalLM": "llama",
}
"""Architectures that can be read, with their `model_type`."""

_REQUIRED = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_positions",
}
_FIXED = {  # settings that this decoder has one value for; absent is that value
    "hidden_act": "silu",
    "use_sliding_window": False,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale",
             "mscale_all_dim"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}  # fmt: skip
_REAL = ("rms_norm_eps", "rope_theta", "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
         "low_freq_factor", "high_freq_factor")  # fmt: skip
_ROPE_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim")


def model_config(content: Mapping[str, Any], where: str, **ours: Any) -> ModelConfig:
    """The `ModelConfig` of a `config.json`. `ours` are settings that a checkpoint does not have (dtypes, remat, attention).

    `where` names the file in errors. Raises `UserError` for an architecture, a setting or a rope scaling that is not known, and for
    a key that is missing.
    """
    family = _family(content, where)
    fields: dict[str, Any] = {}
    for key, field in _REQUIRED.items():
        fields[field] = _number(content, key, where)
    for key, value in _FIXED.items():
        if key in content and content[key] != value and not (content[key] is None and value in (False, [])):
            raise UserError(f"{where}: {key}={content[key]!r} is not supported, only {value!r}")
    if set(content.get("layer_types") or ()) - {"full_attention"}:
        raise UserError(f"{where}: layer_types {sorted(set(content['layer_types']))} are not supported, only full_attention")
    if content.get("head_dim") is not None or family in ("qwen3", "qwen3_moe"):
        fields["head_dim"] = _number(content, "head_dim", where)
    elif fields["d_model"] % fields["num_heads"]:
        raise UserError(f"{where}: head_dim is missing, and hidden_size is not a multiple of num_attention_heads")
    else:
        fields["head_dim"] = fields["d_model"] // fields["num_heads"]
    fields["tie_embeddings"] = _flag(content, "tie_word_embeddings", where)
    fields["qk_norm"] = family in ("qwen3", "qwen3_moe")
    bias = family != "qwen2" and _flag(content, "attention_bias", where)
    fields["qkv_bias"], fields["o_bias"] = family == "qwen2" or bias, bias
    fields["mlp_bias"] = family == "llama" and _flag(content, "mlp_bias", where)
    if family == "qwen3_moe":
        experts = "num_local_experts" if "num_local_experts" in content and "num_experts" not in content else "num_experts"
        fields["num_experts"] = _number(content, experts, where)
        fields["experts_per_token"] = _number(content, "num_experts_per_tok", where)
        fields["expert_d_ff"] = _number(content, "moe_intermediate_size", where)
        if "norm_topk_prob" not in content:
            raise UserError(f"{where} has no norm_topk_prob; it decides whether a token's expert weights sum to 1")
        fields["normalize_experts"] = _flag(content, "norm_topk_prob", where)
    config = ModelConfig(**{**fields, **_rope(content, where), **ours})
    try:
        config.validate()
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return config


def _family(content: Mapping[str, Any], where: str) -> str:
    architectures = content.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise UserError(f"{where}: architectures must name one architecture; known: {', '.join(FAMILIES)}")
    family = FAMILIES.get(architectures[0])
    if family is None:
        raise UserError(f"{where}: architecture {architectures[0]!r} is not known; known: {', '.join(FAMILIES)}")
    if content.get("model_type", family) != family:
        raise UserError(f"{where}: model_type {content['model_type']!r} does not belong to {architectures[0]}, but {family!r} does")
    return family


def _number(content: Mapping[str, Any], key: str, where: str, kind: str = "") -> Any:
    value = content.get(key)
    if value is None:
        raise UserError(f"{where} has no {kind}{key}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise UserError(f"{where}: {kind}{key}={value!r} must be a positive number")
    whole = key not in _REAL
    if whole and value != int(value):
        raise UserError(f"{where}: {kind}{key}={value!r} must be a whole number")
    return int(value) if whole else float(value)


def _flag(content: Mapping[str, Any], key: str, where: str) -> bool:
    """A true or false setting; absent is false, which is the default of all families."""
    value = content.get(key, False)
    if not isinstance(value, bool):
        raise UserError(f"{where}: {key}={value!r} must be true or false")
    return value


def _rope(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fields of the rotary embedding, from `rope_theta` and `rope_scaling`, or from `rope_parameters`, which newer files have."""
    newer = content.get("rope_parameters")
    scaling = dict(newer if newer is not None else content.get("rope_scaling") or {})
    kind = "rope_parameters." if newer is not None else "rope_scaling."
    thetas = [source["rope_theta"] for source in (content, scaling) if source.get("rope_theta") is not None]
    if not thetas:
        raise UserError(f"{where} has no rope_theta, neither by itself nor in rope_parameters")
    if len(set(thetas)) > 1:
        raise UserError(f"{where}: rope_theta is {thetas[0]} and also {thetas[1]} in {kind.rstrip('.')}")
    scaling.pop("rope_theta", None)
    types = {scaling.pop(key) for key in ("rope_type", "type") if key in scaling}
    if len(types) > 1:
        raise UserError(f"{where}: {kind}rope_type and {kind}type differ: {sorted(types)}")
    rope_type = types.pop() if types else "default"
    if rope_type not in _ROPE_KEYS:
        raise UserError(f"{where}: {kind}rope_type {rope_type!r} is not supported; supported: {', '.join(_ROPE_KEYS)}")
    known = _ROPE_KEYS[rope_type]
    if scaling.get("partial_rotary_factor") == 1.0:
        del scaling["partial_rotary_factor"]
    unknown = sorted(key for key, value in scaling.items() if key not in known and value is not None)
    if unknown:
        raise UserError(f"{where}: {kind}{unknown[0]} is not known for rope_type {rope_type!r}")
    values: dict[str, Any] = {"rope_theta": _number({"rope_theta": thetas[0]}, "rope_theta", where), "rope_type": rope_type}
    for key in known:
        if key in _ROPE_OPTIONAL and scaling.get(key) is None:
            continue
        if key == "truncate":
            values["rope_truncate"] = _flag(scaling, key, where)
        else:
            values[key] = _number(scaling, key, where, kind)
    mscales = [values.pop(key, None) for key in ("mscale", "mscale_all_dim")]
    if None not in mscales and "attention_factor" not in values:
        one, all_dims = (0.1 * scale * math.log(values["factor"]) + 1 if values["factor"] > 1 else 1.0 for scale in mscales if scale)
        values["attention_factor"] = one / all_dims
    rename = {
        "factor": "rope_factor",
        "original_max_position_embeddings": "rope_original_length",
        "attention_factor": "rope_attention_factor",
        "beta_fast": "rope_beta_fast",
        "beta_slow": "rope_beta_slow",
        "low_freq_factor": "rope_low_frequency",
        "high_freq_factor": "rope_high_frequency",
    }
    return {rename.get(key, key): value for key, value in values.items()}


def config_json(config: ModelConfig, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A `config.json` that transformers and `model_config` read. `base`: that of the checkpoint that training began from, whose other
    keys are kept. Raises `UserError` for a model that no Hugging Face architecture computes."""
    family = _family_of(config)
    architecture = next(name for name, known in FAMILIES.items() if known == family)
    ours: dict[str, Any] = {key: getattr(config, field) for key, field in _REQUIRED.items()}
    ours |= {"architectures": [architecture], "model_type": family, "head_dim": config.head_dim, "hidden_act": "silu"}
    ours |= {"tie_word_embeddings": config.tie_embeddings, "rope_theta": config.rope_theta, "rope_scaling": _rope_scaling(config)}
    if family != "qwen2":
        ours["attention_bias"] = config.qkv_bias
    if family == "llama":
        ours["mlp_bias"] = config.mlp_bias
    if family == "qwen3_moe":
        ours |= {"num_experts": config.num_experts, "num_experts_per_tok": config.experts_per_token}
        ours |= {"moe_intermediate_size": config.expert_d_ff, "norm_topk_prob": config.normalize_experts}
        ours |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    kept = {key: value for key, value in (base or {}).items() if key not in ("rope_parameters", "num_local_experts")}
    return {**kept, **ours}


def _family_of(config: ModelConfig) -> str:
    if config.num_experts:
        if config.qk_norm and config.qkv_bias == config.o_bias:
            return "qwen3_moe"
    elif config.qk_norm:
        if config.qkv_bias == config.o_bias and not config.mlp_bias:
            return "qwen3"
    elif config.qkv_bias and not config.o_bias and not config.mlp_bias:
        return "qwen2"
    elif config.qkv_bias == config.o_bias:
        return "llama"
    raise UserError(
        f"no Hugging Face architecture has qk_norm={config.qk_norm} qkv_bias={config.qkv_bias} o_bias={config.o_bias} "
        f"mlp_bias={config.mlp_bias} num_experts={config.num_experts}; it cannot be exported"
    )


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    if config.rope_type == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": config.rope_type, "factor": config.rope_factor}
    if config.rope_type in ("yarn", "llama3"):
        scaling["original_max_position_embeddings"] = config.rope_original_length
    if config.rope_type == "yarn":
        scaling |= {"beta_fast": config.rope_beta_fast, "beta_slow": config.rope_beta_slow, "truncate": config.rope_truncate}
        if config.rope_attention_factor:
            scaling["attention_factor"] = config.rope_attention_factor
    if config.rope_type == "llama3":
        scaling |= {"low_freq_factor": config.rope_low_frequency, "high_freq_factor": config.rope_high_frequency}
    return scaling
