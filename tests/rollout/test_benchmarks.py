"""The benchmarks of rollouts run, small, and their checks can fail."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(module, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", f"experiments.benchmarks.{module}", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    last = done.stdout.splitlines()[-1]
    assert last.startswith("RESULT ")
    return json.loads(last.removeprefix("RESULT "))


def test_nothing_is_lost_over_many_trajectories():
    result = run("rollout_soak", "--trajectories=1500", "--step=250")
    assert result["trajectories"] == result["wanted"] == 1500
    assert result["lost"] == result["recomputed_tokens"] == 0
    assert min(result[name] for name in ("done", "failed", "cancelled", "evictions", "restores", "moves", "forks")) > 0
    assert result["memory_growth_mb"] < 50


def test_balanced_rollouts_end_sooner_than_those_assigned_ahead():
    result = run("rollout_simulation", "--engines=16", "--prompts=128")
    assert result["balanced_vs_static"] >= 1.15 and result["recomputed_tokens"] == 0


@pytest.mark.slow
def test_the_script_for_an_accelerator_runs_here_too():
    result = run("accelerator", "--shape=tiny")
    assert {"decode_4", "decode_8", "extend", "prefill", "update"} <= result.keys()
    assert all(result[name]["tokens_per_s"] > 0 for name in ("decode_4", "decode_8", "extend", "prefill", "update"))
