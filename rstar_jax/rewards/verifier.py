"""math-verify in bounded worker processes.

Symbolic comparison of what a model wrote can hang or eat the memory (`9^{9^{9^9}}`), and neither can be stopped inside the
process. So each comparison runs in a process of its own pool with a wall-clock limit and an address-space limit. A worker that
hangs or dies is killed, its comparison is *unknown*, and the next one gets a new worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
from types import TracebackType
from typing import Any

from rstar_jax.types import InfrastructureError, UserError, Verdict

_SCRIPT = pathlib.Path(__file__).with_name("verify_worker.py")


class _WorkerLost(Exception):
    """The worker hung or died; the text says which."""


class _Worker:
    """One running worker process."""

    def __init__(self, process: asyncio.subprocess.Process):
        self.process = process

    @classmethod
    async def start(cls, memory_bytes: int, hard_limit_s: float, start_limit_s: float) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", str(_SCRIPT), str(os.getpid()), str(memory_bytes), str(hard_limit_s),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is the parent's business
        )  # fmt: skip
        worker = cls(process)
        try:
            await worker._reply(start_limit_s)
        except BaseException:
            await worker.kill()
            raise
        return worker

    async def ask(self, request: dict[str, str], limit_s: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        return await self._reply(limit_s)

    async def _reply(self, limit_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), limit_s)
        except TimeoutError:
            raise _WorkerLost(f"no verdict within {limit_s:g} s") from None
        if not line:
            raise _WorkerLost("the verifier process died")
        return json.loads(line)

    async def kill(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended between the check and the signal
                self.process.kill()
        await self.process.wait()


@dataclasses.dataclass
class Verifier:
    """A pool of math-verify workers; an async context manager.

    Args:
      workers: processes, and so comparisons at a time. They start when first needed.
      time_limit_s: wall clock for one comparison, counted from when a worker takes it.
      memory_bytes: address space of a worker.
      start_limit_s: wall clock for a worker to become ready.
    """

    workers: int = 1
    time_limit_s: float = 2.0
    memory_bytes: int = 1 << 30
    start_limit_s: float = 60.0

    def __post_init__(self) -> None:
        if self.workers < 1 or not self.time_limit_s > 0:
            raise UserError("a verifier needs at least one worker and a positive time limit")
        self._idle: asyncio.Queue[_Worker | None] | None = None
        self._alive: set[_Worker] = set()

    async def __aenter__(self) -> Verifier:
        self._idle = asyncio.Queue()
        for _ in range(self.workers):
            self._idle.put_nowait(None)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._idle = None
        await asyncio.gather(*(self._discard(worker) for worker in tuple(self._alive)))

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the running workers."""
        return tuple(sorted(worker.process.pid for worker in self._alive))

    async def verify(self, answer: str, gold: str) -> Verdict:
        """Whether two LaTeX expressions are equal: value 1 or 0; None when the gold cannot be parsed, or the
        worker hung or died.

        Raises `InfrastructureError` when a worker cannot be started.
        """
        idle = self._idle
        if idle is None:
            raise RuntimeError("the verifier is not open; use `async with Verifier() as verifier`")
        worker = await idle.get()
        try:
            if self._idle is not idle:
                raise RuntimeError("the verifier was closed while a comparison waited for a worker")
            if worker is None:
                worker = await self._start()
            reply = await worker.ask({"answer": answer, "gold": gold}, self.time_limit_s)
        except _WorkerLost as lost:
            await self._discard(worker)
            worker = None
            return Verdict(None, str(lost))
        except BaseException:  # cancelled while a comparison runs: its late reply must reach nobody
            await self._discard(worker)
            worker = None
            raise
        finally:
            idle.put_nowait(worker)
        if "unparseable" in reply:
            return Verdict(None, f"the reference answer {gold[:80]!r} cannot be parsed")
        return Verdict(1.0, "equal") if reply["equal"] else Verdict(0.0, "different")

    async def _start(self) -> _Worker:
        try:
            worker = await _Worker.start(self.memory_bytes, 4 * self.time_limit_s + 1, self.start_limit_s)
        except (_WorkerLost, OSError) as error:
            raise InfrastructureError(f"the answer verifier cannot start ({error}); is math-verify installed?") from error
        self._alive.add(worker)
        return worker

    async def _discard(self, worker: _Worker | None) -> None:
        if worker is not None:
            await worker.kill()
            self._alive.discard(worker)
