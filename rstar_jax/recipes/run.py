"""Everything that a run holds open: its directory, model, engine, tool, verifier, metrics and checkpoints."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from rstar_jax.config import TIERS, ModelConfig, RunConfig, StageConfig, ToolConfig, differences
from rstar_jax.data import dialogues, synthetic
from rstar_jax.data.readers import read_problems
from rstar_jax.data.sources import evaluation_problems
from rstar_jax.model.sharding import check_divisible, make_mesh
from rstar_jax.recipes import pretrained
from rstar_jax.recipes.progress import Progress
from rstar_jax.rewards.math_answer import MathReward
from rstar_jax.rewards.verifier import Verifier
from rstar_jax.rollout.agent import Agent, Budget
from rstar_jax.rollout.engine import SlotEngine
from rstar_jax.rollout.weights import rollout_params
from rstar_jax.storage.checkpoint import Checkpoints, Position
from rstar_jax.storage.metrics import MetricsWriter, write_atomically
from rstar_jax.text.chat import ChatFormat, chat_format
from rstar_jax.text.tokenizer import FastTokenizer, load_tokenizer, train_tokenizer
from rstar_jax.tools.base import Runner
from rstar_jax.tools.pool import ToolPool
from rstar_jax.tools.python_tool import NAME, SCHEMA, PythonTool, SessionPythonTool
from rstar_jax.tools.remote import RemotePool
from rstar_jax.tools.wire import read_token
from rstar_jax.training.state import TrainState
from rstar_jax.types import Reward, Tool, UserError

Result = TypeVar("Result")

PRETRAINED = "pretrained_config.json"  # in a run's directory: config.json of the checkpoint that it started from
TOKENIZER_TEXTS = 2048  # demonstrations that a toy tokenizer is trained on


@dataclasses.dataclass
class Run:
    """One open run. Device work goes through `on_device`: one thread calls jax."""

    config: RunConfig
    workdir: pathlib.Path
    mesh: Mesh
    chat: ChatFormat
    tokenizer: FastTokenizer
    tools: Mapping[str, Tool]
    reward: Reward
    engine: SlotEngine
    device: concurrent.futures.Executor
    metrics: MetricsWriter
    checkpoints: Checkpoints
    progress: Progress
    position: Position = Position()

    async def on_device(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run `function` on the device thread."""
        return await asyncio.get_running_loop().run_in_executor(self.device, function, *args)

    async def load_engine(self, params: Any) -> None:
        """Weights flow one way: trained parameters to the engine's copy, whose version is the number of steps so far."""

        def load() -> None:
            weights = rollout_params(params, self.config.model, self.mesh, self.config.rollout.weight_layout)
            self.engine.load(weights, self.position.global_step)

        await self.on_device(load)

    def agent(self, stage: StageConfig, *, use_tools: bool = True) -> Agent:
        """The agent of a stage; without tools a call ends the trajectory unanswered."""
        budget = Budget(
            max_prompt_tokens=self.config.rollout.max_prompt_tokens,
            max_response_tokens=stage.max_response_tokens,
            max_turns=stage.max_turns if use_tools else 1,
            max_tool_output_tokens=stage.max_tool_output_tokens,
            max_parallel_calls=stage.max_parallel_calls,
        )
        return Agent(self.engine, self.tools, self.chat, self.tokenizer, budget, self.config.rollout.call_deadline_s)

    async def warm_up_engine(self, agent: Agent) -> None:
        """Compile what the agent's rollouts need, the prefix of its prompts included."""
        self.engine.share(agent.shared_prefix())
        await self.on_device(self.engine.warm_up)

    def advance(self, stage: int, stage_step: int, consumed: int) -> None:
        """Move the position to the end of the step that was just taken."""
        self.position = Position(stage, stage_step, self.position.global_step + 1, consumed)

    def log(self, kind: str, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """One metrics row at the current position."""
        p = self.position
        name = self.config.stages[p.stage].name
        tool = self.tools.get(NAME)
        if isinstance(tool, PythonTool):  # beside the clocks: another machine may have another
            timing = {**timing, "tool/isolation_tier": float(TIERS.index(tool.isolation.tier))}
        self.metrics.write(name, p.stage, p.stage_step, p.global_step, kind, metrics, timing)

    async def save(self, state: TrainState) -> None:
        """A checkpoint at the current position. Rows of this position must have been written before."""
        position = self.position
        await self.on_device(lambda: self.checkpoints.save(position, state.params, (state.optimizer, state.updates), state.reference))

    def save_due(self, stage: StageConfig) -> bool:
        """Whether this step ends with a checkpoint (a stage's last one is saved after its evaluation)."""
        step = self.position.stage_step
        return step < stage.steps and step % self.config.training.save_every == 0


def demonstrations(config: RunConfig) -> list[synthetic.Demonstration]:
    """The run's demonstrations: a function of its configuration."""
    data = config.data
    seed = config.seed + data.seed
    return [synthetic.demonstration(seed, i, data.no_tool, data.broken_call) for i in range(data.demonstrations)]


def make_tokenizer(config: RunConfig, chat: ChatFormat, workdir: pathlib.Path | None) -> FastTokenizer:
    """The run's tokenizer: the one kept in its directory, a directory named by the configuration, or a freshly trained toy."""
    if workdir is not None and (workdir / "tokenizer" / "tokenizer.json").is_file():
        return load_tokenizer(workdir / "tokenizer")
    if config.text.tokenizer != "toy":
        return pretrained.open_tokenizer(config.text.tokenizer)
    small = dataclasses.replace(config, data=dataclasses.replace(config.data, demonstrations=TOKENIZER_TEXTS))
    return train_tokenizer(dialogues.training_texts(demonstrations(small), chat, NAME), config.model.vocab_size)


def check_workdir(config: RunConfig, workdir: pathlib.Path) -> None:
    """Raises `UserError` unless `workdir` is new, empty, or holds a run of this configuration. Changes nothing."""
    file = workdir / "config.json"
    if file.is_file():
        identity = _saved_config(file).get("identity")
        if not isinstance(identity, dict):
            raise UserError(f"{file} is not the configuration of a run; use another --workdir")
        changed = differences(identity, config.identity())
        if changed:
            raise UserError(f"{workdir} holds a run of another configuration ({'; '.join(changed)}); use another --workdir")
    elif workdir.is_dir() and any(not path.name.startswith(".config.json.") for path in workdir.iterdir()):  # one cut short
        raise UserError(f"{workdir} is not empty and holds no run; use an empty or a new directory as --workdir")


def check_problems(config: RunConfig, chat: ChatFormat, tokenizer: FastTokenizer) -> None:
    """Raises `UserError` when the training file cannot be used or a prompt is over the budget: now, not hours into the run.
    Generated training problems have no end; the held-out ones, of the same families, stand for them."""
    problems = evaluation_problems(config.data, config.evaluation.problems)
    if config.data.source != "arithmetic":
        problems = problems + read_problems(config.data.source).problems
    lengths = [len(tokenizer.encode(chat.prompt(problem.question, tool_schemas(chat)))) for problem in problems]
    limit = config.rollout.max_prompt_tokens
    over = sum(length > limit for length in lengths)
    if over:
        raise UserError(
            f"{over} of {len(lengths)} prompts are longer than rollout.max_prompt_tokens={limit} (the longest has {max(lengths)} "
            "tokens); raise it, or leave long problems out of data.source"
        )


def write_config(config: RunConfig, workdir: pathlib.Path) -> None:
    """Create the directory with the run's configuration. Raises `UserError` when it cannot be written."""
    file = workdir / "config.json"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        content = {**config.to_dict(), "identity": config.identity()}
        write_atomically(file, [json.dumps(content, indent=1).encode()])
    except OSError as error:
        raise UserError(f"--workdir={workdir} cannot be written: {error.strerror}") from error


def read_config(workdir: pathlib.Path) -> RunConfig:
    """The configuration of the run in `workdir`."""
    file = workdir / "config.json"
    if not file.is_file():
        raise UserError(f"{workdir} holds no run (config.json is missing); give the --workdir of launch.train")
    try:
        return RunConfig.from_dict(_saved_config(file))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not the configuration of a run ({error!r})") from None


def _saved_config(file: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as the configuration of a run ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} is not the configuration of a run: it holds no object")
    return content


@contextlib.asynccontextmanager
async def open_tools(config: RunConfig, progress: Progress) -> AsyncIterator[tuple[Mapping[str, Tool], Reward]]:
    """The Python tool and the outcome reward, with the processes behind them."""
    async with open_pool(config.tool) as pool, Verifier() as verifier:
        progress.say(f"python {pool.isolation}")
        kind = SessionPythonTool if config.tool.sessions else PythonTool
        chat = chat_format(config.text)
        tool = kind(pool, style=chat.tool_style)
        yield {NAME: tool}, MathReward(verifier, chat.answer_tags)


@contextlib.asynccontextmanager
async def open_pool(config: ToolConfig) -> AsyncIterator[Runner]:
    """Python processes on this machine, or those of `config.servers`. Raises `UserError` when they cannot have the isolation that
    `config.require` asks for."""
    if not config.servers:
        async with ToolPool(config) as local:
            yield local
        return
    async with RemotePool(config.servers, read_token(pathlib.Path(config.token_file)), retries=config.retries) as remote:
        tier = remote.isolation.tier
        if config.require and TIERS.index(tier) > TIERS.index(config.require):
            raise UserError(f"the tool servers run calls in tier {tier}, which is weaker than tool.require={config.require}")
        yield remote


@contextlib.asynccontextmanager
async def open_run(config: RunConfig, workdir: pathlib.Path, progress: Progress) -> AsyncIterator[Run]:
    """Open everything; on the way out, every process, thread and file is closed again."""
    mesh = make_mesh(config.mesh)
    check_divisible(config.model, mesh, config.training.buckets)
    chat = chat_format(config.text)
    check_workdir(config, workdir)
    tokenizer = make_tokenizer(config, chat, workdir)
    check_vocabulary(config.model, tokenizer)
    check_problems(config, chat, tokenizer)
    async with contextlib.AsyncExitStack() as stack:
        device = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1, "device"))
        engine = SlotEngine(
            config.model, config.rollout, capacity=config.capacity, stop_ids=tokenizer.stop_ids, device=device, mesh=mesh
        )
        write_config(config, workdir)  # all that can be refused has been: from here on the directory holds a run
        if config.checkpoint and not (workdir / PRETRAINED).is_file():
            content = dict(pretrained.open_checkpoint(config.checkpoint).content)
            write_atomically(workdir / PRETRAINED, [json.dumps(content, indent=1).encode()])
        tokenizer.save(workdir / "tokenizer")
        checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints", config.training.keep_checkpoints))
        position = checkpoints.latest() or Position()
        metrics = stack.enter_context(MetricsWriter(workdir, resume_after=position.global_step if position.global_step else None))
        tools, reward = await stack.enter_async_context(open_tools(config, progress))
        yield Run(config, workdir, mesh, chat, tokenizer, tools, reward, engine, device, metrics, checkpoints, progress, position)


def check_vocabulary(model: ModelConfig, tokenizer: FastTokenizer) -> None:
    """Raises `UserError` when the tokenizer has ids that the model has no embedding for."""
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(f"the tokenizer has {tokenizer.vocab_size} ids, more than model.vocab_size={model.vocab_size}")


def tool_schemas(chat: ChatFormat) -> Sequence[Mapping[str, Any]]:
    """The schemas that demonstrations announce: those of the run's tools."""
    return (SCHEMA,)


class Stopwatch:
    """Wall-clock seconds by phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Any:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[f"{phase}_seconds"] += time.perf_counter() - start


def configure_jax() -> None:
    """Process-wide settings of jax: the persistent compilation cache, unless the environment has one already."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "rstar_jax" / "jax"
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
