"""The divergence of the policy from a reference policy, as a term of a loss (device, pure).

With d = logp - reference_logp of a token that was sampled from the policy pi itself, and r = exp(-d) = ref / pi: the estimators of
http://joschu.net/blog/kl-approx.html and, at one position whose context is given, their expectations over the token.

    | estimator | value     | E[value]           | E[gradient of the value] |
    |-----------|-----------|--------------------|--------------------------|
    | k1        | d         | KL(pi || ref)      | 0                        |
    | k2        | d^2 / 2   | E[d^2] / 2, biased | that of KL(pi || ref)    |
    | k3        | r - 1 + d | KL(pi || ref)      | that of KL(ref || pi)    |

So a good estimate of the value need not be a good loss. k1's gradient is the score function grad log pi, noise of mean zero: as a
loss it pulls nowhere (as a part of the reward it is right). k2's is d grad log pi, the policy gradient of the divergence: the one to
take for KL(pi || ref). k3's is (1 - r) grad log pi, whose mean is -E_ref[grad log pi]: the pull of the reversed divergence
KL(ref || pi), with heavy tails where pi is small beside ref. This holds for tokens of pi; nothing here corrects for older
samples. None of them has a gradient through the contexts that earlier tokens lead to.

GRPO's loss (DeepSeekMath, arXiv 2402.03300, Eq. 4) and TRL's `beta` are k3; verl names the three k1 (kl), k2 (mse), k3 (low_var_kl).
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from rstar_jax.algorithms.masked import fill
from rstar_jax.algorithms.objectives import MAX_LOG_RATIO, aggregate, without_padding
from rstar_jax.types import Array, Sums, UserError

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_sums(
    logp_bt: Array,
    reference_logp_bt: Array,
    trainable_bt: Array,
    *,
    estimator: str = "k3",
    aggregation: str = "token_mean",
    sequences_bt: Array | None = None,
    horizon: float = 0,
) -> Sums:
    """An estimate of the divergence from the reference, to be added to a loss with a coefficient; see the module for what each is.

    d_t is clamped to +-`MAX_LOG_RATIO`, so that values are finite; a token beyond it has the gradient 0. verl clamps k3 itself to
    +-10 besides, which is not done here.

    Args:
      logp_bt: [B, T] log-probs (nats) of the tokens under the policy that is trained.
      reference_logp_bt: [B, T] log-probs under the reference policy; a constant.
      trainable_bt: [B, T] bool, True where the token was sampled. What stands elsewhere has no influence.
      estimator: one of `KL_ESTIMATORS`.
      aggregation: see `rstar_jax.algorithms.objectives.aggregate`.
      sequences_bt: [B, T] int, see `aggregate`.
      horizon: tokens, see `aggregate`.

    Returns:
      Sums with the key `kl` (nats). Its count is that of a loss with the same mask and aggregation, so numerators of the two add:
      `loss + coefficient * kl` over the one count.

    Reference: Schulman, http://joschu.net/blog/kl-approx.html; the gradients: Tang and Munos (arXiv 2506.09477).
    """
    if estimator not in KL_ESTIMATORS:
        raise UserError(f"kl_estimator={estimator!r} is not known; choose one of {', '.join(KL_ESTIMATORS)}")
    chex.assert_rank(logp_bt, 2)
    chex.assert_equal_shape([logp_bt, reference_logp_bt, trainable_bt])
    mask_bt = without_padding(trainable_bt, sequences_bt)
    reference_logp_bt = jax.lax.stop_gradient(fill(reference_logp_bt, mask_bt))
    log_ratio_bt = jnp.clip(fill(logp_bt, mask_bt) - reference_logp_bt, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        kl_bt = log_ratio_bt
    elif estimator == "k2":
        kl_bt = jnp.square(log_ratio_bt) / 2
    else:
        kl_bt = jnp.expm1(-log_ratio_bt) + log_ratio_bt
    numerator, count = aggregate(kl_bt, mask_bt, aggregation, sequences_bt, horizon)
    return Sums({"kl": numerator}, {"kl": count})
