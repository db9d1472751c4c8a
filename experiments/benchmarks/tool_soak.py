"""Does anything grow over very many calls? `--calls` distinct calls, all queued at once or one after the other, every output checked.

python -m experiments.benchmarks.tool_soak --calls=45000
python -m experiments.benchmarks.tool_soak --calls=100000 --sequential
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import resource
import time
from collections.abc import Sequence

from absl import flags

from experiments.benchmarks.tool_cases import parents, state
from launch import cli
from rstar_jax.config import TIERS, ToolConfig
from rstar_jax.tools.pool import ToolPool

_CALLS = flags.DEFINE_integer("calls", 45_000, "Calls in all.", lower_bound=1)
_SEQUENTIAL = flags.DEFINE_bool("sequential", False, "One call after the other, instead of all queued at once.")
_TIER = flags.DEFINE_enum("tier", "auto", ["auto", *TIERS], "Tier of isolation of the pool.")

_WARM_UP = 2000


def children(pids: Sequence[int]) -> list[int]:
    """Processes whose parent is one of `pids`."""
    return [child for child, parent in parents().items() if parent in pids]


def anonymous_kib(pid: int) -> int:
    """Resident memory of a process that no file stands behind (KiB)."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def descriptors(pids: Sequence[int]) -> int:
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)


async def settle() -> None:
    """Let spares be made and dead processes be reaped."""
    await asyncio.sleep(1.0)


async def soak(calls: int, sequential: bool, tier: str) -> dict[str, object]:
    """Run the calls; the RESULT object."""
    cores = len(os.sched_getaffinity(0))
    async with ToolPool(ToolConfig(workers=cores, concurrency=2 * cores, isolation=tier, timeout_s=30.0)) as pool:
        keepers = children([os.getpid()])
        zygotes = children(keepers)
        everything = [os.getpid(), *keepers, *zygotes]
        await asyncio.gather(*(pool.run(f"print({i})") for i in range(_WARM_UP)))
        await settle()
        files, memory = descriptors(everything), sum(map(anonymous_kib, zygotes))
        wrong = 0

        async def one(index: int) -> None:
            nonlocal wrong
            result = await pool.run(f"print({index} * 2 + 1)")
            wrong += result.stdout != f"{index * 2 + 1}\n" or result.status != "ok"

        start = time.monotonic()
        if sequential:
            for index in range(calls):
                await one(index)
        else:
            await asyncio.gather(*(one(index) for index in range(calls)))
        seconds = time.monotonic() - start
        await settle()
        family = [*keepers, *zygotes, *children(zygotes)]
        return {
            "calls": calls,
            "wrong": wrong,
            "seconds": round(seconds, 1),
            "broker_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            "fd_growth": descriptors(everything) - files,
            "zombies": sum(state(pid) == "Z" for pid in family),
            "zygote_rss_growth": round(sum(map(anonymous_kib, zygotes)) / memory - 1, 4),
            "calls_per_s": round(calls / seconds, 1),
            "mode": "sequential" if sequential else "queued",
            "preload": list(pool.config.preload),
            "tier": pool.isolation.tier,
        }


def main(argv: Sequence[str]) -> None:
    """Run, print the table and the RESULT line."""
    del argv
    result = asyncio.run(soak(_CALLS.value, _SEQUENTIAL.value, _TIER.value))
    for name, value in result.items():
        print(f"{name:<20}{value}")
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    cli.run(main)
