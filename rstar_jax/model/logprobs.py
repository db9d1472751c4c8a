"""Log-probabilities and entropies of given tokens, without ever holding [tokens, vocabulary] for a whole batch.

Shape legend: B rows, T tokens, D model width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rstar_jax.config import ModelConfig
from rstar_jax.model import qwen
from rstar_jax.model.precision import wide_dtype
from rstar_jax.model.sharding import constrain, parts
from rstar_jax.types import Array, TrainBatch


def _chunk(
    params: qwen.Params, config: ModelConfig, hidden: jax.Array, targets: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array]:
    log_p = jax.nn.log_softmax(qwen.logits(params, config, hidden) / temperature, axis=-1)
    logp = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    return logp, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def token_logprobs(
    params: qwen.Params,
    config: ModelConfig,
    hidden_btd: Array,
    targets_bt: Array,
    *,
    temperature: float | jax.Array = 1.0,
    chunk: int | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """log softmax(z / temperature)[target] and the entropy of softmax(z / temperature), both [B, T] nats, float32 at least.

    `hidden_btd` predicts `targets_bt` entry by entry (the caller shifts). Every device works on at most `chunk` of its own tokens at
    a time (default `config.logprob_chunk`), though on one of each of its rows at least; each chunk is rematerialised in the backward
    pass; any B and T are allowed. The loop runs over a piece of every row's every part over `context`, so that no device waits for,
    or gathers, the tokens of another.
    """
    hidden_btd, targets_bt = jnp.asarray(hidden_btd), jnp.asarray(targets_bt)
    batch, length = targets_bt.shape
    scale = jnp.asarray(temperature, wide_dtype(hidden_btd))
    cuts = parts(mesh, "length") if length % parts(mesh, "length") == 0 else 1
    rows, tokens = -(-batch // parts(mesh, "batch")), length // cuts
    size = min(tokens, max(1, (chunk or config.logprob_chunk) // rows))
    pieces = -(-tokens // size)
    if pieces == 1:
        return _chunk(params, config, hidden_btd, targets_bt, scale)
    padding = pieces * size - tokens

    def cut(x: jax.Array) -> jax.Array:
        """[pieces, B, cuts, size, ...] of [B, T, ...]."""
        x = x.reshape(batch, cuts, tokens, *x.shape[2:])
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 3))
        x = jnp.moveaxis(x.reshape(batch, cuts, pieces, size, *x.shape[3:]), 2, 0)
        return constrain(x, mesh, (None, "batch", "length") + (None,) * (x.ndim - 3))

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 2).reshape(batch, cuts, pieces * size)[:, :, :tokens].reshape(batch, length)

    step = jax.checkpoint(lambda pair: _chunk(params, config, pair[0], pair[1], scale))
    logp, entropy = jax.lax.map(step, (cut(hidden_btd), cut(targets_bt)))
    return join(logp), join(entropy)


def score(
    params: qwen.Params, config: ModelConfig, batch: TrainBatch, temperature: float | jax.Array, mesh: Mesh | None = None
) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy of every token of a batch, [B, T], aligned with its tokens: entry t comes from the hidden state at
    t - 1. Entry 0 is NaN, and what stands at the first token of a further sequence of a row means nothing. The loss, the old log-probs
    and the tests of the engine all come through here."""
    experts = None if batch.experts_btlk is None else jnp.transpose(jnp.asarray(batch.experts_btlk, jnp.int32), (2, 0, 1, 3))
    out = qwen.forward(params, config, batch.tokens_bt, batch.positions_bt, batch.segments_bt, mesh=mesh, experts_lbtk=experts)
    following_bt = jnp.roll(jnp.asarray(batch.tokens_bt), -1, axis=1)  # the last has none; its log-prob is dropped
    values = token_logprobs(params, config, out.hidden_btd, following_bt, temperature=temperature, mesh=mesh)
    logp, entropy = (jnp.roll(x, 1, axis=1).at[:, 0].set(jnp.nan) for x in values)
    return logp, entropy
