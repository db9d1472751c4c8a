"""A stage's loss: its objective by name, and the terms beside it that the stage asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rstar_jax.algorithms import objectives, sft
from rstar_jax.algorithms.entropy import entropy_bonus
from rstar_jax.algorithms.kl import kl_sums
from rstar_jax.config import StageConfig
from rstar_jax.types import Array, Sums, TrainBatch, UserError

LossFn = Callable[[Array, Array, TrainBatch], Sums]
"""(log-probs [B, T], entropies [B, T], batch) -> sums, with the loss to be minimised under "loss"."""


def loss_function(stage: StageConfig) -> LossFn:
    """The stage's loss as a function of log-probs and entropies: `objective + kl_coefficient * KL - entropy_coefficient * H`.

    The terms are over the same tokens and aggregated as the objective is, so that numerators add over one count. Raises `UserError`
    for a name that is not in `OBJECTIVES`, and for a setting that the objective does not read.
    """
    name = stage.objective or KIND_OBJECTIVES[stage.kind]
    if name not in OBJECTIVES:
        raise UserError(f"stages.{stage.name}.objective={name!r} is not known; choose one of {', '.join(OBJECTIVES)}")
    _check_read(stage, name)
    objective = OBJECTIVES[name](stage)
    if not stage.kl_coefficient and not stage.entropy_coefficient:
        return objective
    aggregation = "sequence_mean" if name == "gspo" else stage.loss_aggregation

    def loss(logp: Array, entropy: Array, batch: TrainBatch) -> Sums:
        sums = objective(logp, entropy, batch)
        over: dict[str, Any] = {
            "trainable_bt": batch.trainable_bt,
            "sequences_bt": batch.segments_bt,
            "aggregation": aggregation,
            "horizon": stage.max_response_tokens,
        }
        if stage.kl_coefficient:
            if batch.reference_logp_bt is None:
                raise ValueError("kl_coefficient needs reference_logp_bt")
            term = kl_sums(logp, batch.reference_logp_bt, estimator=stage.kl_estimator, **over)
            sums = _with_term(sums, term, stage.kl_coefficient)
        if stage.entropy_coefficient:
            sums = _with_term(sums, entropy_bonus(entropy, coefficient=stage.entropy_coefficient, **over), 1.0)
        return sums

    return loss


def _with_term(sums: Sums, term: Sums, coefficient: float) -> Sums:
    """The sums with `coefficient` times a term of the same count in the loss, and the term beside it."""
    (name,) = term.values
    loss = sums.values["loss"] + coefficient * term.values[name]
    return Sums({**sums.values, **term.values, "loss": loss}, {**sums.counts, **term.counts})


_UNREAD = {
    "sft": ("dual_clip", "importance_cap"),
    "cispo": ("dual_clip",),
    "gspo": ("dual_clip", "importance_cap", "loss_aggregation"),
}
"""Settings that an objective has no use for."""


def _check_read(stage: StageConfig, name: str) -> None:
    defaults = StageConfig("", stage.kind, 1)
    for setting in _UNREAD.get(name, ()):
        if getattr(stage, setting) != getattr(defaults, setting):
            raise UserError(f"stages.{stage.name}.{setting}={getattr(stage, setting)} is not read by objective={name}; leave it out")


def _sft(stage: StageConfig) -> LossFn:
    return lambda logp, entropy, batch: sft.sft_loss(
        logp, batch.trainable_bt, aggregation=stage.loss_aggregation, sequences_bt=batch.segments_bt
    )


def _token_ratios(function: Callable[..., Sums], stage: StageConfig, **settings: float) -> LossFn:
    """A loss with a ratio for each token, bound to the stage's settings."""
    bound = functools.partial(
        function,
        clip_low=stage.clip_low,
        clip_high=stage.clip_high,
        aggregation=stage.loss_aggregation,
        importance_cap=stage.importance_cap,
        importance_mode=stage.importance_mode,
        horizon=stage.max_response_tokens,
        **settings,
    )
    return lambda logp, entropy, batch: bound(
        logp,
        batch.old_logp_bt,
        batch.advantage_bt,
        batch.trainable_bt,
        sequences_bt=batch.segments_bt,
        sampler_logp_bt=batch.sampler_logp_bt,
    )


def _clip_higher(stage: StageConfig) -> LossFn:
    return _token_ratios(objectives.policy_loss, stage, dual_clip=stage.dual_clip)


def _cispo(stage: StageConfig) -> LossFn:
    return _token_ratios(objectives.cispo_loss, stage)


def _gspo(stage: StageConfig) -> LossFn:
    gspo = functools.partial(objectives.sequence_policy_loss, clip_low=stage.clip_low, clip_high=stage.clip_high)
    return lambda logp, entropy, batch: gspo(
        logp, batch.old_logp_bt, batch.advantage_bt, batch.trainable_bt, sequences_bt=batch.segments_bt
    )


OBJECTIVES: dict[str, Callable[[StageConfig], LossFn]] = {
    "sft": _sft,
    "clip_higher": _clip_higher,
    "cispo": _cispo,
    "gspo": _gspo,
}
"""Objectives by name (`stages.NAME.objective`); a new one is one more entry (see docs/extending.md)."""

KIND_OBJECTIVES = {"sft": "sft", "srl": "clip_higher", "rl": "clip_higher"}
"""What a stage optimises when it names no objective."""
