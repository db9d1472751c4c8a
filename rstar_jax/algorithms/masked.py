"""Reductions over the unmasked entries of an array (device, pure).

The one place where a mask meets a number. Masked entries are replaced before anything is computed from them, so that a NaN
or an infinity there changes neither a value nor a gradient (`0 * nan` is NaN; `where` is not a product). To keep that for a
non-linear function of masked data, `fill` its arguments first and reduce its result afterwards.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from rstar_jax.types import Array

Axis = int | tuple[int, ...] | None


def fill(values: Array, mask: Array, value: float = 0.0) -> jax.Array:
    """`values` where `mask`, else `value`.

    Args:
      values: numbers of any shape; computed in float32 at least.
      mask: bool, the same shape; True keeps an entry.
      value: what a masked entry becomes.

    Returns:
      An array of the same shape. The gradient with respect to a masked entry is exactly 0.
    """
    values, mask = jnp.asarray(values), jnp.asarray(mask)
    chex.assert_equal_shape([values, mask])
    chex.assert_type(mask, bool)
    dtype = jnp.promote_types(values.dtype, jnp.float32)
    return jnp.where(mask, values.astype(dtype), jnp.asarray(value, dtype))


def masked_count(mask: Array, axis: Axis = None) -> jax.Array:
    """The number of unmasked entries, int32: exact to 2^31, where a float32 count stops at 2^24."""
    return jnp.sum(jnp.asarray(mask), axis=axis, dtype=jnp.int32)


def masked_sum(values: Array, mask: Array, axis: Axis = None) -> jax.Array:
    """`sum_{i: mask_i} values_i`; 0 where nothing is unmasked."""
    return jnp.sum(fill(values, mask), axis=axis)


def masked_mean(values: Array, mask: Array, axis: Axis = None) -> jax.Array:
    """`masked_sum / masked_count`; 0 where nothing is unmasked.

    For statistics within one array. A loss keeps the two apart (`rstar_jax.types.Sums`) and divides once at the end.
    """
    return masked_sum(values, mask, axis) / jnp.maximum(masked_count(mask, axis), 1)


def masked_max(values: Array, mask: Array, axis: Axis = None) -> jax.Array:
    """`max_{i: mask_i} values_i`; -inf, the identity of max, where nothing is unmasked."""
    return jnp.max(fill(values, mask, -jnp.inf), axis=axis)
