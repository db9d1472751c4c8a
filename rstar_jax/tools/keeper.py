"""The process that keeps a zygote's calls: it takes jobs, hands them to children, drains their output, keeps their deadlines, reports.

It is started with exec and never by a fork of the trainer (a fork of a process that runs JAX deadlocks); it forks one process, the
zygote (`zygote.py`), and nothing of a call ever enters that one's memory. It uses the standard library alone and has one thread. It
talks to its owner over one stream socket in frames of JSON (4 bytes of length, big endian, then the body):

    owner -> keeper   the settings, once; then {"id", "code", "stdin", "timeout", "session"} for a call or (session: a number, not
                      null) a cell, {"cancel": id} to kill one, {"close": session} to end one
    keeper -> owner   {"ready", "promises"}, {"refused": why} or {"unavailable": why}; then for each call {"id", "code", "reason",
                      "note", "seconds", "cpu_seconds", "stdout", "stderr", "truncated", "alive", "ready", "started"}, or {"id",
                      "failed": why} when it could not be run

A busy event loop in the trainer delays neither a deadline nor output. When the trainer dies, however, the socket closes, and the keeper
lets go of the zygote, which cleans up. No death signal is asked for here: that signal follows the *thread* which started a process.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from rstar_jax.tools import child, zygote
from rstar_jax.tools.call import Output, Program
from rstar_jax.tools.frames import frame, take_messages
from rstar_jax.tools.namespaces import SANDBOXES
from rstar_jax.tools.sandbox import Unavailable

# Processes that are forked and confined before there is a call for them. They are made several at a time: after a fork the zygote
# has to copy each page that it writes to, and so it does that once for all of them.
SPARES = 4
FEW_SPARES = 1  # when no more are left, others are made at once, and else when there is nothing to do
INTERRUPT_SECONDS = 1.0  # that a session has after SIGINT before it is killed

_CHUNK = 1 << 16


class Keeper:
    """The loop: take jobs, hand them out, drain, report."""

    def __init__(self, owner: socket.socket, zygote: socket.socket, settings: dict[str, Any], promises: dict[str, bool]):
        owner.setblocking(False)
        zygote.setblocking(False)
        self.owner = owner
        self.zygote = zygote
        self.settings = settings
        self.promises = promises
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.requests: collections.deque[tuple[int, Program]] = collections.deque()  # to the zygote, not sent yet
        self.programs: dict[int, Program] = {}
        self.numbers = 0
        self.spares: list[Program] = []
        self.sessions: dict[int, Program] = {}
        self.sound = True  # the last process that was started could be confined
        self.poll = select.poll()
        self.poll.register(owner, select.POLLIN)
        self.handlers: dict[int, Callable[[], None]] = {}
        self.watch(zygote.fileno(), self.converse)

    def watch(self, fd: int, handler: Callable[[], None], events: int = select.POLLIN) -> None:
        self.poll.register(fd, events)
        self.handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        if self.handlers.pop(fd, None):
            self.poll.unregister(fd)

    # the owner

    def send(self, message: dict[str, Any]) -> None:
        self.outbox += frame(message)
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes now; the rest waits, so that a slow owner never delays a deadline."""
        try:
            while self.outbox:
                del self.outbox[: self.owner.send(self.outbox)]
        except BlockingIOError:
            pass
        self.poll.modify(self.owner, select.POLLIN | (select.POLLOUT if self.outbox else 0))

    def receive(self) -> list[dict[str, Any]]:
        """All whole frames that have arrived. Raises `EOFError` when the owner is gone."""
        try:
            chunk = self.owner.recv(_CHUNK)
        except BlockingIOError:
            return []
        if not chunk:
            raise EOFError
        self.inbox += chunk
        return take_messages(self.inbox)

    def handle(self, message: dict[str, Any]) -> None:
        if "cancel" in message:
            for program in self.programs.values():
                if program.job == message["cancel"]:
                    self.kill(program, "cancelled")
        elif "close" in message:
            if message["close"] in self.sessions:
                self.kill(self.sessions.pop(message["close"]), "cancelled")
        else:
            self.begin(message)

    # the zygote

    def ask(self, kind: int, program: Program) -> None:
        self.requests.append((kind, program))
        self.send_requests()

    def send_requests(self) -> None:
        """Send what the zygote's socket takes now. Never waits for it: it may be waiting for this process to listen."""
        try:
            while self.requests:
                kind, program = self.requests[0]
                packet = zygote.REQUEST.pack(kind, program.number)
                if kind == zygote.SPAWN:
                    socket.send_fds(self.zygote, [packet], program.others)
                    program.close_others()
                else:
                    self.zygote.send(packet)
                self.requests.popleft()
        except BlockingIOError:
            pass
        self.poll.modify(self.zygote, select.POLLIN | (select.POLLOUT if self.requests else 0))

    def converse(self) -> None:
        """The zygote listens, or has something to say. Raises `EOFError` when it is dead."""
        self.send_requests()
        try:
            packet = self.zygote.recv(zygote.EVENT.size)
        except BlockingIOError:
            return
        if not packet:
            raise EOFError
        kind, number, *values = zygote.EVENT.unpack(packet)
        program = self.programs.pop(number)
        if kind == zygote.EXITED:
            self.finish(program, *values)
        else:  # no process, no memory, no disk: the machine's failure, not the program's
            self.sound = False
            self.forget(program)
            program.close()
            if program.job is not None:
                self.send({"id": program.job, "failed": f"a call could not be started: {os.strerror(values[0])}"})

    def kill(self, program: Program, reason: str) -> None:
        """Kill a program and all that it has started; the first reason stays."""
        if program.deadline < float("inf"):  # else it is being killed
            program.reason = program.reason or reason
            program.deadline = float("inf")
            self.ask(zygote.KILL, program)

    def expire(self, program: Program) -> None:
        """The deadline has passed: a session is interrupted first, and has a moment to come to its senses."""
        if program.session is not None and program.reason is None:
            program.reason = "timeout"
            program.deadline = time.monotonic() + INTERRUPT_SECONDS
            self.ask(zygote.INTERRUPT, program)
        else:
            self.kill(program, "timeout")

    # calls

    def spawn(self) -> Program:
        """A process that will wait for a job. Raises `OSError` when there is no descriptor to be had."""
        self.numbers += 1
        program = Program(self.numbers, self.settings["output_bytes"])
        self.programs[program.number] = program
        self.ask(zygote.SPAWN, program)
        return program

    def begin(self, job: dict[str, Any]) -> None:
        session = job["session"]
        program = self.sessions.get(session) if session is not None else None
        job["started"] = program is None
        try:
            if program is None:
                program = self.spares.pop(0) if self.spares else self.spawn()
        except OSError as error:
            self.send({"id": job["id"], "failed": f"a call could not be started: {error}"})
            return
        if session is not None:
            self.sessions[session] = program
        program.new = job["started"]
        program.begin(job)
        for output in program.outputs:
            self.watch(output.fd, functools.partial(self.read, program, output))
        if program.unsent or session is not None:
            self.talk(program)

    def talk(self, program: Program) -> None:
        """Watch a program's channel as long as there is something to say or to hear."""
        fd = program.channel.fileno()
        self.unwatch(fd)
        events = (select.POLLOUT if program.unsent else 0) | (select.POLLIN if program.session is not None else 0)
        if events:
            self.watch(fd, functools.partial(self.exchange, program), events)

    def exchange(self, program: Program) -> None:
        if program.unsent:
            program.send()
            self.talk(program)
        if program.session is None or (said := program.answer()) is None:
            return
        if not said:  # it has closed its end, and can say no more: its own end or its deadline will tell
            self.unwatch(program.channel.fileno())
        elif len(said) == 2 and program.job is not None:
            self.silence(program)
            report = program.finish_cell(*said)
            self.sound = True
            self.send(report | {"started": program.new})

    def silence(self, program: Program) -> None:
        """Stop watching what a program says."""
        for fd in (program.channel.fileno(), *(output.fd for output in program.outputs)):
            self.unwatch(fd)

    def read(self, program: Program, output: Output) -> None:
        if output.drain() == 0:
            self.unwatch(output.fd)
        elif output.total > self.settings["hard_output_bytes"]:
            self.kill(program, "output_limit")

    def forget(self, program: Program) -> None:
        """A program is no more."""
        self.silence(program)
        if program.session is not None and self.sessions.get(program.session) is program:
            del self.sessions[program.session]
        if program in self.spares:
            self.spares.remove(program)

    def finish(self, program: Program, status: int, microseconds: int, note: int) -> None:
        """A program's process has ended."""
        self.forget(program)
        job = program.job
        report = program.finish(status, microseconds, note)
        self.sound = report["ready"]
        if any(output.total > self.settings["hard_output_bytes"] for output in program.outputs):
            report["reason"] = report["reason"] or "output_limit"
        if job is not None:
            self.send(report | {"started": program.new})

    # the loop

    def step(self) -> None:
        """One round of the loop. What has ended is taken before deadlines are looked at: a call that is done is not late. New
        processes come last: what else there is to do is more urgent."""
        now = time.monotonic()
        waits = [max(0.0, program.deadline - now) for program in self.programs.values() if program.job is not None]
        waits += [0.0] if self.sound and len(self.spares) < SPARES else []
        wait = min(waits, default=float("inf"))
        events = dict(self.poll.poll(None if wait == float("inf") else wait * 1000))
        messages_wait = events.pop(self.owner.fileno(), 0)
        # A handler may close a descriptor whose event is still to come, and its number may be given to another.
        for fd, handler in [(fd, self.handlers[fd]) for fd in events]:
            if self.handlers.get(fd) is handler:
                handler()
        if messages_wait:
            self.flush()
            for message in self.receive():
                self.handle(message)
        now = time.monotonic()
        for program in self.programs.values():
            if program.job is not None and now >= program.deadline:
                self.expire(program)
        enough = SPARES - 1 if not events and not messages_wait else FEW_SPARES
        if self.sound and len(self.spares) <= enough:
            try:
                while len(self.spares) < SPARES:
                    self.spares.append(self.spawn())
            except OSError:  # the call that needs one tries again and says what is wrong
                self.sound = False

    def serve(self) -> None:
        """Work until the owner or the zygote is gone."""
        self.send({"ready": True, "promises": self.promises})
        try:
            while True:
                self.step()
        except (EOFError, ConnectionError):
            pass


def main(fd: int) -> None:
    """The program: `fd` is its end of the owner's socket."""
    owner = socket.socket(fileno=fd)
    inbox = bytearray()
    while not (messages := take_messages(inbox)):
        chunk = owner.recv(_CHUNK)
        if not chunk:
            return  # the owner has changed its mind
        inbox += chunk
    settings = messages[0]
    sandbox = SANDBOXES[settings["tier"]](settings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # calls may get it
    try:
        sandbox.start()
    except (Unavailable, OSError) as error:
        owner.sendall(frame({"unavailable": str(error)}))
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        owner.close()
        ours.close()
        zygote.run(theirs, settings, sandbox)
        os._exit(0)
    theirs.close()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (child.MAX_FDS if hard < 0 else min(child.MAX_FDS, hard), hard))
    first = ours.recv(_CHUNK)
    kind, text = (first[0], first[1:].decode()) if first else (0, "")
    if kind == zygote.READY:
        Keeper(owner, ours, settings, json.loads(text)).serve()
    elif kind == zygote.UNAVAILABLE:
        owner.sendall(frame({"unavailable": text}))
    elif kind == zygote.REFUSED:
        owner.sendall(frame({"refused": text}))
    ours.close()  # this ends the zygote, which cleans up
    _, status = os.waitpid(pid, 0)
    os._exit(min(255, abs(os.waitstatus_to_exitcode(status))))
