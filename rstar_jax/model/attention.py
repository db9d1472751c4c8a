"""Rotary embeddings and attention.

Shape legend: B batch, T query length, C key length, H query heads, K key/value heads, G = H / K, D head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rope(x_bthd: jax.Array, positions_bt: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding in the half-split form of Qwen and Llama checkpoints.

    Pairs (i, i + D/2) are turned by the angle position * theta^(-2i/D). Angles are float32 whatever the activations are: at
    position 10,000 a bfloat16 angle is off by tens of radians.
    """
    half = x_bthd.shape[-1] // 2
    inverse_wavelength = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles_bt1d = positions_bt.astype(jnp.float32)[:, :, None, None] * inverse_wavelength
    sin, cos = jnp.sin(angles_bt1d), jnp.cos(angles_bt1d)
    first, second = x_bthd[..., :half].astype(jnp.float32), x_bthd[..., half:].astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_bthd.dtype)


def causal_mask(segments_bt: jax.Array) -> jax.Array:
    """[B, T, T] bool: True where a query may see a key: same segment, and not after it.

    Padding (segment 0) sees padding only; so no row of the mask is empty and no softmax is NaN.
    """
    order = jnp.arange(segments_bt.shape[1])
    same = segments_bt[:, :, None] == segments_bt[:, None, :]
    return same & (order[:, None] >= order[None, :])


def cached_mask(positions_bt: jax.Array, capacity: int) -> jax.Array:
    """[B, T, C] bool: a query at position p sees cache entries 0..p."""
    return jnp.arange(capacity) <= positions_bt[:, :, None]


def dense_attention(q_bthd: jax.Array, k_bkcd: jax.Array, v_bkcd: jax.Array, mask_btc: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(D)) v for grouped queries, scores and softmax in float32. Returns [B, T, H, D]."""
    batch, length, heads, width = q_bthd.shape
    kv_heads = k_bkcd.shape[1]
    q_bktgd = q_bthd.reshape(batch, length, kv_heads, heads // kv_heads, width).transpose(0, 2, 1, 3, 4)
    scores = jnp.einsum("bktgd,bkcd->bktgc", q_bktgd, k_bkcd, preferred_element_type=jnp.float32) * width**-0.5
    scores = jnp.where(mask_btc[:, None, :, None, :], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_bkcd.dtype)
    out = jnp.einsum("bktgc,bkcd->bktgd", weights, v_bkcd)
    return out.transpose(0, 2, 1, 3, 4).reshape(batch, length, heads, width)
