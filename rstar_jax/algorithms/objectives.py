"""Token losses of policy optimisation (device, pure). A loss is a numerator and a count, never a mean.

Shape suffixes: b rows, t tokens of a row, s sequences of a packed row (0 = padding, 1 to T).

`Sums` of microbatches, rows, shards and hosts add up, and one division after the last addition gives the loss. To get its
gradient, differentiate the numerator `values["loss"]` and divide by the total of `counts["loss"]`.
"""

from __future__ import annotations

from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp

from rstar_jax.algorithms.masked import fill, masked_count, masked_sum
from rstar_jax.types import Array, Sums, UserError

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")

IMPORTANCE_MODES = ("truncate", "mask")

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 nats, so that the ratio (at most 4.9e8) is finite in float32. A token beyond it has the
gradient 0; a policy that moved so far since sampling has no use for an importance weight."""


def aggregate(
    values_bt: Array, mask_bt: Array, aggregation: str, sequences_bt: Array | None = None, horizon: float = 0
) -> tuple[jax.Array, jax.Array]:
    """The numerator and the count of a mean over tokens or over sequences.

    * token_mean: `sum_t v_t`, count = the number of unmasked tokens. Long sequences weigh more (rStar2-Agent Eq. 6, DAPO).
    * sequence_mean: `sum_i (1/|o_i|) sum_t v_it`, count = the number of sequences that hold an unmasked token, with `|o_i|`
      the unmasked tokens of sequence i. All sequences weigh the same (GRPO, SRL Eq. 1).
    * constant: `sum_t v_t / horizon`, count = the number of sequences that hold an unmasked token. All tokens weigh the same,
      whatever the length of their sequence and of the others (Dr. GRPO, arXiv 2503.20783, section 3.2: a constant, such as the
      generation budget, in place of `|o_i|`). TRL's dr_grpo counts sequences with nothing to train on as well.

    Args:
      values_bt: [B, T] numbers; masked entries may hold NaN.
      mask_bt: [B, T] bool.
      aggregation: one of `AGGREGATIONS`.
      sequences_bt: [B, T] int, the sequence of each token within its row, 1 to T, 0 for padding (never counted). None: a row
        is one sequence. A sequence lies within one row.
      horizon: tokens, the most that a response may hold; needed with "constant" only.

    Returns:
      (numerator, count): float and int32 scalars.
    """
    if aggregation not in AGGREGATIONS:
        raise UserError(f"loss_aggregation={aggregation!r} is not known; choose one of {', '.join(AGGREGATIONS)}")
    if aggregation == "constant" and not horizon > 0:
        raise UserError(f"loss_aggregation=constant divides by the horizon, which must be above 0; got {horizon}")
    chex.assert_rank(values_bt, 2)
    mask_bt = without_padding(mask_bt, sequences_bt)
    values_bt = fill(values_bt, mask_bt)
    if aggregation == "token_mean":
        return jnp.sum(values_bt), masked_count(mask_bt)
    if sequences_bt is None:
        length_bs = masked_count(mask_bt, axis=1)[:, None]
        length_bt = jnp.broadcast_to(length_bs, mask_bt.shape)
    else:
        length_bs = _by_sequence(mask_bt.astype(jnp.int32), sequences_bt)
        length_bt = jnp.take_along_axis(length_bs, jnp.asarray(sequences_bt), axis=1)
    sequences = masked_count(length_bs > 0)
    if aggregation == "constant":
        return jnp.sum(values_bt) / horizon, sequences
    return jnp.sum(values_bt / jnp.maximum(length_bt, 1)), sequences


def policy_loss(
    logp_bt: Array,
    old_logp_bt: Array,
    advantage_bt: Array,
    trainable_bt: Array,
    *,
    clip_low: float,
    clip_high: float,
    aggregation: str = "token_mean",
    sequences_bt: Array | None = None,
    entropy_bt: Array | None = None,
    sampler_logp_bt: Array | None = None,
    importance_cap: float = 0.0,
    importance_mode: str = "truncate",
    dual_clip: float = 0.0,
    horizon: float = 0,
) -> Sums:
    """Clipped policy-gradient loss with separate lower and upper clip ranges (clip-higher).

        rho_t  = exp(clamp(logp_t - old_logp_t, -20, 20))
        loss_t = -w_t min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)

    With `dual_clip` = c > 1 a token of negative advantage loses no more than c times it: its ratio is clipped at c as well.

    w_t = 1, or with `importance_cap` = C > 0 a function of k_t = exp(clamp(old_logp_t - sampler_logp_t, -20, 20)), a constant: for
    rollouts of older weights, where `old_logp` is of the policy before the update and `sampler_logp` of the one that sampled.

        truncate: w_t = min(k_t, C)
        mask:     w_t = k_t where 1/C <= k_t <= C, else 0

    A token that `mask` rejects has the loss 0 and still counts, so the other tokens weigh what they would weigh without it.

    Args:
      logp_bt: [B, T] log-probs (nats) of the tokens under the policy that is trained.
      old_logp_bt: [B, T] log-probs under the policy that the ratio is taken against; a constant.
      advantage_bt: [B, T], or [B] when a row is one sequence; a constant.
      trainable_bt: [B, T] bool, True where the token was sampled. What stands elsewhere in any argument has no influence.
      clip_low: the ratio earns nothing below `1 - clip_low` when the advantage is negative.
      clip_high: the ratio earns nothing above `1 + clip_high` when the advantage is positive.
      aggregation: of the loss, see `aggregate`. The metrics are token means always.
      sequences_bt: [B, T] int, see `aggregate`.
      entropy_bt: [B, T] entropies (nats) of the policy's token distributions, reported as a metric only.
      sampler_logp_bt: [B, T] log-probs under the policy that sampled; needed with `importance_cap` only.
      importance_cap: bound of the weights w_t; 0: no weights. At least 1 with "mask".
      importance_mode: one of `IMPORTANCE_MODES`, what becomes of a weight beyond the bound.
      dual_clip: bound of the ratio where the advantage is negative; 0: none.
      horizon: tokens, see `aggregate`.

    Returns:
      Sums over the batch with the keys
        loss: the objective above, to be minimised;
        clip_fraction: tokens whose clip is active, so that they have no gradient;
        ratio: rho;
        approx_kl: the estimate `(rho - 1) - log rho` of KL(old || policy), never negative
          ("k3" of http://joschu.net/blog/kl-approx.html);
        entropy: only when `entropy_bt` is given;
        importance: w, only with `importance_cap`;
        importance_rejected: tokens of weight 0, only with `importance_mode` "mask".

    Reference: rStar2-Agent section 2.2, Eq. 6; Yu et al., DAPO (arXiv 2503.14476); Schulman et al., PPO (arXiv 1707.06347);
    dual clip: Ye et al. (arXiv 1912.09729), Eq. 5;
    truncated importance weights: Ionides (2008), as used between behaviour and proximal policy in AReaL (arXiv 2505.24298);
    masked: IcePop (Ring-1T, arXiv 2510.18855) with [alpha, beta] = [1/C, C], the same as TRL's token_mask. verl's rejection of
    tokens, in contrast, takes them out of the denominator too.
    """
    mask_bt, advantage_bt = _given(logp_bt, old_logp_bt, advantage_bt, trainable_bt, sequences_bt)
    advantage_bt = jax.lax.stop_gradient(fill(advantage_bt, mask_bt))
    old_logp_bt = jax.lax.stop_gradient(fill(old_logp_bt, mask_bt))

    log_ratio_bt = jnp.clip(fill(logp_bt, mask_bt) - old_logp_bt, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_bt = jnp.exp(log_ratio_bt)
    low, high = 1.0 - clip_low, 1.0 + clip_high
    # The minimum of the two products, written by cases: at a tie `minimum` would halve the gradient between its arguments.
    ceiling_bt = jnp.where(advantage_bt < 0, dual_clip if dual_clip else jnp.inf, high)
    clipped_bt = ((advantage_bt != 0) & (ratio_bt > ceiling_bt)) | ((advantage_bt < 0) & (ratio_bt < low))
    loss_bt = -advantage_bt * jnp.where(clipped_bt, jnp.clip(ratio_bt, low, ceiling_bt), ratio_bt)

    metrics = {"clip_fraction": clipped_bt, "ratio": ratio_bt, "approx_kl": ratio_bt - 1.0 - log_ratio_bt}
    if importance_cap:
        weights = _importance(old_logp_bt, sampler_logp_bt, mask_bt, importance_cap, importance_mode)
        metrics |= weights
        loss_bt = weights["importance"] * loss_bt
    if entropy_bt is not None:
        metrics["entropy"] = jnp.asarray(entropy_bt)
    return _sums(aggregate(loss_bt, mask_bt, aggregation, sequences_bt, horizon), metrics, mask_bt)


def cispo_loss(
    logp_bt: Array,
    old_logp_bt: Array,
    advantage_bt: Array,
    trainable_bt: Array,
    *,
    clip_low: float,
    clip_high: float,
    aggregation: str = "token_mean",
    sequences_bt: Array | None = None,
    sampler_logp_bt: Array | None = None,
    importance_cap: float = 0.0,
    importance_mode: str = "truncate",
    horizon: float = 0,
) -> Sums:
    """CISPO: the policy gradient of every token, weighed by a clipped ratio that is a constant.

        rho_t  = exp(clamp(logp_t - old_logp_t, -20, 20))
        loss_t = -w_t sg(clip(rho_t, 1 - clip_low, 1 + clip_high)) A_t logp_t          sg: no gradient

    Unlike in `policy_loss` a token whose ratio is clipped keeps a gradient, `-w_t clip(rho_t) A_t`. The value is no measure of
    progress: it is the log-probs' scale. The paper sets no lower bound in effect: `clip_low` = 1 has none.
    ScaleRL (arXiv 2510.13786) caps the ratio at 5: `clip_high` = 4.

    Arguments and keys are those of `policy_loss`, with the same w_t; `clip_fraction` counts tokens whose ratio lies outside the clip
    range, whatever the sign of their advantage.

    Reference: MiniMax-M1 (arXiv 2506.13585), Eq. 4 and 5, where the mean is over tokens.
    """
    mask_bt, advantage_bt = _given(logp_bt, old_logp_bt, advantage_bt, trainable_bt, sequences_bt)
    advantage_bt = jax.lax.stop_gradient(fill(advantage_bt, mask_bt))
    old_logp_bt = jax.lax.stop_gradient(fill(old_logp_bt, mask_bt))
    logp_bt = fill(logp_bt, mask_bt)

    log_ratio_bt = jax.lax.stop_gradient(jnp.clip(logp_bt - old_logp_bt, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    ratio_bt = jnp.exp(log_ratio_bt)
    low, high = 1.0 - clip_low, 1.0 + clip_high
    loss_bt = -jnp.clip(ratio_bt, low, high) * advantage_bt * logp_bt

    clipped_bt = (ratio_bt < low) | (ratio_bt > high)
    metrics = {"clip_fraction": clipped_bt, "ratio": ratio_bt, "approx_kl": ratio_bt - 1.0 - log_ratio_bt}
    if importance_cap:
        weights = _importance(old_logp_bt, sampler_logp_bt, mask_bt, importance_cap, importance_mode)
        metrics |= weights
        loss_bt = weights["importance"] * loss_bt
    return _sums(aggregate(loss_bt, mask_bt, aggregation, sequences_bt, horizon), metrics, mask_bt)


def sequence_policy_loss(
    logp_bt: Array,
    old_logp_bt: Array,
    advantage_bt: Array,
    trainable_bt: Array,
    *,
    clip_low: float,
    clip_high: float,
    sequences_bt: Array | None = None,
) -> Sums:
    """GSPO: clipped policy-gradient loss with one ratio per sequence, the geometric mean of its tokens' ratios.

        s_i = exp(clamp(mean_t(logp_t - old_logp_t), -20, 20))       over the trainable tokens of sequence i
        loss_i = -min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

    The loss is a mean over sequences; a sequence is one trajectory, whose tokens share their advantage. Arguments and keys are those of
    `policy_loss`; `ratio`, `clip_fraction` and `approx_kl` are of sequences. The clip ranges of the paper are 3e-4 and 4e-4.

    Reference: Zheng et al., Group Sequence Policy Optimization (arXiv 2507.18071), Eq. 5 to 7.
    """
    mask_bt, advantage_bt = _given(logp_bt, old_logp_bt, advantage_bt, trainable_bt, sequences_bt)
    sequences_bt = jnp.ones(mask_bt.shape, jnp.int32) if sequences_bt is None else sequences_bt
    length_bs = _by_sequence(mask_bt.astype(jnp.int32), sequences_bt)
    mask_bs, count_bs = length_bs > 0, jnp.maximum(length_bs, 1)
    log_ratio_bt = fill(logp_bt, mask_bt) - jax.lax.stop_gradient(fill(old_logp_bt, mask_bt))
    advantage_bs = jax.lax.stop_gradient(_by_sequence(fill(advantage_bt, mask_bt), sequences_bt) / count_bs)
    return policy_loss(
        _by_sequence(log_ratio_bt, sequences_bt) / count_bs,
        jnp.zeros_like(advantage_bs),
        advantage_bs,
        mask_bs,
        clip_low=clip_low,
        clip_high=clip_high,
    )


def _given(
    logp_bt: Array, old_logp_bt: Array, advantage_bt: Array, trainable_bt: Array, sequences_bt: Array | None
) -> tuple[jax.Array, jax.Array]:
    """The mask without padding, and the advantages as [B, T]. Shapes are checked."""
    chex.assert_rank(logp_bt, 2)
    chex.assert_equal_shape([logp_bt, old_logp_bt, trainable_bt])
    mask_bt, advantage_bt = without_padding(trainable_bt, sequences_bt), jnp.asarray(advantage_bt)
    if advantage_bt.ndim == 1:
        advantage_bt = jnp.broadcast_to(advantage_bt[:, None], mask_bt.shape)
    return mask_bt, advantage_bt


def _importance(
    old_logp_bt: jax.Array, sampler_logp_bt: Array | None, mask_bt: jax.Array, cap: float, mode: str
) -> dict[str, jax.Array]:
    """The weights w of `policy_loss` as the metric `importance`, and with "mask" which tokens are rejected."""
    if mode not in IMPORTANCE_MODES:
        raise UserError(f"importance_mode={mode!r} is not known; choose one of {', '.join(IMPORTANCE_MODES)}")
    if mode == "mask" and cap < 1:
        raise UserError(f"importance_cap={cap} must be at least 1 with importance_mode=mask, which keeps weights from 1/cap to cap")
    if sampler_logp_bt is None:
        raise ValueError("importance_cap needs sampler_logp_bt")
    drift_bt = jnp.clip(old_logp_bt - fill(sampler_logp_bt, mask_bt), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight_bt = jax.lax.stop_gradient(jnp.exp(drift_bt))
    if mode == "truncate":
        return {"importance": jnp.minimum(weight_bt, cap)}
    rejected_bt = (weight_bt > cap) | (weight_bt < 1.0 / cap)
    return {"importance": jnp.where(rejected_bt, 0.0, weight_bt), "importance_rejected": rejected_bt}


def _sums(loss: tuple[jax.Array, jax.Array], metrics: Mapping[str, jax.Array], mask_bt: jax.Array) -> Sums:
    """The loss (numerator, count) beside metrics, which are token means without a gradient."""
    numerators = {name: jax.lax.stop_gradient(masked_sum(value, mask_bt)) for name, value in metrics.items()}
    return Sums({"loss": loss[0]} | numerators, {"loss": loss[1]} | dict.fromkeys(metrics, masked_count(mask_bt)))


def _by_sequence(values_bt: jax.Array, sequences_bt: Array) -> jax.Array:
    """[B, T + 1] sums over the tokens of each sequence of a row (see `aggregate`); column 0 is padding. A row of T tokens holds at
    most T sequences."""
    columns = values_bt.shape[1] + 1
    return jax.vmap(lambda v, s: jnp.zeros(columns, v.dtype).at[s].add(v))(values_bt, jnp.asarray(sequences_bt))


def without_padding(mask_bt: Array, sequences_bt: Array | None) -> jax.Array:
    """The mask, False where `sequences_bt` is 0 (see `aggregate`)."""
    mask_bt = jnp.asarray(mask_bt)
    if sequences_bt is None:
        return mask_bt
    chex.assert_equal_shape([mask_bt, sequences_bt])
    return mask_bt & (jnp.asarray(sequences_bt) > 0)
