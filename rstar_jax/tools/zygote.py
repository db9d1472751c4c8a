"""The warm process ("zygote") that preloads modules and forks one throw-away child for each call or session.

It sees no program, no input and no output: those go between its keeper (`keeper.py`) and the children, so nothing of a call is in the
memory that later calls inherit. It uses the standard library alone and has one thread. Messages, one a packet:

    keeper -> zygote   SPAWN n, with three descriptors: standard output, standard error and the channel of the child; KILL n;
                       INTERRUPT n
    zygote -> keeper   READY with its promises, or UNAVAILABLE or REFUSED with the reason; then EXITED n, wait status, processor time
                       in microseconds and note of a child; FAILED n, error number of one that could not be forked

Who ends whom:

* the keeper is gone, however: the zygote kills every call, removes the directories and exits;
* the zygote dies: its calls get SIGKILL (PR_SET_PDEATHSIG; the zygote's only thread is their parent), and in the namespace tiers
  the kernel ends whatever lives in its PID namespace. The keeper sees it and ends too;
* a call ends: in the namespace tiers the kernel ends all of its PID namespace. Elsewhere its process group is killed, and so is
  whatever escaped from the group. A call is a subreaper, so its orphans stay its own while it runs and fall to the zygote, a
  subreaper too, when it ends: any child that the zygote does not know is such an orphan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from rstar_jax.tools import child, syscalls
from rstar_jax.tools.preparation import prepare
from rstar_jax.tools.sandbox import Sandbox, Slot, Unavailable

SPAWN, KILL, INTERRUPT = b"SKI"
READY, UNAVAILABLE, REFUSED, EXITED, FAILED = b"RUEXF"
REQUEST = struct.Struct("<Bq")
EVENT = struct.Struct("<Bqqqq")
THREE_FDS = struct.Struct("3i")
_ROOM_FOR_FDS = socket.CMSG_SPACE(THREE_FDS.size)

_CHUNK = 1 << 16
_ORPHAN_SECONDS = 0.005  # between looks at orphans that have been killed and are not dead yet
_SHUTDOWN_SECONDS = 3.0


@dataclasses.dataclass(eq=False)
class Child:
    """A process of a call. `first`: the idle process that holds its PID namespace, 0 without one."""

    number: int
    slot: Slot
    pid: int
    first: int
    pidfd: int = -1

    def kill(self) -> None:
        """Kill it and all that it has started, as far as that can be reached. Only before it is reaped, so that its pid cannot be
        another's."""
        if self.first:
            os.kill(self.first, signal.SIGKILL)  # and the kernel kills the others
        os.kill(self.pid, signal.SIGKILL)
        if not self.first:
            with contextlib.suppress(ProcessLookupError):  # killed before its setsid
                os.killpg(self.pid, signal.SIGKILL)


class Zygote:
    """The loop: fork, kill, reap."""

    def __init__(self, keeper: socket.socket, settings: dict[str, Any], sandbox: Sandbox, list_of_children: int):
        self.keeper = keeper
        self.settings = settings
        self.sandbox = sandbox
        self.children: dict[int, Child] = {}
        self.free: list[Slot] = []
        self.slots = 0
        self.removers: set[int] = set()  # pids of processes that remove directories
        self.orphans = False  # whether killed orphans are still to be reaped
        self.list_of_children = list_of_children
        self.poll = select.poll()
        self.poll.register(keeper, select.POLLIN)
        self.handlers: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        self.poll.register(fd, select.POLLIN)
        self.handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        del self.handlers[fd]
        self.poll.unregister(fd)

    def receive(self) -> None:
        """Do what the keeper asks for. Raises `EOFError` when it is gone."""
        packet, ancillary, _, _ = self.keeper.recvmsg(REQUEST.size, _ROOM_FOR_FDS)
        if not packet:
            raise EOFError
        fds = THREE_FDS.unpack(ancillary[0][2]) if ancillary else ()
        kind, number = REQUEST.unpack(packet)
        if kind == SPAWN:
            try:
                self.spawn(number, fds)
            except OSError as error:
                self.keeper.send(EVENT.pack(FAILED, number, error.errno or 0, 0, 0))
            finally:
                for fd in fds:
                    os.close(fd)
        elif number in self.children:
            if kind == KILL:
                self.children[number].kill()
            else:
                os.kill(self.children[number].pid, signal.SIGINT)

    def spawn(self, number: int, fds: Sequence[int]) -> None:
        """A process that waits for a job on its channel. Raises `OSError`."""
        if not self.free:
            self.free.append(self.sandbox.slot(self.slots))
            self.slots += 1
        slot = self.free.pop()
        try:
            self.sandbox.clean(slot, self.discard)
            slot.note[0] = child.RUNNING
            slot.used = True
            self.sandbox.children = len(self.children)
            forked = self.sandbox.fork(slot)
            if forked.pid == 0:
                child.run(slot, self.sandbox, (fds[0], fds[1], fds[2]))
            one = Child(number, slot, forked.pid, forked.first)
            try:
                one.pidfd = os.pidfd_open(one.pid)
            except OSError:
                one.kill()
                for pid in filter(None, (one.pid, one.first)):
                    os.waitpid(pid, 0)
                raise
        except BaseException:
            self.free.append(slot)
            raise
        self.children[number] = one
        self.watch(one.pidfd, functools.partial(self.reap, one))

    def reap(self, one: Child) -> None:
        """A child has ended. Its descriptor is closed before another is opened."""
        self.unwatch(one.pidfd)
        os.close(one.pidfd)
        del self.children[one.number]
        one.kill()
        _, status, usage = os.wait4(one.pid, 0)
        microseconds = int(1e6 * (usage.ru_utime + usage.ru_stime))
        self.keeper.send(EVENT.pack(EXITED, one.number, status, microseconds, one.slot.note[0]))
        if one.first:
            self.release(one.first, one.slot)
        else:
            self.sweep()
            self.recycle(one.slot)

    def release(self, first: int, slot: Slot, pidfd: int = -1) -> None:
        """Free the slot once the kernel has ended all of the child's PID namespace."""
        if os.waitpid(first, os.WNOHANG)[0]:
            if pidfd >= 0:
                self.unwatch(pidfd)
                os.close(pidfd)
            self.recycle(slot)
        elif pidfd < 0:
            pidfd = os.pidfd_open(first)
            self.watch(pidfd, functools.partial(self.release, first, slot, pidfd))

    def recycle(self, slot: Slot) -> None:
        """The slot is free; what its call has left goes now, or, should that fail, before its next call."""
        with contextlib.suppress(OSError):
            self.sandbox.clean(slot, self.discard)
        self.free.append(slot)

    # what calls leave behind, where no PID namespace ends it

    def sweep(self) -> None:
        """Kill and reap every child that is not a call: what escaped from the groups of calls that have ended."""
        self.orphans = False
        listed = os.pread(self.list_of_children, _CHUNK, 0)
        pids = listed.split()[: -1 if len(listed) == _CHUNK else None]  # a full buffer may end in half a number
        known = {one.pid for one in self.children.values()}
        for pid in map(int, pids):
            if pid in known:
                continue
            if os.waitpid(pid, os.WNOHANG)[0]:
                self.removers.discard(pid)
                continue
            self.orphans = True
            if pid not in self.removers:
                os.kill(pid, signal.SIGKILL)

    def discard(self, directory: str) -> None:
        """Remove a directory, in a process of its own unless it is empty: it may hold very much."""
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
                script = 'chmod -R u+rwX -- "$0" 2>/dev/null; exec rm -rf -- "$0"'
                os.execv("/bin/sh", ["sh", "-c", script, directory])
            finally:
                os._exit(1)
        self.removers.add(pid)
        self.orphans = True

    # the loop

    def step(self) -> None:
        """One round of the loop."""
        events = dict(self.poll.poll(_ORPHAN_SECONDS * 1000 if self.orphans else None))
        asked = events.pop(self.keeper.fileno(), 0)
        # A handler may close a descriptor whose event is still to come, and its number may be given to another.
        for fd, handler in [(fd, self.handlers[fd]) for fd in events]:
            if self.handlers.get(fd) is handler:
                handler()
        if asked:
            self.receive()
        if self.orphans:
            self.sweep()

    def serve(self) -> None:
        """Work until the keeper is gone, then leave nothing behind."""
        self.keeper.send(bytes([READY]) + json.dumps(self.sandbox.promises).encode())
        try:
            while True:
                self.step()
        except (EOFError, ConnectionError):
            self.shut_down()

    def shut_down(self) -> None:
        for one in self.children.values():
            one.kill()
        for one in self.children.values():
            os.waitpid(one.pid, 0)
            self.free.append(one.slot)
        self.children.clear()
        if self.list_of_children < 0:
            return  # there is no directory, and the rest ends with this process
        for slot in self.free:
            self.discard(slot.cwd)
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


def run(keeper: socket.socket, settings: dict[str, Any], sandbox: Sandbox) -> None:
    """The whole life of the process, from its fork by the keeper on. `keeper` is its end of a socket of packets."""
    try:
        if sandbox.has_process_namespace:  # it ends with the keeper; elsewhere there is something to clean up
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        list_of_children = prepare(settings, sandbox)
    except (Unavailable, OSError) as error:
        keeper.send(bytes([UNAVAILABLE]) + str(error).encode())
        return
    except ImportError as error:
        keeper.send(bytes([REFUSED]) + str(error).encode())
        return
    Zygote(keeper, settings, sandbox, list_of_children).serve()
