"""The program of a warm Python process ("zygote"): it preloads modules, then forks one throw-away child for each call or session.

It is started with exec and never by a fork of the trainer (a fork of a process that runs JAX deadlocks). It uses the standard
library alone and has one thread. It talks to its owner over one stream socket in frames of JSON (4 bytes of
length, big endian, then the body):

    owner -> zygote   the settings, once; then {"id", "code", "stdin", "timeout", "session"} for a call or (session: a number, not
                      null) a cell, {"cancel": id} to kill one, {"close": session} to end one
    zygote -> owner   {"ready", "promises"}, {"refused": why} or {"unavailable": why}; then for each call {"id", "code", "reason",
                      "note", "seconds", "cpu_seconds", "stdout", "stderr", "truncated", "alive", "ready", "started"}, or {"id",
                      "failed": why} when it could not be run

The zygote is the parent of every call, so it keeps the deadline and drains the output; a busy event loop in the trainer delays
neither. Who ends whom:

* the trainer dies, however: the socket closes, the zygote kills every call, removes the directories and exits. No death signal
  is asked for here: that signal follows the *thread* which started a process, and would leave directories behind;
* the zygote dies: its calls get SIGKILL (PR_SET_PDEATHSIG; the zygote's only thread is their parent), and in the namespace tiers
  the kernel ends whatever lives in its PID namespace;
* a call ends: in the namespace tiers the kernel ends all of its PID namespace. Elsewhere its process group is killed, and so is
  whatever escaped from the group. A call is a subreaper, so its orphans stay its own while it runs and fall to the zygote, a
  subreaper too, when it ends: any child that the zygote does not know is such an orphan.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.machinery
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rstar_jax.tools import child, syscalls
from rstar_jax.tools.call import Output, Program
from rstar_jax.tools.sandbox import SANDBOXES, Sandbox, Slot, Unavailable

# Processes that are forked and confined before there is a call for them. They are made several at a time: after a fork the zygote
# has to copy each page that it writes to, and so it does that once for all of them.
SPARES = 4
FEW_SPARES = 1  # when no more are left, others are made
INTERRUPT_SECONDS = 1.0  # that a session has after SIGINT before it is killed

_WARM_UP_RUNS = 20
_CHUNK = 1 << 16
_ORPHAN_SECONDS = 0.005  # between looks at orphans that have been killed and are not dead yet
_SHUTDOWN_SECONDS = 3.0
_HUGE_PAGE = 2 << 20


class Zygote:
    """The loop: take jobs, fork, drain, reap, report."""

    def __init__(self, control: socket.socket, settings: dict[str, Any], sandbox: Sandbox, children: int):
        self.control = control
        self.settings = settings
        self.sandbox = sandbox
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.programs: set[Program] = set()
        self.spares: list[Program] = []
        self.sessions: dict[int, Program] = {}
        self.free: list[Slot] = []
        self.slots = 0
        self.sound = True  # the last process that was started could be confined
        self.removers: set[int] = set()  # pids of processes that remove directories
        self.orphans = False  # whether killed orphans are still to be reaped
        self.poll = select.poll()
        self.poll.register(control, select.POLLIN)
        self.handlers: dict[int, Callable[[], None]] = {}
        self.children = children

    def watch(self, fd: int, handler: Callable[[], None], events: int = select.POLLIN) -> None:
        self.poll.register(fd, events)
        self.handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        if self.handlers.pop(fd, None):
            self.poll.unregister(fd)

    # the owner

    def send(self, message: dict[str, Any]) -> None:
        self.outbox += _frame(message)
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
        return _frames(self.inbox)

    def handle(self, message: dict[str, Any]) -> None:
        if "cancel" in message:
            for program in self.programs:
                if program.job == message["cancel"]:
                    program.kill("cancelled")
        elif "close" in message:
            if message["close"] in self.sessions:
                self.sessions.pop(message["close"]).kill("cancelled")
        else:
            self.begin(message)

    # calls

    def spawn(self) -> Program:
        """A process that waits for a job. Raises `OSError`."""
        if not self.free:
            self.free.append(self.sandbox.slot(self.slots))
            self.slots += 1
        slot = self.free.pop()
        try:
            self.sandbox.clean(slot, self.discard)
            program = Program(self.sandbox, slot)
        except BaseException:
            self.free.append(slot)
            raise
        self.programs.add(program)
        self.watch(program.pidfd, functools.partial(self.reap, program))
        return program

    def begin(self, job: dict[str, Any]) -> None:
        session = job["session"]
        program = self.sessions.get(session) if session is not None else None
        job["started"] = program is None
        try:
            if program is None:
                program = self.spares.pop(0) if self.spares else self.spawn()
        except OSError as error:  # no process, no memory, no disk: the machine's failure, not the program's
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
        if program.session is not None and len(said := program.answer()) == 2 and program.job is not None:
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
            program.kill("output_limit")

    def reap(self, program: Program) -> None:
        """A program's process has ended."""
        self.silence(program)
        self.unwatch(program.pidfd)
        self.programs.discard(program)
        if self.sessions.get(program.session) is program:  # type: ignore[arg-type]
            del self.sessions[program.session]  # type: ignore[arg-type]
        job = program.job
        report = program.finish()
        self.sound = report["ready"]
        if program in self.spares:
            self.spares.remove(program)
        if any(output.total > self.settings["hard_output_bytes"] for output in program.outputs):
            report["reason"] = report["reason"] or "output_limit"
        if job is not None:
            self.send(report | {"started": program.new})
        if program.first:
            self.release(program.first, program.slot)
        else:
            self.sweep()
            self.recycle(program.slot)

    def release(self, first: int, slot: Slot, pidfd: int = -1) -> None:
        """Free the slot once the kernel has ended all of the program's PID namespace."""
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
        listed = os.pread(self.children, _CHUNK, 0)
        pids = listed.split()[: -1 if len(listed) == _CHUNK else None]  # a full buffer may end in half a number
        known = {program.pid for program in self.programs}
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
                script = 'chmod -R u+rwX -- "$0"; exec rm -rf -- "$0"'
                os.execv("/bin/sh", ["sh", "-c", script, directory])
            finally:
                os._exit(1)
        self.removers.add(pid)
        self.orphans = True

    # the loop

    def step(self) -> None:
        """One round of the loop. What has ended is taken before deadlines are looked at: a call that is done is not late. New
        processes come last: what else there is to do is more urgent."""
        now = time.monotonic()
        lacking = self.sound and len(self.spares) < SPARES
        waits = [max(0.0, program.deadline - now) for program in self.programs if program.job is not None]
        waits += [_ORPHAN_SECONDS] if self.orphans else []
        waits += [0.0] if lacking else []
        wait = min(waits, default=float("inf"))
        events = dict(self.poll.poll(None if wait == float("inf") else wait * 1000))
        messages_wait = events.pop(self.control.fileno(), 0)
        # A handler may close a descriptor whose event is still to come, and its number may be given to another.
        for fd, handler in [(fd, self.handlers[fd]) for fd in events]:
            if self.handlers.get(fd) is handler:
                handler()
        if messages_wait:
            self.flush()
            for message in self.receive():
                self.handle(message)
        now = time.monotonic()
        for program in self.programs:
            if program.job is not None and now >= program.deadline:
                program.expire(INTERRUPT_SECONDS)
        if self.orphans:
            self.sweep()
        if self.sound and len(self.spares) <= (SPARES - 1 if not events and not messages_wait else FEW_SPARES):
            self.sound = False
            with contextlib.suppress(OSError):  # the call that needs one tries again and says what is wrong
                while len(self.spares) < SPARES:
                    self.spares.append(self.spawn())
                self.sound = True

    def serve(self) -> None:
        """Work until the owner is gone, then leave nothing behind."""
        self.send({"ready": True, "promises": self.sandbox.promises})
        try:
            while True:
                self.step()
        except (EOFError, ConnectionError):
            self.shut_down()

    def shut_down(self) -> None:
        for program in self.programs:
            program.kill("cancelled")
        for program in list(self.programs):
            program.finish()
            self.free.append(program.slot)
        self.programs.clear()
        if self.children < 0:
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


def _frame(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "big") + body


def _frames(inbox: bytearray) -> list[dict[str, Any]]:
    """Take all whole frames out of `inbox`."""
    messages = []
    while len(inbox) >= 4 and len(inbox) >= 4 + (size := int.from_bytes(inbox[:4], "big")):
        messages.append(json.loads(inbox[4 : 4 + size]))
        del inbox[: 4 + size]
    return messages


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
str(x.subs(x, 2)), lambdify(x, x**2)(2.0), str(Sum(k, (k, 1, 3)).doit()), str(Piecewise((x, x > 0), (0, True)))
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


def _prepare(settings: dict[str, Any], sandbox: Sandbox, namespaced: bool) -> int:
    """Everything that children inherit and so need not do again. Returns a descriptor of the list of this process's children, -1
    where the kernel cleans up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a call's own business
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    _limit_zygote(settings)
    maps = os.open("/proc/self/maps", os.O_RDONLY)
    children = -1 if namespaced else os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY)
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


def main(fd: int) -> None:
    """The program: `fd` is the zygote's end of the socket."""
    control = socket.socket(fileno=fd)
    inbox = bytearray()
    while not (messages := _frames(inbox)):
        chunk = control.recv(_CHUNK)
        if not chunk:
            return  # the owner has changed its mind
        inbox += chunk
    settings = messages[0]
    sandbox = SANDBOXES[settings["tier"]](settings)
    try:
        sandbox.start()
        children = _prepare(settings, sandbox, settings["tier"] in ("ns-root", "userns"))
    except (Unavailable, OSError) as error:
        control.sendall(_frame({"unavailable": str(error)}))
        return
    except ImportError as error:
        control.sendall(_frame({"refused": str(error)}))
        return
    control.setblocking(False)
    Zygote(control, settings, sandbox, children).serve()
