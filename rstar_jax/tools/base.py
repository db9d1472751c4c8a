"""What every pool of Python processes can do, wherever its processes are: the protocols that its users are written against."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from rstar_jax.tools.isolation import Isolation
from rstar_jax.types import InfrastructureError, ToolResult


@dataclasses.dataclass(frozen=True)
class Job:
    """One call for `Runner.run_many`; None stands for no input and for the configured timeout."""

    code: str
    stdin: str | None = None
    timeout: float | None = None


class Session(Protocol):
    """Cells that share one interpreter, one after the other."""

    async def run(self, code: str, stdin: str | None = None, timeout: float | None = None) -> ToolResult:
        """Run one cell. Raises `InfrastructureError` when the session is lost."""
        ...


class Runner(Protocol):
    """A pool: `ToolPool` on this machine, `RemotePool` and `RayPool` on others. Each is an async context manager besides."""

    @property
    def isolation(self) -> Isolation:
        """What every call of this pool is kept from."""
        ...

    async def run(self, code: str, stdin: str | None = None, timeout: float | None = None) -> ToolResult:
        """Run one program with `stdin` as its input (None or empty: end of file at once).

        `timeout` (seconds, None: the configured one) counts from the start of execution; waiting for a place is free. What the
        program does, or is, never raises. Raises `InfrastructureError` after the pool's own retries.
        """
        ...

    async def run_many(self, jobs: Iterable[Job]) -> list[ToolResult]:
        """Results of `jobs` in their order. Takes a job only when it can start, so `jobs` may be a long generator."""
        ...

    def session(self) -> contextlib.AbstractAsyncContextManager[Session]:
        """A session that lives as long as the context."""
        ...


Run = Callable[[str, str | None, float | None], Awaitable[ToolResult]]


async def run_jobs(run: Run, jobs: Iterable[Job], concurrency: int) -> list[ToolResult]:
    """`Runner.run_many` on top of `run`, with at most `concurrency` jobs taken and not answered at a time."""
    source = enumerate(jobs)
    results: dict[int, ToolResult] = {}

    async def work() -> None:
        for index, job in source:
            results[index] = await run(job.code, job.stdin, job.timeout)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return [results[index] for index in range(len(results))]


def complaint(code: object, stdin: object) -> str:
    """Why these cannot be sent as a program and its input, in one line, or nothing."""
    for what, text in (("code", code), ("input", "" if stdin is None else stdin)):
        if not isinstance(text, str):
            return f"{what} must be a string, not {type(text).__name__}"
    return ""


def check_timeout(timeout: float | None) -> None:
    """Raises `ValueError` unless `timeout` is None or positive."""
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout={timeout} must be positive")


class HeldSession:
    """A session of `runner` that a task of its own keeps open, for a server whose requests come from many tasks.

    `lock` orders the cells that are to run in it.
    """

    def __init__(self, runner: Runner):
        self.lock = asyncio.Lock()
        self._runner = runner
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    async def opened(self) -> Session:
        """The session, once it is open. Raises what opening it raised."""
        waits: set[asyncio.Future[Any]] = {self._opened, self._task}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self._opened.done():
            return self._opened.result()
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise error
        raise InfrastructureError("the session was closed before it was open")

    async def close(self) -> None:
        """End the session and wait for its end; one that is still being opened is given up. Raises what its end raised."""
        self._closing.set()
        if not self._opened.done():
            self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled() and (error := self._task.exception()) is not None and self._opened.done():
            raise error

    async def _hold(self) -> None:
        async with self._runner.session() as session:
            self._opened.set_result(session)
            await self._closing.wait()
