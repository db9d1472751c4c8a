"""In which precision sums are computed: float32 at least, and float64 for float64 inputs (tests compare with float64 references)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def wide_dtype(*values: Any) -> Any:
    """The dtype for sums over these arrays or dtypes: their own, and float32 at least."""
    return jnp.promote_types(jnp.result_type(*values), jnp.float32)


def wide(x: jax.Array) -> jax.Array:
    """x in the dtype for sums."""
    return x.astype(wide_dtype(x.dtype))


def einsum(subscripts: str, *operands: jax.Array) -> jax.Array:
    """`jnp.einsum` that accumulates in, and returns, the dtype for sums."""
    return jnp.einsum(subscripts, *operands, preferred_element_type=wide_dtype(*operands))
