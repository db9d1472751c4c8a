"""The programs of an update at any size, compiled from shapes alone: nothing is allocated."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rstar_jax.config import MeshConfig, ModelConfig, StageConfig, TrainingConfig
from rstar_jax.model import qwen
from rstar_jax.model.sharding import make_mesh
from rstar_jax.training.batching import dead_microbatch
from rstar_jax.training.losses import loss_function
from rstar_jax.training.optimizer import make_optimizer
from rstar_jax.training.state import TrainState
from rstar_jax.training.update import Update

STAGE = StageConfig("rl", "rl", 1, learning_rate=1e-6)


def one_device() -> Mesh:
    return make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])


def size(tree: Any) -> int:
    """Bytes of all leaves."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What an update of `rows` rows of `tokens` tokens takes, as shapes."""

    model: ModelConfig
    rows: int
    tokens: int

    def state(self, optimizer: Any, mesh: Mesh) -> TrainState:
        everywhere = NamedSharding(mesh, PartitionSpec())

        def placed(tree: Any) -> Any:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), tree)

        params = qwen.abstract_params(self.model)
        updates = jax.ShapeDtypeStruct((), jnp.int32)
        return placed(TrainState(params, jax.eval_shape(optimizer.init, params), updates))

    def lower(self) -> tuple[Any, Any, TrainState, Any]:
        """The program that adds a microbatch and that of the optimiser, lowered, with the state and the sums they are given."""
        mesh, optimizer = one_device(), make_optimizer(STAGE, TrainingConfig())
        update = Update(self.model, loss_function(STAGE), optimizer, 1.0, mesh)
        state, batch = self.state(optimizer, mesh), dead_microbatch(self.rows, self.tokens)
        programs = update.programs(state, batch)
        so_far = jax.eval_shape(programs.nothing, state.params)
        return programs.add.lower(state.params, None, batch, so_far), programs.apply.lower(state, so_far), state, so_far

    def memory(self) -> Any:
        """XLA's account of the program that adds a microbatch."""
        return self.lower()[0].compile().memory_analysis()
