"""Overrides, presets, validation and identity of a run's configuration."""

import dataclasses
import json

import pytest

from rstar_jax.config import RunConfig, StageConfig, differences
from rstar_jax.overrides import PRESETS, apply_overrides
from rstar_jax.types import UserError

RUN = RunConfig("run", (StageConfig("sft", "sft", 5), StageConfig("rl", "rl", 7, group=8, keep=4)))


def test_fields_of_every_type_are_set_and_presets_come_first():
    config = apply_overrides(
        RUN,
        [
            "model.num_layers=5",
            "model=tiny",
            "training.learning_rate=1e-4",
            "training.buckets=64,256",
            "evaluation.greedy=false",
            "stages.rl.learning_rate=none",
            "stages.rl.selection=random",
            "seed=3",
        ],
    )
    assert config.model == dataclasses.replace(PRESETS["model"]["tiny"], num_layers=5)
    assert config.training.learning_rate == 1e-4 and config.training.buckets == (64, 256)
    assert config.evaluation.greedy is False and config.seed == 3
    assert config.stages[1].learning_rate is None and config.stages[1].selection == "random"
    assert config.stages[0] == RUN.stages[0]


@pytest.mark.parametrize(
    "override",
    [
        "model", "=3", "model=huge", "tool=fast", "nosuch.field=1", "model.layers=3", "model.num_layers=three", "model.num_layers=2.5",
        "training.learning_rate=fast", "evaluation.greedy=perhaps", "stages.sft2.steps=3", "stages.rl=3", "stages=3", "nosuch=1",
        "model.num_heads=4 ", "model.num_kv_heads=2", "model.head_dim=31", "model.dtype=float16", "model.num_layers=0",
        "stages.rl.keep=9", "stages.rl.group=1", "stages.rl.kind=dpo", "stages.rl.temperature=0", "stages.rl.steps=0",
        "training.buckets=64,32", "training.buckets=64", "training.learning_rate=0", "training.learning_rate=nan", "mesh.data=0",
        "rollout.extend_buckets=", "data.no_tool=1.5", "tool.timeout_s=0", "text.chat=mistral", "seed=x",
    ],
)  # fmt: skip
def test_every_mistake_is_one_clear_line(override):
    run = apply_overrides(RUN, []) if "kv" not in override else dataclasses.replace(RUN, model=PRESETS["model"]["tiny"])
    if override == "model.num_heads=4 ":
        run = dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, num_heads=3, num_kv_heads=3))
    if override == "model.num_kv_heads=2":
        run = dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, num_heads=3, num_kv_heads=1))
    with pytest.raises(UserError) as caught:
        apply_overrides(run, [override])
    message = str(caught.value)
    assert "\n" not in message and len(message) > 15
    key = override.split("=")[0].strip()
    assert not key or key.split(".")[-1] in message


def test_configurations_are_hashable_and_survive_json():
    assert hash(RUN) == hash(dataclasses.replace(RUN))
    assert RunConfig.from_dict(json.loads(json.dumps(RUN.to_dict()))) == RUN


def test_identity_leaves_out_what_may_differ_on_resume():
    same = apply_overrides(RUN, ["mesh=fsdp", "training.keep_checkpoints=9", "training.save_every=3", "stages.rl.steps=70"])
    assert same.identity() == RUN.identity()
    longer_first = apply_overrides(RUN, ["stages.sft.steps=6"])
    cosine = apply_overrides(RUN, ["stages.rl.schedule=cosine"])
    longer_cosine = apply_overrides(cosine, ["stages.rl.steps=70"])
    assert differences(RUN.identity(), longer_first.identity()) == ["stages.sft.steps: 5 -> 6"]
    assert differences(cosine.identity(), longer_cosine.identity()) == ["stages.rl.steps: 7 -> 70"]


def test_a_kept_optimizer_must_be_the_same_kind():
    with pytest.raises(UserError, match="reset_optimizer"):
        apply_overrides(RUN, ["stages.sft.optimizer=muon", "stages.rl.reset_optimizer=false"])
