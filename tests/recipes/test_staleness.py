"""One-step-off rollouts: which weights sampled what, and that a resumed run is still the same run."""

import asyncio
import pathlib
import sys

import jax
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import tiny

from experiments import quickstart
from rstar_jax.overrides import apply_overrides
from rstar_jax.recipes import stages
from rstar_jax.recipes.inference import load_trained
from rstar_jax.recipes.progress import Progress
from rstar_jax.rewards.math_answer import MathReward
from rstar_jax.storage.metrics import deterministic_part, read_metrics
from rstar_jax.types import UserError, Verdict

STALE = [
    *tiny.OVERRIDES, "stages.sft.steps=4", "stages.rl1.steps=1", "stages.rl2.staleness=1", "stages.rl2.importance_cap=2.0",
    "training.old_logprobs=trainer", "evaluation.every=0", "evaluation.greedy=false", "stages.rl2.learning_rate=0.03",
]  # fmt: skip


async def odd_sum(self, problem, trajectory):
    return Verdict(float(trajectory.ids.sum() % 2))


def run(workdir, *more):
    config = apply_overrides(quickstart.config(), [*STALE, *more])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MathReward, "__call__", odd_sum)
        asyncio.run(stages.run_stages(config, workdir, Progress()))
    return read_metrics(workdir)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("stale") / "run"
    return workdir, run(workdir, "stages.rl2.steps=6", "training.save_every=3")


def of(rows, name):
    return [row.metrics.get(name) for row in rows if row.stage == "rl2" and row.kind == "train"]


def test_rollouts_are_one_update_old_but_behind_checkpoints(whole):
    """miles#1829, tinker-cookbook#822: the ratio's denominator is of the sampling weights, and the staleness is reported."""
    _, rows = whole
    assert of(rows, "staleness/mean") == of(rows, "staleness/max") == [0, 1, 1, 0, 1, 1]
    assert of([row for row in rows if row.stage == "rl1"], "staleness/max") == []
    gaps = of(rows, "logp_gap_max")
    assert max(gaps[0], gaps[3]) <= 1e-4 < min(gap for i, gap in enumerate(gaps) if i not in (0, 3))  # fresh weights agree, old do not
    importance = of(rows, "importance")
    assert abs(importance[0] - 1) <= 1e-4 and all(0 < value <= 2 for value in importance)


def test_a_resumed_stale_run_is_the_same_run(whole, tmp_path):
    workdir, rows = whole
    run(tmp_path / "run", "stages.rl2.steps=3", "training.save_every=3")
    resumed = run(tmp_path / "run", "stages.rl2.steps=6", "training.save_every=3")
    trained, expected = ([row for row in found if row.kind == "train"] for found in (resumed, rows))
    assert len(expected) == 4 + 1 + 6 and deterministic_part(trained) == deterministic_part(expected)
    for a, b in zip(jax.tree.leaves(load_trained(tmp_path / "run").params), jax.tree.leaves(load_trained(workdir).params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_weights_need_the_trainers_old_log_probs():
    with pytest.raises(UserError, match=r"needs training\.old_logprobs=trainer"):
        apply_overrides(quickstart.config(), ["stages.rl1.importance_cap=2"])
    with pytest.raises(UserError, match=r"staleness=2 must be 0 \(on-policy\) or 1"):
        apply_overrides(quickstart.config(), ["stages.rl1.staleness=2"])
