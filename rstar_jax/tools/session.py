"""Sessions: a Python process of one's own, whose variables live from one call to the next.

Only `tool.max_sessions` of them are live at a time. The least recently used one gives way: its process ends, and when it is used
again a new process runs what it had run before, whose outputs are compared with the recorded ones.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rstar_jax.types import InfrastructureError, ToolResult

if TYPE_CHECKING:
    from rstar_jax.tools.pool import ToolPool
    from rstar_jax.tools.worker import Worker


@dataclasses.dataclass(frozen=True)
class _Cell:
    code: str
    stdin: str
    timeout: float
    result: ToolResult


class Sessions:
    """Which sessions of a pool are live, in the order of their last use."""

    def __init__(self, pool: ToolPool, most: int):
        self.pool = pool
        self.evictions = 0
        self._most = most
        self._live: collections.OrderedDict[int, Session] = collections.OrderedDict()
        self._numbers = 0

    def open(self, session: Session) -> int:
        """A number for the session's new process, which makes room for it. Sessions in the middle of a call stay; should all be, the
        number of live ones is exceeded for as long as that lasts."""
        for other in list(self._live.values()):
            if len(self._live) < self._most:
                break
            if not other.busy:
                other.evict()
                self.evictions += 1
        self._numbers += 1
        self._live[self._numbers] = session
        return self._numbers

    def touch(self, number: int) -> None:
        if number in self._live:
            self._live.move_to_end(number)

    def forget(self, number: int) -> None:
        self._live.pop(number, None)

    @property
    def live(self) -> int:
        """How many have a process now."""
        return len(self._live)


class Session:
    """`async with pool.session() as session: await session.run("x = 1")`. Calls of one session run one after the other, in the order
    in which they were made. Leaving the context ends its process.

    `ToolResult.state` says what became of the variables: "" they are as the last call left them; "lost" the process died in this
    call or before it (a time-out that SIGINT did not end, `os._exit`, memory), and the next call starts anew; "diverged" the session
    was rebuilt, and a call of the past now gave another output than it did.
    """

    def __init__(self, sessions: Sessions):
        self._sessions = sessions
        self._lock = asyncio.Lock()
        self._worker: Worker | None = None
        self._number = 0
        self._past: list[_Cell] = []
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a call is running or waiting."""
        return self._lock.locked()

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closed = True
        self.evict()

    def evict(self) -> None:
        """End the process; what it had run stays known."""
        self._sessions.forget(self._number)
        if self._worker is not None:
            self._worker.end_session(self._number)
            self._worker = None

    async def run(self, code: str, stdin: str | None = None, timeout: float | None = None) -> ToolResult:
        """Run one cell; as `ToolPool.run`, but names defined by earlier cells are there. At the time limit the cell is interrupted
        (KeyboardInterrupt; names are kept), and killed if it goes on for another second (names are lost). SystemExit ends the cell
        and not the session."""
        pool = self._sessions.pool
        timeout, rejected = pool.check(code, stdin, timeout)
        if rejected:
            return rejected
        async with self._lock:
            if self._closed:
                raise RuntimeError("the session is closed")
            return await self._run(code, stdin or "", timeout)

    async def _run(self, code: str, stdin: str, timeout: float) -> ToolResult:
        pool = self._sessions.pool
        reason = ""
        for _ in range(pool.config.retries + 1):
            try:
                state = await self._resume()
                result, alive, anew = await self._cell(code, stdin, timeout)
            except InfrastructureError as error:
                reason = str(error)
                self.evict()
                continue
            except BaseException:  # cancelled in the middle of a cell: the process is gone, and so are its names
                self._drop()
                raise
            if anew and self._past:
                state, self._past = "lost", []
            if alive:
                self._past.append(_Cell(code, stdin, timeout, result))
            else:
                state = "lost"
                self._drop()
            return dataclasses.replace(result, state=state)
        raise InfrastructureError(f"a call of a session failed {pool.config.retries + 1} times; the last time: {reason}")

    def _drop(self) -> None:
        """The process is dead, or has to be; nothing of it will be rebuilt."""
        self.evict()
        self._past = []

    async def _resume(self) -> str:
        """Have a process with everything that was run before. Returns the state of its names."""
        if self._worker is not None and self._worker.alive:
            self._sessions.touch(self._number)
            return ""
        self.evict()
        state = ""
        for cell in self._past:
            result, alive, _ = await self._cell(cell.code, cell.stdin, cell.timeout)
            if not alive:
                self._drop()
                return "lost"
            if (result.status, result.stdout, result.stderr) != (cell.result.status, cell.result.stdout, cell.result.stderr):
                state = "diverged"
        return state

    async def _cell(self, code: str, stdin: str, timeout: float) -> tuple[ToolResult, bool, bool]:
        """(result, whether the process lives on, whether it was new). Raises `InfrastructureError`."""
        pool = self._sessions.pool
        place = await pool.place()
        if self._worker is None:
            self._worker = place
            self._number = self._sessions.open(self)
        report: dict[str, Any] = await self._worker.run(code, stdin, timeout, lambda: pool.free(place), self._number)
        result = pool.result(report)
        if not report["alive"]:
            self.evict()
        return result, report["alive"], report["started"]
