"""Does the quickstart learn? Independent seeds, SFT included, on the same held-out questions.

    python -m experiments.benchmarks.quickstart_seeds [--seeds=3] [--workdir=DIR]

Each seed is a whole `launch.train --experiment=quickstart` in a process of its own, one after another. What counts as learned:
at temperature 1, RL closes at least 65 % of the gap between the accuracy after SFT (0.30-0.55) and 1 and ends at 0.80 or more;
greedy at least 0.90; the share of correct trajectories that hold a tool error at most a third of its value after SFT.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from absl import flags

from launch import cli
from rstar_jax.storage.metrics import read_metrics
from rstar_jax.types import UserError

SEEDS = flags.DEFINE_integer("seeds", 3, "Number of independent runs.", lower_bound=1)
WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the runs, resumed where they stand; default: a temporary one.")

COLUMNS = {
    "accuracy_after_sft": (0, "sampled/accuracy"),
    "accuracy_after_rl": (-1, "sampled/accuracy"),
    "greedy_after_rl": (-1, "greedy/accuracy"),
    "tool_error_share_after_sft": (0, "sampled/tool_error_share"),
    "tool_error_share_after_rl": (-1, "sampled/tool_error_share"),
}


def train(seed: int, workdir: pathlib.Path) -> float:
    """One whole run; returns its seconds."""
    start = time.monotonic()
    command = [sys.executable, "-m", "launch.train", "--experiment=quickstart", f"--workdir={workdir}", "--set", f"seed={seed}"]
    code = subprocess.run(command, env=os.environ.copy()).returncode
    if code:
        raise UserError(f"the run of seed {seed} ended with exit code {code}")
    return time.monotonic() - start


def numbers(workdir: pathlib.Path) -> dict[str, float]:
    """A run's row of the table."""
    evaluations = [row.metrics for row in read_metrics(workdir) if row.kind == "evaluation"]
    row = {name: evaluations[index][key] for name, (index, key) in COLUMNS.items()}
    row["gap_closed"] = (row["accuracy_after_rl"] - row["accuracy_after_sft"]) / (1 - row["accuracy_after_sft"])
    row["tool_error_share_ratio"] = row["tool_error_share_after_rl"] / row["tool_error_share_after_sft"]
    return row


def result(rows: Sequence[Mapping[str, float]], seconds: float) -> dict[str, object]:
    """The RESULT object: medians over seeds."""
    values = {name: [row[name] for row in rows] for name in rows[0]}
    summary: dict[str, object] = {name: {"median": statistics.median(values[name]), "seeds": values[name]} for name in COLUMNS}
    for name in ("gap_closed", "tool_error_share_ratio"):
        summary[name] = statistics.median(values[name])
    return {**summary, "seconds": seconds}


def main(argv: Sequence[str]) -> None:
    """Run, print the table and the RESULT line."""
    del argv
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(WORKDIR.value or temporary)
        rows = []
        for seed in range(SEEDS.value):
            seconds = train(seed, root / f"seed{seed}")
            rows.append(numbers(root / f"seed{seed}"))
            print(f"seed {seed}: {seconds:.0f} s, " + ", ".join(f"{k} {v:.3f}" for k, v in rows[-1].items()), flush=True)
    print(f"{'':<28}{'median':>10}" + "".join(f"{'seed ' + str(i):>10}" for i in range(len(rows))))
    for name in rows[0]:
        values = [row[name] for row in rows]
        print(f"{name:<28}{statistics.median(values):>10.3f}" + "".join(f"{v:>10.3f}" for v in values))
    print("RESULT " + json.dumps(result(rows, time.monotonic() - start)))


if __name__ == "__main__":
    cli.run(main)
