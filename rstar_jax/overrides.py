"""Settings from a command line: named presets of sections (`--set model=tiny`) and single fields (`--set model.num_layers=3`)."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any

from rstar_jax.config import SECTIONS, MeshConfig, ModelConfig, RolloutConfig, RunConfig
from rstar_jax.types import UserError

_TINY = ModelConfig(vocab_size=512, num_layers=2, d_model=32, d_ff=64, num_heads=2, num_kv_heads=1, head_dim=16)


def _large(model: ModelConfig) -> ModelConfig:
    """For accelerators: bfloat16 beside float32 weights, activations computed again, attention in blocks."""
    return dataclasses.replace(model, dtype="bfloat16", param_dtype="float32", remat="full", attention="blockwise")


def _qwen3(layers: int, d: int, ff: int, heads: int, tied: bool) -> ModelConfig:
    return _large(ModelConfig(151_936, layers, d, ff, heads, 8, 128, True, False, tied, 1e6, 1e-6))


def _qwen25(layers: int, d: int, ff: int, heads: int, kv: int, head_dim: int, vocab: int, tied: bool) -> ModelConfig:
    return _large(ModelConfig(vocab, layers, d, ff, heads, kv, head_dim, False, True, tied, 1e6, 1e-6))


PRESETS: dict[str, dict[str, Any]] = {
    "model": {
        "tiny": _TINY,
        "toy": ModelConfig(),
        "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, True),
        "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, True),
        "qwen3-4b": _qwen3(36, 2560, 9728, 32, True),
        "qwen3-8b": _qwen3(36, 4096, 12288, 32, False),
        "qwen3-14b": _qwen3(40, 5120, 17408, 40, False),
        "qwen3-32b": _qwen3(64, 5120, 25600, 64, False),
        "qwen3-30b-a3b": dataclasses.replace(
            _qwen3(48, 2048, 768, 32, False), num_kv_heads=4, num_experts=128, experts_per_token=8, expert_d_ff=768
        ),
        "qwen2.5-0.5b": _qwen25(24, 896, 4864, 14, 2, 64, 151_936, True),
        "qwen2.5-1.5b": _qwen25(28, 1536, 8960, 12, 2, 128, 151_936, True),
        "qwen2.5-3b": _qwen25(36, 2048, 11008, 16, 2, 128, 151_936, True),
        "qwen2.5-7b": _qwen25(28, 3584, 18944, 28, 4, 128, 152_064, False),
        "qwen2.5-32b": _qwen25(64, 5120, 27648, 40, 8, 128, 152_064, False),
    },
    "mesh": {"single": MeshConfig(data=1), "data": MeshConfig(), "fsdp": MeshConfig(data=1, fsdp=-1)},
    "rollout": {
        "tiny": RolloutConfig(slots=16, prefill_rows=4, extend_rows=4),
        "toy": RolloutConfig(),
    },
}
"""Named presets of sections (`--set model=tiny`)."""


def _parse(text: str, kind: Any, key: str) -> Any:
    """`text` as a value of the annotated type `kind`."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(kind) if option is not type(None)]
        if text.lower() in ("none", "null"):
            return None
        return _parse(text, options[0], key)
    if origin is tuple:
        element = typing.get_args(kind)[0]
        body = text.strip().strip("()[]")
        return tuple(_parse(part.strip(), element, key) for part in body.split(",") if part.strip())
    if kind is bool:
        if text.lower() in ("true", "1", "yes"):
            return True
        if text.lower() in ("false", "0", "no"):
            return False
        raise UserError(f"--set {key}={text}: expected true or false")
    if kind in (int, float):
        try:
            return kind(text.replace("_", "")) if kind is float else int(text.replace("_", ""), 10)
        except ValueError:
            name = "a whole number" if kind is int else "a number"
            raise UserError(f"--set {key}={text}: expected {name}") from None
    return text


def _set_field(config: Any, field: str, text: str, key: str) -> Any:
    names = [f.name for f in dataclasses.fields(config)]
    if field not in names:
        raise UserError(f"--set {key}: no such field; {type(config).__name__} has {', '.join(names)}")
    kind = typing.get_type_hints(type(config))[field]
    return dataclasses.replace(config, **{field: _parse(text, kind, key)})


def apply_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """`config` with `key=value` overrides applied (presets first, then fields) and validated."""
    pairs = []
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key:
            raise UserError(f"--set {override}: expected key=value, for example model.num_layers=3")
        pairs.append((key.strip(), value.strip()))
    for key, value in pairs:
        if key in SECTIONS:
            presets = PRESETS.get(key, {})
            if value not in presets:
                known = f"known: {', '.join(presets)}" if presets else f"{key} has no presets; set its fields as {key}.field=value"
                raise UserError(f"--set {key}={value}: no such preset; {known}")
            config = dataclasses.replace(config, **{key: presets[value]})
    for key, value in pairs:
        if key in SECTIONS:
            continue
        section, _, field = key.partition(".")
        if not field:
            if section in ("stages", "name") or section not in {f.name for f in dataclasses.fields(config)}:
                raise UserError(f"--set {key}: no such setting; sections are {', '.join(SECTIONS)}, stages, and seed")
            config = _set_field(config, section, value, key)
        elif section == "stages":
            stage_name, _, field = field.partition(".")
            names = [stage.name for stage in config.stages]
            if stage_name not in names or not field:
                raise UserError(f"--set {key}: stages are set as stages.NAME.field, with NAME one of {', '.join(names)}")
            stages = tuple(_set_field(s, field, value, key) if s.name == stage_name else s for s in config.stages)
            config = dataclasses.replace(config, stages=stages)
        elif section in SECTIONS:
            config = dataclasses.replace(config, **{section: _set_field(getattr(config, section), field, value, key)})
        else:
            raise UserError(f"--set {key}: no such section; known: {', '.join(SECTIONS)}, stages")
    return config.validate()
