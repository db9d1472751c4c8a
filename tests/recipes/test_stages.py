"""Whole tiny runs in this process, on eight devices, with the real tool."""

import asyncio
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import tiny

from experiments import quickstart, quickstart_srl
from rstar_jax.overrides import apply_overrides
from rstar_jax.recipes import stages
from rstar_jax.recipes.progress import Progress
from rstar_jax.rewards.math_answer import MathReward
from rstar_jax.storage.report import write_report
from rstar_jax.storage.trajectories import read_trajectories
from rstar_jax.types import Verdict


class Watching(Progress):
    """Notes how many programs had been compiled at each step."""

    def __init__(self):
        super().__init__()
        self.compiled, self.seen = 0, []

    def start(self, name, total, done=0):
        super().start(name, total, done)
        self.stage = name

    def step(self, shown):
        super().step(shown)
        self.seen.append((self.stage, self.compiled))


def run(config, workdir):
    progress = Watching()

    def count(name, seconds, **_):
        progress.compiled += name == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        rows = asyncio.run(stages.run_stages(config, workdir, progress))
    finally:
        jax.monitoring.clear_event_listeners()
    return rows, progress.seen


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("quick") / "run"
    # no checkpoint within a stage: a first save of arrays that are replicated over devices compiles their slices
    more = ["stages.sft.steps=20", "stages.sft.learning_rate=2e-2", "training.save_every=100"]
    config = apply_overrides(quickstart.config(), [*tiny.OVERRIDES, *more])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MathReward, "__call__", odd_sum)  # a model this small answers nothing: pay something that varies
        return workdir, config, *run(config, workdir)


async def odd_sum(self, problem, trajectory):
    return Verdict(float(trajectory.ids.sum() % 2))


def test_every_stage_trains_evaluates_and_ends(quick):
    _, config, rows, _ = quick
    kinds = [(row.stage, row.kind) for row in rows]
    for stage in config.stages:
        assert kinds.count((stage.name, "train")) == stage.steps
        assert kinds.count((stage.name, "stage_end")) == 1
    assert [(row.stage, row.step) for row in rows if row.kind == "evaluation"] == [("sft", 20), ("rl1", 2), ("rl1", 3), ("rl2", 2)]
    assert [row.global_step for row in rows if row.kind == "train"] == list(range(1, 26))
    losses = [row.metrics["loss"] for row in rows if row.stage == "sft" and row.kind == "train"]
    assert np.mean(losses[-3:]) < losses[0] - 1


def test_sampler_and_trainer_agree_at_every_step_and_say_so(quick):
    _, _, rows, _ = quick
    steps = [row.metrics for row in rows if row.kind == "train" and row.stage != "sft"]
    assert len(steps) == 5
    for metrics in steps:
        assert 0 < metrics["logp_gap_max"] <= 1e-4 and metrics["logp_gap_mean"] <= metrics["logp_gap_max"]
        assert metrics["live_share"] > 0


def test_nothing_compiles_after_a_stages_first_step(quick):
    _, config, _, seen = quick
    for stage in config.stages:
        counts = [count for name, count in seen if name == stage.name]
        assert len(counts) == stage.steps and len(set(counts)) == 1


def test_groups_are_conserved_and_the_report_is_written(quick):
    workdir, config, rows, _ = quick
    for row in rows:
        if row.kind == "train" and row.stage.startswith("rl"):
            assert row.metrics["engine/trajectories"] == 16 and row.metrics["groups"] == 4
            assert row.metrics["live_share"] * 4 + row.metrics["dropped/uniform_reward"] == 4
    records = read_trajectories(workdir / "trajectories" / "rl1" / "step_000001.jsonl")
    assert len(records) == 16
    assert {record["spans"][0]["kind"] for record in records} == {"prompt"}
    stages.write_summary(workdir, quickstart.TITLE, quickstart.SHOWS, quickstart.DOES_NOT_SHOW)
    page = write_report(workdir).read_text()
    assert quickstart.TITLE in page and "<script" in page
    assert json.loads((workdir / "config.json").read_text())["identity"] == config.identity()


def test_srl_goes_from_expert_steps_to_outcomes_and_uniform_groups_end_no_run(tmp_path):
    """DAPO#22, verl#876: when every group is uniform, sampling is bounded, nothing is updated and the step counts."""
    kept = [o for o in tiny.OVERRIDES if not o.startswith("stages.rl")]
    more = [
        "stages.sft.steps=3", "stages.srl.steps=2", "stages.srl.prompts_per_step=4", "stages.srl.group=4", "stages.srl.keep=4",
        "stages.rl.steps=1", "stages.rl.refill=bounded", "stages.rl.prompts_per_step=4", "stages.rl.group=4", "stages.rl.keep=2",
        "data.experts=64",
    ]  # fmt: skip
    rows, _ = run(apply_overrides(quickstart_srl.config(), [*kept, *more]), tmp_path / "run")
    srl = [row.metrics for row in rows if row.stage == "srl" and row.kind == "train"]
    assert len(srl) == 2
    # an untrained model breaks the format: -1 each, no spread, so every group is dropped and refilled a bounded number of times
    assert all(-1 <= m["reward"] <= 1 and 0 <= m["format_error_share"] <= 1 for m in srl)
    assert all(4 <= m["groups"] <= 12 for m in srl)
    assert [row.stage for row in rows if row.kind == "stage_end"] == ["sft", "srl", "rl"]
    (rl,) = [row.metrics for row in rows if row.stage == "rl" and row.kind == "train"]
    assert rl["groups"] == rl["dropped/uniform_reward"] == 12 and rl["live_share"] == 0
    assert "loss" not in rl and rl["updates"] == srl[-1]["updates"]
