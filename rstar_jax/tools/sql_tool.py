"""A read-only SQL tool: `sql_query(query)` on a SQLite file. One query is one short-lived process (`sql_worker.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import signal
import sys
import time
import urllib.parse
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rstar_jax.tools.formatting import clean_text
from rstar_jax.types import InfrastructureError, ToolResult, ToolStatus, UserError

NAME = "sql_query"
START_SECONDS = 30.0  # for a worker to open the database
ATTEMPTS = 2  # of a call whose worker could not be started or was lost
MAX_QUERY_BYTES = 100_000

SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Run one read-only SQL query (SQLite dialect) on the database and return its rows as tab-separated "
        "values below a line of column names. The tables are listed in sqlite_master.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "A single SELECT statement."}},
            "required": ["query"],
        },
    },
}

_SCRIPT = pathlib.Path(__file__).with_name("sql_worker.py")
_MAGIC = b"SQLite format 3\0"
_WAL = b"\2\2"  # bytes 18 and 19 of a database in WAL mode
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


class _Lost(Exception):
    """The worker could not be started, or ended without an answer through no fault of the query."""


class SqlTool:
    """The `Tool` protocol on one SQLite database, an async context manager: `async with SqlTool(path) as tool: ...`.

    A query can read and nothing else, and holds neither the host nor the event loop up: it runs in a process that is killed at
    its deadline, when its caller is cancelled, when the tool is closed and when this process dies. Nothing is left behind, and
    nothing is kept between queries.

    A finished call has the rows in `stdout` as TSV: a line of column names, then one line for each row; NULL is `NULL`, a blob
    is `X'0A1B'`, and tab, newline, carriage return and backslash in a text are `\\t`, `\\n`, `\\r` and two backslashes. `value` is
    `{"columns": [...], "rows": n}`. The status is `OK` (with `truncated` when there were more than `max_rows` rows),
    `OUTPUT_LIMIT` (more than `max_bytes`; the whole rows that fit are there), `TIMEOUT` (no rows), `MEMORY`, `ERROR` (SQLite's
    message), `REJECTED` (malformed, several statements, or anything but reading; nothing ran), `SIGNAL` (SQLite crashed). All
    but `OK` have one line for the model in `stderr`.

    Args:
      path: the database file. `UserError` when it is none, or when reading it would create files beside it.
      timeout_s: wall clock for one query, in seconds, from when its process has opened the database.
      max_rows: rows of one answer.
      max_bytes: UTF-8 bytes of one answer.
      memory_bytes: what SQLite may allocate; a single value may have a quarter of it.
      concurrency: queries, and so processes, at a time; further calls wait in order.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        timeout_s: float = 5.0,
        max_rows: int = 100,
        max_bytes: int = 8192,
        memory_bytes: int = 256 << 20,
        concurrency: int = 4,
    ):
        if not 0 < timeout_s < math.inf:
            raise UserError(f"timeout_s={timeout_s} must be positive and finite")
        for name, value, least in (
            ("max_rows", max_rows, 1),
            ("max_bytes", max_bytes, 1),
            ("memory_bytes", memory_bytes, 1 << 20),
            ("concurrency", concurrency, 1),
        ):
            if value < least:
                raise UserError(f"{name}={value} must be at least {least}")
        self._uri = _database_uri(pathlib.Path(path).absolute())
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._settings = {
            "timeout_s": timeout_s,
            "max_rows": max_rows,
            "max_bytes": max_bytes,
            "memory_bytes": memory_bytes,
        }
        self._places: asyncio.Semaphore | None = None
        self._processes: set[asyncio.subprocess.Process] = set()

    @property
    def name(self) -> str:
        return NAME

    @property
    def schema(self) -> Mapping[str, Any]:
        return SCHEMA

    async def __aenter__(self) -> SqlTool:
        self._places = asyncio.Semaphore(self._concurrency)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        places, self._places = self._places, None
        for process in tuple(self._processes):
            _kill(process)
        if places is not None:
            for _ in range(self._concurrency):  # a call gives its place back when its process is gone
                await places.acquire()

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Run `arguments["query"]`, see the class. Raises `InfrastructureError` when no worker could be started, when it was
        lost (out of memory on the host, say), when the database cannot be read any more, or when the tool is closed meanwhile;
        `RuntimeError` when it is not open."""
        if complaint := _complaint(arguments):
            return ToolResult(ToolStatus.REJECTED, stderr=complaint)
        places = self._places
        if places is None:
            raise RuntimeError("the SQL tool is not open; use `async with SqlTool(path) as tool`")
        reason = ""
        async with places:
            for _ in range(ATTEMPTS):
                if self._places is not places:
                    raise InfrastructureError("the SQL tool was closed before a query ended")
                try:
                    return await self._run(arguments["query"].encode())
                except _Lost as lost:
                    reason = str(lost)
        raise InfrastructureError(f"an SQL query failed {ATTEMPTS} times; the last time: {reason}")

    def format(self, result: ToolResult) -> str:
        """The rows, then what went wrong or was left out. Raises `ValueError` for `INFRA_ERROR`."""
        if result.status is ToolStatus.INFRA_ERROR:
            raise ValueError("an infrastructure error is retried or raised; it has no text for the model")
        parts = [clean_text(result.stdout).rstrip("\n"), clean_text(result.stderr).rstrip("\n")]
        if result.status is ToolStatus.OK and result.truncated:
            parts.append(f"(only the first {self._settings['max_rows']} rows are shown)")
        elif result.status is ToolStatus.OK and result.value is not None and result.value["rows"] == 0:
            parts.append("(no rows)")
        return "\n".join(part for part in parts if part) or "(no output)"

    async def _run(self, query: bytes) -> ToolResult:
        """One attempt. Raises `_Lost`."""
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-B", str(_SCRIPT), self._uri, json.dumps(self._settings | {"parent": os.getpid()}),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,  # Ctrl-C in the terminal is the parent's business
            )  # fmt: skip
        except OSError as error:
            raise _Lost(f"its process cannot be started: {error}") from error
        self._processes.add(process)
        try:
            if self._places is None:
                raise _Lost("the tool was closed")
            return await self._ask(process, query)
        finally:
            _kill(process)
            try:
                await asyncio.shield(_reaped(process))
            finally:
                self._processes.discard(process)

    async def _ask(self, process: asyncio.subprocess.Process, query: bytes) -> ToolResult:
        assert process.stdin is not None and process.stdout is not None
        try:
            first = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
        except TimeoutError:
            raise _Lost(f"its process was not ready within {START_SECONDS:.0f} s") from None
        if first != b"ready\n":
            self._result(first, await process.wait(), late=False)
            raise _Lost("its process answered before it was asked")
        start = time.monotonic()
        process.stdin.write(query)
        process.stdin.close()
        body, late = b"", False
        try:
            body = await asyncio.wait_for(process.stdout.read(), self._timeout_s)
        except TimeoutError:
            _kill(process)
            late = True
        code = await process.wait()
        result = self._result(body, code, late)
        return dataclasses.replace(result, exit_code=code, seconds=time.monotonic() - start)

    def _result(self, body: bytes, code: int, late: bool) -> ToolResult:
        """What a worker that ended with exit code `code` has to say. Raises `_Lost` when that is nothing about the query."""
        if late or -code in (signal.SIGALRM, signal.SIGXCPU):
            return ToolResult(ToolStatus.TIMEOUT, stderr=f"TimeoutError: the query did not end within {self._timeout_s:g} s")
        if -code in _CRASHES:
            return ToolResult(ToolStatus.SIGNAL, stderr=f"Error: the query was killed by {signal.Signals(-code).name}")
        if code != 0 or not body:
            raise _Lost(f"its process ended with code {code}")
        reply = json.loads(body)
        if "failed" in reply:
            raise _Lost(reply["failed"])
        return ToolResult(
            ToolStatus(reply["status"]),
            stdout=reply.get("text", ""),
            stderr=reply.get("error", ""),
            value={"columns": reply["columns"], "rows": reply["rows"]} if "columns" in reply else None,
            cpu_seconds=reply["cpu_seconds"],
            truncated=reply.get("more", False),
        )


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it ended between the check and the signal
            process.kill()


async def _reaped(process: asyncio.subprocess.Process) -> None:
    """Wait until a killed process and its pipes are gone."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    await process.stdout.read()
    await process.wait()


def _environment() -> dict[str, str]:
    """What this interpreter needs to start, and nothing else of ours."""
    environment = {"LANG": "C.UTF-8"}
    if "LD_LIBRARY_PATH" in os.environ:
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return environment


def _database_uri(path: pathlib.Path) -> str:
    """The read-only URI of a database file. Raises `UserError` when it cannot be one."""
    try:
        with path.open("rb") as file:
            header = file.read(20)
    except OSError as error:
        raise UserError(f"the database {str(path)!r} cannot be read: {error.strerror}") from error
    if header and not header.startswith(_MAGIC):  # an empty file is an empty database
        raise UserError(f"{str(path)!r} is not an SQLite database")
    if header[18:20] == _WAL and not path.with_name(path.name + "-wal").exists():
        raise UserError(
            f"{str(path)!r} is in WAL mode and open nowhere, so that reading it would create files beside it; "
            "run `PRAGMA journal_mode=DELETE` on it once"
        )
    return f"file:{urllib.parse.quote(os.fsencode(path))}?mode=ro&immutable=0"


def _complaint(arguments: Any) -> str:
    """What is wrong with the arguments, in one line, or nothing."""
    if not isinstance(arguments, Mapping):
        return f"Error: arguments must be an object with the key 'query', not {type(arguments).__name__}"
    unknown = [name for name in arguments if name != "query"]
    if unknown:
        return f"Error: unknown argument {str(unknown[0])!r}: {NAME} takes 'query'"
    if "query" not in arguments:
        return f"Error: argument 'query' is missing: {NAME} takes 'query'"
    query = arguments["query"]
    if not isinstance(query, str):
        return f"Error: argument 'query' must be a string, not {type(query).__name__}"
    if "\0" in query:
        return "Error: the query contains a null character"
    try:
        size = len(query.encode())
    except UnicodeEncodeError:
        return "Error: the query contains a lone surrogate, which is not text"
    return f"Error: the query is {size} bytes long; at most {MAX_QUERY_BYTES} are allowed" if size > MAX_QUERY_BYTES else ""
