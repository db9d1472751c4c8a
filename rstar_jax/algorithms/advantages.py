"""Advantages of a group of rollouts (host, float64), computed after selection and before any sharding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rstar_jax.types import UserError


def group_advantages(
    rewards_g: np.ndarray | Sequence[float], *, normalize_std: bool = True, ddof: int = 1, epsilon: float = 1e-6
) -> np.ndarray:
    """Group-relative advantages `A_i = (r_i - mean(r)) / (std(r) + epsilon)`.

    Mean and standard deviation are those of this group alone, over its known rewards. A group whose known rewards are all
    equal, a group of one included, has no contrast: its advantages are exactly 0.

    Args:
      rewards_g: [G], the rewards of all rollouts of one prompt; NaN where the verdict is unknown.
      normalize_std: False leaves the division out: `A_i = r_i - mean(r)` (Dr. GRPO, arXiv 2503.20783).
      ddof: the variance is divided by `G - ddof`; 1 is the sample, 0 the population standard deviation.
      epsilon: keeps the quotient bounded when the rewards nearly agree.

    Returns:
      [G] float64. An unknown reward gets 0, and the others get what they would get in a group without it.

    Raises:
      UserError: a reward is infinite, or `ddof` is neither 0 nor 1.

    Reference: rStar2-Agent section 2.2, Eq. 2 and 7; Shao et al., DeepSeekMath (arXiv 2402.03300).
    """
    rewards = np.asarray(rewards_g, np.float64)
    if rewards.ndim != 1:
        raise ValueError(f"rewards of one group have one axis; got shape {rewards.shape}")
    if ddof not in (0, 1):
        raise UserError(f"ddof={ddof} is not known; choose 0 (population) or 1 (sample)")
    if np.isinf(rewards).any():
        raise UserError("a reward is infinite; rewards are finite numbers, or unknown")
    known = ~np.isnan(rewards)
    advantages = np.zeros_like(rewards)
    if not known.any() or np.ptp(rewards[known]) == 0:
        return advantages
    advantages[known] = rewards[known] - rewards[known].mean()
    if normalize_std:
        advantages[known] /= rewards[known].std(ddof=ddof) + epsilon
    return advantages
