"""The explicit key/value cache: one (k, v) pair per layer, heads before positions.

Shape legend: S slots, K key/value heads, C capacity in tokens, D head width; B rows and T tokens of one call.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rstar_jax.config import ModelConfig

Cache = tuple[tuple[jax.Array, jax.Array], ...]
"""Per layer (k_skcd, v_skcd)."""


class Working(NamedTuple):
    """One layer's cache as a chunk of decode steps reads it on a CPU: the first positions alone, keys with positions last, slots in
    parts whose products run at the same time on different cores."""

    keys: tuple[jax.Array, ...]  # [s, K, D, R] each
    values: tuple[jax.Array, ...]  # [s, K, R, D] each


def working(cache: Cache, reach: int, parts: int, slots_r: jax.Array | None = None) -> tuple[Working, ...] | Cache:
    """A copy of the first `reach` positions of some slots (None: of all), in every layer; 0 parts: laid out as the cache is."""

    def chosen(x: jax.Array) -> jax.Array:
        return x[:, :, :reach] if slots_r is None else x[slots_r, :, :reach]

    if not parts:
        return tuple((chosen(k), chosen(v)) for k, v in cache)
    slots = cache[0][0].shape[0] if slots_r is None else slots_r.shape[0]
    cuts = [slice(slots * i // parts, slots * (i + 1) // parts) for i in range(parts)]
    return tuple(Working(tuple(chosen(k)[cut].swapaxes(2, 3) for cut in cuts), tuple(chosen(v)[cut] for cut in cuts)) for k, v in cache)


def write_step(layer: Working, k_b1kd: jax.Array, v_b1kd: jax.Array, positions_b1: jax.Array, valid_b1: jax.Array) -> Working:
    """Put one entry of every slot at its position; entries that are not valid are dropped."""
    keys, values, first = [], [], 0
    for key, value in zip(layer.keys, layer.values, strict=True):
        rows = jnp.arange(key.shape[0])
        part = slice(first, first + key.shape[0])
        where = jnp.where(valid_b1[part, 0], positions_b1[part, 0], key.shape[3])
        keys.append(key.at[rows, :, :, where].set(k_b1kd[part, 0].astype(key.dtype), mode="drop"))
        values.append(value.at[rows, :, where].set(v_b1kd[part, 0].astype(value.dtype), mode="drop"))
        first = part.stop
    return Working(tuple(keys), tuple(values))


def write_back(
    cache: Cache, layers: tuple[Working, ...] | Cache, slots_r: jax.Array, positions_rn: jax.Array, valid_rn: jax.Array
) -> Cache:
    """The cache with the entries that the working copy of these slots has at these positions."""
    within_rn = jnp.minimum(positions_rn, length(layers) - 1)

    def entries(parts: tuple[jax.Array, ...], positions_last: bool) -> jax.Array:
        """[R, n, K, D]."""
        found, first = [], 0
        for part in parts:
            rows, where = jnp.arange(part.shape[0])[:, None], within_rn[first : first + part.shape[0]]
            found.append(part[rows, :, :, where] if positions_last else part[rows, :, where])
            first += part.shape[0]
        return jnp.concatenate(found)

    def pair(layer: Working | tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        if isinstance(layer, Working):
            return entries(layer.keys, True), entries(layer.values, False)
        return entries((layer[0],), False), entries((layer[1],), False)

    return tuple(
        (write(k, new_k, slots_r, positions_rn, valid_rn), write(v, new_v, slots_r, positions_rn, valid_rn))
        for (k, v), (new_k, new_v) in zip(cache, map(pair, layers), strict=True)
    )


def empty_cache(config: ModelConfig, slots: int, capacity: int) -> Cache:
    """Zeros; what lies beyond a slot's length is never seen, so its content does not matter."""
    shape = (slots, config.num_kv_heads, capacity, config.head_dim)
    return tuple((jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)) for _ in range(config.num_layers))


def length(cache: Cache | tuple[Working, ...]) -> int:
    """Positions that a slot has in it."""
    first = cache[0]
    return int(first.values[0].shape[2] if isinstance(first, Working) else first[0].shape[2])


def cache_bytes(config: ModelConfig, slots: int, capacity: int) -> int:
    """Bytes of `empty_cache(config, slots, capacity)`."""
    per_token = 2 * config.num_kv_heads * config.head_dim * jnp.dtype(config.dtype).itemsize
    return config.num_layers * slots * capacity * per_token


def write(cache_skcd: jax.Array, new_btkd: jax.Array, slots_b: jax.Array, positions_bt: jax.Array, valid_bt: jax.Array) -> jax.Array:
    """Put the entries of B rows at their positions; entries that are not valid are dropped.

    `slots_b` says which slot each row belongs to; a slot number outside the cache drops the whole row.
    """
    capacity = cache_skcd.shape[2]
    where_bt = jnp.where(valid_bt, positions_bt, capacity)
    return cache_skcd.at[slots_b[:, None], :, where_bt].set(new_btkd.astype(cache_skcd.dtype), mode="drop")
