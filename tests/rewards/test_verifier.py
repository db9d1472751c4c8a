"""math-verify in bounded processes: verdicts, hangs, deaths, limits."""

import asyncio
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from rstar_jax.rewards import verifier as verifier_module
from rstar_jax.rewards.math_answer import MathReward
from rstar_jax.rewards.verifier import Verifier
from rstar_jax.types import Finish, InfrastructureError, Problem, Sampled, Trajectory, UserError

TOWER = r"\dfrac{5^{(5^{(5^{(5^5)})}-4)}-5}{16}"
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def gone(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


async def reward(verifier, answer, gold):
    problem = Problem("p", "q", gold)
    trajectory = Trajectory(problem, 0, [1])
    trajectory.append_sampled(Sampled((2,), (-0.1,), Finish.STOP), f"<answer>\\boxed{{{answer}}}</answer>")
    trajectory.close(Finish.STOP)
    return (await MathReward(verifier)(problem, trajectory)).value


CASES = [
    (r"\frac{1}{2}", "1/2", 1.0),
    ("0.5", r"\frac12", 1.0),
    ("0.25", r"\frac12", 0.0),
    ("1 1/4", "5/4", 1.0),
    (r"1\frac{1}{4}", "5/4", 1.0),
    ("1 1/4", "1/2", 0.0),
    ("5/4", "1 1/4", 1.0),
    ("1", "1 1/4", 0.0),
    (r"\sqrt{12}", r"2\sqrt{3}", 1.0),
    ("(2, 1)", "(1, 2)", 0.0),
    (r"\{2, 1\}", r"\{1, 2\}", 1.0),
    ("q - p", "p - q", 0.0),
    (r"\text{west}", r"\text{east}", 0.0),
    (r"\text{east}", r"\text{east}", 1.0),
    ("1/2 or 1/3", "1/2", 0.0),
    ("50%", "0.5", 0.0),
    (r"50\%", "1/2", 0.0),
    ("0.0065", "6.5e-3", 1.0),
    # bare, in dollars, in a box: the same reference
    (r"\frac{3}{2}\pi", r"$\frac{3\pi}{2}$", 1.0),
    (r"\frac{3}{2}\pi", r"\frac{3\pi}{2}", 1.0),
    (r"\frac{3}{2}\pi", r"\boxed{\frac{3\pi}{2}}", 1.0),
    ("7", r"$\frac{3\pi}{2}$", 0.0),
    ("7", r"\frac{3\pi}{2}", 0.0),
    # a reference that cannot be parsed pays nobody
    ("1", "north", None),
    ("north", "north", None),
    # garbage from the model is wrong, not unknown
    (r"\frac{", r"\frac12", 0.0),
]


def test_symbolic_answers():
    async def run():
        async with Verifier(time_limit_s=20.0) as verifier:
            return [(answer, gold, await reward(verifier, answer, gold)) for answer, gold, _ in CASES]

    assert asyncio.run(run()) == CASES


@pytest.mark.parametrize("answer", [TOWER, "10^{10^{10}}", "9^{9^{9^9}}"])
def test_a_tower_of_powers_is_bounded_in_time_and_memory_and_the_next_comparison_works(answer):
    async def run():
        async with Verifier(time_limit_s=2.0) as verifier:
            assert await reward(verifier, "1/2", "2/4") == 1.0
            (before,) = verifier.pids
            start = time.monotonic()
            value = await reward(verifier, answer, "1/3")
            seconds = time.monotonic() - start
            peak = max((peak_kib(pid) for pid in verifier.pids), default=0)
            return value, seconds, peak, before, await reward(verifier, "1/2", "2/4")

    value, seconds, peak, before, after = asyncio.run(run())
    assert value in (None, 0.0)
    assert seconds < 20
    assert peak < 1 << 20
    assert after == 1.0
    assert gone(before) or value == 0.0


def peak_kib(pid):
    with contextlib.suppress(FileNotFoundError):
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1])
    return 0


def test_whole_number_references_never_reach_a_worker():
    async def run():
        async with Verifier() as verifier:
            return await reward(verifier, TOWER, "42"), verifier.pids

    assert asyncio.run(run()) == (0.0, ())


def test_two_hanging_answers_do_not_use_up_a_pool_of_two():
    async def run():
        async with Verifier(workers=2, time_limit_s=1.5) as verifier:
            hung = await asyncio.gather(*(reward(verifier, TOWER, "1/3") for _ in range(2)))
            return hung, await reward(verifier, "0.5", "1/2")

    assert asyncio.run(run()) == ([None, None], 1.0)


@linux_only
def test_a_worker_that_is_killed_gives_unknown_and_is_replaced():
    async def run():
        async with Verifier(time_limit_s=60.0) as verifier:
            await verifier.verify("1/2", "1/2")
            (pid,) = verifier.pids
            pending = asyncio.ensure_future(verifier.verify(TOWER, "1/3"))
            await asyncio.sleep(0.2)
            os.kill(pid, signal.SIGKILL)
            verdict = await pending
            return pid, verdict, await verifier.verify("1/2", "0.5"), verifier.pids

    pid, verdict, after, pids = asyncio.run(run())
    assert verdict.value is None
    assert "died" in verdict.reason
    assert after.value == 1.0
    assert pids != (pid,)


def test_a_cancelled_comparison_does_not_answer_the_next_one():
    async def run():
        async with Verifier(time_limit_s=60.0) as verifier:
            await verifier.verify("1/2", "1/2")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(verifier.verify(TOWER, "1/3"), 0.2)
            return [(await verifier.verify(a, "1/2")).value for a in ("1/2", "1/3")]

    assert asyncio.run(run()) == [1.0, 0.0]


@linux_only
def test_the_worker_is_limited_detached_from_stdin_and_free_of_jax():
    async def run():
        async with Verifier(memory_bytes=1 << 30) as verifier:
            await verifier.verify("1/2", "1/2")
            (pid,) = verifier.pids
            proc = pathlib.Path(f"/proc/{pid}")
            return (proc / "limits").read_text(), os.readlink(proc / "fd" / "0"), (proc / "maps").read_text()

    limits, stdin, maps = asyncio.run(run())
    (address_space,) = [line.split() for line in limits.splitlines() if line.startswith("Max address space")]
    assert address_space[3] == str(1 << 30)
    assert stdin.startswith(("pipe:", "socket:"))
    assert stdin != os.readlink("/proc/self/fd/0")
    assert "jaxlib" not in maps


def test_a_worker_that_runs_out_of_memory_is_unknown_and_replaced():
    async def run():
        # 2^(10^9) needs 125 MB in one number, and its decimal comparison far more
        async with Verifier(time_limit_s=5.0, memory_bytes=300 << 20) as verifier:
            value = await reward(verifier, r"2^{10000000000}", "1/3")
            return value, await reward(verifier, "1/2", "1/2")

    value, after = asyncio.run(run())
    assert value in (None, 0.0)
    assert after == 1.0


@linux_only
def test_workers_die_with_a_parent_that_is_killed_while_one_is_busy():
    code = f"""
import asyncio, os, signal
from rstar_jax.rewards.verifier import Verifier
async def main():
    async with Verifier(workers=2, time_limit_s=60.0) as verifier:
        await asyncio.gather(verifier.verify("1/2", "1/2"), verifier.verify("1/2", "1/2"))
        busy = asyncio.ensure_future(verifier.verify({TOWER!r}, "1/3"))
        await asyncio.sleep(0.2)
        print(*verifier.pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert wait_until(lambda: all(gone(pid) for pid in pids))


@linux_only
def test_leaving_the_context_ends_the_workers():
    async def run():
        async with Verifier() as verifier:
            await verifier.verify("1/2", "1/2")
            return verifier.pids

    (pid,) = asyncio.run(run())
    assert gone(pid)


def test_a_verifier_that_cannot_start_says_so(monkeypatch, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit(3)")
    monkeypatch.setattr(verifier_module, "_SCRIPT", broken)

    async def run():
        async with Verifier() as verifier:
            with pytest.raises(InfrastructureError, match="cannot start"):
                await verifier.verify("1/2", "1/2")
            return verifier.pids

    assert asyncio.run(run()) == ()


def test_use_outside_of_the_context_and_impossible_settings_are_errors():
    with pytest.raises(RuntimeError, match="async with"):
        asyncio.run(Verifier().verify("1", "2"))
    with pytest.raises(UserError, match="at least one worker"):
        Verifier(workers=0)
