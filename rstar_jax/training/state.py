"""What training changes and checkpoints keep."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

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
    """Fresh parameters, created in their shards; the optimiser's moments inherit their parameters' shards."""
    make = jax.jit(qwen.init, static_argnums=0, out_shardings=param_shardings(model, mesh))
    return with_optimizer(make(model, jax.random.key(seed)), optimizer, jnp.zeros((), jnp.int32))


def with_optimizer(params: qwen.Params, optimizer: optax.GradientTransformation, updates: Array) -> TrainState:
    """The same parameters with a fresh optimiser state (a stage that resets it)."""
    return TrainState(params, jax.jit(optimizer.init)(params), updates)
