"""What training changes and checkpoints keep."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rstar_jax.config import ModelConfig
from rstar_jax.model import lora, qwen
from rstar_jax.model.sharding import TRAINING_RULES, shardings
from rstar_jax.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The parameters that are trained (stacked form), optimiser state, and the number of updates applied in this run (scalar
    int32). `frozen`: with adapters, which then are the `params`, the weights that they belong to."""

    params: qwen.Params
    optimizer: Any
    updates: Array
    frozen: qwen.Params | None = None

    @property
    def weights(self) -> qwen.Params:
        """What the forward pass takes: the parameters, or the frozen weights with the adapters beside them."""
        return self.params if self.frozen is None else lora.attach(self.frozen, self.params)


def param_shardings(model: ModelConfig, mesh: Mesh) -> Any:
    """`NamedSharding` of every parameter under the training rules."""
    return shardings(qwen.param_axes(model), mesh, TRAINING_RULES)


def init_state(model: ModelConfig, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh) -> TrainState:
    """Fresh parameters, created in their shards, with a fresh optimiser state."""
    make = jax.jit(qwen.init, static_argnums=0, out_shardings=param_shardings(model, mesh))
    return first_state(make(model, jax.random.key(seed)), model, optimizer, seed, mesh)


def first_state(params: qwen.Params, model: ModelConfig, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh) -> TrainState:
    """The state that training starts in from given weights: they are trained, or, with `model.lora_rank`, fresh adapters are."""
    updates = jnp.zeros((), jnp.int32)
    if not model.lora_rank:
        return with_optimizer(params, optimizer, updates, mesh)
    make = jax.jit(lora.init, static_argnums=0, out_shardings=shardings(lora.axes(model), mesh, TRAINING_RULES))
    return with_optimizer(make(model, jax.random.key(seed)), optimizer, updates, mesh, params)


def with_optimizer(
    params: qwen.Params, optimizer: optax.GradientTransformation, updates: Array, mesh: Mesh, frozen: qwen.Params | None = None
) -> TrainState:
    """The same parameters with a fresh optimiser state (a stage that resets it). Its moments lie in their parameters' shards, its
    counters on every device, so that the first update's program is every update's."""
    replicated = NamedSharding(mesh, PartitionSpec())

    def settle(x: jax.Array) -> jax.Array:
        return x if isinstance(x.sharding, NamedSharding) and x.ndim else jax.device_put(x, replicated)

    state = TrainState(params, jax.jit(optimizer.init)(params), updates)
    return dataclasses.replace(jax.tree.map(settle, state), frozen=frozen)
