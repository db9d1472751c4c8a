"""A client's side of one tool server: connect, and connect again; send requests, and send them again; notice silence and lost calls."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

from absl import logging

from rstar_jax.tools import wire
from rstar_jax.tools.isolation import Isolation
from rstar_jax.tools.wire import Channel, WireError
from rstar_jax.types import InfrastructureError, UserError

SILENT_HEARTBEATS = 5.0  # without a byte: the server counts as dead
RESENDS = 3  # of one call to one server, over new connections, before another server is asked
FIRST_DELAY, LONGEST_DELAY = 0.05, 5.0  # seconds between attempts to connect


class Refused(UserError):
    """The server is there, and will not serve this client."""


class Pending:
    """A request that is not answered yet. `left`: seconds until it counts as lost, None while it waits in the server's queue."""

    def __init__(self, key: str, frame: bytes, left: float | None):
        self.key = key
        self.frame = frame
        self.left = left
        self.sent = 0
        self.future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    def fail(self, reason: str) -> None:
        if not self.future.done():
            self.future.set_exception(InfrastructureError(reason))


class Link:
    """One server, connected or not."""

    def __init__(self, address: str, token: str, up: asyncio.Event, connect_timeout: float, grace_s: float, reconnect_s: float):
        self.address = address
        self.channel: Channel | None = None  # of a connection that was welcomed
        self.answered = asyncio.Event()  # the server has welcomed or refused this client
        self.refusal: UserError | None = None
        self.trouble = "no answer yet"
        self.isolation: Isolation | None = None
        self.floor: Isolation | None = None  # what the server must not fall short of
        self.concurrency = 1
        self.others = 0  # calls of other clients
        self.max_frame = wire.MAX_FRAME
        self.pending: dict[str, Pending] = {}
        self.sessions: set[str] = set()
        self._instance = ""
        self._token = token
        self._up = up  # set by each welcome
        self._connect_timeout = connect_timeout
        self._grace = grace_s
        self._reconnect = reconnect_s
        self._heartbeat = 1.0
        self._hope: asyncio.TimerHandle | None = None  # while the connection that broke may be there again

    # --- connecting --------------------------------------------------------------------------------------------------

    async def maintain(self) -> None:
        """Connect, and connect again, until it is cancelled."""
        delay = FIRST_DELAY
        while True:
            try:
                channel = await self._connect()
            except Refused as error:
                self._trouble(str(error))
                self.refusal = error
                self.answered.set()
            except (OSError, TimeoutError, WireError) as error:
                no_answer = f"no answer within {self._connect_timeout:.3g} s"
                why = wire.explain(error) if isinstance(error, OSError) and not isinstance(error, TimeoutError) else str(error)
                self._trouble(f"tool server {self.address}: {why or no_answer}")
            else:
                delay = FIRST_DELAY
                await self._watch(channel)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, LONGEST_DELAY)

    def _trouble(self, trouble: str) -> None:
        if trouble != self.trouble:
            logging.warning("%s", trouble)
        self.trouble = trouble

    async def _connect(self) -> Channel:
        answer: asyncio.Future[tuple[dict[str, Any], str]] = asyncio.get_running_loop().create_future()

        def receive(channel: Channel, message: dict[str, Any]) -> None:
            if not answer.done():
                answer.set_result((message, self._welcome(channel, message)))  # before the next message is looked at
            elif channel is self.channel:
                self._receive(channel, message)

        def lost(channel: Channel) -> None:
            if not answer.done():
                answer.set_exception(WireError(channel.trouble))
            elif channel is self.channel:
                self._lost(channel)

        channel = Channel(receive, lost, wire.MAX_FRAME)
        try:
            async with asyncio.timeout(self._connect_timeout):
                await wire.connect(self.address, channel)
                channel.send({"hello": wire.VERSION, "token": self._token})
                message, complaint = await answer
            if "error" in message and not message.get("refused"):
                raise WireError(complaint)
            if complaint:
                raise Refused(f"tool server {self.address}: {complaint}")
        except BaseException:
            channel.abort()
            raise
        return channel

    def _welcome(self, channel: Channel, message: dict[str, Any]) -> str:
        """Take the connection into use, or say why not."""
        if "error" in message:
            return str(message["error"])[:500]
        try:
            if message.get("welcome") != wire.VERSION:
                raise WireError(f"it speaks version {message.get('welcome')!r}, this client version {wire.VERSION}")
            isolation = wire.unpack_isolation(message.get("isolation"))
            if self.floor is not None and (lost := set(self.floor.promises) - set(isolation.promises)):
                raise WireError(f"it does not isolate {', '.join(sorted(lost))}, as the other servers did when the pool was opened")
            concurrency, max_frame = int(message["concurrency"]), int(message["max_frame"])
            heartbeat, instance = float(message["heartbeat"]), str(message["instance"])
        except (WireError, KeyError, TypeError, ValueError) as error:
            return str(error) if isinstance(error, WireError) else f"it is no tool server: {error!r}"
        restarted = instance != self._instance
        self.concurrency, self.max_frame, self._heartbeat = max(concurrency, 1), max_frame, heartbeat
        self.isolation, self._instance, self.channel, self.refusal = isolation, instance, channel, None
        channel.limit = max_frame
        channel.keep_alive()
        self._stop_hoping()
        for session in self.sessions:
            channel.send({"attach": session})
        for pending in list(self.pending.values()):
            if restarted:
                pending.fail(f"tool server {self.address} was started again")
            else:
                self._submit(pending)
        self._load(message)
        self.answered.set()
        self._up.set()
        return ""

    def _lost(self, channel: Channel) -> None:
        self.channel = None
        self._trouble(f"tool server {self.address}: {channel.trouble}")
        self._hope = asyncio.get_running_loop().call_later(self._reconnect, self._fail_all)

    def _stop_hoping(self) -> None:
        if self._hope is not None:
            self._hope.cancel()
            self._hope = None

    def leave(self, trouble: str) -> None:
        """Tell the server that this client will not come back."""
        self.trouble = trouble
        if self.channel is not None:
            channel, self.channel = self.channel, None
            channel.send({"bye": True})
            channel.close()
        self._fail_all()

    def _fail_all(self) -> None:
        """Fail what waits for an answer."""
        self._stop_hoping()
        for pending in self.pending.values():
            pending.fail(self.trouble)

    async def _watch(self, channel: Channel) -> None:
        """Until the connection is lost: count how long the server has been silent, and how long calls have been running.

        A loop that stood still counts as one tick, whatever the clock says: what arrived meanwhile is read first."""
        loop, tick = asyncio.get_running_loop(), self._heartbeat / 2
        before = loop.time()
        while not channel.lost.is_set():
            with contextlib.suppress(TimeoutError):  # wait_for of Python 3.11 can lose a cancellation
                async with asyncio.timeout(tick):
                    await channel.lost.wait()
            now = loop.time()
            elapsed, before = min(now - before, 2 * tick), now
            channel.quiet += elapsed
            if channel.quiet > SILENT_HEARTBEATS * self._heartbeat:
                channel.abort(f"nothing was heard of it for {channel.quiet:.3g} s")
            for pending in list(self.pending.values()):
                if pending.left is not None:
                    pending.left -= elapsed
                    if pending.left <= 0:
                        pending.fail(f"tool server {self.address} did not answer a call in time")
                        channel.send({"cancel": pending.key})

    # --- talking -----------------------------------------------------------------------------------------------------

    async def ask(self, key: str, frame: bytes, left: float | None = None) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises `InfrastructureError`."""
        pending = self.pending[key] = Pending(key, frame, left)
        if self.channel is None and self._hope is None:
            pending.fail(self.trouble)
        self._submit(pending)
        try:
            answer = await pending.future
        except asyncio.CancelledError:
            self.tell({"cancel": key})
            raise
        finally:
            del self.pending[key]
        if "failed" in answer:
            raise InfrastructureError(f"tool server {self.address}: {answer['failed']}")
        return answer

    def tell(self, message: dict[str, Any]) -> None:
        """Send what is not answered, if the server is there to hear it."""
        if self.channel is not None:
            self.channel.send(message)

    def _submit(self, pending: Pending) -> None:
        if self.channel is None:
            return  # it is sent with the next welcome
        pending.sent += 1
        if pending.sent > 1 + RESENDS:
            pending.fail(f"{self.trouble} (time and again during one call)")
        else:
            self.channel.send_frame(pending.frame)

    def _receive(self, channel: Channel, message: dict[str, Any]) -> None:
        self._load(message)
        if "bye" in message:
            channel.abort("it is shutting down")
            self._trouble(f"tool server {self.address}: it is shutting down")
            self.channel = None
            self._fail_all()
        elif "error" in message:
            channel.abort(str(message["error"])[:500])
        elif pending := self.pending.get(str(message.get("id"))):
            if "started" in message:
                pending.left = float(message["started"]) + self._grace
            elif not pending.future.done():
                pending.future.set_result(message)

    def _load(self, message: dict[str, Any]) -> None:
        if "load" in message:
            self.others = max(0, int(message["load"]) - int(message.get("yours", 0)))

    @property
    def crowd(self) -> tuple[float, int]:
        """What to choose the smallest of: calls for each place with one call more, then sessions."""
        return (self.others + len(self.pending) + 1) / self.concurrency, len(self.sessions)
