"""Evaluation statistics against hand-computed numbers, enumeration and simulation."""

import itertools
import math

import numpy as np
import pytest

from rstar_jax.algorithms.evaluation import accuracy_interval, avg_at_k, mean_pass_at_k, pass_at_k, summarize
from rstar_jax.types import Finish, Group, Problem, Sampled, ToolRecord, ToolStatus, Trajectory, Verdict

OK, ERROR, INFRA = (ToolRecord("python", {}, s) for s in (ToolStatus.OK, ToolStatus.ERROR, ToolStatus.INFRA_ERROR))


def rollout(sampled: int = 3, observed: int = 0, calls=(), finish: Finish = Finish.STOP) -> Trajectory:
    """One turn of `sampled` tokens, and where there are calls their answer of `observed` tokens and a second turn of one."""
    trajectory = Trajectory(Problem("p", "q"), 0, [1, 2])
    trajectory.append_sampled(Sampled((5,) * sampled, (-0.1,) * sampled, Finish.STOP), "text")
    if calls:
        trajectory.append_observed([6] * observed, calls)
        trajectory.append_sampled(Sampled((5,), (-0.1,), Finish.STOP), "text")
    trajectory.close(finish)
    return trajectory


def group(problem: str, *rewards: float | None, text: str = "q") -> Group:
    return Group(Problem(problem, text), tuple(rollout() for _ in rewards), tuple(map(Verdict, rewards)))


def test_one_right_of_four_is_certain_to_be_among_four():
    # verl-project/verl#7240: a bootstrap with replacement gave 0.684
    assert pass_at_k(4, 1, 4) == 1.0


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"), [(4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 2, 2, 5 / 6), (4, 0, 4, 0.0), (8, 8, 1, 1.0)]
)
def test_pass_at_k_by_hand(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_equals_the_share_of_subsets_that_hold_a_right_sample():
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations(range(n), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(min(s) < c for s in subsets) / len(subsets), abs=1e-15)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_pass_at_k_without_enough_samples_is_refused(n, c, k):
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(n, c, k)


def test_ragged_groups_weigh_the_same():
    # THUDM/slime#2064: 4, 4 and 3 samples
    counts = [(4, 1), (4, 4), (3, 0)]
    assert avg_at_k(counts) == pytest.approx((0.25 + 1 + 0) / 3)
    assert mean_pass_at_k(counts, 2) == (pytest.approx((0.5 + 1 + 0) / 3), 3)
    assert mean_pass_at_k(counts, 4) == (1.0, 2)
    assert math.isnan(mean_pass_at_k(counts, 8)[0]) and mean_pass_at_k(counts, 8)[1] == 0


def test_with_one_sample_each_the_interval_is_wilsons():
    # published values of the score interval: 8 of 10 and 0 of 10
    assert accuracy_interval([(1, 1)] * 8 + [(1, 0)] * 2) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert accuracy_interval([(1, 0)] * 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert accuracy_interval([(1, 1)] * 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


def test_samples_that_always_agree_add_no_certainty():
    once = accuracy_interval([(1, 1)] * 8 + [(1, 0)] * 2)
    assert accuracy_interval([(16, 16)] * 8 + [(16, 0)] * 2) == pytest.approx(once)
    assert accuracy_interval([(16, 16)] * 10) == pytest.approx(accuracy_interval([(1, 1)] * 10))


def test_where_problems_do_not_differ_every_sample_counts():
    # 10 problems, 1 of 2 right on each: as 20 coins with 10 heads, Wilson (0.2993, 0.7007)
    assert accuracy_interval([(2, 1)] * 10) == pytest.approx((0.2993, 0.7007), abs=1e-4)


def test_an_interval_of_nothing_is_everything():
    assert accuracy_interval([]) == (0.0, 1.0)


def test_a_higher_confidence_gives_a_wider_interval():
    counts = [(4, 1), (4, 4), (3, 0), (4, 2)]
    (low, high), (wide_low, wide_high) = accuracy_interval(counts), accuracy_interval(counts, 0.99)
    assert 0 <= wide_low < low < avg_at_k(counts) < high < wide_high <= 1


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    # 400 evaluations of 30 problems x 16 samples with solve rates from Beta(1, 2), so that the truth is 1/3. Taking samples for
    # independent covers it in 65 of 100; a coverage of 0.93 falls under 352 of 400 with probability 1e-4 (the seed is fixed).
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        low, high = accuracy_interval([(16, int(c)) for c in rng.binomial(16, rng.beta(1, 2, size=30))])
        covered += low <= 1 / 3 <= high
    assert 352 <= covered <= 396


def test_problems_are_told_apart_by_id_and_never_by_text():
    # verl-project/verl#3238: two items with one text are two problems; one item in two batches is one
    table = summarize([group("a", 1, 1, text="same"), group("b", 0, 0, text="same"), group("a", 0, 0)])
    assert table["problems"] == 2
    assert table["accuracy"] == (0.5 + 0.0) / 2
    assert table["pass@4"] == 1.0 and table["pass@4_problems"] == 1


def test_pass_at_k_is_listed_for_powers_of_two_up_to_the_largest_count():
    table = summarize([group("a", 1, 0, 0, 0), group("b", 1, 1, 1, 1), group("c", 0, 0, 0)])
    assert [k for k in table if k.startswith("pass@") and "_" not in k] == ["pass@1", "pass@2", "pass@4"]
    assert table["pass@1"] == table["accuracy"] == pytest.approx((0.25 + 1) / 3)
    assert table["pass@2"] == pytest.approx(1.5 / 3)
    assert (table["pass@4"], table["pass@4_problems"]) == (1.0, 2)


def test_unknown_verdicts_leave_the_statistics_and_are_counted():
    lost = rollout(50, finish=Finish.FAILED)
    with_unknown = Group(Problem("a", "q"), (rollout(), lost, rollout()), (Verdict(1.0), Verdict(None), Verdict(0.0)))
    table = summarize([with_unknown, group("b", None, None)])
    assert (table["trajectories"], table["unknown"], table["problems"]) == (5, 3, 1)
    assert (table["accuracy"], table["response_length"]) == (0.5, 3.0)
    assert (table["finish/failed"], table["finish/stop"], table["finish/length"]) == (1, 4, 0)


def test_behaviour_of_trajectories():
    trajectories = (
        rollout(3),  # 3 tokens, 1 turn
        rollout(4, 5, [OK]),  # 10 tokens, 2 turns
        rollout(4, 5, [ERROR, OK]),
        rollout(2, 2, [ERROR, INFRA], Finish.LENGTH),  # 5 tokens; the lost call says nothing
    )
    table = summarize([Group(Problem("a", "q"), trajectories, tuple(map(Verdict, (1.0, 1.0, 1.0, 0.0))))])
    assert table["response_length"] == (3 + 10 + 10 + 5) / 4
    assert table["turns"] == 7 / 4
    assert table["tool_calls"] == 5 / 4
    assert table["tool_error_rate"] == 2 / 4
    assert table["tool_error_share"] == pytest.approx(1 / 3)  # of three right trajectories one holds an error
    assert (table["finish/stop"], table["finish/length"]) == (3, 1)
    assert table["reward"] == 0.75


def test_an_evaluation_of_nothing_counts_nothing_and_knows_nothing():
    table = summarize([])
    assert (table["problems"], table["trajectories"], table["unknown"]) == (0, 0, 0)
    assert math.isnan(table["accuracy"]) and (table["accuracy_low"], table["accuracy_high"]) == (0.0, 1.0)
    assert all(
        math.isnan(table[k]) for k in ("reward", "response_length", "turns", "tool_calls", "tool_error_rate", "tool_error_share")
    )


def test_every_entry_is_a_float():
    assert all(type(v) is float for v in summarize([group("a", 1, 0), group("b", None)]).values())


def test_an_unfinished_trajectory_is_refused():
    open_one = Trajectory(Problem("a", "q"), 0, [1])
    with pytest.raises(ValueError, match="has not ended"):
        summarize([Group(Problem("a", "q"), (open_one,), (Verdict(1.0),))])
