"""The append-only trajectory, groups and sums."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from rstar_jax.types import Finish, Group, Problem, Sampled, Sums, ToolRecord, ToolStatus, Trajectory, Verdict

PROBLEM = Problem("p", "q", "1")


def test_a_trajectory_grows_by_its_two_appends_only():
    t = Trajectory(PROBLEM, 2, [1, 2, 3])
    t.append_sampled(Sampled((4, 5), (-0.5, -0.25), Finish.STOP, 9), "ab")
    t.append_observed([6], [ToolRecord("python", {}, ToolStatus.OK)])
    t.append_sampled(Sampled((7,), (-1.0,), Finish.STOP, 9), "c")
    t.close(Finish.STOP)
    assert t.ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert t.trainable.tolist() == [False, False, False, True, True, False, True]
    assert t.versions.tolist() == [-1, -1, -1, 9, 9, -1, 9]
    np.testing.assert_array_equal(t.logps, np.float32([np.nan, np.nan, np.nan, -0.5, -0.25, np.nan, -1.0]))
    assert (t.response_length, t.sampled_length, len(t)) == (4, 3, 7)
    assert [(turn.start, turn.stop, len(turn.calls)) for turn in t.turns] == [(3, 5, 1), (6, 7, 0)]
    for grow in (
        lambda: t.append_observed([1]),
        lambda: t.append_sampled(Sampled((1,), (0.0,), Finish.STOP), ""),
        lambda: t.close(Finish.STOP),
    ):
        with pytest.raises(ValueError, match="has ended"):
            grow()


def test_what_a_trajectory_hands_out_is_a_copy():
    t = Trajectory(PROBLEM, 0, [1, 2])
    t.ids[0] = 99
    t.trainable[:] = True
    assert t.ids.tolist() == [1, 2] and not t.trainable.any()


@pytest.mark.parametrize(
    "broken",
    [
        lambda: Trajectory(PROBLEM, 0, []),
        lambda: Trajectory(PROBLEM, 0, [1]).append_sampled(Sampled((1, 2), (0.0,), Finish.STOP), ""),
        lambda: Trajectory(PROBLEM, 0, [1]).append_observed([2], [ToolRecord("python", {}, ToolStatus.OK)]),
        lambda: Group(PROBLEM, (Trajectory(PROBLEM, 0, [1]),), ()),
    ],
)
def test_inconsistent_appends_are_refused(broken):
    with pytest.raises(ValueError):
        broken()


def test_unknown_verdicts_are_nan_in_a_groups_rewards():
    group = Group(PROBLEM, tuple(Trajectory(PROBLEM, i, [1]) for i in range(3)), (Verdict(1.0), Verdict(None), Verdict(0.0)))
    np.testing.assert_array_equal(group.rewards(), [1.0, np.nan, 0.0])
    assert [t.sample for t in group.take([2, 0]).trajectories] == [2, 0]


def test_sums_divide_once():
    a, b = Sums({"x": jnp.float32(2.0)}, {"x": jnp.int32(1)}), Sums({"x": jnp.float32(4.0)}, {"x": jnp.int32(3)})
    assert (a + b).means() == {"x": 1.5}
    assert Sums({"x": jnp.float32(0.0)}, {"x": jnp.int32(0)}).means() == {"x": 0.0}
    with pytest.raises(ValueError, match="do not add"):
        a + dataclasses.replace(b, values={"y": b.values["x"]})
