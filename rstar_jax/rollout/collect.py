"""Groups of rollouts: every trajectory is its own coroutine, scored as soon as it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rstar_jax.rollout.agent import Agent
from rstar_jax.types import Finish, Group, Problem, Reward, SampleKey, Sampling, Trajectory, Verdict


async def collect(
    problems: Sequence[Problem],
    indices: Sequence[int],
    *,
    agent: Agent,
    reward: Reward,
    samples: int,
    seed: int,
    step: int,
    sampling: Sampling,
    on_done: Callable[[Trajectory, Verdict], None] | None = None,
) -> list[Group]:
    """`samples` scored rollouts of each problem, grouped by position (two equal problems stay two groups).

    Rollout j of problem i draws from (seed, step, indices[i], j). An exception in any trajectory cancels the rest and surfaces.
    """
    results: dict[tuple[int, int], tuple[Trajectory, Verdict]] = {}

    async def one(i: int, j: int) -> None:
        trajectory = await agent.run(problems[i], SampleKey(seed, step, indices[i], j), sampling)
        if trajectory.finish is Finish.FAILED:
            verdict = Verdict(None, "infrastructure failed")
        else:
            verdict = await reward(problems[i], trajectory)
        results[i, j] = (trajectory, verdict)
        if on_done is not None:
            on_done(trajectory, verdict)

    try:
        async with asyncio.TaskGroup() as tasks:
            for i in range(len(problems)):
                for j in range(samples):
                    tasks.create_task(one(i, j))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    return [Group(problem, *zip(*(results[i, j] for j in range(samples)), strict=True)) for i, problem in enumerate(problems)]
