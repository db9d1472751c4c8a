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

import builtins
import contextlib
import ctypes
import dataclasses
import functools
import gc
import importlib
import importlib.machinery
import json
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rstar_jax.tools import child, syscalls
from rstar_jax.tools.sandbox import Sandbox, Slot, Unavailable

SPAWN, KILL, INTERRUPT = b"SKI"
READY, UNAVAILABLE, REFUSED, EXITED, FAILED = b"RUEXF"
REQUEST = struct.Struct("<Bq")
EVENT = struct.Struct("<Bqqqq")
THREE_FDS = struct.Struct("3i")
_ROOM_FOR_FDS = socket.CMSG_SPACE(THREE_FDS.size)

_WARM_UP_RUNS = 20
_CHUNK = 1 << 16
_ORPHAN_SECONDS = 0.005  # between looks at orphans that have been killed and are not dead yet
_SHUTDOWN_SECONDS = 3.0
_HUGE_PAGE = 2 << 20


@dataclasses.dataclass(eq=False)
class Child:
    """A process of a call. `first`: the idle process that holds its PID namespace, 0 without one."""

    number: int
    slot: Slot
    pid: int
    first: int
    pidfd: int

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
        except BaseException:
            self.free.append(slot)
            raise
        one = Child(number, slot, forked.pid, forked.first, os.pidfd_open(forked.pid))
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


class AllowedPackages:
    """Finds the modules of allowed distributions, and no others of `site-packages`. The last finder of `sys.meta_path`."""

    def __init__(self, sites: Mapping[str, Sequence[str]]):
        self.directories = list(sites)
        self.names = {entry.partition(".")[0] for entries in sites.values() for entry in entries}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if path is None and name in self.names:
            return importlib.machinery.PathFinder.find_spec(name, self.directories, target)
        return None

    def find_distributions(self, context: Any) -> Iterable[Any]:
        """So that `importlib.metadata` knows the versions of what can be imported."""
        from importlib.metadata import DistributionFinder, MetadataPathFinder

        context = DistributionFinder.Context(name=context.name, path=self.directories)
        return MetadataPathFinder.find_distributions(context)


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


# Run after a module is preloaded: what it imports, computes and caches at first use is then there in every call.
_EXERCISES = {
    "numpy": """
import numpy as np
a = np.arange(4.0).reshape(2, 2)
repr(a @ a + np.linalg.inv(a + np.eye(2))), str(a.sum()), np.linalg.eigvals(a), np.linalg.solve(a + np.eye(2), a[0]), a.mean(axis=0)
np.random.default_rng(0).normal(size=3), np.roots([1, -3, 2]), np.gcd(12, 18), np.array([1, 2, 3], dtype=object).sum(), np.sort(a[::-1])
""",
    "scipy": "import scipy.optimize, scipy.integrate, scipy.linalg, scipy.special, scipy.stats",
    "sympy": """
from sympy import *
x, y, z, n, k = symbols("x y z n k")
p, m = symbols("p m", positive=True, integer=True)
t, f = symbols("t", real=True), Function("f")
for equation in (x - 1, x**2 - 3*x + 2, x**3 - 6*x**2 + 11*x - 6, x**4 - 5*x**2 + 4, x**2 + x + 1, 2*x/3 - 5, sqrt(x + 1) - 3,
                 exp(x) - 2, log(x) - 1, sin(x) - Rational(1, 2), Eq(x**2, 2), 1/x + x - 2, Abs(t) - 3):
    str(solve(equation))
str(solve([x + y - 3, x - y - 1], [x, y])), str(solve([x**2 + y**2 - 5, x*y - 2], [x, y])), str(solveset(x**2 - 4, x, S.Reals))
str(linsolve([x + y - 3, x - y - 1], [x, y])), str(solve(x**2 < 4, x)), str(nsolve(cos(x) - x, x, 1)), str(roots(x**3 - 1, x))
str(simplify(sin(x)**2 + cos(x)**2)), str(simplify((x**2 - 1)/(x - 1))), str(expand((x + y)**3)), str(factor(x**3 - y**3))
str(apart(1/(x**2 - 1))), str(together(1/x + 1/y)), str(cancel((x**2 - 1)/(x + 1))), str(radsimp(1/(sqrt(2) + 1)))
str(trigsimp(tan(x)*cos(x)))
str(integrate(x**2*exp(x), x)), str(integrate(1/(1 + x**2), (x, 0, oo))), str(diff(sin(x)*exp(x), x, 2)), str(limit(sin(x)/x, x, 0))
str(series(exp(x), x, 0, 4)), str(summation(k, (k, 1, n))), str(summation(1/k**2, (k, 1, oo))), str(product(k, (k, 1, 5)))
str(Poly(x**3 + 2*x, x).all_coeffs()), str(div(x**3 - 1, x - 1)), str(gcd(x**2 - 1, x - 1)), str(resultant(x**2 - 2, x - y, x))
str(factorint(360)), isprime(97), nextprime(100)
str(divisors(28)), totient(36), gcd(12, 18), lcm(4, 6), mod_inverse(3, 11), binomial(10, 3)
str(N(pi, 20)), str(Rational(1, 3) + sqrt(2)), str(nsimplify(0.5)), str((1 + I)**2), str(re(1 + I)), floor(Rational(7, 2))
str(sqrt(8).evalf())
M = Matrix([[1, 2], [3, 4]])
str(M.det()), str(M.inv()), str(M.eigenvals()), str(M.rref()), str(M * M), str(M.T)
str(x.subs(x, 2)), lambdify(x, x**2, "math")(2.0), str(Sum(k, (k, 1, 3)).doit()), str(Piecewise((x, x > 0), (0, True)))
str(latex(x**2/2)), pretty(x**2/2)
str(dsolve(f(x).diff(x) - f(x), f(x))), str(Interval(0, 1).intersect(Interval(Rational(1, 2), 2))), str(p + m > 0)
str(sympify("x**2 + 1"))
str(geometry.Point(0, 0).distance(geometry.Point(3, 4))), str(geometry.Circle((0, 0), 1).area), str(diophantine(3*x + 5*y - 1))
str(symbols("a:3")), str(cos(pi/3)), str(tan(pi/4)), str(log(8, 2)), str(factorial(10)), str(fibonacci(10)), str(Mod(17, 5))
str(root(27, 3))
""",
}


def _preload(names: Sequence[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
            exec(_EXERCISES.get(name, ""), {})
        except Exception as error:  # an import runs code, which can raise anything
            raise ImportError(f"tool.preload={name} cannot be imported: {type(error).__name__}: {error}") from error
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _collapse(maps: int) -> None:
    """Move private anonymous memory onto huge pages: what a fork costs is the number of its pages. `maps`: a descriptor of
    /proc/self/maps. A kernel without the means leaves things as they are."""
    content = b""
    while chunk := os.pread(maps, 1 << 20, len(content)):
        content += chunk
    for line in content.decode().splitlines():
        fields = line.split(maxsplit=5)
        if fields[1] == "rw-p" and fields[4] == "0" and (len(fields) == 5 or fields[5] == "[heap]"):
            start, end = (int(bound, 16) for bound in fields[0].split("-"))
            start = -(-start // _HUGE_PAGE) * _HUGE_PAGE
            for page in range(start, end - _HUGE_PAGE + 1, _HUGE_PAGE):
                syscalls.collapse(page, _HUGE_PAGE)


def _limit_zygote(settings: dict[str, Any]) -> None:
    """Limits that calls inherit."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when the host runs out of memory, a call dies and not the trainer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (settings["disk_bytes"], settings["disk_bytes"]))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (child.MAX_FDS if hard < 0 else min(child.MAX_FDS, hard), hard))


def _restrict_imports(settings: dict[str, Any]) -> None:
    """The standard library, allowed packages, and what a program writes into its own directory."""
    keep = (importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter, importlib.machinery.PathFinder)
    sys.meta_path[:] = [*keep, AllowedPackages(settings["sites"])]
    sys.path[:] = ["", *settings["library"]]
    sys.path_importer_cache.clear()
    sys.argv[:] = [""]


def _prepare(settings: dict[str, Any], sandbox: Sandbox) -> int:
    """Everything that children inherit and so need not do again. Returns a descriptor of the list of this process's children, -1
    where the kernel cleans up."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    _limit_zygote(settings)
    maps = os.open("/proc/self/maps", os.O_RDONLY)
    children = -1 if sandbox.has_process_namespace else os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY)
    sandbox.enter()
    settings["pid"] = os.getpid()
    _restrict_imports(settings)
    _open_streams()
    _warm_up()
    _preload(settings["preload"])
    sandbox.seal()
    gc.collect()
    gc.disable()
    gc.freeze()  # a collection in a child would write to, and so copy, every page of the preloaded modules
    _trim()
    _collapse(maps)
    os.close(maps)
    return children


def _trim() -> None:
    """Give free memory back, so that it is not copied at each fork."""
    with contextlib.suppress(AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)


def run(keeper: socket.socket, settings: dict[str, Any], sandbox: Sandbox) -> None:
    """The whole life of the process, from its fork by the keeper on. `keeper` is its end of a socket of packets."""
    try:
        if sandbox.has_process_namespace:  # it ends with the keeper; elsewhere there is something to clean up
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        list_of_children = _prepare(settings, sandbox)
    except (Unavailable, OSError) as error:
        keeper.send(bytes([UNAVAILABLE]) + str(error).encode())
        return
    except ImportError as error:
        keeper.send(bytes([REFUSED]) + str(error).encode())
        return
    Zygote(keeper, settings, sandbox, list_of_children).serve()
