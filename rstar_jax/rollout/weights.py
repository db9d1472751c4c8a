"""The engine's copy of trained weights: weights flow one way, from the trainer to here."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rstar_jax.config import ModelConfig
from rstar_jax.model import lora, qwen
from rstar_jax.model.linear import transpose_kernels
from rstar_jax.model.sharding import ROLLOUT_RULES, constrain


@functools.partial(jax.jit, static_argnames=("model", "mesh", "transposed"))
def _rollout_params(params: qwen.Params, model: ModelConfig, mesh: Mesh | None, transposed: bool) -> qwen.Params:
    params = lora.merge(params, model)
    if mesh is not None and mesh.size > 1:
        axes = qwen.param_axes(model)
        params = jax.tree.map(lambda p, names: constrain(p, mesh, names, ROLLOUT_RULES), params, axes)
    # copies even of what needs no cast: the trainer gives its own buffers away while these are still sampled from
    params = jax.tree.map(lambda p: jnp.copy(p.astype(jnp.dtype(model.dtype))), qwen.unstack_layers(params))
    return {**params, "layers": transpose_kernels(params["layers"])} if transposed else params


def rollout_params(params: qwen.Params, model: ModelConfig, mesh: Mesh | None = None, layout: str = "auto") -> qwen.Params:
    """The engine's copy of trained weights, made by one jitted reshard: adapters merged, layers unstacked, in the compute dtype,
    gathered over fsdp and kept apart over tensor. `layout` is `rollout.weight_layout`."""
    transposed = layout == "out_in" or (layout == "auto" and jax.default_backend() == "cpu")
    return _rollout_params(params, model, mesh, transposed)
