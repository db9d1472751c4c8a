"""A run: its stages one after another, from wherever its last complete checkpoint stands."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Awaitable, Callable, Mapping

from rstar_jax.config import RunConfig, StageConfig
from rstar_jax.recipes import pretrained
from rstar_jax.recipes.evaluate import evaluate_run
from rstar_jax.recipes.progress import Progress
from rstar_jax.recipes.rl import rl_stage
from rstar_jax.recipes.run import Run, open_run
from rstar_jax.recipes.sft import sft_stage
from rstar_jax.storage.hf import load_params
from rstar_jax.storage.metrics import MetricsRow, read_metrics, write_atomically
from rstar_jax.training.losses import loss_function
from rstar_jax.training.optimizer import make_optimizer
from rstar_jax.training.state import TrainState, first_state, init_state, with_optimizer, with_reference
from rstar_jax.training.update import Update

StageLoop = Callable[[Run, StageConfig, Update, TrainState], Awaitable[TrainState]]

LOOPS: dict[str, StageLoop] = {"sft": sft_stage, "rl": rl_stage, "srl": rl_stage}
"""The loop of each kind of stage; a new kind is one more entry."""


async def run_stages(config: RunConfig, workdir: pathlib.Path, progress: Progress) -> list[MetricsRow]:
    """Train `config` in `workdir` to its end, resuming what is there, and return all metrics.

    The order within a step is: update, metrics row, checkpoint; at a stage's end: evaluation row, checkpoint. So whatever a
    checkpoint stands for is on disk before it, and what lies behind the last checkpoint is done again, to the same bits.
    """
    for stage in config.stages:
        loss_function(stage)  # a name that is not known ends the run here, not after the stages before it
    async with open_run(config, workdir, progress) as run:
        state = await run.on_device(start_state, run)
        if run.position.global_step:
            stage = config.stages[run.position.stage]
            progress.say(f"resuming {workdir} at {stage.name} step {run.position.stage_step} of {stage.steps}")
        for index, stage in enumerate(config.stages):
            if index < run.position.stage:
                continue
            if index > run.position.stage:
                run.position = dataclasses.replace(run.position, stage=index, stage_step=0, consumed=0)
                state = await run.on_device(next_stage_state, run, index, state)
            if run.position.stage_step >= stage.steps:
                continue
            temperature = 1.0 if stage.kind == "sft" else stage.temperature
            optimizer = make_optimizer(stage, config.training)
            update = Update(config.model, loss_function(stage), optimizer, temperature, run.mesh, stage.high_entropy_share)
            state = await LOOPS[stage.kind](run, stage, update, state)
            await evaluate_run(run, state)
            run.log("stage_end", {"updates": float(state.updates)}, {})
            await run.save(state)
        await run.on_device(run.checkpoints.wait)
    return read_metrics(workdir)


def start_state(run: Run) -> TrainState:
    """The state at the run's position: fresh, from a pretrained checkpoint, or restored from the run's own."""
    config, position = run.config, run.position
    optimizer_rule = make_optimizer(config.stages[position.stage], config.training)
    if config.checkpoint and (not position.global_step or config.model.lora_rank):
        loaded = load_params(pretrained.open_checkpoint(config.checkpoint).source, config.model, run.mesh)
        state = first_state(loaded, config.model, optimizer_rule, config.seed, run.mesh)
    else:
        state = init_state(config.model, optimizer_rule, config.seed, run.mesh)
    diverges = config.stages[position.stage].kl_coefficient > 0
    state = with_reference(state, diverges)
    if not position.global_step:
        return state
    params = run.checkpoints.restore(position, "params", state.params)
    optimizer, updates = run.checkpoints.restore(position, "optimizer", (state.optimizer, state.updates))
    reference = run.checkpoints.restore(position, "reference", state.reference) if diverges else None
    return TrainState(params, optimizer, updates, state.frozen, reference)


def next_stage_state(run: Run, index: int, state: TrainState) -> TrainState:
    """The state in which stage `index` begins: the same parameters, which are its reference policy if it has one, and a fresh optimiser
    unless the stage keeps the old one."""
    stage = run.config.stages[index]
    if stage.reset_optimizer:
        state = with_optimizer(state.params, make_optimizer(stage, run.config.training), state.updates, run.mesh, state.frozen)
    return with_reference(state, stage.kl_coefficient > 0)


def final_metrics(rows: list[MetricsRow]) -> dict[str, Mapping[str, float]]:
    """Each stage's last evaluation, by stage name in order."""
    return {row.stage: row.metrics for row in rows if row.kind == "evaluation"}


def write_summary(workdir: pathlib.Path, title: str, shows: str, does_not_show: str) -> None:
    """What the report says of the run in words."""
    content = {"title": title, "shows": shows, "does_not_show": does_not_show}
    write_atomically(workdir / "summary.json", [json.dumps(content, indent=1).encode()])
