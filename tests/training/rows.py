"""Rows of unequal lengths, about half of whose tokens are trainable."""

import numpy as np

from rstar_jax.training.batching import Row


def make_rows(count=16, seed=0, *, vocabulary=64, longest=29, logps=(-6.0, -3.0)):
    """`count` rows of up to `longest` tokens; sampler log-probs are drawn from the range `logps`, advantages from a normal."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        n = int(rng.integers(longest // 4, longest + 1))
        trainable = rng.random(n) < 0.6
        trainable[0], trainable[-1] = False, True
        sampled = np.where(trainable, rng.uniform(*logps, n), np.nan).astype(np.float32)
        rows.append(Row(rng.integers(0, vocabulary, n).astype(np.int32), trainable, sampled, float(rng.normal())))
    return rows
