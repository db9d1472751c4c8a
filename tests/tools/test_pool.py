"""What a program can do to a call, and what a call says of it."""

import asyncio
import os
import pathlib
import time

import pytest

from rstar_jax.config import ToolConfig
from rstar_jax.tools.base import Job
from rstar_jax.tools.isolation import PROMISES
from rstar_jax.tools.pool import ToolPool
from rstar_jax.types import ToolStatus, UserError

OK, ERROR, EXIT, TIMEOUT = ToolStatus.OK, ToolStatus.ERROR, ToolStatus.EXIT, ToolStatus.TIMEOUT


# --- what is shown ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "stdout"),
    [
        ("print(2+2)", "4\n"),  # exactly, with nothing wrapped around it
        ("34*57", "1938\n"),
        ("a=3; a+1", "4\n"),
        ("'text'", "'text'\n"),
        ("None", ""),
        ("x = 1", ""),
        ("", ""),
        ("# a comment", ""),
        ("print('once')", "once\n"),
        ("def f():\n    print('side effect')\n    return 7\nf()", "side effect\n7\n"),
        ("for i in range(2):\n    i", ""),
        ("from __future__ import annotations\nx: undefined = 1\nx", "1\n"),
        ("print('a\\x00b')", "a\x00b\n"),
        ("print('\\ud800')", "\\ud800\n"),
        ("'\\ud83d'", "'\\ud83d'\n"),
        ("import sys\nn = sys.stdout.buffer.write(b'\\xff\\xfeA\\n')", "\ufffd\ufffdA\n"),
        ("print('@@E'); print('@@D1.0'); print('{\"status\": \"error\"}')", '@@E\n@@D1.0\n{"status": "error"}\n'),
        ("__name__", "'__main__'\n"),
        ("import sys; sys.argv", "['']\n"),
        ("class A: pass\nimport pickle\ntype(pickle.loads(pickle.dumps(A()))).__name__", "'A'\n"),
        ("import os; os.environ['LANG'], os.environ['TZ'], hash('abc') == hash('abc')", "('C.UTF-8', 'UTC', True)\n"),
        ("print('é' * 2, '漢', '🎉')", "éé 漢 🎉\n"),
        ("import subprocess\nsubprocess.run(['echo', 'from a subprocess']).returncode", "from a subprocess\n0\n"),
        ("import sys\nsys.stdout.close()", ""),
        ("import io, sys\nsys.stdout = io.StringIO()\nprint('kept to itself')", ""),
    ],
)
def test_what_a_program_prints_and_the_value_of_its_last_expression_are_the_output(shared, code, stdout):
    result = shared.run(code)
    assert (result.status, result.stdout, result.stderr, result.exit_code) == (OK, stdout, "", 0)
    assert not result.truncated


def test_output_before_an_exception_is_kept(shared):
    result = shared.run("print('p1')\nprint('p2', end='')\n1/0")
    assert (result.status, result.stdout, result.exit_code) == (ERROR, "p1\np2", 1)


def test_a_last_expression_that_raises_runs_once(shared):
    result = shared.run("def f():\n    print('x')\n    raise ValueError('no')\nf()")
    assert result.stdout == "x\n"
    assert result.stderr == (
        'Traceback (most recent call last):\n  File "<code>", line 4, in <module>\n    f()\n'
        "  File \"<code>\", line 3, in f\n    raise ValueError('no')\nValueError: no\n"
    )


def test_a_traceback_holds_no_frame_and_no_path_that_is_not_the_programs(shared):
    result = shared.run("import json\ntry:\n    json.loads('{')\nexcept ValueError as e:\n    raise KeyError('k') from e")
    assert result.status is ERROR
    assert "direct cause" in result.stderr and "JSONDecodeError" in result.stderr
    assert [line for line in result.stderr.splitlines() if "File" in line and '"<code>"' not in line] == []


def test_a_syntax_error_has_a_caret_and_no_heading(shared):
    result = shared.run("x = 1\ndef f(:\n    pass")
    assert (result.status, result.exit_code) == (ERROR, 1)
    assert result.stderr == '  File "<code>", line 2\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("x = '\ud800'", "surrogates not allowed\n"),
        ("x = 1\x00", "source code string cannot contain null bytes\n"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt\n"),
        ("import jax_is_not_here", "ModuleNotFoundError: No module named 'jax_is_not_here'\n"),
        ("def f():\n    return f()\nf()", "RecursionError: maximum recursion depth exceeded\n"),
        ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "E: <exception str() failed>\n"),
        ("raise ExceptionGroup('g', [ValueError('inner')])", "ValueError: inner\n    +------------------------------------\n"),
    ],
)
def test_every_uncaught_exception_is_an_error_with_its_text_at_the_end(shared, code, ending):
    result = shared.run(code)
    assert (result.status, result.exit_code) == (ERROR, 1)
    assert result.stderr.endswith(ending)
    assert len(result.stderr.splitlines()) <= 61


def test_a_long_chain_of_exceptions_is_shown_in_bounded_lines(shared):
    code = "def f(n):\n    try:\n        raise ValueError(n)\n    except ValueError:\n        f(n - 1) if n else 1/0\nf(60)"
    result = shared.run(code)
    assert result.status is ERROR
    assert "lines cut]" in result.stderr and result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert len(result.stderr.splitlines()) == 61


# --- exit codes and signals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status", "exit_code", "stdout", "stderr"),
    [
        ("print('@@E'); import sys; sys.exit(0)", OK, 0, "@@E\n", ""),
        ("print('kept'); exit(3)", EXIT, 3, "kept\n", ""),
        ("print('kept'); import os; os._exit(3)", EXIT, 3, "kept\n", ""),
        ("exit('bye')", EXIT, 1, "", "bye\n"),
        ("import sys; sys.exit(1)", EXIT, 1, "", ""),  # not an error: nothing was raised but SystemExit
        ("raise SystemExit(300)", EXIT, 44, "", ""),
        ("raise SystemExit", OK, 0, "", ""),
        ("quit()", OK, 0, "", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", ToolStatus.SIGNAL, -11, "", ""),
        ("import os; os.abort()", ToolStatus.SIGNAL, -6, "", ""),
        ("print('kept'); import ctypes; ctypes.string_at(0)", ToolStatus.SIGNAL, -11, "kept\n", ""),
        ("import signal; signal.alarm(1); signal.pause()", ToolStatus.SIGNAL, -14, "", ""),
    ],
)
def test_the_exit_status_is_the_kernels(shared, code, status, exit_code, stdout, stderr):
    result = shared.run(code)
    assert (result.status, result.exit_code, result.stdout, result.stderr) == (status, exit_code, stdout, stderr)
    assert shared.run("1+1").stdout == "2\n"


def test_a_forked_process_of_the_program_does_not_speak_for_it(shared):
    result = shared.run("import os, sys\nif os.fork() == 0:\n    1/0\nos.wait()\nsys.exit(1)")
    assert (result.status, result.exit_code) == (EXIT, 1)


# --- time ------------------------------------------------------------------------------------------------------------

SLEEP = "import time; print('before'); time.sleep(1000)"
IGNORE = "import signal\nfor s in range(1, 32):\n    if s not in (9, 19): signal.signal(s, signal.SIG_IGN)\n"
ENDLESS_TEXT = "print('before')\nclass E(Exception):\n    def __str__(self):\n        while True: pass\nraise E"
THREAD = "import threading, time; print('before'); threading.Thread(target=time.sleep, args=(1000,)).start()"
LOOPS = {
    "a loop": "print('before')\nwhile True: pass",
    "a sleep": SLEEP,
    "a long C call": "print('before')\n10**10**9",
    "ignored signals": IGNORE + SLEEP,
    "a cancelled alarm": "import signal; signal.alarm(0)\n" + SLEEP,
    "a stopped process": "import os; print('before'); os.kill(os.getpid(), 19)",
    "an exception whose text never ends": ENDLESS_TEXT,
    "a thread that never ends": THREAD,
    "a grandchild with the pipe": "import os, time; print('before', flush=True); os.fork(); time.sleep(1000)",
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_hang_ends_at_its_deadline_with_what_was_printed(shared, name):
    start = time.monotonic()
    result = shared.run(LOOPS[name], timeout=0.5)
    assert time.monotonic() - start < 5.0
    assert (result.status, result.exit_code, result.stdout) == (TIMEOUT, -9, "before\n")
    assert result.seconds >= 0.5


def test_a_call_returns_soon_after_its_deadline_and_not_when_the_work_is_done(shared):
    start = time.monotonic()
    assert shared.run("import time; time.sleep(30)", timeout=1.0).status is TIMEOUT
    assert time.monotonic() - start < 10.0


def test_hanging_calls_do_not_use_up_the_pool(shared):
    hanging = shared.many(["while True: pass"] * 8, timeout=0.2)
    assert [r.status for r in hanging] == [TIMEOUT] * 8
    assert shared.run("print('alive')").stdout == "alive\n"


def test_fifty_time_outs_leave_no_zombie_and_no_process(shared, processes):
    results = shared.many(["import time; time.sleep(60)"] * 50, timeout=0.2)
    assert [r.status for r in results] == [TIMEOUT] * 50
    for zygote in processes.zygotes():
        assert processes.eventually(lambda pid=zygote: processes.quiet(pid))
    assert [pid for pid in processes.children(os.getpid()) if processes.state(pid) == "Z"] == []


def test_waiting_for_a_place_does_not_count_as_run_time(shared):
    async def burst():
        return await asyncio.gather(*(shared.pool.run(f"print({i})", timeout=8.0) for i in range(256)))

    results = shared.runner.run(burst())
    assert [r.stdout for r in results] == [f"{i}\n" for i in range(256)]


def test_processor_time_is_limited_apart_from_wall_time(shared):
    result = shared.run("while True: pass")
    assert result.status is ToolStatus.CPU_LIMIT
    assert 0.9 < result.cpu_seconds < 3.0


def test_ignoring_the_warning_does_not_lift_the_processor_limit(shared):
    result = shared.run("import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass")
    assert (result.status, result.exit_code) == (ToolStatus.CPU_LIMIT, -9)


# --- memory and output -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "x = 'a' * 10**10",
        "x = bytearray(100 << 30)",
        "x = []\nwhile True: x.append(bytes(1 << 22))",  # untouched pages: faults can cost more than the processor limit
    ],
)
def test_memory_that_runs_out_is_a_memory_error_of_the_call(shared, code):
    result = shared.run(code)
    assert (result.status, result.exit_code) == (ToolStatus.MEMORY, 1)
    assert result.stderr.endswith("MemoryError\n")


def test_a_caught_memory_error_is_the_programs_own_business(shared):
    result = shared.run("try:\n    bytearray(100 << 30)\nexcept MemoryError:\n    print('small then')")
    assert (result.status, result.stdout) == (OK, "small then\n")


def test_long_output_keeps_head_and_tail_and_counts_what_was_cut(shared):
    # 100,000 lines of 7 bytes; 2,000 bytes are kept: 1,000 of each end
    result = shared.run("for i in range(100_000): print(f'{i:06d}')")
    whole = "".join(f"{i:06d}\n" for i in range(100_000))
    assert result.status is OK and result.truncated
    assert result.stdout == f"{whole[:1000]}\n[... 698000 bytes cut ...]\n{whole[-1000:]}"


def test_output_of_just_the_limit_is_whole(shared):
    result = shared.run("import sys; n = sys.stdout.write('x' * 1000 + 'y' * 1000)")
    assert (result.stdout, result.truncated) == ("x" * 1000 + "y" * 1000, False)


def test_a_cut_never_splits_a_character(shared):
    # 3 bytes each: 1,000 bytes of head hold 333 and a third; the tail likewise
    result = shared.run("print('漢' * 2000, end='')")
    assert result.stdout == "漢" * 333 + f"\n[... {6000 - 2 * 999} bytes cut ...]\n" + "漢" * 333


def test_both_streams_are_drained_while_the_program_runs(shared):
    result = shared.run("import sys\nfor i in range(3):\n    print('o' * 200_000); print('e' * 200_000, file=sys.stderr)")
    assert result.status is OK
    assert "bytes cut" in result.stdout and "bytes cut" in result.stderr


def test_many_talkative_calls_at_once_are_all_drained(shared):
    codes = [f"for _ in range(20): print('{chr(97 + i)}' * 20_000)" for i in range(24)]  # each over a pipe's 64 KiB
    results = shared.many(codes)
    assert [(r.status, r.stdout[:3], r.truncated) for r in results] == [(OK, chr(97 + i) * 3, True) for i in range(24)]


def test_a_flood_is_ended(shared):
    result = shared.run("while True: print('x' * 10_000)")
    assert result.status is ToolStatus.OUTPUT_LIMIT
    assert len(result.stdout) < 2100 and result.truncated


# --- input, files, processes -----------------------------------------------------------------------------------------


def test_input_without_any_ends_at_once(shared):
    result = shared.run("input()")
    assert result.status is ERROR and result.stderr.endswith("EOFError: EOF when reading a line\n")
    assert shared.run("help()", timeout=10.0).status is OK


@pytest.mark.parametrize("text", ["3\n4\n", "no newline", "漢🎉", "\ud800x", "x" * 90_000])
def test_input_is_read_as_it_was_given(shared, text):
    result = shared.run("import sys; t = sys.stdin.read(); print(len(t), ascii(t[:5]))", text)
    assert result.stdout == f"{len(text)} {text[:5]!a}\n"


def test_the_working_directory_is_empty_at_each_call(shared):
    probe = "import os; os.listdir(), os.stat('.').st_mode, os.environ['HOME'] == os.environ['TMPDIR'] == os.getcwd()"
    make = (
        "import os\nos.makedirs('a/b'); open('a/b/f', 'w').write('x'); os.chmod('a', 0); os.symlink('/', 'root'); os.chmod('.', 0o777)"
    )
    for code in (make, "f = open('left', 'w')", "import os; os.mkfifo('fifo')", "import os; os.chmod('.', 0)"):
        results = shared.many([code] * 8)
        assert [(r.status, r.stderr) for r in results] == [(OK, "")] * 8
        assert {r.stdout for r in shared.many([probe] * 8)} == {f"([], {0o40700}, True)\n"}


def test_a_deep_tree_of_directories_is_removed(shared, processes):
    code = "import os\nfor _ in range(1500):\n    os.mkdir('d'); os.chdir('d')\n"
    assert [r.status for r in shared.many([code] * 8)] == [OK] * 8
    assert {r.stdout for r in shared.many(["import os; os.listdir()"] * 8)} == {"[]\n"}
    root = shared.pool._root
    assert root is None or processes.eventually(lambda: not list(root.glob("*/*/d")) and not list(root.glob("*/*.*")))


def test_a_program_can_import_what_it_wrote(shared):
    assert shared.run("open('helper.py', 'w').write('x = 5')\nimport helper\nhelper.x").stdout == "5\n"


def test_a_file_has_a_size_limit(shared):
    result = shared.run("with open('big', 'wb') as f:\n    f.truncate(65 << 20)")
    assert result.status is ERROR and "File too large" in result.stderr


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {own}time.sleep(1000)
    os._exit(0)
os.wait()
print('parent done')
"""


@pytest.mark.parametrize("own", ["", "import ctypes; ctypes.CDLL(None).prctl(36, 0, 0, 0, 0); "])
def test_a_daemon_that_holds_stdout_neither_delays_a_call_nor_survives_it(shared, own, processes):
    start = time.monotonic()
    result = shared.run(DAEMON.format(own=own))
    assert time.monotonic() - start < 8.0
    assert (result.status, result.stdout) == (OK, "parent done\n")
    for zygote in processes.zygotes():
        assert processes.eventually(lambda pid=zygote: processes.quiet(pid))


def test_processes_of_a_call_in_sessions_of_their_own_die_with_it(shared, processes):
    code = "import os, time\nfor _ in range(20):\n    if os.fork() == 0:\n        os.setsid(); os.fork(); break\ntime.sleep(1000)"
    assert shared.run(code, timeout=1.0).status is TIMEOUT
    for zygote in processes.zygotes():
        assert processes.eventually(lambda pid=zygote: processes.quiet(pid))


def test_a_background_process_of_a_running_call_outlives_another_calls_end(shared):
    async def both():
        long = asyncio.create_task(
            shared.pool.run("import os, time\nos.system('(sleep 1.2; echo background) &')\ntime.sleep(3)\nprint('end')")
        )
        for _ in range(10):
            await shared.pool.run("1")
        return await long

    assert shared.runner.run(both()).stdout == "background\nend\n"


def test_multiprocessing_and_threads_work(shared):
    code = (
        "import multiprocessing, threading\n"
        "def f(x): print(x)\n"
        "p = multiprocessing.Process(target=f, args=('process',)); p.start(); p.join()\n"
        "threading.Thread(target=f, args=('thread',)).start()"
    )
    result = shared.run(code)
    assert (result.status, result.stdout) == (OK, "process\nthread\n")


def test_no_file_descriptor_is_inherited(shared):
    code = "import os\nn = 0\nfor fd in range(3, 4096):\n    try: os.fstat(fd); n += 1\n    except OSError: pass\nn"
    assert [r.stdout for r in shared.many([code] * 8)] == ["0\n"] * 8


def test_the_trainers_environment_is_not_inherited(shared, monkeypatch):
    monkeypatch.setenv("RSTAR_CANARY", "secret-canary")
    code = "import os; 'secret-canary' in str(os.environ), b'secret-canary' in open('/proc/self/environ', 'rb').read()"

    async def fresh():
        async with ToolPool(ToolConfig(workers=1, concurrency=1)) as pool:
            return await pool.run(code)

    assert asyncio.run(fresh()).stdout == "(False, False)\n"


# --- one call and the next -------------------------------------------------------------------------------------------


def test_nothing_of_a_call_reaches_the_next(shared):
    spoil = (
        "import math, builtins, sys, os\nmath.sqrt = lambda x: 'spoiled'\nbuiltins.print = None\nbuiltins.left = 1\n"
        "sys.modules['json'] = None\nos.environ['LEFT'] = '1'\n"
        "sys.setrecursionlimit(50)\nos.umask(0o777)\nimport gc; gc.disable()"
    )
    assert [r.status for r in shared.many([spoil] * 8)] == [OK] * 8
    check = (
        "import math, builtins, json, os, sys, gc\n"
        "print(math.sqrt(4), hasattr(builtins, 'left'), json.dumps(1), 'LEFT' in os.environ, end=' ')\n"
        "print(sys.getrecursionlimit(), gc.isenabled())"
    )
    assert {r.stdout for r in shared.many([check] * 8)} == {"2.0 False 1 False 1000 True\n"}


def test_random_numbers_and_hashes_are_the_same_in_every_call(shared):
    results = shared.many(["import random; print(random.random(), hash('abc'), {'a', 'b', 'c', 'd'})"] * 12)
    assert len({r.stdout for r in results}) == 1


def test_exit_of_one_call_does_not_end_the_next(shared):
    assert shared.run("exit(0)").status is OK
    assert shared.run("print('next')").stdout == "next\n"


def test_run_many_keeps_the_order_and_takes_jobs_only_when_they_can_start(shared):
    taken = []
    running = []

    def jobs():
        for i in range(40):
            taken.append(i)
            running.append(len(taken))
            yield Job(f"import time; time.sleep({0.05 if i % 4 == 0 else 0}); print({i})", timeout=15.0)

    async def run():
        task = asyncio.create_task(shared.pool.run_many(jobs()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first = len(taken)
        return first, await task

    first, results = shared.runner.run(run())
    assert first <= 4
    assert [r.stdout for r in results] == [f"{i}\n" for i in range(40)]


def test_a_cancelled_call_is_killed_and_its_place_is_free_again(shared):
    async def cancel_all():
        tasks = [asyncio.create_task(shared.pool.run("import time; time.sleep(1000)")) for _ in range(4)]
        await asyncio.sleep(0.3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [task.cancelled() for task in tasks], await shared.pool.run("print('free')")

    cancelled, result = shared.runner.run(cancel_all())
    assert cancelled == [True] * 4
    assert result.stdout == "free\n"


@pytest.mark.parametrize(
    ("code", "stdin", "complaint"),
    [
        (None, None, "code must be a string, not NoneType"),
        (5, None, "code must be a string, not int"),
        ("1", 5, "input must be a string, not int"),
        ("#" * 100_001, None, "code is 100001 bytes long; at most 100000 are allowed"),
        ("é" * 50_001, None, "code is 100002 bytes long; at most 100000 are allowed"),
    ],
)
def test_what_cannot_be_run_is_rejected_with_one_line(shared, code, stdin, complaint):
    result = shared.run(code, stdin)
    assert (result.status, result.stderr, result.exit_code) == (ToolStatus.REJECTED, complaint, None)


def test_a_time_limit_that_is_not_positive_is_the_callers_error(shared):
    with pytest.raises(ValueError, match="timeout"):
        shared.run("1", timeout=0.0)


def test_the_pool_names_its_tier(shared):
    isolation = shared.pool.isolation
    assert isolation.tier == "rlimits" or "network" in isolation.promises
    assert str(isolation).startswith(f"tool isolation: {isolation.tier} (")
    assert set(isolation.promises) | set(isolation.missing) == set(PROMISES)
    if isolation.tier == "rlimits":
        assert "network" in isolation.missing and "does NOT isolate file_reads" in str(isolation)


def test_a_missing_preloaded_module_is_named_in_one_line(processes):
    async def start():
        async with ToolPool(ToolConfig(preload=("numpyy",))):
            pass

    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(UserError) as error:
        asyncio.run(start())
    assert "numpyy" in str(error.value) and "\n" not in str(error.value)
    assert [pid for pid in processes.children(os.getpid()) if processes.state(pid) == "Z"] == []
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_preloaded_modules_are_there_before_the_first_import():
    async def run():
        async with ToolPool(ToolConfig(workers=1, concurrency=1, preload=("fractions",))) as pool:
            return await pool.run("import sys; 'fractions' in sys.modules, 'jax' in sys.modules, 'rstar_jax' in sys.modules")

    assert asyncio.run(run()).stdout == "(True, False, False)\n"


def test_zygotes_and_keepers_have_one_thread_and_their_own_session(shared, processes):
    pids = [*processes.zygotes(), *processes.keepers()]
    assert len(pids) == 4
    for pid in pids:
        assert len(list(pathlib.Path(f"/proc/{pid}/task").iterdir())) == 1
        assert os.getsid(pid) not in (os.getsid(0), 0)


def test_six_hundred_calls_that_end_in_the_same_moment_hold_nobody_up():
    """Keeper and zygote have more to say to each other then than a socket holds."""

    async def run():
        async with ToolPool(ToolConfig(workers=1, concurrency=600, preload=())) as pool:
            sleepers = await asyncio.gather(*(pool.run("import time; time.sleep(60)", timeout=4.0) for _ in range(600)))
            return sleepers, await asyncio.wait_for(pool.run("6 * 7"), 30.0)

    sleepers, after = asyncio.run(run())
    assert {result.status for result in sleepers} == {TIMEOUT}
    assert after.stdout == "42\n"


def test_a_session_that_closes_its_channel_does_not_keep_its_keeper_busy(processes):
    def used(pid):
        return sum(map(int, pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))

    async def run():
        others = set(processes.keepers())  # those of the pools that other tests share
        async with ToolPool(ToolConfig(workers=1, concurrency=1, preload=())) as pool:
            (keeper,) = set(processes.keepers()) - others
            async with pool.session() as session:
                before = used(keeper)
                await session.run("import os, time; os.closerange(3, 128); time.sleep(2)", timeout=1.0)
                return used(keeper) - before, await session.run("6 * 7")

    ticks, after = asyncio.run(run())
    assert ticks < os.sysconf("SC_CLK_TCK") // 2
    assert after.stdout == "42\n"
