"""Optimisers and learning-rate schedules of a stage, from optax."""

from __future__ import annotations

from typing import Any

import jax
import optax

from rstar_jax.config import StageConfig, TrainingConfig


def learning_rate(stage: StageConfig, training: TrainingConfig) -> optax.Schedule:
    """Update count -> learning rate: linear warm-up, then constant, or a cosine down to a tenth at the stage's end."""
    peak = training.learning_rate if stage.learning_rate is None else stage.learning_rate
    total = stage.steps * (1 if stage.kind == "sft" else stage.updates_per_rollout)
    warmup = stage.warmup_steps
    if stage.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0 if warmup else peak, peak, warmup, max(total, warmup + 1), peak / 10)
    if warmup:
        return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), optax.constant_schedule(peak)], [warmup])
    return optax.constant_schedule(peak)


def _is_matrix(path: Any) -> bool:
    return any(getattr(key, "key", None) in ("kernel", "experts", "adapter_a", "adapter_b") for key in path)


def _muon_dimensions(params: Any) -> Any:
    """Muon treats the last two axes of the (stacked) kernels as matrices; everything else goes to Adam."""

    def leaf(path: Any, value: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        if not _is_matrix(path):
            return None
        return optax.contrib.MuonDimensionNumbers(reduction_axis=value.ndim - 2, output_axis=value.ndim - 1)

    return jax.tree_util.tree_map_with_path(leaf, params)


def _decay_mask(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: _is_matrix(path), params)


def make_optimizer(stage: StageConfig, training: TrainingConfig) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW or Muon; decoupled weight decay on matrices only."""
    schedule = learning_rate(stage, training)
    if stage.optimizer == "muon":
        rule = optax.contrib.muon(
            schedule,
            adam_b1=training.b1,
            adam_b2=training.b2,
            weight_decay=training.weight_decay,
            weight_decay_mask=_decay_mask,
            muon_weight_dimension_numbers=_muon_dimensions,
        )
    else:
        rule = optax.adamw(schedule, training.b1, training.b2, training.epsilon, weight_decay=training.weight_decay, mask=_decay_mask)
    return optax.chain(optax.clip_by_global_norm(training.clip_norm), rule)
