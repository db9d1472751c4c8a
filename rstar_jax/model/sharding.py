"""The mesh, and the rules that map logical axis names to mesh axes. Rules are a value: change them without touching the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rstar_jax.config import MeshConfig, ModelConfig
from rstar_jax.types import UserError

Rules = Mapping[str, str | tuple[str, ...] | None]

TRAINING_RULES: Rules = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "expert": None,
    "router": None,
    "rank": None,
    "norm": None,
    "layers": None,
}
"""Parameters over fsdp and tensor, rows of a batch over data and fsdp."""

ROLLOUT_RULES: Rules = {**TRAINING_RULES, "embed": None, "slots": ("data", "fsdp")}
"""Parameters gathered over fsdp; slots over data and fsdp, key/value heads over tensor."""


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of axes (data, fsdp, tensor) over all devices. Raises `UserError` when the sizes do not multiply to their count."""
    devices = list(jax.devices() if devices is None else devices)
    sizes = [config.data, config.fsdp, config.tensor]
    fixed = 1
    for size in sizes:
        fixed *= size if size != -1 else 1
    sizes = [len(devices) // fixed if size == -1 else size for size in sizes]
    total = sizes[0] * sizes[1] * sizes[2]
    if total != len(devices):
        raise UserError(f"mesh data={config.data} fsdp={config.fsdp} tensor={config.tensor} does not fit {len(devices)} devices")
    return jax.make_mesh(tuple(sizes), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3, devices=devices)


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


def check_divisible(config: ModelConfig, mesh: Mesh) -> None:
    """Raises `UserError` when a parameter axis cannot be split evenly over the mesh."""
    tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    for name, size, parts in (
        ("model.num_kv_heads", config.num_kv_heads, tensor),
        ("model.num_heads", config.num_heads, tensor),
        ("model.expert_d_ff", config.expert_d_ff, tensor) if config.num_experts else ("model.d_ff", config.d_ff, tensor),
        ("model.vocab_size", config.vocab_size, tensor),
        ("model.d_model", config.d_model, fsdp),
    ):
        if size % parts:
            axis = "fsdp" if name == "model.d_model" else "tensor"
            raise UserError(f"{name}={size} cannot be split over mesh.{axis}={parts}; choose a divisor")
