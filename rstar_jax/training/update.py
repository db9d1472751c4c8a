"""The update step: microbatches give sums of gradients and counts; one division; one optimiser step.

Because every microbatch contributes numerators and counts, the result does not depend on how rows are cut into microbatches, on
padding, on row order or on the number of devices (up to the rounding of float sums).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rstar_jax.algorithms.entropy import high_entropy_threshold, keep_high_entropy
from rstar_jax.config import ModelConfig
from rstar_jax.model import lora
from rstar_jax.model.logprobs import score
from rstar_jax.model.sharding import TRAINING_RULES, parts, spec
from rstar_jax.training.batching import dead_microbatch
from rstar_jax.training.losses import LossFn
from rstar_jax.training.state import TrainState
from rstar_jax.types import Array, Sums, TrainBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accumulated:
    """What microbatches add up to: gradients of the loss's numerator, sums, and running maxima."""

    gradients: Any
    sums: Sums
    maxima: Mapping[str, Array]


@dataclasses.dataclass(frozen=True)
class Programs:
    """The jitted programs of an update: an empty sum, one microbatch more, and the optimiser's step."""

    nothing: Any
    add: Any
    apply: Any


class Update:
    """`update(state, batches) -> (state, sums, maxima)`: one optimiser step from the microbatches of one update.

    `temperature` is the one the rows were sampled at (1 for SFT). The state is donated. A step whose gradient is not finite
    changes nothing and is counted in `sums` ("skipped"). With `high_entropy_share` below 1, tokens of an update whose entropy under the
    weights before it is not among that share of the highest have the advantage 0 (arXiv 2506.01939).
    """

    def __init__(
        self,
        model: ModelConfig,
        loss: LossFn,
        optimizer: optax.GradientTransformation,
        temperature: float,
        mesh: Mesh,
        high_entropy_share: float = 1.0,
    ):
        self.mesh = mesh
        self.shards = parts(mesh, "batch")
        self._rows = NamedSharding(mesh, spec(("batch", "length"), TRAINING_RULES))
        self._share = high_entropy_share
        self._score = jax.jit(functools.partial(_score, model=model, temperature=temperature, mesh=mesh))
        self._entropy = jax.jit(functools.partial(_entropy, model=model, temperature=temperature, mesh=mesh))
        self._keep_high_entropy = jax.jit(keep_high_entropy, out_shardings=self._rows)
        measure = functools.partial(_measure, model=model, loss=loss, temperature=temperature, mesh=mesh)
        self._measure = measure
        self._optimizer = optimizer
        self._routed = model.routed
        self._programs: Programs | None = None

    def place(self, batch: TrainBatch) -> TrainBatch:
        """The batch on the devices, rows and their tokens in parts: the one crossing from host to device."""
        return jax.device_put(batch, self._rows)

    def score(self, state: TrainState, batch: TrainBatch) -> TrainBatch:
        """The batch with the trainer's own log-probs as the ratio's denominator."""
        return dataclasses.replace(batch, old_logp_bt=self._score(state.weights, batch))

    def prepare(self, state: TrainState, batches: Sequence[TrainBatch], trainer_old: bool) -> list[TrainBatch]:
        """The host batches of one update on the devices, with what the loss needs of frozen weights: log-probs of the state's reference
        where it has one, and with `trainer_old` the trainer's own as the ratio's denominator."""
        placed = [self.place(batch) for batch in batches]
        if state.reference is not None:
            reference = state.reference_weights
            placed = [dataclasses.replace(batch, reference_logp_bt=self._score(reference, batch)) for batch in placed]
        if trainer_old:
            placed = [self.score(state, batch) for batch in placed]
        return placed

    def select_tokens(self, state: TrainState, batches: Sequence[TrainBatch]) -> list[TrainBatch]:
        """The placed batches of one update without the advantages of tokens of low entropy (`high_entropy_share`)."""
        if self._share >= 1:
            return list(batches)
        entropies = [self._entropy(state.weights, batch) for batch in batches]
        flat = np.concatenate([np.ravel(x) for x in jax.device_get(entropies)])
        trainable = np.concatenate([np.ravel(x) for x in jax.device_get([batch.trainable_bt for batch in batches])])
        threshold = np.float32(high_entropy_threshold(flat, trainable, self._share))
        return [
            dataclasses.replace(batch, advantage_bt=self._keep_high_entropy(batch.advantage_bt, entropy, threshold))
            for batch, entropy in zip(batches, entropies, strict=True)
        ]

    def step(self, state: TrainState, batches: Sequence[TrainBatch]) -> tuple[TrainState, dict[str, float]]:
        """One update from host batches, and its metrics as numbers."""
        return self.steps(state, [batches], False)

    def steps(
        self, state: TrainState, updates: Sequence[Sequence[TrainBatch]], trainer_old: bool
    ) -> tuple[TrainState, dict[str, float]]:
        """One update for each list of host batches; old log-probs stay frozen over them.

        `trainer_old`: the ratio's denominator is recomputed with the weights before the first update. The gap between sampler and
        trainer is that of the first update; everything else is summed over all. No update gives no metrics.
        """
        placed = [self.prepare(state, batches, trainer_old) for batches in updates]
        total: Sums | None = None
        gap: dict[str, float] = {}
        for batches in placed:
            state, *measured = self(state, self.select_tokens(state, batches))
            sums, maxima = jax.device_get(measured)
            if total is None:
                gap = {name: float(value) for name, value in maxima.items()}
                gap["logp_gap_mean"] = sums.means()["logp_gap_mean"]
            total = sums if total is None else total + sums
        return state, {} if total is None else total.means() | gap

    def __call__(self, state: TrainState, batches: Sequence[TrainBatch]) -> tuple[TrainState, Sums, dict[str, Array]]:
        if not batches:
            raise ValueError("an update needs at least one microbatch")
        accumulated = self.accumulate(state, batches)
        trained = dataclasses.replace(state, frozen=None, reference=None)
        trained, sums, maxima = self.programs(state, batches[0]).apply(trained, accumulated)
        return dataclasses.replace(trained, frozen=state.frozen, reference=state.reference), sums, maxima

    def accumulate(self, state: TrainState, batches: Sequence[TrainBatch]) -> Accumulated:
        """What the microbatches add up to, before any division."""
        programs = self.programs(state, batches[0])
        so_far = programs.nothing(state.params)
        for batch in batches:
            so_far = programs.add(state.params, state.frozen, batch, so_far)
        return so_far

    def programs(self, state: TrainState, batch: TrainBatch) -> Programs:
        """The jitted programs, for arguments like these, which may be shapes with shardings. Their results lie where their arguments
        lay, so that no call compiles what another has."""
        if self._programs is None:
            measure = self._measure
            shapes = jax.eval_shape(measure, state.params, state.frozen, batch)
            everywhere = NamedSharding(self.mesh, PartitionSpec())
            sums, maxima = jax.tree.map(lambda _: everywhere, (shapes.sums, shapes.maxima))
            where = Accumulated(jax.tree.map(lambda p: p.sharding, state.params), sums, maxima)
            state_where = jax.tree.map(lambda x: x.sharding, dataclasses.replace(state, frozen=None, reference=None))

            def add(params: Any, frozen: Any, batch: TrainBatch, so_far: Accumulated) -> Accumulated:
                return _add(so_far, measure(params, frozen, batch))

            self._programs = Programs(
                nothing=jax.jit(functools.partial(_zeros, shapes=shapes), out_shardings=where),
                add=jax.jit(add, donate_argnums=3, out_shardings=where),
                apply=jax.jit(
                    functools.partial(_apply, optimizer=self._optimizer), donate_argnums=0, out_shardings=(state_where, None, None)
                ),
            )
        return self._programs

    def warm_up(self, state: TrainState, shapes: Sequence[tuple[int, int]], trainer_old: bool) -> None:
        """Compile the programs of all microbatch shapes [rows, tokens] on dead rows; the first update compiles the optimiser's."""
        for rows, tokens in shapes:
            batches = self.prepare(state, [dead_microbatch(rows, tokens, self._routed)], trainer_old)
            self.accumulate(state, self.select_tokens(state, batches))

    def compiled_programs(self) -> int:
        """How many programs exist by now (a run's warm-up makes them all)."""
        built = self._programs
        programs: list[Any] = [self._score, self._entropy, self._keep_high_entropy]
        programs += [] if built is None else [built.nothing, built.add, built.apply]
        return sum(program._cache_size() for program in programs)


def _score(params: Any, batch: TrainBatch, *, model: ModelConfig, temperature: float, mesh: Mesh) -> jax.Array:
    return score(params, model, batch, temperature, mesh)[0]


def _entropy(params: Any, batch: TrainBatch, *, model: ModelConfig, temperature: float, mesh: Mesh) -> jax.Array:
    return score(params, model, batch, temperature, mesh)[1]


def _measure(
    params: Any, frozen: Any, batch: TrainBatch, *, model: ModelConfig, loss: LossFn, temperature: float, mesh: Mesh
) -> Accumulated:
    def numerator(params: Any) -> tuple[jax.Array, tuple[Sums, Array, Array]]:
        weights = params if frozen is None else lora.attach(frozen, params)
        logp, entropy = score(weights, model, batch, temperature, mesh)
        sums = loss(logp, entropy, batch)
        return jnp.asarray(sums.values["loss"]), (sums, logp, entropy)

    gradients, (sums, logp, entropy) = jax.grad(numerator, has_aux=True)(params)
    trainable = batch.trainable_bt
    count = jnp.sum(trainable, dtype=jnp.float32)
    sampled = trainable & jnp.isfinite(batch.sampler_logp_bt)
    gap = jnp.where(sampled, jnp.abs(logp - jnp.where(sampled, batch.sampler_logp_bt, 0.0)), 0.0)
    extra = {
        "entropy": (jnp.sum(jnp.where(trainable, entropy, 0.0)), count),
        "logp_gap_mean": (jnp.sum(gap), jnp.sum(sampled, dtype=jnp.float32)),
    }
    sums = Sums(
        {**sums.values, **{name: value for name, (value, _) in extra.items()}},
        {**sums.counts, **{name: number for name, (_, number) in extra.items()}},
    )
    return Accumulated(gradients, sums, {"logp_gap_max": jnp.max(gap)})


def _zeros(params: Any, shapes: Accumulated) -> Accumulated:
    """Nothing accumulated yet; gradients take their parameters' shards from the parameters."""
    zero = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    return dataclasses.replace(zero, gradients=jax.tree.map(jnp.zeros_like, params))


def _add(a: Accumulated, b: Accumulated) -> Accumulated:
    maxima = {name: jnp.maximum(a.maxima[name], b.maxima[name]) for name in a.maxima}
    return Accumulated(jax.tree.map(jnp.add, a.gradients, b.gradients), a.sums + b.sums, maxima)


def _apply(
    state: TrainState, accumulated: Accumulated, *, optimizer: optax.GradientTransformation
) -> tuple[TrainState, Sums, dict[str, Array]]:
    count = jnp.maximum(accumulated.sums.counts["loss"], 1.0)
    gradients = jax.tree.map(lambda g: g / count.astype(g.dtype), accumulated.gradients)
    norm = optax.global_norm(gradients)
    finite = jnp.isfinite(norm)
    changes, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
    new = TrainState(optax.apply_updates(state.params, changes), optimizer_state, state.updates + 1)
    old = dataclasses.replace(state, updates=state.updates + 1)
    state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    one = jnp.ones(())
    sums = Sums(
        {**accumulated.sums.values, "grad_norm": jnp.where(finite, norm, 0.0), "skipped": jnp.where(finite, 0.0, 1.0)},
        {**accumulated.sums.counts, "grad_norm": one, "skipped": one},
    )
    return state, sums, dict(accumulated.maxima)
