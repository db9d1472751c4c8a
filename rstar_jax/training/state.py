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
    """The parameters that are trained (stacked form), optimiser state, and the number of updates applied in this run (scalar int32).

    `frozen`: with adapters, which then are the `params`, the weights that they belong to. `reference`: the `params` of the policy that
    a divergence is measured from, where a stage has one.
    """

    params: qwen.Params
    optimizer: Any
    updates: Array
    frozen: qwen.Params | None = None
    reference: qwen.Params | None = None

    @property
    def weights(self) -> qwen.Params:
        """What the forward pass takes: the parameters, or the frozen weights with the adapters beside them."""
        return self._attached(self.params)

    @property
    def reference_weights(self) -> qwen.Params:
        """The same of the reference policy."""
        if self.reference is None:
            raise ValueError("this state has no reference policy")
        return self._attached(self.reference)

    def _attached(self, params: qwen.Params) -> qwen.Params:
        return params if self.frozen is None else lora.attach(self.frozen, params)


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


def optimizer_shardings(optimizer: optax.GradientTransformation, params: qwen.Params, mesh: Mesh) -> Any:
    """`NamedSharding` of every array of the optimiser's state: moments lie in their parameters' shards, counters on every device.
    `params` may be shapes with shardings."""
    replicated = NamedSharding(mesh, PartitionSpec())
    known = dict(jax.tree_util.tree_leaves_with_path(params))

    def where(path: Any, x: Any) -> NamedSharding:
        """Of the parameter that the end of the path names, wherever an optimiser keeps its moments (optax's own map of parameters
        does not know masked ones, as muon has)."""
        ends = (path[i:] for i in range(len(path)))
        parameter = next((known[end] for end in ends if end in known and known[end].shape == x.shape), None)
        return replicated if parameter is None else parameter.sharding

    return jax.tree_util.tree_map_with_path(where, jax.eval_shape(optimizer.init, params))


def with_optimizer(
    params: qwen.Params, optimizer: optax.GradientTransformation, updates: Array, mesh: Mesh, frozen: qwen.Params | None = None
) -> TrainState:
    """The same parameters with a fresh optimiser state (a stage that resets it), created in its shards, so that the first update's
    program is every update's."""
    moments = jax.jit(optimizer.init, out_shardings=optimizer_shardings(optimizer, params, mesh))(params)
    return TrainState(params, moments, jax.device_put(updates, NamedSharding(mesh, PartitionSpec())), frozen)


def with_reference(state: TrainState, wanted: bool) -> TrainState:
    """The state with a copy of its parameters as the reference policy, or with none."""
    if not wanted:
        return dataclasses.replace(state, reference=None)
    where = jax.tree.map(lambda p: p.sharding, state.params)
    copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params), out_shardings=where)
    return dataclasses.replace(state, reference=copy(state.params))


def abstract_state(model: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes and shardings of `init_state`'s result (without adapters), without allocating it."""

    def placed(shapes: Any, where: Any) -> Any:
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, where)

    params = placed(qwen.abstract_params(model), param_shardings(model, mesh))
    moments = placed(jax.eval_shape(optimizer.init, params), optimizer_shardings(optimizer, params, mesh))
    updates: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    return TrainState(params, moments, updates)
