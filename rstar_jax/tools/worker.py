"""The owner's side of a keeper and its zygote: start them, send calls, hear of the calls' end and of theirs."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from rstar_jax.config import ToolConfig
from rstar_jax.tools.frames import frame, take_messages
from rstar_jax.tools.rootfs import BOX
from rstar_jax.tools.view import View
from rstar_jax.types import InfrastructureError, UserError

START_SECONDS = 120.0  # for the imports of `preload` on a cold disk
GRACE_SECONDS = 15.0  # past a call's deadline before its keeper counts as stuck
_ROOT = str(pathlib.Path(__file__).parents[2])
# The package need not be installed, and is not importable from a call unless it is.
_PROGRAM = """import sys
sys.path.insert(0, sys.argv[1])
from rstar_jax.tools import keeper
sys.path.pop(0)
for name in [name for name in sys.modules if name.partition(".")[0] == "rstar_jax"]:
    del sys.modules[name]
keeper.main(int(sys.argv[2]))
"""


def clean_environment(directory: str) -> dict[str, str]:
    """All that a call finds in `os.environ`. Nothing of the trainer's passes but what this interpreter needs to start."""
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "HOME": directory,
        "TMPDIR": directory,
        "PYTHONHASHSEED": "0",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
    }
    if "LD_LIBRARY_PATH" in os.environ:
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return environment


class TierUnavailable(Exception):
    """Calls cannot have the tier here; the text says why."""


@dataclasses.dataclass
class _Pending:
    future: asyncio.Future[dict[str, Any]]
    watchdog: asyncio.TimerHandle
    free: Callable[[], None]


class Worker(asyncio.Protocol):
    """One keeper with its zygote. `died` is set when the keeper's process has ended, by itself or not; the zygote ends with it."""

    def __init__(self, config: ToolConfig, seen: View, tier: str, number: int, directory: pathlib.Path | None):
        """`seen`: what calls can see of this machine. `number`: of this worker among those of this process. `directory`: for the
        calls' directories, None in the tiers where those lie in a mount namespace."""
        self.directory = directory
        self.promises: dict[str, bool] = {}
        self.tier = tier
        self._number = number
        self._seen = seen
        self.died = asyncio.Event()
        self.alive = False  # takes calls
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._inbox = bytearray()
        self._pending: dict[int, _Pending] = {}
        self._next_id = 0
        self._ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()

    async def start(self) -> None:
        """Start the process and wait for its imports. Raises `UserError` when a module of `preload` cannot be imported,
        `TierUnavailable` when the tier cannot be had, `InfrastructureError` when the process does not come up."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            self._transport, _ = await self._loop.create_connection(lambda: self, sock=ours)
            flags = ["-s", "-P", "-B", "-X", "no_debug_ranges"]  # -I would also ignore PYTHONHASHSEED
            try:
                if self.directory:
                    self.directory.mkdir(mode=0o700, parents=True)
                self._process = subprocess.Popen(
                    [sys.executable, *flags, "-c", _PROGRAM, _ROOT, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=clean_environment(str(self.directory or BOX)),
                    cwd="/",
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                self._transport.close()
                raise InfrastructureError(f"a tool process could not be started: {error}") from error
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._ended)
        try:
            self._send(self._settings())
            async with asyncio.timeout(START_SECONDS):
                answer = await self._ready
            if "refused" in answer:
                raise UserError(f"the tool's process cannot start: {answer['refused']}")
            if "unavailable" in answer:
                raise TierUnavailable(answer["unavailable"])
            self.promises = answer["promises"]
        except BaseException as error:
            self.kill()
            await self.died.wait()
            if isinstance(error, TimeoutError):
                raise InfrastructureError(f"a tool process was not ready within {START_SECONDS:.0f} s") from None
            raise
        self.alive = True

    def _settings(self) -> dict[str, Any]:
        config = self._config
        return {
            "tier": self.tier,
            "number": os.getpid() * 64 + self._number,
            "directory": str(self.directory),
            "cover": tempfile.gettempdir(),
            "trees": self._seen.trees,
            "standard_library": self._seen.standard_library,
            "sites": self._seen.sites,
            "preload": config.preload,
            "cpu_seconds": math.ceil(config.cpu_s),  # whole seconds are the kernel's unit
            "memory_bytes": config.memory_bytes,
            "output_bytes": config.output_bytes,
            "hard_output_bytes": config.hard_output_bytes,
            "processes": config.processes,
            "disk_bytes": config.disk_bytes,
            "disk_files": config.disk_files,
        }

    async def run(self, code: str, stdin: str, timeout: float, free: Callable[[], None], session: int | None = None) -> dict[str, Any]:
        """The keeper's report on one call, or on one cell of the session of that number. Raises `InfrastructureError` when the
        keeper dies first. `free` is called once when the call has left the machine, which is later than the end of this coroutine
        when that is cancelled."""
        self._next_id += 1
        call = self._next_id
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        watchdog = self._loop.call_later(timeout + GRACE_SECONDS, self.kill)
        self._pending[call] = _Pending(future, watchdog, free)
        self._send({"id": call, "code": code, "stdin": stdin, "timeout": timeout, "session": session})
        try:
            return await future
        except asyncio.CancelledError:
            if call in self._pending and self.alive:
                self._send({"cancel": call})
            raise

    def end_session(self, session: int) -> None:
        """Kill the session's process, if it lives."""
        if self.alive:
            self._send({"close": session})

    def kill(self) -> None:
        """SIGKILL the keeper; zygote and calls die with it."""
        if not self.died.is_set():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def close(self, seconds: float) -> None:
        """Let the keeper end its calls and clean up, and wait for its end; kill it after `seconds`."""
        self.alive = False
        self._transport.close()
        try:
            async with asyncio.timeout(seconds):  # `wait_for` of Python 3.11 can lose a cancellation
                await self.died.wait()
        except TimeoutError:
            self.kill()
            await self.died.wait()

    def _send(self, message: dict[str, Any]) -> None:
        self._transport.write(frame(message))

    def data_received(self, data: bytes) -> None:
        self._inbox += data
        for message in take_messages(self._inbox):
            if "id" not in message:
                self._ready.set_result(message)
                continue
            # A result that is here stops its watchdog before that can fire, however late this loop gets to run.
            pending = self._pending.pop(message["id"])
            pending.watchdog.cancel()
            if not pending.future.done():
                pending.future.set_result(message)
            pending.free()

    def _ended(self) -> None:
        """The process has ended: reap it, and fail what it had in hand."""
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        self.alive = False
        self.died.set()
        self._transport.close()
        error = InfrastructureError(f"a tool process ended with code {code}")
        if not self._ready.done():
            self._ready.set_exception(error)
        for pending in self._pending.values():
            pending.watchdog.cancel()
            if not pending.future.done():
                pending.future.set_exception(error)
            pending.free()
        self._pending.clear()


def kill_strays(directory: pathlib.Path, seconds: float = 2.0) -> None:
    """SIGKILL every process whose environment names `directory`: what the calls of a dead keeper had started (the calls
    themselves die with it). Looks until it finds none, for at most `seconds`. Blocks."""
    limit = time.monotonic() + seconds
    marks = (f"{directory}/".encode(), f"{directory}\0".encode())
    while _kill_marked(marks) and time.monotonic() < limit:
        time.sleep(0.01)


def _kill_marked(marks: tuple[bytes, ...]) -> int:
    """How many processes were found and killed."""
    found = 0
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            pidfd = os.pidfd_open(int(entry.name))
        except OSError:
            continue  # it has ended
        try:
            environment = (entry / "environ").read_bytes()
            if any(mark in environment for mark in marks):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                found += 1
        except OSError:
            continue  # it has ended, or is another user's
        finally:
            os.close(pidfd)
    return found


def remove_tree(directory: pathlib.Path) -> None:
    """Remove `directory`, however deep and whatever modes its entries have. Blocks."""
    if directory.exists():
        subprocess.run(["/bin/sh", "-c", 'chmod -R u+rwX -- "$0"; rm -rf -- "$0"', str(directory)], check=False)
