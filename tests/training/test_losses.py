"""What a stage's settings make of the loss: terms beside the objective, frozen references, and the choice of tokens."""

import dataclasses
import pathlib
import sys
import types

import jax
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from rows import make_rows

from rstar_jax.config import MeshConfig, ModelConfig, RunConfig, StageConfig, TrainingConfig
from rstar_jax.model import lora
from rstar_jax.model.sharding import make_mesh
from rstar_jax.recipes.stages import next_stage_state, start_state
from rstar_jax.storage.checkpoint import Checkpoints, Position
from rstar_jax.training.batching import microbatches
from rstar_jax.training.losses import loss_function
from rstar_jax.training.optimizer import make_optimizer
from rstar_jax.training.state import init_state, with_reference
from rstar_jax.training.update import Update
from rstar_jax.types import UserError

MODEL = ModelConfig(vocab_size=64, num_layers=2, d_model=16, d_ff=32, num_heads=4, num_kv_heads=2, head_dim=8)
RL = StageConfig("rl", "rl", 4, learning_rate=1e-2, max_response_tokens=29)


def make(stage=RL, model=MODEL, devices=1):
    mesh = make_mesh(MeshConfig(devices, 1, 1), jax.devices()[:devices])
    optimizer = make_optimizer(stage, TrainingConfig(clip_norm=1e9))
    update = Update(model, loss_function(stage), optimizer, 1.0, mesh, stage.high_entropy_share)
    return update, with_reference(init_state(model, optimizer, 0, mesh), stage.kl_coefficient > 0)


def cut(update, count=16, **settings):
    how = {"buckets": (16, 32), "microbatch_tokens": 128, "nominal_rows": count, "shards": update.shards} | settings
    return microbatches(make_rows(count), **how)


def means(update, state, **settings):
    batches = update.select_tokens(state, update.prepare(state, cut(update, **settings), False))
    return update.accumulate(state, batches).sums.means()


def logps_and_entropies(update, state):
    """Of all trainable tokens, float64."""
    placed = [update.place(batch) for batch in cut(update)]
    arrays = [(update._score(state.weights, b), update._entropy(state.weights, b)) for b in placed]
    keep = [np.asarray(b.trainable_bt) for b in placed]
    return tuple(np.concatenate([np.asarray(a[i], np.float64)[k] for a, k in zip(arrays, keep, strict=True)]) for i in (0, 1))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_terms_are_added_over_the_count_of_the_objective(aggregation):
    plain = dataclasses.replace(RL, loss_aggregation=aggregation)
    update, state = make(plain)
    base = means(update, state)
    stage = dataclasses.replace(plain, kl_coefficient=0.3, kl_estimator="k2", entropy_coefficient=0.01)
    update, state = make(stage)
    state = dataclasses.replace(state, reference=jax.tree.map(lambda p: p * 1.5, state.params))
    full = means(update, state)
    assert full["kl"] > 1e-4 and full["entropy_bonus"] < 0
    assert full["loss"] == pytest.approx(base["loss"] + 0.3 * full["kl"] + full["entropy_bonus"], rel=1e-5)
    if aggregation == "token_mean":
        logp, entropy = logps_and_entropies(update, state)
        other, _ = logps_and_entropies(update, dataclasses.replace(state, params=state.reference))
        assert full["kl"] == pytest.approx(np.mean((logp - other) ** 2) / 2, rel=1e-4)
        assert full["entropy_bonus"] == pytest.approx(-0.01 * entropy.mean(), rel=1e-5)


@pytest.mark.parametrize("objective", ["clip_higher", "cispo", "gspo"])
def test_the_divergence_is_nothing_at_first_and_then_grows(objective):
    update, state = make(dataclasses.replace(RL, objective=objective, kl_coefficient=0.1))
    found = []
    for _ in range(3):
        state, measured = update.steps(state, [cut(update)], True)
        found.append(measured["kl"])
    assert found[0] == 0.0 and 0 < found[1] < found[2]


def test_the_divergence_holds_the_policy_back():
    distance = {}
    for coefficient in (0.0, 10.0):
        update, state = make(dataclasses.replace(RL, kl_coefficient=coefficient, kl_estimator="k2", clip_high=10.0, clip_low=1.0))
        start, _ = logps_and_entropies(update, state)
        for _ in range(8):
            state, _ = update.steps(state, [cut(update)], True)
        distance[coefficient] = np.abs(logps_and_entropies(update, state)[0] - start).mean()
    assert distance[10.0] < 0.7 * distance[0.0]


def test_of_an_update_the_tokens_of_highest_entropy_have_an_advantage():
    update, state = make(dataclasses.replace(RL, high_entropy_share=0.2))
    _, entropy = logps_and_entropies(update, state)
    placed = update.prepare(state, cut(update), False)
    chosen = update.select_tokens(state, placed)
    before, after = (
        np.concatenate([np.asarray(b.advantage_bt)[np.asarray(b.trainable_bt)] for b in batches]) for batches in (placed, chosen)
    )
    kept = entropy >= np.sort(entropy)[-int(np.ceil(0.2 * entropy.size))]
    assert 0.19 < kept.mean() < 0.25 and np.count_nonzero(before) == before.size
    np.testing.assert_array_equal(after, np.where(kept, before, 0))
    assert int(update.accumulate(state, chosen).sums.counts["loss"]) == entropy.size  # of all tokens


def test_nothing_compiles_after_the_first_update_with_everything_on():
    stage = dataclasses.replace(RL, kl_coefficient=0.1, entropy_coefficient=0.01, high_entropy_share=0.5, objective="cispo")
    update, state = make(stage, devices=2)
    shapes = {batch.shape for batch in cut(update)}
    update.warm_up(state, sorted(shapes), True)
    state, _ = update.steps(state, [cut(update)], True)
    programs = update.compiled_programs()
    for _ in range(2):
        state, measured = update.steps(state, [cut(update), cut(update)], True)
    assert update.compiled_programs() == programs
    assert np.isfinite(list(measured.values())).all()


def test_adapters_diverge_from_the_adapters_that_the_stage_began_with():
    update, state = make(dataclasses.replace(RL, kl_coefficient=0.1), dataclasses.replace(MODEL, lora_rank=2))
    assert jax.tree.structure(state.reference) == jax.tree.structure(state.params)
    values = []
    for _ in range(2):
        state, measured = update.steps(state, [cut(update)], True)
        values.append(measured["kl"])
    assert abs(values[0]) < 1e-9 < values[1]  # attached within one program and before the other
    jax.tree.map(np.testing.assert_array_equal, state.reference_weights, lora.attach(state.frozen, state.reference))


def test_a_resumed_stage_diverges_from_the_policy_that_it_began_with(tmp_path):
    stages = (dataclasses.replace(RL, name="first"), dataclasses.replace(RL, name="second", kl_coefficient=0.1))
    config = RunConfig("test", stages, model=MODEL, training=TrainingConfig(clip_norm=1e9))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with Checkpoints(tmp_path / "checkpoints", 2) as checkpoints:
        run = types.SimpleNamespace(config=config, mesh=mesh, checkpoints=checkpoints, position=Position())
        state = start_state(run)
        assert state.reference is None
        update, _ = make(stages[0])
        state, _ = update.steps(state, [cut(update)], True)
        began = jax.device_get(state.params)
        state = next_stage_state(run, 1, state)
        update, _ = make(stages[1])
        state, _ = update.steps(state, [cut(update)], True)
        run.position = Position(1, 1, 2, 4)
        checkpoints.save(run.position, state.params, (state.optimizer, state.updates), state.reference)
        checkpoints.wait()
        restored = start_state(run)
    jax.tree.map(np.testing.assert_array_equal, restored.reference, began)
    jax.tree.map(np.testing.assert_array_equal, restored.params, jax.device_get(state.params))
    expected = update.steps(state, [cut(update)], True)[1]
    assert update.steps(restored, [cut(update)], True)[1] == expected and expected["kl"] > 0


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"objective": "gspo", "importance_cap": 2.0}, "stages.rl.importance_cap=2.0 is not read by objective=gspo"),
        ({"objective": "cispo", "dual_clip": 3.0}, "stages.rl.dual_clip=3.0 is not read by objective=cispo"),
        ({"objective": "gspo", "loss_aggregation": "constant"}, "loss_aggregation=constant is not read by objective=gspo"),
        ({"objective": "ppo"}, "choose one of sft, clip_higher, cispo, gspo"),
    ],
)
def test_a_setting_that_the_objective_does_not_read_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        loss_function(dataclasses.replace(RL, **settings))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"high_entropy_share": 0.0}, "must be above 0 and at most 1"),
        ({"kl_estimator": "k4"}, "kl_estimator"),
        ({"importance_mode": "mask"}, "must be at least 1; got 0"),
        ({"kl_coefficient": -0.1}, "kl_coefficient"),
        ({"kind": "sft", "kl_coefficient": 0.1}, "leave them out of a stage of kind sft"),
        ({"kind": "sft", "loss_aggregation": "constant"}, "loss_aggregation"),
    ],
)
def test_an_impossible_setting_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(RL, **settings).validate()
