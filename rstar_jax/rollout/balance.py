"""Several engines as one: each rollout goes, when its turn comes, to the one with the most free cache (rStar2-Agent, section 3.2)."""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import Sequence

from rstar_jax.rollout.engine import SlotEngine
from rstar_jax.rollout.scheduler import Dispatcher, Request
from rstar_jax.rollout.slot import EngineSlot
from rstar_jax.types import SampleKey, Sampling


class BalancedEngines:
    """A `types.Engine` over engines of one process, such as one for each device. `async with` runs them all.

    A rollout is assigned when an engine has a slot for it, not before; until then it waits here, first come, first served. Which one it
    gets changes nothing that it samples.
    """

    def __init__(self, engines: Sequence[SlotEngine]):
        self.engines = tuple(engines)
        self._dispatcher = Dispatcher(self.engines)
        self._stack: contextlib.AsyncExitStack | None = None
        for engine in self.engines:
            engine.on_free = self._assign

    async def open(self, prompt_ids: Sequence[int], key: SampleKey, sampling: Sampling, longest: int | None = None) -> EngineSlot:
        """See `SlotEngine.open`."""
        capacity = max(engine.capacity for engine in self.engines)
        longest = capacity if longest is None else min(longest, capacity)
        assigned: asyncio.Future[SlotEngine] = asyncio.get_running_loop().create_future()
        request = Request(len(prompt_ids), longest, assigned)
        self._dispatcher.submit([request])
        self._assign()
        try:
            engine = await assigned
        except asyncio.CancelledError:
            if assigned.done() and not assigned.cancelled():
                assigned.result().expected.pop(request, None)
                self._assign()
            raise
        del engine.expected[request]
        return await engine.open(prompt_ids, key, sampling, longest)

    def _assign(self) -> None:
        self._dispatcher.assign(self._give)

    def _give(self, request: Request, number: int) -> None:
        if not request.owner.done():  # done: its agent was cancelled meanwhile
            self.engines[number].expected[request] = None
            request.owner.set_result(self.engines[number])

    async def __aenter__(self) -> BalancedEngines:
        async with contextlib.AsyncExitStack() as stack:
            for engine in self.engines:
                await stack.enter_async_context(engine)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        assert self._stack is not None
        await self._stack.__aexit__(kind, error, trace)
