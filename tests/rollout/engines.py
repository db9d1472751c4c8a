"""A small model, an engine's shapes, and the trainer's log-probs: what tests of the engine share."""

import dataclasses

import jax
import numpy as np

from rstar_jax.config import ModelConfig, RolloutConfig
from rstar_jax.model.logprobs import score
from rstar_jax.types import TrainBatch

MODEL = ModelConfig(vocab_size=64, num_layers=2, d_model=32, d_ff=48, num_heads=4, num_kv_heads=2, head_dim=8)
ROLLOUT = RolloutConfig(
    slots=8, chunk=4, prefill_rows=2, prompt_buckets=(8, 16), extend_rows=2, extend_buckets=(4, 8), max_prompt_tokens=40
)
CAPACITY, STOPS = 96, (7, 11)


@dataclasses.dataclass
class Rolled:
    ids: list
    logps: list
    sampled: list
    finishes: list


def trainer_logps(params, rolled, temperature=1.0, width=CAPACITY):
    n = len(rolled.ids)
    ids, zeros = np.zeros((1, width), np.int32), np.zeros((1, width), np.float32)
    ids[0, :n] = rolled.ids
    segments = (np.arange(width) < n).astype(np.int32)[None]
    batch = TrainBatch(ids, np.arange(width)[None], segments, segments > 0, zeros, zeros, zeros)
    return np.asarray(SCORE(params, MODEL, batch, temperature)[0][0, :n])


SCORE = jax.jit(score, static_argnums=1)
