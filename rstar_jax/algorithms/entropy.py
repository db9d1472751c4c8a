"""What the entropy of the token distributions does to an objective: a bonus for it, or a choice of tokens by it."""

from __future__ import annotations

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rstar_jax.algorithms.objectives import aggregate
from rstar_jax.types import Array, Sums, UserError


def entropy_bonus(
    entropy_bt: Array,
    trainable_bt: Array,
    *,
    coefficient: float,
    aggregation: str = "token_mean",
    sequences_bt: Array | None = None,
    horizon: float = 0,
) -> Sums:
    """`-coefficient * H_t`, a term of the loss that keeps the policy from settling (device, pure).

    Args:
      entropy_bt: [B, T] entropies (nats) of the policy's token distributions, with their gradient.
      trainable_bt: [B, T] bool, True where the token was sampled. What stands elsewhere has no influence.
      coefficient: how much a nat is worth; a negative one lowers the entropy.
      aggregation: see `rstar_jax.algorithms.objectives.aggregate`.
      sequences_bt: [B, T] int, see `aggregate`.
      horizon: tokens, see `aggregate`.

    Returns:
      Sums with the key `entropy_bonus`. Its count is that of a loss with the same mask and aggregation, so their numerators add.

    Reference: Mnih et al., A3C (arXiv 1602.01783); Schulman et al., PPO (arXiv 1707.06347), Eq. 9.
    """
    numerator, count = aggregate(entropy_bt, trainable_bt, aggregation, sequences_bt, horizon)
    return Sums({"entropy_bonus": -coefficient * numerator}, {"entropy_bonus": count})


def high_entropy_threshold(entropies: np.ndarray, trainable: np.ndarray, share: float) -> float:
    """The entropy from which on a token belongs to the `share` of highest entropy (host, pure).

    The (1 - share) quantile over all N trainable tokens: the k-th largest entropy, k = ceil(share N). It is the entropy of a token and
    no interpolation, so comparing with it is exact in any precision. Ties with it are kept, so that at least k tokens reach it:
    with all entropies equal, all do.

    Args:
      entropies: numbers of any shape, of all tokens of an update.
      trainable: bool, the same shape. What stands elsewhere, NaN included, has no influence.
      share: above 0, at most 1 (everything); the paper's is 0.2.

    Returns:
      The threshold (nats); infinity without a trainable token.

    Raises:
      UserError: `share` is not above 0 and at most 1.

    Reference: Wang et al., Beyond the 80/20 Rule (arXiv 2506.01939).
    """
    if not 0 < share <= 1:
        raise UserError(f"high_entropy_share={share} must be above 0 and at most 1")
    entropies, trainable = np.asarray(entropies), np.asarray(trainable)
    if entropies.shape != trainable.shape or trainable.dtype != bool:
        raise ValueError(f"entropies {entropies.shape} need a mask of bools, got {trainable.dtype} {trainable.shape}")
    known = entropies[trainable]
    if not known.size:
        return math.inf
    kept = max(1, math.ceil(share * known.size - 1e-9))  # 0.07 * 100 is a little above 7
    return float(np.partition(known, known.size - kept)[known.size - kept])


def keep_high_entropy(advantage_bt: Array, entropy_bt: Array, threshold: Array | float) -> jax.Array:
    """The advantages, 0 where the entropy is below the threshold (device, pure).

    A token of advantage 0 has no part in the numerator of a token-wise policy loss and stays in its count: the paper's objective, whose
    denominator is of all tokens. Terms without an advantage, as the divergence and the entropy bonus, keep all tokens.

    Args:
      advantage_bt: [B, T], or [B] when a row is one sequence; masked entries may hold NaN, and then may stay so.
      entropy_bt: [B, T] entropies (nats); no gradient passes.
      threshold: of `high_entropy_threshold`; a token that equals it is kept.

    Returns:
      [B, T] advantages.

    Reference: Wang et al., Beyond the 80/20 Rule (arXiv 2506.01939).
    """
    advantage_bt, entropy_bt = jnp.asarray(advantage_bt), jnp.asarray(entropy_bt)
    chex.assert_rank(entropy_bt, 2)
    if advantage_bt.ndim == 1:
        advantage_bt = jnp.broadcast_to(advantage_bt[:, None], entropy_bt.shape)
    chex.assert_equal_shape([advantage_bt, entropy_bt])
    return jnp.where(entropy_bt >= threshold, advantage_bt, jnp.zeros_like(advantage_bt))
