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
    over_sample: int = 0,
    on_done: Callable[[Trajectory, Verdict], None] | None = None,
) -> list[Group]:
    """`samples` scored rollouts of each problem, grouped by position (two equal problems stay two groups).

    Rollout j of problem i draws from (seed, step, indices[i], j). An exception in any trajectory cancels the rest and surfaces.

    `over_sample` further rollouts of each problem are begun, and those of a problem that have not ended when `samples` of it have
    are cancelled. This shortens a step's tail and prefers short rollouts; which ones end first hangs on timing.
    """
    results: list[dict[int, tuple[Trajectory, Verdict]]] = [{} for _ in problems]
    running: list[dict[int, asyncio.Task[None]]] = [{} for _ in problems]

    async def one(i: int, j: int) -> None:
        trajectory = await agent.run(problems[i], SampleKey(seed, step, indices[i], j), sampling)
        if trajectory.finish is Finish.FAILED:
            verdict = Verdict(None, "infrastructure failed")
        else:
            verdict = await reward(problems[i], trajectory)
        if len(results[i]) == samples:
            return  # it ended together with the last one wanted
        results[i][j] = (trajectory, verdict)
        del running[i][j]
        if len(results[i]) == samples:
            for task in running[i].values():
                task.cancel()
        if on_done is not None:
            on_done(trajectory, verdict)

    try:
        async with asyncio.TaskGroup() as tasks:
            for i in range(len(problems)):
                for j in range(samples + over_sample):
                    running[i][j] = tasks.create_task(one(i, j))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    return [
        Group(problem, *zip(*(done[j] for j in sorted(done)), strict=True)) for problem, done in zip(problems, results, strict=True)
    ]
