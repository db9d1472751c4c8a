"""The loss of supervised fine-tuning (device, pure)."""

from __future__ import annotations

import chex

from rstar_jax.algorithms.objectives import aggregate
from rstar_jax.types import Array, Sums


def sft_loss(
    logp_bt: Array,
    trainable_bt: Array,
    *,
    aggregation: str = "token_mean",
    sequences_bt: Array | None = None,
    horizon: float = 0,
) -> Sums:
    """Negative log-likelihood `-log pi(token)` of the assistant's tokens.

    Args:
      logp_bt: [B, T] log-probs (nats) of the tokens; masked entries may hold NaN.
      trainable_bt: [B, T] bool, True on the assistant's tokens.
      aggregation: see `rstar_jax.algorithms.objectives.aggregate`.
      sequences_bt: [B, T] int, the sequence of each token within its row (0 = padding); None: a row is one sequence.
      horizon: tokens; needed with the aggregation "constant" only.

    Returns:
      Sums with the key `loss` (nats).

    Reference: rStar2-Agent section 4.1.
    """
    chex.assert_equal_shape([logp_bt, trainable_bt])
    numerator, count = aggregate(-logp_bt, trainable_bt, aggregation, sequences_bt, horizon)
    return Sums({"loss": numerator}, {"loss": count})
