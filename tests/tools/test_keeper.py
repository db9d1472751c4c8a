"""The keeper's loop alone, between two sockets."""

import signal
import socket

import pytest

from rstar_jax.tools import zygote
from rstar_jax.tools.keeper import Keeper


@pytest.fixture
def ends():
    """A keeper, and the other ends of its sockets."""
    owner, own_owner = socket.socketpair()
    other, own_other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own_other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    signal.alarm(30)  # a keeper that waits for a zygote would wait for ever
    with owner, own_owner, other, own_other:
        yield Keeper(own_owner, own_other, {"output_bytes": 100, "hard_output_bytes": 1000}, {}), owner, other
    signal.alarm(0)


class Numbered:
    def __init__(self, number):
        self.number = number


def test_requests_wait_for_a_zygote_that_does_not_listen_and_keep_their_order(ends):
    keeper, _, other = ends
    for number in range(1000):
        keeper.ask(zygote.KILL, Numbered(number))
    assert len(keeper.requests) > 500
    arrived = []
    while keeper.requests or len(arrived) < 1000:
        arrived.append(zygote.REQUEST.unpack(other.recv(zygote.REQUEST.size)))
        keeper.converse()
    assert arrived == [(zygote.KILL, number) for number in range(1000)]


def test_a_zygote_that_is_gone_is_noticed(ends):
    keeper, _, other = ends
    other.close()
    with pytest.raises(EOFError):
        keeper.converse()


def test_a_program_that_is_being_killed_is_not_killed_again(ends):
    keeper, _, other = ends
    program = keeper.spawn()
    for reason in ("output_limit", "timeout", "output_limit"):
        keeper.kill(program, reason)
    assert program.reason == "output_limit"
    packets = [other.recv(zygote.REQUEST.size) for _ in range(2)]
    assert packets == [zygote.REQUEST.pack(kind, program.number) for kind in (zygote.SPAWN, zygote.KILL)]
    other.setblocking(False)
    with pytest.raises(BlockingIOError):
        other.recv(1)
    program.close()


def test_a_slow_owner_is_not_waited_for(ends):
    keeper, owner, _ = ends
    for number in range(200):
        keeper.send({"id": number, "stdout": "x" * 10_000})
    assert keeper.outbox
    received = 0
    while keeper.outbox:
        received += len(owner.recv(1 << 20))
        keeper.flush()
    assert received > 1_000_000
