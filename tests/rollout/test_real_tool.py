"""Rollouts with the real Python tool, whatever the programs and the machinery do: every trajectory ends, with the right status."""

import asyncio
import contextlib
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from scripted import ScriptedEngine, ScriptedSlot

from rstar_jax.config import ToolConfig
from rstar_jax.rollout.agent import Agent, Budget
from rstar_jax.rollout.collect import collect
from rstar_jax.text.chat import CHAT_FORMATS
from rstar_jax.text.tokenizer import train_tokenizer
from rstar_jax.tools.pool import ToolPool
from rstar_jax.tools.python_tool import PythonTool, SessionPythonTool
from rstar_jax.types import Finish, Marker, Problem, Sampling, ToolStatus, Verdict

TOKENIZER = train_tokenizer(["What is 2 plus 3? print(2+3)"], 300)
COMPACT = CHAT_FORMATS["compact"]
CONFIG = ToolConfig(workers=2, concurrency=4, timeout_s=1.0, memory_bytes=256 << 20, hard_output_bytes=1 << 20, preload=())
PROGRAMS = {
    "print(2+3)": ToolStatus.OK,
    "while True: pass": ToolStatus.TIMEOUT,
    "while True: print('x' * 10000)": ToolStatus.OUTPUT_LIMIT,
    "1/0": ToolStatus.ERROR,
    "bytearray(10**11)": ToolStatus.MEMORY,
    "import os; os._exit(3)": ToolStatus.EXIT,
    "import os; os.kill(os.getpid(), 9)": ToolStatus.SIGNAL,
}


def call(code):
    return TOKENIZER.encode([Marker("<tool_call>"), code, Marker("</tool_call>"), Marker("<|im_end|>")])


ANSWER = TOKENIZER.encode([Marker("<answer>"), "\\boxed{5}", Marker("</answer>"), Marker("<|im_end|>")])


class Engine(ScriptedEngine):
    """The script is the question's: programs, one a turn, then the answer."""

    def __init__(self, scripts):
        super().__init__(None, TOKENIZER.stop_ids)
        self.scripts = scripts

    async def open(self, prompt_ids, key, sampling, longest=None):
        self.slots.append(ScriptedSlot(ScriptedEngine(self.scripts[key.prompt], self.stop_ids), prompt_ids))
        return self.slots[-1]


async def right(problem, trajectory):
    return Verdict(1.0, "")


async def collect_all(scripts, tool, samples):
    problems = [Problem(str(i), f"Question {i}?", "5") for i in range(len(scripts))]
    engine = Engine([[*map(call, codes), ANSWER] for codes in scripts])
    agent = Agent(engine, {tool.name: tool}, COMPACT, TOKENIZER, Budget(4096, 4096, 5, 64))
    groups = await collect(
        problems, range(len(problems)), agent=agent, reward=right, samples=samples, seed=0, step=0, sampling=Sampling()
    )
    assert all(slot.closed for slot in engine.slots) and len(engine.slots) == len(scripts) * samples
    return groups


def test_programs_that_hang_flood_and_die_end_as_what_they_are():
    async def run():
        async with ToolPool(CONFIG) as pool:
            return await collect_all([[code] for code in PROGRAMS], PythonTool(pool, style="last_line"), 3)

    groups = asyncio.run(run())
    assert [len(group.trajectories) for group in groups] == [3] * len(PROGRAMS)
    for group, status in zip(groups, PROGRAMS.values(), strict=True):
        for trajectory in group.trajectories:
            assert (trajectory.finish, [record.status for record in trajectory.calls]) == (Finish.STOP, [status])


def test_a_tool_whose_processes_die_again_and_again_loses_no_trajectory():
    async def run():
        async with ToolPool(CONFIG) as pool:

            async def kill_now_and_then():
                for _ in range(4):
                    await asyncio.sleep(0.25)
                    with contextlib.suppress(StopIteration):
                        next(iter(pool._workers)).kill()

            slow = "import time; time.sleep(0.2); print('done')"
            killer = asyncio.create_task(kill_now_and_then())
            groups = await collect_all([[slow, slow]] * 4, PythonTool(pool, style="last_line"), 4)
            await killer
            return groups

    trajectories = [trajectory for group in asyncio.run(run()) for trajectory in group.trajectories]
    assert len(trajectories) == 16
    for trajectory in trajectories:
        assert trajectory.finish in (Finish.STOP, Finish.FAILED)  # FAILED: killed three times over, and never scored
        assert all(record.status is ToolStatus.OK and record.shown == "done" for record in trajectory.calls)
    assert sum(trajectory.finish is Finish.STOP for trajectory in trajectories) >= 12


@pytest.mark.parametrize(("sessions", "shown"), [(True, "5"), (False, "NameError: name 'x' is not defined")])
def test_a_trajectory_has_a_python_of_its_own_when_it_is_asked_for(sessions, shown):
    async def run():
        async with ToolPool(CONFIG) as pool:
            tool = (SessionPythonTool if sessions else PythonTool)(pool, style="last_line")
            groups = await collect_all([["x = 5", "x"], ["'x' in globals()"]], tool, 3)
            return groups, pool._sessions.live

    (first, second), live = asyncio.run(run())
    assert {trajectory.calls[1].shown for trajectory in first.trajectories} == {shown}
    assert {trajectory.calls[0].shown for trajectory in second.trajectories} == {"False"}
    assert live == 0
