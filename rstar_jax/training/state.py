"""What training changes and checkpoints keep."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rstar_jax.config import ModelConfig
from rstar_jax.model import qwen
from rstar_jax.model.sharding import TRAINING_RULES, shardings
from rstar_jax.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters (stacked form), optimiser state, and the number of updates applied in this run (scalar int32)."""

    params: qwen.Params
    optimizer: Any
    updates: Array


def param_shardings(model: ModelConfig, mesh: Mesh) -> Any:
    """`NamedSharding` of every parameter under the training rules."""
    return shardings(qwen.param_axes(model), mesh, TRAINING_RULES)


def init_state(model: ModelConfig, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh) -> TrainState:
    """Fresh parameters, created in their shards, with a fresh optimiser state."""
    make = jax.jit(qwen.init, static_argnums=0, out_shardings=param_shardings(model, mesh))
    return with_optimizer(make(model, jax.random.key(seed)), optimizer, jnp.zeros((), jnp.int32), mesh)


def with_optimizer(params: qwen.Params, optimizer: optax.GradientTransformation, updates: Array, mesh: Mesh) -> TrainState:
    """The same parameters with a fresh optimiser state (a stage that resets it). Its moments lie in their parameters' shards, its
    counters on every device, so that the first update's program is every update's."""
    replicated = NamedSharding(mesh, PartitionSpec())

    def settle(x: jax.Array) -> jax.Array:
        return x if isinstance(x.sharding, NamedSharding) and x.ndim else jax.device_put(x, replicated)

    state = TrainState(params, jax.jit(optimizer.init)(params), updates)
    return jax.tree.map(settle, state)
