"""The commands, and one tiny run that is trained once."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from commands import ENVIRONMENT, ROOT, TIMEOUT, Done, real, train_arguments

IMPORTED = ("rstar_jax.recipes.stages", "rstar_jax.recipes.inference", "rstar_jax.storage.report")


@pytest.fixture(scope="session")
def command(tmp_path_factory):
    """`command(module, *arguments, stdin="")`: as `real`, in a fork of a process that has the imports behind it."""
    folder = tmp_path_factory.mktemp("command")
    server = pathlib.Path(__file__).with_name("fork_server.py")
    process = subprocess.Popen(
        [sys.executable, str(server), *IMPORTED],
        cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def run(module, *arguments, stdin=""):
        files = {name: folder / name for name in ("stdin", "stdout", "stderr")}
        for name, file in files.items():
            file.write_text(stdin if name == "stdin" else "")
        job = {"module": module, "arguments": [str(a) for a in arguments], **{name: str(file) for name, file in files.items()}}
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, f"the server ended with {process.wait()}"
        return Done(int(answer), files["stdout"].read_text(), files["stderr"].read_text())

    yield run
    process.stdin.close()
    assert process.wait(TIMEOUT) == 0


@dataclasses.dataclass(frozen=True)
class Trained:
    """The tiny run: its directory, and the command that trained it."""

    workdir: pathlib.Path
    done: Done


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The tiny run, trained by the real command. Tests leave it as it is."""
    workdir = tmp_path_factory.mktemp("runs") / "tiny"
    done = real("launch.train", *train_arguments(workdir))
    assert done.code == 0, done.err
    return Trained(workdir, done)


@pytest.fixture(scope="session")
def known_answers(trained, command):
    """Questions, each with the whole number that the tiny run answers greedily, as `launch.chat` shows it."""
    asked = [f"What is {a} times {b}?" for a, b in ((63, 25), (12, 48), (7, 31), (20, 52), (9, 9), (84, 16))]
    done = command("launch.chat", f"--workdir={trained.workdir}", "--temperature=0", stdin="".join(f"{q}\n" for q in asked))
    assert done.code == 0, done.err
    turns = [line for line in done.out.splitlines() if line.startswith("agent> ")]
    finals = [turn for turn in turns if "<tool_call>" not in turn]
    assert len(finals) == len(asked), done.out
    numbers = [re.search(r"<answer>\\boxed\{(\d+)\}</answer>", turn) for turn in finals]
    known = [(question, int(number[1])) for question, number in zip(asked, numbers, strict=True) if number]
    assert len(known) >= 2, done.out
    return known
