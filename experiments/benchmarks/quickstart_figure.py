"""Draw the README's picture of a quickstart run.

python -m experiments.benchmarks.quickstart_figure --workdir=runs/quickstart --output=docs/images/quickstart.svg
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

from absl import flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from launch import cli
from rstar_jax.storage.metrics import MetricsRow, read_metrics
from rstar_jax.types import UserError

WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "Directory of a finished run.")
OUTPUT = flags.DEFINE_string("output", "docs/images/quickstart.svg", "File to write.")

PANELS = (("accuracy", "accuracy at temperature 1"), ("tool_error_share", "correct rollouts that hold a tool error"))


def draw(axes: Axes, rows: Sequence[MetricsRow], name: str, title: str) -> None:
    """Training rollouts as a line, evaluations on held-out questions with their intervals as points."""
    training = [row for row in rows if row.kind == "train" and name in row.metrics]
    evaluations = [row for row in rows if row.kind == "evaluation"]
    start = evaluations[0].global_step
    axes.plot(
        [r.global_step - start for r in training], [r.metrics[name] for r in training], color="#9db8d2", label="training rollouts"
    )
    values = [row.metrics[f"sampled/{name}"] for row in evaluations]
    where = [row.global_step - start for row in evaluations]
    bars = None
    if f"sampled/{name}_low" in evaluations[0].metrics:
        low = [v - row.metrics[f"sampled/{name}_low"] for v, row in zip(values, evaluations, strict=True)]
        high = [row.metrics[f"sampled/{name}_high"] - v for v, row in zip(values, evaluations, strict=True)]
        bars = (low, high)
    axes.errorbar(where, values, yerr=bars, fmt="o", color="#1f4e79", capsize=3, label="held-out questions")
    for x, value, row in zip(where, values, evaluations, strict=True):
        label = f"after {row.stage}: {value:.3f}"
        above = value < 0.1 * max(values)
        axes.annotate(label, (x, value), textcoords="offset points", xytext=(5, 8 if above else -14), fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("RL step")
    axes.set_xlim(-1, 1.35 * where[-1])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)


def main(argv: Sequence[str]) -> None:
    """Read the run and write the picture."""
    del argv
    workdir = pathlib.Path(WORKDIR.value)
    rows = read_metrics(workdir)
    if not any(row.kind == "evaluation" for row in rows):
        raise UserError(f"{workdir} holds no evaluation; give the directory of a finished run")
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        draw(axes, rows, name, title)
    seed = json.loads((workdir / "config.json").read_text())["seed"]
    figure.suptitle(f"quickstart, seed {seed}: SFT, then GRPO-RoC", fontsize=11)
    output = pathlib.Path(OUTPUT.value)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, metadata={"Date": None})
    print(f"figure: {output}")


if __name__ == "__main__":
    cli.run(main)
