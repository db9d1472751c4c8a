"""Reading collectives from XLA's text."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rstar_jax.planning.hlo import Traffic, collectives, result_bytes

TEXT = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(bf16[2,4]{1,0})->f32[]}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], bf16[2,4])) -> (s32[], bf16[2,4]) {
  %state = (s32[], bf16[2,4]{1,0}) parameter(0)
  %all-gather-start = (bf16[2,4]{1,0}, bf16[8,4]{1,0}) all-gather-start(%x), channel_id=1, dimensions={0}
  %all-gather-done = bf16[8,4]{1,0} all-gather-done(%all-gather-start)
  %reduce-scatter-start = ((f32[8,4]{1,0}), f32[2,4]{1,0}) reduce-scatter-start(%y), dimensions={0}, to_apply=%add
  %reduce-scatter-done = f32[2,4]{1,0} reduce-scatter-done(%reduce-scatter-start)
  ROOT %next = (s32[], bf16[2,4]{1,0}) tuple(%i, %z), metadata={op_name="not an all-reduce(x)"}
}

%condition (state.1: (s32[], bf16[2,4])) -> pred[] {
  ROOT %less = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (p: bf16[2,4]) -> f32[] {
  %p = bf16[2,4]{1,0} parameter(0)
  %while = (s32[], bf16[2,4]{1,0}) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  %all-to-all = (s8[3]{0}, /*index=1*/s8[3]{0}) all-to-all(%q, %r), replica_groups={{0,1}}
  %permute = pred[5]{0} collective-permute(%s), source_target_pairs={{0,1}}
  ROOT %all-reduce = f32[] all-reduce(%u), to_apply=%add
}
"""


def test_every_collective_is_counted_once_and_as_often_as_its_loop_runs():
    assert collectives(TEXT) == {
        "all-gather": Traffic(1, 64, 12, 768),
        "reduce-scatter": Traffic(1, 32, 12, 384),
        "all-reduce": Traffic(1, 4, 1, 4),
        "all-to-all": Traffic(1, 6, 1, 6),
        "collective-permute": Traffic(1, 5, 1, 5),
    }


def test_a_loop_of_unknown_length_counts_once():
    text = TEXT.replace(', backend_config={"known_trip_count":{"n":"12"}}', "")
    assert collectives(text)["all-gather"] == Traffic(1, 64, 1, 64)


def test_a_program_without_collectives_has_none():
    assert collectives("ENTRY %main (p: f32[2]) -> f32[2] {\n  ROOT %p = f32[2]{0} parameter(0)\n}\n") == {}


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4),
        ("(bf16[2,3]{1,0}, f32[4]{0})", 28),
        ("f8e4m3fn[16]{0}", 16),
        ("c64[2]", 16),
        ("s4[3]", 2),
        ("u32[0,7]", 0),
        ("bf16[4,8]{1,0:T(8,128)}", 64),
        ("token[]", 0),
    ],
)
def test_bytes_of_a_shape(shape, size):
    assert result_bytes(shape) == size


def test_collectives_of_a_program_that_xla_compiled():
    mesh = jax.make_mesh((8,), ("data",), devices=jax.devices()[:8], axis_types=(AxisType.Auto,))

    def on(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    def f(x, kernels):  # rows in shards: each layer's sum over all of them is an all-reduce of [16, 4] float32
        def layer(total, kernel):
            return total + jax.lax.with_sharding_constraint(x.T @ jnp.tanh(x @ kernel), NamedSharding(mesh, PartitionSpec())), None

        return jax.lax.scan(layer, jnp.zeros((16, 4)), kernels)[0]

    text = jax.jit(f).trace(on((64, 16), "data"), on((5, 16, 4))).lower().compile().as_text()
    assert collectives(text) == {"all-reduce": Traffic(1, 256, 5, 1280)}
