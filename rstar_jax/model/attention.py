"""Attention behind one function, with implementations by name.

Shape legend: B batch, T query length, C key length, H query heads, K key/value heads, G = H / K, D head width.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from rstar_jax.model.precision import einsum, wide, wide_dtype
from rstar_jax.model.sharding import TRAINING_RULES, spec
from rstar_jax.types import UserError

_HIDDEN = float(jnp.finfo(jnp.float32).min)  # finite: a row without a visible key gives no NaN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
    """Which keys a query sees: those of its own segment that do not stand after it. Segment 0 is padding: no other query sees
    its keys, and what its queries receive is finite but means nothing."""

    query_segment_bt: jax.Array  # int32 [B, T]
    query_order_bt: jax.Array  # int32 [B, T]
    key_segment_bc: jax.Array  # int32 [B, C]
    key_order_bc: jax.Array  # int32 [B, C]


def causal(segments_bt: jax.Array) -> Visibility:
    """Queries and keys are the same tokens, in the order of their places in the row."""
    order_bt = jnp.broadcast_to(jnp.arange(segments_bt.shape[1], dtype=jnp.int32), segments_bt.shape)
    return Visibility(segments_bt, order_bt, segments_bt, order_bt)


def cached(positions_bt: jax.Array, capacity: int) -> Visibility:
    """Keys are the entries of a cache: a query at position p sees entries 0..p."""
    order_bc = jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32), (positions_bt.shape[0], capacity))
    return Visibility(jnp.ones_like(positions_bt), positions_bt, jnp.ones_like(order_bc), order_bc)


Places = tuple[jax.Array, jax.Array]
"""Segments and orders of some tokens, [B, T] int32 each."""


def attention(
    q_bthd: jax.Array,
    k_bkcd: jax.Array,
    v_bkcd: jax.Array,
    visibility: Visibility,
    implementation: str,
    block: int,
    mesh: Mesh | None = None,
) -> jax.Array:
    """softmax(q k^T / sqrt(D)) v over the visible keys, for grouped queries: H is a multiple of K. Returns [B, T, H, D].

    Scores, softmax and sums are float32 at least; the result has the dtype of v. `implementation` is a name in
    `ATTENTION`; `block` is the number of positions that "blockwise" handles at a time.

    With a mesh every device attends from its own queries, rows and heads (axes batch, length and heads of `TRAINING_RULES`) to all
    keys of its rows and heads: over `context` the keys and values are gathered, and nothing else is exchanged.
    """
    if implementation not in ATTENTION:
        raise UserError(f"attention {implementation!r} does not exist; choose one of {', '.join(ATTENTION)}")
    attend = ATTENTION[implementation]
    if mesh is None or mesh.size == 1:
        return attend(q_bthd, k_bkcd, v_bkcd, visibility, block)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, query: Places, keys: Places) -> jax.Array:
        return attend(q, k, v, Visibility(*query, *keys), block)

    heads, kv_heads, tokens, keys = (
        spec(axes, TRAINING_RULES)
        for axes in (("batch", "length", "heads", None), ("batch", "kv_heads", None, None), ("batch", "length"), ("batch", None))
    )
    # the rules of varying axes do not know custom_vjp in loops; that the result is right is what the tests of meshes hold
    where = (heads, kv_heads, kv_heads, (tokens, tokens), (keys, keys))
    query_places = visibility.query_segment_bt, visibility.query_order_bt
    key_places = visibility.key_segment_bc, visibility.key_order_bc
    return jax.shard_map(local, mesh=mesh, in_specs=where, out_specs=heads, check_vma=False)(
        q_bthd, k_bkcd, v_bkcd, query_places, key_places
    )


def _visible(visibility: Visibility) -> jax.Array:
    """[B, T, C] bool. Padding sees padding; so no row of a causal mask is empty."""
    same = visibility.query_segment_bt[:, :, None] == visibility.key_segment_bc[:, None, :]
    return same & (visibility.query_order_bt[:, :, None] >= visibility.key_order_bc[:, None, :])


def _grouped(x_bthd: jax.Array, kv_heads: int) -> jax.Array:
    """[B, K, T, G, D]."""
    batch, length, heads, width = x_bthd.shape
    return x_bthd.reshape(batch, length, kv_heads, heads // kv_heads, width).transpose(0, 2, 1, 3, 4)


def _ungrouped(x_bktgd: jax.Array) -> jax.Array:
    """[B, T, H, D]."""
    batch, kv_heads, length, group, width = x_bktgd.shape
    return x_bktgd.transpose(0, 2, 1, 3, 4).reshape(batch, length, kv_heads * group, width)


def _scores(q_bktgd: jax.Array, k_bkcd: jax.Array, mask_btc: jax.Array) -> jax.Array:
    """[B, K, T, G, C], float32 at least: q k^T / sqrt(D), and `_HIDDEN` where the mask is False."""
    scores = einsum("bktgd,bkcd->bktgc", q_bktgd, k_bkcd) * q_bktgd.shape[-1] ** -0.5
    return jnp.where(mask_btc[:, None, :, None, :], scores, _HIDDEN)


# --- dense -----------------------------------------------------------------------------------------------------------


def causal_mask(segments_bt: jax.Array) -> jax.Array:
    """[B, T, T] bool: the mask of `causal`."""
    return _visible(causal(segments_bt))


def cached_mask(positions_bt: jax.Array, capacity: int) -> jax.Array:
    """[B, T, C] bool: the mask of `cached`."""
    return _visible(cached(positions_bt, capacity))


def dense_attention(q_bthd: jax.Array, k_bkcd: jax.Array, v_bkcd: jax.Array, mask_btc: jax.Array) -> jax.Array:
    """`attention` with all scores at once: the reference. Memory grows with H * T * C."""
    weights = jax.nn.softmax(_scores(_grouped(q_bthd, k_bkcd.shape[1]), k_bkcd, mask_btc), axis=-1)
    return _ungrouped(einsum("bktgc,bkcd->bktgd", weights.astype(v_bkcd.dtype), v_bkcd).astype(v_bkcd.dtype))


def _dense(q_bthd: jax.Array, k_bkcd: jax.Array, v_bkcd: jax.Array, visibility: Visibility, block: int) -> jax.Array:
    del block
    return dense_attention(q_bthd, k_bkcd, v_bkcd, _visible(visibility))


def step_attention(q_b1hd: jax.Array, keys: tuple[jax.Array, ...], values: tuple[jax.Array, ...], positions_b1: jax.Array) -> jax.Array:
    """`attention` of one query per slot over positions 0..p of a working copy of its cache (`kv_cache.Working`)."""
    out, first = [], 0
    for key_skdr, value_skrd in zip(keys, values, strict=True):
        part = slice(first, first + key_skdr.shape[0])
        q_skgd = _grouped(q_b1hd[part], key_skdr.shape[1])[:, :, 0]
        scores = einsum("skgd,skdr->skgr", q_skgd, key_skdr) * q_skgd.shape[-1] ** -0.5
        seen_sr = jnp.arange(key_skdr.shape[3]) <= positions_b1[part]
        weights = jax.nn.softmax(jnp.where(seen_sr[:, None, None], scores, _HIDDEN), axis=-1)
        out.append(einsum("skgr,skrd->skgd", weights.astype(value_skrd.dtype), value_skrd).astype(value_skrd.dtype))
        first = part.stop
    return jnp.concatenate(out).reshape(q_b1hd.shape)


# --- cudnn -----------------------------------------------------------------------------------------------------------


def _cudnn(q_bthd: jax.Array, k_bkcd: jax.Array, v_bkcd: jax.Array, visibility: Visibility, block: int) -> jax.Array:
    """NVIDIA's fused kernel. Its mask has the size B * T * C; cuDNN has no gradient for odd T or C."""
    del block
    version = jax.extend.backend.get_backend().platform_version.lower()
    if "cuda" not in version:  # "gpu" is what ROCm calls itself too
        raise UserError("attention 'cudnn' needs an NVIDIA GPU; choose blockwise or dense")
    if q_bthd.dtype not in (jnp.bfloat16, jnp.float16):
        raise UserError(f"attention 'cudnn' computes in bfloat16 or float16, not {q_bthd.dtype}; choose blockwise or dense")
    k_bckd, v_bckd = k_bkcd.transpose(0, 2, 1, 3), v_bkcd.transpose(0, 2, 1, 3)
    mask = _visible(visibility)[:, None]
    return jax.nn.dot_product_attention(q_bthd, k_bckd, v_bckd, mask=mask, implementation="cudnn")


# --- blockwise -------------------------------------------------------------------------------------------------------
#
# FlashAttention (arXiv:2307.08691) in plain JAX: for each block of queries a loop over the key blocks that it may see, with a
# running maximum and sum. Blocks are cut where they lie, without padding the arrays: the last block of an axis ends with the
# axis, and its places that also belong to the block before it count as padding. Padding is zeroed when it is cut, so that
# whatever stands there, NaN too, reaches nothing else.


def _cut(x: jax.Array, axis: int, index: jax.Array, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _add(x: jax.Array, axis: int, index: jax.Array, part: jax.Array) -> jax.Array:
    """x with `part` added to block `index`."""
    size = part.shape[axis]
    return lax.dynamic_update_slice_in_dim(x, _cut(x, axis, index, size) + part.astype(x.dtype), index * size, axis)


def _cut_segments(segments_bn: jax.Array, index: jax.Array, size: int) -> jax.Array:
    place = jnp.minimum(index * size, segments_bn.shape[1] - size) + jnp.arange(size)
    return jnp.where(place >= index * size, _cut(segments_bn, 1, index, size), 0)


def _cut_queries(x_bthd: jax.Array, kv_heads: int, index: jax.Array, segments_bt: jax.Array) -> jax.Array:
    """Block `index` [B, K, t, G, D], zero at padding."""
    block_bthd = _cut(x_bthd, 1, index, segments_bt.shape[1])
    return _grouped(jnp.where(segments_bt[:, :, None, None] > 0, block_bthd, 0), kv_heads)


def _meet(
    q_bktgd: jax.Array, k_bkcd: jax.Array, v_bkcd: jax.Array, visibility: Visibility, i: jax.Array, j: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Key block j before query block i: its keys and values [B, K, c, D], and the scores [B, K, t, G, c]."""
    size_t = q_bktgd.shape[2]
    seen = Visibility(
        _cut_segments(visibility.query_segment_bt, i, size_t),
        _cut(visibility.query_order_bt, 1, i, size_t),
        _cut_segments(visibility.key_segment_bc, j, size),
        _cut(visibility.key_order_bc, 1, j, size),
    )
    real_bc = seen.key_segment_bc > 0
    k, v = (jnp.where(real_bc[:, None, :, None], _cut(x, 2, j, size), 0) for x in (k_bkcd, v_bkcd))
    return k, v, _scores(q_bktgd, k, _visible(seen) & real_bc[:, None, :])


def _extremes(x_bn: jax.Array, segments_bn: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Least and greatest value in each block [B, blocks], padding left out; of nothing but padding, the int32 limits swapped."""
    limits = jnp.iinfo(jnp.int32)
    fill = ((0, 0), (0, -x_bn.shape[1] % size))
    shape = (x_bn.shape[0], -1, size)
    x, real = jnp.pad(x_bn, fill).reshape(shape), jnp.pad(segments_bn, fill).reshape(shape) > 0
    return jnp.where(real, x, limits.max).min(-1), jnp.where(real, x, limits.min).max(-1)


def _key_ranges(visibility: Visibility, size_t: int, size_c: int) -> tuple[jax.Array, jax.Array]:
    """For each query block, the first key block that it may see in any row, and the one after the last; int32 [blocks]."""
    query, key = visibility.query_segment_bt, visibility.key_segment_bc
    low_bi, high_bi = _extremes(query, query, size_t)
    low_bj, high_bj = _extremes(key, key, size_c)
    _, last_bi = _extremes(visibility.query_order_bt, query, size_t)
    first_bj, _ = _extremes(visibility.key_order_bc, key, size_c)
    meets_bij = (low_bi[:, :, None] <= high_bj[:, None]) & (high_bi[:, :, None] >= low_bj[:, None])
    needed_ij = jnp.any(meets_bij & (last_bi[:, :, None] >= first_bj[:, None]), axis=0)
    stop_i = jnp.where(needed_ij.any(1), needed_ij.shape[1] - jnp.argmax(needed_ij[:, ::-1], axis=1), 0)
    return jnp.argmax(needed_ij, axis=1).astype(jnp.int32), stop_i.astype(jnp.int32)


def _sizes(q_bthd: jax.Array, k_bkcd: jax.Array, block: int) -> tuple[int, int, int]:
    """Positions in a query block and in a key block, and the number of query blocks."""
    length, capacity = q_bthd.shape[1], k_bkcd.shape[2]
    return min(block, length), min(block, capacity), -(-length // min(block, length))


Residuals = tuple[jax.Array, jax.Array, jax.Array, Visibility, jax.Array, jax.Array]
Arrays = tuple[jax.Array, ...]


def _blockwise_forward(
    q_bthd: jax.Array, k_bkcd: jax.Array, v_bkcd: jax.Array, visibility: Visibility, block: int
) -> tuple[jax.Array, Residuals]:
    """The result; and for the backward pass the inputs, the result and log sum exp(scores) [B, K, T, G]."""
    size_t, size_c, blocks = _sizes(q_bthd, k_bkcd, block)
    first_i, stop_i = _key_ranges(visibility, size_t, size_c)

    def queries(i: jax.Array, done: Arrays) -> Arrays:
        segments_bt = _cut_segments(visibility.query_segment_bt, i, size_t)
        q = _cut_queries(q_bthd, k_bkcd.shape[1], i, segments_bt)

        def keys(j: jax.Array, state: Arrays) -> Arrays:
            top, total, mixed = state
            _, v, scores = _meet(q, k_bkcd, v_bkcd, visibility, i, j, size_c)
            new_top = jnp.maximum(top, scores.max(-1))
            weights, shrink = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            mixed = mixed * shrink[..., None] + einsum("bktgc,bkcd->bktgd", weights.astype(v.dtype), v)
            return new_top, total * shrink + weights.sum(-1), mixed

        zeros = jnp.zeros(q.shape, wide_dtype(q, v_bkcd))
        top, total, mixed = lax.fori_loop(first_i[i], stop_i[i], keys, (zeros[..., 0] + _HIDDEN, zeros[..., 0], zeros))
        saw = top > _HIDDEN  # False for padding: its result is zero
        total = jnp.where(saw, total, 1)
        out = jnp.where(saw, 1 / total, 0)[..., None] * mixed
        return _add(done[0], 1, i, _ungrouped(out)), _add(done[1], 2, i, jnp.where(saw, top + jnp.log(total), 0))

    start = jnp.zeros_like(q_bthd, v_bkcd.dtype), jnp.zeros_like(_grouped(q_bthd, k_bkcd.shape[1])[..., 0], wide_dtype(q_bthd, v_bkcd))
    out_bthd, logsum_bktg = lax.fori_loop(0, blocks, queries, start)
    return out_bthd, (q_bthd, k_bkcd, v_bkcd, visibility, out_bthd, logsum_bktg)


def _blockwise_backward(block: int, residuals: Residuals, grad_bthd: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """Gradients of q, k and v. The weights of a block are exp(scores - logsum), computed again."""
    q_bthd, k_bkcd, v_bkcd, visibility, out_bthd, logsum_bktg = residuals
    size_t, size_c, blocks = _sizes(q_bthd, k_bkcd, block)
    first_i, stop_i = _key_ranges(visibility, size_t, size_c)

    def queries(i: jax.Array, done: Arrays) -> Arrays:
        segments_bt = _cut_segments(visibility.query_segment_bt, i, size_t)
        q, grad, out = (_cut_queries(x, k_bkcd.shape[1], i, segments_bt) for x in (q_bthd, grad_bthd, out_bthd))
        logsum = _cut(logsum_bktg, 2, i, size_t)[..., None]
        shift = jnp.sum(wide(grad) * wide(out), axis=-1, keepdims=True)

        def keys(j: jax.Array, state: Arrays) -> Arrays:
            dq, dk, dv = state
            k, v, scores = _meet(q, k_bkcd, v_bkcd, visibility, i, j, size_c)
            weights = jnp.exp(scores - logsum)
            dscores = weights * (einsum("bktgd,bkcd->bktgc", grad, v) - shift) * q.shape[-1] ** -0.5
            dq = dq + einsum("bktgc,bkcd->bktgd", dscores.astype(k.dtype), k)
            dk = _add(dk, 2, j, einsum("bktgc,bktgd->bkcd", dscores.astype(q.dtype), q))
            dv = _add(dv, 2, j, einsum("bktgc,bktgd->bkcd", weights.astype(grad.dtype), grad))
            return dq, dk, dv

        dq, dk, dv = lax.fori_loop(first_i[i], stop_i[i], keys, (jnp.zeros(q.shape, wide_dtype(q)), *done[1:]))
        return _add(done[0], 1, i, _ungrouped(dq)), dk, dv

    start = jnp.zeros_like(q_bthd), jnp.zeros_like(k_bkcd, wide_dtype(k_bkcd)), jnp.zeros_like(v_bkcd, wide_dtype(v_bkcd))
    dq, dk, dv = lax.fori_loop(0, blocks, queries, start)
    return dq, dk.astype(k_bkcd.dtype), dv.astype(v_bkcd.dtype), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blockwise(q_bthd: jax.Array, k_bkcd: jax.Array, v_bkcd: jax.Array, visibility: Visibility, block: int) -> jax.Array:
    return _blockwise_forward(q_bthd, k_bkcd, v_bkcd, visibility, block)[0]


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)

ATTENTION: Mapping[str, Callable[[jax.Array, jax.Array, jax.Array, Visibility, int], jax.Array]] = {
    "dense": _dense,
    "blockwise": _blockwise,
    "cudnn": _cudnn,
}
"""By name. They differ in what padding queries receive, and only "blockwise" keeps a NaN at padding from other tokens."""
