"""The decoder against transformers' torch classes, and against itself: one forward for every use."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from rstar_jax.config import ModelConfig
from rstar_jax.model import kv_cache, qwen

CONFIG = ModelConfig(vocab_size=97, num_layers=2, d_model=32, d_ff=56, num_heads=4, num_kv_heads=2, head_dim=10, rope_theta=10_000.0)
FORWARD = jax.jit(qwen.forward, static_argnames=("config", "mesh"))


def torch_model(config: ModelConfig) -> torch.nn.Module:
    """The same architecture with transformers' own random weights."""
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "attn_implementation": "eager",
        "initializer_range": 0.3,  # logits of some size: 0.02 would hide a wrong attention
    }
    torch.manual_seed(0)
    if config.qk_norm:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common))
    else:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**common))
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # ones and zeros would hide a norm or a bias in the wrong place
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval().float()


def from_torch(model: torch.nn.Module, config: ModelConfig) -> qwen.Params:
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    rename = {
        "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj",
        "v": "self_attn.v_proj", "o": "self_attn.o_proj", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
        "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    }  # fmt: skip

    def leaf(path, like):
        names = [key.key for key in path]
        if names[0] == "ends":
            key = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}[names[1]]
            return jnp.asarray(state[key])
        suffix = "bias" if names[2] == "bias" else "weight"
        tensors = [state[f"model.layers.{i}.{rename[names[1]]}.{suffix}"] for i in range(config.num_layers)]
        return jnp.stack([t.T if names[2] == "kernel" else t for t in tensors])

    return jax.tree_util.tree_map_with_path(leaf, qwen.abstract_params(config))


def plain_inputs(tokens_bt):
    batch, length = tokens_bt.shape
    return tokens_bt, jnp.broadcast_to(jnp.arange(length), (batch, length)), jnp.ones((batch, length), jnp.int32)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False},
        {"num_kv_heads": 1},
        {"num_kv_heads": 4, "rope_theta": 1e6},
        {"qk_norm": False, "qkv_bias": True, "head_dim": 8},
    ],
    ids=["qwen3", "untied", "one-kv-head", "no-grouping", "qwen2"],
)
def test_logits_equal_transformers(changes):
    config = dataclasses.replace(CONFIG, **changes)
    model = torch_model(config)
    params = from_torch(model, config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (3, 40))
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    hidden, *_ = FORWARD(params, config, *plain_inputs(jnp.asarray(tokens)))
    logits = qwen.logits(params, config, hidden)
    assert np.ptp(expected) > 10
    np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.fixture(scope="module")
def params():
    return jax.jit(qwen.init, static_argnums=0)(CONFIG, jax.random.key(3))


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(1).integers(0, CONFIG.vocab_size, (2, 24)))


def test_prefill_and_decode_give_what_training_gives(params, tokens):
    whole, *_ = FORWARD(params, CONFIG, *plain_inputs(tokens))
    rollout = qwen.unstack_layers(params)
    cache = kv_cache.empty_cache(CONFIG, 2, 32)
    ones = jnp.ones((2, 10), jnp.int32)
    pieces, position = [], 0
    for length in (10, 7, 1, 1, 5):
        where = position + jnp.broadcast_to(jnp.arange(length), (2, length))
        piece = tokens[:, position : position + length]
        hidden, cache, _ = FORWARD(rollout, CONFIG, piece, where, ones[:, :1].repeat(length, 1), cache)
        pieces.append(hidden)
        position += length
    chex.assert_trees_all_close(jnp.concatenate(pieces, 1), whole, atol=2e-5)


def test_rows_may_continue_any_slot_and_padding_is_not_written(params, tokens):
    rollout = qwen.unstack_layers(params)
    whole, *_ = FORWARD(params, CONFIG, *plain_inputs(tokens))
    cache = kv_cache.empty_cache(CONFIG, 5, 32)
    marked = jax.tree.map(lambda x: x + 7.0, cache)
    where = jnp.broadcast_to(jnp.arange(24), (2, 24))
    valid = (where < jnp.array([[24], [9]])).astype(jnp.int32)
    hidden, written, _ = FORWARD(rollout, CONFIG, tokens, where, valid, marked, jnp.array([3, 1]))
    chex.assert_trees_all_close(hidden[0], whole[0], atol=2e-5)
    chex.assert_trees_all_close(hidden[1, :9], whole[1, :9], atol=2e-5)
    for before, after in zip(jax.tree.leaves(marked), jax.tree.leaves(written), strict=True):
        chex.assert_trees_all_equal(before[jnp.array([0, 2, 4])], after[jnp.array([0, 2, 4])])
        chex.assert_trees_all_equal(before[1, :, 9:], after[1, :, 9:])
        assert not np.array_equal(before[1, :, :9], after[1, :, :9])


def test_a_sequence_scores_the_same_alone_padded_left_or_right_and_packed(params, tokens):
    """trl#469, NeMo-Aligner#68: positions counted from the row's start change the log-probs of shifted sequences."""
    alone, *_ = FORWARD(params, CONFIG, *plain_inputs(tokens[:1]))
    length, pad = tokens.shape[1], 7
    order = jnp.arange(length)

    def row(left, right, before_segment):
        ids = jnp.concatenate([jnp.full(left, 5), tokens[0], jnp.full(right, 5)])[None]
        positions = jnp.concatenate([jnp.arange(left), order, jnp.arange(right)])[None]
        segments = jnp.concatenate([jnp.full(left, before_segment), jnp.full(length, 2), jnp.zeros(right)]).astype(jnp.int32)[None]
        hidden, *_ = FORWARD(params, CONFIG, ids, positions, segments)
        return hidden[:, left : left + length]

    chex.assert_trees_all_close(row(pad, 0, 0), alone, atol=1e-5)
    chex.assert_trees_all_close(row(0, pad, 0), alone, atol=1e-5)
    chex.assert_trees_all_close(row(pad, pad, 1), alone, atol=1e-5)  # behind another packed sequence


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialisation_changes_no_gradient(params, tokens, remat):
    def loss(params, config):
        hidden, *_ = qwen.forward(params, config, *plain_inputs(tokens))
        return jnp.sum(jnp.square(hidden))

    expected = jax.jit(jax.grad(loss), static_argnums=1)(params, CONFIG)
    actual = jax.jit(jax.grad(loss), static_argnums=1)(params, dataclasses.replace(CONFIG, remat=remat))
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-3)


def test_every_parameter_has_one_axis_name_per_dimension():
    shapes = qwen.abstract_params(CONFIG)
    axes = qwen.param_axes(CONFIG)
    flat_axes = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
    assert [len(names) for names in flat_axes] == [leaf.ndim for leaf in jax.tree.leaves(shapes)]
    assert axes["layers"]["q"]["kernel"] == ("layers", "embed", "heads")
    assert axes["ends"]["embedding"] == ("vocab", "embed")


def test_a_cache_refuses_stacked_parameters(params, tokens):
    with pytest.raises(ValueError, match="unstack_layers"):
        qwen.forward(params, CONFIG, *plain_inputs(tokens), kv_cache.empty_cache(CONFIG, 2, 32))
