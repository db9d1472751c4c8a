"""Log-probabilities and entropies of given tokens, without ever holding [tokens, vocabulary] for a whole batch.

Shape legend: B rows, T tokens, D model width, N = B * T, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rstar_jax.config import ModelConfig
from rstar_jax.model import qwen
from rstar_jax.types import Array, TrainBatch


def _chunk(
    params: qwen.Params, config: ModelConfig, hidden_nd: jax.Array, targets_n: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array]:
    logits_nv = qwen.logits(params, config, hidden_nd) / temperature
    log_p_nv = jax.nn.log_softmax(logits_nv, axis=-1)
    logp_n = jnp.take_along_axis(log_p_nv, targets_n[:, None], axis=-1)[:, 0]
    return logp_n, -jnp.sum(jnp.exp(log_p_nv) * log_p_nv, axis=-1)


def token_logprobs(
    params: qwen.Params,
    config: ModelConfig,
    hidden_btd: Array,
    targets_bt: Array,
    *,
    temperature: float | jax.Array = 1.0,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """log softmax(z / temperature)[target] and the entropy of softmax(z / temperature), both [B, T] float32 nats.

    `hidden_btd` predicts `targets_bt` entry by entry (the caller shifts). Works in chunks of `chunk` tokens (default
    `config.logprob_chunk`), each rematerialised in the backward pass; any leading shape with any T, B is allowed.
    """
    chunk = chunk or config.logprob_chunk
    batch, length, width = hidden_btd.shape
    count = batch * length
    hidden_nd, targets_n = jnp.asarray(hidden_btd).reshape(count, width), jnp.asarray(targets_bt).reshape(count)
    scale = jnp.asarray(temperature, jnp.float32)
    if count <= chunk:
        logp_n, entropy_n = _chunk(params, config, hidden_nd, targets_n, scale)
        return logp_n.reshape(batch, length), entropy_n.reshape(batch, length)
    padding = -count % chunk
    hidden_mcd = jnp.pad(hidden_nd, ((0, padding), (0, 0))).reshape(-1, chunk, width)
    targets_mc = jnp.pad(targets_n, (0, padding)).reshape(-1, chunk)
    step = jax.checkpoint(lambda pair: _chunk(params, config, pair[0], pair[1], scale))
    logp_mc, entropy_mc = jax.lax.map(step, (hidden_mcd, targets_mc))
    return logp_mc.reshape(-1)[:count].reshape(batch, length), entropy_mc.reshape(-1)[:count].reshape(batch, length)


def score(
    params: qwen.Params, config: ModelConfig, batch: TrainBatch, temperature: float | jax.Array, mesh: Mesh | None = None
) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy of every token of a batch, [B, T], aligned with its tokens: entry t comes from the hidden state at
    t - 1. Entry 0 is NaN. The loss, the old log-probs and the tests of the engine all come through here."""
    experts = None if batch.experts_btlk is None else jnp.transpose(jnp.asarray(batch.experts_btlk, jnp.int32), (2, 0, 1, 3))
    out = qwen.forward(params, config, batch.tokens_bt, batch.positions_bt, batch.segments_bt, mesh=mesh, experts_lbtk=experts)
    logp, entropy = token_logprobs(params, config, out.hidden_btd[:, :-1], batch.tokens_bt[:, 1:], temperature=temperature)
    first = jnp.full_like(logp[:, :1], jnp.nan)
    return jnp.concatenate([first, logp], axis=1), jnp.concatenate([first, entropy], axis=1)
