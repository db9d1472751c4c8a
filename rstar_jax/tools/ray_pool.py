"""The tool on the nodes of a Ray cluster: `async with RayPool(config) as pool: await pool.run("print(1)")`.

Needs Ray (`pip install rstar_jax[ray]`), and this package on every node. Ray places the pools, starts them again when they die, and
carries the calls; how a program is run and confined is `ToolPool`'s work on each node.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from rstar_jax.config import ToolConfig
from rstar_jax.tools import wire
from rstar_jax.tools.base import HeldSession, Job, check_timeout, complaint, run_jobs
from rstar_jax.tools.isolation import Isolation
from rstar_jax.tools.pool import ToolPool
from rstar_jax.types import InfrastructureError, ToolResult, ToolStatus, UserError

ACTOR_CALLS = 10_000  # that one actor accepts at a time; the pool in it and `RayPool` bound those that run
RESTART_SECONDS = 2.0  # for Ray to start an actor again, before a node is asked a second time
ACCELERATORS = ("GPU", "TPU", "NPU", "neuron_cores", "HPU")


def import_ray() -> Any:
    """The module `ray`. Raises `UserError` when it is not installed."""
    try:
        import ray
    except ImportError:
        raise UserError("Ray is not installed; install it with: pip install rstar_jax[ray]") from None
    return ray


class _Host:
    """A `ToolPool` in an actor. Answers are `("ok", value)`, or `("failed", why)` for failures of the machinery."""

    def __init__(self, config: ToolConfig):
        self._config = config
        self._lock = asyncio.Lock()
        self._pool: ToolPool | None = None
        self._sessions: dict[str, HeldSession] = {}

    async def _opened(self) -> ToolPool:
        """The pool, started with the first call: an actor that Ray has started again has none yet."""
        async with self._lock:
            if self._pool is None:
                self._pool = await ToolPool(self._config).__aenter__()
            return self._pool

    async def isolation(self) -> tuple[str, Any]:
        try:
            return "ok", (await self._opened()).isolation
        except UserError as error:
            return "refused", str(error)
        except InfrastructureError as error:
            return "failed", str(error)

    async def run(self, code: str, stdin: str | None, timeout: float | None, session: str | None) -> tuple[str, Any]:
        try:
            if session is None:
                return "ok", await (await self._opened()).run(code, stdin, timeout)
            if session not in self._sessions:
                return "failed", "the session is not known: it was closed, or its actor was started again"
            held = self._sessions[session]
            async with held.lock:
                return "ok", await (await held.opened()).run(code, stdin, timeout)
        except InfrastructureError as error:
            return "failed", str(error)

    async def open_session(self, key: str) -> tuple[str, Any]:
        try:
            held = self._sessions[key] = HeldSession(await self._opened())
            await held.opened()
        except InfrastructureError as error:
            self._sessions.pop(key, None)
            return "failed", str(error)
        return "ok", None

    async def close_session(self, key: str) -> tuple[str, Any]:
        try:
            if held := self._sessions.pop(key, None):
                await held.close()
        except InfrastructureError as error:
            return "failed", str(error)
        return "ok", None

    async def close(self) -> tuple[str, Any]:
        for key in list(self._sessions):
            await self.close_session(key)
        async with self._lock:
            if self._pool is not None:
                await self._pool.__aexit__(None, None, None)
                self._pool = None
        return "ok", None


class _Node:
    """The client's side of one actor. At most `places` calls are with it at a time, so that a deadline counts run time."""

    def __init__(self, ray: Any, name: str, actor: Any, places: int):
        self.name = name
        self.actor = actor
        self.calls = 0  # with it or waiting for it
        self.sessions = 0
        self.gate = asyncio.Semaphore(places)
        self._ray = ray

    async def ask(self, method: str, *arguments: Any, seconds: float | None = None) -> Any:
        """Call the actor. Raises `InfrastructureError` when it is gone, fails, or has not answered after `seconds`; `UserError` when
        it refuses its configuration."""
        reference = getattr(self.actor, method).remote(*arguments)
        try:
            async with asyncio.timeout(seconds):
                kind, value = await reference
        except TimeoutError:
            self._ray.cancel(reference)
            raise InfrastructureError(f"the tool on Ray node {self.name} did not answer within {seconds:.3g} s") from None
        except asyncio.CancelledError:
            self._ray.cancel(reference)
            raise
        except self._ray.exceptions.RayError as error:
            line = " ".join(str(error).split())[:300]
            raise InfrastructureError(f"the tool on Ray node {self.name}: {type(error).__name__}: {line}") from None
        if kind == "ok":
            return value
        text = f"the tool on Ray node {self.name}: {value}"
        raise UserError(text) if kind == "refused" else InfrastructureError(text)


class RaySession:
    """A session on one node. It is lost with that node's actor: `run` then raises `InfrastructureError`."""

    def __init__(self, run: Callable[[str, str | None, float | None, float], Awaitable[ToolResult]]):
        self._run = run
        self._seconds = 0.0  # that its cells took: the pool may have to run them again before the next one
        self._lock = asyncio.Lock()  # a cell's deadline does not count the cells before it

    async def run(self, code: str, stdin: str | None = None, timeout: float | None = None) -> ToolResult:
        """Run one cell, once: a failure of the machinery is not retried, since nobody knows what the cell had done."""
        async with self._lock:
            result = await self._run(code, stdin, timeout, self._seconds)
            self._seconds += result.seconds
            return result


class RayPool:
    """One `ToolPool(config)` on each node of a Ray cluster that has processors and no accelerator, or on each node with processors
    when all have accelerators. They belong to this object, which is their only client, and end with it.

    Connects to `address` (None: the cluster this process belongs to, or a new one on this machine) unless Ray is initialised, and
    then leaves the cluster again at the end. The actors ask Ray for no processors: `config.workers` says what each node gives. A call
    goes to the node with the fewest; when that fails (the node is gone, or its machinery failed, or the call is `grace_s` past its
    own time), another is asked, at most `retries` times. `start_s` bounds the start of all pools; nodes that join later are not used.

    Raises `UserError` when Ray is not installed, when there is no node, and when a node cannot keep `config`.
    """

    def __init__(
        self, config: ToolConfig, address: str | None = None, *, retries: int = 2, grace_s: float = 30.0, start_s: float = 180.0
    ):
        config.validate()
        self.config = config
        self._ray = import_ray()
        self._address = address
        self._retries = retries
        self._grace = grace_s
        self._start = start_s
        self._nodes: list[_Node] = []
        self._leave = False  # the cluster, at the end
        self._isolation: Isolation | None = None

    @property
    def isolation(self) -> Isolation:
        """The weakest tier of the nodes, and the promises that all of them keep."""
        if self._isolation is None:
            raise RuntimeError("the isolation is known once the pool is open")
        return self._isolation

    async def __aenter__(self) -> RayPool:
        ray = self._ray
        if not ray.is_initialized():
            try:
                ray.init(address=self._address, log_to_driver=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UserError(f"no Ray cluster at {self._address or 'this machine'}: {' '.join(str(error).split())[:300]}") from None
            self._leave = True
        try:
            self._nodes = [self._place(node) for node in _nodes_for_tools(ray.nodes())]
            if not self._nodes:
                raise UserError("the Ray cluster has no node with processors")
            asked = [node.ask("isolation", seconds=self._start) for node in self._nodes]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
        except BaseException:
            await self.__aexit__()
            raise
        self._isolation = wire.weakest([answer for answer in answers if isinstance(answer, Isolation)])
        return self

    async def __aexit__(self, *error: object) -> None:
        ends = [node.ask("close", seconds=self._grace) for node in self._nodes]
        await asyncio.gather(*ends, return_exceptions=True)  # one that is gone already has nothing to close
        for node in self._nodes:
            self._ray.kill(node.actor)
        self._nodes = []
        if self._leave:
            self._ray.shutdown()

    async def run(self, code: str, stdin: str | None = None, timeout: float | None = None) -> ToolResult:
        """See `base.Runner.run`. Raises `InfrastructureError` after `retries` + 1 attempts."""
        tried: set[_Node] = set()
        reason = ""
        for attempt in range(self._retries + 1):
            node = self._choose(tried)
            if node in tried:
                await asyncio.sleep(RESTART_SECONDS * attempt)
            tried.add(node)
            try:
                return await self._run_on(node, None, code, stdin, timeout)
            except InfrastructureError as error:
                reason = str(error)
        raise InfrastructureError(f"a tool call failed {self._retries + 1} times; the last time: {reason}")

    async def run_many(self, jobs: Iterable[Job]) -> list[ToolResult]:
        """See `base.Runner.run_many`."""
        return await run_jobs(self.run, jobs, self.config.concurrency * max(len(self._nodes), 1))

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[RaySession]:
        """A session on the node with the fewest calls and sessions. Raises `InfrastructureError` when it cannot be opened."""
        node, key = self._choose(set()), uuid.uuid4().hex
        node.sessions += 1
        try:
            await node.ask("open_session", key, seconds=self._grace)
            yield RaySession(lambda code, stdin, timeout, before: self._run_on(node, key, code, stdin, timeout, before))
        finally:
            node.sessions -= 1
            with contextlib.suppress(InfrastructureError):  # the session has ended with its node
                await node.ask("close_session", key, seconds=self._grace)

    async def _run_on(
        self, node: _Node, session: str | None, code: str, stdin: str | None, timeout: float | None, before: float = 0.0
    ) -> ToolResult:
        check_timeout(timeout)
        if why := complaint(code, stdin):
            return ToolResult(ToolStatus.REJECTED, stderr=why)
        seconds = (self.config.timeout_s if timeout is None else timeout) + before + self._grace
        node.calls += 1
        try:
            async with node.gate:
                result: ToolResult = await node.ask("run", code, stdin, timeout, session, seconds=seconds)
                return result
        finally:
            node.calls -= 1

    def _choose(self, tried: set[_Node]) -> _Node:
        if not self._nodes:
            raise InfrastructureError("the Ray pool is closed")
        left = [node for node in self._nodes if node not in tried] or self._nodes
        return min(left, key=lambda node: (node.calls, node.sessions))

    def _place(self, node: dict[str, Any]) -> _Node:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = {
            "num_cpus": 0,
            "max_restarts": -1,
            "max_concurrency": ACTOR_CALLS,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        }
        actor = self._ray.remote(_Host).options(**options).remote(self.config)
        return _Node(self._ray, node["NodeManagerAddress"], actor, self.config.concurrency)


def _nodes_for_tools(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of `ray.nodes()`: the live ones with processors, without accelerators if there are such."""
    live = [node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    plain = [node for node in live if not any(node["Resources"].get(name) for name in ACCELERATORS)]
    return plain or live
