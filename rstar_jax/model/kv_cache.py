"""The explicit key/value cache: one (k, v) pair per layer, heads before positions.

Shape legend: S slots, K key/value heads, C capacity in tokens, D head width; B rows and T tokens of one call.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rstar_jax.config import ModelConfig

Cache = tuple[tuple[jax.Array, jax.Array], ...]
"""Per layer (k_skcd, v_skcd)."""


def empty_cache(config: ModelConfig, slots: int, capacity: int) -> Cache:
    """Zeros; what lies beyond a slot's length is never seen, so its content does not matter."""
    shape = (slots, config.num_kv_heads, capacity, config.head_dim)
    return tuple((jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)) for _ in range(config.num_layers))


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
