"""The divergence from a reference: values and gradients in expectation, by enumeration of a small distribution in float64."""

import chex
import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import strategies as st

from rstar_jax.algorithms.kl import KL_ESTIMATORS, kl_sums
from rstar_jax.algorithms.objectives import AGGREGATIONS
from rstar_jax.types import UserError

NAN = float("nan")
MASK = np.array([[True, True, False, True], [True, False, False, False], [False] * 4])
LOGP = np.where(MASK, np.array([[-1.0, -2.0, 0.0, -0.5], [-3.0, 0.0, 0.0, 0.0], [0.0] * 4]), NAN)
REFERENCE = np.where(MASK, np.array([[-1.5, -1.0, 0.0, -0.5], [-1.0, 0.0, 0.0, 0.0], [0.0] * 4]), NAN)
# d = logp - reference of the four tokens, by hand: 0.5, -1, 0 | -2. Values and slopes of each estimator, from verl's kl_penalty
# (k1: d; k2: d^2 / 2; k3: exp(-d) - 1 + d), and their derivatives 1, d, 1 - exp(-d).
D = np.where(MASK, [[0.5, -1.0, 0.0, 0.0], [-2.0, 0.0, 0.0, 0.0], [0.0] * 4], 0.0)
VALUES = {"k1": D, "k2": D**2 / 2, "k3": np.exp(-D) - 1 + D}
SLOPES = {"k1": np.where(MASK, 1.0, 0.0), "k2": D, "k3": 1 - np.exp(-D)}
SCALES = {"token_mean": np.ones((3, 1)), "sequence_mean": np.array([[1 / 3], [1.0], [0.0]]), "constant": np.full((3, 1), 0.2)}
COUNTS = {"token_mean": 4, "sequence_mean": 2, "constant": 2}


def numerator(logp, estimator, aggregation, reference=REFERENCE, mask=MASK, **options):
    sums = kl_sums(logp, reference, mask, estimator=estimator, aggregation=aggregation, horizon=5, **options)
    return sums.values["kl"], sums


class HandComputedTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.product(estimator=KL_ESTIMATORS, aggregation=AGGREGATIONS)
    def test_values_slopes_and_counts_with_nan_at_masked_tokens(self, estimator, aggregation):
        with jax.enable_x64(True):
            run = self.variant(lambda l: jax.value_and_grad(numerator, has_aux=True)(l, estimator, aggregation))
            (value, sums), slope = run(LOGP)
        assert value.dtype == slope.dtype == np.float64
        np.testing.assert_allclose(value, (VALUES[estimator] * SCALES[aggregation]).sum(), rtol=1e-14)
        np.testing.assert_allclose(slope, SLOPES[estimator] * SCALES[aggregation], rtol=1e-14, atol=1e-16)
        assert int(sums.counts["kl"]) == COUNTS[aggregation]

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(*KL_ESTIMATORS)
    def test_a_log_ratio_beyond_20_nats_is_finite_and_has_no_gradient(self, estimator):
        reference, mask = np.zeros((1, 3), np.float32), np.ones((1, 3), bool)
        run = self.variant(lambda l: jax.value_and_grad(numerator, has_aux=True)(l, estimator, "token_mean", reference, mask))
        (value, _), slope = run(np.array([[-200.0, -float("inf"), -1.0]], np.float32))
        assert np.isfinite(value) and (np.asarray(slope)[0, :2] == 0).all() and np.isfinite(slope).all()

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.product(estimator=KL_ESTIMATORS, aggregation=AGGREGATIONS)
    def test_padding_of_a_packed_row_may_hold_nan_though_it_is_marked_trainable(self, estimator, aggregation):
        sequences = np.array([[1, 1, 2, 0]])
        logp, reference = np.array([[-1.0, -2.0, -3.0, NAN]]), np.array([[-1.5, -1.0, -3.0, NAN]])

        def run(logp, reference, mask, sequences):
            return jax.value_and_grad(numerator, has_aux=True)(logp, estimator, aggregation, reference, mask, sequences_bt=sequences)

        (value, sums), slope = self.variant(run)(logp, reference, np.ones((1, 4), bool), sequences)
        (bare, bare_sums), bare_slope = self.variant(run)(logp[:, :3], reference[:, :3], np.ones((1, 3), bool), sequences[:, :3])
        chex.assert_trees_all_close((value, sums, slope[:, :3]), (bare, bare_sums, bare_slope), rtol=1e-6)
        assert float(slope[0, 3]) == 0.0

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.product(estimator=KL_ESTIMATORS, aggregation=AGGREGATIONS)
    def test_nothing_to_train_on_is_zero_of_zero(self, estimator, aggregation):
        nothing = np.zeros_like(MASK)
        run = self.variant(lambda l: jax.value_and_grad(numerator, has_aux=True)(l, estimator, aggregation, mask=nothing))
        (value, sums), slope = run(LOGP)
        assert float(value) == 0.0 and int(sums.counts["kl"]) == 0 and (np.asarray(slope) == 0).all()


def expectation(theta, reference, estimator):
    """E over a token of pi = softmax(theta) of the estimator's value, and of its gradient with respect to theta: each token once,
    weighed by its probability, which is no part of the gradient."""
    tokens = np.arange(len(theta))[:, None]

    def weighted(theta, weights):
        logp = jax.nn.log_softmax(theta)[tokens]
        return sum(
            weights[i] * kl_sums(logp[i : i + 1], reference[tokens[i : i + 1]], np.ones((1, 1), bool), estimator=estimator).values["kl"]
            for i in range(len(theta))
        )

    return jax.value_and_grad(weighted)(jnp.asarray(theta), np.exp(theta) / np.exp(theta).sum())


logits = hypothesis.extra.numpy.arrays(np.float64, 4, elements=st.floats(-2, 2))


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(theta=logits, other=logits)
def test_expected_values_and_gradients_are_what_the_module_says(theta, other):
    pi = np.exp(theta) / np.exp(theta).sum()
    ref = np.exp(other) / np.exp(other).sum()
    d = np.log(pi) - np.log(ref)
    kl = (pi * d).sum()
    # d/dtheta_j of KL(pi || ref) = pi_j (d_j - KL); of KL(ref || pi) = pi_j - ref_j
    reverse, forward = pi * (d - kl), pi - ref
    expected = {"k1": (kl, np.zeros(4)), "k2": ((pi * d**2).sum() / 2, reverse), "k3": (kl, forward)}
    with jax.enable_x64(True):
        for estimator, (value, slope) in expected.items():
            measured = expectation(theta, np.log(ref), estimator)
            np.testing.assert_allclose(measured[0], value, rtol=1e-10, atol=1e-13)
            np.testing.assert_allclose(measured[1], slope, rtol=1e-10, atol=1e-13)


def test_an_estimator_that_is_not_known_is_refused():
    with pytest.raises(UserError, match="k1, k2, k3"):
        kl_sums(LOGP, REFERENCE, MASK, estimator="abs")
    with pytest.raises(AssertionError):
        kl_sums(LOGP, REFERENCE[:, :2], MASK)
