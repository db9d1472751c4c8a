"""Statistics of evaluation: avg@k, unbiased pass@k, intervals, and how trajectories used their turns and tools (host).

A problem is identified by its id: two problems may have the same text. A rollout is correct when its reward is above 0. Unknown
verdicts leave every statistic and are counted, so that problems may have different numbers of samples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from rstar_jax.algorithms.roc import count_errors
from rstar_jax.types import Finish, Group, Trajectory

Counts = Sequence[tuple[int, int]]
"""(samples n, correct c) of each problem, n >= 1."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that at least one of `k` samples, drawn without replacement from n with c correct, is correct.

        pass@k = 1 - C(n - c, k) / C(n, k)

    An unbiased estimate of the chance that k fresh samples solve the problem. Needs `1 <= k <= n` and `0 <= c <= n`.

    Reference: Chen et al., Evaluating Large Language Models Trained on Code (arXiv 2107.03374), section 2.1.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n; got n={n}, c={c}, k={k}")
    ways = math.comb(n, k)
    return (ways - math.comb(n - c, k)) / ways


def mean_pass_at_k(counts: Counts, k: int) -> tuple[float, int]:
    """(mean of pass@k, number of problems in it): the problems with at least `k` samples. The mean of none is NaN."""
    values = [pass_at_k(n, c, k) for n, c in counts if n >= k]
    return _mean(values), len(values)


def avg_at_k(counts: Counts) -> float:
    """`mean over problems of c / n`: each problem weighs the same, however many samples it has. NaN without problems."""
    return _mean([c / n for n, c in counts])


def accuracy_interval(counts: Counts, confidence: float = 0.95) -> tuple[float, float]:
    """A confidence interval of `avg_at_k` for problems drawn at random, with samples clustered by problem.

    Wilson's score interval with the effective number of independent samples,

        n_eff = min(N, p (1 - p) P / var(m)),

    where `m` are the P per-problem means, `p` their mean, `var` divides by P, and N counts all samples. With one sample for
    each problem n_eff = P and this is Wilson's interval. Samples of one problem that always agree add nothing
    (n_eff = P); where problems do not differ, every sample counts (n_eff = N). When all are right, or all wrong, n_eff = P.
    With few problems it covers a little less than it says: 0.92 of 0.95 with 10 problems, 0.93 with 30, in simulation.

    Returns:
      (low, high) within [0, 1]; (0, 1) without problems.

    Reference: Wilson (1927); Kish, Survey Sampling (1965) for the design effect N / n_eff.
    """
    if not counts:
        return 0.0, 1.0
    means = [c / n for n, c in counts]
    p, variance = _mean(means), statistics.pvariance(means)
    spread = p * (1 - p)
    n = float(len(means))
    if spread > 0:  # and then spread >= variance, as for all numbers in [0, 1], so that P <= n_eff
        samples = float(sum(n for n, _ in counts))
        n = min(samples, spread * len(means) / variance) if variance else samples
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(spread / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def summarize(groups: Sequence[Group]) -> dict[str, float]:
    """One flat table of an evaluation. Groups with the same problem id are one problem.

    Returns:
      problems, trajectories, unknown: counts; `problems` are those with a known verdict, `unknown` are trajectories.
      accuracy, accuracy_low, accuracy_high: avg@k with its 95 % interval (`accuracy_interval`).
      reward: the mean reward over trajectories.
      pass@K, pass@K_problems: K = 1, 2, 4, ... up to the largest number of known samples of a problem; the mean over the
        problems with at least K of them, and how many these are.
      response_length (tokens after the prompt, sampled and observed), turns, tool_calls: means over trajectories.
      tool_error_rate: errors among answered calls (`rstar_jax.algorithms.roc.count_errors`).
      tool_error_share: correct trajectories that hold a tool error, among correct trajectories.
      finish/REASON: trajectories that ended so, those with an unknown verdict included.
      A mean or share of nothing is NaN.
    """
    samples: dict[str, list[float]] = {}
    known: list[tuple[Trajectory, float]] = []
    finishes = dict.fromkeys((f"finish/{finish.value}" for finish in Finish), 0.0)
    for group in groups:
        for trajectory, verdict in zip(group.trajectories, group.verdicts, strict=True):
            if trajectory.finish is None:
                raise ValueError(f"a trajectory of problem {group.problem.id} has not ended")
            finishes[f"finish/{trajectory.finish.value}"] += 1
            if verdict.value is not None:
                known.append((trajectory, verdict.value))
                samples.setdefault(group.problem.id, []).append(verdict.value)

    counts = [(len(rewards), sum(reward > 0 for reward in rewards)) for rewards in samples.values()]
    low, high = accuracy_interval(counts)
    total = sum(len(group.trajectories) for group in groups)
    table = {
        "problems": float(len(counts)),
        "trajectories": float(total),
        "unknown": float(total - len(known)),
        "accuracy": avg_at_k(counts),
        "accuracy_low": low,
        "accuracy_high": high,
        "reward": _mean([reward for _, reward in known]),
    }
    k = 1
    while k <= max((n for n, _ in counts), default=0):
        table[f"pass@{k}"], covered = mean_pass_at_k(counts, k)
        table[f"pass@{k}_problems"] = float(covered)
        k *= 2
    return table | _behaviour(known) | finishes


def _behaviour(known: Sequence[tuple[Trajectory, float]]) -> dict[str, float]:
    errors = [count_errors(trajectory.calls) for trajectory, _ in known]
    answered = sum(calls for _, calls in errors)
    return {
        "response_length": _mean([trajectory.response_length for trajectory, _ in known]),
        "turns": _mean([len(trajectory.turns) for trajectory, _ in known]),
        "tool_calls": _mean([len(trajectory.calls) for trajectory, _ in known]),
        "tool_error_rate": sum(wrong for wrong, _ in errors) / answered if answered else math.nan,
        "tool_error_share": _mean([wrong > 0 for (wrong, _), (_, reward) in zip(errors, known, strict=True) if reward > 0]),
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
