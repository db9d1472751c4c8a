"""What is left when a part of the machinery dies: nothing, and no call is lost."""

import asyncio
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

from rstar_jax.config import ToolConfig
from rstar_jax.tools import worker
from rstar_jax.tools.keeper import SPARES
from rstar_jax.tools.pool import ToolPool
from rstar_jax.types import InfrastructureError, ToolStatus

SMALL = ToolConfig(workers=1, concurrency=2, retries=1, preload=())
WEAK = dataclasses.replace(SMALL, isolation="rlimits")
SLEEPER = "import os, time\nif os.fork() == 0:\n    os.setsid()\ntime.sleep(1000)"


def family_size(zygotes, calls, isolation):
    """Processes of `zygotes` with `calls` SLEEPERs running."""
    if isolation != "auto":
        return zygotes * (2 + SPARES) + calls * 2  # with their keepers
    return zygotes * (2 + 2 * SPARES) + calls * 3  # and the idle first process of each PID namespace


@pytest.fixture(params=["auto", "landlock", "rlimits"])
def isolation(request):
    return request.param


def test_a_killed_zygote_is_replaced_and_its_calls_run_again(processes, isolation):
    async def run():
        async with ToolPool(dataclasses.replace(SMALL, isolation=isolation)) as pool:
            (before,) = processes.zygotes()
            calls = [asyncio.create_task(pool.run(f"import time; time.sleep(0.7); print({i})")) for i in range(4)]
            await asyncio.sleep(0.3)
            os.kill(before, signal.SIGKILL)
            results = await asyncio.gather(*calls)
            return before, processes.zygotes(), results

    before, after, results = asyncio.run(run())
    assert [(r.status, r.stdout) for r in results] == [(ToolStatus.OK, f"{i}\n") for i in range(4)]
    assert len(after) == 1 and after != [before]


def test_what_the_calls_of_a_killed_zygote_had_started_dies_with_it(processes, isolation):
    async def run():
        async with ToolPool(dataclasses.replace(SMALL, isolation=isolation)) as pool:
            call = asyncio.create_task(pool.run(SLEEPER, timeout=60.0))
            (zygote,) = processes.zygotes()
            await asyncio.sleep(0.3)
            family = processes.descendants(zygote)
            assert len(family) > SPARES
            os.kill(zygote, signal.SIGKILL)
            gone = await asyncio.to_thread(processes.eventually, lambda: not any(map(processes.runs, family)))
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return gone

    assert asyncio.run(run())


def test_a_program_that_kills_its_zygote_is_an_infrastructure_error_and_the_next_call_works():
    async def run():
        async with ToolPool(WEAK) as pool:
            with pytest.raises(InfrastructureError, match="2 times"):
                await pool.run("import os; os.kill(os.getppid(), 9)")
            return await pool.run("print('next')")

    assert asyncio.run(run()).stdout == "next\n"


def test_a_program_that_stops_its_zygote_does_not_hang_the_pool(monkeypatch):
    monkeypatch.setattr(worker, "GRACE_SECONDS", 0.5)

    async def run():
        async with ToolPool(WEAK) as pool:
            with pytest.raises(InfrastructureError):
                await pool.run("import os; os.kill(os.getppid(), 19)", timeout=0.3)
            return await pool.run("print('next')")

    assert asyncio.run(run()).stdout == "next\n"


def test_closing_the_pool_ends_running_calls_and_leaves_nothing(processes, isolation):
    async def run():
        async with ToolPool(ToolConfig(workers=2, concurrency=4, preload=(), isolation=isolation)) as pool:
            calls = [asyncio.create_task(pool.run(SLEEPER, timeout=60.0)) for _ in range(6)]
            others = [*processes.zygotes()]
            await asyncio.sleep(0.5)
            family = [pid for zygote in others for pid in [zygote, *processes.descendants(zygote)]]
            assert len(family) >= 2 + 4 * 2
            root = pool._root or pathlib.Path("/nowhere")
        return family, root, await asyncio.gather(*calls, return_exceptions=True)

    before = os.listdir("/proc/self/fd")
    family, root, outcomes = asyncio.run(run())
    assert [type(outcome) for outcome in outcomes] == [InfrastructureError] * 6
    assert [pid for pid in family if processes.state(pid) is not None] == []
    assert not root.exists()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_pool_that_cannot_replace_its_zygote_says_so_instead_of_waiting(monkeypatch, processes):
    async def run():
        async with ToolPool(SMALL) as pool:
            monkeypatch.setattr(worker, "_PROGRAM", "raise SystemExit(7)")
            (zygote,) = processes.zygotes()
            os.kill(zygote, signal.SIGKILL)
            with pytest.raises(InfrastructureError, match="cannot be replaced: a tool process ended with code 7"):
                await asyncio.wait_for(pool.run("1"), 20)

    asyncio.run(run())


TRAINER = """
import asyncio, sys
from rstar_jax.config import ToolConfig
from rstar_jax.tools.pool import ToolPool
from rstar_jax.tools.keeper import SPARES

async def main():
    async with ToolPool(ToolConfig(workers=2, concurrency=4, preload=(), isolation={isolation!r})) as pool:
        print(pool._root or "/nowhere", flush=True)
        code = {code!r}
        await asyncio.gather(*(pool.run(code, timeout=1000.0) for _ in range(4)))

asyncio.run(main())
"""


def mounts():
    return len(pathlib.Path("/proc/self/mountinfo").read_text().splitlines())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_trainer_leaves_no_process_and_no_directory(number, processes, isolation):
    before = mounts()
    program = textwrap.dedent(TRAINER).format(isolation=isolation, code="open('file', 'w')\n" + SLEEPER)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as trainer:
        root = pathlib.Path(trainer.stdout.readline().strip())
        size = family_size(2, 4, isolation)
        assert processes.eventually(lambda: len(processes.descendants(trainer.pid)) == size, 20.0)
        family = processes.descendants(trainer.pid)
        trainer.send_signal(number)
        trainer.wait()
    assert processes.eventually(lambda: not any(map(processes.runs, family)))
    assert processes.eventually(lambda: not root.exists())
    assert mounts() == before


def test_the_pool_leaves_its_loop_free_while_calls_run():
    async def run():
        ticks = 0
        async with ToolPool(SMALL) as pool:
            call = asyncio.create_task(pool.run("while True: pass", timeout=1.0))
            while not call.done():
                await asyncio.sleep(0.01)
                ticks += 1
        return ticks

    assert asyncio.run(run()) >= 20
