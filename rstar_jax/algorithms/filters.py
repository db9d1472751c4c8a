"""Predicates on a group of rollouts, and the counted removal of groups (host).

A predicate names a reason to drop a group and is True when the reason holds. To add one, write a function of a `Group` and
give it a name in the mapping passed to `apply_filters`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rstar_jax.types import Finish, Group, Trajectory

Predicate = Callable[[Group], bool]


def _known_rewards(group: Group) -> np.ndarray:
    rewards = group.rewards()
    return rewards[~np.isnan(rewards)]


def is_overlong(trajectory: Trajectory) -> bool:
    """Whether the token budget ended inside a turn. The finish reason says so; the last token does not."""
    return trajectory.finish is Finish.LENGTH


def uniform_reward(group: Group) -> bool:
    """No contrast: the known rewards are all equal (or there are fewer than two), so that every advantage is 0.

    Reference: rStar2-Agent section 4.3; the dynamic sampling of DAPO (arXiv 2503.14476).
    """
    known = _known_rewards(group)
    return known.size < 2 or bool(np.ptp(known) == 0)


def too_few(minimum: int) -> Predicate:
    """Fewer than `minimum` rollouts have a known verdict."""
    return lambda group: _known_rewards(group).size < minimum


def pass_rate(low: float, high: float) -> Predicate:
    """The share of positive rewards among the known ones lies outside [low, high], or none is known.

    A difficulty filter: `pass_rate(1 / 8, 7 / 8)` keeps, of 8 rollouts, what was solved sometimes.
    """

    def outside(group: Group) -> bool:
        known = _known_rewards(group)
        return known.size == 0 or not low <= float(np.mean(known > 0)) <= high

    return outside


def overlong(max_share: float) -> Predicate:
    """More than `max_share` of the rollouts ran out of tokens.

    For ablations: rStar2-Agent keeps truncated rollouts with reward 0, and found no gain in leaving them out (section 4.3.1).
    """
    return lambda group: sum(map(is_overlong, group.trajectories)) > max_share * len(group.trajectories)


def apply_filters(groups: Sequence[Group], predicates: Mapping[str, Predicate]) -> tuple[list[Group], dict[str, int]]:
    """Drop every group for which a predicate holds.

    Args:
      groups: the groups of a step; may be empty.
      predicates: name -> predicate, asked in this order.

    Returns:
      (kept, counts): the groups that no predicate holds for, in their order; and for each name the groups dropped by it. A
      group counts once, under the first predicate that holds, so that `len(kept) + sum(counts.values()) == len(groups)`.
    """
    kept = []
    counts = dict.fromkeys(predicates, 0)
    for group in groups:
        reason = next((name for name, holds in predicates.items() if holds(group)), None)
        if reason is None:
            kept.append(group)
        else:
            counts[reason] += 1
    return kept, counts
