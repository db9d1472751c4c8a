"""What happens in the process of one call, from its fork by the zygote on. Standard library alone.

How a call ended is read from the kernel (`wait4`), never from bytes that it wrote. One byte of memory shared with the child
(`note`) only refines this: exit code 1 with `EXCEPTION` or `OUT_OF_MEMORY` noted is an uncaught exception, without it the
program's own exit(1). Code that forges the byte gains what raising the exception would have given it.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import gc
import linecache
import mmap
import os
import random
import resource
import signal
import sys
import traceback
import types
from typing import Any, NoReturn

FILENAME = "<code>"  # of the program, in tracebacks
OPEN_FILES = 128
MAX_FDS = 4096  # of the zygote: above it a child has nothing to close
TRACEBACK_LINES = 60

SETTING_UP, RUNNING, EXCEPTION, OUT_OF_MEMORY = range(4)  # values of a call's note

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
_LIBC = ctypes.CDLL(None, use_errno=True)
_RESERVE_BYTES = 4 << 20


def prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


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
        frames = [frame for frame in one.stack or () if frame.filename in (FILENAME, "<string>")]
        # Without frames `None` leaves the heading out too; the class allows for it, its type stub does not.
        one.stack = traceback.StackSummary.from_list(frames) if frames else None  # type: ignore[assignment]
        pending += [one.__cause__, one.__context__, *(one.exceptions or ())]
    lines = "".join(report.format()).splitlines(keepends=True)
    if len(lines) > TRACEBACK_LINES:
        half = TRACEBACK_LINES // 2
        lines[half:-half] = [f"  [{len(lines) - 2 * half} lines cut]\n"]
    return "".join(lines)


def execute(source: str, namespace: dict[str, Any]) -> None:
    """Execute the program; when its last statement is an expression, show its value once, as an interactive session does."""
    tree = ast.parse(source, FILENAME)
    last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
    parts = [compile(tree, FILENAME, "exec", dont_inherit=True)] if tree.body else []
    parts += [compile(ast.Interactive(last), FILENAME, "single", dont_inherit=True)] if last else []
    for part in parts:
        exec(part, namespace)


def _exit_code(stop: SystemExit) -> tuple[int, str]:
    """The exit code that `sys.exit(x)` stands for, and what it says on standard error."""
    if stop.code is None:
        return 0, ""
    if isinstance(stop.code, int):
        return stop.code & 0xFF, ""
    return 1, f"{stop.code}\n"


def run_program(source: str, note: mmap.mmap) -> int:
    """Run the program in a fresh `__main__` and return its exit code. As in a script, threads that are not daemons are waited
    for. `atexit` functions do not run: they would be those of the preloaded modules too."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    linecache.cache[FILENAME] = (len(source), None, source.splitlines(keepends=True), FILENAME)
    pid = os.getpid()
    reserve = mmap.mmap(-1, _RESERVE_BYTES)  # address space for the report of a MemoryError
    code = 0
    try:
        execute(source, main.__dict__)
    except SystemExit as stop:
        code, message = _exit_code(stop)
        _complain(message)
    except BaseException as error:
        reserve.close()
        code = 1
        if os.getpid() == pid:  # a process forked by the program does not speak for the call
            note[0] = OUT_OF_MEMORY if isinstance(error, MemoryError) else EXCEPTION
        _complain(traceback_text(error))
    if "threading" in sys.modules:
        threading = sys.modules["threading"]
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    _flush()
    return code


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):  # the program may have closed or replaced it; how the program ended stands
            stream.flush()  # type: ignore[union-attr]


def _complain(text: str) -> None:
    """Write to the file descriptor of standard error, whatever the program has made of `sys.stderr`."""
    _flush()
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(2, data) :]


def run(job: dict[str, Any], settings: dict[str, Any], fds: tuple[int, int, int], cwd: str, note: mmap.mmap) -> NoReturn:
    """The whole life of a call's process, from the fork on."""
    code = 1
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != settings["pid"]:
            os._exit(1)  # the zygote died before the line above
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        os.closerange(3, MAX_FDS)
        os.chdir(cwd)
        random.seed(0)  # the module reseeds itself from the clock or the kernel after each fork
        cpu = settings["cpu_seconds"]
        limits = (
            (resource.RLIMIT_CPU, cpu, cpu + 1),
            (resource.RLIMIT_AS, settings["memory_bytes"], settings["memory_bytes"]),
            (resource.RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES),
        )
        for which, soft, hard in limits:
            resource.setrlimit(which, (soft, hard))
        gc.enable()
        note[0] = RUNNING
        code = run_program(job["code"], note)
    finally:
        os._exit(code)  # whatever goes wrong above, a child never returns into the zygote's loop
