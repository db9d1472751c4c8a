"""Supervised fine-tuning on the assistant's tokens of demonstrations (rStar2-Agent, section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence

import grain
import numpy as np

from rstar_jax.config import StageConfig
from rstar_jax.data import dialogues
from rstar_jax.recipes.run import Run, Stopwatch, demonstrations, tool_schemas
from rstar_jax.tools.python_tool import NAME
from rstar_jax.training.batching import Row, microbatch_shapes, microbatches
from rstar_jax.training.optimizer import learning_rate
from rstar_jax.training.state import TrainState
from rstar_jax.training.update import Update
from rstar_jax.types import UserError

WINDOW = 16  # batches that are filled together, so that each holds rows of similar length


class BatchOrder:
    """Which rows stand in batch i: shuffled epochs without end; within a window of batches rows are sorted by length, and the
    batches shuffled. Random access, so that a position is all a resume needs."""

    def __init__(self, lengths: Sequence[int], rows: int, seed: int):
        self._lengths = np.asarray(lengths)
        self._rows = rows
        self._seed = seed
        self._stream = grain.MapDataset.range(len(lengths)).seed(seed).shuffle().repeat()

    def __getitem__(self, index: int) -> np.ndarray:
        window, offset = divmod(index, WINDOW)
        size = WINDOW * self._rows
        members = np.asarray([self._stream[i] for i in range(window * size, (window + 1) * size)])
        members = members[np.argsort(self._lengths[members], kind="stable")].reshape(WINDOW, self._rows)
        return members[np.random.default_rng([self._seed, window]).permutation(WINDOW)[offset]]


async def sft_stage(run: Run, stage: StageConfig, update: Update, state: TrainState) -> TrainState:
    """Train from the run's position to the end of the stage."""
    config = run.config
    encoded = [dialogues.encode_demonstration(d, run.chat, run.tokenizer, tool_schemas(run.chat), NAME) for d in demonstrations(config)]
    longest = max(map(len, encoded))
    if longest > config.training.buckets[-1]:
        raise UserError(f"a demonstration has {longest} tokens, more than the last of training.buckets={config.training.buckets}")
    rows = [Row(e.ids, e.trainable, np.full(len(e), np.nan, np.float32)) for e in encoded]
    order = BatchOrder([len(e) for e in encoded], stage.rows_per_step, config.seed)
    rate = learning_rate(stage, config.training)
    index = run.position.stage
    training = config.training
    shapes = microbatch_shapes(training.buckets, training.microbatch_tokens, stage.rows_per_step, update.shards, training.packing)
    await run.on_device(update.warm_up, state, shapes, False)

    run.progress.start(stage.name, stage.steps, run.position.stage_step)
    for step in range(run.position.stage_step, stage.steps):
        watch = Stopwatch()
        with watch("step"):
            batches = microbatches(
                [rows[i] for i in order[step]],
                buckets=training.buckets,
                microbatch_tokens=training.microbatch_tokens,
                nominal_rows=stage.rows_per_step,
                shards=update.shards,
                pad_id=run.tokenizer.pad_id,
                routed=config.model.routed,
                packing=training.packing,
            )
            state, means = await run.on_device(update.step, state, batches)
        run.advance(index, step + 1, (step + 1) * stage.rows_per_step)
        metrics = {name: means[name] for name in ("loss", "grad_norm", "skipped", "entropy")}
        run.log("train", {**metrics, "learning_rate": float(rate(step))}, watch.seconds)
        run.progress.step({"loss": means["loss"]})
        if run.save_due(stage):
            await run.save(state)
    run.progress.stop()
    return state
