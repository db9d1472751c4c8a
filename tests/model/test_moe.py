"""The mixture of experts, against a loop in float64 and transformers' own layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.models.qwen3_moe import modeling_qwen3_moe

from rstar_jax.config import MeshConfig
from rstar_jax.model import moe
from rstar_jax.model.sharding import make_mesh

E, D, F = 8, 16, 12


def weights(seed=0, experts=E):
    rng = np.random.default_rng(seed)
    shapes = (experts, D, F), (experts, D, F), (experts, F, D)
    return [rng.normal(size=shape).astype(np.float32) * 0.4 for shape in shapes]


def loop(x, chosen, share, gate, up, down):
    x, share, gate, up, down = (np.asarray(a, np.float64) for a in (x, share, gate, up, down))
    out = np.zeros_like(x)
    for n, k in np.ndindex(chosen.shape):
        e = chosen[n, k]
        g = x[n] @ gate[e]
        out[n] += share[n, k] * ((g / (1 + np.exp(-g)) * (x[n] @ up[e])) @ down[e])
    return out


@pytest.mark.parametrize(("tokens", "k", "block"), [(1, 2, 64), (7, 1, 3), (50, 3, 8), (50, 8, 64), (33, 2, 5)])
@pytest.mark.parametrize("normalize", [True, False])
def test_it_equals_a_loop_over_tokens_and_experts(tokens, k, block, normalize):
    rng = np.random.default_rng(tokens)
    x, logits = rng.normal(size=(tokens, D)).astype(np.float32), rng.normal(size=(tokens, E)).astype(np.float32)
    chosen, share = moe.route(jnp.asarray(logits), k, normalize)
    probabilities = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum(-1, keepdims=True)
    expected = np.take_along_axis(probabilities, np.asarray(chosen), -1)
    expected = expected / expected.sum(-1, keepdims=True) if normalize else expected
    np.testing.assert_allclose(share, expected, rtol=1e-5)
    np.testing.assert_array_equal(np.sort(chosen, -1), np.sort(np.argsort(-logits, -1)[:, :k], -1))
    ours = jax.jit(moe.mixture, static_argnums=6)(x, chosen, share, *weights(), block)
    np.testing.assert_allclose(ours, loop(x, np.asarray(chosen), share, *weights()), atol=1e-5)


def test_all_tokens_may_go_to_one_expert_and_equal_logits_choose_the_lower_index():
    x = np.random.default_rng(0).normal(size=(20, D)).astype(np.float32)
    chosen, share = moe.route(jnp.zeros((20, E)), 2, True)
    np.testing.assert_array_equal(chosen, np.tile([0, 1], (20, 1)))
    np.testing.assert_allclose(moe.mixture(x, chosen, share, *weights()), loop(x, np.asarray(chosen), share, *weights()), atol=1e-5)


def test_routing_is_replayed_where_it_is_given_and_weights_follow_the_present_logits():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(4, E)), jnp.float32)
    free, share = moe.route(logits, 2, True)
    again, same = moe.route(logits, 2, True, free)
    np.testing.assert_array_equal(free, again)
    np.testing.assert_array_equal(share, same)
    given = np.asarray([[5, 2], [-1, -1], [0, 7], [-1, -1]])
    replayed, share = moe.route(logits, 2, True, jnp.asarray(given))
    np.testing.assert_array_equal(replayed, np.where(given >= 0, given, free))
    np.testing.assert_allclose(share[0], jax.nn.softmax(logits[0, jnp.asarray([5, 2])]), rtol=1e-6)


@pytest.mark.parametrize("normalize", [True, False])
def test_values_and_gradients_equal_those_of_transformers(normalize):
    config = transformers.Qwen3MoeConfig(
        hidden_size=D, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=3, norm_topk_prob=normalize
    )
    layer = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config)
    gate, up, down = weights()
    router = np.random.default_rng(2).normal(size=(D, E)).astype(np.float32)
    with torch.no_grad():
        layer.gate.weight.copy_(torch.tensor(router.T))
        layer.experts.gate_up_proj.copy_(torch.tensor(np.concatenate([gate, up], -1).transpose(0, 2, 1)))
        layer.experts.down_proj.copy_(torch.tensor(down.transpose(0, 2, 1)))
    x = np.random.default_rng(3).normal(size=(40, D)).astype(np.float32)
    theirs_x = torch.tensor(x[None], requires_grad=True)
    out = layer(theirs_x)
    toward = np.random.default_rng(4).normal(size=(40, D)).astype(np.float32)
    (out[0] * torch.tensor(toward)).sum().backward()

    def value(x, router, gate, up, down):
        chosen, share = moe.route(x @ router, 3, normalize)
        y = moe.mixture(x, chosen, share, gate, up, down, 8)
        return jnp.sum(y * toward), y

    (_, y), grads = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2, 3, 4), has_aux=True))(x, router, gate, up, down)
    np.testing.assert_allclose(y, out[0].detach(), atol=1e-5)
    both = layer.experts.gate_up_proj.grad.numpy().transpose(0, 2, 1)
    expected = (theirs_x.grad[0], layer.gate.weight.grad.T, both[..., :F], both[..., F:], layer.experts.down_proj.grad.permute(0, 2, 1))
    for ours, like in zip(grads, expected, strict=True):
        like = np.asarray(like)
        assert np.linalg.norm(ours - like) <= 1e-4 * np.linalg.norm(like)


def test_the_balance_loss_equals_that_of_transformers_and_sums_add():
    rng = np.random.default_rng(5)
    logits, valid = rng.normal(size=(2, 24, E)).astype(np.float32), rng.random((2, 12)) < 0.7
    layers = tuple(torch.tensor(layer) for layer in logits)  # two layers of 2 x 12 tokens
    for mask in (valid, np.ones((2, 12), bool)):
        expected = modeling_qwen3_moe.load_balancing_loss_func(layers, E, 2, torch.tensor(mask).long())
        total = [0.0, 0.0, 0.0]
        for layer in logits:
            for half in (slice(0, 10), slice(10, 24)):
                part = jnp.asarray(layer[half])
                sums = moe.load_balance_sums(part, moe.route(part, 2, True)[0], jnp.asarray(mask.reshape(-1)[half]))
                total = [a + b for a, b in zip(total, sums, strict=True)]
        np.testing.assert_allclose(moe.load_balance_loss(*total), expected.item(), rtol=1e-5)


def test_experts_apart_over_the_tensor_axis_give_the_same():
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=2), jax.devices()[:2])
    gate, up, down = weights()
    x = np.random.default_rng(6).normal(size=(30, D)).astype(np.float32)
    chosen, share = moe.route(jnp.asarray(np.random.default_rng(7).normal(size=(30, E)), jnp.float32), 2, True)
    place = lambda w, *axes: jax.device_put(w, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))  # noqa: E731
    apart = jax.jit(moe.mixture)(
        x, chosen, share, place(gate, None, None, "tensor"), place(up, None, None, "tensor"), place(down, None, "tensor")
    )
    np.testing.assert_allclose(apart, moe.mixture(x, chosen, share, gate, up, down), atol=1e-5)
