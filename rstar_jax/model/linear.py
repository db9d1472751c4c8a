"""The one place that knows how a weight is laid out.

Shape legend: B batch, T length, D model width, F output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp

Initializer = Callable[..., jax.Array]


def scaled_normal(batch_axis: Sequence[int] = ()) -> Initializer:
    """Normal with standard deviation 1/sqrt(fan_in) (LeCun), fan_in = the kernel's first axis behind `batch_axis`."""
    return nn.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=tuple(batch_axis))


def parameter(
    module: nn.Module, name: str, initializer: Initializer, axes: tuple[str, ...], shape: tuple[int, ...], dtype: str
) -> jax.Array:
    """A parameter of `module` whose axes bear logical names (boxed only while it is initialised)."""
    return cast(jax.Array, module.param(name, nn.with_partitioning(initializer, axes), shape, jnp.dtype(dtype)))


class Linear(nn.Module):
    """y = x W + b with W stored [in, out]; `axes` are the logical names of W's two axes. Where the parameters hold an adapter (see
    `lora.attach`), y = x W + adapter_scale (x A) B + b."""

    features: int
    axes: tuple[str, str]
    use_bias: bool = False
    dtype: str = "float32"
    param_dtype: str = "float32"
    adapter_scale: float = 1.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = parameter(self, "kernel", scaled_normal(), self.axes, (x.shape[-1], self.features), self.param_dtype)
        y = x @ kernel.astype(self.dtype)
        if self.has_variable("params", "adapter_a"):
            a: jax.Array = self.get_variable("params", "adapter_a")
            b: jax.Array = self.get_variable("params", "adapter_b")
            y = y + (x @ a.astype(self.dtype)) @ b.astype(self.dtype) * self.adapter_scale
        if self.use_bias:
            bias = parameter(self, "bias", nn.initializers.zeros_init(), self.axes[1:], (self.features,), self.param_dtype)
            y = y + bias.astype(self.dtype)
        return y
