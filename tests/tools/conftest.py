"""One pool for all tests of this folder."""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import time

import pytest

from rstar_jax.config import ToolConfig
from rstar_jax.tools.keeper import SPARES
from rstar_jax.tools.pool import ToolPool

CONFIG = ToolConfig(
    workers=2,
    concurrency=4,
    timeout_s=20.0,
    cpu_s=1.0,
    memory_bytes=256 << 20,
    output_bytes=2000,
    hard_output_bytes=4 << 20,
    code_bytes=100_000,
    preload=("math",),
)


class Shared:
    """A pool on a loop that runs only inside `run`."""

    def __init__(self, runner: asyncio.Runner, pool: ToolPool):
        self.runner = runner
        self.pool = pool

    def run(self, code, stdin=None, timeout=None):
        return self.runner.run(self.pool.run(code, stdin, timeout))

    def many(self, codes, timeout=None):
        async def gather():
            return await asyncio.gather(*(self.pool.run(code, timeout=timeout) for code in codes))

        return self.runner.run(gather())


@pytest.fixture(scope="session", params=["auto", "rlimits"])
def shared(request):
    """The strongest tier that there is, and the weakest."""
    with asyncio.Runner() as runner:
        pool = runner.run(ToolPool(dataclasses.replace(CONFIG, isolation=request.param)).__aenter__())
        yield Shared(runner, pool)
        runner.run(pool.__aexit__(None, None, None))


class Processes:
    """What is running, read from /proc."""

    @staticmethod
    def children(pid):
        """Pids of the children of `pid`, those of all its threads, zombies included."""
        found = []
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may end meanwhile
            for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
                found += [int(p) for p in (task / "children").read_text().split()]
        return found

    @staticmethod
    def descendants(pid):
        return [found for child in Processes.children(pid) for found in [child, *Processes.descendants(child)]]

    @staticmethod
    def is_keeper(pid):
        return b"keeper.main" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()

    @staticmethod
    def state(pid):
        """The state letter of a process, or None when there is none."""
        try:
            return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return None

    @staticmethod
    def runs(pid):
        return Processes.state(pid) not in (None, "Z")

    @staticmethod
    def eventually(condition, seconds=10.0):
        """Whether `condition()` becomes true within `seconds`."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if condition():
                return True
            time.sleep(0.02)
        return condition()

    @staticmethod
    def keepers():
        """Pids of the keepers that this process owns."""
        return [child for child in Processes.children(os.getpid()) if Processes.is_keeper(child)]

    @staticmethod
    def zygotes():
        """Pids of their zygotes."""
        return [child for keeper in Processes.keepers() for child in Processes.children(keeper)]

    @staticmethod
    def namespace(pid):
        """The PID namespace of a process."""
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/{pid}/ns/pid")
        return None

    @staticmethod
    def quiet(zygote):
        """Whether a zygote has no children but its spares, each with an idle first process where there are PID namespaces."""
        family = Processes.descendants(zygote)
        own = Processes.namespace(zygote)
        expected = SPARES if own == Processes.namespace("self") else 2 * SPARES
        return len(family) == expected and "Z" not in map(Processes.state, family)


@pytest.fixture(scope="session")
def processes():
    return Processes
