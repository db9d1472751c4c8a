"""An agent for use, of a run or a pretrained checkpoint: evaluation on a dataset, chat. Reads a run's directory and changes nothing
in it but its results."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import pathlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from rstar_jax.config import ModelConfig, RolloutConfig, RunConfig, StageConfig, TextConfig
from rstar_jax.data.readers import ReadResult
from rstar_jax.model import lora, qwen
from rstar_jax.model.sharding import TRAINING_RULES, make_mesh, shardings
from rstar_jax.recipes import pretrained
from rstar_jax.recipes.evaluate import evaluate, widest_budget
from rstar_jax.recipes.progress import Progress
from rstar_jax.recipes.run import PRETRAINED, make_tokenizer, open_tools, read_config, tool_schemas
from rstar_jax.rollout.agent import Agent, Budget
from rstar_jax.rollout.engine import SlotEngine
from rstar_jax.rollout.weights import rollout_params
from rstar_jax.storage import hf
from rstar_jax.storage.checkpoint import Checkpoints, Position
from rstar_jax.text.chat import ChatFormat, chat_format
from rstar_jax.text.tokenizer import FastTokenizer
from rstar_jax.training.state import param_shardings
from rstar_jax.types import Group, Problem, Reward, Sampling, Tool, UserError

SMALLEST_BUCKET = 64


@dataclasses.dataclass(frozen=True)
class Trained:
    """The newest checkpoint of a run, loaded."""

    config: RunConfig
    position: Position
    params: Any
    chat: ChatFormat
    tokenizer: FastTokenizer

    @property
    def stage(self) -> StageConfig:
        """The stage whose budgets are the run's widest."""
        return widest_budget(self.config.stages)


def load_agent(workdir: str | None, model: str | None, chat: str) -> Trained:
    """The run in `workdir`, or else the pretrained `model` under the chat format of that name."""
    return load_trained(pathlib.Path(workdir)) if workdir else load_pretrained(str(model), chat)


def load_pretrained(name: str, chat: str) -> Trained:
    """A pretrained model as an agent. Weights are held in the dtype that they are used in."""
    dtype = pretrained.default_dtype()
    checkpoint = pretrained.open_checkpoint(name, dtype=dtype, param_dtype=dtype)
    stage = StageConfig("pretrained", "rl", 1, max_turns=8, max_response_tokens=1024, max_tool_output_tokens=512)
    text = TextConfig(tokenizer=name, chat=chat, turn_separator="template" if chat == "chatml" else "rstar2")
    rollout = RolloutConfig(slots=1, extend_buckets=(32, 128, 512))
    config = RunConfig(pathlib.Path(name).stem, (stage,), model=checkpoint.model, text=text, rollout=rollout)
    params = hf.load_params(checkpoint.source, checkpoint.model, make_mesh(config.mesh))
    return Trained(config, Position(), params, chat_format(text), checkpoint.tokenizer)


def export(trained: Trained, workdir: pathlib.Path, output: pathlib.Path, dtype: str) -> None:
    """Write weights, configuration and tokenizer of a run as a Hugging Face checkpoint (see `hf.save_params`)."""
    source = workdir / PRETRAINED
    base = hf.read_json(source) if source.is_file() else {"max_position_embeddings": trained.config.model.max_positions}
    stops = list(trained.tokenizer.stop_ids)
    base |= {"eos_token_id": stops[0] if len(stops) == 1 else stops, "pad_token_id": trained.tokenizer.pad_id}
    hf.save_params(trained.params, trained.config.model, output, dtype=dtype, base=base)
    trained.tokenizer.save(output)


def load_trained(workdir: pathlib.Path) -> Trained:
    """Raises `UserError` when there is no run, or no checkpoint yet."""
    config = read_config(workdir)
    directory = workdir / "checkpoints"
    if not directory.is_dir():
        raise UserError(f"{workdir} has no checkpoint yet; train it first")
    with Checkpoints(directory, config.training.keep_checkpoints, read_only=True) as checkpoints:
        position = checkpoints.latest()
        if position is None:
            raise UserError(f"{workdir} has no complete checkpoint yet; train it for longer")
        params = checkpoints.restore(position, "params", _abstract(config.model))
    if config.model.lora_rank:
        mesh = make_mesh(config.mesh)
        adapters = jax.device_put(params, shardings(lora.axes(config.model), mesh, TRAINING_RULES))
        params = lora.merge(lora.attach(_frozen(config, mesh), adapters), config.model)
    chat = chat_format(config.text)
    return Trained(config, position, params, chat, make_tokenizer(config, chat, workdir))


def _abstract(model: ModelConfig) -> Any:
    """Shapes of what a run's checkpoints hold: all parameters, or adapters alone."""
    if not model.lora_rank:
        return qwen.abstract_params(model)
    return jax.eval_shape(lambda: lora.init(model, jax.random.key(0)))


def _frozen(config: RunConfig, mesh: Mesh) -> qwen.Params:
    """The weights that a run's adapters belong to: those that it started from."""
    if config.checkpoint:
        source = pretrained.open_checkpoint(config.checkpoint).source
        return hf.load_params(source, config.model, mesh)
    make = jax.jit(qwen.init, static_argnums=0, out_shardings=param_shardings(config.model, mesh))
    return make(config.model, jax.random.key(config.seed))


@contextlib.asynccontextmanager
async def open_agent(
    trained: Trained, budget: Budget, *, slots: int, longest_prompt: int, use_tools: bool, progress: Progress, candidates: int = 0
) -> AsyncIterator[tuple[Agent, Reward]]:
    """A running agent with slots for prompts of up to `longest_prompt` tokens (and up to the next bucket's end) and the budget's
    responses. `candidates`: see `RolloutConfig`."""
    config = trained.config
    buckets = [SMALLEST_BUCKET]
    while buckets[-1] < longest_prompt:
        buckets.append(buckets[-1] * 2)
    rollout = dataclasses.replace(
        config.rollout, slots=slots, prompt_buckets=tuple(buckets), max_prompt_tokens=longest_prompt, prefill_rows=min(4, slots),
        pool_lengths=(), pool_slots=(), candidates=candidates,
    )  # fmt: skip
    mesh = make_mesh(config.mesh)
    with concurrent.futures.ThreadPoolExecutor(1, "device") as device:
        async with open_tools(config, progress) as (tools, reward):
            shown: Mapping[str, Tool] = tools if use_tools else {}
            capacity = buckets[-1] + budget.max_response_tokens  # prompts of another length compile nothing new
            engine = SlotEngine(config.model, rollout, capacity=capacity, stop_ids=trained.tokenizer.stop_ids, device=device, mesh=mesh)
            version = trained.position.global_step
            device.submit(
                lambda: engine.load(rollout_params(trained.params, config.model, mesh, rollout.weight_layout), version)
            ).result()
            agent = Agent(engine, shown, trained.chat, trained.tokenizer, budget, rollout.call_deadline_s)
            engine.share(agent.shared_prefix())
            async with engine:
                yield agent, reward


@dataclasses.dataclass(frozen=True)
class DatasetEvaluation:
    """Groups of the problems that were tried, and how many were left out because their prompts were too long."""

    groups: list[Group]
    too_long: int


async def evaluate_dataset(
    trained: Trained,
    rows: ReadResult,
    *,
    samples: int,
    sampling: Sampling,
    candidates: int = 0,
    max_turns: int,
    max_response_tokens: int,
    max_prompt_tokens: int | None,
    use_tools: bool,
    slots: int,
    seed: int,
    progress: Progress,
) -> DatasetEvaluation:
    """Evaluate on the problems that were read. Slots are sized for the longest prompt; `max_prompt_tokens` leaves longer ones
    out, and counts them. Without tools an agent has one turn. `candidates`: see `RolloutConfig`.
    Raises `UserError` when no problem is left."""
    stage = trained.stage
    lengths = [len(prompt_ids(trained, problem, use_tools=use_tools)) for problem in rows.problems]
    limit = max_prompt_tokens or max(lengths)
    problems = [problem for problem, length in zip(rows.problems, lengths, strict=True) if length <= limit]
    if not problems:
        raise UserError(f"every prompt is longer than --max_prompt_tokens={limit} (the shortest has {min(lengths)} tokens)")
    longest = max(length for length in lengths if length <= limit)
    turns = max_turns if use_tools else 1
    budget = Budget(longest, max_response_tokens, turns, stage.max_tool_output_tokens, stage.max_parallel_calls)
    slots = min(slots, len(problems) * samples)
    progress.start("evaluate", len(problems) * samples)
    right = done = 0

    async with open_agent(
        trained, budget, slots=slots, longest_prompt=longest, use_tools=use_tools, progress=progress, candidates=candidates
    ) as (
        agent,
        reward,
    ):

        def on_done(trajectory: object, verdict: Any) -> None:
            nonlocal right, done
            right, done = right + (verdict.value == 1), done + 1
            progress.step({"accuracy": right / done})

        groups = await evaluate(agent, problems, reward, samples=samples, sampling=sampling, seed=seed, on_done=on_done)
    progress.stop()
    return DatasetEvaluation(groups, len(rows.problems) - len(problems))


def prompt_ids(trained: Trained, problem: Problem, *, use_tools: bool) -> list[int]:
    """Ids of a problem's prompt in the run's chat format, which may announce the tools: what the agent will open its slot with."""
    schemas = tool_schemas(trained.chat) if use_tools else ()
    return trained.tokenizer.encode(trained.chat.prompt(problem.question, schemas))
