"""Reinforcement learning on groups of rollouts: GRPO with RoC on outcomes (rStar2-Agent, section 2.2), and, with expert steps
as problems and similarity as the reward, SRL (SRL, section 4).

    for each step: sync -> collect -> filter (-> refill) -> resample -> advantages -> batch -> update -> log -> save
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from rstar_jax.algorithms import evaluation, roc
from rstar_jax.algorithms.advantages import group_advantages
from rstar_jax.algorithms.filters import apply_filters, uniform_reward
from rstar_jax.algorithms.srl import keep_group
from rstar_jax.config import RunConfig, StageConfig
from rstar_jax.data import dialogues, synthetic
from rstar_jax.data.sources import problem_source
from rstar_jax.recipes.evaluate import evaluate_run
from rstar_jax.recipes.run import Run, Stopwatch, tool_schemas
from rstar_jax.rewards.similarity import step_reward
from rstar_jax.rollout.collect import collect
from rstar_jax.rollout.device import Counters
from rstar_jax.storage.timeline import write_timeline
from rstar_jax.storage.trajectories import trajectory_record, write_trajectories
from rstar_jax.text.chat import ChatFormat
from rstar_jax.tools.python_tool import NAME
from rstar_jax.training.batching import Row, microbatch_shapes, microbatches, trajectory_row
from rstar_jax.training.optimizer import learning_rate
from rstar_jax.training.state import TrainState
from rstar_jax.training.update import Update
from rstar_jax.types import Finish, Group, Problem, PromptSource, Reward, Sampling, SlotSpan, Trajectory, Verdict

RECORDED_GROUPS = 4  # groups of a step that are written to disk, readable
RECORD_EVERY = 10  # steps


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A group with what selection made of it: kept indices (rollout order), advantages aligned with them, penalties of all."""

    group: Group
    kept: np.ndarray
    advantages: np.ndarray
    penalties: tuple[tuple[float, float], ...]


def choose(group: Group, stage: StageConfig, rng: np.random.Generator, chat: ChatFormat) -> Chosen:
    """Select `keep` of a group's rollouts, and only then compute advantages, over what was kept (rStar2-Agent, Eq. 7).

    Rollouts with an unknown verdict leave first: they are neither selected nor counted.
    """
    rewards = group.rewards()
    penalties = tuple(
        roc.penalties(t.calls, sum(chat.count_answers(turn.text) for turn in t.turns), len(t.turns)) for t in group.trajectories
    )
    known = np.flatnonzero(~np.isnan(rewards))
    total = np.asarray([sum(p) for p in penalties])
    picked = roc.resample_on_correct(rewards[known], total[known], stage.keep, rng, stage.selection)
    kept = known[picked]
    return Chosen(group, kept, group_advantages(rewards[kept], normalize_std=stage.normalize_std), penalties)


class StepSimilarity:
    """SRL's reward: similarity of the sampled action to the expert's, -1 for a broken format (SRL, section 4.2)."""

    def __init__(self, run: Run, stage: StageConfig):
        self._run, self._stage = run, stage

    async def __call__(self, problem: Problem, trajectory: Trajectory) -> Verdict:
        turn = trajectory.turns[-1]
        return step_reward(
            self._run.chat.forced_opening + turn.text.removesuffix(self._run.chat.end_of_turn),
            problem.expert,
            unit=self._stage.similarity_unit,
            encode=lambda text: self._run.tokenizer.encode([text]),
            think_tags=self._run.chat.reasoning_tags,
            truncated=turn.finish is Finish.LENGTH,
        )


def expert_steps(config: RunConfig, run: Run, stage: StageConfig) -> list[Problem]:
    """SRL's instances: every target step of every expert solution."""
    experts = (synthetic.expert(config.seed + config.data.seed, i) for i in range(config.data.experts))
    schemas = tool_schemas(run.chat)
    return [p for e in experts for p in dialogues.step_problems(e, run.chat, schemas, NAME, stage.target_steps)]


@dataclasses.dataclass(frozen=True)
class Collected:
    """A step's rollouts: all groups, the live ones among them, the data position behind them, how many each filter dropped, what the
    engine counted, and what its slots did (None: not recorded)."""

    groups: list[Group]
    live: list[Group]
    consumed: int
    dropped: dict[str, int]
    counted: Counters
    spans: list[SlotSpan] | None
    seconds: float


async def collect_step(
    run: Run, stage: StageConfig, source: PromptSource, reward: Reward, step: int, consumed: int, *, use_tools: bool, timeline: bool
) -> Collected:
    """The rollouts of global step `step` from data position `consumed`, with the weights that the engine holds."""
    watch = Stopwatch()
    before = dataclasses.replace(run.engine.counters)
    run.engine.timeline = [] if timeline else None
    with watch("rollout"):
        async with run.engine:
            groups, live, consumed, dropped = await gather(run, stage, source, reward, step, consumed, use_tools=use_tools)
    spans, run.engine.timeline = run.engine.timeline, None
    after = run.engine.counters
    names = [field.name for field in dataclasses.fields(after)]
    counted = Counters(**{name: getattr(after, name) - getattr(before, name) for name in names})
    return Collected(groups, live, consumed, dropped, counted, spans, watch.seconds["rollout_seconds"])


async def gather(
    run: Run, stage: StageConfig, source: PromptSource, reward: Reward, step: int, consumed: int, *, use_tools: bool
) -> tuple[list[Group], list[Group], int, dict[str, int]]:
    """All groups of a step, the live ones among them, the new data position, and how many were dropped by each filter.

    `refill=none` takes the groups as they come; `bounded` samples further prompts until `prompts_per_step` groups are live or
    `refill_rounds` rounds were taken, whichever is first.
    """
    agent = run.agent(stage, use_tools=use_tools)
    sampling = Sampling(stage.temperature)
    if stage.kind == "srl":
        filters = {"low_std": lambda group: not keep_group(group.rewards(), stage.filter_std)}
    else:
        filters = {"uniform_reward": uniform_reward}
    everything: list[Group] = []
    live: list[Group] = []
    dropped = dict.fromkeys(filters, 0)
    for _ in range(1 if stage.refill == "none" else stage.refill_rounds):
        wanted = stage.prompts_per_step if stage.refill == "none" else stage.prompts_per_step - len(live)
        indices = list(range(consumed, consumed + wanted))
        consumed += wanted
        groups = await collect(
            [source[i] for i in indices],
            indices,
            agent=agent,
            reward=reward,
            samples=stage.group,
            seed=run.config.seed,
            step=step,
            sampling=sampling,
            over_sample=stage.over_sample,
        )
        kept, counts = apply_filters(groups, filters)
        everything += groups
        live += kept
        dropped = {name: dropped[name] + counts[name] for name in dropped}
        if len(live) >= stage.prompts_per_step:
            break
    return everything, live, consumed, dropped


def update_rows(chosen: Sequence[Chosen], updates: int) -> list[list[Row]]:
    """The rows of each update of a step: groups are dealt out whole, in order; an update without groups falls away."""
    parts = [
        [trajectory_row(c.group.trajectories[i], a) for c in part for i, a in zip(c.kept, c.advantages, strict=True)]
        for part in (chosen[k::updates] for k in range(updates))
    ]
    return [part for part in parts if part]


async def rl_stage(run: Run, stage: StageConfig, update: Update, state: TrainState) -> TrainState:
    """Train from the run's position to the end of the stage; `stage.kind` is `rl` or `srl`.

    With `stage.staleness=1` a step's rollouts are sampled while the step before it is trained on, with the weights from before that
    update. Not so where a checkpoint or an evaluation stands between the two: the step behind it is on-policy, and therefore a
    resumed run is the same run.
    """
    config, training, index = run.config, run.config.training, run.position.stage
    srl = stage.kind == "srl"
    instances = expert_steps(config, run, stage) if srl else None
    source = problem_source(config.data, config.seed, instances)
    reward: Reward = StepSimilarity(run, stage) if srl else run.reward
    rate = learning_rate(stage, training)
    nominal_rows = -(-stage.prompts_per_step // stage.updates_per_rollout) * stage.keep

    await run.load_engine(state.weights)
    await run.warm_up_engine(run.agent(stage, use_tools=not srl))
    trainer_old = training.old_logprobs == "trainer"
    shapes = microbatch_shapes(training.buckets, training.microbatch_tokens, nominal_rows, update.shards, training.packing)
    await run.on_device(update.warm_up, state, shapes, trainer_old)
    run.progress.start(stage.name, stage.steps, run.position.stage_step)

    def rollouts(step: int, consumed: int) -> Coroutine[Any, Any, Collected]:
        global_step, recorded = run.position.global_step + step - run.position.stage_step, _recorded(stage, step)
        return collect_step(run, stage, source, reward, global_step, consumed, use_tools=not srl, timeline=recorded)

    ahead: asyncio.Task[Collected] | None = None
    try:
        for step in range(run.position.stage_step, stage.steps):
            watch = Stopwatch()
            with watch("sync"):
                if ahead is None:
                    await run.load_engine(state.weights)
            with watch("wait"):  # on-policy, for the whole rollout
                collected = await (rollouts(step, run.position.consumed) if ahead is None else ahead)
            ahead = None
            if stage.staleness and step + 1 < stage.steps and not _stands_between(config, stage, step):
                with watch("sync"):
                    await run.load_engine(state.weights)
                ahead = asyncio.create_task(rollouts(step + 1, collected.consumed))
            groups, live, consumed, dropped = collected.groups, collected.live, collected.consumed, collected.dropped
            chosen = [
                choose(group, stage, _roc_rng(config.seed, run.position.global_step, i), run.chat) for i, group in enumerate(live)
            ]
            with watch("update"):
                rows = update_rows(chosen, stage.updates_per_rollout)
                batches = [
                    microbatches(
                        part,
                        buckets=training.buckets,
                        microbatch_tokens=training.microbatch_tokens,
                        nominal_rows=nominal_rows,
                        shards=update.shards,
                        pad_id=run.tokenizer.pad_id,
                        routed=config.model.routed,
                        packing=training.packing,
                    )
                    for part in rows
                ]
                state, means = await run.on_device(update.steps, state, batches, trainer_old)
            updates = int(state.updates)
            run.advance(index, step + 1, consumed)
            metrics = (
                step_metrics(groups, live, dropped, stage) | means | {"learning_rate": float(rate(step * stage.updates_per_rollout))}
            )
            metrics |= (
                {"updates": float(updates)} | _engine_metrics(collected.counted) | staleness(groups, run.position.global_step - 1)
            )
            if not live:
                reasons = ", ".join(f"{count} {name}" for name, count in dropped.items())
                run.progress.say(f"{stage.name} step {step + 1}: none of {len(groups)} groups has contrast ({reasons}); no update")
            timing = {**watch.seconds, "rollout_seconds": collected.seconds, **_timing(collected)}
            run.log("train", metrics, timing)
            if _recorded(stage, step):
                record(run, stage, step + 1, groups, chosen)
                write_timeline(run.workdir, stage.name, step + 1, collected.spans or [])
            run.progress.step({"reward": metrics["reward"], "tool_errors": metrics["tool_error_share"]})
            if _evaluation_due(config, stage, step):
                await evaluate_run(run, state)
            if run.save_due(stage):
                await run.save(state)
    finally:
        if ahead is not None:  # something above has failed
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)
    run.progress.stop()
    return state


def _roc_rng(seed: int, global_step: int, group: int) -> np.random.Generator:
    return np.random.default_rng([seed, global_step, group, 7])


def step_metrics(groups: Sequence[Group], live: Sequence[Group], dropped: Mapping[str, int], stage: StageConfig) -> dict[str, float]:
    """What a step's rollouts looked like, over all that were sampled (before selection)."""
    summary = evaluation.summarize(groups)
    names = ("reward", "accuracy", "response_length", "turns", "tool_calls", "tool_error_rate", "tool_error_share", "unknown")
    metrics = {name: summary[name] for name in names}
    metrics |= {name: value for name, value in summary.items() if name.startswith("finish/")}
    metrics |= {f"dropped/{name}": float(count) for name, count in dropped.items()}
    metrics["groups"] = float(len(groups))
    metrics["live_share"] = len(live) / len(groups)
    if stage.kind == "srl":
        rewards = np.concatenate([group.rewards() for group in groups])
        metrics["format_error_share"] = float(np.mean(rewards == -1))
    return metrics


_DETERMINISTIC = ("sampled_tokens", "extended_tokens", "trajectories", "prefilled_tokens")
"""Counts of the engine that do not hang on when tools answer, as long as no rollout is cancelled."""


def _engine_metrics(counted: Counters) -> dict[str, float]:
    return {f"engine/{name}": float(getattr(counted, name)) for name in (*_DETERMINISTIC, "recomputed_tokens")}


def _timing(collected: Collected) -> dict[str, float]:
    """What hangs on timing: the engine's other counts, and its speed."""
    rest = {k: v for k, v in dataclasses.asdict(collected.counted).items() if k not in _DETERMINISTIC}
    return {f"engine/{k}": float(v) for k, v in rest.items()} | {
        "tokens_per_second": collected.counted.sampled_tokens / collected.seconds
    }


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """How many updates old the weights were that sampled a step's tokens, when the weights to be trained were of `version`."""
    versions = [t.versions[t.trainable] for group in groups for t in group.trajectories]
    age = version - np.concatenate(versions or [np.zeros(0)])
    return {"staleness/mean": float(age.mean()), "staleness/max": float(age.max())} if age.size else {}


def _recorded(stage: StageConfig, step: int) -> bool:
    return step % RECORD_EVERY == 0 or step + 1 == stage.steps


def _evaluation_due(config: RunConfig, stage: StageConfig, step: int) -> bool:
    every = config.evaluation.every
    return bool(every) and step + 1 < stage.steps and (step + 1) % every == 0


def _stands_between(config: RunConfig, stage: StageConfig, step: int) -> bool:
    """Whether a checkpoint or an evaluation stands between this step of the stage and the next."""
    return (step + 1) % config.training.save_every == 0 or _evaluation_due(config, stage, step)


def record(run: Run, stage: StageConfig, step: int, groups: Sequence[Group], chosen: Sequence[Chosen]) -> None:
    """Write a few whole groups of a step, readable, with what selection made of each rollout."""
    by_group = {id(c.group): c for c in chosen}
    records = []
    for group in groups[:RECORDED_GROUPS]:
        c = by_group.get(id(group))
        for j, (trajectory, verdict) in enumerate(zip(group.trajectories, group.verdicts, strict=True)):
            place = np.flatnonzero(c.kept == j) if c is not None else np.zeros(0, int)
            records.append(
                trajectory_record(
                    trajectory,
                    verdict,
                    tokenizer=run.tokenizer,
                    stage=stage.name,
                    step=step,
                    selected=bool(place.size),
                    advantage=float(c.advantages[place[0]]) if c is not None and place.size else None,
                    penalties=c.penalties[j] if c is not None else None,
                )
            )
    write_trajectories(run.workdir, stage.name, step, records)
