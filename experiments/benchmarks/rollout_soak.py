"""Does the engine lose anything over very many trajectories?

    python -m experiments.benchmarks.rollout_soak [--trajectories=20000]

Short trajectories of a tiny model with random tool delays, tools that fail, and agents that are cancelled at random moments, in steps
of 500 with new weights before each; pools of two lengths, admission by estimate, eviction at once. Counted: trajectories that ended
each way, slots that were not given back, anything that the engine still holds, recomputed tokens, and memory after a tenth of the
steps and at the end.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import json
import pathlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from launch import cli
from rstar_jax.config import ModelConfig, RolloutConfig
from rstar_jax.model import qwen
from rstar_jax.rollout.engine import SlotEngine
from rstar_jax.rollout.weights import rollout_params
from rstar_jax.types import InfrastructureError, SampleKey, Sampling

_TRAJECTORIES = flags.DEFINE_integer("trajectories", 20_000, "In all.", lower_bound=1)
_STEP = flags.DEFINE_integer("step", 500, "Trajectories between two weight updates.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the delays, failures and cancellations.")

MODEL = ModelConfig(vocab_size=64, num_layers=1, d_model=16, d_ff=32, num_heads=2, num_kv_heads=1, head_dim=8)
ROLLOUT = RolloutConfig(
    slots=8, chunk=4, prefill_rows=4, prompt_buckets=(8,), extend_rows=4, extend_buckets=(8,), max_prompt_tokens=16,
    pool_lengths=(24,), pool_slots=(16,), admission="estimate", evict_after_s=0.0,
)  # fmt: skip


def resident_bytes() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


async def one(engine: SlotEngine, key: SampleKey) -> int:
    """Up to three turns; returns the sampled tokens. Raises `InfrastructureError` where the tool fails."""
    rng = random.Random(repr((_SEED.value, key)))
    slot = await engine.open([1 + rng.randrange(60) for _ in range(1 + rng.randrange(14))], key, Sampling(1.0))
    try:
        tokens = 0
        for _ in range(1 + rng.randrange(3)):
            got = await slot.generate(1 + rng.randrange(10))
            assert got.version == engine.version
            tokens += len(got.ids)
            if rng.random() < 0.05:
                raise InfrastructureError("the tool is gone")
            await asyncio.sleep(rng.choice((0, 0, 0.001, 0.01)))
            await slot.append([1 + rng.randrange(60) for _ in range(1 + rng.randrange(5))])
        return tokens
    finally:
        slot.close()


async def step(engine: SlotEngine, number: int, size: int) -> Counter[str]:
    """All trajectories of a step; one in twenty is cancelled at some moment."""
    ends: Counter[str] = Counter()
    rng = random.Random(repr((_SEED.value, number)))

    async def judged(i: int) -> None:
        task = asyncio.create_task(one(engine, SampleKey(_SEED.value, number, i // 8, i % 8)))
        if rng.random() < 0.05:
            asyncio.get_running_loop().call_later(rng.random() * 0.05, task.cancel)
        try:
            tokens = await task
        except InfrastructureError:
            ends["failed"] += 1
        except asyncio.CancelledError:
            ends["cancelled"] += 1
        else:
            ends["done"] += 1
            ends["tokens"] += tokens

    async with engine:
        await asyncio.gather(*map(judged, range(size)))
    return ends


def main(argv: Sequence[str]) -> None:
    """Run, print a table and the RESULT line."""
    del argv
    ends: Counter[str] = Counter()
    lost = 0
    memory: list[int] = []
    start, cpu = time.monotonic(), time.process_time()
    steps = -(-_TRAJECTORIES.value // _STEP.value)
    with concurrent.futures.ThreadPoolExecutor(1) as device:
        engine = SlotEngine(MODEL, ROLLOUT, capacity=64, stop_ids=(7,), device=device)
        params = jax.jit(qwen.init, static_argnums=0)(MODEL, jax.random.key(0))
        for number in range(steps):
            engine.load(rollout_params(params, MODEL), version=number)
            if not number:
                device.submit(engine.warm_up).result()
            size = min(_STEP.value, _TRAJECTORIES.value - number * _STEP.value)
            ends += asyncio.run(step(engine, number, size))
            lost += engine.held()
            gc.collect()
            memory.append(resident_bytes())
    early = memory[max(0, steps // 10)]
    counters = engine.counters
    result: dict[str, Any] = {
        "trajectories": ends["done"] + ends["failed"] + ends["cancelled"],
        "wanted": _TRAJECTORIES.value,
        "done": ends["done"], "failed": ends["failed"], "cancelled": ends["cancelled"],
        "lost": lost,
        "evictions": counters.evictions, "restores": counters.restores, "moves": counters.moves, "forks": counters.forks,
        "recomputed_tokens": counters.recomputed_tokens,
        "memory_growth_mb": round((memory[-1] - early) / 2**20, 1), "memory_mb": round(memory[-1] / 2**20),
        "wall_s": round(time.monotonic() - start, 1), "cpu_s": round(time.process_time() - cpu, 1),
    }  # fmt: skip
    for name, value in result.items():
        print(f"{name:>20} {value}")
    print(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    cli.run(main)
