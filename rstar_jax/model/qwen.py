"""The Qwen-style decoder: one forward for training, scoring, prefill and decode.

Parameters are described once, by the linen modules below (shapes, initialisers, logical axes). The stack of layers is a pure
function: in training it scans over stacked parameters; with a cache it walks a tuple of per-layer parameters.

Shape legend: B rows, T tokens, D model width, H query heads, K key/value heads, C cached positions, V vocabulary, L layers,
E experts, k experts of a token, F width of an expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rstar_jax.config import ModelConfig
from rstar_jax.model import kv_cache, moe
from rstar_jax.model.attention import Visibility, attention, cached, causal, step_attention
from rstar_jax.model.linear import Linear, parameter, scaled_normal
from rstar_jax.model.precision import einsum, wide, wide_dtype
from rstar_jax.model.rope import Rotation, rotate, rotation
from rstar_jax.model.sharding import constrain
from rstar_jax.types import Array

Params = Mapping[str, Any]


class Routing(NamedTuple):
    """Which experts every token was sent to, and the router's float32 logits."""

    chosen_lbtk: jax.Array  # int32 [L, B, T, k]
    logits_lbte: jax.Array  # float32 [L, B, T, E]


class Output(NamedTuple):
    """What `forward` returns. `cache` is None without one, `routing` None without experts."""

    hidden_btd: jax.Array
    cache: Any  # kv_cache.Cache, or layers of kv_cache.Working, as it came
    routing: Routing | None


class Context(NamedTuple):
    """What all layers of one forward share."""

    rotation: Rotation
    visibility: Visibility
    positions_bt: jax.Array
    valid_bt: jax.Array
    slots_b: jax.Array | None
    reach: int | None  # cached positions that attention looks at; None: all
    mesh: Mesh | None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32 at least."""

    epsilon: float
    param_dtype: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = parameter(self, "scale", nn.initializers.ones_init(), ("norm",), (x.shape[-1],), self.param_dtype)
        y = wide(x)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.epsilon)
        return (y * scale.astype(y.dtype)).astype(x.dtype)


class Experts(nn.Module):
    """A router and E SwiGLU layers, of which each token uses k (Qwen3-MoE): y = sum over its experts of w_e FFN_e(x), w from the
    softmax over all experts. Returns y, the chosen experts [B, T, k] and the router's logits [B, T, E]."""

    config: ModelConfig
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, x_btd: jax.Array, chosen_btk: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        c = self.config

        def weight(name: str, axes: tuple[str, ...], *shape: int) -> jax.Array:
            return parameter(self, name, scaled_normal(batch_axis=range(len(shape) - 2)), axes, shape, c.param_dtype)

        router_de = weight("router", ("embed", "router"), c.d_model, c.num_experts)
        gate_edf = weight("gate", ("expert", "expert_embed", "mlp"), c.num_experts, c.d_model, c.expert_d_ff)
        up_edf = weight("up", ("expert", "expert_embed", "mlp"), c.num_experts, c.d_model, c.expert_d_ff)
        down_efd = weight("down", ("expert", "mlp", "expert_embed"), c.num_experts, c.expert_d_ff, c.d_model)
        batch, length, width = x_btd.shape
        x_nd = x_btd.reshape(-1, width)
        logits_ne = wide(x_nd) @ router_de.astype(wide_dtype(x_nd))
        replayed = None if chosen_btk is None else chosen_btk.reshape(-1, c.experts_per_token)
        chosen_nk, weights_nk = moe.route(logits_ne, c.experts_per_token, c.normalize_experts, replayed)
        gate_edf, up_edf, down_efd = (w.astype(c.dtype) for w in (gate_edf, up_edf, down_efd))
        chosen_btk, weights_btk = (x.reshape(batch, length, -1) for x in (chosen_nk, weights_nk))
        y_btd = moe.sharded_mixture(x_btd, chosen_btk, weights_btk, gate_edf, up_edf, down_efd, c.expert_block, self.mesh)
        return y_btd, chosen_btk, logits_ne.reshape(batch, length, -1)


class Block(nn.Module):
    """Pre-norm attention and SwiGLU, or experts. Returns the new hidden state, the layer's (k, v) cache (None without one), and its
    routing (None without experts). `chosen_btk`: experts to use where they are not negative."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x_btd: jax.Array,
        context: Context,
        layer_cache: tuple[jax.Array, jax.Array] | kv_cache.Working | None,
        chosen_btk: jax.Array | None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | kv_cache.Working | None, tuple[jax.Array, jax.Array] | None]:
        c = self.config
        batch, length, _ = x_btd.shape
        adapter_scale = c.lora_alpha / c.lora_rank if c.lora_rank else 1.0

        def norm(name: str) -> RMSNorm:
            return RMSNorm(c.norm_eps, c.param_dtype, name=name)

        def linear(name: str, features: int, axes: tuple[str, str], use_bias: bool = False) -> Linear:
            return Linear(features, axes, use_bias, c.dtype, c.param_dtype, adapter_scale, name=name)

        h_btd = norm("attention_norm")(x_btd)
        q = linear("q", c.num_heads * c.head_dim, ("embed", "heads"), c.qkv_bias)(h_btd)
        k = linear("k", c.num_kv_heads * c.head_dim, ("embed", "kv_heads"), c.qkv_bias)(h_btd)
        v = linear("v", c.num_kv_heads * c.head_dim, ("embed", "kv_heads"), c.qkv_bias)(h_btd)
        q_bthd = q.reshape(batch, length, c.num_heads, c.head_dim)
        k_btkd = k.reshape(batch, length, c.num_kv_heads, c.head_dim)
        v_btkd = v.reshape(batch, length, c.num_kv_heads, c.head_dim)
        if c.qk_norm:  # before the rotation, as Qwen3 does
            q_bthd, k_btkd = norm("q_norm")(q_bthd), norm("k_norm")(k_btkd)
        q_bthd, k_btkd = rotate(q_bthd, context.rotation), rotate(k_btkd, context.rotation)

        if layer_cache is None:
            k_bkcd, v_bkcd = k_btkd.transpose(0, 2, 1, 3), v_btkd.transpose(0, 2, 1, 3)
        elif isinstance(layer_cache, kv_cache.Working):
            layer_cache = kv_cache.write_step(layer_cache, k_btkd, v_btkd, context.positions_bt, context.valid_bt)
        else:
            slots_b = context.slots_b
            all_slots = jnp.arange(batch) if slots_b is None else slots_b
            cache_k = kv_cache.write(layer_cache[0], k_btkd, all_slots, context.positions_bt, context.valid_bt)
            cache_v = kv_cache.write(layer_cache[1], v_btkd, all_slots, context.positions_bt, context.valid_bt)
            layer_cache = (cache_k, cache_v)
            rows = slice(None) if slots_b is None else slots_b
            k_bkcd, v_bkcd = cache_k[rows, :, : context.reach], cache_v[rows, :, : context.reach]
        if isinstance(layer_cache, kv_cache.Working):
            attended = step_attention(q_bthd, *layer_cache, context.positions_bt)
        else:
            mesh = context.mesh if layer_cache is None else None
            attended = attention(q_bthd, k_bkcd, v_bkcd, context.visibility, c.attention, c.attention_block, mesh)
        x_btd = x_btd + linear("o", c.d_model, ("heads", "embed"), c.o_bias)(attended.reshape(batch, length, -1))

        h_btd = norm("mlp_norm")(x_btd)
        if c.num_experts:
            y_btd, *routing = Experts(c, context.mesh, name="experts")(h_btd, chosen_btk)
            return x_btd + y_btd, layer_cache, (routing[0], routing[1])
        gate = linear("gate", c.d_ff, ("embed", "mlp"), c.mlp_bias)(h_btd)
        up = linear("up", c.d_ff, ("embed", "mlp"), c.mlp_bias)(h_btd)
        x_btd = x_btd + linear("down", c.d_model, ("mlp", "embed"), c.mlp_bias)(jax.nn.silu(gate) * up)
        return x_btd, layer_cache, None


class Ends(nn.Module):
    """The parameters at both ends of the stack: token embeddings, final norm, and the head when it is not tied."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        normal, axes, shape = nn.initializers.normal(0.02), ("vocab", "embed"), (c.vocab_size, c.d_model)
        self.embedding = parameter(self, "embedding", normal, axes, shape, c.param_dtype)
        self.final_norm = RMSNorm(c.norm_eps, c.param_dtype)
        if not c.tie_embeddings:
            self.head = parameter(self, "head", normal, axes, shape, c.param_dtype)

    def __call__(self, tokens_bt: jax.Array) -> jax.Array:
        return self.logits(self.normalize(self.embed(tokens_bt)))

    def embed(self, tokens_bt: jax.Array) -> jax.Array:
        return self.embedding[tokens_bt].astype(self.config.dtype)

    def normalize(self, x_btd: jax.Array) -> jax.Array:
        return self.final_norm(x_btd)

    def logits(self, hidden_nd: jax.Array) -> jax.Array:
        """Float32 logits over the vocabulary for any leading shape."""
        table = self.embedding if self.config.tie_embeddings else self.head
        return einsum("...d,vd->...v", hidden_nd, table.astype(hidden_nd.dtype))


def _init_boxed(config: ModelConfig, key: jax.Array) -> Any:
    x = jnp.zeros((1, 1, config.d_model), config.dtype)
    index = jnp.zeros((1, 1), jnp.int32)
    config = dataclasses.replace(config, attention="dense")  # which parameters there are does not depend on it
    context = Context(rotation(config, index), causal(index), index, index == 0, None, None, None)

    def block(layer_key: jax.Array) -> Any:
        return Block(config).init(layer_key, x, context, None, None)["params"]

    ends = Ends(config).init(jax.random.fold_in(key, 0), index)["params"]
    layer_keys = jax.random.split(jax.random.fold_in(key, 1), config.num_layers)
    return {"ends": ends, "layers": jax.vmap(block)(layer_keys)}


def init(config: ModelConfig, key: jax.Array) -> Params:
    """Fresh parameters: `ends` (embedding, final norm, head) and `layers`, stacked along a leading layer axis."""
    return nn.unbox(_init_boxed(config, key))


def abstract_params(config: ModelConfig) -> Params:
    """Shapes and dtypes of `init`'s result, without allocating it."""
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))


def param_axes(config: ModelConfig) -> Params:
    """The logical axis names of every parameter, as tuples in the tree of `init`'s result."""
    boxed = jax.eval_shape(lambda: _init_boxed(config, jax.random.key(0)))

    def names(leaf: nn.Partitioned) -> tuple[str | None, ...]:
        missing = leaf.value.ndim - len(leaf.names)  # the layer axis, which vmap put in front
        return ("layers",) * missing + tuple(leaf.names)

    return jax.tree.map(names, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))


def unstack_layers(params: Params) -> Params:
    """The rollout form of parameters: `layers` as a tuple of per-layer trees instead of stacked arrays."""
    count = jax.tree.leaves(params["layers"])[0].shape[0]
    layers = tuple(jax.tree.map(lambda p, i=i: p[i], params["layers"]) for i in range(count))
    return {"ends": params["ends"], "layers": layers}


def _ends(params: Params, config: ModelConfig, method: str, x: Array) -> jax.Array:
    return cast(jax.Array, Ends(config).apply({"params": params["ends"]}, x, method=method))


def _whole_rows(params: Params, mesh: Mesh | None) -> Params:
    """The parameters with every row of the embedding in one piece, so that each device looks its own tokens up. From rows in pieces XLA
    would exchange tokens for them, and on some meshes gather all tokens everywhere."""
    ends = params["ends"]
    return {**params, "ends": {**ends, "embedding": constrain(ends["embedding"], mesh, ("vocab", None))}}


_REMAT = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def forward(
    params: Params,
    config: ModelConfig,
    tokens_bt: Array,
    positions_bt: Array,
    segments_bt: Array,
    cache: kv_cache.Cache | tuple[kv_cache.Working, ...] | None = None,
    slots_b: Array | None = None,
    mesh: Mesh | None = None,
    experts_lbtk: Array | None = None,
    reach: int | None = None,
) -> Output:
    """Hidden states [B, T, D] after the final norm, the updated cache, and the routing.

    Without a cache: causal attention within segments (0 is padding). With a cache: row b continues slot `slots_b[b]` (None:
    row b is slot b); its tokens are written at `positions_bt` where `segments_bt` > 0, and attend to positions 0..p of the
    slot, of which attention looks at the first `reach` alone (None: at all). `params["layers"]` may be stacked (scanned) or a tuple
    of layers (walked); a cache needs the latter. `experts_lbtk` replays the experts of an earlier forward; -1 leaves the choice to
    the router.
    """
    block = Block(config)
    tokens_bt, positions_bt, segments_bt = map(jnp.asarray, (tokens_bt, positions_bt, segments_bt))
    visibility = causal(segments_bt) if cache is None else cached(positions_bt, reach or kv_cache.length(cache))
    slots = None if slots_b is None else jnp.asarray(slots_b)
    activation = ("batch", "length", None)
    context = Context(rotation(config, positions_bt), visibility, positions_bt, segments_bt > 0, slots, reach, mesh)
    x_btd = constrain(_ends(_whole_rows(params, mesh), config, "embed", tokens_bt), mesh, activation)

    def apply(layer: Any, x: jax.Array, layer_cache: Any, chosen_btk: Any) -> Any:
        applied: Any = block.apply({"params": layer}, x, context, layer_cache, chosen_btk)
        x, layer_cache, routing = applied
        return constrain(x, mesh, activation), layer_cache, routing

    layers = params["layers"]
    if isinstance(layers, tuple):
        caches, routings = [], []
        for i, layer in enumerate(layers):
            layer_cache = None if cache is None else cache[i]
            x_btd, layer_cache, routing = apply(layer, x_btd, layer_cache, None if experts_lbtk is None else experts_lbtk[i])
            caches.append(layer_cache)
            routings.append(routing)
        cache = None if cache is None else tuple(caches)
        routed = jax.tree.map(lambda *parts: jnp.stack(parts), *routings) if config.num_experts else None
    elif cache is not None:
        raise ValueError("a cache needs parameters in rollout form: unstack_layers(params)")
    else:

        def step(x: jax.Array, xs: Any) -> Any:
            x, _, routing = apply(xs[0], x, None, xs[1])
            return x, routing

        if config.remat != "none":
            step = jax.checkpoint(step, policy=_REMAT[config.remat], prevent_cse=False)
        x_btd, routed = jax.lax.scan(step, x_btd, (layers, experts_lbtk))
    return Output(_ends(params, config, "normalize", x_btd), cache, None if routed is None else Routing(*routed))


def logits(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Float32 logits [..., V] of hidden states [..., D]."""
    return _ends(params, config, "logits", hidden)
