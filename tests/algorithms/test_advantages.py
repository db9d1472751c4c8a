"""Group advantages against numbers worked out by hand."""

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rstar_jax.algorithms.advantages import group_advantages
from rstar_jax.types import UserError

NAN = float("nan")
REWARDS = st.lists(st.one_of(st.sampled_from([0.0, 1.0, -1.0, NAN]), st.floats(-1, 1, width=32)), max_size=20)


def test_one_right_of_four_with_the_sample_standard_deviation():
    # mean 1/4; squares 3 * 1/16 + 9/16 = 3/4, over 3 = 1/4, so std 1/2
    np.testing.assert_allclose(group_advantages([0, 0, 0, 1], epsilon=0.0), [-0.5, -0.5, -0.5, 1.5], rtol=1e-15)
    np.testing.assert_allclose(group_advantages([0, 0, 0, 1]), np.array([-0.25, -0.25, -0.25, 0.75]) / 0.500001, rtol=1e-15)


def test_the_population_standard_deviation_is_an_option():
    # 3/4 over 4 = 3/16, so std sqrt(3)/4: advantages -1/sqrt(3) and sqrt(3)
    expected = [-1 / math.sqrt(3)] * 3 + [math.sqrt(3)]
    np.testing.assert_allclose(group_advantages([0, 0, 0, 1], ddof=0, epsilon=0.0), expected, rtol=1e-15)


def test_without_normalisation_the_advantage_is_the_distance_from_the_mean():
    np.testing.assert_array_equal(group_advantages([0, 0, 0, 1], normalize_std=False), [-0.25, -0.25, -0.25, 0.75])


def test_the_standard_deviation_is_that_of_the_group_alone():
    # XU-YIJIE/grpo-flat#2 (std over the batch), axon-rl/gem#113 (normalised twice): a group knows no other group
    np.testing.assert_allclose(group_advantages([0, 0, 0, 1], epsilon=0), [-0.5, -0.5, -0.5, 1.5], rtol=1e-15)
    np.testing.assert_allclose(group_advantages([1, 1, 1, 0], epsilon=0), [0.5, 0.5, 0.5, -1.5], rtol=1e-15)
    np.testing.assert_allclose(group_advantages([1, 0]), [0.5 / (math.sqrt(0.5) + 1e-6), -0.5 / (math.sqrt(0.5) + 1e-6)])


@pytest.mark.parametrize("rewards", [[1, 1, 1, 1], [0, 0], [0.1, 0.1, 0.1], [1e-9, 1e-9], [0.7] * 7, [-1.0] * 8, [5.0], []])
@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("ddof", [0, 1])
def test_a_uniform_group_and_a_group_of_one_have_advantages_of_exactly_zero(rewards, normalize_std, ddof):
    advantages = group_advantages(rewards, normalize_std=normalize_std, ddof=ddof)
    assert advantages.dtype == np.float64 and advantages.shape == (len(rewards),)
    assert (advantages == 0.0).all()


def test_an_unknown_reward_gets_zero_and_leaves_the_others_alone():
    # verl-project/verl#6362: what is rejected must not move the mean of the rest
    with_unknown = group_advantages([0, NAN, 0, 1, NAN, 0])
    np.testing.assert_array_equal(with_unknown[[0, 2, 3, 5]], group_advantages([0, 0, 1, 0]))
    np.testing.assert_array_equal(with_unknown[[1, 4]], [0.0, 0.0])


@pytest.mark.parametrize("rewards", [[NAN], [NAN, NAN], [NAN, 1.0], [1.0, NAN, 1.0]])
def test_unknown_rewards_never_spread(rewards):
    assert (group_advantages(rewards) == 0.0).all()


def test_bad_input_is_refused_in_one_line():
    with pytest.raises(UserError, match="infinite"):
        group_advantages([1.0, math.inf])
    with pytest.raises(UserError, match="ddof=2"):
        group_advantages([1.0, 0.0], ddof=2)
    with pytest.raises(ValueError, match="one axis"):
        group_advantages(np.zeros((2, 2)))


@hypothesis.given(REWARDS, st.randoms(use_true_random=False), st.booleans(), st.sampled_from([0, 1]))
def test_advantages_move_with_their_samples(rewards, random, normalize_std, ddof):
    # verl-project/verl#1129, THUDM/slime#36: grouping must survive a re-ordering
    order = list(range(len(rewards)))
    random.shuffle(order)
    options = {"normalize_std": normalize_std, "ddof": ddof}
    expected = group_advantages(rewards, **options)[order]
    np.testing.assert_allclose(group_advantages([rewards[i] for i in order], **options), expected, rtol=1e-6, atol=1e-9)


@hypothesis.given(REWARDS)
def test_advantages_are_finite_and_sum_to_zero(rewards):
    advantages = group_advantages(rewards)
    assert np.isfinite(advantages).all()
    assert abs(advantages.sum()) < 1e-6
