"""Who gets which slot: admission by free cache, without knowing lengths ahead. Plain Python, no device and no clock, so that the
engine and the simulator (`experiments/benchmarks/rollout_simulation.py`) run the same code.

An engine has pools of slots; all slots of a pool hold the same number of tokens. A trajectory needs a slot that is long enough:

- admission `safe`: for the longest that it may become, so that none ever has to move (rStar2-Agent, section 3.2, reserves so too);
- admission `estimate`: for the mean length of the trajectories that have ended, and at least a quantum more than it holds. One
  that outgrows its slot moves to a longer one, or waits for one in the host's memory, before all that have not begun.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Pool:
    """`slots` places for trajectories of up to `length` tokens each."""

    slots: int
    length: int


@dataclasses.dataclass(frozen=True)
class Place:
    """A slot: its pool's number and its own."""

    pool: int
    index: int


@dataclasses.dataclass(eq=False)
class Request:
    """A trajectory that waits for a slot. It holds `length` tokens and may come to hold `longest`; `owner` is the caller's."""

    length: int
    longest: int
    owner: Any = None
    begun: bool = False


class Scheduler:
    """The slots of one engine and the trajectories that wait for them: those that have begun first, else first come, first served.
    A request that fits no free slot does not hold up later ones that do."""

    def __init__(self, pools: Sequence[Pool], admission: str = "safe", quantum: int = 0):
        self.pools = tuple(sorted(pools, key=lambda pool: pool.length))
        self._admission = admission
        self._quantum = quantum
        self._free = [list(range(pool.slots - 1, -1, -1)) for pool in self.pools]
        self._waiting: collections.deque[Request] = collections.deque()
        self._begun: collections.deque[Request] = collections.deque()
        self._ended = 0
        self._total = 0

    def length(self, place: Place) -> int:
        """Tokens that the slot can hold."""
        return self.pools[place.pool].length

    @property
    def free_tokens(self) -> int:
        """Tokens that the free slots can hold."""
        return sum(len(free) * pool.length for free, pool in zip(self._free, self.pools, strict=True))

    @property
    def free_slots(self) -> int:
        return sum(map(len, self._free))

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting) + len(self._begun)

    def requests(self) -> Iterator[Request]:
        """In the order in which they are served."""
        yield from self._begun
        yield from self._waiting

    def need(self, request: Request) -> int:
        """Tokens that a slot for this request has to hold."""
        if self._admission == "safe":
            return request.longest
        mean = -(-self._total // self._ended) if self._ended else 0
        return min(request.longest, max(mean, request.length + self._quantum))

    def submit(self, request: Request) -> None:
        """Let it wait. A `begun` one goes before all that have not begun."""
        (self._begun if request.begun else self._waiting).append(request)

    def withdraw(self, request: Request) -> None:
        """It no longer waits; harmless when it does not."""
        for queue in (self._begun, self._waiting):
            if request in queue:
                queue.remove(request)

    def fits(self, request: Request) -> bool:
        """Whether a free slot would take it now."""
        return self._find(self.need(request)) is not None

    def admit(self) -> list[tuple[Request, Place]]:
        """Slots for as many of the waiting as possible; they no longer wait."""
        placed = []
        for queue in (self._begun, self._waiting):
            too_long: int | None = None  # needs from here on have been refused in this round
            left: collections.deque[Request] = collections.deque()
            while queue and self.free_slots:
                request = queue.popleft()
                need = self.need(request)
                place = None if too_long is not None and need >= too_long else self.claim(need)
                if place is None:
                    too_long = need if too_long is None else min(need, too_long)
                    left.append(request)
                else:
                    placed.append((request, place))
            queue.extendleft(reversed(left))
        return placed

    def claim(self, need: int) -> Place | None:
        """A free slot of at least `need` tokens, of the shortest such pool that has one; None without."""
        pool = self._find(need)
        return None if pool is None else Place(pool, self._free[pool].pop())

    def claim_place(self, place: Place) -> None:
        """Take this very slot, which must be free."""
        self._free[place.pool].remove(place.index)

    def release(self, place: Place) -> None:
        """The slot is free."""
        self._free[place.pool].append(place.index)

    def ended(self, length: int) -> None:
        """A trajectory has ended with this many tokens: the estimate learns from it."""
        self._ended += 1
        self._total += length

    def _find(self, need: int) -> int | None:
        for number, (pool, free) in enumerate(zip(self.pools, self._free, strict=True)):
            if pool.length >= need and free:
                return number
        return None


class Dispatcher:
    """Spreads trajectories over engines: each goes, when its turn comes, to the engine with the most free tokens among those that
    can take it now; while none can, it waits. Nothing is assigned ahead, so no engine idles while others have a queue
    (rStar2-Agent, section 3.2). `engines` are the schedulers, or whatever has their `fits` and `free_tokens`."""

    def __init__(self, engines: Sequence[Any]):
        self._engines = engines
        self._waiting: collections.deque[Request] = collections.deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, requests: Iterable[Request]) -> None:
        self._waiting.extend(requests)

    def assign(self, give: Callable[[Request, int], None]) -> None:
        """Call `give(request, engine)` for each that some engine can take now, first come, first served."""
        while self._waiting:
            request = self._waiting[0]
            able = [i for i, engine in enumerate(self._engines) if engine.fits(request)]
            if not able:
                return
            self._waiting.popleft()
            give(request, max(able, key=lambda i: (self._engines[i].free_tokens, -i)))
