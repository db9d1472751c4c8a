"""Masked entries are absent: from values, from counts and from gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from rstar_jax.algorithms import masked

NAN, INF = float("nan"), float("inf")
VALUES = np.array([[1.0, NAN, 3.0], [INF, -2.0, NAN]], np.float32)
MASK = np.array([[True, False, True], [False, True, False]])


class MaskedTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters(
        ("sum", masked.masked_sum, 2.0, [4.0, -2.0]),
        ("mean", masked.masked_mean, 2.0 / 3.0, [2.0, -2.0]),
        ("max", masked.masked_max, 3.0, [3.0, -2.0]),
    )
    def test_reductions_leave_masked_entries_out(self, reduce, over_all, over_rows):
        np.testing.assert_allclose(self.variant(reduce)(VALUES, MASK), over_all, rtol=1e-6)
        np.testing.assert_allclose(self.variant(lambda v, m: reduce(v, m, axis=1))(VALUES, MASK), over_rows, rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_counts_are_whole_numbers(self):
        count = self.variant(masked.masked_count)(MASK)
        assert count.dtype == jnp.int32 and int(count) == 3
        np.testing.assert_array_equal(self.variant(lambda m: masked.masked_count(m, axis=1))(MASK), [2, 1])

    @chex.variants(with_jit=True, without_jit=True)
    def test_nothing_unmasked_gives_the_identities(self):
        nothing = np.zeros_like(MASK)
        assert float(self.variant(masked.masked_sum)(VALUES, nothing)) == 0.0
        assert float(self.variant(masked.masked_mean)(VALUES, nothing)) == 0.0
        assert float(self.variant(masked.masked_max)(VALUES, nothing)) == -INF
        assert int(self.variant(masked.masked_count)(nothing)) == 0

    @chex.variants(with_jit=True, without_jit=True)
    def test_arrays_of_size_zero_have_sum_and_mean_zero(self):
        empty, mask = np.zeros((0, 3), np.float32), np.zeros((0, 3), bool)
        assert float(self.variant(masked.masked_sum)(empty, mask)) == 0.0
        assert float(self.variant(masked.masked_mean)(empty, mask)) == 0.0

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters(
        ("sum", masked.masked_sum, [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]),
        ("mean", masked.masked_mean, [[1 / 3, 0.0, 1 / 3], [0.0, 1 / 3, 0.0]]),
        ("max", masked.masked_max, [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
    )
    def test_gradients_at_masked_entries_are_exactly_zero(self, reduce, expected):
        gradient = np.asarray(self.variant(jax.grad(reduce))(VALUES, MASK))
        assert (gradient[~MASK] == 0.0).all()
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_fill_protects_what_comes_after_it(self):
        gradient = self.variant(jax.grad(lambda v: masked.masked_sum(jnp.exp(masked.fill(v, MASK)), MASK)))(VALUES)
        np.testing.assert_allclose(gradient, [[np.e, 0.0, np.e**3], [0.0, np.e**-2, 0.0]], rtol=1e-5)

    def test_half_precision_is_summed_in_float32(self):
        ones = jnp.ones(1000, jnp.bfloat16)  # a bfloat16 sum of ones stops at 256
        total = masked.masked_sum(ones, jnp.ones(1000, bool))
        assert total.dtype == jnp.float32 and float(total) == 1000.0

    def test_a_mask_of_another_shape_or_type_is_refused(self):
        with self.assertRaises(AssertionError):
            masked.masked_sum(VALUES, MASK[:, :1])
        with self.assertRaises(AssertionError):
            masked.masked_sum(VALUES, MASK.astype(np.float32))
