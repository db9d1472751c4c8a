"""The Python tool of rStar2-Agent: `python_code_with_standard_io(code, input)`, on a pool of Python processes.

`PythonTool` is stateless: each call is a process of its own. `SessionPythonTool` gives each trajectory one that lives on.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rstar_jax.tools.base import Runner, Session
from rstar_jax.tools.formatting import STYLES, format_result
from rstar_jax.tools.isolation import Isolation
from rstar_jax.types import ToolResult, ToolStatus, UserError

NAME = "python_code_with_standard_io"

# Word for word what the released models were trained with (rStar2-Agent, `python_tool_config.yaml`): it is part of the prompt.
SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Execute Python code with standard input and capture standard output. This function takes a Python code "
        "string and an input string, provides the input string through standard input (stdin) to the code, and captures and "
        "returns any output produced through standard output (stdout). If the executed code raises an exception, the error "
        "message will be captured and returned instead.",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {
                    "type": "string",
                    "description": "A string containing Python code to be executed. The code can read from standard input "
                    "using the input() function.",
                },
                "input": {
                    "type": "string",
                    "description": "A string that will be provided as standard input to the code when it calls input().",
                },
            },
            "required": ["code", "input"],
        },
    },
}


class PythonTool:
    """The `Tool` protocol on a pool, or on one `session` of it. `style` and `show_time` are those of `format_result`."""

    def __init__(self, pool: Runner, style: str = "rstar2", show_time: bool = False, session: Session | None = None):
        if style not in STYLES:
            raise UserError(f"tool style {style!r} is not known; choose one of {', '.join(STYLES)}")
        if show_time and style != "rstar2":
            raise UserError(f"show_time belongs to tool style 'rstar2', not to {style!r}")
        self._pool = pool
        self._python = session or pool
        self._style = style
        self._show_time = show_time

    @property
    def isolation(self) -> Isolation:
        """What every call is kept from."""
        return self._pool.isolation

    @property
    def name(self) -> str:
        return NAME

    @property
    def schema(self) -> Mapping[str, Any]:
        return SCHEMA

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Run `arguments["code"]` with `arguments["input"]` (empty when absent, although the schema asks for it) on standard
        input. Malformed arguments are `REJECTED`, with a line for the model in `stderr`."""
        if complaint := _complaint(arguments):
            return ToolResult(ToolStatus.REJECTED, stderr=complaint)
        return await self._python.run(arguments["code"], arguments.get("input", ""))

    def format(self, result: ToolResult) -> str:
        return format_result(result, style=self._style, show_time=self._show_time)


class SessionPythonTool(PythonTool):
    """Python that remembers: within one trajectory the names that a call defines are there in the next. A call outside `session` is
    stateless."""

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[PythonTool]:
        """The tool of one trajectory; its process ends with the context."""
        async with self._pool.session() as session:
            yield PythonTool(self._pool, self._style, self._show_time, session)


def _complaint(arguments: Any) -> str:
    """What is wrong with the arguments, in one line, or nothing."""
    if not isinstance(arguments, Mapping):
        return f"arguments must be an object with the keys 'code' and 'input', not {type(arguments).__name__}"
    unknown = [name for name in arguments if name not in ("code", "input")]
    if unknown:
        return f"unknown argument {str(unknown[0])!r}: {NAME} takes 'code' and 'input'"
    if "code" not in arguments:
        return f"argument 'code' is missing: {NAME} takes 'code' and 'input'"
    for name, value in arguments.items():
        if not isinstance(value, str):
            return f"argument {name!r} must be a string, not {type(value).__name__}"
    return ""
