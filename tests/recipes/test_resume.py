"""A run that was killed, whenever it was killed, ends with the metrics and the weights of one that was not."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import tiny

from rstar_jax.recipes.inference import load_trained
from rstar_jax.storage.metrics import deterministic_part, read_metrics

ROOT = pathlib.Path(__file__).resolve().parents[2]


def start(workdir, more=()):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "launch.train", "--experiment=quickstart", f"--workdir={workdir}", *tiny.flags(more)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def lines(workdir):
    file = workdir / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def descendants(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(child) for child in found]


def weights(workdir):
    import jax

    return [np.asarray(leaf) for leaf in jax.tree.leaves(load_trained(workdir).params)]


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("unkilled") / "run"
    finish(start(workdir))
    return workdir


def test_a_run_killed_in_every_stage_is_the_same_run(unkilled, tmp_path):
    workdir = tmp_path / "run"
    # rows: 4 SFT steps, an evaluation, a stage end; 3 RL steps, ...; so these fall into SFT, RL and the last stage
    for row in (3, 8, 12):
        process = start(workdir)
        while lines(workdir) < row and process.poll() is None:
            time.sleep(0.002)
        children = descendants(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.returncode == -signal.SIGKILL and children
        assert lines(workdir) >= row
        deadline = time.monotonic() + 20
        while any(pathlib.Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(pathlib.Path(f"/proc/{child}").exists() for child in children)
    output = finish(start(workdir))
    assert "resuming" in output
    actual, expected = deterministic_part(read_metrics(workdir)), deterministic_part(read_metrics(unkilled))
    assert len(expected) == 4 + 3 + 2 + 2 * 3 + 1  # training, stage ends, and one evaluation within a stage
    assert actual == expected
    for a, e in zip(weights(workdir), weights(unkilled), strict=True):
        np.testing.assert_array_equal(a, e)


def test_a_finished_run_is_not_trained_again_but_may_be_prolonged(unkilled, tmp_path):
    before = read_metrics(unkilled)
    finish(start(unkilled))
    assert deterministic_part(read_metrics(unkilled)) == deterministic_part(before)
    finish(start(unkilled, ["stages.rl2.steps=3"]))
    after = read_metrics(unkilled)
    assert deterministic_part(after[: len(before)]) == deterministic_part(before)
    assert [(row.kind, row.step) for row in after[len(before) :]] == [("train", 3), ("evaluation", 3), ("stage_end", 3)]
    assert after[-1].metrics["updates"] >= before[-1].metrics["updates"]
