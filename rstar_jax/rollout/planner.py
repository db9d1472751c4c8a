"""Which trajectory is in which slot, and what the device does next: the engine's decisions, without device and without waiting.

Everything here runs between two chunks. `place` and `complete` write one plan for the device and assume that it is carried out.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence, Sized

from rstar_jax.config import RolloutConfig
from rstar_jax.rollout.device import Content, Counters, Extension, Parked, Plan
from rstar_jax.rollout.scheduler import Place, Pool, Scheduler
from rstar_jax.rollout.slot import EngineSlot
from rstar_jax.types import SlotSpan


@dataclasses.dataclass
class _Family:
    """Trajectories of one prompt: those that wait for a slot, those whose slot begins with it, and a slot that still does although
    nobody holds it."""

    waiting: dict[EngineSlot, None] = dataclasses.field(default_factory=dict)
    holders: dict[EngineSlot, None] = dataclasses.field(default_factory=dict)
    residue: tuple[Place, EngineSlot] | None = None  # and who left it


class Planner:
    """The trajectories of one engine: who waits, who is in which slot, who has work.

    `head_length(prompt)`: tokens of a prompt that a prefill places; the rest extends the slot.
    """

    def __init__(self, rollout: RolloutConfig, pools: Sequence[Pool], counters: Counters, head_length: Callable[[Sequence[int]], int]):
        self.scheduler = Scheduler(pools, rollout.admission, rollout.chunk)
        self.open: dict[EngineSlot, None] = {}  # have had a slot and are not over
        self.sampling: dict[Place, tuple[EngineSlot, int]] = {}  # who samples where, and in which of its turns
        self.spans: list[SlotSpan] | None = None  # a list: what slots do is written there
        self._rollout = rollout
        self._counters = counters
        self._head_length = head_length
        self._waiting: dict[EngineSlot, None] = {}  # have not had a slot
        self._dirty: dict[EngineSlot, None] = {}
        self._families: dict[tuple[int, ...], _Family] = {}
        self._halted: set[Place] = set()
        self._rewound: dict[EngineSlot, None] = {}
        self._since: dict[EngineSlot, tuple[str, float, Place]] = {}

    @property
    def everyone(self) -> list[EngineSlot]:
        """All trajectories that are not over."""
        return [*self.open, *self._waiting]

    @property
    def busy(self) -> bool:
        """Whether a trajectory has work that no plan has."""
        return bool(self._dirty)

    def held(self) -> int:
        """How much is kept of trajectories, which is nothing when all are over."""
        tables: list[Sized] = [self.open, self.sampling, self._waiting, self._dirty, self._families, self._rewound, self._since]
        taken = sum(pool.slots for pool in self.scheduler.pools) - self.scheduler.free_slots
        return sum(map(len, tables)) + taken + self.scheduler.waiting

    # --- what agents want ---------------------------------------------------------------------------------------------

    def submit(self, slot: EngineSlot) -> None:
        """A new trajectory waits for its first slot."""
        self._waiting[slot] = None
        self._families.setdefault(slot.prompt, _Family()).waiting[slot] = None
        self.scheduler.submit(slot.request)

    def touch(self, slot: EngineSlot, what: str) -> None:
        """The trajectory has work for the next plan."""
        self._dirty[slot] = None
        self._mark(slot, what)

    def release(self, slot: EngineSlot) -> None:
        """The trajectory is over; what it had is free."""
        self._mark(slot, "")
        self._waiting.pop(slot, None)
        self._dirty.pop(slot, None)
        self._rewound.pop(slot, None)
        self.scheduler.withdraw(slot.request)
        if slot in self.open:
            del self.open[slot]
            self.scheduler.ended(len(slot.ids))
            self._counters.cached_tokens += slot.fed
        if slot.place is not None:
            if self.sampling.pop(slot.place, None) is not None:
                self._halted.add(slot.place)
            self._vacate(slot)
        family = self._families.get(slot.prompt)
        if family is not None:
            family.waiting.pop(slot, None)
            self._forget(slot.prompt, family)
        slot.parked = None

    def chunk_ended(self, place: Place, slot: EngineSlot, rewind: bool) -> None:
        """The tokens of a chunk have come. `rewind`: the turn has ended before the device knows."""
        if rewind:
            self._rewound[slot] = None
        if slot.sampling_now:
            return
        del self.sampling[place]
        slot.idle_since = time.monotonic()
        if slot.wanted:  # the slot is full, the turn is not
            self._dirty[slot] = None
        else:
            self._mark(slot, "tool")

    # --- slots --------------------------------------------------------------------------------------------------------

    def _vacate(self, slot: EngineSlot) -> None:
        """The trajectory no longer has its slot. If it was the last to hold the prompt of others that wait, one of them gets it."""
        place, slot.place = slot.place, None
        assert place is not None
        family = self._families[slot.prompt]
        was_holder = family.holders.pop(slot, False) is None
        if was_holder and not family.holders and family.waiting and family.residue is None:
            family.residue = (place, slot)
        else:
            self.scheduler.release(place)
        self._forget(slot.prompt, family)

    def _forget(self, prompt: tuple[int, ...], family: _Family) -> None:
        if not family.waiting and family.residue is not None:
            self.scheduler.release(family.residue[0])
            family.residue = None
        if not family.waiting and not family.holders and self._families.get(prompt) is family:
            del self._families[prompt]

    def _content(self, slot: EngineSlot) -> Content:
        assert slot.place is not None
        return Content(slot.place, slot.fed, slot.ids[slot.fed], slot.key, slot.sampling, slot)

    def place(self) -> Plan:
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

    def complete(self, plan: Plan, in_flight: int) -> Plan:
        """The second half: what those in slots do. `in_flight` chunks have not been looked at."""
        self._work(plan)
        for place, (slot, _) in self.sampling.items():
            most = min(len(slot.ids) + (in_flight + 1) * self._rollout.chunk, self.scheduler.length(place))
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
            if need <= self.scheduler.length(slot.place):
                continue
            place = self.scheduler.claim(max(need, self.scheduler.need(slot.request)))
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
        return len(slot.ids) + (slot.wanted > 0)

    def _ask_again(self, slot: EngineSlot) -> None:
        slot.request.begun = True
        self.scheduler.submit(slot.request)

    def _evict(self, slot: EngineSlot, plan: Plan) -> None:
        assert slot.place is not None
        slot.parked = Parked()
        plan.evictions.append((slot.place, slot.fed, slot.parked))
        self._vacate(slot)
        self._mark(slot, "")

    def _evict_idle(self, plan: Plan) -> None:
        """Trajectories that have waited long for their tools give way to those that have no slot."""
        after = self._rollout.evict_after_s
        lacking = self.scheduler.waiting - self.scheduler.free_slots
        if after < 0 or lacking <= 0:
            return
        need = min(self.scheduler.need(request) for request in self.scheduler.requests())
        until = time.monotonic() - after
        idle = [
            slot
            for slot in self.open
            if slot.place is not None
            and not slot.sampling_now
            and slot not in self._dirty
            and slot.idle_since <= until
            and self.scheduler.length(slot.place) >= need
        ]
        for slot in sorted(idle, key=lambda slot: slot.idle_since)[:lacking]:
            self._evict(slot, plan)

    def _admit(self, plan: Plan) -> None:
        fresh: list[EngineSlot] = []
        for family in [f for f in self._families.values() if f.residue is not None]:
            assert family.residue is not None
            slot, (place, heir_of) = next(iter(family.waiting)), family.residue
            family.residue = None
            if self.scheduler.length(place) < self.scheduler.need(slot.request):
                self.scheduler.release(place)
                continue
            self.scheduler.withdraw(slot.request)
            slot.place = place
            self._settle(slot)
            slot.fed = len(slot.prompt) - 1
            plan.forks.append((place, heir_of, self._content(slot)))
            family.holders[slot] = None
        for request, place in self.scheduler.admit():
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
            head = self._head_length(slot.prompt)
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
        del self._waiting[slot]
        self._families[slot.prompt].waiting.pop(slot, None)
        self.open[slot] = None
        slot.idle_since = time.monotonic()
        self._counters.trajectories += 1
        self._mark(slot, "idle")
        if not slot.placed.done():
            slot.placed.set_result(slot)

    def _work(self, plan: Plan) -> None:
        """Extensions and turns of all that have a slot."""
        for slot in list(self._dirty):
            place = slot.place
            if place is None or self._room(slot) > self.scheduler.length(place):
                continue  # the next plan finds it a slot
            del self._dirty[slot]
            if slot.fed < len(slot.ids) - 1:
                plan.extensions.append(Extension(place, slot.fed, slot.ids[slot.fed :], slot))
                slot.fed = len(slot.ids) - 1
            if slot.wanted and not slot.sampling_now:
                slot.granted = min(slot.wanted, self.scheduler.length(place) - len(slot.ids))
                plan.start[place] = slot.granted
                self.sampling[place] = (slot, slot.turn)
                self._mark(slot, "sample")

    # --- what slots did -----------------------------------------------------------------------------------------------

    def _mark(self, slot: EngineSlot, what: str) -> None:
        """From now on the slot does this; "" ends it."""
        if self.spans is None:
            return
        now = time.monotonic()
        was = self._since.pop(slot, None)
        if was is not None:
            before, start, place = was
            self.spans.append(SlotSpan(place.pool, place.index, before, slot.key.prompt, slot.key.sample, start, now))
        if what and slot.place is not None:
            self._since[slot] = (what, now, slot.place)
