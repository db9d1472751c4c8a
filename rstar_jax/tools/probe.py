"""The self-test of a tier: what it promises is tried, by a program that runs as any call does. A promise that does not hold is
found here, before a model's code runs."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from rstar_jax.config import ToolConfig
from rstar_jax.tools import syscalls
from rstar_jax.types import ToolResult, ToolStatus

# Prints what could be done, by the promise which it breaks: nothing is right.
_PROGRAM = """
import ctypes, json, os, resource, socket
given = json.loads(input())
broken = {}

def forbid(promise, what, action):
    try:
        action()
    except OSError:
        return
    broken.setdefault(promise, []).append(what)

def require(promise, what, truth):
    if not truth:
        broken.setdefault(promise, []).append(what)

def connect(family, address):
    with socket.socket(family) as s:
        s.settimeout(1)
        s.connect(address)

def call(number, *arguments):
    if ctypes.CDLL(None).syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)) < 0:
        raise OSError

file, trainer = given["file"], given["pid"]
forbid("file_reads", "a file outside was read", lambda: open(file).read())
forbid("file_reads", "a directory outside was listed", lambda: os.listdir(os.path.dirname(file)))
forbid("file_writes", "a file outside was made", lambda: open(file + ".new", "w"))
forbid("file_writes", "a file outside was changed", lambda: open(file, "a"))
forbid("file_writes", "a file outside was removed", lambda: os.unlink(given["victim"]))
forbid("file_writes", "the mode of a file outside was changed", lambda: os.chmod(file, 0o600))
forbid("network", "a TCP port was reached", lambda: connect(socket.AF_INET, ("127.0.0.1", given["port"])))
forbid("network", "an abstract unix socket was reached", lambda: connect(socket.AF_UNIX, given["abstract"]))
forbid("network", "a unix socket was reached", lambda: connect(socket.AF_UNIX, given["socket"]))
if trainer > 2 or os.getpid() != 2:  # else the number is that of a process of this call
    forbid("processes", "the trainer was signalled", lambda: os.kill(trainer, 0))
    forbid("processes", "the trainer was looked at", lambda: open(f"/proc/{trainer}/status").read())
forbid("processes", "the parent was looked at", lambda: open(f"/proc/{os.getppid()}/status").read())
require("process_tree", "there is no PID namespace of the call's own", os.getpid() == 2)
require("process_count", "there is no limit", resource.getrlimit(resource.RLIMIT_NPROC)[1] != resource.RLIM_INFINITY)
space = os.statvfs(".")
require("disk", "there is no limit", space.f_blocks * space.f_frsize <= given["bytes"] and space.f_files <= given["files"] + 1)
require("user", "it is the trainer's user", os.getuid() != given["uid"])
forbid("syscalls", "a user namespace was made", lambda: call(given["unshare"], 0x10000000))
forbid("syscalls", "tracing was allowed", lambda: call(given["ptrace"], 0, 0, 0, 0))
for name in given["imports"]:
    try:
        __import__(name)
    except Exception as error:
        require("imports", f"{name} cannot be imported ({error!r})", False)
extra = set(os.environ) - set(given["environment"])
require("environment", f"{sorted(extra)} are there", not extra)
print(json.dumps(broken))
"""
_ALWAYS = ("imports", "environment")


@contextlib.contextmanager
def _planted() -> Iterator[dict[str, Any]]:
    """Things that no call may reach, for as long as the context lasts."""
    with contextlib.ExitStack() as stack:
        directory = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rstar_canary_")))
        directory.chmod(0o755)
        for name in ("key", "victim"):
            (directory / name).write_text("the answer")
            (directory / name).chmod(0o666)
        abstract = f"\0rstar_canary_{os.urandom(8).hex()}"
        path = str(directory / "socket")
        ports = []
        for family, address in ((socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_UNIX, abstract), (socket.AF_UNIX, path)):
            listener = stack.enter_context(socket.socket(family))
            listener.bind(address)
            listener.listen()
            ports.append(listener.getsockname())
        yield {
            "file": str(directory / "key"),
            "victim": str(directory / "victim"),
            "port": ports[0][1],
            "abstract": abstract,
            "socket": path,
            "pid": os.getpid(),
            "uid": os.getuid(),
        }


async def broken_promises(
    run: Callable[[str, str], Awaitable[ToolResult]], promises: Iterable[str], config: ToolConfig, environment: Iterable[str]
) -> list[str]:
    """What a call could do although the tier promises that it cannot, one phrase each. `run(code, stdin)` runs a call;
    `environment`: names of the variables that it may find. Blocks the loop for the milliseconds of a few file operations."""
    with _planted() as given:
        given |= {
            "bytes": config.disk_bytes,
            "files": config.disk_files,
            "unshare": syscalls.NUMBER.get("unshare", -1),
            "ptrace": syscalls.NUMBER.get("ptrace", -1),
            "imports": ["decimal", "wave", *config.preload],
            "environment": [*environment, "LC_CTYPE"],
        }
        result = await run(_PROGRAM, json.dumps(given))
    if result.status is not ToolStatus.OK:
        return [f"the self-test ended with {result.status}: {result.stderr.strip()[-300:]}"]
    broken = json.loads(result.stdout)
    return [phrase for promise in (*promises, *_ALWAYS) for phrase in broken.get(promise, [])]
