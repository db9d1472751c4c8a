"""A pool for other hosts: `async with ToolServer(pool, token, "10.0.0.5:7077"): await stopped.wait()`.

Clients are `remote.RemotePool`s; what is said stands in `wire.py`. A call is known by its id, which the client chooses: a client whose
connection broke comes back, sends the same id again, and gets the result of the same one execution.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import socket
import uuid
from typing import Any

from absl import logging

from rstar_jax.config import ToolConfig
from rstar_jax.tools import wire
from rstar_jax.tools.base import HeldSession, Runner, Session
from rstar_jax.tools.wire import Channel, WireError
from rstar_jax.types import InfrastructureError, ToolResult, ToolStatus

HELLO_SECONDS = 10.0  # for a new connection to show its token
CLOSE_SECONDS = 1.0  # for what has been sent to leave
MAX_SESSIONS = 4096  # open at a time
LONGEST_ID = 100  # characters


class _Owned:
    """What belongs to a client. Without one, it is given up when `timer` ends."""

    def __init__(self, key: str):
        self.key = key
        self.owner: _Client | None = None
        self.timer: asyncio.TimerHandle | None = None

    def pass_to(self, client: _Client | None) -> None:
        """Make `client` the owner, in the place of the one there is."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.owner is not None:
            self.owner.owned.discard(self)
            self.owner.calls -= isinstance(self, _Call)
        self.owner = client
        if client is not None:
            client.owned.add(self)
            client.calls += isinstance(self, _Call)


class _Call(_Owned):
    """A request that is not answered yet."""

    def __init__(self, key: str, digest: bytes):
        super().__init__(key)
        self.digest = digest  # of the request
        self.task: asyncio.Task[None] | None = None
        self.started: float | None = None  # the seconds that it may run, from when it has a place in the pool


class _Session(_Owned):
    def __init__(self, key: str, held: HeldSession):
        super().__init__(key)
        self.held = held
        self.seconds = 0.0  # that its cells took: a pool may have to run them again before the next one


@dataclasses.dataclass(frozen=True)
class _Finished:
    digest: bytes
    reply: dict[str, Any]
    size: int


class _Client:
    """One connection."""

    def __init__(self, server: ToolServer):
        self.channel = Channel(lambda _, message: server._receive(self, message), lambda _: server._lost(self), wire.HELLO_FRAME)
        self.owned: set[_Owned] = set()
        self.calls = 0  # among them
        self.welcome = False  # has shown the token
        self.leaving = False  # will not come back


class ToolServer:
    """Serves `pool` at `address` ("host:port" with port 0 for any, the loopback when the host is empty; or "unix:/path", for its
    owner only) to clients that know `token`.

    At most `concurrency` calls are in the pool at a time (None: the pool's own); the others wait here, in order. `timeout_s`: what a
    call may run that names no timeout (None: the pool's own). Each client hears something every `heartbeat_s`. What belongs to a
    client whose connection broke is ended after `grace_s`; what a client has closed ends at once. `remembered_bytes` bounds the
    finished results that are kept for clients that come back; `max_frame` bounds a frame.

    Whoever knows the token can run programs. Nothing is encrypted: use a network that you trust.
    """

    def __init__(
        self,
        pool: Runner,
        token: str,
        address: str = "127.0.0.1:0",
        *,
        concurrency: int | None = None,
        timeout_s: float | None = None,
        heartbeat_s: float = 2.0,
        grace_s: float = 10.0,
        max_frame: int = wire.MAX_FRAME,
        remembered_bytes: int = 64 << 20,
    ):
        config: ToolConfig | None = getattr(pool, "config", None)
        if config is not None:
            concurrency = config.concurrency if concurrency is None else concurrency
            timeout_s = config.timeout_s if timeout_s is None else timeout_s
        if concurrency is None or timeout_s is None:
            raise ValueError("a pool without a config needs concurrency and timeout_s")
        self._pool = pool
        self._token = wire.check_token(token).encode("utf-8", "surrogatepass")
        self._address = address
        wire.parse_address(address)
        self._concurrency = concurrency
        self._timeout = timeout_s
        self._heartbeat = heartbeat_s
        self._grace = grace_s
        self._max_frame = max_frame
        self._remembered_bytes = remembered_bytes
        self._instance = uuid.uuid4().hex
        self._gate = asyncio.Semaphore(self._concurrency)
        self._clients: set[_Client] = set()
        self._calls: dict[str, _Call] = {}
        self._sessions: dict[str, _Session] = {}
        self._finished: collections.OrderedDict[str, _Finished] = collections.OrderedDict()
        self._finished_bytes = 0
        self._closings: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """Where it listens, in the form that `RemotePool` takes."""
        return self._address

    @property
    def load(self) -> int:
        """Calls that run or wait."""
        return len(self._calls)

    async def __aenter__(self) -> ToolServer:
        """Listen. Raises `UserError` when that is not possible at this address."""
        loop = asyncio.get_running_loop()
        listener, self._address = await wire.listen(self._address)
        self._path = listener.getsockname() if listener.family == socket.AF_UNIX else ""
        if self._path:
            self._inode = os.stat(self._path).st_ino
            self._server: asyncio.Server = await loop.create_unix_server(self._accept, sock=listener)
        else:
            self._server = await loop.create_server(self._accept, sock=listener)
        self._beat = asyncio.create_task(self._beats())
        return self

    async def __aexit__(self, *error: object) -> None:
        """Tell the clients, and end every call and session."""
        self._server.close()
        if self._path:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._path).st_ino == self._inode:
                    os.unlink(self._path)
        self._beat.cancel()
        clients = list(self._clients)
        for client in clients:
            if client.welcome:
                client.channel.send({"bye": True})
            client.channel.close()
        tasks = [call.task for call in self._calls.values() if call.task is not None]
        for key in list(self._calls):
            self._cancel(key)
        for key in list(self._sessions):
            self._close_session(key)
        await asyncio.gather(self._beat, *tasks, *self._closings, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                for client in clients:
                    await client.channel.lost.wait()
        for client in clients:
            client.channel.abort()

    # --- connections -------------------------------------------------------------------------------------------------

    def _accept(self) -> Channel:
        client = _Client(self)
        self._clients.add(client)
        asyncio.get_running_loop().call_later(HELLO_SECONDS, self._expect_hello, client)
        return client.channel

    def _expect_hello(self, client: _Client) -> None:
        if not client.welcome and client.channel.open:
            client.channel.fail(f"no token came within {HELLO_SECONDS:.0f} s")

    def _hello(self, client: _Client, message: dict[str, Any]) -> None:
        token = message.get("token")
        given = token.encode("utf-8", "surrogatepass") if isinstance(token, str) else b""
        if not hmac.compare_digest(given, self._token):
            logging.warning("tool server %s: a client came without the token", self._address)
            client.channel.fail("the token is wrong", refused=True)
        elif message.get("hello") != wire.VERSION:
            client.channel.fail(f"the server speaks version {wire.VERSION}, not {message.get('hello')!r}", refused=True)
        else:
            client.welcome = True
            client.channel.limit = self._max_frame
            client.channel.keep_alive()
            about = {
                "welcome": wire.VERSION,
                "instance": self._instance,
                "isolation": dataclasses.asdict(self._pool.isolation),
                "concurrency": self._concurrency,
                "heartbeat": self._heartbeat,
                "max_frame": self._max_frame,
            }
            client.channel.send({**about, **self._load(client)})

    def _lost(self, client: _Client) -> None:
        self._clients.discard(client)
        grace = 0.0 if client.leaving else self._grace
        for owned in sorted(client.owned, key=lambda owned: isinstance(owned, _Session)):  # cells before their sessions
            owned.pass_to(None)
            owned.timer = asyncio.get_running_loop().call_later(grace, self._give_up, owned)

    def _give_up(self, owned: _Owned) -> None:
        if isinstance(owned, _Call):
            self._cancel(owned.key)
        else:
            self._close_session(owned.key)

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat)
            for client in self._clients:
                if client.welcome and not client.channel.congested:
                    client.channel.send(self._load(client))

    def _load(self, client: _Client) -> dict[str, int]:
        return {"load": len(self._calls), "yours": client.calls}

    # --- requests ----------------------------------------------------------------------------------------------------

    def _receive(self, client: _Client, message: dict[str, Any]) -> None:
        if not client.welcome:
            self._hello(client, message)
        elif "id" in message:
            self._request(client, message)
        elif "cancel" in message:
            self._cancel(_text(message, "cancel"))
        elif "attach" in message:
            if session := self._sessions.get(_text(message, "attach")):
                session.pass_to(client)
        elif "close" in message:
            self._close_session(_text(message, "close"))
        elif "bye" in message:
            client.leaving = True
            client.channel.close()
        elif "error" in message:
            raise WireError("the client found an error")
        else:
            raise WireError(f"a request with the keys {', '.join(sorted(message))[:200]} is not known")

    def _request(self, client: _Client, message: dict[str, Any]) -> None:
        request = _Request.read(message)
        digest = request.digest()
        if finished := self._finished.get(request.id):
            self._finished.move_to_end(request.id)
            if finished.digest != digest:
                raise WireError("an id was used for two calls")
            client.channel.send({"id": request.id, **finished.reply, **self._load(client)})
        elif call := self._calls.get(request.id):
            if call.digest != digest:
                raise WireError("an id was used for two calls")
            call.pass_to(client)
            if call.started is not None:
                client.channel.send({"id": call.key, "started": call.started})
        else:
            call = self._calls[request.id] = _Call(request.id, digest)
            call.pass_to(client)
            call.task = asyncio.create_task(self._serve(call, request))

    async def _serve(self, call: _Call, request: _Request) -> None:
        try:
            if request.open is not None:
                reply = await self._open_session(call, request.open)
            else:
                reply = {"result": wire.pack_result(await self._run(call, request))}
            size = len(wire.encode(reply))
        except InfrastructureError as error:
            reply, size = {"failed": str(error)}, 0
        except asyncio.CancelledError:
            self._finish(call, {"failed": "the call was cancelled on the server"}, 0)  # unless the client asked for it
            raise
        except Exception as error:  # whatever the pool does, the client has to hear of it
            logging.exception("tool server %s: a call failed", self._address)
            reply, size = {"failed": f"{type(error).__name__}: {error}"}, 0
        if size > self._max_frame - 1024:
            reply, size = {"failed": f"the result is {size} bytes long; at most {self._max_frame - 1024} can be sent"}, 0
        self._finish(call, reply, size)

    async def _run(self, call: _Call, request: _Request) -> ToolResult:
        if request.session is None:
            result = await self._place(call, self._pool, request, 0.0)
        elif session := self._sessions.get(request.session):
            if call.owner is not None:
                session.pass_to(call.owner)
            async with session.held.lock:
                result = await self._place(call, await session.held.opened(), request, session.seconds)
            session.seconds += result.seconds
        else:
            raise InfrastructureError("the session is not known here: it was closed, or its server was started again")
        if result.status is ToolStatus.INFRA_ERROR:
            raise InfrastructureError(result.stderr or "the call failed")
        return result

    async def _place(self, call: _Call, runner: Runner | Session, request: _Request, before: float) -> ToolResult:
        """Wait for a place, tell the client that its time runs (with `before` seconds more), and run."""
        async with self._gate:
            timeout = self._timeout if request.timeout is None else request.timeout
            call.started = timeout + before
            if call.owner is not None:
                call.owner.channel.send({"id": call.key, "started": call.started})
            return await runner.run(request.code, request.stdin, timeout)

    async def _open_session(self, call: _Call, key: str) -> dict[str, Any]:
        if len(self._sessions) >= MAX_SESSIONS:
            raise InfrastructureError(f"{MAX_SESSIONS} sessions are open already")
        if key in self._sessions:
            raise InfrastructureError("the session is open already")
        session = self._sessions[key] = _Session(key, HeldSession(self._pool))
        try:
            await session.held.opened()
        except BaseException:
            self._close_session(key)
            raise
        if call.owner is not None:
            session.pass_to(call.owner)
        else:
            session.timer = asyncio.get_running_loop().call_later(self._grace, self._give_up, session)
        return {"opened": key}

    def _close_session(self, key: str) -> None:
        if session := self._sessions.pop(key, None):
            session.pass_to(None)
            task = asyncio.create_task(self._end_session(session))
            self._closings.add(task)
            task.add_done_callback(self._closings.discard)

    async def _end_session(self, session: _Session) -> None:
        try:
            await session.held.close()
        except Exception:
            logging.exception("tool server %s: a session did not end well", self._address)

    def _cancel(self, key: str) -> None:
        """End a call that nobody waits for."""
        if call := self._calls.pop(key, None):
            call.pass_to(None)
            if call.task is not None:
                call.task.cancel()

    def _finish(self, call: _Call, reply: dict[str, Any], size: int) -> None:
        """Answer, and keep the answer if `size` (bytes) is not 0."""
        if self._calls.get(call.key) is not call:
            return  # given up
        client = call.owner
        call.pass_to(None)
        del self._calls[call.key]
        if 0 < size <= self._remembered_bytes:
            self._finished[call.key] = _Finished(call.digest, reply, size)
            self._finished_bytes += size
            while self._finished_bytes > self._remembered_bytes:
                self._finished_bytes -= self._finished.popitem(last=False)[1].size
        if client is not None:
            client.channel.send({"id": call.key, **reply, **self._load(client)})


@dataclasses.dataclass(frozen=True)
class _Request:
    id: str
    code: str = ""
    stdin: str = ""
    timeout: float | None = None
    session: str | None = None
    open: str | None = None

    @classmethod
    def read(cls, message: dict[str, Any]) -> _Request:
        """Raises `WireError` when `message` is no request."""
        if "open" in message:
            return cls(_text(message, "id"), open=_text(message, "open"))
        code, stdin, timeout = message.get("code"), message.get("stdin"), message.get("timeout")
        session = None if message.get("session") is None else _text(message, "session")
        if not isinstance(code, str) or not isinstance(stdin, str | None):
            raise WireError("code and stdin must be strings")
        if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
            raise WireError("timeout must be a positive number")
        return cls(_text(message, "id"), code, stdin or "", timeout, session)

    def digest(self) -> bytes:
        """Differs between two requests that differ."""
        return hashlib.blake2b(json.dumps(dataclasses.astuple(self)).encode(), digest_size=16).digest()


def _text(message: dict[str, Any], key: str) -> str:
    value = message[key]
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_ID:
        raise WireError(f"{key} must be a text of 1 to {LONGEST_ID} characters")
    return value
