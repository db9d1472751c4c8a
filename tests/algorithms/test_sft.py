"""Supervised loss: the negative log-likelihood of trainable tokens as a numerator and a count."""

import chex
import jax
import numpy as np
import pytest

from rstar_jax.algorithms.sft import sft_loss
from rstar_jax.types import UserError

NAN = float("nan")
LOGP = np.array([[-1.0, NAN, -3.0, NAN], [-5.0, NAN, NAN, NAN]], np.float32)
TRAINABLE = np.array([[True, False, True, False], [True, False, False, False]])


class SftTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_token_mean(self):
        sums = self.variant(sft_loss)(LOGP, TRAINABLE)
        assert (float(sums.values["loss"]), int(sums.counts["loss"])) == (9.0, 3)
        assert sums.means() == {"loss": 3.0}

    @chex.variants(with_jit=True, without_jit=True)
    def test_sequence_mean(self):
        sums = self.variant(lambda l, m: sft_loss(l, m, aggregation="sequence_mean"))(LOGP, TRAINABLE)
        assert (float(sums.values["loss"]), int(sums.counts["loss"])) == (2.0 + 5.0, 2)

    @chex.variants(with_jit=True, without_jit=True)
    def test_a_packed_row_counts_its_sequences(self):
        logp, trainable = np.array([[-1.0, -3.0, -5.0, NAN]], np.float32), np.array([[True, True, True, False]])
        sequences = np.array([[1, 1, 2, 0]])
        sums = self.variant(lambda l, m, s: sft_loss(l, m, aggregation="sequence_mean", sequences_bt=s))(logp, trainable, sequences)
        assert (float(sums.values["loss"]), int(sums.counts["loss"])) == (7.0, 2)

    @chex.variants(with_jit=True, without_jit=True)
    def test_only_trainable_tokens_have_a_gradient(self):
        gradient = self.variant(jax.grad(lambda l: sft_loss(l, TRAINABLE).values["loss"]))(LOGP)
        np.testing.assert_array_equal(gradient, np.where(TRAINABLE, -1.0, 0.0))

    @chex.variants(with_jit=True, without_jit=True)
    def test_nothing_trainable_is_zero_of_zero(self):
        sums = self.variant(sft_loss)(LOGP, np.zeros_like(TRAINABLE))
        assert (float(sums.values["loss"]), int(sums.counts["loss"])) == (0.0, 0)
        assert sums.means() == {"loss": 0.0}


def test_an_unknown_aggregation_is_refused_in_one_line():
    with pytest.raises(UserError, match="token_mean, sequence_mean"):
        sft_loss(LOGP, TRAINABLE, aggregation="mean")
