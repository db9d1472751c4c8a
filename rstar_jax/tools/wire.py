"""What a tool server and its clients say to each other: JSON objects, each behind its length in four bytes (big endian).

A client starts with `{"hello": VERSION, "token": ...}` and is answered with `welcome` or with one `error` and the end of the
connection. From then on it may send

    {"id", "code", "stdin", "timeout"}, with "session" for a cell of a session    answered by `started`, then `result` or `failed`
    {"id", "open": session}                                                       answered by `opened` or `failed`
    {"cancel": id}, {"attach": session}, {"close": session}, {"bye": true}        not answered

and every answer, and a heartbeat in between, holds the server's load. The same id may be sent again, on any connection: it stands
for the same call. Nothing is encrypted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import secrets
import socket
import stat
from collections.abc import Callable, Mapping
from typing import Any

from rstar_jax.config import TIERS
from rstar_jax.tools.isolation import PROMISES, Isolation
from rstar_jax.types import InfrastructureError, ToolResult, ToolStatus, UserError

VERSION = 1
MAX_FRAME = 32 << 20  # bytes; a program and its input of 1 MiB each are at most 12 MiB in JSON
HELLO_FRAME = 64 << 10  # bytes, of a peer that has not shown its token
UNIX = "unix:"


class WireError(Exception):
    """What the peer sent is not of this protocol. One line."""


def encode(message: Mapping[str, Any]) -> bytes:
    """A frame. Text may hold surrogates: everything but ASCII is escaped."""
    body = json.dumps(message).encode("ascii")
    return len(body).to_bytes(4, "big") + body


class Channel(asyncio.Protocol):
    """One end of a connection. `on_message(channel, message)` is called for each frame, and may raise `WireError`;
    `on_lost(channel)` once, when the connection has ended. `limit` bounds a received frame in bytes. What breaks the protocol is
    answered with an `error` and the end of the connection, and is kept in `trouble`.

    A peer that does not read is not read from either, so that what waits for it is bounded by what it has asked for.
    """

    def __init__(self, on_message: Callable[[Channel, dict[str, Any]], None], on_lost: Callable[[Channel], None], limit: int):
        self.limit = limit
        self.quiet = 0.0  # seconds, counted by the owner; every byte that arrives sets it to 0
        self.congested = False  # the peer does not read
        self.trouble = ""
        self.lost = asyncio.Event()
        self._on_message = on_message
        self._on_lost = on_lost
        self._inbox = bytearray()
        self._transport: asyncio.Transport | None = None

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: Mapping[str, Any]) -> None:
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Send what `encode` made. Nothing happens when the connection is ending: the owner hears of that from `on_lost`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def fail(self, trouble: str, **more: Any) -> None:
        """Tell the peer what it did wrong, and end the connection."""
        self.trouble = self.trouble or trouble
        self.send({"error": trouble, **more})
        self.close()

    def keep_alive(self) -> None:
        """Let the kernel notice within two minutes that the machine behind a TCP connection is gone."""
        peer = self._transport.get_extra_info("socket") if self._transport is not None else None
        if peer is None or peer.family not in (socket.AF_INET, socket.AF_INET6):
            return
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000)  # also while a heartbeat is not acknowledged

    def close(self) -> None:
        """End the connection after what has been sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self, trouble: str = "") -> None:
        """End the connection now."""
        self.trouble = self.trouble or trouble
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.trouble = self.trouble or (str(error) if error else "the connection was closed")
        self.lost.set()
        self._on_lost(self)

    def pause_writing(self) -> None:
        self.congested = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self.congested = False
        if self._transport is not None:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self.quiet = 0.0
        self._inbox += data
        while self.open and len(self._inbox) >= 4:
            size = int.from_bytes(self._inbox[:4], "big")
            if size > self.limit:
                self.fail(f"a frame of {size} bytes is too large; at most {self.limit} are allowed")
                return
            if len(self._inbox) < 4 + size:
                return
            body = bytes(self._inbox[4 : 4 + size])
            del self._inbox[: 4 + size]
            try:
                self._on_message(self, _decode(body))
            except WireError as error:
                self.fail(str(error))


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        raise WireError("a frame is not JSON") from None
    if not isinstance(message, dict):
        raise WireError("a frame is not a JSON object")
    return message


# --- values ----------------------------------------------------------------------------------------------------------


def pack_result(result: ToolResult) -> dict[str, Any]:
    """`result` as JSON values, if its `value` is one."""
    return {field.name: getattr(result, field.name) for field in dataclasses.fields(ToolResult)}


def unpack_result(fields: Any) -> ToolResult:
    """What `pack_result` made. Raises `InfrastructureError` when it is something else."""
    try:
        return ToolResult(**{**fields, "status": ToolStatus(fields["status"])})
    except (TypeError, KeyError, ValueError) as error:
        raise InfrastructureError(f"a tool server sent a result that cannot be read: {error}") from None


def unpack_isolation(fields: Any) -> Isolation:
    """`dataclasses.asdict(isolation)` of the peer. A promise that it does not mention is not kept."""
    if not isinstance(fields, dict) or not isinstance(fields.get("tier"), str):
        raise WireError("the isolation of the tool server cannot be read")
    return Isolation(fields["tier"], **{name: fields.get(name) is True for name in PROMISES})


def weakest(isolations: list[Isolation]) -> Isolation:
    """The weakest tier of `isolations` (one that is not known is the weakest), and the promises that all of them keep."""
    names = [isolation.tier for isolation in isolations]
    tier = max(names, key=lambda name: TIERS.index(name) if name in TIERS else len(TIERS))
    return Isolation(tier, **{name: all(getattr(isolation, name) for isolation in isolations) for name in PROMISES})


# --- tokens ----------------------------------------------------------------------------------------------------------


def check_token(token: str) -> str:
    """`token`. Raises `UserError` when it cannot serve as one."""
    if not isinstance(token, str) or not token.strip():
        raise UserError("the token of a tool server is empty; give a long random text, or a file that holds one")
    if len(encode({"hello": VERSION, "token": token})) > HELLO_FRAME:
        raise UserError(f"the token of a tool server is {len(token)} characters long; {HELLO_FRAME // 16} are plenty")
    return token


def new_token() -> str:
    """A random token."""
    return secrets.token_urlsafe(32)


def fingerprint(token: str) -> str:
    """Eight characters that tell tokens apart and from which nothing of the token can be derived: for logs."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def read_token(file: pathlib.Path) -> str:
    """The token in `file`, without the white space around it. Raises `UserError`."""
    try:
        return check_token(file.read_text().strip())
    except OSError as error:
        raise UserError(f"the token file {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"the token file {file} holds no text") from None
    except UserError:
        raise UserError(f"the token file {file} is empty or too long; write a long random text to it") from None


def read_or_make_token(file: pathlib.Path) -> str:
    """The token in `file`, which is made with a new one when it does not exist, for its owner only. Raises `UserError`."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_token(file)
    except OSError as error:
        raise UserError(f"the token file {file} cannot be made: {error.strerror}") from None
    token = new_token()
    with os.fdopen(descriptor, "w") as stream:
        stream.write(f"{token}\n")
    return token


# --- addresses -------------------------------------------------------------------------------------------------------


def parse_address(address: str) -> tuple[str, int] | str:
    """(host, port), or the path behind `unix:`. An empty host is the loopback. Raises `UserError`."""
    if address.startswith(UNIX):
        if path := address.removeprefix(UNIX):
            return path
        raise UserError(f"address {address!r} names no file; expected unix:/path")
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not separator or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UserError(f"address {address!r} is not HOST:PORT (port 0 to 65535) and not unix:/path")
    return host or "127.0.0.1", int(port)


def is_local(address: str) -> bool:
    """Whether only processes of this machine can reach `address`."""
    parsed = parse_address(address)
    return isinstance(parsed, str) or parsed[0] in ("localhost", "::1") or parsed[0].startswith("127.")


async def connect(address: str, channel: Channel) -> None:
    """Connect `channel`. Raises `OSError`."""
    loop, parsed = asyncio.get_running_loop(), parse_address(address)
    if isinstance(parsed, str):
        await loop.create_unix_connection(lambda: channel, parsed)
    else:
        await loop.create_connection(lambda: channel, *parsed)


def explain(error: OSError) -> str:
    """What `error` says, without the address that asyncio writes into it."""
    number = error.errno
    return os.strerror(number).lower() if number is not None and number in errno.errorcode else str(error)


async def listen(address: str) -> tuple[socket.socket, str]:
    """A socket that listens, and its address with the port that it has. A unix socket is for its owner only, and takes the place of
    one that nobody listens on. Raises `UserError`."""
    parsed = parse_address(address)
    try:
        return _listen_unix(parsed) if isinstance(parsed, str) else await _listen_tcp(*parsed)
    except OSError as error:
        raise UserError(f"cannot listen on {address}: {explain(error)}") from None


async def _listen_tcp(host: str, port: int) -> tuple[socket.socket, str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, place = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener, f"[{host}]:{listener.getsockname()[1]}" if ":" in host else f"{host}:{listener.getsockname()[1]}"


def _listen_unix(path: str) -> tuple[socket.socket, str]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.setblocking(False)
        listener.bind(path)
        os.chmod(path, 0o600)  # nobody can connect before the next line
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener, f"{UNIX}{path}"


def _remove_stale(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return  # binding says that the file exists
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
