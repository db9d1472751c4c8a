"""The engine's device thread: it executes plans, one after another, with the programs of `decode.py`.

A plan is made by the host between two chunks (`engine.py`) and says what is to happen in this order: rewind slots, take contents
out, put contents in, fork, prefill, extend, decode one chunk in every pool that samples. Nothing here waits for the device, except
for contents that go to the host's memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from rstar_jax.config import ModelConfig, RolloutConfig
from rstar_jax.model import kv_cache, qwen
from rstar_jax.rollout import decode
from rstar_jax.rollout.scheduler import Place, Pool
from rstar_jax.types import SampleKey, Sampling

T = TypeVar("T")


@dataclasses.dataclass
class Counters:
    """Deterministic counts since the engine was made. Bytes and evictions hang on when tools answer."""

    device_steps: int = 0  # decode steps, of all pools
    sampled_tokens: int = 0
    discarded_tokens: int = 0  # sampled behind a stop string, or for a trajectory that was cancelled meanwhile
    prefilled_prompts: int = 0
    prefilled_tokens: int = 0  # prompt tokens that went through the model, a shared prefix counted once
    shared_tokens: int = 0  # cached prompt tokens that did not, because a prefix or a sibling had them
    extended_tokens: int = 0
    trajectories: int = 0
    forks: int = 0
    evictions: int = 0  # contents that went to the host
    restores: int = 0
    moves: int = 0  # from a slot to a longer one
    host_bytes: int = 0  # to the host and back
    device_bytes: int = 0  # moved or forked
    cached_tokens: int = 0  # that the trajectories which are over had in their caches, at last

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that went through the model although their cache had been there before: all that did, and all that were shared, less
        what the trajectories needed. Holds when no trajectory is open."""
        computed = self.prefilled_tokens + self.extended_tokens + self.sampled_tokens
        return computed + self.shared_tokens - self.cached_tokens


@dataclasses.dataclass
class Content:
    """What a slot is to hold: `count` cached tokens, then `last`. `owner` is the trajectory's slot."""

    place: Place
    count: int
    last: int
    key: SampleKey
    sampling: Sampling
    owner: Any


@dataclasses.dataclass
class Parked:
    """A trajectory's cache in the host's memory, from the plan that takes it there to the one that puts it back."""

    rows: Any = None  # numpy, per layer (k, v) [K, P, D]


@dataclasses.dataclass
class Extension:
    """Tokens behind what a slot holds; the first is its last token, the last is not fed."""

    place: Place
    held: int  # tokens in the cache before
    tokens: list[int]
    owner: Any


@dataclasses.dataclass
class Plan:
    """What the device does in one round, in the order of the fields."""

    rewinds: list[tuple[Place, int, int]] = dataclasses.field(default_factory=list)
    evictions: list[tuple[Place, int, Parked]] = dataclasses.field(default_factory=list)
    moves: list[tuple[Place, Content]] = dataclasses.field(default_factory=list)
    restores: list[tuple[Parked, Content]] = dataclasses.field(default_factory=list)
    forks: list[tuple[Place, Any, Content]] = dataclasses.field(default_factory=list)  # source, its owner, target
    prompts: dict[tuple[int, ...], list[Content]] = dataclasses.field(default_factory=dict)
    prompt_extensions: list[Extension] = dataclasses.field(default_factory=list)
    late_forks: list[tuple[Place, Any, Content]] = dataclasses.field(default_factory=list)
    extensions: list[Extension] = dataclasses.field(default_factory=list)
    start: dict[Place, int] = dataclasses.field(default_factory=dict)  # tokens to sample at most; -1 halts
    sampling: dict[Place, int] = dataclasses.field(default_factory=dict)  # the most tokens that each sampling slot may come to hold

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "sampling")


@dataclasses.dataclass
class Round:
    """What a plan gave: chunks by pool, and how tokens were routed, in order: (owner, experts [n, L, k]) of fed tokens, or
    (owner, source's owner, n) of tokens that another had fed."""

    chunks: dict[int, tuple[decode.Chunk, dict[int, int]]]  # and the column of each slot that samples
    experts: list[tuple[Any, ...]]


def parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Consecutive pieces of at most `size`."""
    for i in range(0, len(items), size):
        yield items[i : i + size]


class Device:
    """Weights and slots on the device. All methods run on the one thread that drives it."""

    def __init__(self, model: ModelConfig, rollout: RolloutConfig, pools: Sequence[Pool], stop_ids: tuple[int, ...], mesh: Mesh | None):
        self.counters = Counters()
        self.experts_recorded = model.num_experts > 0
        self._model = model
        self._rollout = rollout
        self._pools = tuple(pools)
        self._stop_ids = stop_ids
        self._mesh = mesh
        capacity = self._pools[-1].length
        self.buckets = tuple(b for b in rollout.prompt_buckets if b < capacity) or (capacity,)
        self._fork_width = min(64, max(pool.slots for pool in pools))
        self._reaches = self._attention_lengths(capacity)
        self._params: qwen.Params | None = None
        self._states: list[decode.DecodeState] = []
        self._prefix: tuple[int, ...] = ()
        self._prefix_rows: tuple[kv_cache.Cache, np.ndarray | None] | None = None

    def _attention_lengths(self, capacity: int) -> tuple[int, ...]:
        lengths = {n for n in self._rollout.attention_lengths if n < capacity}
        return tuple(sorted(lengths | {pool.length for pool in self._pools}))

    def _reach(self, pool: int, length: int) -> int:
        """The shortest attention length of a pool that holds `length` tokens."""
        return next(r for r in self._reaches if r >= length or r == self._pools[pool].length)

    # --- weights ------------------------------------------------------------------------------------------------------

    def load(self, params: qwen.Params) -> None:
        """New weights; what was cached with the old ones is forgotten."""
        self._params, self._prefix_rows = params, None
        if not self._states:
            self._states = [decode.empty_state(self._model, pool.slots, pool.length, self._mesh) for pool in self._pools]

    def share(self, prefix: tuple[int, ...]) -> None:
        """What prompts begin with, to be prefilled once for all; shorter than `rollout.shared_prefix`: nothing."""
        if not self._rollout.shared_prefix or len(prefix) < self._rollout.shared_prefix or len(prefix) >= self._pools[0].length:
            prefix = ()
        if prefix != self._prefix:
            self._prefix, self._prefix_rows = prefix, None

    def warm_up(self) -> None:
        """Compile every program, on rows that belong to no slot."""
        rollout, key, plain = self._rollout, SampleKey(0, 0, 0, 0), Sampling()
        prefixes = [()] + ([self._prefix] if self._prefix else [])
        for prefix in prefixes:
            for bucket in self.buckets:
                tokens = np.zeros((rollout.prefill_rows, bucket), np.int32)
                rows, _ = decode.prefill(self._params, self._model, tokens, tokens[:, 0], self._shared(prefix), self._mesh)
                for pool in range(len(self._pools)):
                    self._insert(pool, rows, [], self._fork_width)
        for pool, state in enumerate(self._states):
            nowhere = Content(Place(pool, self._pools[pool].slots), 0, 0, key, plain, None)
            self._states[pool] = decode.rewind(state, *self._targets([nowhere], self._fork_width)[:3], self._mesh)
            for reach in self._reaches:
                if reach > self._pools[pool].length:
                    continue
                rows = decode.take(self._states[pool], np.zeros(1, np.int32), reach)
                for other in range(len(self._pools)):
                    self._insert(other, rows, [], 1)
                self._fork_within(pool, [], reach)
                for bucket in rollout.extend_buckets:
                    if bucket <= reach or reach == self._pools[pool].length:
                        self._extend_rows(pool, bucket, reach, [])
                for width in self._widths(pool):
                    self._chunk(pool, {}, reach, [], width)
        jax.block_until_ready(self._states)

    # --- plans --------------------------------------------------------------------------------------------------------

    def execute(self, plan: Plan) -> Round:
        """Everything that the plan says; chunks are not waited for."""
        experts: list[tuple[Any, ...]] = []
        self._rewind(plan.rewinds)
        taken = self._take_all(plan)
        for rows, content in taken:
            self._insert(content.place.pool, rows, [(0, content)], 1)
        self._restore(plan.restores)
        self._fork(plan.forks, experts)
        self._prefill(plan.prompts, experts)
        self._extend(plan.prompt_extensions, experts)
        self._fork(plan.late_forks, experts)
        self._extend(plan.extensions, experts)
        chunks = {}
        for pool in sorted({place.pool for place in plan.sampling}):
            start = {place.index: budget for place, budget in plan.start.items() if place.pool == pool}
            lengths = {place.index: length for place, length in plan.sampling.items() if place.pool == pool}
            width = self._width(pool, len(lengths))
            indices = sorted(lengths)
            chunk = self._chunk(pool, start, self._reach(pool, max(lengths.values())), indices, width)
            chunks[pool] = chunk, {index: index if width is None else column for column, index in enumerate(indices)}
        return Round(chunks, experts)

    def read(self, done: Round) -> Round:
        """The same in the host's memory, once the device has it."""
        fed = [tuple(np.asarray(x) if isinstance(x, jax.Array) else x for x in event) for event in done.experts]
        return Round(jax.device_get(done.chunks), fed)

    def _width(self, pool: int, sampling: int) -> int | None:
        """How many rows a chunk computes for so many sampling slots; None: all of the pool."""
        return next((width for width in self._widths(pool) if width is None or width >= sampling), None)

    def _widths(self, pool: int) -> list[int | None]:
        return [width for width in self._rollout.decode_rows if width < self._pools[pool].slots] + [None]

    def _chunk(self, pool: int, start: dict[int, int], reach: int, sampling: list[int], width: int | None) -> decode.Chunk:
        slots = self._pools[pool].slots
        rows = None if width is None else np.array(sampling + [slots] * (width - len(sampling)), np.int32)
        start_s = np.zeros(slots, np.int32)
        for index, budget in start.items():
            start_s[index] = budget
        rollout = self._rollout
        self._states[pool], chunk = decode.decode_chunk(
            self._params,
            self._model,
            self._states[pool],
            start_s,
            rollout.chunk,
            self._stop_ids,
            rollout.candidates,
            reach,
            self._parts(pool, reach),
            rows,
            self._mesh,
        )
        return chunk

    def _parts(self, pool: int, reach: int) -> int:
        """In how many parts decode steps work on a copy of the cache. It pays on CPUs, where each of its small products uses one core;
        two halves at a time pay where they are long (`experiments/benchmarks/rollout.py`)."""
        if jax.default_backend() != "cpu" or (self._mesh is not None and self._mesh.size > 1):
            return 0
        return min(self._pools[pool].slots, 2 if reach >= 256 else 1)

    def _rewind(self, rewinds: list[tuple[Place, int, int]]) -> None:
        for pool in range(len(self._pools)):
            here = [
                Content(place, n, last, SampleKey(0, 0, 0, 0), Sampling(), None) for place, n, last in rewinds if place.pool == pool
            ]
            for part in parts(here, self._fork_width):
                self._states[pool] = decode.rewind(self._states[pool], *self._targets(part, self._fork_width)[:3], self._mesh)

    # --- contents -----------------------------------------------------------------------------------------------------

    def _targets(self, contents: Sequence[Content], width: int, pool: int | None = None) -> tuple[Any, ...]:
        """Arrays of length `width`: slots, counts, last tokens, key parts, filters. What is beyond the contents is dropped."""
        pool = contents[0].place.pool if pool is None else pool
        pad = width - len(contents)
        nowhere = self._pools[pool].slots
        return (
            np.array([c.place.index for c in contents] + [nowhere] * pad, np.int32),
            np.array([c.count for c in contents] + [0] * pad, np.int32),
            np.array([c.last for c in contents] + [0] * pad, np.int32),
            np.array([dataclasses.astuple(c.key) for c in contents] + [(0, 0, 0, 0)] * pad, np.int32),
            decode.Filters.of([c.sampling for c in contents] + [Sampling()] * pad),
        )

    def _insert(self, pool: int, rows: kv_cache.Cache, entries: Sequence[tuple[int, Content]], width: int) -> None:
        """Put row i in the slot of each (i, content); `width` entries at a time."""
        for part in parts(entries, width) if entries else [()]:
            source = np.array([row for row, _ in part] + [0] * (width - len(part)), np.int32)
            targets = self._targets([content for _, content in part], width, pool)
            self._states[pool] = decode.insert(self._states[pool], rows, source, *targets, self._mesh)

    def _take_all(self, plan: Plan) -> list[tuple[kv_cache.Cache, Content]]:
        """Evicted contents go to the host; moved ones are returned as rows. All are read before anything is overwritten."""
        for place, count, parked in plan.evictions:
            rows = jax.device_get(self._take(place, count))
            parked.rows = jax.tree.map(functools.partial(_first, count=count), rows)
            self.counters.evictions += 1
            self.counters.host_bytes += _bytes(rows)
        taken = [(self._take(place, content.count), content) for place, content in plan.moves]
        self.counters.moves += len(taken)
        self.counters.device_bytes += sum(_bytes(rows) for rows, _ in taken)
        return taken

    def _take(self, place: Place, count: int) -> kv_cache.Cache:
        return decode.take(self._states[place.pool], np.array([place.index], np.int32), self._reach(place.pool, count))

    def _restore(self, restores: list[tuple[Parked, Content]]) -> None:
        for parked, content in restores:
            reach = self._reach(content.place.pool, max(1, content.count))

            def padded(x: np.ndarray, reach: int = reach) -> np.ndarray:
                row = np.zeros((1, x.shape[0], reach, x.shape[2]), x.dtype)
                row[0, :, : x.shape[1]] = x
                return row

            rows = jax.tree.map(padded, parked.rows)
            self._insert(content.place.pool, rows, [(0, content)], 1)
            self.counters.restores += 1
            self.counters.host_bytes += _bytes(rows)

    def _fork(self, forks: list[tuple[Place, Any, Content]], experts: list[tuple[Any, ...]]) -> None:
        """Contents that other slots begin with: within a pool many at a time, across pools one by one."""
        within: dict[tuple[int, int], list[tuple[Place, Any, Content]]] = {}
        for source, owner, content in forks:
            reach = self._reach(source.pool, max(1, content.count))
            if source.pool == content.place.pool:
                within.setdefault((source.pool, reach), []).append((source, owner, content))
            else:
                self._insert(content.place.pool, self._take(source, max(1, content.count)), [(0, content)], 1)
            self.counters.forks += 1
            self.counters.shared_tokens += content.count
            self.counters.device_bytes += kv_cache.cache_bytes(self._model, 1, reach)
            if self.experts_recorded:
                experts.append((content.owner, owner, content.count))
        for (pool, reach), group in within.items():
            for part in parts(group, self._fork_width):
                self._fork_within(pool, part, reach)

    def _fork_within(self, pool: int, part: Sequence[tuple[Place, Any, Content]], reach: int) -> None:
        width = self._fork_width
        source = np.array([place.index for place, _, _ in part] + [0] * (width - len(part)), np.int32)
        targets = self._targets([content for _, _, content in part], width, pool)
        self._states[pool] = decode.fork(self._states[pool], source, *targets, reach, self._mesh)

    # --- prompts and observations -------------------------------------------------------------------------------------

    def _shared(self, prefix: tuple[int, ...]) -> kv_cache.Cache | None:
        """Cache rows of the shared prefix, prefilled at its first use with these weights."""
        if not prefix:
            return None
        if self._prefix_rows is None:
            count = np.array([len(prefix)], np.int32)
            rows, routed = decode.prefill(self._params, self._model, np.array([prefix], np.int32), count, None, self._mesh)
            self._prefix_rows = rows, None if routed is None else np.asarray(routed[0])
            self.counters.prefilled_tokens += len(prefix)
            self.counters.shared_tokens -= len(prefix)  # every prompt shares it, but one of them has paid
        return self._prefix_rows[0]

    def prefix_of(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The shared prefix if the prompt begins with it and goes on; else nothing."""
        shared = len(self._prefix)
        return self._prefix if shared and len(prompt) > shared and tuple(prompt[:shared]) == self._prefix else ()

    def head_length(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt are prefilled or shared; the rest extends the slot."""
        return min(len(prompt), len(self.prefix_of(prompt)) + self.buckets[-1] + 1) - 1

    def _prefill(self, prompts: dict[tuple[int, ...], list[Content]], experts: list[tuple[Any, ...]]) -> None:
        """Prefill each prompt once and place it in every slot that opens with it."""
        groups: dict[tuple[tuple[int, ...], int], list[tuple[int, ...]]] = {}
        for prompt in prompts:
            prefix = self.prefix_of(prompt)
            count = self.head_length(prompt) - len(prefix)
            bucket = next(b for b in self.buckets if b >= count)
            groups.setdefault((prefix, bucket), []).append(prompt)
        for (prefix, bucket), members in groups.items():
            for part in parts(members, self._rollout.prefill_rows):
                self._prefill_rows(prefix, bucket, {prompt: prompts[prompt] for prompt in part}, experts)

    def _prefill_rows(
        self, prefix: tuple[int, ...], bucket: int, prompts: dict[tuple[int, ...], list[Content]], experts: list[tuple[Any, ...]]
    ) -> None:
        rows = self._rollout.prefill_rows
        tokens, count = np.zeros((rows, bucket), np.int32), np.zeros(rows, np.int32)
        for row, prompt in enumerate(prompts):
            head = prompt[len(prefix) : self.head_length(prompt)]
            tokens[row, : len(head)] = head
            count[row] = len(head)
        shared = self._shared(prefix)
        cache, routed = decode.prefill(self._params, self._model, tokens, count, shared, self._mesh)
        self.counters.prefilled_prompts += len(prompts)
        self.counters.prefilled_tokens += int(count.sum())
        entries = [(row, content) for row, contents in enumerate(prompts.values()) for content in contents]
        self.counters.shared_tokens += sum(content.count for _, content in entries) - int(count.sum())
        if routed is not None:
            for row, content in entries:
                if prefix and self._prefix_rows is not None:
                    experts.append((content.owner, self._prefix_rows[1]))
                experts.append((content.owner, routed[row, : count[row]]))
        for pool in sorted({content.place.pool for _, content in entries}):
            self._insert(pool, cache, [entry for entry in entries if entry[1].place.pool == pool], self._fork_width)

    def _extend(self, extensions: list[Extension], experts: list[tuple[Any, ...]]) -> None:
        """Extensions of one slot keep their order; different slots share a call when their lengths share a bucket."""
        piece = self._rollout.extend_buckets[-1]
        queues = [
            [Extension(e.place, e.held + i, e.tokens[i : i + piece + 1], e.owner) for i in range(0, len(e.tokens) - 1, piece)]
            for e in extensions
        ]
        while any(queues):
            groups: dict[tuple[int, int, int], list[Extension]] = {}
            for queue in queues:
                if queue:
                    extension = queue.pop(0)
                    fed = len(extension.tokens) - 1
                    bucket = next(b for b in self._rollout.extend_buckets if b >= fed)
                    reach = self._reach(extension.place.pool, max(extension.held + fed, bucket))
                    groups.setdefault((extension.place.pool, bucket, reach), []).append(extension)
            for (pool, bucket, reach), group in groups.items():
                for part in parts(group, self._rollout.extend_rows):
                    routed = self._extend_rows(pool, bucket, reach, part)
                    if routed is not None:
                        experts += [(e.owner, routed[row, : len(e.tokens) - 1]) for row, e in enumerate(part)]

    def _extend_rows(self, pool: int, bucket: int, reach: int, part: Sequence[Extension]) -> jax.Array | None:
        rows = self._rollout.extend_rows
        where = np.full(rows, self._pools[pool].slots, np.int32)
        tokens, count, last = np.zeros((rows, bucket), np.int32), np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        for row, extension in enumerate(part):
            fed = len(extension.tokens) - 1
            where[row], count[row], last[row] = extension.place.index, fed, extension.tokens[-1]
            tokens[row, :fed] = extension.tokens[:-1]
        state = self._states[pool]
        self._states[pool], routed = decode.extend(self._params, self._model, state, where, tokens, count, last, reach, self._mesh)
        self.counters.extended_tokens += int(count.sum())
        return routed


def _first(row: np.ndarray, count: int) -> np.ndarray:
    """[K, count, D] of [1, K, P, D], as memory of its own."""
    return row[0, :, :count].copy()


def _bytes(rows: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(rows))
