"""Two engines as one."""

import asyncio
import concurrent.futures
import dataclasses

import jax
import numpy as np
import pytest
from engines import CAPACITY, MODEL, ROLLOUT, STOPS

from rstar_jax.config import MeshConfig
from rstar_jax.model.sharding import make_mesh
from rstar_jax.rollout.balance import BalancedEngines
from rstar_jax.rollout.engine import SlotEngine
from rstar_jax.rollout.weights import rollout_params
from rstar_jax.types import SampleKey, Sampling, UserError


def make(params, slots, devices):
    engines = []
    for n, device in zip(slots, devices, strict=True):
        mesh = make_mesh(MeshConfig(), [device])
        rollout = dataclasses.replace(ROLLOUT, slots=n, shared_prefix=0)
        thread = concurrent.futures.ThreadPoolExecutor(1)
        engine = SlotEngine(MODEL, rollout, capacity=CAPACITY, stop_ids=STOPS, device=thread, mesh=mesh)
        engine.load(rollout_params(jax.device_put(params, device), MODEL, mesh), version=0)
        engines.append(engine)
    return BalancedEngines(engines)


async def one(engine, i, most=None):
    slot = await engine.open([12 + i % 3, 20, 33], SampleKey(0, 0, i % 3, i), Sampling(1.0))
    try:
        got = await slot.generate(most or 3 + 7 * (i % 5))
        await asyncio.sleep(0.002 * (i % 4))
        return got.ids, got.logps
    finally:
        slot.close()


def everyone(engine, count=40):
    async def run():
        async with engine:
            return await asyncio.gather(*(one(engine, i) for i in range(count)))

    return asyncio.run(run())


def test_rollouts_spread_by_free_cache_and_are_the_same_wherever_they_run(params):
    balanced = make(params, (2, 6), jax.devices()[:2])
    together = everyone(balanced)
    alone = everyone(make(params, (8,), jax.devices()[:1]))
    for (ids, logps), (other, others) in zip(together, alone, strict=True):
        assert ids == other
        np.testing.assert_allclose(logps, others, atol=1e-5)
    shares = [engine.counters.trajectories for engine in balanced.engines]
    assert sum(shares) == 40 and shares[0] >= 2 and shares[1] >= 6  # all slots at once; who is sooner free gets the rest
    for engine in balanced.engines:
        assert engine.scheduler.free_slots == engine.scheduler.pools[0].slots and not engine.expected


def test_cancelled_rollouts_leave_nothing_behind(params):
    balanced = make(params, (1, 1), jax.devices()[:2])

    async def run():
        async with balanced:
            tasks = [asyncio.create_task(one(balanced, i, 30)) for i in range(12)]
            for i, task in enumerate(tasks):
                await asyncio.sleep(0.001)
                if i % 2:
                    task.cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(run())
    cancelled = [isinstance(result, asyncio.CancelledError) for result in results]
    assert sum(cancelled) >= 4 and not any(cancelled[::2])
    assert all(engine.scheduler.free_slots == 1 and not engine.expected for engine in balanced.engines)


def test_a_prompt_that_fits_no_engine_is_refused(params):
    balanced = make(params, (1,), jax.devices()[:1])

    async def run():
        async with balanced:
            await balanced.open([1] * CAPACITY, SampleKey(0, 0, 0, 0), Sampling())

    with pytest.raises(UserError, match="does not fit"):
        asyncio.run(run())
