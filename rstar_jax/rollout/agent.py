"""One coroutine per trajectory: sample a turn, run its tool call, show the answer, go on (rStar2-Agent, section 2.1, figure 3)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from rstar_jax.text.chat import ChatFormat
from rstar_jax.text.tool_calls import ParsedCall
from rstar_jax.tools.formatting import truncate_text
from rstar_jax.types import (
    Engine,
    Finish,
    InfrastructureError,
    Problem,
    SampleKey,
    Sampling,
    SessionTool,
    Slot,
    Tokenizer,
    Tool,
    ToolRecord,
    ToolStatus,
    Trajectory,
    UserError,
)


@dataclasses.dataclass(frozen=True)
class Budget:
    """Limits of one trajectory, each its own setting. The response counts sampled and observed tokens alike."""

    max_prompt_tokens: int
    max_response_tokens: int
    max_turns: int
    max_tool_output_tokens: int
    max_parallel_calls: int = 1


@dataclasses.dataclass(frozen=True)
class Agent:
    """What all trajectories of a stage share."""

    engine: Engine
    tools: Mapping[str, Tool]
    chat: ChatFormat
    tokenizer: Tokenizer
    budget: Budget
    call_deadline_s: float = math.inf  # a tool call without an answer for so long fails the trajectory
    watch: Callable[[Trajectory], None] | None = None  # called after every turn and after every answer of the tool

    def prompt_ids(self, problem: Problem) -> list[int]:
        """Ids of the prompt. Raises `UserError` when they exceed the prompt budget: a prompt is never cut."""
        if "prompt_pieces" in problem.metadata:
            pieces = problem.metadata["prompt_pieces"]
        else:
            pieces = self.chat.prompt(problem.question, [tool.schema for tool in self.tools.values()])
        ids = self.tokenizer.encode(pieces)
        if len(ids) > self.budget.max_prompt_tokens:
            raise UserError(
                f"the prompt of problem {problem.id} has {len(ids)} tokens, more than the budget of "
                f"{self.budget.max_prompt_tokens}; raise rollout.max_prompt_tokens or leave long problems out"
            )
        return ids

    def shared_prefix(self) -> list[int]:
        """The ids that prompts begin with, whatever the question: system text, tool schemas, and the opening of the user's turn."""
        schemas = [tool.schema for tool in self.tools.values()]
        first, *others = (self.tokenizer.encode(self.chat.prompt(question, schemas)) for question in ("0", "Aa", "?"))
        same = (len(set(ids)) == 1 for ids in zip(first, *others, strict=False))
        return first[: sum(itertools.takewhile(bool, same))]

    async def run(self, problem: Problem, key: SampleKey, sampling: Sampling) -> Trajectory:
        """One whole rollout. Infrastructure failures end it as `FAILED` (its verdict will be unknown); nothing else is caught."""
        trajectory = Trajectory(problem, key.sample, self.prompt_ids(problem))
        ids = trajectory.ids.tolist()
        slot = await self.engine.open(ids, key, sampling, len(ids) + self.budget.max_response_tokens)
        try:
            async with self._own_tools() as tools:
                trajectory.close(await dataclasses.replace(self, tools=tools)._converse(trajectory, slot))
        except InfrastructureError:
            trajectory.close(Finish.FAILED)
        finally:
            slot.close()
        trajectory.record_experts(slot.experts())
        return trajectory

    @contextlib.asynccontextmanager
    async def _own_tools(self) -> AsyncIterator[Mapping[str, Tool]]:
        """The tools of one trajectory: those that keep something from call to call are opened for it alone."""
        async with contextlib.AsyncExitStack() as stack:
            tools = dict(self.tools)
            for name, tool in tools.items():
                if isinstance(tool, SessionTool):
                    tools[name] = await stack.enter_async_context(tool.session())
            yield tools

    async def _converse(self, trajectory: Trajectory, slot: Slot) -> Finish:
        budget = self.budget
        for turn in range(1, budget.max_turns + 1):
            sampled = await slot.generate(budget.max_response_tokens - trajectory.response_length)
            text = self.tokenizer.decode(sampled.ids)
            trajectory.append_sampled(sampled, text)
            self._show(trajectory)
            if sampled.finish is Finish.LENGTH:
                return Finish.LENGTH
            calls = self.chat.parse_calls(text, tuple(self.tools))
            wanted = [call for call in calls if not call.inside_reasoning]
            if not wanted:
                trajectory.append_observed((), [_unanswered(call) for call in calls])
                return Finish.STOP
            if turn == budget.max_turns:
                trajectory.append_observed((), [_unanswered(call) for call in calls])
                return Finish.TURNS
            records = await self._answer(calls)
            shown = [record.shown for record in records if not record.inside_reasoning]
            observed = self.tokenizer.encode(self.chat.tool_turn(shown))
            if trajectory.response_length + len(observed) >= budget.max_response_tokens:
                trajectory.append_observed((), records)
                return Finish.OBSERVATION
            trajectory.append_observed(observed, records)
            self._show(trajectory)
            await slot.append(observed)
        raise AssertionError("the loop returns at the last turn")

    def _show(self, trajectory: Trajectory) -> None:
        if self.watch is not None:
            self.watch(trajectory)

    async def _answer(self, calls: Sequence[ParsedCall]) -> list[ToolRecord]:
        """Records of a turn's calls: the first ones within `max_parallel_calls` run together, every other is answered too."""
        limit = self.budget.max_parallel_calls
        note = f"Error: only {limit} tool call{'s' if limit > 1 else ''} per turn; this one was not run."

        async def answer(call: ParsedCall, rank: int) -> ToolRecord:
            if call.inside_reasoning:
                return _unanswered(call)
            if call.error is not None:
                return self._record(call, ToolStatus.REJECTED, call.error, executed=False)
            if rank >= limit:
                return self._record(call, ToolStatus.REJECTED, note, executed=False)
            return await self._execute(call)

        ranks = itertools.accumulate((not call.inside_reasoning for call in calls), initial=0)
        return list(await asyncio.gather(*(answer(call, rank) for call, rank in zip(calls, ranks, strict=False))))

    async def _execute(self, call: ParsedCall) -> ToolRecord:
        tool = self.tools[call.name]
        deadline = None if math.isinf(self.call_deadline_s) else self.call_deadline_s
        try:
            async with asyncio.timeout(deadline) as waiting:
                result = await tool.call(call.arguments)
        except TimeoutError:
            if not waiting.expired():
                raise  # the tool's own
            raise InfrastructureError(f"{call.name} gave no answer for {deadline} seconds (rollout.call_deadline_s)") from None
        executed = result.status is not ToolStatus.REJECTED
        return self._record(call, result.status, tool.format(result), executed=executed, seconds=result.seconds)

    def _record(self, call: ParsedCall, status: ToolStatus, text: str, *, executed: bool, seconds: float = 0.0) -> ToolRecord:
        shown = truncate_text(
            text,
            self.budget.max_tool_output_tokens,
            encode=lambda part: self.tokenizer.encode([part]),
            decode=self.tokenizer.decode,
        )
        return ToolRecord(call.name, call.arguments or call.body, status, shown, seconds, executed, call.inside_reasoning)


def _unanswered(call: ParsedCall) -> ToolRecord:
    return ToolRecord(call.name, call.arguments or call.body, None, "", 0.0, False, call.inside_reasoning)
