"""The update step: what it may not depend on, and what a step does."""

import dataclasses
import math
import pathlib
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from rows import make_rows

from rstar_jax.config import MeshConfig, ModelConfig, StageConfig, TrainingConfig
from rstar_jax.model.sharding import make_mesh
from rstar_jax.training.batching import Row, microbatch_shapes, microbatches
from rstar_jax.training.losses import loss_function
from rstar_jax.training.optimizer import learning_rate, make_optimizer
from rstar_jax.training.state import abstract_state, init_state
from rstar_jax.training.update import Update
from rstar_jax.types import UserError

MODEL = ModelConfig(vocab_size=64, num_layers=2, d_model=16, d_ff=32, num_heads=4, num_kv_heads=2, head_dim=8)
TRAINING = TrainingConfig(clip_norm=1e9)
RL = StageConfig("rl", "rl", 4, learning_rate=1e-2)
SFT = dataclasses.replace(RL, name="sft", kind="sft")


def make_update(stage=RL, sizes=(1, 1, 1), temperature=1.0):
    devices = math.prod(sizes)
    mesh = make_mesh(MeshConfig(*sizes), jax.devices()[:devices])
    optimizer = make_optimizer(stage, TRAINING)
    update = Update(MODEL, loss_function(stage), optimizer, temperature, mesh)
    return update, init_state(MODEL, optimizer, 0, mesh)


def accumulate(update, state, rows, **options):
    settings = {"buckets": (32,), "microbatch_tokens": 10**6, "nominal_rows": len(rows), "shards": update.shards} | options
    batches = [update.place(batch) for batch in microbatches(rows, **settings)]
    return len(batches), jax.device_get(update.accumulate(state, batches))


def assert_same(actual, expected):
    for name in ("loss", "entropy", "ratio"):
        np.testing.assert_allclose(actual.sums.values[name], expected.sums.values[name], rtol=1e-5)
        np.testing.assert_array_equal(actual.sums.counts[name], expected.sums.counts[name])
    for a, e in zip(jax.tree.leaves(actual.gradients), jax.tree.leaves(expected.gradients), strict=True):
        assert np.linalg.norm(a - e) <= 1e-5 * np.linalg.norm(e)


@pytest.fixture(scope="module")
def single():
    update, state = make_update()
    return update, state, accumulate(update, state, make_rows())[1]


@pytest.mark.parametrize(
    "options",
    [{"microbatch_tokens": 64}, {"buckets": (16, 32), "microbatch_tokens": 160}, {"buckets": (64,)}],
    ids=["8-microbatches", "by-length", "more-padding"],
)
def test_microbatches_and_padding_change_nothing(single, options):
    """verl#5625, #906, twinkle#292, mlx-lm#1544: a mean of microbatch means is another objective."""
    update, state, expected = single
    count, actual = accumulate(update, state, make_rows(), **options)
    assert count > 1 or "microbatch_tokens" not in options
    assert_same(actual, expected)


def test_a_mean_over_sequences_does_not_depend_on_microbatches_either():
    update, state = make_update(dataclasses.replace(RL, loss_aggregation="sequence_mean"))
    expected = accumulate(update, state, make_rows())[1]
    assert expected.sums.counts["loss"] == 16
    assert_same(accumulate(update, state, make_rows(), buckets=(16, 32), microbatch_tokens=160)[1], expected)


def test_row_order_changes_nothing(single):
    update, state, expected = single
    rows = make_rows()
    assert_same(accumulate(update, state, [rows[i] for i in np.random.default_rng(1).permutation(16)])[1], expected)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (2, 2, 2)], ids=str)
def test_eight_devices_give_what_one_gives(single, sizes):
    _, _, expected = single
    update, state = make_update(sizes=sizes)
    assert_same(accumulate(update, state, make_rows())[1], expected)


def test_what_stands_at_masked_positions_has_no_influence(single):
    """Flash-RL#19, RAGEN#71: zero times NaN is NaN; a mask must choose, not multiply."""
    update, state, expected = single
    (batch,) = microbatches(make_rows(), buckets=(32,), microbatch_tokens=10**6, nominal_rows=16)
    planted = {
        name: np.where(batch.trainable_bt, getattr(batch, name), value).astype(np.float32)
        for name, value in (("old_logp_bt", np.nan), ("sampler_logp_bt", 1e9), ("advantage_bt", np.nan))
    }
    batch = update.place(dataclasses.replace(batch, **planted))
    actual = jax.device_get(update.accumulate(state, [batch]))
    assert_same(actual, expected)
    assert actual.maxima["logp_gap_max"] == pytest.approx(float(expected.maxima["logp_gap_max"]))


def test_on_policy_two_completions_of_unlike_length_give_a_loss():
    """MemGen#33: lengths 2 and 5 with advantages of +1 and -1 are not a loss of 0."""
    update, state = make_update()
    ids = np.arange(8, dtype=np.int32)
    rows = [Row(ids[: 3 + n], np.arange(3 + n) >= 3, np.zeros(3 + n, np.float32), a) for n, a in ((2, 1.0), (5, -1.0))]
    (batch,) = microbatches(rows, buckets=(8,), microbatch_tokens=64, nominal_rows=2)
    batch = update.score(state, update.place(batch))
    sums = update.accumulate(state, [batch]).sums.means()
    assert sums["loss"] == pytest.approx(-(2 * 1.0 - 5 * 1.0) / 7, abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_ratio_is_exactly_one_on_the_first_update_with_the_trainers_old_log_probs(temperature):
    update, state = make_update(temperature=temperature)
    batches = microbatches(make_rows(), buckets=(16, 32), microbatch_tokens=128, nominal_rows=16)
    assert len(batches) > 2
    for batch in batches:
        placed = update.score(state, update.place(batch))
        logps = update._score(state.params, placed)
        sums = update.accumulate(state, [placed]).sums
        assert float(sums.values["ratio"]) == float(sums.counts["ratio"])
        assert np.array_equal(np.asarray(logps)[batch.trainable_bt], np.asarray(placed.old_logp_bt)[batch.trainable_bt])


def test_a_step_lowers_the_loss_counts_itself_and_donates_the_state():
    update, state = make_update(SFT)
    batches = microbatches(make_rows(), buckets=(32,), microbatch_tokens=10**6, nominal_rows=16)
    before = state.params["ends"]["embedding"]
    losses = []
    for _ in range(5):
        state, means = update.step(state, batches)
        losses.append(means["loss"])
    assert losses[-1] < losses[0] - 0.1
    assert int(state.updates) == 5
    assert before.is_deleted()
    assert means["skipped"] == 0.0 and means["grad_norm"] > 0


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted():
    update, state = make_update(SFT)
    broken = jax.tree.map(lambda p: p, state.params)
    broken["ends"]["final_norm"]["scale"] = jnp.full_like(broken["ends"]["final_norm"]["scale"], jnp.nan)
    state = dataclasses.replace(state, params=broken)
    kept = jax.device_get(state.params)
    batches = microbatches(make_rows(), buckets=(32,), microbatch_tokens=10**6, nominal_rows=16)
    state, means = update.step(state, batches)
    assert means["skipped"] == 1.0
    chex.assert_trees_all_equal(jax.device_get(state.params), kept)


def test_old_log_probs_stay_frozen_over_several_updates():
    update, state = make_update()
    part = microbatches(make_rows(), buckets=(32,), microbatch_tokens=10**6, nominal_rows=16)
    _, means = update.steps(state, [part, part], True)
    assert means["ratio"] != 1.0  # the second update's ratio is against the weights before the first
    _, fresh = make_update()
    _, first = update.steps(fresh, [part], True)
    assert first["ratio"] == pytest.approx(1.0, abs=1e-6)


def test_one_program_per_bucket():
    update, state = make_update()
    update.warm_up(state, microbatch_shapes((16, 32), 128, 16, 1), False)
    for seed in range(4):
        batches = microbatches(make_rows(seed=seed), buckets=(16, 32), microbatch_tokens=128, nominal_rows=16)
        state, _ = update.step(state, batches)
        if seed == 0:
            warm = update.compiled_programs()
    assert update.compiled_programs() == warm == 4  # one per bucket, the empty sum, and the optimiser's


def test_schedules():
    constant = learning_rate(dataclasses.replace(RL, warmup_steps=4), TRAINING)
    assert [float(constant(i)) for i in (0, 1, 4, 100)] == pytest.approx([0.0, 0.0025, 0.01, 0.01])
    cosine = learning_rate(dataclasses.replace(RL, schedule="cosine", steps=50, updates_per_rollout=2), TRAINING)
    assert [float(cosine(i)) for i in (0, 50, 100)] == pytest.approx([0.01, 0.0055, 0.001])


def test_an_unknown_objective_is_named_with_the_known_ones():
    with pytest.raises(UserError, match="choose one of sft, clip_higher"):
        loss_function(dataclasses.replace(RL, objective="dpo"))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_lie_in_their_parameters_shards(optimizer):
    """The state is what memory is planned by: a moment on every device would be four bytes a parameter on each."""
    stage = dataclasses.replace(RL, optimizer=optimizer)
    update, state = make_update(stage, sizes=(1, 4, 2))
    batches = microbatches(make_rows(), buckets=(32,), microbatch_tokens=10**6, nominal_rows=16, shards=4)
    after, _ = update.step(state, batches)
    shapes = abstract_state(MODEL, make_optimizer(stage, TRAINING), update.mesh)
    for planned, kept in zip(jax.tree.leaves(shapes), jax.tree.leaves(after), strict=True):
        assert (planned.shape, planned.dtype) == (kept.shape, kept.dtype)
        assert planned.sharding.is_equivalent_to(kept.sharding, kept.ndim)
    held = sum(shard.data.nbytes for x in jax.tree.leaves(after) for shard in x.addressable_shards)
    assert held < 2 * sum(x.nbytes for x in jax.tree.leaves(after))  # norms and counters alone are on all eight
