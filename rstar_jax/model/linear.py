"""The one place that knows how a weight is laid out.

Shape legend: B batch, T length, D model width, F output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

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


TRANSPOSED = "kernel_transposed"
"""A kernel as [out, in], which rollouts may use in the place of "kernel"."""


def transpose_kernels(layers: tuple[Any, ...]) -> tuple[Any, ...]:
    """Layers (in rollout form) with every `Linear`'s kernel stored [out, in]. Products with a few rows run about twice as fast on
    CPUs so: the weights are the left operand, and each row of them is one dot product along memory."""

    def turned(weights: Any) -> Any:
        if not isinstance(weights, Mapping):
            return weights
        kernel = {TRANSPOSED: jnp.swapaxes(weights["kernel"], -1, -2)} if "kernel" in weights else {}
        return {name: turned(value) for name, value in weights.items() if name != "kernel"} | kernel

    return tuple(map(turned, layers))


FEW_ROWS = 64
"""Products with at most so many rows take the weights as the left operand."""


def times_transposed(x: jax.Array, w_oi: jax.Array) -> jax.Array:
    """x [..., in] W^T for W [out, in]; of few rows as (W x^T)^T."""
    rows_ni = x.reshape(-1, x.shape[-1])
    if len(rows_ni) > FEW_ROWS:
        return jnp.einsum("...i,oi->...o", x, w_oi)
    # without the barrier XLA folds the transpositions into the product and turns it round again
    y_on = jax.lax.optimization_barrier(w_oi @ rows_ni.T)
    return y_on.T.reshape(*x.shape[:-1], w_oi.shape[0])


class Linear(nn.Module):
    """y = x W + b with W stored [in, out], or [out, in] under the name `TRANSPOSED`; `axes` are the logical names of W's two axes.
    Where the parameters hold an adapter (see `lora.attach`), y = x W + adapter_scale (x A) B + b."""

    features: int
    axes: tuple[str, str]
    use_bias: bool = False
    dtype: str = "float32"
    param_dtype: str = "float32"
    adapter_scale: float = 1.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.has_variable("params", TRANSPOSED):
            y = times_transposed(x, self.get_variable("params", TRANSPOSED).astype(self.dtype))
        else:
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
