"""Servers and their clients over real sockets, and what they make of each other's faults."""

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import stat
import subprocess
import sys
import time

import pytest

from rstar_jax.tools import wire
from rstar_jax.tools.base import Job
from rstar_jax.tools.isolation import Isolation
from rstar_jax.tools.python_tool import PythonTool
from rstar_jax.tools.remote import RemotePool
from rstar_jax.tools.server import ToolServer
from rstar_jax.types import InfrastructureError, ToolResult, ToolStatus, UserError

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKEN = "a token for tests"
STRONG = Isolation("ns-root", network=True, file_reads=True)
WEAK = Isolation("landlock", network=True, syscalls=True)
LIMIT = 20.0  # seconds that no test needs


class FakePool:
    """Runs code by the first word: `say X`, `wait` (until `release` is set), `hang`, `break` (an infrastructure error), `bug`."""

    def __init__(self, isolation=STRONG):
        self.isolation = isolation
        self.started = []  # the code of each call
        self.ended = []  # the code of each call that has ended, in any way
        self.arguments = []
        self.release = asyncio.Event()
        self.running = self.most = 0
        self.sessions = 0  # open
        self.seconds = 0.0  # that a call takes

    async def run(self, code, stdin=None, timeout=None):
        self.started.append(code)
        self.arguments.append((code, stdin, timeout))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._answer(code)
        finally:
            self.running -= 1
            self.ended.append(code)

    async def _answer(self, code):
        await asyncio.sleep(self.seconds)
        word, _, rest = code.partition(" ")
        if word == "wait":
            await self.release.wait()
        if word == "hang":
            await asyncio.Event().wait()
        if word == "break":
            raise InfrastructureError("the zygote died")
        if word == "bug":
            raise KeyError("no such thing")
        return ToolResult(ToolStatus.OK, stdout=rest, exit_code=0)

    async def run_many(self, jobs):
        return [await self.run(job.code, job.stdin, job.timeout) for job in jobs]

    @contextlib.asynccontextmanager
    async def session(self):
        self.sessions += 1
        try:
            yield FakeSession(self)
        finally:
            self.sessions -= 1


class FakeSession:
    """Answers with all cells so far."""

    def __init__(self, pool):
        self.pool = pool
        self.cells = []

    async def run(self, code, stdin=None, timeout=None):
        self.cells.append(code)
        result = await self.pool.run(code, stdin, timeout)
        return dataclasses.replace(result, stdout="|".join(self.cells))


def serve(pool, address="127.0.0.1:0", **settings):
    return ToolServer(pool, TOKEN, address, **{"concurrency": 4, "timeout_s": 5.0, "heartbeat_s": 0.05, "grace_s": 0.2, **settings})


def remote(*servers, token=TOKEN, **settings):
    addresses = [server if isinstance(server, str) else server.address for server in servers]
    return RemotePool(addresses, token, **{"connect_timeout": 2.0, "reconnect_s": 0.2, "grace_s": 5.0, **settings})


def run(coroutine):
    async def limited():
        async with asyncio.timeout(LIMIT):
            return await coroutine

    return asyncio.run(limited())


async def until(condition):
    """Wait until `condition()`; the limit of the test ends it."""
    while not condition():
        await asyncio.sleep(0.005)


class Raw:
    """A client that says what it likes."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, server, hello=True):
        raw = cls(*await asyncio.open_connection(*wire.parse_address(server.address)))
        if hello:
            raw.send({"hello": wire.VERSION, "token": TOKEN})
            assert (await raw.receive())["welcome"] == wire.VERSION
        return raw

    def send(self, message):
        self.writer.write(wire.encode(message))

    async def receive(self, *keys):
        """The next message that is not a heartbeat (with one of `keys`, if any are given), None at the end of the connection."""
        while True:
            try:
                size = int.from_bytes(await self.reader.readexactly(4), "big")
                message = json.loads(await self.reader.readexactly(size))
            except (asyncio.IncompleteReadError, ConnectionResetError):
                return None
            if message.keys() - {"load", "yours"} and (not keys or message.keys() & set(keys)):
                return message

    def close(self):
        self.writer.close()


# --- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_call_and_its_result_pass_unchanged(kind, tmp_path):
    full = ToolResult(ToolStatus.EXIT, "out é 漢 🎉 \x00 \ud800", "err \udcff", [1, "x", None], 3, 1.25, 0.5, True)

    class Pool(FakePool):
        async def _answer(self, code):
            return full

    async def go():
        pool = Pool()
        address = f"unix:{tmp_path / 'socket'}" if kind == "unix" else "localhost:0"
        async with serve(pool, address) as server, remote(server) as client:
            assert await client.run("a \udfff", "b \ud83d", 2.5) == full
            assert await client.run("c") == full
        return pool.arguments

    assert run(go()) == [("a \udfff", "b \ud83d", 2.5), ("c", "", 5.0)]


def test_a_unix_socket_is_for_its_owner_replaces_a_stale_one_and_is_removed(tmp_path):
    path = tmp_path / "socket"

    async def go():
        async with serve(FakePool(), f"unix:{path}") as server:
            assert server.address == f"unix:{path}"
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            with pytest.raises(UserError, match=r"cannot listen on unix:.*in use"):
                await serve(FakePool(), f"unix:{path}").__aenter__()
        assert not path.exists()
        listener, _ = await wire.listen(f"unix:{path}")
        listener.close()
        assert path.exists()
        async with serve(FakePool(), f"unix:{path}") as server, remote(server) as client:
            assert (await client.run("say again")).stdout == "again"

    run(go())


def test_the_python_tool_works_on_a_remote_pool_of_real_processes(shared):
    async def go():
        async with (
            ToolServer(shared.pool, TOKEN, heartbeat_s=0.2) as first,
            ToolServer(shared.pool, TOKEN, heartbeat_s=0.2) as second,
            remote(first, second) as client,
        ):
            result = await PythonTool(client).call({"code": "print(input()[::-1])", "input": "abc"})
            slow = await client.run("while True: pass", timeout=0.2)
            results = await client.run_many(Job(f"print({i})") for i in range(40))
            rejected = await client.run("x" * 200_000)
            return result, slow, results, rejected, client.isolation

    result, slow, results, rejected, isolation = shared.runner.run(go())
    assert (result.status, result.stdout) == (ToolStatus.OK, "cba\n")
    assert slow.status is ToolStatus.TIMEOUT and slow.seconds < 2
    assert [r.stdout for r in results] == [f"{i}\n" for i in range(40)]
    assert rejected.status is ToolStatus.REJECTED and "200000 bytes" in rejected.stderr
    assert isolation == shared.pool.isolation


def test_malformed_arguments_are_rejected_or_refused_before_they_are_sent():
    async def go():
        pool = FakePool()
        async with serve(pool, max_frame=5000) as server, remote(server) as client:
            assert (await client.run(b"x")).stderr == "code must be a string, not bytes"
            assert (await client.run("x", 1)).stderr == "input must be a string, not int"
            rejected = await client.run("x" * 6000)
            assert rejected.status is ToolStatus.REJECTED and "at most 5000 can be" in rejected.stderr
            for timeout in (0, -1, float("nan")):
                with pytest.raises(ValueError, match="must be positive"):
                    await client.run("x", timeout=timeout)
            assert (await client.run("say still here")).stdout == "still here"
        assert pool.started == ["say still here"]

    run(go())


def test_200_calls_at_once_over_two_servers_are_all_answered_and_bounded():
    async def go():
        pools = [FakePool(), FakePool()]
        for pool in pools:
            pool.seconds = 0.005
        async with serve(pools[0]) as first, serve(pools[1]) as second, remote(first, second) as client:
            results = await asyncio.gather(*(client.run(f"say {i}") for i in range(200)))
            assert [result.stdout for result in results] == [str(i) for i in range(200)]
            assert first.load == second.load == 0
        assert [pool.most for pool in pools] == [4, 4]
        assert [len(pool.started) for pool in pools] == [100, 100]

    run(go())


def test_run_many_keeps_the_order_and_takes_jobs_only_when_they_can_start():
    async def go():
        pool, taken = FakePool(), []

        def jobs():
            for i in range(30):
                taken.append(i)
                yield Job(f"say {i}" if i else "wait 0")

        async with serve(pool) as server, remote(server) as client:
            task = asyncio.create_task(client.run_many(jobs()))
            await until(lambda: "wait 0" in pool.started)
            assert len(taken) <= 4 + len(pool.ended)
            pool.release.set()
            assert [result.stdout for result in await task] == [str(i) for i in range(30)]

    run(go())


def test_the_least_loaded_server_is_chosen_with_the_calls_of_others_in_mind():
    async def go():
        pools = [FakePool(), FakePool(), FakePool()]
        async with (
            serve(pools[0]) as a,
            serve(pools[1]) as b,
            serve(pools[2], concurrency=40) as large,
            remote(a) as other,
            remote(a, b) as client,
        ):
            theirs = [asyncio.create_task(other.run("wait")) for _ in range(3)]
            await until(lambda: client._links[0].others == 3)
            mine = [asyncio.create_task(client.run("wait")) for _ in range(3)]
            await until(lambda: pools[1].running == 3)
            mine += [asyncio.create_task(client.run("wait")) for _ in range(2)]
            await until(lambda: pools[0].running == 4 and pools[1].running == 4)
            async with remote(a, large) as third:  # calls for each place count, not calls
                more = [asyncio.create_task(third.run("wait")) for _ in range(20)]
                await until(lambda: pools[2].running == 20)
                for pool in pools:
                    pool.release.set()
                await asyncio.gather(*theirs, *mine, *more)

    run(go())


# --- who may come ----------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_refused_with_one_line_and_disturbs_nobody():
    async def go():
        pool = FakePool()
        async with serve(pool) as server, remote(server) as client:
            call = asyncio.create_task(client.run("wait"))
            await until(lambda: pool.running)
            with pytest.raises(UserError) as caught:
                await remote(server, token="not it").__aenter__()
            assert str(caught.value) == f"tool server {server.address}: the token is wrong"
            for token in ("", None, 5, TOKEN + "x", "\ud800"):
                raw = await Raw.connect(server, hello=False)
                raw.send({"hello": wire.VERSION, "token": token})
                raw.send({"id": "1", "code": "say no"})
                assert "token" in (await raw.receive())["error"]
                assert await raw.receive() is None
                raw.close()
            pool.release.set()
            assert (await call).status is ToolStatus.OK
        assert pool.started == ["wait"]

    run(go())


def test_another_version_is_refused_by_either_side():
    async def welcome(reader, writer):
        writer.write(wire.encode({"welcome": 99}))

    async def go():
        async with serve(FakePool()) as server:
            raw = await Raw.connect(server, hello=False)
            raw.send({"hello": 99, "token": TOKEN})
            answer = await raw.receive()
            assert answer == {"error": f"the server speaks version {wire.VERSION}, not 99", "refused": True}
            raw.close()
        other = await asyncio.start_server(welcome, "127.0.0.1", 0)
        async with other:
            address = f"127.0.0.1:{other.sockets[0].getsockname()[1]}"
            with pytest.raises(UserError, match=f"^tool server {address}: it speaks version 99, this client version {wire.VERSION}$"):
                await remote(address).__aenter__()

    run(go())


@pytest.mark.parametrize(
    ("hello", "data", "error"),
    [
        (False, b"GET / HTTP/1.1\r\n\r\n", "too large"),
        (False, (70_000).to_bytes(4, "big"), "at most 65536"),  # before the token came
        (True, (70_000).to_bytes(4, "big") + b" " * 70_000, "not JSON"),  # after it came
        (True, (1 << 20).to_bytes(4, "big"), "a frame of 1048576 bytes is too large; at most 100000 are allowed"),
        (True, b"\0\0\0\1{", "not JSON"),
        (True, b"\0\0\0\0", "not JSON"),
        (True, b"\0\0\0\2\xff\xff", "not JSON"),
        (True, b"\0\0\0\2[]", "not a JSON object"),
        (True, (60_000).to_bytes(4, "big") + b"[" * 60_000, "not JSON"),
        (True, wire.encode({"what": 1}), "not known"),
        (True, wire.encode({"id": ["x"], "code": "say"}), "id must be a text"),
        (True, wire.encode({"id": "x", "code": 5}), "must be strings"),
        (True, wire.encode({"id": "x", "code": "say", "timeout": -1}), "positive"),
        (True, wire.encode({"cancel": {}}), "cancel must be a text"),
    ],
)
def test_what_is_no_request_ends_its_connection_with_an_error_and_no_other(hello, data, error):
    async def go():
        pool = FakePool()
        async with serve(pool, max_frame=100_000) as server, remote(server) as client:
            call = asyncio.create_task(client.run("wait"))
            await until(lambda: pool.running)
            raw = await Raw.connect(server, hello)
            raw.writer.write(data)
            answer = await raw.receive("error")
            assert error in answer["error"] and "\n" not in answer["error"]
            assert await raw.receive() is None
            raw.close()
            pool.release.set()
            assert (await call).status is ToolStatus.OK
        assert pool.started == ["wait"]

    run(go())


def test_a_connection_that_says_nothing_is_closed(monkeypatch):
    monkeypatch.setattr("rstar_jax.tools.server.HELLO_SECONDS", 0.05)

    async def go():
        async with serve(FakePool()) as server:
            raw = await Raw.connect(server, hello=False)
            assert "no token came" in (await raw.receive())["error"]
            assert await raw.receive() is None
            raw.close()

    run(go())


def test_tokens(tmp_path):
    file = tmp_path / "token"
    token = wire.read_or_make_token(file)
    assert len(token) > 30 and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert wire.read_or_make_token(file) == wire.read_token(file) == token
    assert wire.fingerprint(token) not in token and wire.fingerprint(token) != wire.fingerprint(wire.new_token())
    file.write_text(" \n")
    for make in (
        lambda: wire.read_token(file),
        lambda: wire.read_token(tmp_path / "none"),
        lambda: wire.read_or_make_token(tmp_path / "no" / "folder"),
        lambda: ToolServer(FakePool(), "", concurrency=1, timeout_s=1.0),
        lambda: RemotePool(["127.0.0.1:1"], " "),
        lambda: RemotePool(["127.0.0.1:1"], "x" * 100_000),
    ):
        with pytest.raises(UserError, match="token") as caught:
            make()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("address", ["", "host", "host:", "host:x", "host:70000", "host:-1", "unix:", "host:٣"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(UserError, match="address"):
        RemotePool([address], TOKEN)
    with pytest.raises(UserError, match="address"):
        serve(FakePool(), address)


@pytest.mark.parametrize(
    ("address", "parsed", "local"),
    [
        (":5", ("127.0.0.1", 5), True),
        ("[::1]:5", ("::1", 5), True),
        ("example.org:5", ("example.org", 5), False),
        ("unix:/a:1", "/a:1", True),
    ],
)
def test_addresses(address, parsed, local):
    assert wire.parse_address(address) == parsed
    assert wire.is_local(address) == local


def test_what_cannot_be_listened_on_is_one_line(tmp_path):
    async def go():
        async with serve(FakePool()) as server:
            for address in (server.address, "192.0.2.1:0", f"unix:{tmp_path}", f"unix:/{'x' * 200}", "no.such.host.invalid:0"):
                with pytest.raises(UserError, match="cannot listen on") as caught:
                    await serve(FakePool(), address).__aenter__()
                assert "\n" not in str(caught.value)

    run(go())


def test_addresses_that_are_not_there():
    async def go():
        with pytest.raises(UserError, match=r"no tool server can be reached: tool server 127.0.0.1:1: connection refused"):
            await remote("127.0.0.1:1", connect_timeout=0.3).__aenter__()
        for addresses in ([], "127.0.0.1:1", ["127.0.0.1:1", "127.0.0.1:1"]):
            with pytest.raises(UserError, match="address"):
                RemotePool(addresses, TOKEN)
        async with serve(FakePool()) as server, remote("127.0.0.1:1", server, connect_timeout=0.5) as client:
            assert (await client.run("say here")).stdout == "here"

    run(go())


def test_the_isolation_is_the_weakest_and_a_server_that_comes_later_must_keep_it():
    async def go():
        async with serve(FakePool(STRONG)) as strong, serve(FakePool(WEAK)) as weak:
            async with remote(strong, weak) as client:
                assert client.isolation == Isolation("landlock", network=True)
            async with remote(strong) as client:
                assert client.isolation == STRONG
            address = weak.address
        pool = FakePool(WEAK)
        async with serve(FakePool(STRONG)) as strong, remote(strong, address, connect_timeout=0.5) as client:
            async with serve(pool, address):
                await until(lambda: "it does not isolate file_reads" in client._links[1].trouble)
                assert [(await client.run(f"say {i}")).stdout for i in range(4)] == ["0", "1", "2", "3"]
            assert pool.started == []
            async with serve(FakePool(STRONG), address):
                await until(lambda: client._links[1].channel)

    run(go())


# --- the same id -----------------------------------------------------------------------------------------------------


def test_an_id_that_is_repeated_runs_once_and_has_one_result():
    async def go():
        pool = FakePool()
        async with serve(pool) as server:
            first, second = await Raw.connect(server), await Raw.connect(server)
            call = {"id": "1", "code": "wait done", "stdin": "", "timeout": None}
            first.send(call)
            assert (await first.receive())["started"] == 5.0
            second.send(call)  # it now belongs to the second connection
            assert (await second.receive())["started"] == 5.0
            pool.release.set()
            answer = await second.receive("result")
            assert answer["result"]["stdout"] == "done" and answer["load"] == 0
            first.send(call)  # it is finished, and remembered
            assert (await first.receive("result"))["result"] == answer["result"]
            first.send({**call, "code": "say another"})
            assert "used for two calls" in (await first.receive("error"))["error"]
            first.close()
            second.close()
        assert pool.started == ["wait done"]

    run(go())


def test_finished_results_are_remembered_up_to_a_bound_and_failures_are_not():
    async def go():
        pool = FakePool()
        async with serve(pool, remembered_bytes=3000) as server:
            raw = await Raw.connect(server)

            async def ask(key, code):
                raw.send({"id": key, "code": code})
                return await raw.receive("result", "failed")

            for key in ("old", "new"):
                await ask(key, f"say {'x' * 2000}")
            assert server._finished_bytes <= 3000
            await ask("new", f"say {'x' * 2000}")
            assert len(pool.started) == 2
            await ask("old", f"say {'x' * 2000}")
            assert len(pool.started) == 3
            for _ in range(2):
                assert (await ask("bad", "break"))["failed"] == "the zygote died"
            assert len(pool.started) == 5
            raw.close()

    run(go())


def test_a_connection_that_breaks_does_not_end_its_calls():
    async def go():
        pool = FakePool()
        async with serve(pool, grace_s=5.0) as server, remote(server) as client:
            calls = [asyncio.create_task(client.run(f"wait {i}")) for i in range(6)]  # four run, two wait
            await until(lambda: pool.running == 4)
            client._links[0].channel.abort("the cable was cut")
            await until(lambda: client._links[0].channel is None)
            await until(lambda: client._links[0].channel)
            pool.release.set()
            assert [result.stdout for result in await asyncio.gather(*calls)] == [str(i) for i in range(6)]
        assert len(pool.started) == 6

    run(go())


def test_a_result_that_came_while_the_connection_was_broken_is_handed_over():
    async def go():
        pool = FakePool()
        async with serve(pool, grace_s=5.0) as server, remote(server, reconnect_s=5.0) as client:
            call = asyncio.create_task(client.run("wait x"))
            await until(lambda: pool.running)
            client._links[0].channel.abort()
            pool.release.set()
            assert (await call).stdout == "x"
        assert pool.started == ["wait x"]

    run(go())


# --- faults ----------------------------------------------------------------------------------------------------------


def test_an_infrastructure_error_of_a_server_is_retried_on_another():
    class Broken(FakePool):
        async def _answer(self, code):
            raise InfrastructureError("the zygote died")

    async def go():
        bad, good = Broken(), FakePool()
        async with serve(bad, concurrency=100) as first, serve(good) as second, remote(first, second) as client:
            assert (await client.run("say x")).stdout == "x"
            assert (bad.started, good.started) == (["say x"], ["say x"])
        async with serve(bad) as first, remote(first, retries=2) as client:
            bad.started.clear()
            with pytest.raises(InfrastructureError, match=r"failed 3 times; the last time: tool server .*: the zygote died"):
                await client.run("say x")
            assert len(bad.started) == 3

    run(go())


def test_a_fault_in_a_pool_is_an_infrastructure_error_and_the_server_lives(caplog):
    async def go():
        async with serve(FakePool()) as server, remote(server, retries=0) as client:
            with pytest.raises(InfrastructureError, match="KeyError"):
                await client.run("bug")
            assert (await client.run("say x")).stdout == "x"

    run(go())


def test_a_result_that_cannot_be_sent_is_an_infrastructure_error():
    class Odd(FakePool):
        async def _answer(self, code):
            return ToolResult(ToolStatus.OK, stdout="x" * 5000) if code == "long" else ToolResult(ToolStatus.OK, value=object())

    async def go():
        async with serve(Odd(), max_frame=5000) as server, remote(server, retries=0) as client:
            with pytest.raises(InfrastructureError, match="the result is 5"):
                await client.run("long")
            with pytest.raises(InfrastructureError, match="TypeError"):
                await client.run("odd")

    run(go())


def test_a_server_that_closes_hands_its_calls_over_at_once():
    async def go():
        first, second = FakePool(), FakePool()
        async with (
            serve(second, concurrency=1) as b,
            serve(first, concurrency=100) as a,
            remote(a, b, reconnect_s=100.0) as client,
        ):
            call = asyncio.create_task(client.run("wait x"))
            await until(lambda: first.running)
            second.release.set()
            await a.__aexit__()
            assert (await call).stdout == "x"
            assert first.running == 0 and first.ended == ["wait x"]

    run(go())


@contextlib.asynccontextmanager
async def silent_server(after=("hello",)):
    """Welcomes, and says nothing more. Counts the connections."""
    connections = []

    async def handle(reader, writer):
        connections.append(writer)
        isolation = dataclasses.asdict(STRONG)
        about = {"instance": "1", "concurrency": 1000, "heartbeat": 0.02, "max_frame": 1 << 20, "load": 0}
        await reader.readexactly(4)
        writer.write(wire.encode({"welcome": wire.VERSION, "isolation": isolation, **about}))

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", connections
    finally:
        server.close()
        for writer in connections:
            writer.close()


def test_a_server_that_stops_answering_is_given_up():
    async def go():
        pool = FakePool()
        async with silent_server() as (silent, connections), serve(pool) as server, remote(silent, server, reconnect_s=LIMIT) as client:
            assert (await client.run("say x")).stdout == "x"
            assert len(connections) > 1  # it was asked again over a new connection first
        async with silent_server() as (silent, _), remote(silent, retries=1, reconnect_s=LIMIT) as client:
            with pytest.raises(InfrastructureError, match=r"failed 2 times; the last time: tool server .*time and again"):
                await client.run("say x")

    run(go())


def test_the_deadline_counts_run_time_and_not_queue_time():
    async def go():
        pool = FakePool()
        pool.seconds = 0.1
        async with serve(pool, concurrency=1) as server, remote(server, grace_s=0.4, retries=0) as client:
            results = await asyncio.gather(*(client.run(f"say {i}", timeout=0.05) for i in range(10)))  # the last waits for 0.9 s
            assert [result.stdout for result in results] == [str(i) for i in range(10)]
            start = time.monotonic()
            with pytest.raises(InfrastructureError, match="did not answer a call in time"):
                await client.run("hang", timeout=0.05)
            assert 0.4 < time.monotonic() - start < 5
            await until(lambda: pool.running == 0)  # it was cancelled on the server
            assert (await client.run("say next")).stdout == "next"

    run(go())


SERVER = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[1])
from rstar_jax.tools.isolation import Isolation
from rstar_jax.tools.server import ToolServer
from rstar_jax.types import ToolResult, ToolStatus

class Pool:
    isolation = Isolation("userns")
    calls = 0
    async def run(self, code, stdin=None, timeout=None):
        self.calls += 1
        await asyncio.sleep(float(code))
        return ToolResult(ToolStatus.OK, stdout=f"{os.getpid()} {self.calls}")

async def main():
    settings = {"concurrency": int(sys.argv[2]), "timeout_s": 5.0, "heartbeat_s": float(sys.argv[3])}
    async with ToolServer(Pool(), "a token for tests", **settings) as server:
        print(server.address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@contextlib.contextmanager
def server_processes(*concurrency, heartbeat_s=0.05):
    """Processes that serve a pool which answers `S` after S seconds with the process's pid and the number of calls so far."""
    command = [sys.executable, "-c", SERVER, str(ROOT)]
    settings = [[str(places), str(heartbeat_s)] for places in concurrency]
    processes = [subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True) for more in settings]
    try:
        yield processes, [process.stdout.readline().strip() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_the_calls_of_a_server_that_is_killed_or_stands_still_are_run_by_another(death):
    async def go(processes, addresses):
        async with remote(*addresses) as client:
            call = asyncio.create_task(client.run("0.3"))
            await until(lambda: [p.left for p in client._links[0].pending.values() if p.left is not None])  # it has started
            os.kill(processes[0].pid, death)
            result = await call
            more = await asyncio.gather(*(client.run("0") for _ in range(10)))
            return {r.stdout.split()[0] for r in [result, *more]}

    with server_processes(100, 1) as (processes, addresses):
        assert run(go(processes, addresses)) == {str(processes[1].pid)}


def test_a_loop_that_stands_still_is_not_taken_for_a_dead_server():
    async def go(addresses):
        async with remote(*addresses, retries=0) as client:
            call = asyncio.create_task(client.run("0.1", timeout=0.2))
            await until(lambda: client._links[0].pending)
            channel = client._links[0].channel
            time.sleep(1.5)  # more than the 5 heartbeats of 0.2 s after which a server counts as dead
            result = await call
            assert client._links[0].channel is channel
            return result.stdout

    with server_processes(4, heartbeat_s=0.2) as (processes, addresses):
        assert run(go(addresses)) == f"{processes[0].pid} 1"


# --- cancellation ----------------------------------------------------------------------------------------------------


def test_a_cancelled_call_ends_on_the_server_whether_it_runs_or_waits():
    async def go():
        pool = FakePool()
        async with serve(pool, concurrency=1) as server, remote(server) as client:
            running = asyncio.create_task(client.run("hang"))
            await until(lambda: pool.running)
            waiting = asyncio.create_task(client.run("say no"))
            await until(lambda: server.load == 2)
            for task in (waiting, running):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert (await client.run("say next")).stdout == "next"
            assert server.load == 0
        assert pool.started == ["hang", "say next"]

    run(go())


def test_a_client_that_goes_away_has_a_grace_and_one_that_closes_has_none():
    async def go():
        pool = FakePool()
        async with serve(pool, grace_s=0.2) as server:
            raw = await Raw.connect(server)
            raw.send({"id": "1", "code": "hang"})
            assert await raw.receive("started")
            start = time.monotonic()
            raw.close()
            await until(lambda: pool.running == 0)
            assert time.monotonic() - start > 0.2
        async with serve(pool, grace_s=100.0) as server:
            async with remote(server) as client:
                task = asyncio.create_task(client.run("hang"))
                await until(lambda: pool.running)
            with pytest.raises(InfrastructureError, match="the remote pool is closed"):
                await task
            await until(lambda: pool.running == 0)
            with pytest.raises(InfrastructureError, match="the remote pool is closed"):
                await client.run("say x")

    run(go())


# --- sessions --------------------------------------------------------------------------------------------------------


def test_a_session_keeps_its_state_on_one_server_and_ends_with_its_context():
    async def go():
        pools = [FakePool(), FakePool()]
        async with serve(pools[0]) as a, serve(pools[1]) as b, remote(a, b) as client:
            async with client.session() as one, client.session() as two:
                assert [pool.sessions for pool in pools] == [1, 1]
                assert (await one.run("a")).stdout == "a"
                assert (await two.run("b")).stdout == "b"
                results = await asyncio.gather(one.run("c"), one.run("d"))
                assert [result.stdout for result in results] == ["a|c", "a|c|d"]
                assert (await one.run(5)).status is ToolStatus.REJECTED
            await until(lambda: [pool.sessions for pool in pools] == [0, 0])

    run(go())


def test_a_session_outlives_its_connection_but_not_its_server():
    async def go():
        async with (
            serve(FakePool(), grace_s=LIMIT) as server,
            remote(server, retries=0, reconnect_s=LIMIT) as client,
            client.session() as session,
        ):
            await session.run("a")
            client._links[0].channel.abort()
            assert (await session.run("b")).stdout == "a|b"
            address = server.address
            await server.__aexit__()
            with pytest.raises(InfrastructureError):
                await session.run("c")
            async with serve(FakePool(), address):
                await until(lambda: client._links[0].channel)
                with pytest.raises(InfrastructureError, match="the session is not known here"):
                    await session.run("c")

    run(go())


def test_a_cell_that_failed_is_not_run_again():
    async def go():
        pool = FakePool()
        async with serve(pool) as server, remote(server, retries=5) as client, client.session() as session:
            with pytest.raises(InfrastructureError, match="the zygote died"):
                await session.run("break")
        assert pool.started == ["break"]

    run(go())


def test_the_sessions_of_a_client_that_is_gone_are_closed():
    async def go():
        pool = FakePool()
        async with serve(pool, grace_s=0.05) as server:
            raw = await Raw.connect(server)
            raw.send({"id": "1", "open": "s"})
            assert (await raw.receive("opened"))["opened"] == "s"
            assert pool.sessions == 1
            raw.close()
            await until(lambda: pool.sessions == 0)
            async with remote(server) as client, client.session():
                assert pool.sessions == 1
                await client.__aexit__()
                await until(lambda: pool.sessions == 0)

    run(go())


def test_a_session_that_cannot_be_opened_is_tried_elsewhere():
    class Closed(FakePool):
        def session(self):
            raise InfrastructureError("no room")

    async def go():
        good = FakePool()
        async with serve(Closed(), concurrency=100) as a, serve(good) as b:
            async with remote(a, b) as client, client.session() as session:
                assert (await session.run("x")).stdout == "x"
            async with remote(a, retries=1) as client:
                with pytest.raises(InfrastructureError, match=r"could not be opened in 2 attempts; the last time: .*no room"):
                    await client.session().__aenter__()

    run(go())
