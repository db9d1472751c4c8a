"""The mesh, and the rules that map logical axis names to mesh axes. Rules are a value: change them without touching the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rstar_jax.config import MeshConfig, ModelConfig
from rstar_jax.types import UserError

Rules = Mapping[str, str | tuple[str, ...] | None]

AXES = ("data", "fsdp", "expert", "context", "tensor")
"""The mesh's axes, the slowest links first:

data     rows of a batch; parameters are whole
fsdp     rows of a batch; parameters, gradients and moments are cut, and gathered layer by layer
expert   rows of a batch; experts are apart, and the tokens of the axis meet at them
context  tokens of a row; keys and values are gathered for attention, parameters are cut as over fsdp
tensor   heads, the feed-forward width and the vocabulary
"""

TRAINING_RULES: Rules = {
    "batch": ("data", "fsdp", "expert"),
    "length": "context",
    "embed": ("fsdp", "context"),
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "expert": ("expert", "fsdp"),
    "expert_embed": "context",
    "router": None,
    "rank": None,
    "norm": None,
    "layers": None,
}
"""Parameters over fsdp, context and tensor, experts over expert too; rows of a batch over data, fsdp and expert. fsdp cuts experts
between them and not through their rows: pieces of a leading axis are gathered as they lie, of another they have to be turned round, for
which XLA keeps a copy of all layers' experts."""

ROLLOUT_RULES: Rules = {
    **TRAINING_RULES,
    "embed": None,
    "expert": "expert",
    "expert_embed": None,
    "slots": ("data", "fsdp", "expert", "context"),
}
"""Parameters gathered over fsdp and context; slots over all axes but tensor, key/value heads over tensor."""


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes `AXES` over all devices. Raises `UserError` when the sizes do not multiply to their count."""
    devices = list(jax.devices() if devices is None else devices)
    wanted = [getattr(config, axis) for axis in AXES]
    fixed = math.prod(size for size in wanted if size != -1)
    sizes = tuple(len(devices) // fixed if size == -1 else size for size in wanted)
    if math.prod(sizes) != len(devices):
        named = " ".join(
            f"{axis}={size}" for axis, size in zip(AXES, wanted, strict=True) if size != 1 or axis in ("data", "fsdp", "tensor")
        )
        raise UserError(f"mesh {named} does not fit {len(devices)} devices")
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def parts(mesh: Mesh | None, name: str, rules: Rules = TRAINING_RULES) -> int:
    """Into how many parts the mesh cuts an axis of this logical name."""
    axes = rules[name]
    if mesh is None or axes is None:
        return 1
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))


def spec(axes: Sequence[str | None], rules: Rules) -> PartitionSpec:
    """The partition of an array whose axes bear these logical names."""
    return PartitionSpec(*(None if name is None else rules[name] for name in axes))


def shardings(axes: Any, mesh: Mesh, rules: Rules) -> Any:
    """A tree of `NamedSharding` for a tree of logical axis tuples."""
    return jax.tree.map(lambda names: NamedSharding(mesh, spec(names, rules)), axes, is_leaf=lambda x: isinstance(x, tuple))


def constrain(x: jax.Array, mesh: Mesh | None, axes: Sequence[str | None], rules: Rules = TRAINING_RULES) -> jax.Array:
    """Pin an activation's partition; without a mesh, x itself."""
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(axes, rules)))


def check_divisible(config: ModelConfig, mesh: Mesh, lengths: Sequence[int] = ()) -> None:
    """Raises `UserError` when an axis of a parameter, or a row of one of these lengths, cannot be split evenly over the mesh."""
    experts = [("model.num_experts", config.num_experts, "expert"), ("model.expert_d_ff", config.expert_d_ff, "mlp")]
    for name, size, logical in (
        ("model.num_kv_heads", config.num_kv_heads, "kv_heads"),
        ("model.num_heads", config.num_heads, "heads"),
        *(experts if config.num_experts else [("model.d_ff", config.d_ff, "mlp")]),
        ("model.vocab_size", config.vocab_size, "vocab"),
        ("model.d_model", config.d_model, "embed"),
        *(("training.buckets", length, "length") for length in lengths),
    ):
        if size % parts(mesh, logical):
            axes = TRAINING_RULES[logical]
            named = " * ".join(f"mesh.{axis}={mesh.shape[axis]}" for axis in ((axes,) if isinstance(axes, str) else axes or ()))
            raise UserError(f"{name}={size} cannot be split over {named}; choose a divisor")
