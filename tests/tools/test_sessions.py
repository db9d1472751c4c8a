"""A Python that lives from call to call, and what is told when it does not."""

import asyncio
import dataclasses

import pytest

from rstar_jax.config import ToolConfig
from rstar_jax.tools.formatting import format_result
from rstar_jax.tools.pool import ToolPool
from rstar_jax.tools.python_tool import PythonTool, SessionPythonTool
from rstar_jax.types import InfrastructureError, SessionTool, ToolStatus

CONFIG = ToolConfig(workers=1, concurrency=2, max_sessions=2, preload=(), timeout_s=20.0)


@pytest.fixture(scope="module", params=["auto", "rlimits"])
def pool(request):
    with asyncio.Runner() as runner:
        pool = runner.run(ToolPool(dataclasses.replace(CONFIG, isolation=request.param)).__aenter__())
        pool.runner = runner
        yield pool
        runner.run(pool.__aexit__(None, None, None))


def cells(pool, *codes, timeout=None):
    """Results of a session that runs `codes` one after the other."""

    async def run():
        async with pool.session() as session:
            return [await session.run(code, timeout=timeout) for code in codes]

    return pool.runner.run(run())


def test_names_modules_files_and_errors_live_on(pool):
    results = cells(
        pool,
        "import math\nx = [1]\nopen('f', 'w').write('kept')",
        "x.append(math.floor(2.5)); 1/0",
        "x, open('f').read()",
        "def f():\n    return undefined",
        "f()",
    )
    assert [r.status for r in results] == [ToolStatus.OK, ToolStatus.ERROR, ToolStatus.OK, ToolStatus.OK, ToolStatus.ERROR]
    assert results[2].stdout == "([1, 2], 'kept')\n"
    assert "return undefined" in results[4].stderr and '"<cell 4>", line 2' in results[4].stderr
    assert {r.state for r in results} == {""}


def test_sessions_and_calls_know_nothing_of_each_other(pool):
    async def run():
        async with pool.session() as a, pool.session() as b:
            await a.run("x = 1")
            return [(await b.run("'x' in globals()")).stdout, (await pool.run("'x' in globals()")).stdout, (await a.run("x")).stdout]

    assert pool.runner.run(run()) == ["False\n", "False\n", "1\n"]


def test_a_time_out_interrupts_and_keeps_the_names(pool):
    first, late, after = cells(pool, "x = 1", "x = 2\nwhile True: pass", "x", timeout=0.5)
    assert (first.status, late.status, after.stdout) == (ToolStatus.OK, ToolStatus.TIMEOUT, "2\n")
    assert late.state == "" and late.stderr.endswith("KeyboardInterrupt\n")


STUBBORN = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (STUBBORN, ToolStatus.TIMEOUT),
        ("import os; os._exit(3)", ToolStatus.EXIT),
        ("import os; os._exit(0)", ToolStatus.OK),
        ("import ctypes; ctypes.string_at(0)", ToolStatus.SIGNAL),
    ],
)
def test_a_process_that_dies_takes_its_names_along_and_the_text_says_so(pool, code, status):
    _, dead, after, again = cells(pool, "x = 1", code, "'x' in globals()", "2", timeout=1.0)
    assert (dead.status, dead.state) == (status, "lost")
    assert [(r.status, r.stdout, r.state) for r in (after, again)] == [(ToolStatus.OK, "False\n", ""), (ToolStatus.OK, "2\n", "")]
    for style in ("rstar2", "jupyter", "last_line"):
        assert "all variables are gone" in format_result(dead, style=style).splitlines()[-1]


@pytest.mark.parametrize(
    ("code", "status", "exit_code"), [("exit(0)", ToolStatus.OK, 0), ("import sys; sys.exit(4)", ToolStatus.EXIT, 4)]
)
def test_exit_ends_the_cell_and_not_the_session(pool, code, status, exit_code):
    _, ended, after = cells(pool, "x = 1", code, "x")
    assert (ended.status, ended.exit_code, after.stdout) == (status, exit_code, "1\n")


def test_what_a_session_says_on_its_channel_hurts_only_itself(pool):
    forge = "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'\\x01\\x01' * 50)\n    except OSError: pass"
    results = cells(pool, forge, "print('next')", "print('last')")
    assert all(r.status in (ToolStatus.OK, ToolStatus.ERROR, ToolStatus.EXIT) for r in results)
    assert cells(pool, "6 * 7")[0].stdout == "42\n"


def test_calls_of_a_session_run_in_the_order_in_which_they_were_made(pool):
    async def run():
        async with pool.session() as session:
            await session.run("seen = []")
            calls = (session.run(f"import time; time.sleep({0.05 * (5 - i)}); seen.append({i})") for i in range(5))
            await asyncio.gather(*calls)
            return await session.run("seen")

    assert pool.runner.run(run()).stdout == "[0, 1, 2, 3, 4]\n"


def test_the_least_recently_used_session_gives_way_and_is_rebuilt(pool):
    async def run():
        before = pool._sessions.evictions
        async with pool.session() as a, pool.session() as b, pool.session() as c:
            await a.run("import random\nx = random.random()\nprint(x)")
            await b.run("y = 'b'")
            await a.run("z = x")
            await c.run("w = 'c'")  # b was used least recently
            assert pool._sessions.live == 2
            texts = [(await one.run(name)) for one, name in ((b, "y"), (a, "z == x"), (c, "w"))]
            return pool._sessions.evictions - before, texts

    evictions, results = pool.runner.run(run())
    assert evictions >= 2
    assert [(r.stdout, r.state) for r in results] == [("'b'\n", ""), ("True\n", ""), ("'c'\n", "")]
    assert pool._sessions.live == 0


def test_a_rebuilt_session_that_differs_says_so(pool):
    async def run():
        async with pool.session() as session:
            await session.run("import time\nprint(time.time_ns())")
            session.evict()
            return await session.run("6 * 7")

    result = pool.runner.run(run())
    assert (result.stdout, result.state) == ("42\n", "diverged")
    assert "other values" in format_result(result, style="jupyter")


def test_a_session_whose_zygote_dies_is_rebuilt_on_its_successor(pool):
    async def run():
        async with pool.session() as session:
            await session.run("x = 5")
            session._worker.kill()
            return await session.run("x")

    result = pool.runner.run(run())
    assert (result.stdout, result.state) == ("5\n", "")


def test_a_cancelled_cell_takes_the_session_with_it(pool):
    async def run():
        async with pool.session() as session:
            await session.run("x = 1")
            call = asyncio.create_task(session.run("import time; time.sleep(100)"))
            await asyncio.sleep(0.2)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return await session.run("'x' in globals()")

    assert pool.runner.run(run()).stdout == "False\n"


def test_a_closed_session_and_bad_arguments_are_refused(pool):
    async def run():
        async with pool.session() as session:
            rejected = await session.run(5)
        with pytest.raises(RuntimeError, match="closed"):
            await session.run("1")
        return rejected

    assert pool.runner.run(run()).status is ToolStatus.REJECTED


def test_the_tool_of_a_trajectory_remembers_and_the_tool_itself_does_not(pool):
    tool = SessionPythonTool(pool, style="last_line")
    assert isinstance(tool, SessionTool) and not isinstance(PythonTool(pool), SessionTool)

    async def run():
        async with tool.session() as own:
            await own.call({"code": "x = 1"})
            return [(await one.call({"code": "'x' in globals()"})).stdout for one in (own, tool)]

    assert pool.runner.run(run()) == ["True\n", "False\n"]


def test_no_more_tries_than_configured_when_the_machinery_fails(pool):
    async def run():
        async with pool.session() as session:
            original, attempts = session._cell, []

            async def broken(*arguments):
                attempts.append(arguments)
                raise InfrastructureError("no machine")

            session._cell = broken
            with pytest.raises(InfrastructureError, match="3 times"):
                await session.run("1")
            session._cell = original
            return len(attempts)

    assert pool.runner.run(run()) == 3
