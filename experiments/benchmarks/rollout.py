"""How fast are rollouts, beside transformers' `generate` and beside what the machine could do?

    python -m experiments.benchmarks.rollout [--rounds=3] [--parts=decode,grouped,fork,extend,tools,smollm2]

Float32 on two threads, the same weights on both sides, arms alternated, medians over rounds, CPU time beside wall time:

- decode: 64 tokens behind prompts of 64, for 1, 8 and 32 sequences of equal length, whole calls, prefill included;
- grouped: groups of 16 rollouts with a long tail of lengths and a shared system prompt; transformers gets one batch a group and
  generates until the longest of it has ended;
- fork: one prefill and 16 placements against 16 prefills and placements;
- extend: 64 tokens behind 448 cached ones in 8 slots against prefilling 512 again;
- tools: 4 turns with tools that take 0.3 s; against the bound max(device time, critical path), and against waiting for all
  trajectories after each turn;
- smollm2: SmolLM2-135M, 32 slots, against the roofline max(bytes / bandwidth, operations / peak) that the same run calibrates.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from launch import cli
from rstar_jax.config import ModelConfig, RolloutConfig
from rstar_jax.model import qwen
from rstar_jax.rollout import decode
from rstar_jax.rollout.device import Device
from rstar_jax.rollout.engine import SlotEngine
from rstar_jax.rollout.weights import rollout_params
from rstar_jax.storage import hf
from rstar_jax.types import SampleKey, Sampling

PARTS = ("decode", "grouped", "fork", "extend", "tools", "smollm2")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Alternations of the arms.", lower_bound=1)
_PARTS = flags.DEFINE_list("parts", ["decode", "grouped", "fork", "extend", "tools", "smollm2"], "Which of them.")
_TOOL_S = flags.DEFINE_float("tool_s", 0.3, "Seconds that a tool takes.", lower_bound=0.01)

MODEL = ModelConfig(vocab_size=8192, num_layers=6, d_model=384, d_ff=1152, num_heads=6, num_kv_heads=2, head_dim=64)
THREADS = 2
Times = tuple[float, float]
"""Wall and CPU seconds."""


def timed(call: Callable[[], Any]) -> Times:
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    return time.perf_counter() - wall, time.process_time() - cpu


def alternate(arms: dict[str, Callable[[], Any]]) -> dict[str, list[Times]]:
    """Every arm once as a warm-up, then `--rounds` times in turn."""
    times: dict[str, list[Times]] = {name: [] for name in arms}
    for turn in range(_ROUNDS.value + 1):
        for name, arm in arms.items():
            measured = timed(arm)
            if turn:
                times[name].append(measured)
    return times


def ratio(times: dict[str, list[Times]], ours: str, theirs: str) -> dict[str, float]:
    """Median over rounds of theirs / ours."""
    pairs = list(zip(times[ours], times[theirs], strict=True))
    return {kind: round(statistics.median(b[i] / a[i] for a, b in pairs), 2) for i, kind in enumerate(("wall", "cpu"))}


def show(name: str, times: dict[str, list[Times]]) -> None:
    for arm, found in times.items():
        wall, cpu = (statistics.median(t[i] for t in found) * 1e3 for i in (0, 1))
        print(f"{name:<16} {arm:<14} {wall:9.1f} ms wall {cpu:9.1f} ms CPU", flush=True)


class Bench:
    """One model of random weights, on both sides."""

    def __init__(self) -> None:
        import torch
        import transformers

        torch.set_num_threads(THREADS)
        self.torch = torch
        params = jax.jit(qwen.init, static_argnums=0)(MODEL, jax.random.key(0))
        with tempfile.TemporaryDirectory() as directory:
            hf.save_params(params, MODEL, pathlib.Path(directory))
            self.peer = transformers.Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.peer.generation_config.eos_token_id = None
        self.weights = rollout_params(params, MODEL)
        self.device = concurrent.futures.ThreadPoolExecutor(1)

    def engine(self, slots: int, capacity: int, **changes: Any) -> SlotEngine:
        settings = {
            "slots": slots,
            "chunk": 32,
            "prefill_rows": min(8, slots),
            "prompt_buckets": (64,),
            "max_prompt_tokens": capacity - 1,
        }
        rollout = RolloutConfig(**{**settings, **changes})
        engine = SlotEngine(MODEL, rollout, capacity=capacity, stop_ids=(), device=self.device)
        engine.load(self.weights, version=0)
        return engine

    def generate(self, prompts: np.ndarray, new: int) -> Any:
        with self.torch.no_grad():
            ids = self.torch.tensor(prompts)
            mask = self.torch.ones_like(ids)
            sampling = {"do_sample": True, "top_k": 0, "pad_token_id": 0}
            return self.peer.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, **sampling).numpy()


def roll(engine: SlotEngine, prompts: Sequence[Sequence[int]], lengths: Sequence[int], group: int = 1) -> int:
    """Sample `lengths[i]` tokens behind prompt i // group; returns their number."""

    async def one(i: int) -> int:
        slot = await engine.open(prompts[i // group], SampleKey(0, 0, i // group, i), Sampling())
        got = await slot.generate(lengths[i])
        slot.close()
        return len(got.ids)

    async def everyone() -> int:
        async with engine:
            return sum(await asyncio.gather(*map(one, range(len(lengths)))))

    return asyncio.run(everyone())


def random_ids(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(1, MODEL.vocab_size, shape)


def part_decode(bench: Bench) -> dict[str, Any]:
    result = {}
    for batch in (1, 8, 32):
        prompts = random_ids(np.random.default_rng(batch), batch, 64)
        engine = bench.engine(batch, 128, shared_prefix=0)
        arms = {
            "ours": lambda e=engine, p=prompts, n=batch: roll(e, p.tolist(), [64] * n),
            "generate": lambda p=prompts: bench.generate(p, 64),
        }
        times = alternate(arms)
        show(f"decode B={batch}", times)
        result[str(batch)] = ratio(times, "ours", "generate")
    return {"decode_vs_generate": result}


def part_grouped(bench: Bench) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    groups, size = 8, 16
    system = random_ids(rng, 256).tolist()
    prompts = [system + random_ids(rng, 64).tolist() for _ in range(groups)]
    lengths = np.clip(rng.lognormal(3.4, 1.0, groups * size), 4, 320).astype(int).tolist()
    lengths_seen, rows = (352, 384, 448, 512, 576), (2, 4, 8, 12, 16)
    engine = bench.engine(24, 640, chunk=8, attention_lengths=lengths_seen, decode_rows=rows)
    engine.share(system)

    def theirs() -> None:
        for i, prompt in enumerate(prompts):
            bench.generate(np.array([prompt] * size), max(lengths[i * size : (i + 1) * size]))

    times = alternate({"ours": lambda: roll(engine, prompts, lengths, size), "generate": theirs})
    show("grouped", times)
    print(f"grouped          {sum(lengths)} tokens wanted, lengths {min(lengths)} to {max(lengths)}")
    return {"grouped_vs_generate": ratio(times, "ours", "generate")}


def part_fork(bench: Bench) -> dict[str, Any]:
    device = Device(MODEL, RolloutConfig(slots=16), bench.engine(16, 320).scheduler.pools, (), None)
    device.load(bench.weights)
    tokens, count = random_ids(np.random.default_rng(2), 1, 256).astype(np.int32), np.array([255], np.int32)
    state = [device._states[0]]

    def place(rows: Any, slots: Sequence[int]) -> None:
        n = len(slots)
        filters = decode.Filters.of([Sampling()] * n)
        counts, keys = np.full(n, 255, np.int32), np.zeros((n, 4), np.int32)
        state[0] = decode.insert(state[0], rows, np.zeros(n, np.int32), np.array(slots, np.int32), counts, counts, keys, filters)

    def fork() -> Any:
        place(decode.prefill(bench.weights, MODEL, tokens, count)[0], range(16))
        return state[0]

    def separately() -> Any:
        for slot in range(16):
            place(decode.prefill(bench.weights, MODEL, tokens, count)[0], [slot])
        return state[0]

    times = alternate({"fork": fork, "16 prefills": separately})
    show("fork", times)
    return {"fork_ratio": ratio(times, "fork", "16 prefills")}


def part_extend(bench: Bench) -> dict[str, Any]:
    rows = 8
    device = Device(MODEL, RolloutConfig(slots=rows), bench.engine(rows, 512).scheduler.pools, (), None)
    device.load(bench.weights)
    rng = np.random.default_rng(3)
    tokens = random_ids(rng, rows, 512).astype(np.int32)
    every, filters, keys = np.arange(rows, dtype=np.int32), decode.Filters.of([Sampling()] * rows), np.zeros((rows, 4), np.int32)
    n448, n512, n64 = (np.full(rows, n, np.int32) for n in (448, 511, 63))
    begun = decode.prefill(bench.weights, MODEL, tokens[:, :448], n448)[0]
    state = [decode.insert(device._states[0], begun, every, every, n448, n448, keys, filters)]

    def extend() -> Any:
        state[0] = decode.rewind(state[0], every, n448, n448)
        state[0], _ = decode.extend(bench.weights, MODEL, state[0], every, tokens[:, 448:], n64, n64, 512)
        return state[0]

    def again() -> Any:
        whole = decode.prefill(bench.weights, MODEL, tokens, n512)[0]
        state[0] = decode.insert(state[0], whole, every, every, n512, n512, keys, filters)
        return state[0]

    times = alternate({"extend": extend, "prefill again": again})
    show("extend", times)
    return {"extend_ratio": ratio(times, "extend", "prefill again")}


class Busy(concurrent.futures.ThreadPoolExecutor):
    """A thread that adds up how long it has worked."""

    def __init__(self) -> None:
        super().__init__(1)
        self.seconds = 0.0

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        def work() -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return super().submit(work)


def part_tools(bench: Bench) -> dict[str, Any]:
    rng = np.random.default_rng(4)
    trajectories, turns, slots = 32, 4, 16
    prompt = random_ids(rng, 64).tolist()
    lengths = np.clip(rng.lognormal(3.4, 0.7, (trajectories, turns)), 4, 160).astype(int)
    observed = random_ids(rng, 24).tolist()
    delay = _TOOL_S.value

    def run(barrier: bool) -> tuple[float, float, float]:
        """Wall seconds, seconds that the device worked, and decode steps."""
        bench.device = Busy()
        engine = bench.engine(slots, 1024, chunk=8, prompt_buckets=(64,), extend_buckets=(32,), attention_lengths=(256, 512))

        async def one(i: int, gate: asyncio.Barrier | None) -> None:
            slot = await engine.open(prompt, SampleKey(0, 0, 0, i), Sampling())
            for turn in range(turns):
                await slot.generate(int(lengths[i, turn]))
                if turn + 1 < turns:
                    if gate is not None:
                        await gate.wait()
                    await asyncio.sleep(delay)
                    await slot.append(observed)
            slot.close()

        async def everyone() -> None:
            async with engine:
                if not barrier:
                    await asyncio.gather(*(one(i, None) for i in range(trajectories)))
                    return
                for first in range(0, trajectories, slots):  # as many at a time as there are slots, turn by turn
                    gate = asyncio.Barrier(slots)
                    await asyncio.gather(*(one(i, gate) for i in range(first, first + slots)))

        start = time.perf_counter()
        asyncio.run(everyone())
        return time.perf_counter() - start, bench.device.seconds, engine.counters.device_steps

    run(False), run(True)
    over, against = [], []
    for _ in range(_ROUNDS.value):
        wall, device_seconds, steps = run(False)
        waiting, _, barrier_steps = run(True)
        step = device_seconds / steps
        path = max(float(lengths[i].sum()) * step + (turns - 1) * delay for i in range(trajectories))
        bound = max(device_seconds, path)
        over.append(wall / bound)
        against.append(waiting / wall)
        print(
            f"tools            async {wall:.2f} s (device {device_seconds:.2f} s, {steps} steps; longest trajectory {path:.2f} s), "
            f"turn by turn {waiting:.2f} s ({barrier_steps} steps)",
            flush=True,
        )
    return {"async_over_bound": round(statistics.median(over), 3), "async_vs_barrier": round(statistics.median(against), 2)}


def bandwidth() -> float:
    """Bytes per second of reading a large array once, the best of several ways and tries."""
    matrix, vector = jnp.ones((8192, 8192)), jnp.ones(8192)
    ways = [jax.jit(lambda m, v: m @ v), jax.jit(lambda m, v: m.sum(1) + v), jax.jit(lambda m, v: m.max(1) + v)]
    seconds = []
    for way in ways:
        jax.block_until_ready(way(matrix, vector))
        seconds += [timed(lambda way=way: way(matrix, vector))[0] for _ in range(5)]
    return matrix.nbytes / min(seconds)


def peak(rows: int, width: int, features: int) -> float:
    """Multiply-add operations, times two, per second of [rows, width] x [width, features], the better of both orientations."""
    x, w = jnp.ones((rows, width)), [jnp.ones((width, features)) + i for i in range(8)]
    turned = [m.T.copy() for m in w]
    ways: list[tuple[Any, Any]] = [(jax.jit(lambda x, w: [x @ m for m in w]), w), (jax.jit(lambda x, w: [m @ x.T for m in w]), turned)]
    seconds = []
    for way, weights in ways:
        jax.block_until_ready(way(x, weights))
        seconds += [timed(lambda way=way, weights=weights: way(x, weights))[0] for _ in range(5)]
    return 2.0 * rows * width * features * len(w) / min(seconds)


def part_smollm2(bench: Bench) -> dict[str, Any]:
    del bench
    from rstar_jax.config import MeshConfig
    from rstar_jax.model.sharding import make_mesh
    from rstar_jax.recipes import pretrained

    checkpoint = pretrained.open_checkpoint(pretrained.SMOLLM)
    model = checkpoint.model
    params = hf.load_params(checkpoint.source, model, make_mesh(MeshConfig()))
    weights = rollout_params(params, model)
    slots, steps, held = 32, 16, 64
    state = decode.empty_state(model, slots, max(128, steps * (_ROUNDS.value + 2)))
    first = np.full(slots, steps * (_ROUNDS.value + 1), np.int32)
    state, chunk = decode.decode_chunk(weights, model, state, first, steps, (), 0, None, 1)
    jax.block_until_ready(chunk)
    speeds, shares = [], []
    for _ in range(_ROUNDS.value):
        bytes_per_second, operations_per_second = bandwidth(), peak(slots, model.d_model, model.d_ff)
        wall, cpu = time.perf_counter(), time.process_time()
        state, chunk = decode.decode_chunk(weights, model, state, np.zeros(slots, np.int32), steps, (), 0, None, 1)
        jax.block_until_ready(chunk)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        assert int(chunk.emitted_ns.sum()) == slots * steps
        matrices = sum(leaf.size for leaf in jax.tree.leaves(weights))
        cache = 2 * model.num_layers * model.num_kv_heads * model.head_dim * held * slots * 4
        bound = max((4 * matrices + cache) / bytes_per_second, 2.0 * matrices * slots / operations_per_second)
        speeds.append(slots * steps / wall)
        shares.append(bound / (wall / steps))
        print(
            f"smollm2          {speeds[-1]:.0f} tokens/s, {wall / steps * 1e3:.0f} ms a step wall, {cpu / steps * 1e3:.0f} CPU; "
            f"roofline {bound * 1e3:.0f} ms ({bytes_per_second / 1e9:.1f} GB/s, {operations_per_second / 1e9:.0f} GFLOP/s)",
            flush=True,
        )
    return {"smollm2_tokens_per_s": round(statistics.median(speeds), 1), "smollm2_roofline_share": round(statistics.median(shares), 3)}


def main(argv: Sequence[str]) -> None:
    """Measure, print a table and the RESULT line."""
    del argv
    bench = Bench()
    parts = {
        "decode": part_decode, "grouped": part_grouped, "fork": part_fork, "extend": part_extend, "tools": part_tools,
        "smollm2": part_smollm2,
    }  # fmt: skip
    result: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    for name in PARTS:
        if name in _PARTS.value:
            result |= parts[name](bench)
    print(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    cli.run(main)
