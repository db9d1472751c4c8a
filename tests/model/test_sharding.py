"""The mesh and its rules."""

import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec

from rstar_jax.config import MeshConfig, ModelConfig
from rstar_jax.model import qwen
from rstar_jax.model.sharding import AXES, ROLLOUT_RULES, TRAINING_RULES, check_divisible, make_mesh, shardings, spec
from rstar_jax.types import UserError

MODEL = ModelConfig(vocab_size=64, num_layers=2, d_model=16, d_ff=32, num_heads=4, num_kv_heads=2, head_dim=8)


def test_one_axis_may_take_the_rest():
    assert dict(make_mesh(MeshConfig(-1, 2, 2)).shape) == {"data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}
    assert dict(make_mesh(MeshConfig(), jax.devices()[:1]).shape) == dict.fromkeys(AXES, 1)


@pytest.mark.parametrize("sizes", [(3, 1, 1), (-1, 3, 1), (16, 1, 1), (1, 1, 1)])
def test_sizes_that_do_not_fit_the_devices_are_refused(sizes):
    with pytest.raises(UserError, match="does not fit 8 devices"):
        make_mesh(MeshConfig(*sizes))


def test_rules_map_names_to_axes():
    assert spec(("layers", "embed", "heads"), TRAINING_RULES) == PartitionSpec(None, ("fsdp", "context"), "tensor")
    assert spec(("layers", "embed", "heads"), ROLLOUT_RULES) == PartitionSpec(None, None, "tensor")
    assert spec(("batch", None, None), TRAINING_RULES) == PartitionSpec(("data", "fsdp", "expert"), None, None)


def test_parameters_are_created_in_their_shards():
    mesh = make_mesh(MeshConfig(2, 2, 2))
    where = shardings(qwen.param_axes(MODEL), mesh, TRAINING_RULES)
    params = jax.jit(qwen.init, static_argnums=0, out_shardings=where)(MODEL, jax.random.key(0))
    kernel = params["layers"]["gate"]["kernel"]
    assert kernel.shape == (2, 16, 32)
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 8, 16)}


@pytest.mark.parametrize(
    ("changes", "sizes", "named"),
    [
        ({}, (1, 1, 8), "num_kv_heads"),
        ({"d_model": 12}, (1, 8, 1), "d_model=12 cannot be split over mesh.fsdp=8 . mesh.context=1"),
        ({"d_model": 12}, (1, 2, 1, 4), "d_model=12 cannot be split over mesh.fsdp=2 . mesh.context=4"),
        ({"vocab_size": 63}, (4, 1, 2), "vocab_size"),
        ({"num_experts": 6, "experts_per_token": 2, "expert_d_ff": 8}, (2, 1, 1, 1, 4), "num_experts"),
        ({}, (4, 1, 1, 2), "training.buckets=33 cannot be split over mesh.context=2"),
    ],
)
def test_an_axis_that_does_not_divide_is_named(changes, sizes, named):
    with pytest.raises(UserError, match=named):
        check_divisible(dataclasses.replace(MODEL, **changes), make_mesh(MeshConfig(*sizes)), (32, 33))
