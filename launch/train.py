"""Train an experiment, or resume it: `python -m launch.train --experiment=NAME --workdir=DIR [--set key=value ...]`."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import pathlib
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from absl import flags

import experiments
from launch import cli
from rstar_jax.config import RunConfig, StageConfig
from rstar_jax.overrides import apply_overrides
from rstar_jax.types import UserError

EXPERIMENT = flags.DEFINE_string("experiment", None, "Name of a file in experiments/.")
WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run; a run of the same configuration in it is resumed.")
SET = flags.DEFINE_multi_string("set", [], "key.path=value, or section=preset; may be repeated.")
DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print the resolved run, JSON on standard output and its stages on standard error, and stop."
)


def load_experiment(name: str | None) -> ModuleType:
    """The experiment's module. Raises `UserError` with the known names."""
    known = sorted(info.name for info in pkgutil.iter_modules(experiments.__path__) if not info.ispkg)
    if name not in known:
        what = f"--experiment={name} is not known" if name else "--experiment is missing"
        raise UserError(f"{what}; choose one of {', '.join(known)}")
    return importlib.import_module(f"experiments.{name}")


def describe(config: RunConfig) -> str:
    """The resolved run, as JSON that `RunConfig.from_dict` reads."""
    return json.dumps(config.to_dict(), indent=1)


def describe_stage(stage: StageConfig) -> str:
    """A stage in one line: its name, kind, steps, and what each step works on."""
    if stage.kind == "sft":
        step = f"{stage.rows_per_step} demonstrations per step"
    else:
        step = f"{stage.prompts_per_step * stage.group} rollouts per step ({stage.prompts_per_step} prompts x {stage.group}"
        step += f", {stage.keep} of each kept)" if stage.keep < stage.group else ")"
    return f"stage {stage.name}: {stage.kind}, {stage.steps} steps, {step}"


def main(argv: Sequence[str]) -> None:
    """Validate everything, then train."""
    del argv
    module = load_experiment(EXPERIMENT.value)
    config = apply_overrides(module.config(), SET.value)
    if config.checkpoint or config.model.dtype == "auto":
        from rstar_jax.recipes.pretrained import resolve  # takes seconds: imported only when there is something to find out

        config = resolve(config)
    if DRY_RUN.value:
        for stage in config.stages:
            print(describe_stage(stage), file=sys.stderr)
        print(describe(config))
        return
    if not WORKDIR.value:
        raise UserError("--workdir is missing: give a directory for the run")
    from rstar_jax.recipes import run, stages  # takes seconds: imported only when there is work to do
    from rstar_jax.recipes.progress import Progress
    from rstar_jax.storage.report import write_report

    run.configure_jax()
    workdir = pathlib.Path(WORKDIR.value)
    rows = asyncio.run(stages.run_stages(config, workdir, Progress()))
    stages.write_summary(workdir, module.TITLE, module.SHOWS, module.DOES_NOT_SHOW)
    page = write_report(workdir)
    print(learned(stages.final_metrics(rows)))
    print(f"report: {page}")


def learned(evaluations: Mapping[str, Mapping[str, float]]) -> str:
    """A table of the evaluations after each stage; `-` stands for what was not measured or is a share of nothing."""
    columns = (
        "sampled/accuracy",
        "greedy/accuracy",
        "sampled/tool_error_share",
        "sampled/tool_calls",
        "sampled/response_length",
    )
    names = ("accuracy (sampled)", "accuracy (greedy)", "tool errors in correct", "tool calls", "response tokens")
    lines = [f"{'after':<12}" + "".join(f"{name:>24}" for name in names)]
    for stage, metrics in evaluations.items():
        values = (metrics.get(column, math.nan) for column in columns)
        cells = (f"{'-':>24}" if math.isnan(value) else f"{value:>24.3f}" for value in values)
        lines.append(f"{stage:<12}" + "".join(cells))
    return "\n".join(lines)


if __name__ == "__main__":
    cli.run(main)
