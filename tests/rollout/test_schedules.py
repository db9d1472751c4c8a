"""Whatever the schedule, the trajectories are the same: pools, moves, eviction, forks, a shared prefix, attention lengths, lag."""

import asyncio
import dataclasses
import itertools

import jax
import numpy as np
import pytest
from engines import MODEL, ROLLOUT, STOPS, Rolled, trainer_logps

from rstar_jax.config import MeshConfig
from rstar_jax.model.sharding import make_mesh
from rstar_jax.rollout.engine import SlotEngine
from rstar_jax.rollout.weights import rollout_params
from rstar_jax.types import Finish, SampleKey, Sampling, UserError

CAPACITY = 128
SYSTEM = [20 + i % 30 for i in range(12)]


def make(params, device, mesh=None, decode_text=None, model=MODEL, **changes):
    rollout = dataclasses.replace(ROLLOUT, **{"shared_prefix": 0, "evict_after_s": -1.0, **changes})
    engine = SlotEngine(model, rollout, capacity=CAPACITY, stop_ids=STOPS, device=device, mesh=mesh, decode_text=decode_text)
    engine.load(rollout_params(params, model, mesh), version=5)
    return engine


def prompts():
    rng = np.random.default_rng(3)
    return [SYSTEM + rng.integers(12, 60, n).tolist() for n in (2, 5, 9, 30)]


async def talk(engine, prompt, key, *, delay, turns=3, most=14):
    slot = await engine.open(prompt, key, Sampling(1.0))
    rolled = Rolled(list(prompt), [np.nan] * len(prompt), [False] * len(prompt), [])
    try:
        for turn in range(turns):
            got = await slot.generate(most)
            rolled.ids += got.ids
            rolled.logps += got.logps
            rolled.sampled += [True] * len(got.ids)
            if turn + 1 < turns:
                await asyncio.sleep(delay * ((key.sample * 5 + key.prompt + turn) % 4))
                observed = [(key.sample * 3 + turn + i) % 60 for i in range(1 + (key.sample + 4 * turn) % 11)]
                await slot.append(observed)
                rolled.ids += observed
                rolled.logps += [np.nan] * len(observed)
                rolled.sampled += [False] * len(observed)
        return rolled
    finally:
        slot.close()


async def everyone(engine, *, samples=6, delay=0.0, order=None):
    jobs = [(i, j) for i in range(len(prompts())) for j in range(samples)]
    jobs = jobs if order is None else [jobs[k] for k in order]
    async with engine:
        results = await asyncio.gather(*(talk(engine, prompts()[i], SampleKey(1, 2, i, j), delay=delay) for i, j in jobs))
    return dict(zip(jobs, results, strict=True))


@pytest.fixture(scope="module")
def reference(params, device):
    return asyncio.run(everyone(make(params, device, slots=24)))


SCHEDULES = {
    "one slot": {"slots": 1},
    "four slots": {"slots": 4},
    "no lag": {"slots": 4, "lag": False},
    "short slots": {"slots": 4, "pool_lengths": (64,), "pool_slots": (4,)},
    "estimated lengths": {"slots": 2, "pool_lengths": (40, 64), "pool_slots": (6, 2), "admission": "estimate"},
    "evicted while tools run": {"slots": 3, "evict_after_s": 0.0},
    "estimated and evicted": {
        "slots": 1, "pool_lengths": (48,), "pool_slots": (2,), "admission": "estimate", "evict_after_s": 0.0
    },
    "attention lengths": {"slots": 4, "attention_lengths": (32, 64)},
    "few rows": {"slots": 12, "decode_rows": (1, 3, 7)},
    "everything": {
        "slots": 3, "pool_lengths": (48,), "pool_slots": (5,), "admission": "estimate", "evict_after_s": 0.003,
        "decode_rows": (2,), "attention_lengths": (32, 64), "chunk": 3, "candidates": 4,
    },
    "kernels as they are stored": {"slots": 4, "weight_layout": "in_out"},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("delay", [0.0, 0.01])
def test_the_schedule_changes_no_token(params, device, reference, name, delay):
    order = np.random.default_rng(len(name)).permutation(24)
    engine = make(params, device, **SCHEDULES[name])
    rolled = asyncio.run(everyone(engine, delay=delay, order=order))
    for job, one in rolled.items():
        assert one.ids == reference[job].ids
        np.testing.assert_allclose(one.logps, reference[job].logps, atol=1e-5)
    counters = engine.counters
    assert (counters.recomputed_tokens, counters.trajectories) == (0, 24)
    assert counters.cached_tokens == sum(len(one.ids) - 1 for one in rolled.values())
    assert counters.evictions == counters.restores
    if "evicted" in name and delay:
        assert counters.evictions > 0 and counters.host_bytes > 0
    if "estimated" in name:
        assert counters.moves + counters.evictions > 0
    assert engine.held() == 0


def test_no_prompt_token_is_prefilled_twice_for_a_group(params, device):
    """However few the slots: a sibling forks from one that runs, or takes the slot over from the last."""
    once = sum(len(prompt) - 1 for prompt in prompts())
    for name, changes in SCHEDULES.items():
        engine = make(params, device, **changes)
        asyncio.run(everyone(engine, delay=0.002))
        beyond = sum(max(0, len(prompt) - 1 - ROLLOUT.prompt_buckets[-1]) for prompt in prompts())  # extends the first, and is forked
        assert engine.counters.prefilled_tokens == once - beyond, name
        total = sum(len(one.ids) - 1 for one in asyncio.run(everyone(make(params, device, **changes))).values())
        fed = engine.counters.prefilled_tokens + engine.counters.extended_tokens + engine.counters.sampled_tokens
        assert fed + engine.counters.shared_tokens == total, name


@pytest.mark.parametrize("sizes", [(1, 1, 1), (8, 1, 1), (2, 2, 2)])
def test_a_shared_prefix_is_prefilled_once_for_all_prompts(params, device, reference, sizes):
    mesh = make_mesh(MeshConfig(*sizes), jax.devices()[: int(np.prod(sizes))])
    engine = make(params, device, mesh, slots=8, shared_prefix=4)
    engine.share(SYSTEM)
    rolled = asyncio.run(everyone(engine, delay=0.001))
    for job, one in rolled.items():
        assert one.ids == reference[job].ids
        np.testing.assert_allclose(one.logps, reference[job].logps, atol=1e-5)
    own = sum(min(ROLLOUT.prompt_buckets[-1], len(prompt) - 1 - len(SYSTEM)) for prompt in prompts())
    assert engine.counters.prefilled_tokens == len(SYSTEM) + own
    assert engine.counters.prefilled_prompts == len(prompts())


def test_a_prompt_without_the_prefix_is_prefilled_whole_and_new_weights_prefill_it_again(params, device):
    engine = make(params, device, slots=8, shared_prefix=4)
    engine.share(SYSTEM)

    async def one(prompt):
        async with engine:
            return (await talk(engine, prompt, SampleKey(0, 0, 0, 0), delay=0.0, turns=1)).ids

    first = asyncio.run(one(prompts()[1]))
    assert engine.counters.prefilled_tokens == len(prompts()[1]) - 1
    assert asyncio.run(one(prompts()[1])) == first
    assert engine.counters.prefilled_tokens == 2 * (len(prompts()[1]) - 1) - len(SYSTEM)
    asyncio.run(one(prompts()[1][1:]))
    asyncio.run(one(SYSTEM))  # nothing behind the prefix
    assert engine.counters.prefilled_tokens == 3 * (len(prompts()[1]) - 1) - 1 - len(SYSTEM) + len(SYSTEM) - 1
    other = jax.tree.map(lambda p: p * 1.5, params)
    engine.load(rollout_params(other, MODEL), version=6)
    fresh = make(other, device, slots=8)

    async def two(engine):
        async with engine:
            return (await talk(engine, prompts()[1], SampleKey(0, 0, 0, 0), delay=0.0, turns=1)).ids

    assert asyncio.run(one(prompts()[1])) == asyncio.run(two(fresh)) != first


def test_experts_survive_forks_moves_eviction_and_a_shared_prefix(device):
    model = dataclasses.replace(MODEL, num_experts=6, experts_per_token=2, expert_d_ff=16)
    params = jax.jit(lambda key: __import__("rstar_jax").model.qwen.init(model, key))(jax.random.key(1))

    async def everyone(engine):
        async def one(prompt, sample):
            slot = await engine.open(prompt, SampleKey(0, 0, 0, sample), Sampling(1.0))
            for _ in range(2):
                await slot.generate(9)
                await asyncio.sleep(0.003 * (sample % 3))
                await slot.append([5, 6, 9])
            await slot.generate(4)
            slot.close()
            return slot.ids, slot.experts()

        async with engine:
            return await asyncio.gather(*(one(prompts()[i], j) for i in range(4) for j in range(3)))

    expected = asyncio.run(everyone(make(params, device, model=model, slots=12)))
    engine = make(
        params,
        device,
        model=model,
        slots=1,
        pool_lengths=(40,),
        pool_slots=(2,),
        admission="estimate",
        evict_after_s=0.0,
        shared_prefix=4,
    )
    engine.share(SYSTEM)
    for (ids, experts), (wanted, routed) in zip(asyncio.run(everyone(engine)), expected, strict=True):
        assert ids == wanted and experts.shape == (len(ids) - 1, 2, 2)
        np.testing.assert_array_equal(np.sort(experts, -1), np.sort(routed, -1))
    assert engine.counters.evictions + engine.counters.moves > 0 and engine.counters.forks > 0


# --- filters ----------------------------------------------------------------------------------------------------------


def test_filters_draw_what_a_sorted_reference_draws(params, device):
    """top-k, top-p and min-p against a numpy reference on the same uniform numbers."""
    import jax.numpy as jnp

    from rstar_jax.rollout import decode

    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(400, 50)) * 2, jnp.float32)
    keys, positions = jnp.asarray(rng.integers(0, 2**31, (400, 2)), jnp.uint32), jnp.arange(400)
    kinds = [Sampling(0.8, top_k=5), Sampling(1.0, top_p=0.7), Sampling(1.3, min_p=0.2), Sampling(0.6, 20, 0.95, 0.01), Sampling(1.0)]
    samplings = [kinds[i % 5] for i in range(400)]
    tokens, logps = decode.sample(logits, decode.Filters.of(samplings), keys, positions, candidates=50)
    plain, _ = decode.sample(logits, decode.Filters.of([Sampling(s.temperature) for s in samplings]), keys, positions)
    seen = set()
    for row, s in enumerate(samplings):
        p = np.exp(np.asarray(logits[row], np.float64) / s.temperature)
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        keep = order[(np.arange(50) < (s.top_k or 50)) & (before < s.top_p) & (p[order] >= s.min_p * p.max())]
        token = int(tokens[row])
        assert token in keep
        np.testing.assert_allclose(float(logps[row]), np.log(p[token]), atol=1e-5)  # of the unfiltered distribution
        seen.add((row % 5, int(np.flatnonzero(order == token)[0])))
        if not s.filtered:
            assert token == int(plain[row])
    assert all(len({rank for kind, rank in seen if kind == k}) > 2 for k in range(5))  # not just the most probable


def test_filtered_draws_follow_the_renormalised_probabilities():
    import jax.numpy as jnp

    from rstar_jax.rollout import decode

    p = np.array([0.4, 0.3, 0.2, 0.1], np.float32)
    rows = 4000
    logits = jnp.tile(jnp.log(p), (rows, 1))
    keys = jnp.tile(jnp.asarray([[0, 7]], jnp.uint32), (rows, 1))
    tokens, _ = decode.sample(logits, decode.Filters.of([Sampling(1.0, top_p=0.65)] * rows), keys, jnp.arange(rows), candidates=4)
    share = np.bincount(np.asarray(tokens), minlength=4) / rows
    np.testing.assert_allclose(share, [4 / 7, 3 / 7, 0, 0], atol=0.03)


@pytest.mark.parametrize(
    ("sampling", "candidates", "message"),
    [
        (Sampling(1.0, top_k=5), 0, "rollout.candidates of at least 5"),
        (Sampling(1.0, top_p=0.9), 0, "rollout.candidates of at least 1"),
        (Sampling(1.0, top_k=-1), 8, "must not be negative"),
        (Sampling(1.0, top_p=0.0), 8, r"top_p in \(0, 1\]"),
        (Sampling(1.0, min_p=1.5), 8, "min_p"),
    ],
)
def test_filters_that_cannot_be_are_refused(params, device, sampling, candidates, message):
    engine = make(params, device, candidates=candidates)

    async def ask():
        async with engine:
            await engine.open(prompts()[0], SampleKey(0, 0, 0, 0), sampling)

    with pytest.raises(UserError, match=message):
        asyncio.run(ask())


# --- stop strings -----------------------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_turn_at_its_token_and_what_follows_is_as_if_nothing_more_had_been_sampled(params, device):
    """Text of token i is chr(i + 33): "stop strings" of several tokens, found on the host and rolled back on the device."""

    def text(ids):
        return "".join(chr(i + 33) for i in ids)

    async def talk(engine, stop, turns=3):
        slot = await engine.open(prompts()[1], SampleKey(4, 2, 1, 0), Sampling(1.0))
        others = [asyncio.create_task(busy(engine, j)) for j in range(3)]
        got = []
        for turn in range(turns):
            got.append(await slot.generate(14, stop=stop))
            await slot.append([30 + turn])
        slot.close()
        await asyncio.gather(*others)
        return slot.ids, got

    async def busy(engine, j):
        slot = await engine.open(prompts()[2], SampleKey(4, 2, 2, j), Sampling(1.0))
        await slot.generate(20)
        slot.close()

    async def run(engine, stop):
        async with engine:
            return await talk(engine, stop)

    _, free = asyncio.run(run(make(params, device, decode_text=text), ()))
    stop = text(free[0].ids[4:6])
    cut = next(n for n in range(1, len(free[0].ids) + 1) if stop in text(free[0].ids[:n]))
    for lag in (True, False):
        for chunk in (1, 4, 16):
            engine = make(params, device, decode_text=text, lag=lag, chunk=chunk)
            ids, got = asyncio.run(run(engine, (stop,)))
            assert got[0].ids == free[0].ids[:cut] and got[0].finish is Finish.STOP
            np.testing.assert_allclose(got[0].logps, free[0].logps[:cut], atol=1e-5)
            logps = trainer_logps(params, Rolled(ids, [], [], []), width=CAPACITY)
            at = len(prompts()[1])
            for turn in got:  # later turns stand on the cut text alone
                np.testing.assert_allclose(turn.logps, logps[at : at + len(turn.ids)], atol=1e-4)
                at += len(turn.ids) + 1


def test_stop_strings_need_a_decoder(params, device):
    engine = make(params, device)

    async def ask():
        async with engine:
            slot = await engine.open(prompts()[0], SampleKey(0, 0, 0, 0), Sampling())
            await slot.generate(4, stop=("x",))

    with pytest.raises(ValueError, match="decode_text"):
        asyncio.run(ask())


# --- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [4, 8])
def test_device_steps_stay_near_the_bound(params, device, slots):
    """At most 1.25 times the larger of total / slots and the longest, and one chunk, on a ragged draw."""
    rng = np.random.default_rng(11)
    lengths = np.clip(rng.lognormal(3.0, 0.8, 40), 2, 70).astype(int).tolist()
    engine = SlotEngine(
        MODEL, dataclasses.replace(ROLLOUT, slots=slots, shared_prefix=0), capacity=CAPACITY, stop_ids=(), device=device
    )  # fmt: skip
    engine.load(rollout_params(params, MODEL), version=0)

    async def one(i, n):
        slot = await engine.open(prompts()[i % 3], SampleKey(0, 0, i % 3, i), Sampling())
        got = await slot.generate(n)
        slot.close()
        return len(got.ids)

    async def everyone():
        async with engine:
            return await asyncio.gather(*(one(i, n) for i, n in enumerate(lengths)))

    assert asyncio.run(everyone()) == lengths
    assert engine.counters.device_steps <= 1.25 * max(sum(lengths) / slots, max(lengths)) + ROLLOUT.chunk
    assert engine.counters.sampled_tokens == sum(lengths)


def test_nothing_compiles_after_the_warm_up_whatever_happens(params, device):
    compiled = []
    listener = lambda name, seconds, **_: compiled.append(name) if name == "/jax/core/compile/backend_compile_duration" else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        engine = make(
            params, device, slots=2, pool_lengths=(48,), pool_slots=(3,), admission="estimate", evict_after_s=0.0,
            shared_prefix=4, attention_lengths=(32,), decode_rows=(1,), candidates=8, decode_text=lambda ids: "",
        )  # fmt: skip
        engine.share(SYSTEM)
        device.submit(engine.warm_up).result()
        assert compiled
        compiled.clear()
        asyncio.run(everyone(engine, delay=0.004))
        assert engine.counters.evictions and engine.counters.forks
        assert compiled == []
    finally:
        jax.monitoring.clear_event_listeners()


def test_every_program_that_changes_the_state_donates_it(params):
    from rstar_jax.rollout import decode
    from rstar_jax.rollout.device import Content, Device
    from rstar_jax.rollout.scheduler import Place, Pool

    state = decode.empty_state(MODEL, 8, CAPACITY)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    weights = rollout_params(params, MODEL)
    programs = Device(MODEL, ROLLOUT, [Pool(8, CAPACITY)], STOPS, None)
    targets = programs._targets([Content(Place(0, 1), 3, 5, SampleKey(0, 0, 0, 0), Sampling(), None)], 4)
    four, tokens = np.zeros(4, np.int32), np.zeros((4, 8), np.int32)
    rows = decode.take(state, four, 16)
    lowered = [
        decode.insert.lower(state, rows, four, *targets),
        decode.fork.lower(state, four, *targets, 16),
        decode.rewind.lower(state, *targets[:3]),
        decode.extend.lower(weights, MODEL, state, four, tokens, four, four, 32),
        decode.decode_chunk.lower(weights, MODEL, state, np.zeros(8, np.int32), 4, STOPS, 0, 32),
        decode.decode_chunk.lower(weights, MODEL, state, np.zeros(8, np.int32), 4, STOPS, 0, 32, 2, np.arange(4)),
    ]
    for program in lowered:
        assert program.compile().memory_analysis().alias_size_in_bytes >= 0.99 * size


def test_what_slots_do_is_recorded_when_asked_for(params, device):
    engine = make(params, device, slots=4)
    engine.timeline = []
    asyncio.run(everyone(engine, delay=0.002))
    spans = engine.timeline
    assert {span.what for span in spans} == {"sample", "tool", "idle"}
    by_slot = {}
    for span in spans:
        assert span.stop >= span.start
        by_slot.setdefault((span.pool, span.index), []).append(span)
    assert set(by_slot) == {(0, i) for i in range(4)}
    for found in by_slot.values():
        found.sort(key=lambda span: span.start)
        assert all(a.stop <= b.start + 1e-9 for a, b in itertools.pairwise(found))  # a slot does one thing at a time
    assert {(span.prompt, span.sample) for span in spans} == {(i, j) for i in range(4) for j in range(6)}


def test_what_was_cancelled_does_not_go_on_in_the_next_session(params, device):
    engine = SlotEngine(MODEL, dataclasses.replace(ROLLOUT, slots=4, shared_prefix=0), capacity=CAPACITY, stop_ids=(), device=device)
    engine.load(rollout_params(params, MODEL), version=0)

    async def cancelled():
        async with engine:
            slots = [await engine.open(prompts()[0], SampleKey(0, 0, 0, j), Sampling()) for j in range(3)]
            tasks = [asyncio.create_task(slot.generate(100)) for slot in slots]
            while engine.counters.device_steps < 8:
                await asyncio.sleep(0.001)
            for task in tasks:
                task.cancel()

    async def short():
        async with engine:
            slot = await engine.open(prompts()[1], SampleKey(0, 0, 1, 0), Sampling())
            got = await slot.generate(4)
            slot.close()
            return got

    asyncio.run(cancelled())
    before = engine.counters.device_steps
    assert len(asyncio.run(short()).ids) == 4
    assert engine.counters.device_steps - before <= 4 + ROLLOUT.chunk
    assert engine.scheduler.free_slots == 4
