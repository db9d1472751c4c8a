"""Blockwise attention against the dense reference, numpy and torch; how its memory grows; and what it never looks at."""

import functools
import itertools
import re

import chex
import hypothesis
import hypothesis.extra.numpy
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from rstar_jax.config import MeshConfig
from rstar_jax.model.attention import ATTENTION, Visibility, attention, cached, cached_mask, causal, causal_mask
from rstar_jax.model.sharding import make_mesh
from rstar_jax.types import UserError


def draw(batch, length, capacity, heads, kv_heads, width=8, dtype=jnp.float32, seed=0):
    """q, k, v and the gradient of the result."""
    shapes = [(batch, length, heads, width), *[(batch, kv_heads, capacity, width)] * 2, (batch, length, heads, width)]
    keys = jax.random.split(jax.random.key(seed), 4)
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


@functools.partial(jax.jit, static_argnames=("implementation", "block"))
def run(q, k, v, grad, visibility, implementation, block):
    """The result, and the gradients of q, k and v."""
    out, back = jax.vjp(lambda q, k, v: attention(q, k, v, visibility, implementation, block), q, k, v)
    return out, *back(grad)


def assert_equals_dense(arrays, visibility, block, real_bt):
    q, k, v, grad = arrays
    real = real_bt[:, :, None, None]
    grad = jnp.where(real, grad, 0)
    expected, *expected_grads = run(q, k, v, grad, visibility, "dense", 0)
    actual, *actual_grads = run(q, k, v, grad, visibility, "blockwise", block)
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(jnp.where(real, actual, 0), jnp.where(real, expected, 0), rtol=0, atol=1e-5)
    for got, want in zip(actual_grads, expected_grads, strict=True):
        assert np.linalg.norm(got - want) <= 1e-5 * max(np.linalg.norm(want), 1)  # zero where each query sees a single key


def packed(length):
    """Rows of one sequence, of several with padding behind, and of padding, a sequence and padding."""
    place = np.arange(length)
    several = np.select([place < length // 3, place < length // 2, place <= length * 4 // 5], [1, 2, 3])
    middle = np.where((place >= length // 4) & (place <= length // 2), 7, 0)
    return jnp.asarray(np.stack([np.ones(length), several, middle]), jnp.int32)


@pytest.mark.parametrize(
    ("length", "block", "heads", "kv_heads"),
    [(1, 16, 2, 2), (7, 16, 8, 1), (63, 64, 4, 2), (64, 32, 6, 2), (65, 32, 3, 3), (130, 48, 8, 1)],
)
def test_values_and_gradients_equal_the_reference(length, block, heads, kv_heads):
    segments = packed(length)
    assert_equals_dense(draw(3, length, length, heads, kv_heads), causal(segments), block, segments > 0)


@pytest.mark.parametrize(("length", "capacity", "block"), [(1, 100, 16), (5, 70, 128), (40, 64, 16)])
def test_a_cache_is_seen_up_to_each_position(length, capacity, block):
    starts = jnp.array([[0], [capacity - length], [(capacity - length) // 2]])
    positions = starts + jnp.arange(length)
    assert_equals_dense(draw(3, length, capacity, 6, 2), cached(positions, capacity), block, positions >= 0)


def integers(shape, high):
    return hypothesis.extra.numpy.arrays(np.int32, shape, elements=st.integers(0, high))


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(integers((2, 13), 3), integers((2, 13), 30), integers((2, 22), 3), integers((2, 22), 30))
def test_any_segments_and_any_order(query_segment, query_order, key_segment, key_order):
    visibility = Visibility(*map(jnp.asarray, (query_segment, query_order, key_segment, key_order)))
    seen = (query_segment[:, :, None] == key_segment[:, None]) & (query_order[:, :, None] >= key_order[:, None])
    assert_equals_dense(draw(2, 13, 22, 4, 2, width=4), visibility, 5, jnp.asarray((query_segment > 0) & seen.any(-1)))


def test_masks_say_what_the_visibilities_say():
    causal_btc = causal_mask(jnp.array([[1, 1, 2, 0]]))[0].astype(int)
    chex.assert_trees_all_equal(causal_btc, jnp.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]))
    chex.assert_trees_all_equal(cached_mask(jnp.array([[2, 0]]), 4)[0].astype(int), jnp.array([[1, 1, 1, 0], [1, 0, 0, 0]]))


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_torch_gives_the_same(implementation):
    arrays, segments = draw(3, 50, 50, 6, 2), packed(50)
    segments = segments.at[2].set(5)  # padding means nothing in torch
    segments = jnp.where(segments == 0, 9, segments)
    q, k, v, grad = (torch.from_numpy(np.array(x)) for x in arrays)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    mask = torch.from_numpy(np.array(causal_mask(segments)))[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    expected = [out, *torch.autograd.grad(out, inputs, grad)]
    for got, want in zip(run(*arrays, causal(segments), implementation, 16), expected, strict=True):
        np.testing.assert_allclose(got, want.detach().numpy(), atol=2e-5)


def reference64(q, k, v, mask_btc):
    """Float64 numpy, one query head after the other."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, group = np.zeros(q.shape), q.shape[2] // k.shape[1]
    for head in range(q.shape[2]):
        scores = q[:, :, head] @ k[:, head // group].transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        weights = np.where(mask_btc, np.exp(scores - scores.max()), 0)
        out[:, :, head] = weights / weights.sum(-1, keepdims=True) @ v[:, head // group]
    return out


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_bfloat16_loses_only_what_its_inputs_lost(implementation):
    segments = jnp.ones((2, 90), jnp.int32)
    q, k, v, grad = draw(2, 90, 90, 6, 2, width=16, dtype=jnp.bfloat16)
    out, *grads = run(q, k, v, grad, causal(segments), implementation, 32)
    assert {x.dtype for x in (out, *grads)} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_allclose(out.astype(jnp.float32), reference64(q, k, v, causal_mask(segments)), atol=0.02)
    exact = run(*(x.astype(jnp.float32) for x in (q, k, v, grad)), causal(segments), "dense", 0)[1:]
    for got, want in zip(grads, exact, strict=True):
        assert np.linalg.norm(got.astype(jnp.float32) - want) <= 0.01 * np.linalg.norm(want)


def test_nan_at_padding_reaches_nothing():
    arrays, segments = draw(3, 65, 65, 4, 2), packed(65)
    of_queries, of_keys = (segments > 0)[:, :, None, None], (segments > 0)[:, None, :, None]
    clean, marked = (
        [jnp.where(real, x, at_padding) for x, real in zip(arrays, (of_queries, of_keys, of_keys, of_queries), strict=True)]
        for at_padding in (0, jnp.nan)
    )
    expected, actual = run(*clean, causal(segments), "blockwise", 16), run(*marked, causal(segments), "blockwise", 16)
    chex.assert_tree_all_finite(actual)
    chex.assert_trees_all_equal(actual, expected)


def test_blocks_without_a_visible_key_are_not_looked_at():
    """A NaN in a real value reaches every query block that looks at its block, visible or not; here, no block but those it must."""

    q, k, v, grad = draw(2, 64, 64, 2, 1)

    def reached(segments, place):
        out = run(q, k, v.at[:, :, place].set(jnp.nan), grad, causal(segments), "blockwise", 8)[0]
        return np.unique(np.where(np.isnan(out).any((0, 2, 3)))[0] // 8).tolist()

    segments = jnp.ones((2, 64), jnp.int32)
    assert reached(segments, 20) == [2, 3, 4, 5, 6, 7]  # not the blocks before it
    assert reached(segments.at[:, 32:].set(2), 20) == [2, 3]  # nor those of the next segment
    assert reached(segments.at[:, 48:].set(0), 20) == [2, 3, 4, 5]  # nor padding
    assert reached(segments.at[0, 32:].set(2), 20) == [2, 3, 4, 5, 6, 7]  # rows go together


@pytest.mark.parametrize("policy", [jax.checkpoint_policies.dots_with_no_batch_dims_saveable, jax.checkpoint_policies.nothing_saveable])
def test_inside_a_rematerialised_scan(policy):
    q, _, _, grad = draw(2, 33, 33, 4, 2)
    layers = jax.random.normal(jax.random.key(1), (3, 8, 8)) / 3
    segments = jnp.where(jnp.arange(33) < 20, 1, 2)[None].repeat(2, 0)

    def loss(layers, implementation, policy):
        def step(x, layer):
            k = (x @ layer)[:, :, ::2].transpose(0, 2, 1, 3)
            return x + attention(x, k, jnp.sin(k), causal(segments), implementation, 8), None

        step = step if policy is None else jax.checkpoint(step, policy=policy, prevent_cse=False)
        return jnp.vdot(jax.lax.scan(step, q, layers)[0], grad)

    gradient = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    chex.assert_trees_all_close(gradient(layers, "blockwise", policy), gradient(layers, "dense", None), rtol=1e-4, atol=1e-4)


def test_rows_and_heads_stay_where_they_are():
    """On a mesh of rows and heads nothing is gathered or moved; what is reduced has no more entries than there are block pairs."""
    mesh = make_mesh(MeshConfig(4, 1, 2))
    arrays, segments = draw(4, 64, 64, 4, 2), jnp.ones((4, 64), jnp.int32).at[:, 50:].set(0)
    specs = [("data", None, "tensor"), ("data", "tensor"), ("data", "tensor"), ("data", None, "tensor")]
    where = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
    placed = [jax.device_put(x, place) for x, place in zip(arrays, where, strict=True)]
    visibility = jax.device_put(causal(segments), NamedSharding(mesh, PartitionSpec("data")))
    out = run(*placed, visibility, "blockwise", 16)
    chex.assert_trees_all_close(out, run(*arrays, causal(segments), "blockwise", 16), atol=1e-5)
    assert all(x.sharding.is_equivalent_to(place, 4) for x, place in zip(out, [where[0], *where[:3]], strict=True))
    text = run.lower(*placed, visibility, "blockwise", 16).compile().as_text()
    assert not re.search(r"all-gather|all-to-all|collective-permute|reduce-scatter", text)
    reduced = re.findall(r"= *\(?\w+\[([\d,]*)\][^=]* all-reduce\(", text)
    assert reduced and all(np.prod([int(n) for n in shape.split(",") if n]) <= 16 for shape in reduced)


def test_blockwise_is_lowered_for_every_platform():
    """For NVIDIA, AMD and TPU it cannot be run here; that it is plain StableHLO can be seen."""
    q, k, v, grad = draw(1, 20, 20, 2, 1)
    program = jax.jit(lambda *arrays: run(*arrays, causal(jnp.ones((1, 20), jnp.int32)), "blockwise", 8))
    exported = jax.export.export(program, platforms=["cpu", "cuda", "rocm", "tpu"])(q, k, v, grad)
    assert "custom_call" not in exported.mlir_module()


def temporaries(implementation, length, backward):
    """Bytes that the compiled program holds beside its arguments and results; nothing is run."""
    q, k = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32), jax.ShapeDtypeStruct((1, 1, length, 8), jnp.float32)

    def loss(q, k, v, segments):
        return jnp.sum(jnp.square(attention(q, k, v, causal(segments), implementation, 128)))

    program = jax.grad(loss, (0, 1, 2)) if backward else loss
    compiled = jax.jit(program).lower(q, k, k, jax.ShapeDtypeStruct((1, length), jnp.int32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("backward", [False, True])
def test_memory_grows_with_the_length_not_with_its_square(backward):
    sizes = [temporaries("blockwise", 1024 * 2**i, backward) for i in range(5)]
    assert all(after <= 2.2 * before for before, after in itertools.pairwise(sizes)), sizes
    dense = [temporaries("dense", length, backward) for length in (1024, 4096)]
    assert dense[1] > 10 * dense[0], dense
    assert dense[1] > 20 * sizes[2]


def test_an_unknown_name_is_refused():
    q, k, v, _ = draw(1, 4, 4, 2, 1)
    with pytest.raises(UserError, match="'flash' does not exist; choose one of dense, blockwise, cudnn"):
        attention(q, k, v, causal(jnp.ones((1, 4), jnp.int32)), "flash", 16)
    assert list(ATTENTION) == ["dense", "blockwise", "cudnn"]


class Backend:
    platform = "gpu"

    def __init__(self, platform_version):
        self.platform_version = platform_version


@pytest.mark.parametrize("version", [None, "PJRT C API\nrocm 60200"])
def test_cudnn_is_refused_without_an_nvidia_gpu(monkeypatch, version):
    if version is not None:
        monkeypatch.setattr("jax.extend.backend.get_backend", lambda: Backend(version))
    q, k, v, _ = draw(1, 4, 4, 2, 1, dtype=jnp.bfloat16)
    with pytest.raises(UserError, match="'cudnn' needs an NVIDIA GPU"):
        attention(q, k, v, causal(jnp.ones((1, 4), jnp.int32)), "cudnn", 16)


def test_cudnn_is_asked_for_the_same(monkeypatch):
    """The kernel itself needs a GPU; here jax's own reference stands in for it, with the arguments that the kernel would get."""
    real = jax.nn.dot_product_attention

    def stand_in(q, k, v, mask, implementation):
        assert implementation == "cudnn"
        return real(q, k, v, mask=mask, implementation="xla")

    monkeypatch.setattr("jax.extend.backend.get_backend", lambda: Backend("PJRT C API\ncuda 12090"))
    monkeypatch.setattr("jax.nn.dot_product_attention", stand_in)
    segments = packed(30)
    q, k, v, _ = draw(3, 30, 30, 6, 2, dtype=jnp.bfloat16)
    expected, actual = (attention(q, k, v, causal(segments), name, 0) for name in ("dense", "cudnn"))
    chex.assert_trees_all_close(actual.astype(jnp.float32), expected.astype(jnp.float32), atol=0.02)
    with pytest.raises(UserError, match="not float32"):
        attention(q.astype(jnp.float32), k, v, causal(segments), "cudnn", 0)
