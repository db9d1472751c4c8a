"""The engine's host side: trajectories, admission, one thread that drives the device.

Agents (coroutines) open slots, ask for tokens, append observations and close. Between two chunks the engine looks at what they
want, decides who gets which slot and writes one plan (`planner.py`), and hands it to the device thread (`device.py`). While the
device runs, the event loop is free for tools. Ids in, ids out.

A trajectory keeps its token ids here, and of its cache only the length; so its slot can be taken away and given back, or exchanged
for a longer one, between any two plans, and nothing is computed twice.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import time
import types
from collections.abc import Callable, Sequence

import numpy as np
from jax.sharding import Mesh

from rstar_jax.config import ModelConfig, RolloutConfig
from rstar_jax.model import qwen
from rstar_jax.model.sharding import ROLLOUT_RULES, parts
from rstar_jax.rollout.device import Counters, Device, Round
from rstar_jax.rollout.planner import Planner
from rstar_jax.rollout.scheduler import Place, Pool, Request, Scheduler
from rstar_jax.rollout.slot import EngineSlot
from rstar_jax.types import SampleKey, Sampling, SlotSpan, UserError


class SlotEngine:
    """Continuous batching over pools of slots (see `types.Engine`).

    `load` gives it weights; `async with engine:` runs its driver. Shapes are fixed at construction, so that nothing compiles
    after `warm_up`. `device` is the one thread that drives the device; `decode_text` is needed for stop strings only.
    """

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        *,
        capacity: int,
        stop_ids: Sequence[int],
        device: concurrent.futures.Executor,
        mesh: Mesh | None = None,
        decode_text: Callable[[Sequence[int]], str] | None = None,
    ):
        self.capacity = capacity
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self.decode_text = decode_text
        self.version = -1
        self.on_free: Callable[[], None] | None = None  # called when a slot may have become free
        self.expected: dict[Request, None] = {}  # trajectories that have been sent here and are not here yet
        self._rollout = rollout
        pools = pools_of(rollout, capacity)
        shards = parts(mesh, "slots", ROLLOUT_RULES)
        for pool in pools:
            if pool.slots % shards:
                raise UserError(f"a pool of {pool.slots} slots must be a multiple of the {shards} devices that slots are spread over")
        self._programs = Device(model, rollout, pools, self.stop_ids, mesh)
        self._planner = Planner(rollout, pools, self._programs.counters, self._programs.head_length)
        self._loaded = False
        self._wake = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._device = device

    @property
    def counters(self) -> Counters:
        return self._programs.counters

    @property
    def scheduler(self) -> Scheduler:
        """What is free and who waits."""
        return self._planner.scheduler

    @property
    def timeline(self) -> list[SlotSpan] | None:
        """Where what slots do is written; None: nowhere."""
        return self._planner.spans

    @timeline.setter
    def timeline(self, spans: list[SlotSpan] | None) -> None:
        self._planner.spans = spans

    def held(self) -> int:
        """How much the engine keeps of trajectories: 0 when all are over."""
        return self._planner.held() + len(self.expected)

    @property
    def free_tokens(self) -> int:
        """Tokens that its free slots can hold, those that are spoken for left out."""
        return self._planner.scheduler.free_tokens - sum(map(self._planner.scheduler.need, self.expected))

    def fits(self, request: Request) -> bool:
        """Whether it would get a slot at once, after all that wait and all that have been sent here."""
        spoken_for = self._planner.scheduler.waiting + len(self.expected)
        return self._planner.scheduler.free_slots > spoken_for and self._planner.scheduler.fits(request)

    # --- the agents' side ---------------------------------------------------------------------------------------------

    def load(self, params: qwen.Params, version: int) -> None:
        """Take new weights (rollout form); every cache dies with the old ones. No slot may be open."""
        if self._planner.open:
            raise ValueError(f"{len(self._planner.open)} slots are open; weights change between trajectories only")
        self.version = version
        self._programs.load(params)
        self._loaded = True

    def share(self, prefix_ids: Sequence[int]) -> None:
        """What prompts begin with, to be prefilled once for all of them (if it has at least `rollout.shared_prefix` tokens). To be
        called before `warm_up`. A prompt that begins otherwise is prefilled whole."""
        self._programs.share(tuple(int(i) for i in prefix_ids))

    def warm_up(self) -> None:
        """Compile every program. Runs on the device thread, after `load`."""
        self._programs.warm_up()

    async def open(self, prompt_ids: Sequence[int], key: SampleKey, sampling: Sampling, longest: int | None = None) -> EngineSlot:
        """Wait for a free slot and place the prompt in it. `longest`: tokens that the trajectory may come to hold (None: the
        capacity). Raises `UserError` for a prompt that leaves no room to answer, and for filters that the engine was not made for."""
        longest = self.capacity if longest is None else min(longest, self.capacity)
        if not 0 < len(prompt_ids) < longest:
            raise UserError(f"a prompt of {len(prompt_ids)} tokens does not fit slots of {longest}; raise rollout.max_prompt_tokens")
        check_filters(sampling, self._rollout.candidates)
        self._alive()
        slot = EngineSlot(self, [int(i) for i in prompt_ids], key, sampling, longest)
        self._planner.submit(slot)
        self._wake.set()
        try:
            return await slot.placed
        except asyncio.CancelledError:
            slot.close()
            raise

    def _alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the engine has failed") from self._failure
        if self._driver is None:
            raise RuntimeError("the engine is not running: use `async with engine:`")

    def touch(self, slot: EngineSlot, what: str) -> None:
        """See `slot.Owner`."""
        self._alive()
        self._planner.touch(slot, what)
        self._wake.set()

    def release(self, slot: EngineSlot) -> None:
        """See `slot.Owner`."""
        self._planner.release(slot)
        self._wake.set()
        if self.on_free is not None:
            self.on_free()

    # --- the driver ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> SlotEngine:
        if not self._loaded:
            raise RuntimeError("the engine has no weights: call load(params, version) first")
        if self._driver is not None:
            raise RuntimeError("the engine is running already")
        self._failure = None
        self._wake = asyncio.Event()
        self._driver = asyncio.create_task(self._drive())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        assert self._driver is not None
        self._driver.cancel()
        await asyncio.gather(self._driver, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(self._device, lambda: None)  # a plan in flight has been carried out
        self._driver = None
        for slot in self._planner.everyone:
            slot.close()  # what still samples is halted by the next session's first plan

    async def _drive(self) -> None:
        try:
            await self._rounds()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failure = error
            for slot in self._planner.everyone:
                slot.fail(RuntimeError("the engine has failed"))
            raise

    async def _rounds(self) -> None:
        loop, planner = asyncio.get_running_loop(), self._planner
        in_flight: collections.deque[tuple[Round, dict[Place, tuple[EngineSlot, int]]]] = collections.deque()
        while True:
            await asyncio.sleep(0)  # let everything that is ready join this round
            self._wake.clear()
            plan = planner.place()
            if plan:
                await asyncio.sleep(0)  # let those who have got a slot ask for their first tokens
            planner.complete(plan, len(in_flight))
            if plan or planner.sampling:
                sampling = dict(planner.sampling)
                done = await loop.run_in_executor(self._device, self._programs.execute, plan)
                in_flight.append((done, sampling))
            elif not in_flight:
                await self._sleep()
                continue
            ahead = self._rollout.lag and planner.sampling and not planner.scheduler.waiting and not planner.busy
            if len(in_flight) > (1 if ahead else 0):
                done, sampling = in_flight.popleft()
                self._deliver(await loop.run_in_executor(self._device, self._programs.read, done), sampling)

    async def _sleep(self) -> None:
        """Until an agent wants something, or somebody who waits for a slot may get that of an idle one."""
        after = self._rollout.evict_after_s
        idle = [slot.idle_since for slot in self._planner.open if slot.place is not None]
        if self._planner.scheduler.waiting and idle and after >= 0:
            timeout = max(0.01, min(idle) + after - time.monotonic())
            try:
                await asyncio.wait_for(self._wake.wait(), timeout)
            except TimeoutError:
                return
        else:
            await self._wake.wait()

    def _deliver(self, done: Round, sampling: dict[Place, tuple[EngineSlot, int]]) -> None:
        for owner, what, *count in done.experts:
            if count:
                owner.routed.append(np.concatenate(what.routed)[: count[0]])
            elif what.shape[0]:
                owner.routed.append(what)
        for pool, (chunk, columns) in done.chunks.items():
            tokens, logps, emitted = map(np.asarray, (chunk.tokens_ns, chunk.logps_ns, chunk.emitted_ns))
            self.counters.device_steps += int(chunk.steps)
            for place, (slot, turn) in sampling.items():
                if place.pool != pool:
                    continue
                column = columns[place.index]
                mask = emitted[:, column]
                ids = tokens[mask, column].tolist()
                if not ids:
                    continue
                if self._planner.sampling.get(place) != (slot, turn):
                    self.counters.discarded_tokens += len(ids)  # closed, or stopped by a string, while the chunk ran
                    continue
                self.counters.sampled_tokens += len(ids)
                if chunk.experts_nslk is not None:
                    slot.routed.append(np.asarray(chunk.experts_nslk)[mask, column])
                rewind = slot.receive(ids, logps[mask, column].tolist(), self.version)
                self._planner.chunk_ended(place, slot, rewind)


def pools_of(rollout: RolloutConfig, capacity: int) -> list[Pool]:
    """`rollout.slots` slots of full length, and the pools of shorter ones. Raises `UserError` for one that is not shorter."""
    for length in rollout.pool_lengths:
        if length >= capacity:
            raise UserError(f"rollout.pool_lengths={rollout.pool_lengths} must be shorter than the full length of {capacity} tokens")
    short = zip(rollout.pool_slots, rollout.pool_lengths, strict=True)
    return [*(Pool(slots, length) for slots, length in short), Pool(rollout.slots, capacity)]


def check_filters(sampling: Sampling, candidates: int) -> None:
    """Raises `UserError` for filters that make no sense or need more candidates than the engine has."""
    if sampling.top_k < 0 or not 0 < sampling.top_p <= 1 or not 0 <= sampling.min_p <= 1:
        raise UserError(f"top_k={sampling.top_k}, top_p={sampling.top_p}, min_p={sampling.min_p}: top_k must not be negative, "
                        "top_p in (0, 1], min_p in [0, 1]")  # fmt: skip
    if sampling.filtered and candidates < max(1, sampling.top_k):
        raise UserError(f"top_k={sampling.top_k}, top_p={sampling.top_p}, min_p={sampling.min_p} need rollout.candidates of at least "
                        f"{max(1, sampling.top_k)}, not {candidates}: filters choose among so many tokens")  # fmt: skip
