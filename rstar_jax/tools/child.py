"""What happens in the process of one call or one session, from its fork by the zygote on. Standard library alone.

The process is forked and confined before there is anything to run (a "spare"), and waits for its job on a socket. A call closes
the socket before the program starts. A session keeps it, takes one cell after another and answers each with two bytes: what it
says there can only spoil its own results.

How a call ended is read from the kernel (`wait4`), never from bytes that it wrote. One byte of memory shared with the child
(`note`) only refines this: exit code 1 with `EXCEPTION` or `OUT_OF_MEMORY` noted is an uncaught exception, without it the
program's own exit(1). Code that forges the byte gains what raising the exception would have given it.
"""

from __future__ import annotations

import _signal
import ast
import builtins
import contextlib
import gc
import itertools
import linecache
import mmap
import os
import re
import resource
import signal
import struct
import sys
import traceback
import types
from typing import Any, NoReturn

from rstar_jax.tools import syscalls
from rstar_jax.tools.sandbox import Sandbox, Slot

FILENAME = "<code>"  # of the program, in tracebacks
CELL = "<cell {}>"  # of a cell of a session, which later cells may call into
CHANNEL = 3  # file descriptor of the socket to the keeper
MAX_FDS = 4096  # of keeper and zygote: above it a child has nothing to close
TRACEBACK_LINES = 60

READY = b"R"  # the first byte on the channel: from then on it is the program's business what happens
RUNNING, EXCEPTION, OUT_OF_MEMORY = range(3)  # values of a call's note

_RESERVE_BYTES = 4 << 20
_OWN = re.compile(r"<code>|<cell \d+>")


def traceback_text(error: BaseException) -> str:
    """The traceback of `error` with the program's own frames alone, in all chained exceptions; the middle of a long one cut."""
    report = traceback.TracebackException.from_exception(error)
    pending: list[traceback.TracebackException | None] = [report]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        frames = [frame for frame in one.stack or () if frame.filename == "<string>" or _OWN.fullmatch(frame.filename)]
        # Without frames `None` leaves the heading out too; the class allows for it, its type stub does not.
        one.stack = traceback.StackSummary.from_list(frames) if frames else None  # type: ignore[assignment]
        pending += [one.__cause__, one.__context__, *(one.exceptions or ())]
    lines = "".join(report.format()).splitlines(keepends=True)
    if len(lines) > TRACEBACK_LINES:
        half = TRACEBACK_LINES // 2
        lines[half:-half] = [f"  [{len(lines) - 2 * half} lines cut]\n"]
    return "".join(lines)


def execute(source: str, namespace: dict[str, Any], filename: str = FILENAME) -> None:
    """Execute the program; when its last statement is an expression, show its value once, as an interactive session does."""
    tree = ast.parse(source, filename)
    last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
    parts = [compile(tree, filename, "exec", dont_inherit=True)] if tree.body else []
    parts += [compile(ast.Interactive(last), filename, "single", dont_inherit=True)] if last else []
    for part in parts:
        exec(part, namespace)


def _exit_code(stop: SystemExit) -> tuple[int, str]:
    """The exit code that `sys.exit(x)` stands for, and what it says on standard error."""
    if stop.code is None:
        return 0, ""
    if isinstance(stop.code, int):
        return stop.code & 0xFF, ""
    return 1, f"{stop.code}\n"


def new_main() -> types.ModuleType:
    """A fresh `__main__`."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def run_program(source: str, main: types.ModuleType, note: mmap.mmap, filename: str = FILENAME) -> int:
    """Run the program in `main` and return its exit code; `note` says of 1 what it means. `atexit` functions do not run: they
    would be those of the preloaded modules too."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    pid = os.getpid()
    # Address space for the report of a MemoryError.
    reserve = mmap.mmap(-1, _RESERVE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    code = 0
    try:
        execute(source, main.__dict__, filename)
    except SystemExit as stop:
        code, message = _exit_code(stop)
        _complain(message)
    except BaseException as error:
        reserve.close()
        code = 1
        if os.getpid() == pid:  # a process forked by the program does not speak for the call
            note[0] = OUT_OF_MEMORY if isinstance(error, MemoryError) else EXCEPTION
        _complain(traceback_text(error))
    if os.getpid() != pid:
        _flush()
        os._exit(code)
    reserve.close()
    return code


def _join_threads() -> None:
    """As at the end of a script, threads that are not daemons are waited for."""
    if "threading" in sys.modules:
        threading = sys.modules["threading"]
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()


def _flush() -> None:
    streams = [sys.stdout, sys.stderr]
    streams += [own for own, now in ((sys.__stdout__, sys.stdout), (sys.__stderr__, sys.stderr)) if own is not now]
    for stream in streams:
        with contextlib.suppress(Exception):  # the program may have closed or replaced it; how the program ended stands
            stream.flush()


def _complain(text: str) -> None:
    """Write to the file descriptor of standard error, whatever the program has made of `sys.stderr`."""
    _flush()
    if not text:
        return
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(2, data) :]


JOB = struct.Struct(">?II")  # whether it is a session's, bytes of program and of input; both follow


def _receive() -> tuple[bool, str, str]:
    """(whether it is a session's, program, input) of the next job. Ends the process when there will be none."""

    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            chunk = os.read(CHANNEL, count - len(data))
            if not chunk:
                os._exit(0)
            data += chunk
        return data

    session, program, stdin = JOB.unpack(exactly(JOB.size))
    return session, exactly(program).decode("utf-8", "surrogatepass"), exactly(stdin).decode("utf-8", "surrogatepass")


def _open_input(text: str) -> None:
    """Make `text` the standard input; without any it is at its end. Bytes lie in a file without a name in the call's directory."""
    if not text:
        fd = os.open("/dev/null", os.O_RDONLY)
    else:
        try:
            fd = os.open(".", os.O_RDWR | os.O_TMPFILE, 0o600)
        except OSError:  # a file system without such files
            fd = os.open(".input", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.unlink(".input")
        data = text.encode("utf-8", "surrogatepass")
        while data:
            data = data[os.write(fd, data) :]
        os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, 0)
    os.close(fd)


def _set_processor_limit(seconds: int, hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))


def _serve_session(program: str, stdin: str, note: mmap.mmap, cpu_seconds: int) -> NoReturn:
    """Run cells in one `__main__` until the keeper has no more. SIGINT interrupts a cell, and only a cell."""
    main = new_main()
    for number in itertools.count(1):
        with contextlib.suppress(KeyboardInterrupt):  # sent to a cell that ended just then
            if stdin:
                _open_input(stdin)
            sys.stdin = open(0, encoding="utf-8", errors="surrogatepass", closefd=False)  # noqa: SIM115
            usage = resource.getrusage(resource.RUSAGE_SELF)
            _set_processor_limit(int(usage.ru_utime + usage.ru_stime) + cpu_seconds, resource.RLIM_INFINITY)
            note[0] = RUNNING
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                code = run_program(program, main, note, CELL.format(number))
                _flush()
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            os.write(CHANNEL, bytes((note[0], code)))
            _open_input("")
            _, program, stdin = _receive()
    raise AssertionError("numbers do not end")


def _set_up(slot: Slot, sandbox: Sandbox, fds: tuple[int, int, int]) -> None:
    """Confine this process; `fds`: standard output, standard error, the channel."""
    os.setsid()
    os.dup2(fds[0], 1)
    os.dup2(fds[1], 2)
    os.chdir(slot.cwd)
    for which, most in sandbox.limits():
        resource.setrlimit(which, (most, most))
    sandbox.confine(slot)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)  # last: a change of user takes it back
    if sandbox.orphaned(sandbox.settings["pid"]):
        os._exit(1)
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    os.dup2(fds[2], CHANNEL)
    os.closerange(CHANNEL + 1, MAX_FDS)


def run(slot: Slot, sandbox: Sandbox, fds: tuple[int, int, int]) -> NoReturn:
    """The whole life of a call's process, from the fork on."""
    code = 1
    note = slot.note
    try:
        try:
            _set_up(slot, sandbox, fds)
        except BaseException as error:
            _complain(f"{type(error).__name__}: {error}")
            raise
        cpu_seconds = sandbox.settings["cpu_seconds"]
        os.write(CHANNEL, READY)
        session, program, stdin = _receive()
        gc.enable()
        if session:
            _serve_session(program, stdin, note, cpu_seconds)
        if stdin:
            _open_input(stdin)
        os.close(CHANNEL)
        # Without the enumerations of `signal`, whose pages would have to be copied.
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        _set_processor_limit(cpu_seconds, cpu_seconds + 1)
        note[0] = RUNNING
        code = run_program(program, new_main(), note)
        _join_threads()
        _flush()
    finally:
        os._exit(code)  # whatever goes wrong above, a child never returns into the zygote's loop
