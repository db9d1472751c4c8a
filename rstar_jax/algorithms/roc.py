"""Resample on Correct: of many rollouts of a prompt, the ones to train on (host).

Wrong answers are kept as they come, so that every kind of failure stays visible; right answers are preferred when they were
reached cleanly, with few tool errors and one well-formed answer. Reference: rStar2-Agent section 2.2.3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rstar_jax.types import ToolRecord, ToolStatus, UserError

RULES = ("paper", "public", "random")
NO_CALL_PENALTY = 0.5
WEIGHT_EPSILON = 0.05
"""Added to the penalty before it is inverted, so that a clean rollout has a finite weight (20, against 1.8 at 0.5)."""
PUBLIC_FLOOR = 2
"""The rollouts of each sign that the public code's rule keeps, where there are as many."""


def count_errors(calls: Sequence[ToolRecord]) -> tuple[int, int]:
    """(errors, answered) of tool calls: of the calls that the model saw an answer to, those that did not succeed.

    A malformed or refused call and every kind of failure and time-out are errors. A call that was never answered, or that
    our own machinery lost, says nothing of the model and is in neither number.
    """
    answered = [call for call in calls if call.status is not None and call.status is not ToolStatus.INFRA_ERROR]
    return sum(call.is_error for call in answered), len(answered)


def penalties(calls: Sequence[ToolRecord], answer_tags: int, turns: int) -> tuple[float, float]:
    """(p_error, p_format) of one trajectory, each in [0, 1].

        p_error  = 0.5 without answered tool calls, else errors / answered calls
        p_format = 1 without an answer tag, else min(1, (answer_tags - 1) / turns)

    Args:
      calls: the trajectory's tool calls (`Trajectory.calls`). They are records of what ran: text that the model wrote to
        look like a tool's answer is not among them.
      answer_tags: the opening answer tags in the *sampled* text.
      turns: the assistant turns.

    Reference: rStar2-Agent section 2.2.3.
    """
    if answer_tags < 0 or turns < 0:
        raise ValueError(f"counts are not negative; got answer_tags={answer_tags}, turns={turns}")
    errors, answered = count_errors(calls)
    p_error = errors / answered if answered else NO_CALL_PENALTY
    p_format = min(1.0, (answer_tags - 1) / max(turns, 1)) if answer_tags else 1.0
    return p_error, p_format


def split_counts(negatives: int, positives: int, keep: int, rule: str) -> tuple[int, int]:
    """How many (negatives, positives) to keep of a group with `negatives + positives > keep >= 1` rollouts; they sum to `keep`.

    * paper: negatives in their own proportion, `floor(negatives * keep / n)`, but at least one; the positives are the rest.
    * public: negatives in proportion, rounded half to even; the positives are the rest; then at least 2 of each sign, as far
      as it has them (1 when `keep` is 2 or 3). Where the public code's own rounded counts sum to `keep`, these are they.

    With one sign only, all of `keep` come from it. Both signs stay whenever both exist and `keep` is at least 2.
    """
    n = negatives + positives
    if negatives == 0 or positives == 0:
        return min(negatives, keep), min(positives, keep)
    if rule == "paper":
        kept = max(1, negatives * keep // n)
        return kept, keep - kept  # at most ceil(positives * keep / n), so never more than there are
    floor = min(PUBLIC_FLOOR, keep // 2)
    kept = max(round(negatives * keep / n), min(floor, negatives))
    kept = min(kept, keep - min(floor, positives))
    return kept, keep - kept


def select(rewards_n: np.ndarray, penalty_n: np.ndarray, keys_n: np.ndarray, keep: int, rule: str) -> np.ndarray:
    """`resample_on_correct` with the random numbers as an argument: a function of (reward, penalty, key) of each rollout.

    `keys_n` [n] are uniform on [0, 1), one for each rollout. When keys move with their rollouts, a permutation of the rows
    chooses the same rollouts under `paper` and `random`. (`public` takes the first in rollout order, by its definition.)

    Negatives and the control take the smallest keys. Positives take the smallest `-log(1 - key) / weight`: the order in which
    exponential clocks of these rates ring is the order of draws without replacement with these weights (the Gumbel-top-k
    trick in another scale).
    """
    known = np.flatnonzero(~np.isnan(rewards_n))
    if len(known) <= keep:
        return known
    if rule == "random":
        return np.sort(_smallest(known, keys_n, keep))
    positive, negative = known[rewards_n[known] > 0], known[rewards_n[known] <= 0]
    n_negative, n_positive = split_counts(len(negative), len(positive), keep, rule)
    if rule == "public":
        chosen = negative[:n_negative], _smallest(positive, penalty_n, n_positive)
    else:
        clocks_n = -np.log1p(-keys_n) * (penalty_n + WEIGHT_EPSILON)
        chosen = _smallest(negative, keys_n, n_negative), _smallest(positive, clocks_n, n_positive)
    return np.sort(np.concatenate(chosen))


def resample_on_correct(
    rewards_n: np.ndarray | Sequence[float],
    penalty_n: np.ndarray | Sequence[float],
    keep: int,
    rng: np.random.Generator,
    rule: str = "paper",
) -> np.ndarray:
    """Indices of the `keep` rollouts of one prompt to train on.

    Args:
      rewards_n: [n] rewards; a rollout is positive when its reward is above 0. NaN (unknown) is never chosen and counts
        neither in n nor in a share.
      penalty_n: [n] `p_error + p_format` of each rollout, at least 0; of the positives only.
      keep: rollouts to keep. A group with no more known rollouts than that is kept whole.
      rng: gives one number for each rollout, whatever the rule and the rewards, and is not used otherwise.
      rule: how many of each sign: `split_counts`. Which of them:
        paper: positives without replacement with weights `1 / (penalty + 0.05)`, negatives uniformly;
        public: positives of the lowest penalty and the first negatives, as microsoft/rStar does; ties in rollout order;
        random: any, uniformly; the control that RoC is to be compared with.

    Returns:
      [min(keep, known rollouts)] int64 indices, increasing (rollout order), without duplicates.

    Raises:
      UserError: an unknown rule, or `keep` below 1.

    Reference: rStar2-Agent section 2.2.3; Efraimidis and Spirakis (2006) for weighted draws without replacement.
    """
    if rule not in RULES:
        raise UserError(f"selection={rule!r} is not known; choose one of {', '.join(RULES)}")
    if keep < 1:
        raise UserError(f"keep={keep} must be at least 1")
    rewards_n, penalty_n = np.asarray(rewards_n, np.float64), np.asarray(penalty_n, np.float64)
    if rewards_n.ndim != 1 or rewards_n.shape != penalty_n.shape:
        raise ValueError(f"one penalty belongs to each reward; got shapes {rewards_n.shape} and {penalty_n.shape}")
    positive_penalties = penalty_n[rewards_n > 0]
    if not (np.isfinite(positive_penalties) & (positive_penalties >= 0)).all():
        raise ValueError("penalties of positive rollouts are finite numbers of at least 0")
    return select(rewards_n, penalty_n, rng.random(len(rewards_n)), keep, rule)


def _smallest(indices: np.ndarray, score_n: np.ndarray, count: int) -> np.ndarray:
    """The `count` of `indices` with the smallest scores; ties go to the earlier index."""
    return indices[np.argsort(score_n[indices], kind="stable")[:count]]
