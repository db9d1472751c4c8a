"""Log-probs and entropies against float64 numpy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rstar_jax.config import ModelConfig
from rstar_jax.model import qwen
from rstar_jax.model.logprobs import token_logprobs

CONFIG = ModelConfig(vocab_size=61, num_layers=1, d_model=16, d_ff=16, num_heads=2, num_kv_heads=1, head_dim=8)


@pytest.fixture(scope="module")
def case():
    params = qwen.init(CONFIG, jax.random.key(0))
    params["ends"]["embedding"] = params["ends"]["embedding"] * 50
    rng = np.random.default_rng(0)
    return params, rng.normal(size=(3, 7, 16)).astype(np.float32), rng.integers(0, 61, (3, 7))


def oracle(params, hidden, targets, temperature):
    logits = hidden.astype(np.float64) @ np.asarray(params["ends"]["embedding"], np.float64).T / temperature
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    logp = np.take_along_axis(np.log(p), targets[..., None], -1)[..., 0]
    return logp, -(p * np.log(p)).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, 5, 21, 1000])
def test_log_probs_and_entropies_are_of_the_tempered_softmax(case, temperature, chunk):
    """OpenRLHF#1319: an entropy of untempered logits is another number."""
    params, hidden, targets = case
    logp, entropy = token_logprobs(params, CONFIG, hidden, targets, temperature=temperature, chunk=chunk)
    expected_logp, expected_entropy = oracle(params, hidden, targets, temperature)
    np.testing.assert_allclose(logp, expected_logp, atol=2e-5)
    np.testing.assert_allclose(entropy, expected_entropy, atol=2e-5)


def test_chunks_change_neither_values_nor_gradients(case):
    """trl#4013, verl#6446: chunks run over tokens, never over the vocabulary."""
    params, hidden, targets = case

    def loss(hidden, chunk):
        logp, entropy = token_logprobs(params, CONFIG, hidden, targets, chunk=chunk)
        return jnp.sum(logp) + 0.3 * jnp.sum(entropy)

    chex.assert_trees_all_close(jax.grad(loss)(hidden, 4), jax.grad(loss)(hidden, 1000), atol=1e-5)


def test_a_single_row_is_enough(case):
    params, hidden, targets = case
    logp, _ = token_logprobs(params, CONFIG, hidden[:1], targets[:1])
    np.testing.assert_allclose(logp[0], oracle(params, hidden, targets, 1.0)[0][0], atol=2e-5)


def test_a_temperature_is_not_rounded_to_the_activations_precision(case):
    """0.6 is 0.6016 in bfloat16, which the sampler's float32 would disagree with."""
    params, hidden, targets = case
    rounded = hidden.astype(jnp.bfloat16)
    exact = jax.tree.map(lambda p: np.asarray(p.astype(jnp.bfloat16), np.float32), params)
    logp, _ = token_logprobs(params, CONFIG, rounded, targets, temperature=0.6)
    assert logp.dtype == jnp.float32
    np.testing.assert_allclose(logp, oracle(exact, np.asarray(rounded, np.float32), targets, 0.6)[0], atol=1e-4)
