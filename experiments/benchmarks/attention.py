"""What does blockwise attention cost beside the dense reference, in time and in memory?

    python -m experiments.benchmarks.attention [--lengths=512,1024,2048,4096] [--rounds=5]

Causal attention of one row, 16 query heads on 4 key/value heads of width 64, float32, forward and forward with backward. The arms
alternate, and each ratio is the median over rounds of dense / blockwise; CPU time stands beside wall time. Bytes are XLA's own
count of a program's temporaries.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from launch import cli
from rstar_jax.model.attention import attention, causal

_LENGTHS = flags.DEFINE_list("lengths", ["512", "1024", "2048", "4096"], "Positions of the row.")
_BLOCK = flags.DEFINE_integer("block", 512, "Positions of a block.", lower_bound=16)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Alternations.", lower_bound=1)
_SEGMENTS = flags.DEFINE_integer("segments", 1, "Sequences of equal length that share the row.", lower_bound=1)

HEADS, KV_HEADS, WIDTH = 16, 4, 64


def program(implementation: str, length: int, backward: bool) -> Any:
    """The compiled program of one arm."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return attention(q, k, v, causal(segments), implementation, _BLOCK.value)

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> Any:
        return jax.grad(lambda *x: jnp.sum(forward(*x, segments) ** 2), argnums=(0, 1, 2))(q, k, v)

    return jax.jit(gradients if backward else forward).lower(*inputs(length)).compile()


def inputs(length: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (1, length, HEADS, WIDTH))
    k, v = (jax.random.normal(key, (1, KV_HEADS, length, WIDTH)) for key in keys[1:])
    return q, k, v, 1 + (jnp.arange(length) * _SEGMENTS.value // length)[None]


def measure(call: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    return time.perf_counter() - wall, time.process_time() - cpu


def main(argv: Sequence[str]) -> None:
    """Measure, print a table and the RESULT line."""
    del argv
    result: dict[str, Any] = {"segments": _SEGMENTS.value}
    print(f"{'length':>7} {'pass':>9} {'dense ms':>9} {'block ms':>9} {'wall':>6} {'cpu':>6} {'dense MB':>9} {'block MB':>9}")
    for length in map(int, _LENGTHS.value):
        arguments = inputs(length)
        for backward in (False, True):
            arms = {name: program(name, length, backward) for name in ("dense", "blockwise")}
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
            for turn in range(_ROUNDS.value + 1):
                for name, arm in arms.items():
                    seconds = measure(lambda arm=arm: arm(*arguments))  # type: ignore[misc]
                    if turn:  # the first is a warm-up
                        times[name].append(seconds)
            wall, cpu = (statistics.median(d[i] / b[i] for d, b in zip(*times.values(), strict=True)) for i in (0, 1))
            ms = [statistics.median(t[0] for t in times[name]) * 1e3 for name in arms]
            mb = [arm.memory_analysis().temp_size_in_bytes / 1e6 for arm in arms.values()]
            kind = "backward" if backward else "forward"
            print(f"{length:7} {kind:>9} {ms[0]:9.1f} {ms[1]:9.1f} {wall:6.2f} {cpu:6.2f} {mb[0]:9.1f} {mb[1]:9.1f}", flush=True)
            result[f"{kind}_{length}"] = {"wall": round(wall, 2), "cpu": round(cpu, 2), "bytes": round(mb[0] / mb[1], 1)}
    print(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    cli.run(main)
