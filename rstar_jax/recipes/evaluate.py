"""Evaluation: sampled and greedy rollouts of held-out problems, with the tool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rstar_jax.algorithms.evaluation import summarize
from rstar_jax.config import StageConfig
from rstar_jax.data.sources import evaluation_problems
from rstar_jax.recipes.run import Run, Stopwatch
from rstar_jax.rollout.agent import Agent
from rstar_jax.rollout.collect import collect
from rstar_jax.storage.trajectories import trajectory_record, write_trajectories
from rstar_jax.training.state import TrainState
from rstar_jax.types import Group, Problem, Reward, Sampling, Trajectory, Verdict

EVALUATION_STEP = 2**31 - 1
"""The step that evaluation draws from: the same random numbers at every evaluation of a run, none that training uses."""

RECORDED_PROBLEMS = 8


async def evaluate(
    agent: Agent,
    problems: Sequence[Problem],
    reward: Reward,
    *,
    samples: int,
    sampling: Sampling,
    seed: int,
    on_done: Callable[[Trajectory, Verdict], None] | None = None,
) -> list[Group]:
    """`samples` scored rollouts of each problem. The engine runs and holds the weights."""
    return await collect(
        problems,
        list(range(len(problems))),
        agent=agent,
        reward=reward,
        samples=samples,
        seed=seed,
        step=EVALUATION_STEP,
        sampling=sampling,
        on_done=on_done,
    )


def widest_budget(stages: Sequence[StageConfig]) -> StageConfig:
    """The stage with the largest rollout budget: what evaluation allows, at every point of a run alike."""
    return max(stages, key=lambda stage: (stage.kind == "rl", stage.max_response_tokens, stage.max_turns))


async def evaluate_run(run: Run, state: TrainState) -> dict[str, float]:
    """Evaluate at the run's position on held-out problems: a metrics row, and a few rollouts on disk.

    Keys are `sampled/...` (at `evaluation.temperature`) and, if asked for, `greedy/...`, as `algorithms.evaluation.summarize`
    names them.
    """
    settings = run.config.evaluation
    stage = run.config.stages[run.position.stage]
    problems = evaluation_problems(run.config.data, settings.problems)
    agent = run.agent(widest_budget(run.config.stages))
    modes = [("sampled", settings.samples, settings.temperature)] + ([("greedy", 1, 0.0)] if settings.greedy else [])
    watch = Stopwatch()
    metrics: dict[str, float] = {}
    with watch("evaluation"):
        await run.load_engine(state.weights)
        await run.warm_up_engine(agent)
        async with run.engine:
            for name, samples, temperature in modes:
                groups = await evaluate(
                    agent, problems, run.reward, samples=samples, sampling=Sampling(temperature), seed=run.config.seed
                )
                metrics |= {f"{name}/{key}": value for key, value in summarize(groups).items()}
                if name == "sampled":
                    _record(run, f"{stage.name}-evaluation", groups)
    run.log("evaluation", metrics, watch.seconds)
    shown = " ".join(
        f"{name} accuracy {metrics[f'{name}/accuracy']:.3f} [{metrics[f'{name}/accuracy_low']:.3f}, "
        f"{metrics[f'{name}/accuracy_high']:.3f}], tool errors in {metrics[f'{name}/tool_error_share']:.3f} of correct;"
        for name, _, _ in modes
    )
    run.progress.say(f"after {stage.name} step {run.position.stage_step}: {shown}")
    return metrics


def _record(run: Run, name: str, groups: Sequence[Group]) -> None:
    records = [
        trajectory_record(
            trajectory,
            verdict,
            tokenizer=run.tokenizer,
            stage=name,
            step=run.position.stage_step,
            selected=False,
            advantage=None,
            penalties=None,
        )
        for group in groups[:RECORDED_PROBLEMS]
        for trajectory, verdict in zip(group.trajectories, group.verdicts, strict=True)
    ]
    write_trajectories(run.workdir, name, run.position.stage_step, records)
