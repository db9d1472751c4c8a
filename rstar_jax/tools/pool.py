"""A pool of warm Python processes that run programs: `async with ToolPool(config) as pool: await pool.run("print(1)")`.

One call is one process, forked from a warm zygote (`zygote.py`) and thrown away; a session (`session.py`) keeps its process. The
pool belongs to one event loop and never blocks it: deadlines and output are the keepers' work, and what the pool does for a call is
one message out and one in.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import pathlib
import signal
import tempfile
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from rstar_jax.config import TIERS, ToolConfig
from rstar_jax.tools import child
from rstar_jax.tools.base import Job, check_timeout, complaint, run_jobs
from rstar_jax.tools.isolation import Isolation
from rstar_jax.tools.namespaces import SANDBOXES
from rstar_jax.tools.probe import broken_promises
from rstar_jax.tools.session import Session, Sessions
from rstar_jax.tools.view import view
from rstar_jax.tools.worker import TierUnavailable, Worker, clean_environment, kill_strays, remove_tree
from rstar_jax.types import InfrastructureError, ToolResult, ToolStatus, UserError

RESTARTS = 3  # attempts to replace a dead zygote before the pool gives up
CLOSE_SECONDS = 10.0
PROBE_SECONDS = 20.0


class ToolPool:
    """`config.workers` zygotes, each with its keeper, and at most `config.concurrency` calls running at a time; further calls wait in
    order.

    On entering, the strongest tier of isolation that this machine allows is chosen and put to the test (`probe.py`): `isolation`
    says which. It raises `UserError` when that is weaker than `config.require`, and never takes `rlimits` unless it is asked for by
    name. Closing the pool ends every call and leaves no process, file descriptor or directory; so does the death of this process by
    any signal. A keeper or zygote that dies or hangs is replaced.
    """

    def __init__(self, config: ToolConfig):
        config.validate()
        self.config = config
        self._places: collections.deque[Worker] = collections.deque()  # of workers, free for one call each
        self._waiters: collections.deque[asyncio.Future[Worker]] = collections.deque()  # for a place, the first comes first
        self._workers: set[Worker] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._started = 0
        self._failure = ""
        self._root: pathlib.Path | None = None  # of the calls' directories, in the tiers that have them on the host
        self._isolation: Isolation | None = None
        self._sessions = Sessions(self, config.max_sessions)

    @property
    def isolation(self) -> Isolation:
        """The tier that calls run in, and what it promises. `RuntimeError` before the pool is entered."""
        if self._isolation is None:
            raise RuntimeError("the pool has not been entered, so its tier is not chosen yet")
        return self._isolation

    async def __aenter__(self) -> ToolPool:
        count = min(self.config.workers, self.config.concurrency)
        shares = [len(range(i, self.config.concurrency, count)) for i in range(count)]
        self._seen = view(self.config.packages, self.config.readable)
        try:
            workers = [await self._first()]
            starts = [asyncio.create_task(self._start(workers[0].tier)) for _ in shares[1:]]
            try:
                workers += await asyncio.gather(*starts)
            except BaseException:
                await asyncio.gather(*starts, return_exceptions=True)
                raise
        except BaseException as error:
            await self._clean_up()
            if isinstance(error, TierUnavailable):
                raise InfrastructureError(f"a second tool process cannot have the tier of the first: {error}") from None
            raise
        self._keepers = [asyncio.create_task(self._keep(*pair)) for pair in zip(workers, shares, strict=True)]
        return self

    async def _first(self) -> Worker:
        """A worker in the strongest tier that may be taken, works, and keeps its promises."""
        config = self.config
        named = config.isolation != "auto"
        weakest = TIERS.index(config.require) if config.require else len(TIERS) - 1
        tiers = (config.isolation,) if named else tuple(tier for tier in TIERS[: weakest + 1] if tier != "rlimits")
        reasons = []
        for tier in tiers:
            try:
                worker = await self._start(tier)
            except TierUnavailable as reason:
                reasons.append(f"{tier}: {reason}")
                continue
            promises = [name for name, kept in worker.promises.items() if kept]
            broken = await broken_promises(functools.partial(self._probe, worker), promises, config, clean_environment(""))
            if not broken:
                self._isolation = Isolation(tier, **worker.promises)
                return worker
            reasons.append(f"{tier}: it does not keep its promises here: {', '.join(broken)}")
            self._workers.discard(worker)
            await worker.close(CLOSE_SECONDS)
        advice = "" if named or config.require else "; tool.isolation=rlimits runs without isolation, if the code can be trusted"
        raise UserError(f"no tier of tool isolation can be had ({'; '.join(reasons)}){advice}")

    async def _probe(self, worker: Worker, code: str, stdin: str) -> ToolResult:
        try:
            return self.result(await worker.run(code, stdin, PROBE_SECONDS, lambda: None))
        except InfrastructureError as error:
            return ToolResult(ToolStatus.INFRA_ERROR, stderr=str(error))

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._break("the tool pool is closed")
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self._clean_up()

    async def run(self, code: str, stdin: str | None = None, timeout: float | None = None) -> ToolResult:
        """Run one program with `stdin` as its input (None or empty: end of file at once).

        `timeout` (seconds, None: the configured one) counts from the start of execution; waiting for a place is free. What the
        program does, or is, never raises. Raises `InfrastructureError` when the machinery failed `config.retries` + 1 times.
        """
        timeout, rejected = self.check(code, stdin, timeout)
        if rejected:
            return rejected
        reason = ""
        for _ in range(self.config.retries + 1):
            worker = await self.place()
            try:
                return self.result(await worker.run(code, stdin or "", timeout, functools.partial(self.free, worker)))
            except InfrastructureError as error:
                reason = str(error)
        raise InfrastructureError(f"a tool call failed {self.config.retries + 1} times; the last time: {reason}")

    def session(self) -> Session:
        """A Python that lives on from one call to the next: `async with pool.session() as s: await s.run("x = 1")`. It takes a
        place only while a call runs."""
        return Session(self._sessions)

    async def run_many(self, jobs: Iterable[Job]) -> list[ToolResult]:
        """Results of `jobs` in their order. Takes a job only when it can start, so `jobs` may be a long generator."""
        return await run_jobs(self.run, jobs, self.config.concurrency)

    # for sessions

    def check(self, code: Any, stdin: Any, timeout: float | None) -> tuple[float, ToolResult | None]:
        """(seconds that the call may take, the answer when it cannot be run at all)."""
        check_timeout(timeout)
        why = complaint(code, stdin) or self._too_long("code", code) or self._too_long("input", stdin or "")
        rejected = ToolResult(ToolStatus.REJECTED, stderr=why) if why else None
        return self.config.timeout_s if timeout is None else timeout, rejected

    def result(self, report: Mapping[str, Any]) -> ToolResult:
        """What a keeper reported. Raises `InfrastructureError` for a call that was never run: not the program's fault."""
        if "failed" in report:
            raise InfrastructureError(report["failed"])
        if not report["ready"] and report["reason"] is None:
            raise InfrastructureError(f"a call ended with code {report['code']} while it was set up: {report['stderr'].strip()[-300:]}")
        return to_result(report, self.config.cpu_s)

    def _too_long(self, what: str, text: str) -> str:
        """What to say of a text that is too long, or nothing."""
        size = len(text.encode("utf-8", "surrogatepass")) if len(text) * 4 > self.config.code_bytes else 0
        if size > self.config.code_bytes:
            return f"{what} is {size} bytes long; at most {self.config.code_bytes} are allowed"
        return ""

    async def place(self) -> Worker:
        """A place with a live worker, first come, first served. Raises `InfrastructureError` when there will be none."""
        if self._failure:
            raise InfrastructureError(self._failure)
        while self._places:
            worker = self._places.popleft()
            if worker.alive:
                return worker
        future: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # it was given one in the same moment
                self.free(future.result())
            raise

    def free(self, worker: Worker) -> None:
        """Give a place back: to who has waited longest, so that nobody is overtaken."""
        if not worker.alive or self._failure:
            return
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(worker)
                return
        self._places.append(worker)

    def _break(self, failure: str) -> None:
        """Let nobody wait for what will not come."""
        self._failure = failure
        self._places.clear()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(InfrastructureError(failure))
        self._waiters.clear()

    async def _start(self, tier: str) -> Worker:
        self._started += 1
        directory = None
        if not SANDBOXES[tier].has_process_namespace:
            self._root = self._root or pathlib.Path(tempfile.mkdtemp(prefix="rstar_tool_"))
            directory = self._root / str(self._started)
        worker = Worker(self.config, self._seen, tier, self._started, directory)
        await worker.start()
        self._workers.add(worker)
        return worker

    async def _keep(self, worker: Worker, share: int) -> None:
        """Offer `share` places on `worker`; when it dies, clean up behind it and do the same with its successor."""
        while True:
            for _ in range(share):
                self.free(worker)
            await worker.died.wait()
            self._workers.discard(worker)
            if worker.directory:
                await asyncio.to_thread(_clean_up_after, worker.directory)
            for attempt in range(1, RESTARTS + 1):
                try:
                    worker = await self._start(worker.tier)
                    break
                except Exception as error:  # of any kind: calls are waiting, and have to hear of it
                    if attempt == RESTARTS:
                        self._break(f"a tool process died and cannot be replaced: {error}")
                        return

    async def _clean_up(self) -> None:
        await asyncio.gather(*(worker.close(CLOSE_SECONDS) for worker in self._workers))
        self._workers.clear()
        if self._root and self._root.exists():
            await asyncio.to_thread(_clean_up_after, self._root)


def _clean_up_after(directory: pathlib.Path) -> None:
    kill_strays(directory)
    remove_tree(directory)


def to_result(report: Mapping[str, Any], cpu_seconds: float) -> ToolResult:
    """A keeper's report as a `ToolResult`. The kernel's exit code decides; see `child.py` for what refines it."""
    return ToolResult(
        status=_status(report, cpu_seconds),
        stdout=report["stdout"],
        stderr=report["stderr"],
        exit_code=report["code"],
        seconds=report["seconds"],
        cpu_seconds=report["cpu_seconds"],
        truncated=report["truncated"],
    )


def _status(report: Mapping[str, Any], cpu_seconds: float) -> ToolStatus:
    code = report["code"]
    if report["reason"] is not None:
        return ToolStatus(report["reason"])
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and report["cpu_seconds"] >= cpu_seconds):
        return ToolStatus.CPU_LIMIT
    if code < 0:
        return ToolStatus.SIGNAL
    if code == 0:
        return ToolStatus.OK
    if code == 1 and report["note"] == child.EXCEPTION:
        return ToolStatus.ERROR
    if code == 1 and report["note"] == child.OUT_OF_MEMORY:
        return ToolStatus.MEMORY
    return ToolStatus.EXIT
