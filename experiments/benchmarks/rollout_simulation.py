"""How much shorter is a rollout phase when trajectories are balanced over engines instead of assigned ahead?

    python -m experiments.benchmarks.rollout_simulation [--engines=64] [--prompts=512] [--group=32]

A simulation on paper with the engine's own scheduler (`rstar_jax/rollout/scheduler.py`): each engine is one MI300X with Qwen3-14B in
bfloat16, whose decode step takes (weights + cache that is read) / (60 % of 5.3 TB/s) seconds and whose cache has room for 854K tokens
(163,840 bytes each). Lengths have a long tail (log-normal, correlated within a group, at most 12,288 tokens behind a prompt of up to
2,048), and every trajectory waits 0.3 s for each of its tool calls. No policy knows a length before it is reached.

Assignments: `static` deals groups out in order, `shuffled` deals rollouts out at random, `balanced` gives each rollout, when its turn
comes, to the engine with the most free cache. Admissions: `safe` reserves the longest length; `estimate` uses three pools of slots and
the mean length so far, and moves what outgrows its slot, through the host's memory if it must (50 GB/s).
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from launch import cli
from rstar_jax.rollout.scheduler import Dispatcher, Place, Pool, Request, Scheduler

_ENGINES = flags.DEFINE_integer("engines", 64, "Engines.", lower_bound=1)
_PROMPTS = flags.DEFINE_integer("prompts", 512, "Prompts.", lower_bound=1)
_GROUP = flags.DEFINE_integer("group", 32, "Rollouts of each prompt.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the lengths.")

LONGEST, PROMPT = 14_336, 2_048
TOKEN_BYTES, WEIGHT_BYTES, BYTES_PER_S, HOST_BYTES_PER_S = 163_840, 28e9, 0.6 * 5.3e12, 50e9
SAFE = (Pool(59, LONGEST),)
POOLS = (Pool(20, LONGEST), Pool(30, 8_192), Pool(78, 4_096))
CHUNK, TOOL_S, CALLS = 64, 0.3, 3


@dataclasses.dataclass(eq=False)
class Rollout:
    """What happens to one trajectory: tokens that it samples between its tool calls."""

    number: int
    turns: list[int]
    length: int = 500
    place: Place | None = None


class Engine:
    """One device: a scheduler, and a clock that jumps from chunk to chunk."""

    def __init__(self, pools: Sequence[Pool], admission: str):
        self.scheduler = Scheduler(pools, admission, CHUNK)
        self.sampling: dict[Rollout, None] = {}
        self.busy_until: float | None = None  # None: idle
        self.busy_s = 0.0
        self.host_bytes = 0
        self.evictions = 0
        self.moves = 0
        self.sampled = 0

    def fits(self, request: Request) -> bool:
        return not self.scheduler.waiting and self.scheduler.fits(request)

    @property
    def free_tokens(self) -> int:
        return self.scheduler.free_tokens

    def begin(self) -> float:
        """Admit who can be, make room for who has outgrown a slot, and sample a chunk; the seconds that it takes, 0 for none."""
        transfer = 0
        for request, place in self.scheduler.admit():
            rollout = request.owner
            rollout.place = place
            self.sampling[rollout] = None
            transfer += rollout.length * TOKEN_BYTES if request.begun else 0
        for rollout in list(self.sampling):
            assert rollout.place is not None
            request = Request(rollout.length, LONGEST, rollout, begun=True)
            if rollout.length + min(CHUNK, rollout.turns[0]) <= self.scheduler.length(rollout.place):
                continue
            place = self.scheduler.claim(self.scheduler.need(request))
            self.scheduler.release(rollout.place)
            rollout.place = place
            if place is None:
                del self.sampling[rollout]
                self.scheduler.submit(request)
                self.evictions += 1
                transfer += rollout.length * TOKEN_BYTES
            else:
                self.moves += 1
        self.host_bytes += transfer
        if not self.sampling:
            return transfer / HOST_BYTES_PER_S
        read = WEIGHT_BYTES + TOKEN_BYTES * sum(rollout.length for rollout in self.sampling)
        return CHUNK * read / BYTES_PER_S + transfer / HOST_BYTES_PER_S

    def end(self) -> tuple[list[Rollout], list[Rollout]]:
        """What the chunk gave: rollouts that call a tool, and rollouts that have ended."""
        calls, ended = [], []
        for rollout in list(self.sampling):
            assert rollout.place is not None
            got = min(CHUNK, rollout.turns[0])
            rollout.length += got
            self.sampled += got
            rollout.turns[0] -= got
            if rollout.turns[0]:
                continue
            rollout.turns.pop(0)
            del self.sampling[rollout]
            if rollout.turns:
                calls.append(rollout)
            else:
                self.scheduler.release(rollout.place)
                self.scheduler.ended(rollout.length)
                ended.append(rollout)
        return calls, ended


def lengths(mean: float) -> np.ndarray:
    """Sampled tokens of every rollout, [prompts, group]: log-normal, half of the variance shared by a group."""
    rng = np.random.default_rng(_SEED.value)
    shape = (_PROMPTS.value, _GROUP.value)
    spread = 0.8
    log = np.sqrt(0.5) * spread * (rng.normal(size=(shape[0], 1)) + rng.normal(size=shape))
    return np.clip(np.exp(log) * mean / np.exp(spread**2 / 2), 64, LONGEST - PROMPT).astype(int)


def turns(total: int, number: int) -> list[int]:
    """`total` tokens cut at the tool calls."""
    cuts = np.sort(np.random.default_rng([_SEED.value, number]).integers(1, total, CALLS))
    return [int(n) for n in np.diff([0, *cuts, total]) if n > 0]


def simulate(sampled: np.ndarray, assignment: str, pools: Sequence[Pool], admission: str) -> dict[str, float]:
    """One rollout phase."""
    engines = [Engine(pools, admission) for _ in range(_ENGINES.value)]
    rollouts = [Rollout(i, turns(int(total), i)) for i, total in enumerate(sampled.reshape(-1))]
    order = np.arange(len(rollouts))
    if assignment != "static":
        np.random.default_rng(_SEED.value + 1).shuffle(order)
    dispatcher = Dispatcher(engines)
    requests = [Request(rollouts[i].length, LONGEST, rollouts[i]) for i in order]
    owner: dict[Rollout, Engine] = {}
    events: list[tuple[float, int, str, Any]] = []
    count = itertools.count()
    now = 0.0

    def start(engine: Engine) -> None:
        seconds = engine.begin()
        if seconds:
            engine.busy_until = now + seconds
            engine.busy_s += seconds
            heapq.heappush(events, (engine.busy_until, next(count), "chunk", engine))
        else:
            engine.busy_until = None

    def give(request: Request, number: int) -> None:
        engine = engines[number]
        owner[request.owner] = engine
        (placed,) = [place for given, place in _submit(engine.scheduler, request) if given is request]
        request.owner.place = placed
        engine.sampling[request.owner] = None

    def _submit(scheduler: Scheduler, request: Request) -> list[tuple[Request, Place]]:
        scheduler.submit(request)
        return scheduler.admit()

    if assignment == "balanced":
        dispatcher.submit(requests)
        dispatcher.assign(give)
    else:
        for number, request in enumerate(requests):
            engine = engines[number * len(engines) // len(requests)]
            owner[request.owner] = engine
            engine.scheduler.submit(request)
    for engine in engines:
        start(engine)
    left, sampled_at = len(rollouts), 0.0
    while events:
        now, _, kind, what = heapq.heappop(events)
        if kind == "tool":
            engine = owner[what]
            engine.sampling[what] = None
            if engine.busy_until is None:
                start(engine)
            continue
        calls, ended = what.end()
        left -= len(ended)
        sampled_at = now
        for rollout in calls:
            heapq.heappush(events, (now + TOOL_S, next(count), "tool", rollout))
        what.busy_until = None
        if ended and assignment == "balanced":
            dispatcher.assign(give)
            for engine in engines:
                if engine.busy_until is None and engine is not what and engine.sampling:
                    start(engine)
        start(what)
    assert left == 0 and not dispatcher.waiting, "every rollout ends"
    return {
        "seconds": sampled_at,
        "idle_share": 1 - sum(engine.busy_s for engine in engines) / (sampled_at * len(engines)),
        "moves": sum(engine.moves for engine in engines),
        "evictions": sum(engine.evictions for engine in engines),
        "host_gb": sum(engine.host_bytes for engine in engines) / 1e9,
        "recomputed_tokens": sum(engine.sampled for engine in engines) - int(sampled.sum()),
    }


def main(argv: Sequence[str]) -> None:
    """Simulate, print a table and the RESULT line."""
    del argv
    result: dict[str, Any] = {}
    heads = ("mean tokens", "admission", "assignment", "seconds", "idle", "moves", "evicted", "host GB")
    print(" ".join(f"{head:>{width}}" for head, width in zip(heads, (11, 10, 10, 8, 6, 6, 8, 8), strict=True)))
    for mean in (4_200, 6_900):
        sampled = lengths(mean)
        for admission, pools in (("safe", SAFE), ("estimate", POOLS)):
            found = {}
            for assignment in ("static", "shuffled", "balanced"):
                found[assignment] = one = simulate(sampled, assignment, pools, admission)
                print(
                    f"{sampled.mean():11.0f} {admission:>10} {assignment:>10} {one['seconds']:8.0f} {one['idle_share']:6.1%} "
                    f"{one['moves']:6.0f} {one['evictions']:8.0f} {one['host_gb']:8.0f}",
                    flush=True,
                )
            result[f"{admission}_{mean}"] = {
                "balanced_vs_static": round(found["static"]["seconds"] / found["balanced"]["seconds"], 3),
                "shuffled_vs_static": round(found["static"]["seconds"] / found["shuffled"]["seconds"], 3),
                "recomputed_tokens": found["balanced"]["recomputed_tokens"],
            }
    result["balanced_vs_static"] = min(value["balanced_vs_static"] for value in result.values())
    result["recomputed_tokens"] = max(value["recomputed_tokens"] for value in result.values() if isinstance(value, dict))
    print(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    cli.run(main)
