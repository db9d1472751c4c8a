"""A mixture of SwiGLU experts with top-k routing, as in Qwen3-MoE (transformers' Qwen3MoeSparseMoeBlock): no capacity, no dropped
token, one computation for training and decode.

Shape legend: N tokens, K choices of a token, E experts, D model width, F width of one expert, B blocks, R rows of a block.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from rstar_jax.model.precision import einsum, wide, wide_dtype
from rstar_jax.model.sharding import TRAINING_RULES, parts, spec

Blocks = tuple[jax.Array, jax.Array, jax.Array]


def route(logits_ne: jax.Array, k: int, normalize: bool, chosen_nk: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Each token's experts [N, K] int32 and their weights [N, K] float32.

    The k experts of the largest logits (of equal ones, the lower index), weighted by p = softmax(logits) over all experts;
    `normalize` divides by the sum of the k weights. Rows of `chosen_nk` that are not -1 replace the choice (routing replay);
    their weights still come from the present logits, and so do all gradients.
    """
    logits_ne = wide(logits_ne)
    free_nk = jax.lax.top_k(jax.lax.stop_gradient(logits_ne), k)[1].astype(jnp.int32)
    chosen_nk = free_nk if chosen_nk is None else jnp.where(chosen_nk >= 0, chosen_nk, free_nk).astype(jnp.int32)
    logits_nk = jnp.take_along_axis(logits_ne, chosen_nk, axis=-1)
    if normalize:  # p_i / sum of the chosen p; in this form it is finite even where every chosen p underflows
        return chosen_nk, jax.nn.softmax(logits_nk, axis=-1)
    return chosen_nk, jnp.exp(logits_nk - jax.nn.logsumexp(logits_ne, axis=-1, keepdims=True))


def _blocks(chosen_nk: jax.Array, experts: int, rows: int) -> Blocks:
    """The N K choices, sorted by expert and cut into blocks of at most `rows` that share one. A choice of E is of none of them.

    Returns each block's expert [B], the choices n K + k in its rows [B, R] (N K where a row is unused), and how many blocks are
    in use; the others come last. B is what the worst routing needs: sum_e ceil(c_e / R) <= (N K + min(E, N K) (R - 1)) / R.
    """
    total = chosen_nk.size
    flat = chosen_nk.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    count_e = jnp.zeros(experts, jnp.int32).at[flat].add(1, mode="drop")
    needed_e = (count_e + rows - 1) // rows
    end_e, block_end_e = jnp.cumsum(count_e), jnp.cumsum(needed_e)
    block_b = jnp.arange((total + min(experts, total) * (rows - 1)) // rows, dtype=jnp.int32)
    expert_b = jnp.minimum(jnp.searchsorted(block_end_e, block_b, side="right"), experts - 1)
    start_b = (end_e - count_e)[expert_b] + (block_b - (block_end_e - needed_e)[expert_b]) * rows
    row_br = start_b[:, None] + jnp.arange(rows, dtype=jnp.int32)
    choice_br = jnp.where(row_br < end_e[expert_b][:, None], order[jnp.minimum(row_br, total - 1)], total)
    return expert_b, choice_br, block_end_e[-1]


def _take(values: jax.Array, index_r: jax.Array) -> jax.Array:
    """values[index], zero where the index is past the end."""
    return values.at[index_r].get(mode="fill", fill_value=0)


def _swiglu(gate_rf: jax.Array, up_rf: jax.Array) -> jax.Array:
    return jax.nn.silu(gate_rf) * up_rf


@jax.custom_vjp
def _experts(
    x_nd: jax.Array, weights_nk: jax.Array, gate_edf: jax.Array, up_edf: jax.Array, down_efd: jax.Array, blocks: Blocks
) -> jax.Array:
    expert_b, choice_br, used = blocks

    def step(b: jax.Array, y_nd: jax.Array) -> jax.Array:
        expert, choice_r = expert_b[b], choice_br[b]
        token_r = choice_r // weights_nk.shape[1]
        x_rd = _take(x_nd, token_r)
        gate_rf, up_rf = einsum("rd,df->rf", x_rd, gate_edf[expert]), einsum("rd,df->rf", x_rd, up_edf[expert])
        y_rd = einsum("rf,fd->rd", _swiglu(gate_rf, up_rf).astype(x_nd.dtype), down_efd[expert])
        return y_nd.at[token_r].add(y_rd * _take(weights_nk.reshape(-1), choice_r)[:, None], mode="drop")

    return jax.lax.fori_loop(0, used, step, jnp.zeros(x_nd.shape, wide_dtype(x_nd))).astype(x_nd.dtype)


def _experts_forward(*args: Any) -> tuple[jax.Array, Any]:
    return _experts(*args), args


def _experts_backward(args: Any, dy_nd: jax.Array) -> tuple[Any, ...]:
    """One pass over the same blocks; each adds to its expert's gradients in place, where autodiff of the loop would keep every
    block's activations and make a cotangent of all experts' weights for each."""
    x_nd, weights_nk, gate_edf, up_edf, down_efd, (expert_b, choice_br, used) = args

    def step(b: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        dx_nd, dweights_m, dgate_edf, dup_edf, ddown_efd = sums
        expert, choice_r = expert_b[b], choice_br[b]
        token_r = choice_r // weights_nk.shape[1]
        x_rd, dy_rd, weight_r1 = _take(x_nd, token_r), _take(dy_nd, token_r), _take(weights_nk.reshape(-1), choice_r)[:, None]
        gate_df, up_df, down_fd = gate_edf[expert], up_edf[expert], down_efd[expert]
        h_rf, pull = jax.vjp(_swiglu, einsum("rd,df->rf", x_rd, gate_df), einsum("rd,df->rf", x_rd, up_df))
        dh_rf = einsum("rd,fd->rf", dy_rd, down_fd)
        dgate_rf, dup_rf = (g.astype(x_nd.dtype) for g in pull(dh_rf * weight_r1))
        dx_rd = einsum("rf,df->rd", dgate_rf, gate_df) + einsum("rf,df->rd", dup_rf, up_df)
        return (
            dx_nd.at[token_r].add(dx_rd, mode="drop"),
            dweights_m.at[choice_r].set(jnp.sum(dh_rf * h_rf, axis=-1), mode="drop"),
            dgate_edf.at[expert].add(einsum("rd,rf->df", x_rd, dgate_rf)),
            dup_edf.at[expert].add(einsum("rd,rf->df", x_rd, dup_rf)),
            ddown_efd.at[expert].add(einsum("rf,rd->fd", (h_rf * weight_r1).astype(x_nd.dtype), dy_rd)),
        )

    like = (x_nd, weights_nk.reshape(-1), gate_edf, up_edf, down_efd)
    sums = jax.lax.fori_loop(0, used, step, tuple(jnp.zeros(a.shape, wide_dtype(a)) for a in like))
    dx_nd, dweights_m, *dkernels = (s.astype(a.dtype) for s, a in zip(sums, like, strict=True))
    return dx_nd, dweights_m.reshape(weights_nk.shape), *dkernels, None


_experts.defvjp(_experts_forward, _experts_backward)


def mixture(
    x_nd: jax.Array,
    chosen_nk: jax.Array,
    weights_nk: jax.Array,
    gate_edf: jax.Array,
    up_edf: jax.Array,
    down_efd: jax.Array,
    block: int = 128,
) -> jax.Array:
    """y = sum_k w_k down_e(silu(gate_e x) * up_e x) with e = chosen_k, [N, D] in x's dtype; matmuls and sums are in float32.

    Tokens are taken in blocks of one expert's rows, at most `block` of them, fewer when an expert's share is small; the work is
    proportional to the blocks in use, and no temporary is larger than x, the choices, or (backward) the kernels' gradients.
    Differentiable in all but `chosen_nk`.
    """
    x_nd, chosen_nk, weights_nk, gate_edf, up_edf, down_efd = map(
        jnp.asarray, (x_nd, chosen_nk, weights_nk, gate_edf, up_edf, down_efd)
    )
    tokens, experts = x_nd.shape[0], gate_edf.shape[0]
    share = max(8, 1 << (chosen_nk.size // experts).bit_length())
    return _experts(x_nd, weights_nk, gate_edf, up_edf, down_efd, _blocks(chosen_nk, experts, min(block, tokens, share)))


def sharded_mixture(
    x_btd: jax.Array,
    chosen_btk: jax.Array,
    weights_btk: jax.Array,
    gate_edf: jax.Array,
    up_edf: jax.Array,
    down_efd: jax.Array,
    block: int,
    mesh: Mesh | None,
) -> jax.Array:
    """`mixture` over a mesh, [B, T, D]: the tokens of an `expert` axis meet, every device computes what its experts, and its part of
    their width over `tensor`, give to them, and the sums go back to where the tokens came from."""
    if mesh is None or mesh.size == 1:
        x_nd, chosen_nk, weights_nk = (x.reshape(-1, x.shape[-1]) for x in (x_btd, chosen_btk, weights_btk))
        return mixture(x_nd, chosen_nk, weights_nk, gate_edf, up_edf, down_efd, block).reshape(x_btd.shape)
    # rows of a decode step or an extension may be too few to cut: then every device sees them all
    cut = x_btd.shape[0] % parts(mesh, "batch") == 0 and x_btd.shape[1] % parts(mesh, "length") == 0
    tokens = spec(("batch", "length", None) if cut else (None, None, None), TRAINING_RULES)
    wide_efd, narrow_efd = PartitionSpec("expert", None, "tensor"), PartitionSpec("expert", "tensor", None)
    local_experts, groups = gate_edf.shape[0] // mesh.shape["expert"], mesh.shape["expert"]

    def local(x: jax.Array, chosen: jax.Array, weights: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        shape = x.shape
        x, chosen, weights = (a.reshape(-1, a.shape[-1]) for a in (x, chosen, weights))
        if groups > 1:
            if cut:
                x, chosen, weights = (jax.lax.all_gather(a, "expert", tiled=True) for a in (x, chosen, weights))
            chosen = chosen - jax.lax.axis_index("expert") * local_experts
            chosen = jnp.where((chosen >= 0) & (chosen < local_experts), chosen, local_experts)
        y = mixture(x, chosen, weights, gate, up, down, block)
        if groups > 1:
            y = jax.lax.psum_scatter(y, "expert", tiled=True) if cut else jax.lax.psum(y, "expert")
        if mesh.shape["tensor"] > 1:
            y = jax.lax.psum(y, "tensor")
        return y.reshape(shape)

    return jax.shard_map(
        local, mesh=mesh, in_specs=(tokens, tokens, tokens, wide_efd, wide_efd, narrow_efd), out_specs=tokens, check_vma=False
    )(x_btd, chosen_btk, weights_btk, gate_edf, up_edf, down_efd)


def load_balance_sums(logits_ne: jax.Array, chosen_nk: jax.Array, valid_n: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `load_balance_loss` needs of some tokens, as float32 sums that may be added over microbatches and layers: choices of
    each expert [E], probability of each expert [E], tokens []. Tokens that are not valid count nothing."""
    valid_n1 = valid_n.astype(jnp.float32)[:, None]
    probability_ne = jax.nn.softmax(wide(logits_ne), axis=-1)
    routed_e = jnp.zeros(logits_ne.shape[-1], jnp.float32).at[chosen_nk].add(valid_n1)
    return routed_e, jnp.sum(probability_ne * valid_n1, axis=0), jnp.sum(valid_n1)


def load_balance_loss(routed_e: jax.Array, probability_e: jax.Array, tokens: jax.Array) -> jax.Array:
    """E sum_e f_e P_e: f_e choices of expert e per token, P_e its mean probability (transformers' load_balancing_loss_func; Switch
    Transformer, equations 4-6, but for the factor K in sum_e f_e). K when routing is uniform; gradients flow through P only."""
    tokens = jnp.maximum(tokens, 1.0)
    return routed_e.shape[0] * jnp.sum(routed_e / tokens * (probability_e / tokens))
