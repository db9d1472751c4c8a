"""Adapters: what is trained, what stays, and that merging changes nothing but where the product is taken."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rstar_jax.config import MeshConfig, ModelConfig, StageConfig, TrainingConfig
from rstar_jax.model import lora, qwen
from rstar_jax.model.sharding import make_mesh
from rstar_jax.overrides import apply_overrides
from rstar_jax.rollout.weights import rollout_params
from rstar_jax.training.batching import Row, microbatches
from rstar_jax.training.losses import loss_function
from rstar_jax.training.optimizer import make_optimizer
from rstar_jax.training.state import init_state
from rstar_jax.training.update import Update
from rstar_jax.types import UserError

MODEL = ModelConfig(
    vocab_size=64,
    num_layers=2,
    d_model=32,
    d_ff=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    lora_rank=4,
    lora_targets=("q", "v", "down"),
)
STAGE = StageConfig("sft", "sft", 4, learning_rate=1e-2)


def make(mesh, model=MODEL):
    optimizer = make_optimizer(STAGE, TrainingConfig())
    return Update(model, loss_function(STAGE), optimizer, 1.0, mesh), init_state(model, optimizer, 0, mesh)


def batches():
    rng = np.random.default_rng(0)
    rows = [Row(rng.integers(0, 64, n), np.arange(n) > 2, np.full(n, np.nan, np.float32)) for n in (9, 12, 16, 7, 16, 11, 8, 14)]
    return microbatches(rows, buckets=(16,), microbatch_tokens=128, nominal_rows=8, shards=8)


@pytest.fixture(scope="module", params=[(1, 1, 1), (2, 2, 2)])
def trained(request):
    mesh = make_mesh(MeshConfig(*request.param), jax.devices()[: int(np.prod(request.param))])
    update, state = make(mesh)
    before = jax.device_get((state.frozen, state.params))
    losses = []
    for _ in range(8):
        state, means = update.step(state, batches())
        losses.append(means["loss"])
    return before, state, losses


def test_adapters_alone_are_trained_and_kept(trained):
    (frozen, adapters), state, losses = trained
    assert losses[-1] < losses[0] - 0.1
    chex.assert_trees_all_equal(jax.device_get(state.frozen), frozen)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), jax.device_get(state.params), adapters)
    assert min(jax.tree.leaves(moved)) > 0
    assert set(state.params["layers"]) == {"q", "v", "down"} and set(state.params) == {"layers"}
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert count == 2 * 4 * ((32 + 32) + (32 + 16) + (48 + 32))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim) == 2 * count


def test_merged_weights_compute_what_attached_adapters_do(trained):
    _, state, _ = trained
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 64, (2, 12)))
    inputs = tokens, jnp.broadcast_to(jnp.arange(12), (2, 12)), jnp.ones((2, 12), jnp.int32)
    weights = jax.device_get(state.weights)
    attached = qwen.forward(weights, MODEL, *inputs).hidden_btd
    merged = lora.merge(weights, MODEL)
    assert jax.tree.structure(merged) == jax.tree.structure(qwen.abstract_params(MODEL))
    np.testing.assert_allclose(qwen.forward(merged, MODEL, *inputs).hidden_btd, attached, atol=2e-5)
    sampled_from = rollout_params(weights, MODEL)
    np.testing.assert_allclose(qwen.forward(sampled_from, MODEL, *inputs).hidden_btd, attached, atol=2e-5)
    frozen = qwen.forward(jax.device_get(state.frozen), MODEL, *inputs).hidden_btd
    assert float(jnp.abs(attached - frozen).max()) > 1e-2


def test_training_begins_at_the_frozen_weights_and_equals_a_product_written_out():
    _, state = make(make_mesh(MeshConfig(data=1), jax.devices()[:1]))
    merged = lora.merge(state.weights, MODEL)
    chex.assert_trees_all_equal(merged, dict(state.frozen))
    adapters = jax.tree.map(lambda a: a + 0.1, state.params)
    q = adapters["layers"]["q"]
    expected = np.asarray(state.frozen["layers"]["q"]["kernel"], np.float64) + 16 / 4 * (
        np.asarray(q["adapter_a"], np.float64) @ np.asarray(q["adapter_b"], np.float64)
    )
    ours = lora.merge(lora.attach(state.frozen, adapters), MODEL)["layers"]["q"]["kernel"]
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.lora_targets=q,head", "model.lora_targets='head' is not known"),
        ("model.lora_targets=", "must name at least one matrix"),
        ("model.lora_targets=q,q", "each once"),
        ("model.lora_rank=-1", "model.lora_rank=-1 must be at least 0"),
    ],
)
def test_settings_that_cannot_be_are_one_line(override, message):
    from experiments import quickstart

    with pytest.raises(UserError, match=message):
        apply_overrides(quickstart.config(), ["model.lora_rank=2", override])
    experts = dataclasses.replace(MODEL, num_experts=4, experts_per_token=2, expert_d_ff=8)
    with pytest.raises(UserError, match=r"model.lora_targets='down' is not known"):
        experts.validate()
