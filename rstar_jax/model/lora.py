"""Low-rank adapters (LoRA, arXiv 2106.09685): y = x W + (alpha / r) (x A) B with W frozen, A [in, r] and B [r, out].

Adapters live in a tree of their own, {"layers": {target: {"adapter_a", "adapter_b"}}}, stacked over layers: it is all that an
optimiser and a checkpoint hold. `attach` puts them beside the frozen weights, which is what `qwen.forward` takes; `merge` adds
their product to W, which is what sampling and exporting take.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rstar_jax.config import ModelConfig
from rstar_jax.model import qwen
from rstar_jax.model.precision import wide

A, B = "adapter_a", "adapter_b"


def init(config: ModelConfig, key: jax.Array) -> qwen.Params:
    """Fresh adapters in `config.param_dtype`: A uniform in [-1/sqrt(in), 1/sqrt(in)], B zero, so that training begins at W."""
    layers = {}
    kernels = qwen.abstract_params(config)["layers"]
    for number, target in enumerate(config.lora_targets):
        count, width, features = kernels[target]["kernel"].shape
        shape, limit = (count, width, config.lora_rank), width**-0.5
        layers[target] = {
            A: jax.random.uniform(jax.random.fold_in(key, number), shape, config.param_dtype, -limit, limit),
            B: jnp.zeros((count, config.lora_rank, features), config.param_dtype),
        }
    return {"layers": layers}


def axes(config: ModelConfig) -> qwen.Params:
    """Logical axis names of every adapter: those of its matrix, and the rank on no axis of the mesh."""
    kernels = qwen.param_axes(config)["layers"]
    names = {target: kernels[target]["kernel"] for target in config.lora_targets}
    return {"layers": {target: {A: (*name[:2], "rank"), B: (name[0], "rank", name[2])} for target, name in names.items()}}


def attach(frozen: qwen.Params, adapters: qwen.Params) -> qwen.Params:
    """The weights with the adapters beside them. Copies nothing."""
    layers = dict(frozen["layers"])
    for target, adapter in adapters["layers"].items():
        layers[target] = {**layers[target], **adapter}
    return {**frozen, "layers": layers}


def merge(params: qwen.Params, config: ModelConfig) -> qwen.Params:
    """Attached adapters added to their matrices; params without adapters as they are."""
    return {**params, "layers": merge_layers(params["layers"], config)}


def merge_layers(layers: qwen.Params, config: ModelConfig) -> dict[str, Any]:
    """Of one layer, or of several stacked, W + (alpha / r) A B in float32 at least."""

    def matrix(weights: Mapping[str, Any]) -> dict[str, Any]:
        a, b = (wide(weights[name]) for name in (A, B))
        kernel = weights["kernel"] + scale(config) * jnp.einsum("...ir,...ro->...io", a, b)
        rest = {name: value for name, value in weights.items() if name not in (A, B)}
        return {**rest, "kernel": kernel.astype(weights["kernel"].dtype)}

    return {name: matrix(weights) if A in weights else weights for name, weights in layers.items()}


def scale(config: ModelConfig) -> float:
    """alpha / r."""
    return config.lora_alpha / config.lora_rank
