"""The engine's host side: trajectories, admission, one thread that drives the device.

Agents (coroutines) open slots, ask for tokens, append observations and close. Between two chunks the engine looks at what they
want, decides who gets which slot (`scheduler.py`), writes one plan and hands it to the device thread (`device.py`). While the
device runs, the event loop is free for tools. Ids in, ids out.

A trajectory keeps its token ids here, and of its cache only the length; so its slot can be taken away and given back, or exchanged
for a longer one, between any two plans, and nothing is computed twice.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import time
import types
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rstar_jax.config import ModelConfig, RolloutConfig
from rstar_jax.model import lora, qwen
from rstar_jax.model.linear import transpose_kernels
from rstar_jax.model.sharding import ROLLOUT_RULES, constrain
from rstar_jax.rollout.device import Content, Counters, Device, Extension, Parked, Plan, Round
from rstar_jax.rollout.scheduler import Place, Pool, Request, Scheduler
from rstar_jax.types import Finish, Sampled, SampleKey, Sampling, SlotSpan, UserError


@dataclasses.dataclass
class _Family:
    """Trajectories of one prompt: those that wait for a slot, those whose slot begins with it, and a slot that still does although
    nobody holds it."""

    waiting: dict[EngineSlot, None] = dataclasses.field(default_factory=dict)
    holders: dict[EngineSlot, None] = dataclasses.field(default_factory=dict)
    residue: tuple[Place, EngineSlot] | None = None  # and who left it


class EngineSlot:
    """One trajectory's place in the engine (see `types.Slot`)."""

    def __init__(self, engine: SlotEngine, prompt: list[int], key: SampleKey, sampling: Sampling, longest: int):
        self.key = key
        self.sampling = sampling
        self.ids = list(prompt)  # of the trajectory, the not yet cached last token included
        self.prompt = tuple(prompt)
        self.open = True
        self.fed = 0  # tokens in the cache once the device has done all that was planned
        self.place: Place | None = None
        self.parked: Parked | None = None
        self.request = Request(len(prompt), longest, self)
        self._engine = engine
        self._future: asyncio.Future[Sampled] | None = None
        self._stop: tuple[str, ...] = ()
        self._turn = 0
        self._begin = len(prompt)  # where the turn begins
        self._wanted = 0  # tokens that the turn may still take
        self._granted = 0  # of these, what the device has been told of and has not used
        self._logps: list[float] = []
        self._experts: list[np.ndarray] = []
        self.idle_since = 0.0

    @property
    def length(self) -> int:
        """Tokens of the trajectory."""
        return len(self.ids)

    @property
    def sampling_now(self) -> bool:
        """Whether the device is at work on its turn."""
        return self._granted > 0

    @property
    def turn(self) -> int:
        return self._turn

    async def generate(self, max_new_tokens: int, stop: Sequence[str] = ()) -> Sampled:
        """Sample until a stop id, until the turn's text holds one of `stop`, or `max_new_tokens` tokens."""
        self._check(max_new_tokens)
        if stop and self._engine.decode_text is None:
            raise ValueError("stop strings need an engine that was made with decode_text")
        self._future = asyncio.get_running_loop().create_future()
        self._stop, self._turn, self._begin, self._logps = tuple(stop), self._turn + 1, len(self.ids), []
        self._wanted = max_new_tokens
        self._engine._touch(self, "sample")
        return await self._future

    async def append(self, ids: Sequence[int]) -> None:
        """Append observed ids; they are written before the slot's next turn."""
        if not len(ids):
            return
        self._check(len(ids))
        self.ids += [int(i) for i in ids]
        self._engine._touch(self, "tool")

    def experts(self) -> np.ndarray | None:
        """int16 [n, L, k]: what the first n tokens were routed to, which are all that have been fed (the last one has not)."""
        return np.concatenate(self._experts) if self._experts else None

    def close(self) -> None:
        """Give the slot back; harmless when it is closed already."""
        if self.open:
            self.open = False
            self._engine._release(self)

    def _check(self, more: int) -> None:
        if not self.open:
            raise ValueError("the slot is closed")
        if more < 1:
            raise ValueError(f"at least one token must be asked for, not {more}")
        if self._future is not None and not self._future.done():
            raise ValueError("the slot is sampling")
        longest = self.request.longest
        if len(self.ids) + more > longest:
            raise ValueError(f"{len(self.ids)} tokens and {more} more exceed the {longest} that the slot was opened for")

    def _receive(self, ids: list[int], logps: list[float], version: int) -> bool:
        """Tokens of the turn. True when the turn has ended before the device knows."""
        self.ids += ids
        self._logps += logps
        self.fed += len(ids)
        self._wanted -= len(ids)
        self._granted -= len(ids)
        cut = self._stop_place(len(ids))
        if cut is not None:
            surplus = len(self.ids) - cut
            if surplus:
                self._logps = self._logps[:-surplus]
                self.fed -= surplus
                if self._experts:
                    self._experts = [np.concatenate(self._experts)[: self.fed]]
                self._engine.counters.discarded_tokens += surplus
                self._engine.counters.sampled_tokens -= surplus
                del self.ids[cut:]
            early = surplus > 0 or self._granted > 0
            self._finish(Finish.STOP, version)
            return early
        if self.ids[-1] in self._engine.stop_ids:
            self._finish(Finish.STOP, version)
        elif self._wanted == 0:
            self._finish(Finish.LENGTH, version)
        return False

    def _stop_place(self, new: int) -> int | None:
        """Tokens of the trajectory up to the first at which the turn's text holds a stop string; None without."""
        if not self._stop:
            return None
        decode = self._engine.decode_text
        assert decode is not None

        def holds(end: int) -> bool:
            text = decode(self.ids[self._begin : end])
            return any(stop in text for stop in self._stop)

        if not holds(len(self.ids)):
            return None
        return next(end for end in range(len(self.ids) - new + 1, len(self.ids) + 1) if holds(end))

    def _finish(self, finish: Finish, version: int) -> None:
        self._wanted = self._granted = 0
        future, self._future = self._future, None
        if future is not None and not future.done():  # done: the agent was cancelled meanwhile
            future.set_result(Sampled(tuple(self.ids[self._begin :]), tuple(self._logps), finish, version))


_Sampling = dict[Place, tuple[EngineSlot, int]]
"""Who samples where, and in which of its turns."""


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
        self.timeline: list[SlotSpan] | None = None  # a list: what slots do is written there
        self._rollout = rollout
        pools = pools_of(rollout, capacity)
        parts = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
        for pool in pools:
            if pool.slots % parts:
                raise UserError(f"a pool of {pool.slots} slots must be a multiple of the {parts} devices on mesh axes data and fsdp")
        self._scheduler = Scheduler(pools, rollout.admission, rollout.chunk)
        self._programs = Device(model, rollout, self._scheduler.pools, self.stop_ids, mesh)
        self._loaded = False
        self._slots: dict[EngineSlot, None] = {}
        self._dirty: dict[EngineSlot, None] = {}
        self._families: dict[tuple[int, ...], _Family] = {}
        self._opened: dict[EngineSlot, asyncio.Future[EngineSlot]] = {}
        self._sampling: _Sampling = {}
        self._halted: set[Place] = set()
        self._rewound: dict[EngineSlot, None] = {}
        self._since: dict[EngineSlot, tuple[str, float, Place]] = {}
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
        return self._scheduler

    @property
    def free_tokens(self) -> int:
        """Tokens that its free slots can hold, those that are spoken for left out."""
        return self._scheduler.free_tokens - sum(map(self._scheduler.need, self.expected))

    def fits(self, request: Request) -> bool:
        """Whether it would get a slot at once, after all that wait and all that have been sent here."""
        spoken_for = self._scheduler.waiting + len(self.expected)
        return self._scheduler.free_slots > spoken_for and self._scheduler.fits(request)

    # --- the agents' side ---------------------------------------------------------------------------------------------

    def load(self, params: qwen.Params, version: int) -> None:
        """Take new weights (rollout form); every cache dies with the old ones. No slot may be open."""
        if self._slots:
            raise ValueError(f"{len(self._slots)} slots are open; weights change between trajectories only")
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
        future: asyncio.Future[EngineSlot] = asyncio.get_running_loop().create_future()
        self._opened[slot] = future
        self._families.setdefault(slot.prompt, _Family()).waiting[slot] = None
        self._scheduler.submit(slot.request)
        self._wake.set()
        try:
            return await future
        except asyncio.CancelledError:
            slot.close()
            raise

    def _alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the engine has failed") from self._failure
        if self._driver is None:
            raise RuntimeError("the engine is not running: use `async with engine:`")

    def _touch(self, slot: EngineSlot, what: str) -> None:
        """The slot has work for the next plan."""
        self._alive()
        self._dirty[slot] = None
        self._mark(slot, what)
        self._wake.set()

    def _release(self, slot: EngineSlot) -> None:
        self._mark(slot, "")
        self._dirty.pop(slot, None)
        self._rewound.pop(slot, None)
        self._opened.pop(slot, None)
        self._scheduler.withdraw(slot.request)
        if slot in self._slots:
            del self._slots[slot]
            self._scheduler.ended(len(slot.ids))
        if slot.place is not None:
            if self._sampling.pop(slot.place, None) is not None:
                self._halted.add(slot.place)
            self._vacate(slot)
        family = self._families.get(slot.prompt)
        if family is not None:
            family.waiting.pop(slot, None)
            self._forget(slot.prompt, family)
        slot.parked = None
        self._wake.set()
        if self.on_free is not None:
            self.on_free()

    # --- planning -----------------------------------------------------------------------------------------------------

    def _vacate(self, slot: EngineSlot) -> None:
        """The trajectory no longer has its slot. If it was the last to hold the prompt of others that wait, one of them gets it."""
        place, slot.place = slot.place, None
        assert place is not None
        family = self._families[slot.prompt]
        was_holder = family.holders.pop(slot, False) is None
        if was_holder and not family.holders and family.waiting and family.residue is None:
            family.residue = (place, slot)
        else:
            self._scheduler.release(place)
        self._forget(slot.prompt, family)

    def _forget(self, prompt: tuple[int, ...], family: _Family) -> None:
        if not family.waiting and family.residue is not None:
            self._scheduler.release(family.residue[0])
            family.residue = None
        if not family.waiting and not family.holders and self._families.get(prompt) is family:
            del self._families[prompt]

    def _content(self, slot: EngineSlot) -> Content:
        assert slot.place is not None
        return Content(slot.place, slot.fed, slot.ids[slot.fed], slot.key, slot.sampling, slot)

    def _place(self) -> Plan:
        """The first half of a plan: who is in which slot. Decides, and assumes that it is done."""
        plan = Plan()
        for slot in self._rewound:
            if slot.place is not None:
                plan.rewinds.append((slot.place, slot.fed, slot.ids[-1]))
        self._rewound.clear()
        self._make_room(plan)
        self._evict_idle(plan)
        self._admit(plan)
        return plan

    def _complete(self, plan: Plan, in_flight: int) -> Plan:
        """The second half: what those in slots do. `in_flight` chunks have not been looked at."""
        self._work(plan)
        for place, (slot, _) in self._sampling.items():
            most = min(len(slot.ids) + (in_flight + 1) * self._rollout.chunk, self._scheduler.length(place))
            plan.sampling[place] = most
        pools = {place.pool for place in plan.sampling}
        for place in [place for place in self._halted if place.pool in pools]:
            plan.start.setdefault(place, -1)
            self._halted.remove(place)
        return plan

    def _make_room(self, plan: Plan) -> None:
        """Trajectories that have outgrown their slot get a longer one, or leave for the host until there is one; those that are
        there ask for a slot when they have work."""
        for slot in self._dirty:
            slot.request.length = len(slot.ids)
            if slot.place is None:
                if slot.parked is not None and not slot.request.begun:
                    self._ask_again(slot)
                continue
            need = self._room(slot)
            if need <= self._scheduler.length(slot.place):
                continue
            place = self._scheduler.claim(max(need, self._scheduler.need(slot.request)))
            if place is None:
                self._evict(slot, plan)
                self._ask_again(slot)
                continue
            old, family = slot.place, self._families[slot.prompt]
            holder = slot in family.holders
            self._vacate(slot)
            slot.place = place
            if holder:
                self._families.setdefault(slot.prompt, family).holders[slot] = None
            plan.moves.append((old, self._content(slot)))

    def _room(self, slot: EngineSlot) -> int:
        """Tokens that its slot has to hold for the work that is due."""
        return len(slot.ids) + (slot._wanted > 0)

    def _ask_again(self, slot: EngineSlot) -> None:
        slot.request.begun = True
        self._scheduler.submit(slot.request)

    def _evict(self, slot: EngineSlot, plan: Plan) -> None:
        assert slot.place is not None
        slot.parked = Parked()
        plan.evictions.append((slot.place, slot.fed, slot.parked))
        self._vacate(slot)
        self._mark(slot, "")

    def _evict_idle(self, plan: Plan) -> None:
        """Trajectories that have waited long for their tools give way to those that have no slot."""
        after = self._rollout.evict_after_s
        lacking = self._scheduler.waiting - self._scheduler.free_slots
        if after < 0 or lacking <= 0:
            return
        need = min(self._scheduler.need(request) for request in self._scheduler.requests())
        until = time.monotonic() - after
        idle = [
            slot
            for slot in self._slots
            if slot.place is not None
            and not slot.sampling_now
            and slot not in self._dirty
            and slot.idle_since <= until
            and self._scheduler.length(slot.place) >= need
        ]
        for slot in sorted(idle, key=lambda slot: slot.idle_since)[:lacking]:
            self._evict(slot, plan)

    def _admit(self, plan: Plan) -> None:
        fresh: list[EngineSlot] = []
        for family in [f for f in self._families.values() if f.residue is not None]:
            assert family.residue is not None
            slot, (place, heir_of) = next(iter(family.waiting)), family.residue
            family.residue = None
            if self._scheduler.length(place) < self._scheduler.need(slot.request):
                self._scheduler.release(place)
                continue
            self._scheduler.withdraw(slot.request)
            slot.place = place
            self._settle(slot)
            slot.fed = len(slot.prompt) - 1
            plan.forks.append((place, heir_of, self._content(slot)))
            family.holders[slot] = None
        for request, place in self._scheduler.admit():
            slot = request.owner
            slot.place = place
            if slot.parked is not None:
                request.begun = False
                plan.restores.append((slot.parked, self._content(slot)))
                slot.parked = None
                self._families.setdefault(slot.prompt, _Family()).holders[slot] = None
                self._mark(slot, "idle")
            else:
                self._settle(slot)
                fresh.append(slot)
        new: dict[tuple[int, ...], EngineSlot] = {}  # the first of each prompt that nobody holds yet
        late: dict[EngineSlot, None] = {}
        for slot in fresh:
            family = self._families[slot.prompt]
            source = next(iter(family.holders), None)
            leader = new.get(slot.prompt)
            head = self._programs.head_length(slot.prompt)
            if source is not None and leader is None:
                assert source.place is not None
                slot.fed = len(slot.prompt) - 1
                plan.forks.append((source.place, source, self._content(slot)))
            elif leader is None or head == len(slot.prompt) - 1:
                new.setdefault(slot.prompt, slot)
                slot.fed = head
                plan.prompts.setdefault(slot.prompt, []).append(self._content(slot))
            else:
                late[slot] = None
        for prompt, leader in new.items():
            assert leader.place is not None
            if leader.fed < len(prompt) - 1:
                plan.prompt_extensions.append(Extension(leader.place, leader.fed, list(prompt[leader.fed :]), leader))
                leader.fed = len(prompt) - 1
        for slot in late:
            leader = new[slot.prompt]
            assert leader.place is not None
            slot.fed = len(slot.prompt) - 1
            plan.late_forks.append((leader.place, leader, self._content(slot)))
        for slot in fresh:
            self._families[slot.prompt].holders[slot] = None

    def _settle(self, slot: EngineSlot) -> None:
        """A trajectory has its first slot: its agent goes on."""
        self._families[slot.prompt].waiting.pop(slot, None)
        self._slots[slot] = None
        slot.idle_since = time.monotonic()
        self.counters.trajectories += 1
        self._mark(slot, "idle")
        future = self._opened.pop(slot)
        if not future.done():
            future.set_result(slot)

    def _work(self, plan: Plan) -> None:
        """Extensions and turns of all that have a slot."""
        for slot in list(self._dirty):
            place = slot.place
            if place is None or self._room(slot) > self._scheduler.length(place):
                continue  # the next plan finds it a slot
            del self._dirty[slot]
            if slot.fed < len(slot.ids) - 1:
                plan.extensions.append(Extension(place, slot.fed, slot.ids[slot.fed :], slot))
                slot.fed = len(slot.ids) - 1
            if slot._wanted and not slot.sampling_now:
                slot._granted = min(slot._wanted, self._scheduler.length(place) - len(slot.ids))
                plan.start[place] = slot._granted
                self._sampling[place] = (slot, slot.turn)
                self._mark(slot, "sample")

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
        for slot in [*self._slots, *self._opened]:
            slot.close()  # what still samples is halted by the next session's first plan

    async def _drive(self) -> None:
        try:
            await self._rounds()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failure = error
            for future in (*self._opened.values(), *(slot._future for slot in self._slots)):
                if future is not None and not future.done():
                    future.set_exception(RuntimeError("the engine has failed"))
                    future.exception()  # whoever awaits it sees it; nobody may be left who does
            raise

    async def _rounds(self) -> None:
        loop = asyncio.get_running_loop()
        in_flight: collections.deque[tuple[Round, _Sampling]] = collections.deque()
        while True:
            await asyncio.sleep(0)  # let everything that is ready join this round
            self._wake.clear()
            plan = self._place()
            if plan:
                await asyncio.sleep(0)  # let those who have got a slot ask for their first tokens
            self._complete(plan, len(in_flight))
            if plan or self._sampling:
                sampling = dict(self._sampling)
                done = await loop.run_in_executor(self._device, self._programs.execute, plan)
                in_flight.append((done, sampling))
            elif not in_flight:
                await self._sleep()
                continue
            ahead_allowed = self._rollout.lag and self._sampling and not self._scheduler.waiting and not self._dirty
            if len(in_flight) > (1 if ahead_allowed else 0):
                done, sampling = in_flight.popleft()
                self._deliver(await loop.run_in_executor(self._device, self._programs.read, done), sampling)

    async def _sleep(self) -> None:
        """Until an agent wants something, or somebody who waits for a slot may get that of an idle one."""
        after = self._rollout.evict_after_s
        idle = [slot.idle_since for slot in self._slots if slot.place is not None]
        if self._scheduler.waiting and idle and after >= 0:
            timeout = max(0.01, min(idle) + after - time.monotonic())
            try:
                await asyncio.wait_for(self._wake.wait(), timeout)
            except TimeoutError:
                return
        else:
            await self._wake.wait()

    def _deliver(self, done: Round, sampling: _Sampling) -> None:
        for owner, what, *count in done.experts:
            if count:
                owner._experts.append(np.concatenate(what._experts)[: count[0]])
            elif what.shape[0]:
                owner._experts.append(what)
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
                if self._sampling.get(place) != (slot, turn):
                    self.counters.discarded_tokens += len(ids)  # closed, or stopped by a string, while the chunk ran
                    continue
                self.counters.sampled_tokens += len(ids)
                if chunk.experts_nslk is not None:
                    slot._experts.append(np.asarray(chunk.experts_nslk)[mask, column])
                if slot._receive(ids, logps[mask, column].tolist(), self.version):
                    self._rewound[slot] = None
                if not slot.sampling_now:
                    del self._sampling[place]
                    slot.idle_since = time.monotonic()
                    if slot._wanted:  # the slot is full, the turn is not
                        self._dirty[slot] = None
                    else:
                        self._mark(slot, "tool")

    # --- what slots did -----------------------------------------------------------------------------------------------

    def _mark(self, slot: EngineSlot, what: str) -> None:
        """From now on the slot does this; "" ends it."""
        if self.timeline is None:
            return
        now = time.monotonic()
        was = self._since.pop(slot, None)
        if was is not None:
            before, start, place = was
            self.timeline.append(SlotSpan(place.pool, place.index, before, slot.key.prompt, slot.key.sample, start, now))
        if what and slot.place is not None:
            self._since[slot] = (what, now, slot.place)


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


@functools.partial(jax.jit, static_argnames=("model", "mesh", "transposed"))
def _rollout_params(params: qwen.Params, model: ModelConfig, mesh: Mesh | None, transposed: bool) -> qwen.Params:
    params = lora.merge(params, model)
    if mesh is not None and mesh.size > 1:
        axes = qwen.param_axes(model)
        params = jax.tree.map(lambda p, names: constrain(p, mesh, names, ROLLOUT_RULES), params, axes)
    # copies even of what needs no cast: the trainer gives its own buffers away while these are still sampled from
    params = jax.tree.map(lambda p: jnp.copy(p.astype(jnp.dtype(model.dtype))), qwen.unstack_layers(params))
    return {**params, "layers": transpose_kernels(params["layers"])} if transposed else params


def rollout_params(params: qwen.Params, model: ModelConfig, mesh: Mesh | None = None, layout: str = "auto") -> qwen.Params:
    """The engine's copy of trained weights, made by one jitted reshard: adapters merged, layers unstacked, in the compute dtype,
    gathered over fsdp and kept apart over tensor. `layout` is `rollout.weight_layout`."""
    transposed = layout == "out_in" or (layout == "auto" and jax.default_backend() == "cpu")
    return _rollout_params(params, model, mesh, transposed)
