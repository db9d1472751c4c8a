"""How long does a call take when calls come as in a rollout, at random moments and 70 % of what the pool can do?

    python -m experiments.benchmarks.tool_latency [--seconds=30] [--phase_s=60]

The mix is that of real trajectories: short programs with numpy and with sympy, 5 % errors, 1 % that never end. First the pool's
capacity is measured with the mix in a closed loop; then calls arrive as a Poisson process, whether or not earlier ones have been
answered. Latency is from submission to result, so it holds the time in the queue. At the end stands what the published load needs:
45,000 calls in one rollout phase (rStar2-Agent, section 2.2), of `--phase_s` seconds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import time
from collections.abc import Sequence

from absl import flags

from launch import cli
from rstar_jax.config import TIERS, ToolConfig
from rstar_jax.tools.pool import ToolPool

_SECONDS = flags.DEFINE_float("seconds", 30.0, "Seconds of arrivals.", lower_bound=1.0)
_LOAD = flags.DEFINE_float("load", 0.7, "Arrivals as a share of the capacity.", lower_bound=0.01)
_PHASE = flags.DEFINE_float("phase_s", 60.0, "Seconds of a rollout phase, for the cores that 45,000 calls need.", lower_bound=1.0)
_TIMEOUT = flags.DEFINE_float("timeout_s", 1.0, "Time limit of a call.", lower_bound=0.1)
_TIER = flags.DEFINE_enum("tier", "auto", ["auto", *TIERS], "Tier of isolation of the pool.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the arrivals and of the mix.")

CALLS = 45_000
_CAPACITY_CALLS = 1500


@dataclasses.dataclass(frozen=True)
class Kind:
    """A program of the mix: its share, and what has to come of it. `{i}` is the number of the call."""

    share: float
    code: str
    status: str
    ending: str


MIX = (
    Kind(0.30, "print(sum(k * k for k in range(1000)) + {i})", "ok", ""),
    Kind(0.32, "import numpy as np\na = np.arange(100).reshape(10, 10)\nprint(int((a @ a.T).trace()) + {i})", "ok", ""),
    Kind(0.16, "from sympy import symbols, expand\nx = symbols('x')\nprint(expand((x + {i}) ** 2))", "ok", ""),
    Kind(0.16, "import sympy\nx = sympy.Symbol('x')\nprint(sympy.solve(x**2 - 9, x), {i})", "ok", ""),
    Kind(0.05, "print({i})\nprint(undefined)", "error", "NameError: name 'undefined' is not defined\n"),
    Kind(0.01, "print({i})\nwhile True: pass", "timeout", ""),
)


async def call(pool: ToolPool, kind: Kind, index: int) -> float:
    """Seconds from submission to the result, which is checked."""
    start = time.monotonic()
    result = await pool.run(kind.code.format(i=index))
    seconds = time.monotonic() - start
    if result.status != kind.status or not result.stdout or not result.stderr.endswith(kind.ending):
        raise AssertionError(f"call {index}: {result}")
    return seconds


async def measure_capacity(pool: ToolPool, draw: random.Random) -> float:
    """Calls a second in a closed loop over the mix."""
    kinds = draw.choices(MIX, [kind.share for kind in MIX], k=_CAPACITY_CALLS)
    waiting = iter(enumerate(kinds))

    async def work() -> None:
        for index, kind in waiting:
            await call(pool, kind, index)

    start = time.monotonic()
    await asyncio.gather(*(work() for _ in range(2 * pool.config.concurrency)))
    return _CAPACITY_CALLS / (time.monotonic() - start)


async def arrive(pool: ToolPool, rate: float, seconds: float, draw: random.Random) -> list[tuple[Kind, float]]:
    """Submit calls at exponentially distributed intervals; (kind, latency) of each."""
    tasks: list[tuple[Kind, asyncio.Task[float]]] = []
    start = time.monotonic()
    due = start
    while (due := due + draw.expovariate(rate)) < start + seconds:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        (kind,) = draw.choices(MIX, [kind.share for kind in MIX])
        tasks.append((kind, asyncio.create_task(call(pool, kind, len(tasks)))))
    return [(kind, await task) for kind, task in tasks]


async def run() -> dict[str, object]:
    """The RESULT object."""
    cores = len(os.sched_getaffinity(0))
    draw = random.Random(_SEED.value)
    # A call that never ends takes a place but, until its limit, no more than its share of a core: places beyond the cores.
    config = ToolConfig(workers=cores, concurrency=8 * cores, timeout_s=_TIMEOUT.value, isolation=_TIER.value)
    async with ToolPool(config) as pool:
        await measure_capacity(pool, draw)
        capacity = await measure_capacity(pool, draw)
        start = time.monotonic()
        outcomes = await arrive(pool, _LOAD.value * capacity, _SECONDS.value, draw)
        elapsed = time.monotonic() - start
        tier = pool.isolation.tier
    latencies = sorted(seconds for kind, seconds in outcomes if kind.status != "timeout")
    return {
        "mean_latency_s": sum(seconds for _, seconds in outcomes) / len(outcomes),
        "p50_s": latencies[len(latencies) // 2],
        "p99_s": latencies[int(0.99 * len(latencies))],
        "calls_per_s": len(outcomes) / elapsed,
        "capacity_per_s": capacity,
        "cores_for_45k": CALLS / (_LOAD.value * capacity / cores) / _PHASE.value,
        "phase_s": _PHASE.value,
        "calls": len(outcomes),
        "cores": cores,
        "preload": list(config.preload),
        "tier": tier,
    }


def main(argv: Sequence[str]) -> None:
    """Run, print the table and the RESULT line."""
    del argv
    result = asyncio.run(run())
    for name, value in result.items():
        print(f"{name:<16}{value:.4f}" if isinstance(value, float) else f"{name:<16}{value}")
    print(
        f"{CALLS} calls in {_PHASE.value:.0f} s at {_LOAD.value:.0%} of a capacity of {result['capacity_per_s']:.0f} calls/s on "
        f"{result['cores']} cores: {result['cores_for_45k']:.1f} cores"
    )
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    cli.run(main)
