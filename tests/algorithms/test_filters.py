"""Filters: each dropped group is counted once, under a name."""

import pytest

from rstar_jax.algorithms.filters import apply_filters, is_overlong, overlong, pass_rate, too_few, uniform_reward
from rstar_jax.types import Finish, Group, Problem, Sampled, Trajectory, Verdict


def rollout(finish: Finish = Finish.STOP, last_id: int = 9) -> Trajectory:
    trajectory = Trajectory(Problem("p", "q"), 0, [1, 2])
    trajectory.append_sampled(Sampled((5, last_id), (-0.1, -0.2), finish), "text")
    trajectory.close(finish)
    return trajectory


def group(*rewards: float | None, finishes: tuple[Finish, ...] | None = None) -> Group:
    finishes = finishes or (Finish.STOP,) * len(rewards)
    return Group(Problem("p", "q"), tuple(map(rollout, finishes)), tuple(map(Verdict, rewards)))


@pytest.mark.parametrize(
    ("rewards", "uniform"),
    [
        ((1, 1, 1), True),
        ((0.1, 0.1, 0.1), True),
        ((0, 1), False),
        ((0.5, 0.25), False),
        ((), True),
        ((1,), True),
        ((None, None), True),
        ((1, None, 1), True),
        ((1, None, 0), False),
    ],
)
def test_uniform_reward_looks_at_known_rewards(rewards, uniform):
    assert uniform_reward(group(*rewards)) is uniform


def test_too_few_counts_known_verdicts():
    assert too_few(2)(group(1, None, None))
    assert not too_few(2)(group(1, None, 0))


@pytest.mark.parametrize(
    ("rewards", "outside"),
    [
        ((0, 0, 0, 0), True),
        ((1, 0, 0, 0), False),
        ((1, 1, 1, 0), False),
        ((1, 1, 1, 1), True),
        ((None, None), True),
        ((1, 0, None), False),
    ],
)
def test_pass_rate_bounds_are_inclusive_and_over_known_rewards(rewards, outside):
    assert pass_rate(0.25, 0.75)(group(*rewards)) is outside


@pytest.mark.parametrize("last_id", [0, 7, 151643, 151645])
def test_overlong_follows_the_finish_reason_and_not_the_last_token(last_id):
    # NovaSky-AI/SkyRL#1319: a model that ends with another stop token was taken for truncated
    assert not is_overlong(rollout(Finish.STOP, last_id))
    assert is_overlong(rollout(Finish.LENGTH, last_id))


@pytest.mark.parametrize("finish", sorted(set(Finish) - {Finish.LENGTH}))
def test_no_other_finish_is_overlong(finish):
    assert not is_overlong(rollout(finish))


def test_overlong_groups_exceed_a_share():
    half = group(1, 0, 1, 0, finishes=(Finish.LENGTH, Finish.LENGTH, Finish.STOP, Finish.TURNS))
    assert overlong(0.49)(half)
    assert not overlong(0.5)(half)
    assert not overlong(0.0)(group())


def test_each_dropped_group_is_counted_once_under_the_first_reason():
    groups = [group(1, 0), group(1, 1), group(None, 0), group(0, 1, 1), group(None, None)]
    kept, counts = apply_filters(groups, {"too_few": too_few(2), "uniform_reward": uniform_reward, "never": lambda g: False})
    assert kept == [groups[0], groups[3]]
    assert counts == {"too_few": 2, "uniform_reward": 1, "never": 0}


@pytest.mark.parametrize("groups", [[], [group(1, 1), group(1, 1)]])
def test_nothing_left_is_an_empty_list_and_a_count(groups):
    # BytedTsinghua-SIA/DAPO#22, ltzheng/SimpleTIR#11: every group uniform must not be a crash
    assert apply_filters(groups, {"uniform_reward": uniform_reward}) == ([], {"uniform_reward": len(groups)})


def test_without_predicates_everything_is_kept():
    groups = [group(1, 1), group(0, 1)]
    assert apply_filters(groups, {}) == (groups, {})
