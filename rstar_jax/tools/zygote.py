"""The program of a warm Python process ("zygote"): it preloads modules, then forks one throw-away child for each call.

It is started with exec and never by a fork of the trainer (a fork of a process that runs JAX deadlocks). It uses the standard
library alone and has one thread. It talks to its owner over one stream socket in frames of JSON (4 bytes of
length, big endian, then the body):

    owner -> zygote   the settings, once; then {"id", "code", "stdin", "timeout"} for a call, {"cancel": id} to kill one
    zygote -> owner   {"ready"} or {"refused": why}; then for each call {"id", "code", "reason", "note", "seconds",
                      "cpu_seconds", "stdout", "stderr", "truncated"}, or {"id", "failed": why} when it could not be run

The zygote is the parent of every call, so it keeps the deadline and drains the output; a busy event loop in the trainer delays
neither. Who ends whom:

* the trainer dies, however: the socket closes, the zygote kills every call, removes the directories and exits. No death signal
  is asked for here: that signal follows the *thread* which started a process, and would leave directories behind;
* the zygote dies: its calls get SIGKILL (PR_SET_PDEATHSIG; the zygote's only thread is their parent);
* a call ends: its process group is killed, and so is whatever escaped from the group. A call is a subreaper, so its orphans
  stay its own while it runs and fall to the zygote, a subreaper too, when it ends: any child that the zygote does not know is
  such an orphan.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from rstar_jax.tools import child
from rstar_jax.tools.call import Call, Output

FILE_BYTES = 64 << 20

_WARM_UP_RUNS = 20
_CHUNK = 1 << 16
_ORPHAN_SECONDS = 0.005  # between looks at orphans that have been killed and are not dead yet
_SHUTDOWN_SECONDS = 3.0


class Zygote:
    """The loop: take jobs, fork, drain, reap, report."""

    def __init__(self, control: socket.socket):
        self.control = control
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.settings: dict[str, Any] = {}
        self.calls: dict[int, Call] = {}  # by pid
        self.removers: set[int] = set()  # pids of processes that remove directories
        self.orphans = False  # whether killed orphans are still to be reaped
        self.count = 0
        self.poll = select.poll()
        self.poll.register(control, select.POLLIN)
        self.handlers: dict[int, Callable[[], None]] = {}
        self.children = os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY)

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        self.poll.register(fd, select.POLLIN)
        self.handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        self.poll.unregister(fd)
        del self.handlers[fd]

    def send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        self.outbox += len(body).to_bytes(4, "big") + body
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes now; the rest waits, so that a slow owner never delays a deadline."""
        try:
            while self.outbox:
                del self.outbox[: self.control.send(self.outbox)]
        except BlockingIOError:
            pass
        self.poll.modify(self.control, select.POLLIN | (select.POLLOUT if self.outbox else 0))

    def receive(self) -> list[dict[str, Any]]:
        """All whole frames that have arrived. Raises `EOFError` when the owner is gone."""
        try:
            chunk = self.control.recv(_CHUNK)
        except BlockingIOError:
            return []
        if not chunk:
            raise EOFError
        self.inbox += chunk
        messages = []
        while len(self.inbox) >= 4 and len(self.inbox) >= 4 + (size := int.from_bytes(self.inbox[:4], "big")):
            messages.append(json.loads(self.inbox[4 : 4 + size]))
            del self.inbox[: 4 + size]
        return messages

    def start(self, job: dict[str, Any]) -> None:
        self.count += 1
        try:
            call = Call(job, self.settings, f"{self.settings['directory']}/{self.count}")
        except OSError as error:  # no process, no memory, no disk: the machine's failure, not the program's
            self.send({"id": job["id"], "failed": f"a call could not be started: {error}"})
            return
        self.calls[call.pid] = call
        self.watch(call.pidfd, functools.partial(self.reap, call))
        for output in call.outputs:
            self.watch(output.fd, functools.partial(self.read, call, output))

    def read(self, call: Call, output: Output) -> None:
        if output.drain() == 0:
            self.unwatch(output.fd)
        elif output.total > self.settings["hard_output_bytes"]:
            call.kill("output_limit")

    def reap(self, call: Call) -> None:
        for fd in (call.pidfd, *(output.fd for output in call.outputs)):
            if fd in self.handlers:
                self.unwatch(fd)
        del self.calls[call.pid]
        report = call.finish()
        if any(output.total > self.settings["hard_output_bytes"] for output in call.outputs):
            report["reason"] = report["reason"] or "output_limit"
        self.sweep()
        self.remove(call.cwd)
        self.send(report)

    def sweep(self) -> None:
        """Kill and reap every child that is not a call: what escaped from the groups of calls that have ended."""
        self.orphans = False
        listed = os.pread(self.children, _CHUNK, 0)
        pids = listed.split()[: -1 if len(listed) == _CHUNK else None]  # a full buffer may end in half a number
        for pid in map(int, pids):
            if pid in self.calls:
                continue
            if os.waitpid(pid, os.WNOHANG)[0]:
                self.removers.discard(pid)
                continue
            self.orphans = True
            if pid not in self.removers:
                os.kill(pid, signal.SIGKILL)

    def remove(self, directory: str) -> None:
        """Remove a call's directory: at once when it is empty, else in a process of its own (it may hold very much)."""
        with contextlib.suppress(OSError):
            os.rmdir(directory)
            return
        try:
            pid = os.fork()
        except OSError:
            return  # no process to be had now: it goes with the pool's own directory
        if pid == 0:
            try:
                os.closerange(3, child.MAX_FDS)
                script = 'chmod -R u+rwX -- "$0"; exec rm -rf -- "$0"'
                os.execv("/bin/sh", ["sh", "-c", script, directory])
            finally:
                os._exit(1)
        self.removers.add(pid)
        self.orphans = True

    def step(self) -> None:
        """One round of the loop. What has ended is taken before deadlines are looked at: a call that is done is not late. New
        jobs come last: they open file descriptors, and must not be given the number of one that still has an event to come."""
        now = time.monotonic()
        waits = [max(0.0, call.deadline - now) for call in self.calls.values() if call.reason is None]
        waits += [_ORPHAN_SECONDS] if self.orphans else []
        events = dict(self.poll.poll(min(waits) * 1000 if waits else None))
        messages_wait = events.pop(self.control.fileno(), 0)
        for fd in events:
            if fd in self.handlers:  # else: closed by an event before it
                self.handlers[fd]()
        if messages_wait:
            self.flush()
            for message in self.receive():
                self.handle(message)
        now = time.monotonic()
        for call in self.calls.values():
            if call.reason is None and now >= call.deadline:
                call.kill("timeout")
        if self.orphans:
            self.sweep()

    def handle(self, message: dict[str, Any]) -> None:
        if "cancel" in message:
            for call in self.calls.values():
                if call.id == message["cancel"]:
                    call.kill("cancelled")
        else:
            self.start(message)

    def serve(self) -> None:
        """Work until the owner is gone, then leave nothing behind."""
        self.control.setblocking(False)
        self.send({"ready": True})
        try:
            while True:
                self.step()
        except (EOFError, ConnectionError):
            self.shut_down()

    def shut_down(self) -> None:
        for call in list(self.calls.values()):
            call.kill("cancelled")
            call.finish()
            self.remove(call.cwd)
        self.calls.clear()
        limit = time.monotonic() + _SHUTDOWN_SECONDS
        self.sweep()
        while self.orphans and time.monotonic() < limit:
            time.sleep(_ORPHAN_SECONDS)
            self.sweep()
        directory = self.settings["directory"]
        for path in (directory, os.path.dirname(directory)):
            try:
                os.rmdir(path)
            except OSError:
                break  # another zygote of the pool is still there; the last one removes it


def _open_streams() -> None:
    """Open the standard streams that children will use: UTF-8, buffered by line, so that a call that is killed keeps what it
    printed. They are opened on a pipe, because a stream remembers whether it was opened on something that can seek."""
    read_end, write_end = os.pipe()
    for name, fd in (("stdout", 1), ("stderr", 2)):
        real = os.dup(fd)
        os.dup2(write_end, fd)
        stream = open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.dup2(real, fd)
        os.close(real)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    stdin = open(0, encoding="utf-8", errors="surrogatepass", closefd=False)  # noqa: SIM115
    for name in ("stdin", "__stdin__"):
        setattr(sys, name, stdin)
    os.close(read_end)
    os.close(write_end)


def _warm_up() -> None:
    """Run the interpreter's own path for a program, so that its caches fill here and not in every child anew."""
    for _ in range(_WARM_UP_RUNS):
        child.execute("x = 1\nprint(x + 1)\nx", {"__builtins__": builtins})
    del builtins._  # type: ignore[attr-defined]


def _prepare(settings: dict[str, Any]) -> None:
    """Everything that children inherit and so need not do again."""
    child.prctl(child.PR_SET_CHILD_SUBREAPER, 1)
    child.prctl(child.PR_SET_NO_NEW_PRIVS, 1)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when the host runs out of memory, a call dies and not the trainer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (child.MAX_FDS if hard < 0 else min(child.MAX_FDS, hard), hard))
    sys.argv[:] = [""]
    sys.path.insert(0, "")  # what a program writes into its directory it can import; this directory is empty
    os.chdir(settings["directory"])
    _open_streams()
    _warm_up()
    for name in settings["preload"]:
        try:
            importlib.import_module(name)
        except Exception as error:  # an import runs code, which can raise anything
            raise ImportError(f"tool.preload={name} cannot be imported: {type(error).__name__}: {error}") from error
    if "numpy" in settings["preload"]:
        sys.modules["numpy"].random.seed(0)
    settings["pid"] = os.getpid()
    gc.collect()
    gc.disable()
    gc.freeze()  # a collection in a child would write to, and so copy, every page of the preloaded modules


def main(fd: int) -> None:
    """The program: `fd` is the zygote's end of the socket."""
    zygote = Zygote(socket.socket(fileno=fd))
    messages: list[dict[str, Any]] = []
    try:
        while not messages:
            messages = zygote.receive()
        zygote.settings = messages[0]
        _prepare(zygote.settings)
    except EOFError:
        return  # the owner has changed its mind
    except (ImportError, OSError) as error:
        zygote.send({"refused": str(error)})
        return
    zygote.serve()
