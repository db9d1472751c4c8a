"""SRL's filter: the population standard deviation must exceed the threshold."""

import numpy as np
import pytest

from rstar_jax.algorithms.srl import keep_group

NAN = float("nan")


def test_the_standard_deviation_is_the_populations():
    # [0, 1]: population 0.5, sample 0.7071
    assert keep_group([0.0, 1.0], 0.49)
    assert not keep_group([0.0, 1.0], 0.51)


def test_the_threshold_itself_is_dropped():
    assert not keep_group([0.0, 1.0], 0.5)


def test_one_format_error_among_seven_half_right_steps_is_kept():
    # mean 2.5/8 = 0.3125; squares 7 * 0.1875^2 + 1.3125^2 = 1.96875, over 8 and rooted: 0.49608
    assert keep_group([0.5] * 7 + [-1.0], 0.496)
    assert not keep_group([0.5] * 7 + [-1.0], 0.4962)


@pytest.mark.parametrize("rewards", [[], [0.3], [0.1] * 3, [-1.0] * 8, [NAN, NAN], [0.4, NAN]])
@pytest.mark.parametrize("min_std", [0.0, 0.05])
def test_no_contrast_is_never_kept(rewards, min_std):
    assert keep_group(rewards, min_std) is False


def test_unknown_rewards_leave_the_statistic():
    assert keep_group([0.0, NAN, 1.0, NAN], 0.49)
    assert not keep_group(np.array([0.5, NAN, 0.52]), 0.05)
