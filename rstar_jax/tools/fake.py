"""A tool without processes, for tests of what calls tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rstar_jax.tools.formatting import format_result
from rstar_jax.tools.python_tool import NAME, SCHEMA
from rstar_jax.types import ToolResult

Arguments = Mapping[str, Any]


class ScriptedTool:
    """Looks like the Python tool, and answers from a script: a function of the arguments, or results in the order of calls
    (`IndexError` once they are used up). A function may raise, which is how a broken tool is played.

    `delay` is the seconds a call takes, or a function of the arguments that says so. `calls` lists the arguments received.
    """

    def __init__(
        self,
        answers: Callable[[Arguments], ToolResult] | Sequence[ToolResult],
        delay: float | Callable[[Arguments], float] = 0.0,
        style: str = "last_line",
    ):
        self._answers = answers
        self._delay = delay
        self._style = style
        self.calls: list[Arguments] = []

    @property
    def name(self) -> str:
        return NAME

    @property
    def schema(self) -> Mapping[str, Any]:
        return SCHEMA

    async def call(self, arguments: Arguments) -> ToolResult:
        index = len(self.calls)
        self.calls.append(arguments)
        await asyncio.sleep(self._delay(arguments) if callable(self._delay) else self._delay)
        if callable(self._answers):
            return self._answers(arguments)
        if index >= len(self._answers):
            raise IndexError(f"the script has {len(self._answers)} answers, and this is call {index + 1}")
        return self._answers[index]

    def format(self, result: ToolResult) -> str:
        return format_result(result, style=self._style)
