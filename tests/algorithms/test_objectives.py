"""The clipped policy loss: hand-computed cases, a float64 oracle, and what it must not depend on."""

import chex
import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import strategies as st

from rstar_jax.algorithms.objectives import (
    AGGREGATIONS,
    IMPORTANCE_MODES,
    aggregate,
    cispo_loss,
    policy_loss,
    sequence_policy_loss,
)
from rstar_jax.types import Sums, UserError

NAN, INF = float("nan"), float("inf")
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
HORIZON = 7


def loss_of(logp, old, advantage, trainable, **options) -> Sums:
    return policy_loss(logp, old, advantage, trainable, **(CLIP | {"horizon": HORIZON} | options))


def numerator(logp, old, advantage, trainable, **options) -> tuple[jax.Array, Sums]:
    sums = loss_of(logp, old, advantage, trainable, **options)
    return sums.values["loss"], sums


def gradient_of_mean(logp, old, advantage, trainable, **options) -> jax.Array:
    """The gradient of the loss after the one division."""
    value, sums = jax.grad(numerator, has_aux=True)(jnp.asarray(logp), old, advantage, trainable, **options)
    return value / jnp.maximum(sums.counts["loss"], 1)


def example(seed: int = 0, rows: int = 6, tokens: int = 8) -> dict[str, np.ndarray]:
    """Rows of unequal lengths with two packed sequences each; row 2 has nothing to train on."""
    rng = np.random.default_rng(seed)
    sequences = np.zeros((rows, tokens), np.int32)
    for row in range(rows):
        first, second = rng.integers(1, 4), rng.integers(1, 5)
        sequences[row, :first] = 1
        sequences[row, first : first + second] = 2
    trainable = (rng.random((rows, tokens)) < 0.7) & (sequences > 0)
    trainable[2] = False
    advantage = rng.normal(size=(rows, 3))[np.arange(rows)[:, None], sequences]
    old = -rng.random((rows, tokens)) * 3
    logp = old + rng.normal(size=(rows, tokens)) * 0.4
    return {"logp": logp, "old": old, "advantage": advantage, "trainable": trainable, "sequences": sequences}


def oracle(case: dict[str, np.ndarray], aggregation: str, packed: bool) -> dict[str, tuple[float, int]]:
    """The formulas, token by token in Python floats."""
    totals = dict.fromkeys(("clip_fraction", "ratio", "approx_kl"), 0.0)
    by_sequence: dict[tuple[int, int], list[float]] = {}
    for b, t in zip(*np.nonzero(case["trainable"]), strict=True):
        delta = float(np.clip(case["logp"][b, t] - case["old"][b, t], -20, 20))
        rho, a = float(np.exp(delta)), float(case["advantage"][b, t])
        unclipped, clipped = rho * a, min(max(rho, 1 - CLIP["clip_low"]), 1 + CLIP["clip_high"]) * a
        by_sequence.setdefault((b, int(case["sequences"][b, t]) if packed else 0), []).append(-min(unclipped, clipped))
        totals["clip_fraction"] += clipped < unclipped
        totals["ratio"] += rho
        totals["approx_kl"] += rho - 1 - delta
    tokens = sum(map(len, by_sequence.values()))
    if aggregation == "token_mean":
        loss = (sum(map(sum, by_sequence.values())), tokens)
    elif aggregation == "constant":
        loss = (sum(map(sum, by_sequence.values())) / HORIZON, len(by_sequence))
    else:
        loss = (sum(sum(losses) / len(losses) for losses in by_sequence.values()), len(by_sequence))
    return {"loss": loss} | {name: (value, tokens) for name, value in totals.items()}


class HandComputedTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_one_token(self):
        value, gradient = self.variant(loss_of), self.variant(gradient_of_mean)
        for name, ratio, advantage, loss, slope, clipped in (
            # name, ratio, advantage, loss, d loss / d logp, clip active
            ("inside, positive", 1.1, 2.0, -2.2, -2.2, 0),
            ("inside, negative", 1.1, -2.0, 2.2, 2.2, 0),
            ("above, positive: clipped at 1.28", 1.5, 2.0, -2.56, 0.0, 1),
            ("above, negative: not clipped", 1.5, -2.0, 3.0, 3.0, 0),
            ("below, positive: not clipped", 0.5, 2.0, -1.0, -1.0, 0),
            ("below, negative: clipped at 0.8", 0.5, -2.0, 1.6, 0.0, 1),
            ("between 1.2 and the higher clip", 1.25, 2.0, -2.5, -2.5, 0),
            ("no advantage", 1.5, 0.0, 0.0, 0.0, 0),
        ):
            with self.subTest(name):
                arguments = (
                    np.array([[np.log(ratio) - 1.0]], np.float32),
                    np.array([[-1.0]], np.float32),
                    np.array([advantage], np.float32),
                    np.array([[True]]),
                )
                sums = value(*arguments)
                np.testing.assert_allclose(float(sums.values["loss"]), loss, rtol=1e-6, atol=1e-7)
                np.testing.assert_allclose(gradient(*arguments)[0, 0], slope, rtol=1e-6, atol=1e-7)
                assert float(sums.values["clip_fraction"]) == clipped
                np.testing.assert_allclose(float(sums.values["ratio"]), ratio, rtol=1e-6)
                np.testing.assert_allclose(float(sums.values["approx_kl"]), ratio - 1 - np.log(ratio), rtol=1e-4, atol=1e-7)

    @chex.variants(with_jit=True, without_jit=True)
    def test_the_first_update_has_the_plain_policy_gradient_whatever_the_clip(self):
        logp, mask = np.array([[-1.0, -2.0]], np.float32), np.array([[True, True]])
        for clip in (0.0, 0.2):
            gradient = self.variant(
                lambda l, clip=clip: gradient_of_mean(l, logp, np.array([3.0]), mask, clip_low=clip, clip_high=clip)
            )(logp)
            np.testing.assert_array_equal(gradient, [[-1.5, -1.5]])

    @chex.variants(with_jit=True, without_jit=True)
    def test_lengths_two_and_five_with_opposite_advantages_do_not_cancel(self):
        # bingreeky/MemGen#33: padding counted as tokens made every length equal and the loss 0. (-2 + 5) / 7
        mask = np.arange(6)[None] < np.array([[2], [5]])
        logp = np.full((2, 6), -1.0, np.float32)
        sums = self.variant(loss_of)(logp, logp, np.array([1.0, -1.0], np.float32), mask)
        assert (float(sums.values["loss"]), int(sums.counts["loss"])) == (3.0, 7)

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(2, 1)
    def test_one_microbatch_or_two_give_loss_one_half_and_gradient_one_quarter(self, rows):
        # verl-project/verl#5625, modelscope/twinkle#292: lengths 1 and 3, advantages +1 and -1
        mask = np.array([[True, False, False], [True, True, True]])
        logp, advantage = np.full((2, 3), -0.5, np.float32), np.array([1.0, -1.0], np.float32)
        value_and_grad = self.variant(jax.value_and_grad(numerator, has_aux=True))
        batches = [slice(i, i + rows) for i in range(0, 2, rows)]
        parts = [value_and_grad(logp[i], logp[i], advantage[i], mask[i]) for i in batches]
        total = sum((sums for (_, sums), _ in parts[1:]), start=parts[0][0][1])
        gradient = np.concatenate([g for _, g in parts]) / float(total.counts["loss"])
        assert total.means()["loss"] == 0.5
        np.testing.assert_array_equal(gradient, [[-0.25, 0.0, 0.0], [0.25, 0.25, 0.25]])

    @chex.variants(with_jit=True, without_jit=True)
    def test_sequence_mean_weighs_a_short_and_a_long_sequence_alike(self):
        # huggingface/trl#3823: contributions must not grow with the length
        mask = np.arange(20)[None] < np.array([[2], [20]])
        logp = np.full((2, 20), -1.0, np.float32)
        gradient = self.variant(lambda l: gradient_of_mean(l, logp, np.ones(2), mask, aggregation="sequence_mean"))(logp)
        np.testing.assert_allclose(np.asarray(gradient).sum(axis=1), [-0.5, -0.5], rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_packed_sequence_mean(self):
        # sequence 1: losses -1 and -3 (the middle token is observed), sequence 2: -5, sequence 3: nothing trainable
        sequences = np.array([[1, 1, 1, 2, 3, 0]])
        mask = np.array([[True, False, True, True, False, False]])
        advantage = np.array([[1.0, NAN, 3.0, 5.0, NAN, NAN]], np.float32)
        logp = np.zeros((1, 6), np.float32)
        run = self.variant(lambda s: loss_of(logp, logp, advantage, mask, aggregation="sequence_mean", sequences_bt=s))
        sums = run(sequences)
        assert (float(sums.values["loss"]), int(sums.counts["loss"])) == (-7.0, 2)
        assert int(sums.counts["ratio"]) == 3  # metrics are token means

    @chex.variants(with_jit=True, without_jit=True)
    def test_constant_divides_by_the_horizon_and_the_sequences(self):
        # verl's agg_loss, seq-mean-token-sum-norm with loss_scale_factor 4: ((1 + 2 + 3) / 4 + 6 / 4) / 2; a sequence without a
        # trainable token is not counted
        values = np.array([[1.0, 2.0, 3.0, NAN], [6.0, NAN, NAN, NAN], [NAN] * 4], np.float32)
        numerator, count = self.variant(lambda v: aggregate(v, ~np.isnan(values), "constant", horizon=4))(values)
        assert (float(numerator), int(count)) == (3.0, 2)

    @chex.variants(with_jit=True, without_jit=True)
    def test_constant_weighs_all_tokens_alike_whatever_the_lengths(self):
        mask = np.arange(20)[None] < np.array([[2], [20]])
        logp = np.full((2, 20), -1.0, np.float32)
        gradient = self.variant(lambda l: gradient_of_mean(l, logp, np.ones(2), mask, aggregation="constant", horizon=20))(logp)
        np.testing.assert_allclose(gradient, np.where(mask, -1 / 40, 0.0), rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_tokens_of_no_sequence_are_never_counted(self):
        everywhere, sequences = np.ones((1, 4), bool), np.array([[1, 1, 0, 0]])
        logp = np.zeros((1, 4), np.float32)
        for aggregation, count in (("token_mean", 2), ("sequence_mean", 1), ("constant", 1)):
            run = self.variant(lambda s, a=aggregation: loss_of(logp, logp, np.ones((1, 4)), everywhere, aggregation=a, sequences_bt=s))
            assert int(run(sequences).counts["loss"]) == count

    @chex.variants(with_jit=True, without_jit=True)
    def test_entropy_is_a_metric_when_given(self):
        mask, logp = np.array([[True, True, False]]), np.zeros((1, 3), np.float32)
        run = self.variant(lambda e: loss_of(logp, logp, np.ones(1), mask, entropy_bt=e))
        sums = run(np.array([[1.0, 2.0, NAN]], np.float32))
        assert (float(sums.values["entropy"]), int(sums.counts["entropy"])) == (3.0, 2)
        assert "entropy" not in loss_of(logp, logp, np.ones(1), mask).values


class MaskTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.product(aggregation=AGGREGATIONS, packed=[False, True])
    def test_what_stands_at_masked_positions_has_no_influence(self, aggregation, packed):
        # yaof20/Flash-RL#19: log-probs of observed tokens are not numbers to reckon with
        case = example()
        mask = case["trainable"]
        clean = {k: case[k].astype(np.float32) for k in ("logp", "old", "advantage")}
        options = {"aggregation": aggregation, "sequences_bt": case["sequences"] if packed else None}

        def both(logp, old, advantage):
            return loss_of(logp, old, advantage, mask, **options), gradient_of_mean(logp, old, advantage, mask, **options)

        both = self.variant(both)
        expected = both(**clean)
        gradient = np.asarray(expected[1])
        assert (gradient[~mask] == 0.0).all() and np.isfinite(gradient).all() and np.abs(gradient).sum() > 0
        for garbage in (NAN, INF, -INF, 1e9):
            dirty = {k: np.where(mask, v, np.float32(garbage)) for k, v in clean.items()}
            chex.assert_trees_all_equal(both(**dirty), expected)

    @chex.variants(with_jit=True, without_jit=True)
    def test_logits_at_observation_positions_have_a_gradient_of_exactly_zero(self):
        # mll-lab-nu/RAGEN#71: an inverted mask trained on what the tool said
        rng = np.random.default_rng(0)
        logits, tokens = rng.normal(size=(2, 5, 7)).astype(np.float32), rng.integers(0, 7, (2, 5))
        mask = np.array([[True, False, False, True, False], [False, True, True, False, False]])

        def loss(logits_btv):
            logp = jnp.take_along_axis(jax.nn.log_softmax(logits_btv), tokens[..., None], axis=-1)[..., 0]
            return loss_of(logp, jax.lax.stop_gradient(logp), np.array([1.0, -2.0]), mask).values["loss"]

        gradient = np.asarray(self.variant(jax.grad(loss))(logits))
        assert (gradient[~mask] == 0.0).all()
        assert (np.abs(gradient[mask]).max(axis=-1) > 0).all()

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.product(aggregation=AGGREGATIONS, packed=[False, True])
    def test_a_batch_with_nothing_to_train_on_is_zero_of_zero(self, aggregation, packed):
        # huggingface/trl#4976: a truncated sample that is masked out counts no tokens anywhere
        case = example()
        options = {"aggregation": aggregation, "sequences_bt": case["sequences"] if packed else None}
        nothing = np.zeros_like(case["trainable"])
        sums = self.variant(lambda l: loss_of(l, case["old"], case["advantage"], nothing, **options))(case["logp"])
        assert all(float(v) == 0.0 for v in sums.values.values()) and all(int(c) == 0 for c in sums.counts.values())
        assert set(sums.means().values()) == {0.0}
        gradient = self.variant(lambda l: gradient_of_mean(l, case["old"], case["advantage"], nothing, **options))(case["logp"])
        assert (np.asarray(gradient) == 0.0).all()

    @chex.variants(with_jit=True, without_jit=True)
    def test_a_huge_log_ratio_neither_overflows_nor_leaks(self):
        # OpenRLHF#1295: exp overflowed, and 0 * inf made the loss NaN even for a rejected sequence
        logp, advantage = np.full((2, 2), -1.0, np.float32), np.array([1.0, -1.0], np.float32)
        both = self.variant(lambda old, m: (loss_of(logp, old, advantage, m), gradient_of_mean(logp, old, advantage, m)))
        for gap in (200.0, -200.0, INF, -INF):
            old = logp.copy()
            old[1, 0] -= gap
            sums, gradient = both(old, np.array([[True, True], [False, False]]))
            assert float(sums.values["loss"]) == -2.0 and np.isfinite(gradient).all()
            sums, gradient = both(old, np.array([[True, True], [True, True]]))
            assert all(np.isfinite(float(v)) for v in sums.values.values())
            assert np.isfinite(gradient).all() and float(gradient[1, 0]) == 0.0


class InvarianceTest(chex.TestCase):
    @parameterized.product(aggregation=AGGREGATIONS, packed=[False, True])
    def test_values_equal_a_float64_oracle(self, aggregation, packed):
        for seed in range(8):
            case = example(seed)
            sums = run(case, aggregation, packed)
            for name, (value, count) in oracle(case, aggregation, packed).items():
                np.testing.assert_allclose(sums.values[name], value, rtol=1e-12, atol=1e-14)
                assert int(sums.counts[name]) == count

    @parameterized.product(aggregation=AGGREGATIONS, packed=[False, True], rows=[1, 2])
    def test_microbatches_of_any_size_add_up_to_the_batch(self, aggregation, packed, rows):
        for seed in range(4):
            case = example(seed)
            parts = [take(case, slice(i, i + rows)) for i in range(0, 6, rows)]
            whole, sums = run(case, aggregation, packed), [run(part, aggregation, packed) for part in parts]
            total = sum(sums[1:], start=sums[0])
            chex.assert_trees_all_close(total, whole, rtol=1e-12, atol=1e-14)
            numerators = np.concatenate([gradient(part, aggregation, packed) for part in parts])
            expected = gradient(case, aggregation, packed) / whole.counts["loss"]
            np.testing.assert_allclose(numerators / total.counts["loss"], expected, rtol=1e-12, atol=1e-14)

    @parameterized.product(aggregation=AGGREGATIONS, packed=[False, True])
    def test_row_order_does_not_matter(self, aggregation, packed):
        for seed in range(4):
            case, order = example(seed), np.random.default_rng(seed).permutation(6)
            permuted, straight = take(case, order), run(case, aggregation, packed)
            chex.assert_trees_all_close(run(permuted, aggregation, packed), straight, rtol=1e-12)
            np.testing.assert_array_equal(gradient(permuted, aggregation, packed), gradient(case, aggregation, packed)[order])

    @parameterized.product(aggregation=AGGREGATIONS, packed=[False, True], left=[0, 3])
    def test_padding_does_not_matter(self, aggregation, packed, left):
        case = example()
        fills = {"logp": NAN, "old": NAN, "advantage": NAN, "trainable": False, "sequences": 0}
        padded = {k: np.pad(v, ((0, 2), (left, 2)), constant_values=fills[k]) for k, v in case.items()}
        chex.assert_trees_all_close(run(padded, aggregation, packed), run(case, aggregation, packed), rtol=1e-12)

    @parameterized.parameters(*AGGREGATIONS)
    def test_packed_rows_equal_one_row_for_each_sequence(self, aggregation):
        case = example()
        rows = []
        for b, sequence in [(b, sequence) for b in range(6) for sequence in (1, 2)]:
            row = take(case, [b])
            rows.append(row | {"trainable": row["trainable"] & (row["sequences"] == sequence)})
        unpacked = {k: np.concatenate([row[k] for row in rows]) for k in case}
        chex.assert_trees_all_close(run(unpacked, aggregation, False), run(case, aggregation, True), rtol=1e-12)

    @parameterized.product(aggregation=AGGREGATIONS, packed=[False, True])
    def test_sharding_the_rows_over_devices_does_not_matter(self, aggregation, packed):
        case = example(rows=8)
        mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
        with jax.enable_x64(True):
            sharded = jax.device_put(case, sharding)
        chex.assert_trees_all_close(run(sharded, aggregation, packed), run(case, aggregation, packed), rtol=1e-12)


def take(case, index):
    """The rows `index` of a case."""
    return {k: v[index] for k, v in case.items()}


def sums_of_case(case, aggregation: str, packed: bool) -> Sums:
    sequences = case["sequences"] if packed else None
    return loss_of(case["logp"], case["old"], case["advantage"], case["trainable"], aggregation=aggregation, sequences_bt=sequences)


_sums = jax.jit(sums_of_case, static_argnums=(1, 2))
_gradient = jax.jit(
    lambda case, *options: jax.grad(lambda logp: sums_of_case(case | {"logp": logp}, *options).values["loss"])(case["logp"]),
    static_argnums=(1, 2),
)


def run(case, aggregation: str, packed: bool) -> Sums:
    """The sums of a case, computed in float64."""
    with jax.enable_x64(True):
        return jax.device_get(_sums(case, aggregation, packed))


def gradient(case, aggregation: str, packed: bool) -> np.ndarray:
    """The gradient of the loss's numerator, computed in float64."""
    with jax.enable_x64(True):
        return jax.device_get(_gradient(case, aggregation, packed))


def test_bad_arguments_are_refused():
    logp, mask = np.zeros((1, 2), np.float32), np.ones((1, 2), bool)
    with pytest.raises(UserError, match="token_mean, sequence_mean, constant"):
        loss_of(logp, logp, np.ones(1), mask, aggregation="mean")
    with pytest.raises(UserError, match="horizon"):
        policy_loss(logp, logp, np.ones(1), mask, **CLIP, aggregation="constant")
    with pytest.raises(UserError, match="truncate, mask"):
        loss_of(logp, logp, np.ones(1), mask, sampler_logp_bt=logp, importance_cap=2.0, importance_mode="drop")
    with pytest.raises(UserError, match=r"importance_cap=0\.5"):
        loss_of(logp, logp, np.ones(1), mask, sampler_logp_bt=logp, importance_cap=0.5, importance_mode="mask")
    with pytest.raises(AssertionError):
        loss_of(logp, logp[:, :1], np.ones(1), mask)


def test_importance_weights_are_truncated_constant_and_blind_to_masked_tokens():
    """Against float64 numpy: w = min(exp(old - sampler), cap) on the token's loss, and no gradient through it."""
    given = example(3)
    old = np.asarray(given["old"], np.float64)
    sampler = old + np.random.default_rng(1).normal(size=old.shape) * 0.8
    weights = np.minimum(np.exp(old - sampler), 1.5)
    sampler_with_nan = np.where(given["trainable"], sampler, NAN)
    plain = {k: given[k] for k in ("logp", "old", "advantage", "trainable")}
    options = {"sampler_logp_bt": sampler_with_nan, "importance_cap": 1.5}
    sums = loss_of(**plain, **options)
    ratio = np.exp(np.asarray(plain["logp"], np.float64) - old)
    advantage = np.broadcast_to(np.asarray(plain["advantage"], np.float64).reshape(old.shape[0], -1), old.shape)
    unclipped, clipped = ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage
    expected = -np.where(given["trainable"], weights * np.minimum(unclipped, clipped), 0).sum()
    np.testing.assert_allclose(sums.values["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(sums.values["importance"], np.where(given["trainable"], weights, 0).sum(), rtol=1e-5)
    gradient = gradient_of_mean(**plain, **options)
    bare = gradient_of_mean(**plain)
    np.testing.assert_allclose(gradient, np.where(given["trainable"], weights, 0) * np.asarray(bare), rtol=1e-5, atol=1e-8)
    with pytest.raises(ValueError, match="sampler_logp_bt"):
        loss_of(**plain, importance_cap=1.5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (4.0, -2.0, 6.0, 0.0, 1),  # held at 3
        (2.5, -2.0, 5.0, 5.0, 0),
        (0.5, -2.0, 1.6, 0.0, 1),
        (4.0, 2.0, -2.56, 0.0, 1),  # the upper clip as ever
        (4.0, 0.0, 0.0, 0.0, 0),
    ],
)
def test_dual_clip_bounds_what_a_token_of_negative_advantage_loses(ratio, advantage, loss, slope, clipped):
    arguments = (
        np.array([[np.log(ratio) - 1.0]], np.float32), np.array([[-1.0]], np.float32), np.array([advantage]), np.array([[True]])
    )  # fmt: skip
    sums = loss_of(*arguments, dual_clip=3.0)
    np.testing.assert_allclose(float(sums.values["loss"]), loss, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(gradient_of_mean(*arguments, dual_clip=3.0)[0, 0], slope, rtol=1e-6, atol=1e-7)
    assert float(sums.values["clip_fraction"]) == clipped


@pytest.mark.parametrize("packed", [True, False])
def test_gspo_against_the_formula_in_float64(packed):
    """Value and gradient; NaN at masked tokens reaches nothing."""
    case = example(5)
    sequences = case["sequences"] if packed else np.ones_like(case["sequences"])
    advantage = case["advantage"] if packed else np.repeat(case["advantage"][:, :1], case["advantage"].shape[1], 1)
    loss, count, slope = 0.0, 0, np.zeros(case["logp"].shape)
    for b in range(len(sequences)):
        for s in (1, 2) if packed else (1,):
            where = np.flatnonzero(case["trainable"][b] & (sequences[b] == s))
            if not where.size:
                continue
            ratio, a = np.exp((case["logp"] - case["old"])[b, where].mean()), advantage[b, where[0]]
            clipped = min(max(ratio, 0.95), 1.05) * a
            loss, count = loss - min(ratio * a, clipped), count + 1
            slope[b, where] = -(ratio * a if ratio * a <= clipped else 0.0) / where.size
    hidden = ~case["trainable"]
    logp, old = (np.where(hidden, np.nan, case[name]).astype(np.float32) for name in ("logp", "old"))

    def numerator(logp):
        sums = sequence_policy_loss(
            logp, old, np.where(hidden, np.nan, advantage), case["trainable"], clip_low=0.05, clip_high=0.05,
            sequences_bt=sequences if packed else None,
        )  # fmt: skip
        return sums.values["loss"], sums

    (value, sums), gradient = jax.value_and_grad(numerator, has_aux=True)(jnp.asarray(logp))
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    assert int(sums.counts["loss"]) == count
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", [policy_loss, cispo_loss])
def test_masked_importance_rejects_tokens_on_both_sides_and_keeps_them_in_the_count(loss):
    """IcePop's M(k) = k within [1/2, 2], else 0, as TRL's token_mask: k = 0.4, 0.5, 0.8, 2, 3; the last token is not trained on."""
    weights = np.array([[0.4, 0.5, 0.8, 2.0, 3.0, 1.0]])
    mask, kept = np.array([[True] * 5 + [False]]), np.array([[0.0, 0.5, 0.8, 2.0, 0.0, 0.0]])
    rng = np.random.default_rng(0)
    advantage, sampler = rng.normal(size=(1, 6)), np.log(np.array([[0.5, 0.25, 0.5, 0.25, 0.1, 0.5]]))
    old = sampler + np.log(weights)
    logp = old + rng.normal(size=old.shape) * 0.3
    hide = lambda x: np.where(mask, x, NAN)  # noqa: E731

    def run(logp, **options):
        sums = loss(logp, hide(old), hide(advantage), mask, **CLIP, **options)
        return sums.values["loss"], sums

    with jax.enable_x64(True):
        bound = 2 * (1 + 1e-12)
        options = {"sampler_logp_bt": hide(sampler), "importance_cap": bound, "importance_mode": "mask"}
        (_, sums), gradient = jax.value_and_grad(run, has_aux=True)(jnp.asarray(hide(logp)), **options)
        bare = jax.grad(run, has_aux=True)(jnp.asarray(hide(logp)))[0]
    np.testing.assert_allclose(gradient, kept * np.asarray(bare), rtol=1e-12)
    assert int(sums.counts["loss"]) == 5
    np.testing.assert_allclose(sums.values["importance"], 3.3, rtol=1e-12)
    assert (float(sums.values["importance_rejected"]), int(sums.counts["importance_rejected"])) == (2.0, 5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [
        (1.1, 2.0, 1.1, 0),
        (1.5, 2.0, 1.28, 1),  # PPO has no gradient here
        (1.5, -2.0, 1.28, 1),
        (0.5, 2.0, 0.8, 1),
        (0.5, -2.0, 0.8, 1),  # nor here
        (1.25, 2.0, 1.25, 0),
        (1.5, 0.0, 1.28, 1),
    ],
)
def test_cispo_clips_the_weight_and_no_token_loses_its_gradient(ratio, advantage, weight, clipped):
    """MiniMax-M1 Eq. 4 and 5, one token of log-prob -0.7: loss = -weight A logp, slope = -weight A."""
    mask, old = np.array([[True, False]]), np.array([[-0.7 - np.log(ratio), NAN]], np.float32)

    def run(logp):
        sums = cispo_loss(logp, old, np.array([[advantage, NAN]]), mask, **CLIP)
        return sums.values["loss"], sums

    (loss, sums), slope = jax.value_and_grad(run, has_aux=True)(jnp.asarray([[-0.7, NAN]], jnp.float32))
    np.testing.assert_allclose(loss, weight * advantage * 0.7, rtol=1e-6)
    np.testing.assert_allclose(slope, [[-weight * advantage, 0.0]], rtol=1e-6)
    assert (float(sums.values["clip_fraction"]), int(sums.counts["loss"])) == (clipped, 1)
    np.testing.assert_allclose(sums.values["ratio"], ratio, rtol=1e-6)


def test_cispo_without_clipping_at_the_sampling_policy_is_the_plain_policy_gradient():
    case = example(2)
    given = case["advantage"], case["trainable"]

    def slope(loss):
        return jax.grad(lambda logp: loss(logp, case["logp"], *given, **CLIP).values["loss"])(jnp.asarray(case["logp"]))

    np.testing.assert_allclose(slope(cispo_loss), slope(policy_loss), rtol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mode", IMPORTANCE_MODES)
def test_cispo_against_the_formula_in_float64_with_nan_at_every_masked_token(aggregation, mode):
    case = example(4)
    mask, sequences = case["trainable"], case["sequences"]
    sampler = case["old"] + np.random.default_rng(3).normal(size=mask.shape) * 0.8
    importance = np.exp(case["old"] - sampler)
    importance = np.minimum(importance, 1.5) if mode == "truncate" else importance * ((importance >= 1 / 1.5) & (importance <= 1.5))
    slope = -importance * np.clip(np.exp(case["logp"] - case["old"]), 0.8, 1.28) * case["advantage"]
    lengths = np.array([[(mask[b] & (sequences[b] == s)).sum() for s in sequences[b]] for b in range(len(mask))])
    scale = {"token_mean": 1.0, "sequence_mean": 1 / np.maximum(lengths, 1), "constant": 1 / HORIZON}[aggregation]
    count = mask.sum() if aggregation == "token_mean" else len({(b, sequences[b, t]) for b, t in zip(*np.nonzero(mask), strict=True)})
    expected = np.where(mask, slope * scale, 0.0)
    logp, old, advantage, sampler = (np.where(mask, x, NAN) for x in (case["logp"], case["old"], case["advantage"], sampler))

    def run(logp):
        sums = cispo_loss(
            logp, old, advantage, mask, **CLIP, aggregation=aggregation, sequences_bt=sequences, horizon=HORIZON,
            sampler_logp_bt=sampler, importance_cap=1.5, importance_mode=mode,
        )  # fmt: skip
        return sums.values["loss"], sums

    with jax.enable_x64(True):
        (loss, sums), gradient = jax.jit(jax.value_and_grad(run, has_aux=True))(logp)
    np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(loss, np.nansum(expected * logp), rtol=1e-12)
    assert int(sums.counts["loss"]) == count


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.data())
def test_every_loss_stays_float64_and_finite_and_ignores_masked_tokens(data):
    """Any log-probs and mask; what a masked token holds changes no bit of any sum or gradient."""
    shape = (2, 5)
    numbers = hypothesis.extra.numpy.arrays(np.float64, shape, elements=st.floats(-60, 0))
    logp, old, sampler = data.draw(numbers), data.draw(numbers), data.draw(numbers)
    advantage = data.draw(hypothesis.extra.numpy.arrays(np.float64, shape, elements=st.floats(-3, 3)))
    mask = data.draw(hypothesis.extra.numpy.arrays(bool, shape))
    importance = {"importance_cap": 2.0, "importance_mode": data.draw(st.sampled_from(IMPORTANCE_MODES))}
    shared = {"aggregation": data.draw(st.sampled_from(AGGREGATIONS)), "horizon": HORIZON}

    def losses(logp, old, advantage, sampler):
        given = logp, old, advantage, mask
        return (
            policy_loss(*given, **CLIP, **shared, **importance, sampler_logp_bt=sampler, dual_clip=3.0),
            cispo_loss(*given, **CLIP, **shared, **importance, sampler_logp_bt=sampler),
            sequence_policy_loss(*given, **CLIP),
        )

    def run(*given):
        return losses(*given), jax.jacrev(lambda logp: [sums.values["loss"] for sums in losses(logp, *given[1:])])(given[0])

    with jax.enable_x64(True):
        clean = jax.device_get(run(*map(jnp.asarray, (logp, old, advantage, sampler))))
        dirty = jax.device_get(run(*(jnp.asarray(np.where(mask, x, NAN)) for x in (logp, old, advantage, sampler))))
    chex.assert_trees_all_equal(dirty, clean)
    for sums, gradient in zip(*clean, strict=True):
        assert sums.values["loss"].dtype == gradient.dtype == np.float64
        assert all(np.isfinite(value) for value in sums.values.values()) and (gradient[~mask] == 0).all()
        assert all(np.issubdtype(count.dtype, np.integer) for count in sums.counts.values())
