"""The engine's host side: slots, first-come admission, one thread that drives the device.

Agents (coroutines) open slots, ask for tokens, append observations and close; between two chunks the engine gathers whatever they
asked for, hands it to the device thread as one plan, and resolves their futures from the result. While the device runs, the event
loop is free for tools. Ids in, ids out.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import types
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rstar_jax.config import ModelConfig, RolloutConfig
from rstar_jax.model import lora, qwen
from rstar_jax.model.sharding import ROLLOUT_RULES, constrain
from rstar_jax.rollout import decode
from rstar_jax.types import Finish, Sampled, SampleKey, Sampling, UserError


@dataclasses.dataclass
class Counters:
    """Deterministic counts since the engine was made."""

    device_steps: int = 0
    sampled_tokens: int = 0
    prefilled_prompts: int = 0
    prefilled_tokens: int = 0
    extended_tokens: int = 0
    trajectories: int = 0


@dataclasses.dataclass
class _Plan:
    """What the device does in one round: inserts, then appends in order, then a chunk in which `start` slots begin."""

    inserts: list[EngineSlot] = dataclasses.field(default_factory=list)
    appends: list[tuple[EngineSlot, list[int]]] = dataclasses.field(default_factory=list)
    start: dict[int, int] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.inserts or self.appends or self.start)


class EngineSlot:
    """One trajectory's slot (see `types.Slot`)."""

    def __init__(self, engine: SlotEngine, index: int, prompt: list[int], key: SampleKey, sampling: Sampling):
        self.index = index
        self.prompt = prompt
        self.key = key
        self.sampling = sampling
        self.length = len(prompt)  # of the trajectory, the not yet cached last token included
        self.last_token = prompt[-1]
        self.open = True
        self._engine = engine
        self._future: asyncio.Future[Sampled] | None = None
        self._budget = 0
        self._ids: list[int] = []
        self._logps: list[float] = []
        self._experts: list[np.ndarray] = []

    async def generate(self, max_new_tokens: int) -> Sampled:
        """Sample until a stop id or `max_new_tokens` tokens."""
        self._check(max_new_tokens)
        self._future = asyncio.get_running_loop().create_future()
        self._budget, self._ids, self._logps = max_new_tokens, [], []
        self._engine._start(self, max_new_tokens)
        return await self._future

    async def append(self, ids: Sequence[int]) -> None:
        """Append observed ids; they are written before the slot's next turn."""
        if not len(ids):
            return
        self._check(len(ids))
        self._engine._append(self, [int(i) for i in ids])
        self.length += len(ids)
        self.last_token = int(ids[-1])

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
        if self.length + more > self._engine.capacity:
            raise ValueError(f"{self.length} tokens and {more} more exceed the slot's {self._engine.capacity}")

    def _receive(self, ids: list[int], logps: list[float], version: int) -> None:
        self._ids += ids
        self._logps += logps
        stopped = self._ids[-1] in self._engine.stop_ids
        if stopped or len(self._ids) == self._budget:
            self.length += len(self._ids)
            self.last_token = self._ids[-1]
            finish = Finish.STOP if stopped else Finish.LENGTH
            future, self._future = self._future, None
            if future is not None and not future.done():  # done: the agent was cancelled meanwhile
                future.set_result(Sampled(tuple(self._ids), tuple(self._logps), finish, version))


class SlotEngine:
    """Continuous batching over a fixed number of slots (see `types.Engine`).

    `load` gives it weights; `async with engine:` runs its driver. Shapes are fixed at construction, so that nothing compiles
    after `warm_up`. `device` is the one thread that drives the device.
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
    ):
        self.capacity = capacity
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self.counters = Counters()
        self.version = -1
        self._model = model
        self._rollout = rollout
        self._mesh = mesh
        self._buckets = tuple(b for b in rollout.prompt_buckets if b < capacity) or (capacity,)
        if mesh is not None and rollout.slots % (mesh.shape["data"] * mesh.shape["fsdp"]):
            parts = mesh.shape["data"] * mesh.shape["fsdp"]
            raise UserError(f"rollout.slots={rollout.slots} must be a multiple of the {parts} devices on mesh axes data and fsdp")
        self._insert_width = min(64, rollout.slots)
        self._params: qwen.Params | None = None
        self._state: decode.DecodeState | None = None
        self._free = list(range(rollout.slots - 1, -1, -1))
        self._slots: dict[int, EngineSlot] = {}
        self._waiting: collections.deque[tuple[asyncio.Future[EngineSlot], list[int], SampleKey, Sampling]] = collections.deque()
        self._plan = _Plan()
        self._sampling: dict[int, EngineSlot] = {}
        self._wake = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._device = device

    # --- the agents' side ---------------------------------------------------------------------------------------------

    def load(self, params: qwen.Params, version: int) -> None:
        """Take new weights (rollout form); every cache dies with the old ones. No slot may be open."""
        if self._slots:
            raise ValueError(f"{len(self._slots)} slots are open; weights change between trajectories only")
        self._params, self.version = params, version
        if self._state is None:
            self._state = decode.empty_state(self._model, self._rollout.slots, self.capacity, self._mesh)

    def warm_up(self) -> None:
        """Compile every program, on rows that belong to no slot. Runs on the device thread, after `load`."""
        slots, nowhere = self._rollout.slots, self._rollout.slots
        for bucket in self._buckets:
            tokens = np.zeros((self._rollout.prefill_rows, bucket), np.int32)
            cache, _ = decode.prefill(self._params, self._model, tokens, np.zeros(len(tokens), np.int32), self._mesh)
            n = self._insert_width
            zeros, where = np.zeros(n, np.int32), np.full(n, nowhere, np.int32)
            keys, temperature = np.zeros((n, 4), np.int32), np.ones(n, np.float32)
            self._state = decode.insert(self._state, cache, zeros, where, zeros, zeros, keys, temperature, self._mesh)
        for bucket in self._rollout.extend_buckets:
            m = self._rollout.extend_rows
            zeros, where = np.zeros(m, np.int32), np.full(m, nowhere, np.int32)
            tokens = np.zeros((m, bucket), np.int32)
            self._state, _ = decode.extend(self._params, self._model, self._state, where, tokens, zeros, zeros, self._mesh)
        self._chunk(np.zeros(slots, np.int32))

    async def open(self, prompt_ids: Sequence[int], key: SampleKey, sampling: Sampling) -> EngineSlot:
        """Wait for a free slot and place the prompt in it. Raises `UserError` for a prompt that leaves no room to answer."""
        if not 0 < len(prompt_ids) < self.capacity:
            raise UserError(
                f"a prompt of {len(prompt_ids)} tokens does not fit slots of {self.capacity}; raise rollout.max_prompt_tokens"
            )
        self._alive()
        future: asyncio.Future[EngineSlot] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, [int(i) for i in prompt_ids], key, sampling))
        self._wake.set()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().close()
            raise

    def _alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the engine has failed") from self._failure
        if self._driver is None:
            raise RuntimeError("the engine is not running: use `async with engine:`")

    def _start(self, slot: EngineSlot, budget: int) -> None:
        self._alive()
        self._plan.start[slot.index] = budget
        self._sampling[slot.index] = slot
        self._wake.set()

    def _append(self, slot: EngineSlot, ids: list[int]) -> None:
        self._alive()
        tokens = [slot.last_token, *ids]
        piece = self._rollout.extend_buckets[-1]
        for i in range(0, len(tokens) - 1, piece):
            self._plan.appends.append((slot, tokens[i : i + piece + 1]))

    def _release(self, slot: EngineSlot) -> None:
        if self._sampling.pop(slot.index, None) is not None:
            self._plan.start[slot.index] = -1
        else:
            self._plan.start.pop(slot.index, None)
        self._plan.appends = [item for item in self._plan.appends if item[0] is not slot]
        self._plan.inserts = [item for item in self._plan.inserts if item is not slot]
        del self._slots[slot.index]
        self._free.append(slot.index)
        self._wake.set()

    # --- the driver ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> SlotEngine:
        if self._params is None:
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
        await asyncio.get_running_loop().run_in_executor(self._device, lambda: None)  # a chunk in flight has ended
        self._driver = None
        for slot in list(self._slots.values()):
            slot.close()
        self._plan, self._sampling = _Plan(), {}

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._admit()
                if not self._plan and not self._sampling:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                await asyncio.sleep(0)  # let everything that is ready join this round
                self._admit()
                plan, self._plan = self._plan, _Plan()
                sampling = dict(self._sampling)
                result = await loop.run_in_executor(self._device, self._execute, plan, bool(sampling))
                if result is not None:
                    self._deliver(result, sampling)
                    await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failure = error
            waiting = [item[0] for item in self._waiting] + [s._future for s in self._sampling.values() if s._future]
            for future in waiting:
                if not future.done():
                    future.set_exception(RuntimeError("the engine has failed"))
                    future.exception()  # whoever awaits it sees it; nobody may be left who does
            raise

    def _admit(self) -> None:
        while self._free and self._waiting:
            future, prompt, key, sampling = self._waiting.popleft()
            if future.done():
                continue
            slot = EngineSlot(self, self._free.pop(), prompt, key, sampling)
            self._slots[slot.index] = slot
            self._plan.inserts.append(slot)
            self.counters.trajectories += 1
            rest = prompt[self._buckets[-1] :]
            if rest:
                piece = self._rollout.extend_buckets[-1]
                tokens = prompt[self._buckets[-1] - 1 :]
                for i in range(0, len(tokens) - 1, piece):
                    self._plan.appends.append((slot, tokens[i : i + piece + 1]))
            future.set_result(slot)

    def _deliver(self, chunk: decode.Chunk, sampling: dict[int, EngineSlot]) -> None:
        tokens, logps, emitted = map(np.asarray, (chunk.tokens_ns, chunk.logps_ns, chunk.emitted_ns))
        self.counters.device_steps += int(chunk.steps)
        for index, slot in sampling.items():
            if self._sampling.get(index) is not slot:
                continue  # closed while the chunk ran
            mask = emitted[:, index]
            ids = tokens[mask, index].tolist()
            if not ids:
                continue
            self.counters.sampled_tokens += len(ids)
            if chunk.experts_nslk is not None:
                slot._experts.append(np.asarray(chunk.experts_nslk)[mask, index])
            slot._receive(ids, logps[mask, index].tolist(), self.version)
            if slot._future is None:
                del self._sampling[index]

    # --- the device thread --------------------------------------------------------------------------------------------

    def _execute(self, plan: _Plan, sampling: bool) -> decode.Chunk | None:
        self._insert(plan.inserts)
        self._extend(plan.appends)
        if not sampling and not plan.start:
            return None
        start_s = np.zeros(self._rollout.slots, np.int32)
        for index, budget in plan.start.items():
            start_s[index] = budget
        return self._chunk(start_s)

    def _chunk(self, start_s: np.ndarray) -> decode.Chunk:
        self._state, chunk = decode.decode_chunk(
            self._params, self._model, self._state, start_s, self._rollout.chunk, self.stop_ids, self._mesh
        )
        return jax.device_get(chunk)

    def _insert(self, slots: list[EngineSlot]) -> None:
        """Prefill each distinct prompt once and place it in every slot that opened with it."""
        by_bucket: dict[int, dict[tuple[int, ...], list[EngineSlot]]] = {}
        for slot in slots:
            head = tuple(slot.prompt[: self._buckets[-1]])
            bucket = next(b for b in self._buckets if b >= len(head))
            by_bucket.setdefault(bucket, {}).setdefault(head, []).append(slot)
        for bucket, prompts in by_bucket.items():
            heads = list(prompts)
            for i in range(0, len(heads), self._rollout.prefill_rows):
                self._insert_rows(bucket, heads[i : i + self._rollout.prefill_rows], prompts)

    def _insert_rows(self, bucket: int, heads: list[tuple[int, ...]], prompts: dict[tuple[int, ...], list[EngineSlot]]) -> None:
        rows = self._rollout.prefill_rows
        tokens, count = np.zeros((rows, bucket), np.int32), np.zeros(rows, np.int32)
        for row, head in enumerate(heads):
            tokens[row, : len(head)] = head
            count[row] = len(head) - 1
        cache, experts = decode.prefill(self._params, self._model, tokens, count, self._mesh)
        self.counters.prefilled_prompts += len(heads)
        self.counters.prefilled_tokens += int(count.sum())
        entries = [(row, slot) for row, head in enumerate(heads) for slot in prompts[head]]
        if experts is not None:
            routed = np.asarray(experts)
            for row, slot in entries:
                slot._experts.append(routed[row, : count[row]])
        for i in range(0, len(entries), self._insert_width):
            part = entries[i : i + self._insert_width]
            pad = self._insert_width - len(part)
            source = np.array([row for row, _ in part] + [0] * pad, np.int32)
            where = np.array([slot.index for _, slot in part] + [self._rollout.slots] * pad, np.int32)
            keys = np.array([dataclasses.astuple(slot.key) for _, slot in part] + [(0, 0, 0, 0)] * pad, np.int32)
            temperature = np.array([slot.sampling.temperature for _, slot in part] + [1.0] * pad, np.float32)
            last = tokens[source, count[source]]
            self._state = decode.insert(self._state, cache, source, where, count[source], last, keys, temperature, self._mesh)

    def _extend(self, appends: list[tuple[EngineSlot, list[int]]]) -> None:
        """Appends of one slot keep their order; different slots share a call when their lengths share a bucket."""
        while appends:
            seen: set[int] = set()
            first = [item for item in appends if not (item[0].index in seen or seen.add(item[0].index))]  # type: ignore[func-returns-value]
            chosen = {id(item) for item in first}
            appends = [item for item in appends if id(item) not in chosen]
            for bucket in self._rollout.extend_buckets:
                below = max((b for b in self._rollout.extend_buckets if b < bucket), default=0)
                group = [item for item in first if below < len(item[1]) - 1 <= bucket]
                for i in range(0, len(group), self._rollout.extend_rows):
                    self._extend_rows(bucket, group[i : i + self._rollout.extend_rows])

    def _extend_rows(self, bucket: int, group: list[tuple[EngineSlot, list[int]]]) -> None:
        rows = self._rollout.extend_rows
        where = np.full(rows, self._rollout.slots, np.int32)
        tokens, count, last = np.zeros((rows, bucket), np.int32), np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        for row, (slot, ids) in enumerate(group):
            where[row] = slot.index
            tokens[row, : len(ids) - 1] = ids[:-1]
            count[row] = len(ids) - 1
            last[row] = ids[-1]
        self._state, experts = decode.extend(self._params, self._model, self._state, where, tokens, count, last, self._mesh)
        if experts is not None:
            routed = np.asarray(experts)
            for row, (slot, _) in enumerate(group):
                slot._experts.append(routed[row, : count[row]])
        self.counters.extended_tokens += int(count.sum())


@functools.partial(jax.jit, static_argnames=("model", "mesh"))
def rollout_params(params: qwen.Params, model: ModelConfig, mesh: Mesh | None = None) -> qwen.Params:
    """The engine's copy of trained weights, made by one jitted reshard: adapters merged, layers unstacked, in the compute dtype,
    gathered over fsdp and kept apart over tensor."""
    params = lora.merge(params, model)
    if mesh is not None and mesh.size > 1:
        axes = qwen.param_axes(model)
        params = jax.tree.map(lambda p, names: constrain(p, mesh, names, ROLLOUT_RULES), params, axes)
    return jax.tree.map(lambda p: p.astype(jnp.dtype(model.dtype)), qwen.unstack_layers(params))
