"""The engine's copy of trained weights: weights flow one way, from the trainer to here."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rstar_jax.config import ModelConfig
from rstar_jax.model import lora, qwen
from rstar_jax.model.linear import transpose_kernels
from rstar_jax.model.sharding import ROLLOUT_RULES, constrain


def _rolled_out(params: Any, axes: Any, model: ModelConfig, mesh: Mesh | None) -> Any:
    """Gathered over the axes that only training cuts, in the compute dtype. Copies even of what needs no cast: the trainer gives
    its own buffers away while these are still sampled from."""
    cast = jax.tree.map(lambda p: jnp.copy(p.astype(jnp.dtype(model.dtype))), params)
    if mesh is None or mesh.size == 1:
        return cast
    return jax.tree.map(lambda p, names: constrain(p, mesh, names, ROLLOUT_RULES), cast, axes)


@functools.partial(jax.jit, static_argnames=("model", "mesh"))
def reshard_ends(ends: Any, model: ModelConfig, mesh: Mesh | None) -> Any:
    """Embedding, final norm and head in the rollout layout."""
    return _rolled_out(ends, qwen.param_axes(model)["ends"], model, mesh)


@functools.partial(jax.jit, static_argnames=("model", "mesh", "transposed"))
def reshard_layer(layers: Any, index: jax.Array, model: ModelConfig, mesh: Mesh | None, transposed: bool) -> Any:
    """Layer `index` of stacked (trained) layers in the rollout layout: adapters merged, kernels as [out, in] where `transposed`."""
    layer = lora.merge_layers(jax.tree.map(lambda p: p[index], layers), model)
    axes = jax.tree.map(lambda names: names[1:], qwen.param_axes(model)["layers"], is_leaf=lambda x: isinstance(x, tuple))
    layer = _rolled_out(layer, axes, model, mesh)
    return transpose_kernels((layer,))[0] if transposed else layer


def rollout_params(params: qwen.Params, model: ModelConfig, mesh: Mesh | None = None, layout: str = "auto") -> qwen.Params:
    """The engine's copy of trained weights: adapters merged, layers unstacked, in the compute dtype, gathered over fsdp and context and
    kept apart over tensor and expert. `layout` is `rollout.weight_layout`.

    Two jitted programs make it, one of them once per layer, so that what exists beside the two copies is a layer's worth at most.
    """
    transposed = layout == "out_in" or (layout == "auto" and jax.default_backend() == "cpu")
    indices = (jnp.int32(i) for i in range(model.num_layers))
    layers = tuple(reshard_layer(params["layers"], i, model, mesh, transposed) for i in indices)
    return {"ends": reshard_ends(params["ends"], model, mesh), "layers": layers}
