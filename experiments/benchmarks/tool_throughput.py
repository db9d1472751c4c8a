"""How much faster is a pool of warm processes than a new Python for every call?

    python -m experiments.benchmarks.tool_throughput [--tier=auto] [--rounds=3]

Both arms run the same programs and every output is checked. A round runs each arm in turn, so that both meet the same machine; what
is reported is the median of the rounds' ratios. Processor time is that of all processes of an arm. `fork+exec` starts `python -I -c`
for each call, one per processor at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

from absl import flags

from experiments.benchmarks.tool_cases import family
from launch import cli
from rstar_jax.config import TIERS, ToolConfig
from rstar_jax.tools.pool import ToolPool
from rstar_jax.types import UserError

_TIER = flags.DEFINE_enum("tier", "auto", ["auto", *TIERS], "Tier of isolation of the pool.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds of both arms, one after the other.", lower_bound=1)

CORES = len(os.sched_getaffinity(0))
PRELOAD = ("numpy", "sympy")
BURST = 512  # calls at a time in the closed loop
SOLVE_ANSWERS = "[-3, 3]"


@dataclasses.dataclass(frozen=True)
class Task:
    """`program(i)` prints `answer(i)`. `fresh`, `pooled`: calls of a round in each arm."""

    name: str
    program: Callable[[int], str]
    answer: Callable[[int], str]
    fresh: int
    pooled: int


TASKS = (
    Task(
        "import",
        lambda i: f"import numpy, sympy\nprint(numpy.int64({i}) + sympy.Integer(1))",
        lambda i: f"{i + 1}\n",
        2 * CORES,
        100 * CORES,
    ),
    Task(
        "solve",
        lambda i: f"import sympy\nx = sympy.Symbol('x')\nprint(sympy.solve(x**2 - 9, x), {i})",
        lambda i: f"{SOLVE_ANSWERS} {i}\n",
        2 * CORES,
        40 * CORES,
    ),
    Task("print", lambda i: f"print({i})", lambda i: f"{i}\n", 25 * CORES, 150 * CORES),
)

Call = Callable[[str], Awaitable[str]]


async def fresh_call(code: str) -> str:
    """The output of a new Python."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", code, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return (await process.communicate())[0].decode()


def pool_call(pool: ToolPool) -> Call:
    async def call(code: str) -> str:
        return (await pool.run(code)).stdout

    return call


async def closed_loop(call: Call, task: Task, count: int, concurrency: int) -> tuple[float, list[float]]:
    """(seconds for all, seconds of each) of `count` calls, `concurrency` at a time. Raises `UserError` for a wrong output."""
    numbers = iter(range(count))
    latencies: list[float] = []

    async def work() -> None:
        for i in numbers:
            start = time.monotonic()
            output = await call(task.program(i))
            latencies.append(time.monotonic() - start)
            if output != task.answer(i):
                raise UserError(f"call {i} of {task.name!r} printed {output!r} instead of {task.answer(i)!r}")

    start = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, count)):
            group.create_task(work())
    return time.monotonic() - start, latencies


def cpu_seconds() -> float:
    """Processor time that this process, its children and theirs have used so far, the ended ones that were waited for included."""
    ticks = 0
    for pid in family(os.getpid()):
        with contextlib.suppress(OSError):
            ticks += sum(map(int, pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    own = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own + ticks / os.sysconf("SC_CLK_TCK")


async def session_turn(pool: ToolPool, turns: int) -> float:
    """Median seconds of a turn of a live session."""
    taken = []
    async with pool.session() as session:
        await session.run("x = 0")
        for i in range(turns):
            start = time.monotonic()
            result = await session.run("x += 1; print(x)")
            taken.append(time.monotonic() - start)
            if result.stdout != f"{i + 1}\n":
                raise UserError(f"turn {i} of a session printed {result.stdout!r}")
    return statistics.median(taken)


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def measure(config: ToolConfig, rounds: int) -> dict[str, object]:
    """The RESULT object."""
    raw: dict[str, list[float]] = {}

    def note(name: str, value: float) -> float:
        raw.setdefault(name, []).append(value)
        return value

    async with ToolPool(config) as pool:
        print(pool.isolation, flush=True)
        arms: dict[str, Call] = {"fresh": fresh_call, "pool": pool_call(pool)}
        for name, call in arms.items():
            for task in TASKS:
                await closed_loop(call, task, CORES if name == "fresh" else 8 * CORES, CORES)
        for _ in range(rounds):
            for task in TASKS:
                for name, call in arms.items():
                    count = task.fresh if name == "fresh" else task.pooled
                    concurrency = CORES if name == "fresh" else config.concurrency
                    cpu = cpu_seconds()
                    seconds, _ = await closed_loop(call, task, count, concurrency)
                    note(f"{task.name}_{name}_per_s", count / seconds)
                    note(f"{task.name}_{name}_cpu_s", (cpu_seconds() - cpu) / count)
                note(f"{task.name}_ratio", raw[f"{task.name}_pool_per_s"][-1] / raw[f"{task.name}_fresh_per_s"][-1])
            for name, call in arms.items():
                _, latencies = await closed_loop(call, TASKS[0], 2 if name == "fresh" else 40, 1)
                note(f"import_{name}_latency_s", statistics.median(latencies))
            note("import_latency_ratio", raw["import_fresh_latency_s"][-1] / raw["import_pool_latency_s"][-1])
            note("session_turn_ms", 1e3 * await session_turn(pool, 300))
            _, latencies = await closed_loop(arms["pool"], TASKS[2], 4 * BURST, BURST)
            settled = latencies[BURST // 2 :]
            note("p99_over_p50_512", percentile(settled, 0.99) / percentile(settled, 0.5))
        tier = pool.isolation.tier
    medians = {name: statistics.median(values) for name, values in raw.items()}
    print(f"{'':<24}{'fork+exec /s':>14}{'pool /s':>10}{'ratio':>8}   {'fork+exec cpu ms':>17}{'pool cpu ms':>13}   rounds' ratios")
    for task in TASKS:
        figures = [medians[f"{task.name}_{arm}_per_s"] for arm in arms] + [medians[f"{task.name}_ratio"]]
        cpu = [1e3 * medians[f"{task.name}_{arm}_cpu_s"] for arm in arms]
        each = ", ".join(f"{ratio:.1f}" for ratio in raw[f"{task.name}_ratio"])
        print(f"{task.name:<24}{figures[0]:>14.2f}{figures[1]:>10.1f}{figures[2]:>8.1f}   {cpu[0]:>17.1f}{cpu[1]:>13.1f}   {each}")
    fresh, warm = medians["import_fresh_latency_s"], medians["import_pool_latency_s"]
    print(f"one import call alone: {1e3 * fresh:.0f} ms against {1e3 * warm:.1f} ms, {medians['import_latency_ratio']:.0f} times")
    print(f"a turn of a session: {medians['session_turn_ms']:.2f} ms")
    print(f"{BURST} calls at a time: p99 is {medians['p99_over_p50_512']:.2f} times p50")
    return {
        **medians,
        "tier": tier,
        "preload": list(PRELOAD),
        "cores": CORES,
        "concurrency": config.concurrency,
        "rounds": rounds,
        "raw": raw,
    }


def main(argv: Sequence[str]) -> None:
    """Measure, print the table and the RESULT line."""
    del argv
    config = ToolConfig(workers=CORES, concurrency=2 * CORES, timeout_s=60.0, cpu_s=60.0, preload=PRELOAD, isolation=_TIER.value)
    print("RESULT " + json.dumps(asyncio.run(measure(config, _ROUNDS.value))))


if __name__ == "__main__":
    cli.run(main)
