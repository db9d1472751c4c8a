"""The objectives against TRL 1.16: its GRPOTrainer's own loss, on given log-probs instead of a model's.

TRL divides within the loss, ours gives numerators and counts; loss and gradient are compared after the one division, in float64. One
row is one sequence. TRL multiplies by its mask, so it gets numbers at masked tokens where ours gets NaN.
"""

import collections
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rstar_jax.algorithms.entropy import entropy_bonus, high_entropy_threshold, keep_high_entropy
from rstar_jax.algorithms.kl import kl_sums
from rstar_jax.algorithms.objectives import cispo_loss, policy_loss, sequence_policy_loss

torch = pytest.importorskip("torch")
grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")

NAN = float("nan")
HORIZON = 9
AGGREGATION = {"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "constant", "cispo": "token_mean"}


def case(seed: int) -> dict[str, np.ndarray]:
    """Four sequences of up to eight tokens, with a tool's answer in the middle; log-ratios of about 0.4, so clips are active."""
    rng = np.random.default_rng(seed)
    mask = np.arange(8) < np.array([8, 3, 1, 6])[:, None]
    mask[0, 3:5] = mask[3, 2] = False
    old = -rng.random((4, 8)) * 3
    return {
        "mask": mask,
        "old": old,
        "logp": old + rng.normal(size=(4, 8)) * 0.4,
        "reference": old + rng.normal(size=(4, 8)) * 0.5,
        "sampler": old + rng.normal(size=(4, 8)) * 0.5,
        "entropy": rng.random((4, 8)) * 2,
        "advantage": rng.normal(size=4),
    }


def trl_loss(
    given, loss_type, *, low=0.2, high=0.28, level="token", beta=0.0, delta=None, importance=None, top=1.0, bonus=0.0
) -> tuple[float, np.ndarray, np.ndarray]:
    """TRL's loss and its gradients by log-probs and by entropies."""
    tensors = {name: torch.tensor(np.asarray(value)) for name, value in given.items()}
    logp, entropy = tensors["logp"].requires_grad_(), tensors["entropy"].requires_grad_()
    accelerator = types.SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        reduce=lambda x, reduction: x,
        gather=lambda x: x,
        pad_across_processes=lambda x, dim, pad_index: x,
    )
    trainer = types.SimpleNamespace(
        args=types.SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
        accelerator=accelerator,
        model=types.SimpleNamespace(training=True),
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=beta,
        epsilon_low=low,
        epsilon_high=1 + high if loss_type == "cispo" else high,  # for CISPO, TRL's is the bound of the ratio itself
        max_completion_length=HORIZON,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=top,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=importance is not None,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=bool(bonus),
        use_adaptive_entropy=False,
        entropy_coef=bonus,
        _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, entropy, None),
    )
    trainer.get_high_entropy_mask = types.MethodType(grpo_trainer.GRPOTrainer.get_high_entropy_mask, trainer)
    inputs = {
        "prompt_ids": torch.zeros(4, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(4, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(4, 8, dtype=torch.int64),
        "completion_mask": torch.ones(4, 8, dtype=torch.float64),
        "tool_mask": tensors["mask"].double(),
        "advantages": tensors["advantage"],
        "old_per_token_logps": tensors["old"],
        "ref_per_token_logps": tensors["reference"],
        "num_items_in_batch": tensors["mask"].sum(),
        "importance_sampling_ratio": None if importance is None else torch.tensor(importance),
    }
    loss = grpo_trainer.GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    slopes = torch.autograd.grad(loss, [logp, entropy], allow_unused=True)
    return float(loss.detach()), *(np.zeros((4, 8)) if slope is None else slope.numpy() for slope in slopes)


def compare(given, loss, expected, beta=0.0, estimator="k3", aggregation="token_mean"):
    """`loss(logp, entropy, hidden case) -> Sums`, with the divergence added, equals what TRL says."""
    hidden = {k: v if k in ("mask", "advantage") else np.where(given["mask"], v, NAN) for k, v in given.items()}

    def run(logp, entropy):
        sums = loss(logp, entropy, hidden)
        kl = kl_sums(logp, hidden["reference"], given["mask"], estimator=estimator, aggregation=aggregation, horizon=HORIZON)
        assert kl.counts["kl"].dtype == sums.counts["loss"].dtype
        return (sums.values["loss"] + beta * kl.values["kl"]) / sums.counts["loss"], (sums.counts["loss"], kl.counts["kl"])

    with jax.enable_x64(True):
        arguments = jnp.asarray(hidden["logp"]), jnp.asarray(hidden["entropy"])
        (value, counts), slopes = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(*arguments)
    assert counts[0] == counts[1] or not beta
    np.testing.assert_allclose(value, expected[0], rtol=1e-12)
    np.testing.assert_allclose(slopes[0], expected[1], rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(slopes[1], expected[2], rtol=1e-12, atol=1e-15)


def policy(aggregation, **options):
    options = {"clip_low": 0.2, "clip_high": 0.28, "aggregation": aggregation, "horizon": HORIZON} | options
    return lambda logp, entropy, c: policy_loss(logp, c["old"], c["advantage"], c["mask"], **options)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_clipped_losses_with_and_without_the_divergence(loss_type, beta, seed):
    given, aggregation = case(seed), AGGREGATION[loss_type]
    compare(given, policy(aggregation), trl_loss(given, loss_type, beta=beta), beta=beta, aggregation=aggregation)


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("high", [0.28, 4.0])
def test_cispo(high, beta):
    given = case(3)

    def loss(logp, entropy, c):
        return cispo_loss(logp, c["old"], c["advantage"], c["mask"], clip_low=1.0, clip_high=high)

    compare(given, loss, trl_loss(given, "cispo", high=high, beta=beta), beta=beta)


def test_sequence_level_importance_sampling():
    """GSPO: TRL's loss_type grpo with one ratio per sequence."""
    given = case(4)

    def loss(logp, entropy, c):
        return sequence_policy_loss(logp, c["old"], c["advantage"], c["mask"], clip_low=0.05, clip_high=0.1)

    compare(given, loss, trl_loss(given, "grpo", low=0.05, high=0.1, level="sequence"), aggregation="sequence_mean")


def test_dual_clip_where_the_advantage_is_negative_is_trl_delta():
    """TRL's delta bounds the ratio of either sign; above 1 + clip_high that shows where the advantage is negative only."""
    given = case(5)
    given["advantage"] = -np.abs(given["advantage"])
    assert (np.exp(given["logp"] - given["old"])[given["mask"]] > 1.4).any()
    compare(given, policy("token_mean", dual_clip=1.4), trl_loss(given, "bnpo", delta=1.4))


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("loss_type", ["bnpo", "dr_grpo", "cispo"])
def test_importance_correction_of_the_sampler(loss_type, mode):
    """The ratio that TRL makes of vLLM's log-probs before its loss: token_truncate with clip_max, token_mask with both bounds."""
    given, aggregation = case(6), AGGREGATION[loss_type]
    ratio = np.exp(given["old"] - given["sampler"])
    importance = np.minimum(ratio, 1.5) if mode == "truncate" else np.where((ratio < 1 / 1.5) | (ratio > 1.5), 0.0, ratio)
    assert (importance[given["mask"]] != ratio[given["mask"]]).any()
    options = {"clip_low": 1.0 if loss_type == "cispo" else 0.2, "clip_high": 0.28, "aggregation": aggregation, "horizon": HORIZON}
    function = cispo_loss if loss_type == "cispo" else policy_loss

    def loss(logp, entropy, c):
        weights = {"sampler_logp_bt": c["sampler"], "importance_cap": 1.5, "importance_mode": mode}
        return function(logp, c["old"], c["advantage"], c["mask"], **options, **weights)

    compare(given, loss, trl_loss(given, loss_type, importance=importance), aggregation=aggregation)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo"])
def test_high_entropy_tokens(loss_type):
    """TRL interpolates its quantile and keeps 1 + floor(share (N - 1)) tokens, ours ceil(share N): both 3 of 15 at 0.2."""
    given, aggregation = case(7), AGGREGATION[loss_type]
    assert given["mask"].sum() == 15
    threshold = high_entropy_threshold(np.where(given["mask"], given["entropy"], NAN), given["mask"], 0.2)
    assert (given["entropy"][given["mask"]] >= threshold).sum() == 3

    def loss(logp, entropy, c):
        advantage = keep_high_entropy(c["advantage"], entropy, threshold)
        options = {"clip_low": 0.2, "clip_high": 0.28, "aggregation": aggregation, "horizon": HORIZON}
        return policy_loss(logp, c["old"], advantage, c["mask"], **options)

    compare(given, loss, trl_loss(given, loss_type, top=0.2), aggregation=aggregation)


def test_entropy_bonus():
    """TRL's bonus is a token mean under every loss type."""
    given = case(8)

    def loss(logp, entropy, c):
        sums = policy("token_mean")(logp, entropy, c)
        bonus = entropy_bonus(entropy, c["mask"], coefficient=0.02)
        values = {"loss": sums.values["loss"] + bonus.values["entropy_bonus"]}
        return types.SimpleNamespace(values=values, counts=sums.counts)

    compare(given, loss, trl_loss(given, "bnpo", bonus=0.02))
