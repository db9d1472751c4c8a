"""What one accelerator reaches on the shapes of a 14B model: decode, extend, prefill, and the update, beside what was predicted.

    python -m experiments.benchmarks.accelerator                      # one GPU or TPU with 80 GB, at most 8 minutes
    python -m experiments.benchmarks.accelerator --shape=tiny         # the same program on a CPU, in a minute

A stack of a few layers of Qwen3-14B (d 5120, 40 / 8 heads of 128, feed-forward 17408) in bfloat16, with a small vocabulary: all of the
work is that of a layer. Bandwidth and peak are calibrated first, in the same process; from them alone each phase is predicted as
max(bytes / bandwidth, operations / peak), and the predictions are printed before anything else is measured. The share is predicted /
measured time. Works on whatever backend jax sees.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from launch import cli
from rstar_jax.config import MeshConfig, ModelConfig, StageConfig, TrainingConfig
from rstar_jax.model import kv_cache, qwen
from rstar_jax.model.sharding import make_mesh
from rstar_jax.rollout import decode
from rstar_jax.rollout.weights import rollout_params
from rstar_jax.training.losses import loss_function
from rstar_jax.training.optimizer import make_optimizer
from rstar_jax.training.state import init_state
from rstar_jax.training.update import Update
from rstar_jax.types import TrainBatch

_SHAPE = flags.DEFINE_enum("shape", "qwen3-14b", ["qwen3-14b", "tiny"], "Of a layer, and of the phases.")
_LAYERS = flags.DEFINE_integer("layers", 2, "Layers of the stack.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 480.0, "No phase begins after so many.", lower_bound=1.0)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A layer, and how much of each phase is run."""

    model: ModelConfig
    slots: tuple[int, ...]
    context: int
    chunk: int
    prefill: tuple[int, int]  # rows, tokens
    extend: tuple[int, int]
    update: tuple[int, int]


SHAPES = {
    "qwen3-14b": Shape(
        ModelConfig(
            8192, 2, 5120, 17408, 40, 8, 128, True, False, False, 1e6, 1e-6, "bfloat16", "float32", "full", attention="blockwise"
        ),
        slots=(59, 128), context=6144, chunk=16, prefill=(4, 2048), extend=(8, 512), update=(1, 8192),
    ),
    "tiny": Shape(
        ModelConfig(512, 2, 64, 192, 4, 2, 16, remat="full", attention="blockwise", attention_block=64),
        slots=(4, 8), context=192, chunk=4, prefill=(2, 64), extend=(2, 32), update=(1, 256),
    ),
}  # fmt: skip


def best_of(call: Callable[[], Any], times: int = 3) -> float:
    """Seconds of the fastest of several calls; the first, which compiles, is not counted."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def calibrate(dtype: str, small: bool) -> tuple[float, float]:
    """Bytes per second of reading memory, and operations per second of a large product."""
    n = 1 << (22 if small else 30)
    x = jnp.ones(n // 4, jnp.float32)
    bandwidth = x.nbytes / best_of(lambda: total(x))
    side = 512 if small else 8192
    a = jnp.ones((side, side), dtype)
    return bandwidth, 2.0 * side**3 / best_of(lambda: product(a))


total = jax.jit(jnp.sum)
product = jax.jit(lambda a: a @ a)


class Phases:
    """The phases of one shape: what each is predicted to take, and how it is run."""

    def __init__(self, shape: Shape, layers: int, bandwidth: float, peak: float):
        self.shape = shape
        self.model = dataclasses.replace(shape.model, num_layers=layers)
        self.bandwidth, self.peak = bandwidth, peak
        abstract = qwen.abstract_params(self.model)
        self.matrices = sum(leaf.size for leaf in jax.tree.leaves(abstract["layers"])) + abstract["ends"]["embedding"].size
        self.width = jnp.dtype(self.model.dtype).itemsize
        self.token_bytes = kv_cache.cache_bytes(self.model, 1, 1)

    def bound(self, tokens: int, read: float, attended: float, passes: float = 1.0) -> float:
        """max(bytes / bandwidth, operations / peak) for `tokens` that go through the stack, of which all see `attended` keys in sum."""
        attention = 4.0 * self.model.num_layers * self.model.num_heads * self.model.head_dim * attended
        operations = passes * (2.0 * self.matrices * tokens + attention)
        return max((self.width * self.matrices * passes + read) / self.bandwidth, operations / self.peak)

    def predictions(self) -> dict[str, tuple[int, float]]:
        """Tokens and seconds of every phase."""
        s, found = self.shape, {}
        for slots in s.slots:
            step = self.bound(slots, slots * s.context * self.token_bytes, slots * s.context)
            found[f"decode_{slots}"] = (slots * s.chunk, step * s.chunk)
        rows, length = s.extend
        found["extend"] = (rows * length, self.bound(rows * length, rows * s.context * self.token_bytes, rows * length * s.context))
        rows, length = s.prefill
        found["prefill"] = (rows * length, self.bound(rows * length, 0, rows * length * length / 2))
        rows, length = s.update
        found["update"] = (
            rows * length,
            self.bound(rows * length, 0, rows * length * length / 2, passes=4.0),
        )  # forward twice, backward
        return found

    def run(self, name: str) -> float:
        """Measured seconds of a phase."""
        if name == "update":
            return self._update()
        params = jax.jit(lambda key: rollout_params(qwen.init(self.model, key), self.model))(jax.random.key(0))
        s = self.shape
        if name == "prefill":
            tokens, count = np.ones(s.prefill, np.int32), np.full(s.prefill[0], s.prefill[1], np.int32)
            return best_of(lambda: decode.prefill(params, self.model, tokens, count)[0])
        slots = int(name.split("_")[1]) if "_" in name else s.extend[0]
        dense = dataclasses.replace(self.model, attention="dense")  # one query per slot has no blocks
        state = [decode.empty_state(dense, slots, s.context + 4 * max(s.chunk, s.extend[1]))]
        every, held = np.arange(slots, dtype=np.int32), np.full(slots, s.context, np.int32)
        state[0] = decode.rewind(state[0], every, held, held * 0)
        parts = 2 if jax.default_backend() == "cpu" else 0
        if name == "extend":
            rows, length = s.extend
            tokens, count = np.ones((rows, length), np.int32), np.full(rows, length, np.int32)

            def extend() -> Any:
                state[0] = decode.rewind(state[0], every, held - length, held * 0)
                state[0], _ = decode.extend(params, self.model, state[0], every, tokens, count, count)
                return state[0]

            return best_of(extend)

        def chunk() -> Any:
            state[0] = decode.rewind(state[0], every, held, held * 0)
            start = np.full(slots, s.chunk, np.int32)
            state[0], out = decode.decode_chunk(params, dense, state[0], start, s.chunk, (), 0, None, parts)
            return out

        return best_of(chunk)

    def _update(self) -> float:
        stage = StageConfig("rl", "rl", 1, learning_rate=1e-6)
        mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        optimizer = make_optimizer(stage, TrainingConfig())
        update = Update(self.model, loss_function(stage), optimizer, 1.0, mesh)
        state = [init_state(self.model, optimizer, 0, mesh)]
        shape = self.shape.update
        ones, zeros = np.ones(shape, np.int32), np.zeros(shape, np.float32)
        positions = np.broadcast_to(np.arange(shape[1]), shape)
        batch = update.place(TrainBatch(ones, positions, ones, ones > 0, zeros + 1, zeros - 9.0, zeros - 9.0))

        def step() -> Any:
            state[0], sums, _ = update(state[0], [batch])
            return sums.values

        return best_of(step)


def main(argv: Sequence[str]) -> None:
    """Calibrate, predict, measure, print a table and the RESULT line."""
    del argv
    begin = time.monotonic()
    shape = SHAPES[_SHAPE.value]
    device = jax.devices()[0]
    bandwidth, peak = calibrate(shape.model.dtype, _SHAPE.value == "tiny")
    print(f"{device.platform} {device.device_kind}: {bandwidth / 1e9:.0f} GB/s, {peak / 1e12:.2f} TFLOP/s in {shape.model.dtype}")
    phases = Phases(shape, _LAYERS.value, bandwidth, peak)
    predicted = phases.predictions()
    for name, (tokens, seconds) in predicted.items():
        print(f"predicted {name:<12} {seconds * 1e3:10.2f} ms {tokens / seconds:12.0f} tokens/s", flush=True)
    result: dict[str, Any] = {"device": device.device_kind, "gb_per_s": round(bandwidth / 1e9, 1), "tflops": round(peak / 1e12, 3)}
    for name, (tokens, seconds) in predicted.items():
        if time.monotonic() - begin > _SECONDS.value:
            print(f"not run  {name}: the time is over")
            continue
        measured = phases.run(name)
        print(
            f"measured  {name:<12} {measured * 1e3:10.2f} ms {tokens / measured:12.0f} tokens/s, share {seconds / measured:.2f}",
            flush=True,
        )
        result[name] = {"tokens_per_s": round(tokens / measured), "roofline_share": round(seconds / measured, 3)}
    result["seconds"] = round(time.monotonic() - begin)
    print(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    cli.run(main)
