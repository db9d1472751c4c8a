"""Rotary position embeddings, with the scalings that checkpoints use.

Shape legend: B batch, T length, H heads, D head width.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from rstar_jax.config import ModelConfig
from rstar_jax.model.precision import wide, wide_dtype

Rotation = tuple[jax.Array, jax.Array]
"""Sine and cosine [B, T, 1, D/2] of every position's angles, float32 at least."""


def frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Radians per position [D/2] float32 of each pair of dimensions, and the factor on sine and cosine (1 but for yarn).

    default: f_i = theta^(-2i/D). linear: f / factor. yarn (arXiv 2309.00071, section 3): f / factor where a pair turns fewer than
    beta_slow times over the original length, f where it turns more than beta_fast times, a linear ramp between. llama3: the same
    idea with a ramp over the wavelength, from original / low_frequency to original / high_frequency.
    """
    width, theta, factor, original = config.head_dim, config.rope_theta, config.rope_factor, config.rope_original_length
    index = np.arange(0, width, 2, dtype=np.float64)
    plain = theta ** (-index / width)
    scale = 1.0
    if config.rope_type == "linear":
        plain = plain / factor
    elif config.rope_type == "yarn":

        def dimension(turns: float) -> float:  # the pair that turns so many times over the original length
            return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dimension(config.rope_beta_fast), dimension(config.rope_beta_slow)
        if config.rope_truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
        plain = plain / factor * ramp + plain * (1 - ramp)
        scale = config.rope_attention_factor or (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    elif config.rope_type == "llama3":
        turns = original * plain / (2 * math.pi)
        low, high = config.rope_low_frequency, config.rope_high_frequency
        keep = np.clip((turns - low) / (high - low), 0, 1)
        plain = plain / factor * (1 - keep) + plain * keep
    return plain.astype(np.float32), scale


def rotation(config: ModelConfig, positions_bt: jax.Array) -> Rotation:
    """What `rotate` needs to know of the positions. Angles are float32 at least: at position 10,000 a bfloat16
    angle is off by tens of radians."""
    radians, scale = frequencies(config)
    angles_bt1d = positions_bt.astype(wide_dtype(jnp.dtype(config.dtype)))[:, :, None, None] * radians
    return jnp.sin(angles_bt1d) * scale, jnp.cos(angles_bt1d) * scale


def rotate(x_bthd: jax.Array, by: Rotation) -> jax.Array:
    """Turn pairs (i, i + D/2) of queries or keys: the half-split form of Qwen and Llama checkpoints."""
    sin, cos = by
    half = x_bthd.shape[-1] // 2
    first, second = wide(x_bthd[..., :half]), wide(x_bthd[..., half:])
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_bthd.dtype)
