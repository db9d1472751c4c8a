"""The engine's device side: pure functions on one donated state.

A slot holds the tokens of one trajectory. All its tokens but the last are in the cache; the last one (`last_token`) is fed at
the next decode step, or stands first in the next `extend`. So every sampled token, whichever turn it begins, comes out of
`decode_chunk`, and a trajectory's numbers do not depend on how its turns were cut.

Of a model with experts, what each fed token was routed to comes out of every program, so that training can route alike.

Shape legend: S slots, C capacity, K key/value heads, D head width, V vocabulary, L layers, k experts of a token; N or M rows of one
call, P padded length, n tokens of one chunk.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rstar_jax.config import ModelConfig
from rstar_jax.model import kv_cache, qwen
from rstar_jax.model.sharding import ROLLOUT_RULES, constrain
from rstar_jax.types import Array, Sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Filters:
    """`types.Sampling` of several slots, as arrays."""

    temperature: Array  # float32, 0 for greedy
    top_k: Array  # int32, 0: off
    top_p: Array  # float32, 1: off
    min_p: Array  # float32, 0: off

    @classmethod
    def of(cls, samplings: Sequence[Sampling]) -> Filters:
        return cls(
            np.array([s.temperature for s in samplings], np.float32),
            np.array([s.top_k for s in samplings], np.int32),
            np.array([s.top_p for s in samplings], np.float32),
            np.array([s.min_p for s in samplings], np.float32),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that the device remembers of the slots."""

    cache: Any  # per layer (k, v) [S, K, C, D]; within a chunk on a CPU kv_cache.Working
    length_s: jax.Array  # int32 [S], tokens in the cache
    last_token_s: jax.Array  # int32 [S], the token at position `length`, not yet in the cache
    active_s: jax.Array  # bool [S], True while a slot is sampling
    remaining_s: jax.Array  # int32 [S], tokens that the slot may still sample in this turn
    key_s: jax.Array  # uint32 [S, 2], the trajectory's random key
    sampling: Filters  # [S] each


@functools.partial(jax.jit, static_argnames=("config", "slots", "capacity", "mesh"))
def empty_state(config: ModelConfig, slots: int, capacity: int, mesh: Mesh | None = None) -> DecodeState:
    """A state whose slots are all free."""
    state = DecodeState(
        cache=kv_cache.empty_cache(config, slots, capacity),
        length_s=jnp.zeros(slots, jnp.int32),
        last_token_s=jnp.zeros(slots, jnp.int32),
        active_s=jnp.zeros(slots, bool),
        remaining_s=jnp.zeros(slots, jnp.int32),
        key_s=jnp.zeros((slots, 2), jnp.uint32),
        sampling=Filters(jnp.ones(slots), jnp.zeros(slots, jnp.int32), jnp.ones(slots), jnp.zeros(slots)),
    )
    return pin(state, mesh)


def pin(state: DecodeState, mesh: Mesh | None) -> DecodeState:
    """Slots over the data axes, heads over tensor: the same partition after every program, so that none is compiled twice."""
    if mesh is None or mesh.size == 1:
        return state

    def one(x: jax.Array) -> jax.Array:
        rest = ("kv_heads", None, None) if x.ndim == 4 else (None,) * (x.ndim - 1)
        return constrain(x, mesh, ("slots", *rest), ROLLOUT_RULES)

    return jax.tree.map(one, state)


def trajectory_keys(key_parts_n4: Array) -> jax.Array:
    """Random keys [N, 2] of trajectories named by (seed, step, prompt, sample): the seed's key with the rest folded in."""

    def one(parts: jax.Array) -> jax.Array:
        key = jax.random.PRNGKey(parts[0])
        for i in range(1, 4):
            key = jax.random.fold_in(key, parts[i])
        return key

    return jax.vmap(one)(jnp.asarray(key_parts_n4))


def inverse_cdf(mass_sv: jax.Array, uniform_s: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Token ids [S]: the first index at which the running sum of the mass exceeds `uniform` of its total, found in two levels; and
    the total [S]. The mass need not sum to 1.

    One pass over block sums and one over a single block costs a fraction of a cumulative sum over the vocabulary.
    """
    slots, vocab = mass_sv.shape
    width = 1 << math.ceil(math.log2(math.sqrt(vocab)))
    p_sbw = jnp.pad(mass_sv, ((0, 0), (0, -vocab % width))).reshape(slots, -1, width)
    block_sb = p_sbw.sum(-1)
    cumulative_sb = jnp.cumsum(block_sb, axis=-1)
    threshold_s = uniform_s * cumulative_sb[:, -1]

    def first_above(cumulative: jax.Array, threshold: jax.Array, mass: jax.Array) -> jax.Array:
        above = cumulative > threshold[:, None]
        # rounding can leave no entry above a uniform next to 1; then the heaviest entry, which has mass, is taken
        return jnp.where(above.any(-1), jnp.argmax(above, axis=-1), jnp.argmax(mass, axis=-1))

    b_s = first_above(cumulative_sb, threshold_s, block_sb)
    rows = jnp.arange(slots)
    p_sw = p_sbw[rows, b_s]
    rest_s = threshold_s - (cumulative_sb[rows, b_s] - block_sb[rows, b_s])
    return b_s * width + first_above(jnp.cumsum(p_sw, axis=-1), rest_s, p_sw), cumulative_sb[:, -1]


def sample(
    logits_sv: jax.Array, sampling: Filters, key_s: jax.Array, position_s: jax.Array, candidates: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Tokens [S] drawn as `types.Sampling` says, and their log-probs under softmax(logits / temperature): that of the distribution
    which training uses, filters or not (of temperature 1 where it is 0). The draw depends on (key, position) alone.

    Filters look at the `candidates` most probable tokens, never at more; with 0 there are none, and none are applied.
    """
    greedy_s = sampling.temperature <= 0
    scaled_sv = logits_sv / jnp.where(greedy_s, 1.0, sampling.temperature)[:, None]
    # p up to its sum: one pass of exponentials, and none of divisions
    top_s = scaled_sv.max(-1)
    mass_sv = jnp.exp(scaled_sv - top_s[:, None])
    uniform_s = jax.vmap(lambda key, position: jax.random.uniform(jax.random.fold_in(key, position)))(key_s, position_s)
    token_s, total_s = inverse_cdf(mass_sv, uniform_s)
    if candidates:
        chosen_s, filtered_s = _filtered(mass_sv, total_s, sampling, uniform_s, min(candidates, mass_sv.shape[1]))
        token_s = jnp.where(filtered_s, chosen_s, token_s)
    best_s = jax.lax.cond(greedy_s.any(), lambda: jnp.argmax(scaled_sv, axis=-1), lambda: jnp.zeros_like(token_s))
    token_s = jnp.where(greedy_s, best_s, token_s).astype(jnp.int32)
    return token_s, jnp.take_along_axis(scaled_sv, token_s[:, None], axis=-1)[:, 0] - top_s - jnp.log(total_s)


def _filtered(
    mass_sv: jax.Array, total_s: jax.Array, sampling: Filters, uniform_s: jax.Array, candidates: int
) -> tuple[jax.Array, jax.Array]:
    """Tokens [S] drawn from what passes the filters, and whether any filter is on [S]."""
    mass_sk, index_sk = jax.lax.top_k(mass_sv, candidates)
    p_sk = mass_sk / total_s[:, None]
    rank_k = jnp.arange(candidates)
    top_k_s = jnp.where(sampling.top_k > 0, sampling.top_k, candidates)
    before_sk = jnp.cumsum(p_sk, axis=-1) - p_sk
    passes_sk = (rank_k < top_k_s[:, None]) & (before_sk < sampling.top_p[:, None]) & (p_sk >= sampling.min_p[:, None] * p_sk[:, :1])
    place_s, _ = inverse_cdf(jnp.where(passes_sk | (rank_k == 0), p_sk, 0.0), uniform_s)
    filtered_s = jnp.asarray(sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    return jnp.take_along_axis(index_sk, place_s[:, None], axis=-1)[:, 0], filtered_s


def _continue(
    params: qwen.Params,
    config: ModelConfig,
    tokens: Array,
    positions: Array,
    segments: Array,
    cache: kv_cache.Cache,
    slots: Array | None = None,
    reach: int | None = None,
) -> tuple[jax.Array, kv_cache.Cache, jax.Array | None]:
    """Hidden states and cache of `qwen.forward`, and the chosen experts int16 [B, T, L, k] (None without experts)."""
    out = qwen.forward(params, config, tokens, positions, segments, cache, slots, reach=reach)
    assert out.cache is not None
    return out.hidden_btd, out.cache, None if out.routing is None else _by_token(out.routing.chosen_lbtk)


def _by_token(chosen_lbtk: jax.Array) -> jax.Array:
    return jnp.transpose(chosen_lbtk, (1, 2, 0, 3)).astype(jnp.int16)


@functools.partial(jax.jit, static_argnames=("config", "mesh"))
def prefill(
    params: qwen.Params,
    config: ModelConfig,
    tokens_np: Array,
    count_n: Array,
    prefix: kv_cache.Cache | None = None,
    mesh: Mesh | None = None,
) -> tuple[kv_cache.Cache, jax.Array | None]:
    """Cache rows [N, K, P0 + P, D] of N prompts: what `prefix` holds (one row of P0 positions, all real; None: nothing) and
    `count_n` tokens each behind it, padded to P; and the experts [N, P, L, k] of the latter."""
    rows, length = tokens_np.shape
    shared = 0 if prefix is None else prefix[0][0].shape[2]
    offset = jnp.arange(length)
    positions_np = jnp.broadcast_to(shared + offset, (rows, length))
    segments_np = (offset < count_n[:, None]).astype(jnp.int32)
    cache = kv_cache.empty_cache(config, rows, shared + length)
    if prefix is not None:
        cache = jax.tree.map(lambda new, old: new.at[:, :, :shared].set(old), cache, prefix)
    return _continue(params, config, tokens_np, positions_np, segments_np, cache)[1:]


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def insert(
    state: DecodeState,
    rows: kv_cache.Cache,
    source_n: Array,
    slots_n: Array,
    count_n: Array,
    last_token_n: Array,
    key_parts_n4: Array,
    sampling: Filters,
    mesh: Mesh | None = None,
) -> DecodeState:
    """Place cache rows in slots: slot `slots_n[i]` gets row `source_n[i]`, so that one prompt serves a whole group.

    `count_n` tokens of the row are real and `last_token_n` follows them. A slot number of S drops the entry. What a row has beyond
    the capacity is left out.
    """
    capacity = state.cache[0][0].shape[2]

    def place(cache: jax.Array, new: jax.Array) -> jax.Array:
        new = new[source_n, :, :capacity]
        return cache.at[slots_n, :, : new.shape[2]].set(new, mode="drop")

    return pin(
        DecodeState(
            cache=jax.tree.map(place, state.cache, rows),
            length_s=state.length_s.at[slots_n].set(count_n, mode="drop"),
            last_token_s=state.last_token_s.at[slots_n].set(last_token_n, mode="drop"),
            active_s=state.active_s.at[slots_n].set(False, mode="drop"),
            remaining_s=state.remaining_s.at[slots_n].set(0, mode="drop"),
            key_s=state.key_s.at[slots_n].set(trajectory_keys(key_parts_n4), mode="drop"),
            sampling=jax.tree.map(lambda old, new: old.at[slots_n].set(new, mode="drop"), state.sampling, sampling),
        ),
        mesh,
    )


@functools.partial(jax.jit, static_argnames=("reach",))
def take(state: DecodeState, slots_n: Array, reach: int) -> kv_cache.Cache:
    """The first `reach` positions of N slots, as cache rows [N, K, reach, D] that `insert` accepts: here, in a state of another
    capacity, or after a stay in the host's memory. Evicting is `take` to the host, restoring is `insert` from there."""
    return jax.tree.map(lambda cache: cache[slots_n, :, :reach], state.cache)


@functools.partial(jax.jit, static_argnames=("reach", "mesh"), donate_argnames=("state",))
def fork(
    state: DecodeState,
    source_n: Array,
    slots_n: Array,
    count_n: Array,
    last_token_n: Array,
    key_parts_n4: Array,
    sampling: Filters,
    reach: int,
    mesh: Mesh | None = None,
) -> DecodeState:
    """`insert` of the first `count_n` <= reach tokens of other slots `source_n` of the same state. A slot may be its own source."""
    rows = jax.tree.map(lambda cache: cache[source_n, :, :reach], state.cache)
    everyone = jnp.arange(source_n.shape[0])
    return insert(state, rows, everyone, slots_n, count_n, last_token_n, key_parts_n4, sampling, mesh)


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def rewind(state: DecodeState, slots_n: Array, count_n: Array, last_token_n: Array, mesh: Mesh | None = None) -> DecodeState:
    """Let N slots hold only their first `count_n` tokens, followed by `last_token_n`, and halt them. Nothing has to be erased: what
    lies beyond a slot's length is never seen. A slot number of S drops the entry."""
    state = dataclasses.replace(
        state,
        length_s=state.length_s.at[slots_n].set(count_n, mode="drop"),
        last_token_s=state.last_token_s.at[slots_n].set(last_token_n, mode="drop"),
        active_s=state.active_s.at[slots_n].set(False, mode="drop"),
    )
    return pin(state, mesh)


@functools.partial(jax.jit, static_argnames=("config", "reach", "mesh"), donate_argnames=("state",))
def extend(
    params: qwen.Params,
    config: ModelConfig,
    state: DecodeState,
    slots_m: Array,
    tokens_mp: Array,
    count_m: Array,
    last_token_m: Array,
    reach: int | None = None,
    mesh: Mesh | None = None,
) -> tuple[DecodeState, jax.Array | None]:
    """Append `count_m` tokens (padded to P) behind what M slots hold, without touching the rest; `last_token_m` follows them.

    The first appended token is the slot's old `last_token`. A slot number of S drops the row. Attention looks at the first `reach`
    positions, which must hold all that the rows come to hold (None: at all). Returns the state and the appended
    tokens' experts [M, P, L, k].
    """
    slots, length = state.length_s.shape[0], tokens_mp.shape[1]
    offset = jnp.arange(length)
    positions_mp = state.length_s[jnp.minimum(slots_m, slots - 1)][:, None] + offset
    segments_mp = (offset < count_m[:, None]).astype(jnp.int32)
    _, cache, experts = _continue(params, config, tokens_mp, positions_mp, segments_mp, state.cache, slots_m, reach)
    state = dataclasses.replace(
        state,
        cache=cache,
        length_s=state.length_s.at[slots_m].add(count_m, mode="drop"),
        last_token_s=state.last_token_s.at[slots_m].set(last_token_m, mode="drop"),
    )
    return pin(state, mesh), experts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """What `decode_chunk` sampled."""

    tokens_ns: jax.Array  # int32 [n, S]
    logps_ns: jax.Array  # float32 [n, S], nats
    emitted_ns: jax.Array  # bool [n, S], False where the slot was inactive
    steps: jax.Array  # int32, steps taken
    experts_nslk: jax.Array | None  # int16 [n, S, L, k], of the token that was fed at each step; None without experts


@functools.partial(
    jax.jit, static_argnames=("config", "chunk", "stop_ids", "candidates", "reach", "parts", "mesh"), donate_argnames=("state",)
)
def decode_chunk(
    params: qwen.Params,
    config: ModelConfig,
    state: DecodeState,
    start_s: Array,
    chunk: int,
    stop_ids: tuple[int, ...],
    candidates: int = 0,
    reach: int | None = None,
    parts: int = 0,
    rows_r: Array | None = None,
    mesh: Mesh | None = None,
) -> tuple[DecodeState, Chunk]:
    """Sample up to `chunk` tokens in every active slot.

    `start_s` > 0 lets a slot begin a turn of at most that many tokens, -1 halts it, 0 leaves it as it is. A slot goes inactive
    inside the chunk at a stop id or at its budget; the loop ends early when none is active. `candidates`: see `sample`.

    Attention looks at the first `reach` positions, which must hold all that active slots come to hold (None: at all). `rows_r`: the
    slots that may be active (S stands for none); the chunk's columns are theirs, and so many rows are computed (None: all slots).
    With either, or with `parts` > 0 (`kv_cache.Working`, which suits CPUs), the steps work on a copy of that part of the cache.
    """
    state = dataclasses.replace(
        state,
        active_s=jnp.where(start_s == 0, state.active_s, start_s > 0),
        remaining_s=jnp.where(start_s > 0, start_s, state.remaining_s),
    )
    whole = state
    slots, capacity = state.length_s.shape[0], kv_cache.length(state.cache)
    copied = bool(parts) or rows_r is not None or reach not in (None, capacity)
    if copied:
        rows = None if rows_r is None else jnp.asarray(rows_r)
        cache = kv_cache.working(state.cache, reach or capacity, parts, rows)
        if rows is not None:
            state = jax.tree.map(lambda x: x[rows], dataclasses.replace(state, cache=()))
            state = dataclasses.replace(state, active_s=state.active_s & (rows < slots))
            slots = rows.shape[0]
        state = dataclasses.replace(state, cache=cache)
    begin_s = state.length_s
    stops = jnp.asarray(stop_ids, jnp.int32)
    routed = (chunk, slots, config.num_layers, config.experts_per_token)
    outputs = Chunk(
        jnp.zeros((chunk, slots), jnp.int32),
        jnp.zeros((chunk, slots), jnp.float32),
        jnp.zeros((chunk, slots), bool),
        jnp.zeros((), jnp.int32),
        jnp.zeros(routed, jnp.int16) if config.num_experts else None,
    )

    def step(carry: tuple[DecodeState, Chunk]) -> tuple[DecodeState, Chunk]:
        state, out = carry
        i, active = out.steps, state.active_s
        hidden, cache, experts = _continue(
            params,
            config,
            state.last_token_s[:, None],
            state.length_s[:, None],
            active[:, None].astype(jnp.int32),
            state.cache,
        )
        logits_sv = qwen.logits(params, config, hidden[:, 0])
        token_s, logp_s = sample(logits_sv, state.sampling, state.key_s, state.length_s + 1, candidates)
        remaining_s = state.remaining_s - active
        ended_s = (token_s[:, None] == stops).any(-1) | (remaining_s <= 0)
        out = Chunk(
            out.tokens_ns.at[i].set(token_s),
            out.logps_ns.at[i].set(logp_s),
            out.emitted_ns.at[i].set(active),
            i + 1,
            None if experts is None or out.experts_nslk is None else out.experts_nslk.at[i].set(experts[:, 0]),
        )
        state = dataclasses.replace(
            state,
            cache=cache,
            length_s=state.length_s + active,
            last_token_s=jnp.where(active, token_s, state.last_token_s),
            remaining_s=remaining_s,
            active_s=active & ~ended_s,
        )
        return pin(state, mesh), out

    def running(carry: tuple[DecodeState, Chunk]) -> jax.Array:
        return jnp.asarray((carry[1].steps < chunk) & carry[0].active_s.any())

    state, outputs = jax.lax.while_loop(running, step, (pin(state, mesh), outputs))
    if copied:
        where_r = jnp.arange(slots) if rows_r is None else jnp.asarray(rows_r)
        positions_rn = begin_s[:, None] + jnp.arange(chunk)
        back = kv_cache.write_back(whole.cache, state.cache, where_r, positions_rn, positions_rn < state.length_s[:, None])
        old, new = dataclasses.replace(whole, cache=()), dataclasses.replace(state, cache=())
        rest = jax.tree.map(lambda x, y: x.at[where_r].set(y, mode="drop"), old, new)
        state = pin(dataclasses.replace(rest, cache=back), mesh)
    return state, outputs
