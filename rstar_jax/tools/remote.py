"""The tool on other hosts: `async with RemotePool(["10.0.0.5:7077", "10.0.0.6:7077"], token) as pool: await pool.run("print(1)")`.

Each address is a `server.ToolServer`; what is said stands in `wire.py`. The pool belongs to one event loop, and bears it when that loop
stands still for minutes (a compilation, say): what a server says is heard before its silence is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence

from rstar_jax.tools import wire
from rstar_jax.tools.base import Job, check_timeout, complaint, run_jobs
from rstar_jax.tools.isolation import Isolation
from rstar_jax.tools.link import Link
from rstar_jax.types import InfrastructureError, ToolResult, ToolStatus, UserError


class RemoteSession:
    """A session on one server. It is lost with that server: `run` then raises `InfrastructureError`."""

    def __init__(self, link: Link, key: str):
        self._link = link
        self._key = key

    async def run(self, code: str, stdin: str | None = None, timeout: float | None = None) -> ToolResult:
        """Run one cell, once: a failure of the machinery is not retried, since nobody knows what the cell had done."""
        check_timeout(timeout)
        if why := complaint(code, stdin):
            return ToolResult(ToolStatus.REJECTED, stderr=why)
        key = uuid.uuid4().hex
        frame = wire.encode({"id": key, "session": self._key, "code": code, "stdin": stdin, "timeout": timeout})
        if too_long := _too_long(frame, self._link):
            return too_long
        return wire.unpack_result((await self._link.ask(key, frame)).get("result"))


class RemotePool:
    """The pools behind `addresses` ("host:port" or "unix:/path") as one, for a client that knows their `token`.

    A call goes to the server with the fewest calls for each of its places. When its connection breaks and is there again within
    `reconnect_s`, the call goes on where it was; otherwise, and when the server's own machinery fails, another server is asked, at
    most `retries` times. An attempt fails when the server is silent, or `grace_s` after the end of the call's own time; waiting in a
    server's queue is free. Servers that are gone are connected to again in the background.

    Opening the pool waits at most `connect_timeout` for all servers, and goes on without those that do not answer, if any does.
    Raises `UserError` when none does, when a server refuses the token, and when one speaks another version.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        token: str,
        *,
        retries: int = 2,
        connect_timeout: float = 10.0,
        grace_s: float = 30.0,
        reconnect_s: float = 2.0,
    ):
        if isinstance(addresses, str) or not addresses:
            raise UserError("no addresses of tool servers were given; expected a list of HOST:PORT or unix:/path")
        for address in addresses:
            wire.parse_address(address)
            if list(addresses).count(address) > 1:
                raise UserError(f"the address {address} of a tool server was given twice")
        if retries < 0:
            raise UserError(f"retries={retries} must not be negative")
        token = wire.check_token(token)
        self._up = asyncio.Event()
        self._links = [Link(address, token, self._up, connect_timeout, grace_s, reconnect_s) for address in addresses]
        self._retries = retries
        self._connect_timeout = connect_timeout
        self._grace = grace_s
        self._keepers: list[asyncio.Task[None]] = []
        self._isolation: Isolation | None = None
        self._closed = False

    @property
    def isolation(self) -> Isolation:
        """What all servers promise that answered when the pool was opened. One that comes later and promises less is not used."""
        if self._isolation is None:
            raise RuntimeError("the isolation is known once the pool is open")
        return self._isolation

    async def __aenter__(self) -> RemotePool:
        self._keepers = [asyncio.create_task(link.maintain()) for link in self._links]
        try:
            await self._first_answers()
            isolations = [link.isolation for link in self._links if link.isolation is not None]
            if not isolations:
                raise UserError(f"no tool server can be reached: {self._troubles()}")
        except BaseException:
            await self.__aexit__()
            raise
        self._isolation = wire.weakest(isolations)
        for link in self._links:
            link.floor = self._isolation
        return self

    async def _first_answers(self) -> None:
        """Wait until all servers have answered, at most for `connect_timeout`. Raises `UserError` as soon as one refuses."""
        waits = {asyncio.create_task(link.answered.wait()) for link in self._links}
        try:
            async with asyncio.timeout(self._connect_timeout):
                while waits:
                    _, waits = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    for link in self._links:
                        if link.refusal is not None:
                            raise UserError(str(link.refusal))
        except TimeoutError:
            return  # the caller looks at who has answered
        finally:
            for wait in waits:
                wait.cancel()

    async def __aexit__(self, *error: object) -> None:
        self._closed = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for link in self._links:
            link.leave("the remote pool is closed")
        self._up.set()

    async def run(self, code: str, stdin: str | None = None, timeout: float | None = None) -> ToolResult:
        """See `base.Runner.run`. Raises `InfrastructureError` after `retries` + 1 attempts."""
        check_timeout(timeout)
        if why := complaint(code, stdin):
            return ToolResult(ToolStatus.REJECTED, stderr=why)
        key = uuid.uuid4().hex
        frame = wire.encode({"id": key, "code": code, "stdin": stdin, "timeout": timeout})
        tried: set[Link] = set()
        reason = ""
        for _ in range(self._retries + 1):
            try:
                link = await self._choose(tried)
                tried.add(link)
                if too_long := _too_long(frame, link):
                    return too_long
                return wire.unpack_result((await link.ask(key, frame)).get("result"))
            except InfrastructureError as error:
                reason = str(error)
                self._check_open()
        raise InfrastructureError(f"a tool call failed {self._retries + 1} times; the last time: {reason}")

    async def run_many(self, jobs: Iterable[Job]) -> list[ToolResult]:
        """See `base.Runner.run_many`. As many jobs are under way as all servers that have answered can run at a time."""
        places = sum(link.concurrency for link in self._links if link.isolation is not None)
        return await run_jobs(self.run, jobs, max(places, 1))

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[RemoteSession]:
        """A session on the server with the fewest calls and sessions. Raises `InfrastructureError` when it cannot be opened."""
        link, key = await self._open_session()
        link.sessions.add(key)
        try:
            yield RemoteSession(link, key)
        finally:
            link.sessions.discard(key)
            link.tell({"close": key})

    async def _open_session(self) -> tuple[Link, str]:
        tried: set[Link] = set()
        reason = ""
        for _ in range(self._retries + 1):
            key = uuid.uuid4().hex
            try:
                link = await self._choose(tried)
                tried.add(link)
                try:
                    await link.ask(key, wire.encode({"id": key, "open": key}), self._grace)
                except BaseException:
                    link.tell({"close": key})
                    raise
                return link, key
            except InfrastructureError as error:
                reason = str(error)
                self._check_open()
        raise InfrastructureError(f"a session could not be opened in {self._retries + 1} attempts; the last time: {reason}")

    def _check_open(self) -> None:
        if self._closed:
            raise InfrastructureError("the remote pool is closed")

    async def _choose(self, tried: set[Link]) -> Link:
        """The least loaded live server, of those not in `tried` if there is one. Raises `InfrastructureError` when none comes up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._connect_timeout):
                while True:
                    self._check_open()
                    live = [link for link in self._links if link.channel is not None]
                    if live:
                        return min([link for link in live if link not in tried] or live, key=lambda link: link.crowd)
                    self._up.clear()
                    await self._up.wait()
        raise InfrastructureError(f"no tool server can be reached: {self._troubles()}")

    def _troubles(self) -> str:
        return "; ".join(link.trouble for link in self._links)


def _too_long(frame: bytes, link: Link) -> ToolResult | None:
    if len(frame) - 4 <= link.max_frame:
        return None
    why = f"code and input are {len(frame) - 4} bytes long when they are sent; at most {link.max_frame} can be"
    return ToolResult(ToolStatus.REJECTED, stderr=why)
