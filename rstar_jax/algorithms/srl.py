"""The filter of Supervised Reinforcement Learning's dynamic sampling (host)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def keep_group(rewards_g: np.ndarray | Sequence[float], min_std: float) -> bool:
    """Whether a group of rollouts carries enough signal: `sqrt(sum_i (r_i - mean(r))^2 / G) > min_std`.

    The standard deviation is the population's (divided by G), over the known rewards. Rewards that are all equal have none,
    whatever `min_std` is.

    Args:
      rewards_g: [G] rewards of one prompt; NaN where the verdict is unknown.
      min_std: the threshold. The similarity reward is nearly continuous, so that 0 filters almost nothing.

    Reference: SRL (arXiv 2510.25992), dynamic sampling in section 4.
    """
    rewards = np.asarray(rewards_g, np.float64)
    known = rewards[~np.isnan(rewards)]
    return bool(known.size and np.ptp(known) > 0 and known.std() > min_std)
