"""One trajectory in the engine: its token ids, how much of it is cached and where, and the turn that it samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from rstar_jax.rollout.device import Counters, Parked
from rstar_jax.rollout.scheduler import Place, Request
from rstar_jax.types import Finish, Sampled, SampleKey, Sampling


class Owner(Protocol):
    """What a trajectory needs of its engine."""

    stop_ids: tuple[int, ...]
    decode_text: Callable[[Sequence[int]], str] | None

    @property
    def counters(self) -> Counters: ...

    def touch(self, slot: EngineSlot, what: str) -> None:
        """The trajectory has work: from now on it waits for a sample, or has got its tool's answer."""
        ...

    def release(self, slot: EngineSlot) -> None:
        """The trajectory is over."""
        ...


class EngineSlot:
    """One trajectory's place in the engine (see `types.Slot`)."""

    def __init__(self, engine: Owner, prompt: list[int], key: SampleKey, sampling: Sampling, longest: int):
        self.placed: asyncio.Future[EngineSlot] = asyncio.get_running_loop().create_future()  # done when it has had a slot
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
        self.turn = 0
        self._begin = len(prompt)  # where the turn begins
        self.wanted = 0  # tokens that the turn may still take
        self.granted = 0  # of these, what the device has been told of and has not used
        self._logps: list[float] = []
        self.routed: list[np.ndarray] = []  # experts of the fed tokens, piece by piece
        self.idle_since = 0.0

    @property
    def sampling_now(self) -> bool:
        """Whether the device is at work on its turn."""
        return self.granted > 0

    async def generate(self, max_new_tokens: int, stop: Sequence[str] = ()) -> Sampled:
        """Sample until a stop id, until the turn's text holds one of `stop`, or `max_new_tokens` tokens."""
        self._check(max_new_tokens)
        if stop and self._engine.decode_text is None:
            raise ValueError("stop strings need an engine that was made with decode_text")
        self._future = asyncio.get_running_loop().create_future()
        self._stop, self.turn, self._begin, self._logps = tuple(stop), self.turn + 1, len(self.ids), []
        self.wanted = max_new_tokens
        self._engine.touch(self, "sample")
        return await self._future

    async def append(self, ids: Sequence[int]) -> None:
        """Append observed ids; they are written before the slot's next turn."""
        if not len(ids):
            return
        self._check(len(ids))
        self.ids += [int(i) for i in ids]
        self._engine.touch(self, "tool")

    def experts(self) -> np.ndarray | None:
        """int16 [n, L, k]: what the first n tokens were routed to, which are all that have been fed (the last one has not)."""
        return np.concatenate(self.routed) if self.routed else None

    def close(self) -> None:
        """Give the slot back; harmless when it is closed already."""
        if self.open:
            self.open = False
            self._engine.release(self)

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

    def receive(self, ids: list[int], logps: list[float], version: int) -> bool:
        """Tokens of the turn. True when the turn has ended before the device knows."""
        self.ids += ids
        self._logps += logps
        self.fed += len(ids)
        self.wanted -= len(ids)
        self.granted -= len(ids)
        cut = self._stop_place(len(ids))
        if cut is not None:
            surplus = len(self.ids) - cut
            if surplus:
                self._logps = self._logps[:-surplus]
                self.fed -= surplus
                if self.routed:
                    self.routed = [np.concatenate(self.routed)[: self.fed]]
                self._engine.counters.discarded_tokens += surplus
                self._engine.counters.sampled_tokens -= surplus
                del self.ids[cut:]
            early = surplus > 0 or self.granted > 0
            self._finish(Finish.STOP, version)
            return early
        if self.ids[-1] in self._engine.stop_ids:
            self._finish(Finish.STOP, version)
        elif self.wanted == 0:
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

    def fail(self, error: Exception) -> None:
        """Whoever waits for this trajectory gets the error."""
        for future in (self.placed, self._future):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be left who waits

    def _finish(self, finish: Finish, version: int) -> None:
        self.wanted = self.granted = 0
        future, self._future = self._future, None
        if future is not None and not future.done():  # done: the agent was cancelled meanwhile
            future.set_result(Sampled(tuple(self.ids[self._begin :]), tuple(self._logps), finish, version))
