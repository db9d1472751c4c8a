"""In float64: equal to a numpy reference, and the same under every cut of rows, tokens and devices."""

import dataclasses
import pathlib
import sys

import chex
import jax
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import reference
from rows import make_rows as any_rows

from rstar_jax.config import MeshConfig, ModelConfig, StageConfig, TrainingConfig
from rstar_jax.model.sharding import make_mesh
from rstar_jax.training.batching import microbatches
from rstar_jax.training.losses import loss_function
from rstar_jax.training.optimizer import make_optimizer
from rstar_jax.training.state import init_state
from rstar_jax.training.update import Update

MODEL = ModelConfig(
    vocab_size=16, num_layers=2, d_model=8, d_ff=16, num_heads=4, num_kv_heads=2, head_dim=4, dtype="float64", param_dtype="float64",
    logprob_chunk=24, attention_block=5,
)  # fmt: skip
EXPERTS = dataclasses.replace(MODEL, num_experts=4, experts_per_token=2, expert_d_ff=8, expert_block=8)
STAGE = StageConfig("rl", "rl", 4, learning_rate=1e-2)


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


ONE = MeshConfig(data=1)


def make_rows(count=16):
    return any_rows(count, vocabulary=16, longest=16, logps=(-3.2, -2.2))


def accumulated(model, mesh=ONE, rows=None, stage=STAGE, change=None, **options):
    """What an update adds up for `rows` on this mesh, in this cut: (sums, gradients, microbatches)."""
    sizes = dataclasses.astuple(mesh)
    mesh = make_mesh(mesh, jax.devices()[: int(np.prod(sizes))])
    optimizer = make_optimizer(stage, TrainingConfig())
    update = Update(model, loss_function(stage), optimizer, 1.0, mesh)
    state = init_state(model, optimizer, 0, mesh)
    rows = make_rows() if rows is None else rows
    settings = {"buckets": (16,), "microbatch_tokens": 10**6, "nominal_rows": len(rows), "shards": update.shards} | options
    batches = microbatches(rows, routed=model.routed, **settings)
    batches = [update.place(change(batch) if change else batch) for batch in batches]
    result = jax.device_get(update.accumulate(state, batches))
    return result, jax.device_get(state.params), len(batches)


def assert_same(actual, expected, tolerance=1e-10):
    for name, value in expected.sums.values.items():
        np.testing.assert_allclose(actual.sums.values[name], value, rtol=tolerance, atol=tolerance, err_msg=name)
        np.testing.assert_array_equal(actual.sums.counts[name], expected.sums.counts[name], err_msg=name)
    paths = jax.tree_util.tree_leaves_with_path(expected.gradients)
    for (path, e), a in zip(paths, jax.tree.leaves(actual.gradients), strict=True):
        assert np.linalg.norm(a - e) <= tolerance * np.linalg.norm(e), jax.tree_util.keystr(path)


@pytest.fixture(scope="module")
def expected():
    with jax.enable_x64(True):
        return {model: accumulated(model)[0] for model in (MODEL, EXPERTS)}


def test_loss_and_gradients_equal_the_numpy_reference():
    rows = make_rows(3)
    actual, params, _ = accumulated(MODEL, rows=rows)
    leaves, tree = jax.tree.flatten(params)

    def loss(leaves):
        return reference.clipped_loss(jax.tree.unflatten(tree, leaves), MODEL, rows, STAGE.clip_low, STAGE.clip_high)[0]

    count = reference.clipped_loss(params, MODEL, rows, STAGE.clip_low, STAGE.clip_high)[1]
    assert actual.sums.counts["loss"] == count
    np.testing.assert_allclose(actual.sums.values["loss"], loss(leaves).real, rtol=1e-10)
    assert 0 < actual.sums.values["clip_fraction"] < count
    entropy = sum(reference.logprobs(params, MODEL, row.ids)[1][row.trainable[1:]].sum() for row in rows)
    np.testing.assert_allclose(actual.sums.values["entropy"], entropy, rtol=1e-10)
    for a, e in zip(jax.tree.leaves(actual.gradients), reference.complex_step(loss, leaves), strict=True):
        assert np.linalg.norm(a - e) <= 1e-10 * np.linalg.norm(e)


CUTS = {
    "2 microbatches": {"microbatch_tokens": 128},
    "8 microbatches": {"microbatch_tokens": 32},
    "by length": {"buckets": (8, 16), "microbatch_tokens": 64},
    "more padding": {"buckets": (40,)},
    "packed": {"buckets": (40,), "packing": True},
    "packed, 3 microbatches": {"buckets": (24,), "microbatch_tokens": 72, "packing": True},
}


@pytest.mark.parametrize("attention", ["dense", "blockwise"])
@pytest.mark.parametrize("cut", CUTS)
def test_no_cut_of_the_rows_changes_anything(expected, cut, attention):
    actual, _, count = accumulated(dataclasses.replace(MODEL, attention=attention), **CUTS[cut])
    assert count > 1 or "microbatch_tokens" not in CUTS[cut]
    assert_same(actual, expected[MODEL])


def test_the_order_of_rows_changes_nothing(expected):
    rows = make_rows()
    assert_same(accumulated(MODEL, rows=[rows[i] for i in np.random.default_rng(1).permutation(16)])[0], expected[MODEL])


MESHES = [
    MeshConfig(data=8), MeshConfig(data=1, fsdp=8), MeshConfig(data=2, fsdp=2, tensor=2), MeshConfig(data=1, context=8),
    MeshConfig(data=1, fsdp=2, context=2, tensor=2), MeshConfig(data=2, context=4),
]  # fmt: skip


def named(mesh):
    return " ".join(f"{name}{size}" for name, size in dataclasses.asdict(mesh).items() if size > 1)


@pytest.mark.parametrize("attention", ["dense", "blockwise"])
@pytest.mark.parametrize("mesh", MESHES, ids=named)
def test_no_mesh_changes_anything(expected, mesh, attention):
    model = dataclasses.replace(MODEL, attention=attention, remat="full", logprob_chunk=8)
    assert_same(accumulated(model, mesh, buckets=(40,), packing=True)[0], expected[MODEL])  # not packed: tests/training/test_update.py


@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(data=1, expert=4), MeshConfig(data=2, expert=2, tensor=2), MeshConfig(data=1, fsdp=2, expert=2, context=2)],
    ids=named,
)
def test_no_mesh_changes_a_mixture_of_experts(expected, mesh):
    assert_same(accumulated(EXPERTS, mesh)[0], expected[EXPERTS])


def test_what_stands_at_masked_positions_contributes_exactly_nothing(expected):
    """Flash-RL#19, RAGEN#71: zero times NaN is NaN; a mask must choose, not multiply."""

    def plant(batch):
        numbers = ("old_logp_bt", "sampler_logp_bt", "advantage_bt")
        return dataclasses.replace(
            batch, **{n: np.where(batch.trainable_bt, getattr(batch, n), np.nan).astype(np.float32) for n in numbers}
        )

    actual = accumulated(MODEL, change=plant)[0]
    chex.assert_trees_all_equal((actual.gradients, actual.sums), (expected[MODEL].gradients, expected[MODEL].sums))
