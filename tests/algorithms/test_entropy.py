"""The entropy bonus, and the choice of tokens by entropy: numbers worked out by hand, ties, and masked tokens."""

import math

import chex
import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import strategies as st

from rstar_jax.algorithms.entropy import entropy_bonus, high_entropy_threshold, keep_high_entropy
from rstar_jax.algorithms.objectives import policy_loss
from rstar_jax.types import UserError

NAN = float("nan")
MASK = np.array([[True, True, False, True], [True, False, False, False]])
ENTROPY = np.array([[1.0, 2.0, NAN, 3.0], [4.0, NAN, NAN, NAN]])


class BonusTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(
        ("token_mean", -5.0, 4, [[-0.5, -0.5, 0, -0.5], [-0.5, 0, 0, 0]]),  # 0.5 * (1 + 2 + 3 + 4)
        ("sequence_mean", -3.0, 2, [[-0.5 / 3, -0.5 / 3, 0, -0.5 / 3], [-0.5, 0, 0, 0]]),  # 0.5 * (2 + 4)
        ("constant", -0.5, 2, [[-0.05, -0.05, 0, -0.05], [-0.05, 0, 0, 0]]),  # 0.5 * 10 / 10
    )
    def test_value_count_and_slope(self, aggregation, value, count, slope):
        def run(entropy):
            sums = entropy_bonus(entropy, MASK, coefficient=0.5, aggregation=aggregation, horizon=10)
            return sums.values["entropy_bonus"], sums

        with jax.enable_x64(True):
            (numerator, sums), gradient = self.variant(jax.value_and_grad(run, has_aux=True))(ENTROPY)
        np.testing.assert_allclose(numerator, value, rtol=1e-14)
        np.testing.assert_allclose(gradient, slope, rtol=1e-14)
        assert int(sums.counts["entropy_bonus"]) == count and numerator.dtype == gradient.dtype == np.float64

    @chex.variants(with_jit=True, without_jit=True)
    def test_a_step_against_its_gradient_raises_the_entropy(self):
        def entropy(theta):
            return -jnp.sum(jax.nn.softmax(theta) * jax.nn.log_softmax(theta), axis=-1)

        def bonus(theta):
            return entropy_bonus(entropy(theta), np.ones((1, 1), bool), coefficient=1.0).values["entropy_bonus"]

        theta = np.array([[[1.0, 0.0, -1.0]]], np.float32)
        assert float(entropy(theta - 0.1 * self.variant(jax.grad(bonus))(theta))[0, 0]) > float(entropy(theta)[0, 0])


@pytest.mark.parametrize(
    ("share", "threshold"),
    [(0.2, 9.0), (0.1, 10.0), (0.05, 10.0), (0.25, 8.0), (0.3, 8.0), (1.0, 1.0)],
)
def test_the_threshold_is_the_entropy_of_the_last_token_of_the_share(share, threshold):
    """Ten trainable tokens of entropy 1 to 10 in any order and shape: the ceil(10 share) highest are at or above it."""
    entropies = np.array([[3.0, 10.0, NAN, 1.0, 7.0, 99.0], [5.0, 2.0, 9.0, 8.0, 6.0, 4.0]])
    trainable = np.isfinite(entropies) & (entropies < 99)
    assert high_entropy_threshold(entropies, trainable, share) == threshold


def test_a_share_that_is_a_whole_number_of_tokens_is_not_rounded_up():
    assert high_entropy_threshold(np.arange(100.0), np.ones(100, bool), 0.07) == 93.0  # 0.07 * 100 = 7.000000000000001


def test_ties_with_the_threshold_are_kept():
    entropies, everywhere = np.array([[0.0, 0.0, 1.0, 1.0, 1.0]]), np.ones((1, 5), bool)
    threshold = high_entropy_threshold(entropies, everywhere, 0.2)
    np.testing.assert_array_equal(keep_high_entropy(np.full((1, 5), 2.0), entropies, threshold), [[0, 0, 2, 2, 2]])
    np.testing.assert_array_equal(keep_high_entropy(np.ones(1), np.zeros((1, 5)), 0.0), np.ones((1, 5)))


def test_without_a_trainable_token_none_is_kept_and_bad_arguments_are_refused():
    assert high_entropy_threshold(np.full(3, NAN), np.zeros(3, bool), 0.2) == math.inf
    for share in (0.0, -0.1, 1.1, NAN):
        with pytest.raises(UserError, match="high_entropy_share"):
            high_entropy_threshold(np.ones(3), np.ones(3, bool), share)
    with pytest.raises(ValueError, match="mask of bools"):
        high_entropy_threshold(np.ones(3), np.ones(2, bool), 0.2)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
    # XLA takes subnormal numbers for 0
    values=hypothesis.extra.numpy.arrays(np.float32, st.integers(1, 40), elements=st.floats(0, 4, width=32, allow_subnormal=False)),
    share=st.floats(0.01, 1.0),
)
def test_at_least_the_share_is_kept_and_without_the_ties_less_than_it(values, share):
    threshold = high_entropy_threshold(values, np.ones(values.shape, bool), share)
    kept = np.asarray(keep_high_entropy(np.ones((1, values.size)), values[None], threshold))[0] == 1
    np.testing.assert_array_equal(kept, values >= np.float32(threshold))
    assert kept.sum() >= share * values.size - 1e-6
    assert (values > threshold).sum() < share * values.size + 1e-6


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_tokens_of_low_entropy_leave_the_numerator_and_stay_in_the_count(aggregation):
    """Entropies 1, 2, 3 and 4, half kept: tokens (0, 3) and (1, 0). loss = -A at the sampling policy."""
    threshold = high_entropy_threshold(ENTROPY, MASK, 0.5)
    logp = np.where(MASK, -1.0, NAN)

    def run(logp, entropy):
        advantage = keep_high_entropy(np.array([[1.0, 2.0, NAN, 4.0], [8.0, NAN, NAN, NAN]]), entropy, threshold)
        options = {"clip_low": 0.2, "clip_high": 0.28, "aggregation": aggregation, "horizon": 4}
        sums = policy_loss(logp, np.where(MASK, -1.0, NAN), advantage, MASK, **options)
        return sums.values["loss"], sums

    (loss, sums), slopes = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)(jnp.asarray(logp), jnp.asarray(ENTROPY))
    value, count = {"token_mean": (-12.0, 4), "sequence_mean": (-4 / 3 - 8, 2), "constant": (-3.0, 2)}[aggregation]
    np.testing.assert_allclose(loss, value, rtol=1e-6)
    assert int(sums.counts["loss"]) == count
    np.testing.assert_array_equal(np.asarray(slopes[0]) != 0, [[False, False, False, True], [True, False, False, False]])
    assert (np.asarray(slopes[1]) == 0).all()
