"""The engine against the trainer's own forward pass; and what a trajectory may depend on."""

import asyncio
import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import CAPACITY, MODEL, ROLLOUT, STOPS, Rolled, trainer_logps

from rstar_jax.config import MeshConfig
from rstar_jax.model import qwen
from rstar_jax.model.logprobs import score
from rstar_jax.model.sharding import make_mesh
from rstar_jax.rollout import decode
from rstar_jax.rollout.engine import SlotEngine
from rstar_jax.rollout.weights import rollout_params
from rstar_jax.types import Finish, SampleKey, Sampling, TrainBatch, UserError


def make_engine(params, device, rollout=ROLLOUT, mesh=None):
    engine = SlotEngine(MODEL, rollout, capacity=CAPACITY, stop_ids=STOPS, device=device, mesh=mesh)
    engine.load(rollout_params(params, MODEL, mesh), version=5)
    return engine


async def talk(engine, prompt, key, *, turns=3, delay=0.0, temperature=1.0, most=12):
    """Several turns with observed tokens between them, as an agent with a tool would have."""
    slot = await engine.open(prompt, key, Sampling(temperature))
    rolled = Rolled(list(prompt), [float("nan")] * len(prompt), [False] * len(prompt), [])
    for turn in range(turns):
        got = await slot.generate(most)
        rolled.ids += got.ids
        rolled.logps += got.logps
        rolled.sampled += [True] * len(got.ids)
        rolled.finishes.append(got.finish)
        if turn + 1 < turns:
            await asyncio.sleep(delay * ((key.sample + turn) % 3))
            observed = [(key.sample * 3 + turn + i) % 60 for i in range(1 + (key.sample + 4 * turn) % 11)]
            await slot.append(observed)
            rolled.ids += observed
            rolled.logps += [float("nan")] * len(observed)
            rolled.sampled += [False] * len(observed)
    slot.close()
    return rolled


def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(12, 60, n).tolist() for n in (1, 5, 9, 16, 17, 33)]


async def everyone(engine, *, order=None, samples=4, **options):
    jobs = [(i, j) for i in range(len(prompts())) for j in range(samples)]
    order = jobs if order is None else [jobs[k] for k in order]
    async with engine:
        results = await asyncio.gather(*(talk(engine, prompts()[i], SampleKey(1, 2, i, j), **options) for i, j in order))
    return dict(zip(order, results, strict=True))


@pytest.fixture(scope="module")
def reference(params, device):
    return asyncio.run(everyone(make_engine(params, device)))


def test_sampled_log_probs_are_the_trainers_over_whole_multi_turn_trajectories(params, reference):
    worst = 0.0
    for rolled in reference.values():
        sampled = np.asarray(rolled.sampled)
        gap = np.abs(trainer_logps(params, rolled) - np.asarray(rolled.logps))[sampled]
        worst = max(worst, gap.max())
        assert len(rolled.finishes) == 3
    assert worst <= 1e-4
    finishes = [finish for rolled in reference.values() for finish in rolled.finishes]
    assert Finish.STOP in finishes and Finish.LENGTH in finishes


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_the_log_prob_is_of_the_tempered_distribution(params, device, temperature):
    """trl#3029, OpenRLHF#853: on-policy at a temperature the ratio must be 1."""
    results = asyncio.run(everyone(make_engine(params, device), temperature=temperature, samples=1))
    for rolled in results.values():
        sampled = np.asarray(rolled.sampled)
        ratio = np.exp(trainer_logps(params, rolled, temperature) - np.asarray(rolled.logps))[sampled]
        np.testing.assert_allclose(ratio, 1.0, atol=1e-4)


@pytest.mark.parametrize("delay", [0.0, 0.004])
def test_a_trajectory_depends_on_nothing_but_its_key(params, device, reference, delay):
    """Slots, neighbours, admission order and tool delays change no bit."""
    order = np.random.default_rng(7).permutation(24).tolist()
    shuffled = asyncio.run(everyone(make_engine(params, device), order=order, delay=delay))
    alone = asyncio.run(everyone(make_engine(params, device), order=[13]))
    for job, rolled in {**shuffled, **alone}.items():
        assert rolled.ids == reference[job].ids
        np.testing.assert_array_equal(rolled.logps, reference[job].logps)


@pytest.mark.parametrize("slots", [1, 24])
def test_another_number_of_slots_samples_the_same_tokens(params, device, reference, slots):
    other = asyncio.run(everyone(make_engine(params, device, dataclasses.replace(ROLLOUT, slots=slots))))
    for job, rolled in other.items():
        assert rolled.ids == reference[job].ids
        np.testing.assert_allclose(rolled.logps, reference[job].logps, atol=1e-5)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)])
def test_eight_devices_sample_the_same_tokens_as_one(params, device, reference, sizes):
    mesh = make_mesh(MeshConfig(*sizes))
    other = asyncio.run(everyone(make_engine(params, device, mesh=mesh)))
    for job, rolled in other.items():
        assert rolled.ids == reference[job].ids
        np.testing.assert_allclose(rolled.logps, reference[job].logps, atol=1e-5)


def test_greedy_is_the_argmax_of_the_trainers_logits(params, device):
    results = asyncio.run(everyone(make_engine(params, device), temperature=0.0, samples=1))
    for rolled in results.values():
        ids = jnp.asarray([rolled.ids])
        hidden, *_ = qwen.forward(params, MODEL, ids, jnp.arange(len(rolled.ids))[None], jnp.ones_like(ids))
        best = np.asarray(jnp.argmax(qwen.logits(params, MODEL, hidden), -1))[0]
        sampled = np.flatnonzero(rolled.sampled)
        np.testing.assert_array_equal(np.asarray(rolled.ids)[sampled], best[sampled - 1])


def test_a_group_prefills_its_prompt_once(params, device):
    engine = make_engine(params, device)

    async def group():
        async with engine:
            await asyncio.gather(*(talk(engine, prompts()[2], SampleKey(0, 0, 0, j), turns=1) for j in range(8)))

    asyncio.run(group())
    assert engine.counters.prefilled_prompts == 1
    assert engine.counters.prefilled_tokens == len(prompts()[2]) - 1
    assert engine.counters.trajectories == 8


def test_nothing_compiles_after_the_warm_up(params, device):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(name) if name == "/jax/core/compile/backend_compile_duration" else None
    )
    try:
        engine = make_engine(params, device, dataclasses.replace(ROLLOUT, slots=6))
        device.submit(engine.warm_up).result()
        assert compiled
        compiled.clear()
        asyncio.run(everyone(engine))
        engine.load(rollout_params(params, MODEL, None), version=6)
        asyncio.run(everyone(engine))
        assert compiled == []
    finally:
        jax.monitoring.clear_event_listeners()


def test_decoding_donates_its_state(params):
    state = decode.empty_state(MODEL, 8, CAPACITY)
    compiled = decode.decode_chunk.lower(rollout_params(params, MODEL), MODEL, state, np.zeros(8, np.int32), 4, STOPS).compile()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes >= 0.99 * size


def test_inverse_cdf_draws_each_token_as_often_as_its_probability_says():
    p = np.array([0.5, 0.0, 0.2, 0.05, 0.0, 0.25], np.float32)
    uniform = (np.arange(2000) + 0.5) / 2000
    found, total = decode.inverse_cdf(jnp.tile(3 * p, (2000, 1)), jnp.asarray(uniform, jnp.float32))
    np.testing.assert_allclose(total, 3.0, rtol=1e-6)
    tokens = np.asarray(found)
    np.testing.assert_array_equal(np.bincount(tokens, minlength=6), (p * 2000).astype(int))
    np.testing.assert_array_equal(
        tokens, np.searchsorted(np.cumsum(p.astype(np.float64)) * (1 - 1e-9), uniform, side="right").clip(0, 5)
    )
    edge, _ = decode.inverse_cdf(jnp.asarray([[0.0, 1.0, 0.0]]), jnp.asarray([1.0 - 2**-24]))
    assert int(edge[0]) == 1


def test_a_prompt_that_cannot_fit_is_refused_in_one_line(params, device):
    engine = make_engine(params, device)

    async def too_long():
        async with engine:
            await engine.open([1] * CAPACITY, SampleKey(0, 0, 0, 0), Sampling())

    with pytest.raises(UserError, match="does not fit"):
        asyncio.run(too_long())


def test_a_cancelled_rollout_gives_its_slot_back_and_disturbs_no_other(params, device, reference):
    engine = make_engine(params, device, dataclasses.replace(ROLLOUT, slots=2))

    async def scenario():
        async with engine:
            doomed = [asyncio.create_task(forever(engine, j)) for j in range(2)]
            await asyncio.sleep(0.02)
            for task in doomed:
                task.cancel()
            await asyncio.gather(*doomed, return_exceptions=True)
            return await talk(engine, prompts()[1], SampleKey(1, 2, 1, 0))

    async def forever(engine, j):
        slot = await engine.open(prompts()[3], SampleKey(9, 9, 9, j), Sampling())
        with contextlib.closing(slot):
            while True:
                await slot.generate(1)
                await asyncio.sleep(0)
                del slot.ids[20:]  # never full
                slot.fed = min(slot.fed, 19)

    assert asyncio.run(scenario()).ids == reference[1, 0].ids


def test_a_failing_device_surfaces_in_every_waiting_rollout(params, device):
    engine = make_engine(params, device)
    engine._programs._params = {"layers": (), "ends": {}}  # the next program cannot run

    async def scenario():
        async with engine:
            await asyncio.wait_for(talk(engine, prompts()[1], SampleKey(0, 0, 0, 0)), 20)

    with pytest.raises(RuntimeError, match="engine has failed"):
        asyncio.run(scenario())


def test_experts_are_recorded_with_the_tokens_and_replayed(device):
    """Of every fed token the engine reports what it was routed to; the trainer routes alike, and a free choice of the router after
    the weights have changed would not."""
    model = dataclasses.replace(MODEL, num_experts=6, experts_per_token=2, expert_d_ff=16)
    params = jax.jit(qwen.init, static_argnums=0)(model, jax.random.key(1))
    engine = SlotEngine(model, ROLLOUT, capacity=CAPACITY, stop_ids=STOPS, device=device)
    engine.load(rollout_params(params, model), version=0)

    async def one(prompt, sample):
        slot = await engine.open(prompt, SampleKey(0, 0, 0, sample), Sampling(1.0))
        ids, logps = list(prompt), [np.nan] * len(prompt)
        for _ in range(2):
            got = await slot.generate(9)
            ids, logps = [*ids, *got.ids], [*logps, *got.logps]
            await slot.append([5, 6, 9])
            ids, logps = [*ids, 5, 6, 9], [*logps, *[np.nan] * 3]
        got = await slot.generate(4)
        slot.close()
        return [*ids, *got.ids], np.asarray([*logps, *got.logps]), slot.experts()

    async def everyone():
        async with engine:
            return await asyncio.gather(*(one(prompts()[i], j) for i in range(3) for j in range(2)))

    for ids, logps, experts in asyncio.run(everyone()):
        assert experts.shape == (len(ids) - 1, 2, 2) and experts.dtype == np.int16
        n, sampled = len(ids), ~np.isnan(logps)
        row = np.concatenate([experts, np.full((1, 2, 2), -1, np.int16)])[None]
        ones = np.ones((1, n), np.int32)
        batch = TrainBatch(np.asarray([ids]), np.arange(n)[None], ones, ones > 0, ones * 1.0, ones * 1.0, ones * 1.0, row)
        ours = score(params, model, batch, 1.0)[0][0]
        np.testing.assert_allclose(np.asarray(ours)[sampled], logps[sampled], atol=1e-4)
        free = qwen.forward(params, model, batch.tokens_bt, batch.positions_bt, batch.segments_bt).routing.chosen_lbtk[:, 0]
        np.testing.assert_array_equal(np.sort(np.transpose(free, (1, 0, 2))[:-1], -1), np.sort(experts, -1))
        other = dataclasses.replace(batch, experts_btlk=np.where(row < 0, row, (row + 1) % 6).astype(np.int16))
        assert np.abs(np.asarray(score(params, model, other, 1.0)[0][0])[sampled] - logps[sampled]).max() > 1e-3


def test_positions_past_8192_agree_with_the_trainer(device):
    """A long prompt in pieces, a turn, an observation and another turn, beyond position 8,192."""
    model = dataclasses.replace(MODEL, num_layers=1, max_positions=16_384, attention="blockwise", rope_theta=1e6)
    params = jax.jit(qwen.init, static_argnums=0)(model, jax.random.key(2))
    params["ends"]["embedding"] = params["ends"]["embedding"] * 30
    rollout = dataclasses.replace(
        ROLLOUT, slots=2, prompt_buckets=(512,), extend_buckets=(16, 1024), max_prompt_tokens=8200, attention_lengths=(4096, 8320)
    )
    capacity = 8400
    prompt = np.random.default_rng(5).integers(12, 60, 8190).tolist()
    results = {}
    for name, changes in {"plain": {}, "evicted": {"slots": 1, "evict_after_s": 0.0}}.items():
        engine = SlotEngine(model, dataclasses.replace(rollout, **changes), capacity=capacity, stop_ids=(), device=device)
        engine.load(rollout_params(params, model), version=0)
        device.submit(engine.warm_up).result()  # else the tool has answered before the first program exists

        async def talk(engine, j):
            slot = await engine.open(prompt, SampleKey(0, 0, 0, j), Sampling(1.0))
            logps = (await slot.generate(8)).logps
            await slot.append([13, 14, 15])
            await asyncio.sleep(0.05)
            logps += (await slot.generate(6)).logps
            slot.close()
            return slot.ids, np.asarray(logps)

        async def both(engine):
            async with engine:
                return await asyncio.gather(talk(engine, 0), talk(engine, 1))

        results[name] = asyncio.run(both(engine))
        assert engine.counters.prefilled_tokens == 512
        assert engine.counters.shared_tokens == len(prompt) - 1
    assert engine.counters.evictions >= 1
    for (ids, logps), (other, others) in zip(*results.values(), strict=True):
        assert ids == other
        np.testing.assert_allclose(logps, others, atol=1e-5)
        n = len(ids)
        row = np.zeros((1, capacity), np.int32)
        row[0, :n] = ids
        segments = (np.arange(capacity) < n).astype(np.int32)[None]
        zeros = np.zeros((1, capacity), np.float32)
        batch = TrainBatch(row, np.arange(capacity)[None], segments, segments > 0, zeros, zeros, zeros)
        ours = np.asarray(jax.jit(score, static_argnums=1)(params, model, batch, 1.0)[0][0])
        where = [*range(len(prompt), len(prompt) + 8), *range(n - 6, n)]
        np.testing.assert_allclose(ours[where], logps, atol=1e-4)


def test_weights_cannot_change_under_an_open_trajectory(params, device):
    """slime#2092: tokens of several policies in one trajectory, unmarked. Here weights change between trajectories only, and every
    token says which ones sampled it."""
    engine = make_engine(params, device)

    async def scenario():
        async with engine:
            slot = await engine.open(prompts()[1], SampleKey(0, 0, 0, 0), Sampling())
            first = await slot.generate(4)
            with pytest.raises(ValueError, match="1 slots are open"):
                engine.load(rollout_params(params, MODEL), version=6)
            second = await slot.generate(4)
            slot.close()
            engine.load(rollout_params(params, MODEL), version=6)
            slot = await engine.open(prompts()[1], SampleKey(0, 0, 0, 0), Sampling())
            third = await slot.generate(4)
            slot.close()
            return first.version, second.version, third.version

    assert asyncio.run(scenario()) == (5, 5, 6)
