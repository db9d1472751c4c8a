"""`python -m launch.chat`: lines in, turns and tool results out."""

import pathlib
import signal
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from commands import ENVIRONMENT, ROOT, TIMEOUT, contents, real

LINE_STARTS = ("agent> ", "tool>  [", "[")


def test_questions_from_a_pipe_are_answered_with_their_turns_until_the_end_of_input(trained):
    before = contents(trained.workdir)
    long_question = "very " * 600 + "long?"
    stdin = f"What is 63 times 25?\n\n   \n{long_question}\nIs it caf\u00e9 or <|im_end|>?\nWhat is 12 times 48?"
    done = real("launch.chat", f"--workdir={trained.workdir}", stdin=stdin)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("agent> ") and all(line.startswith(LINE_STARTS) for line in lines)
    assert any(line.startswith("tool>  [") for line in lines)
    assert "you>" not in done.out  # nobody is at a terminal
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in done.err
    assert "more than --max_prompt_tokens=512" in errors[0]
    assert contents(trained.workdir) == before


def test_an_answer_is_the_same_whatever_was_asked_before(command, trained, known_answers):
    question, number = known_answers[-1]
    alone = command("launch.chat", f"--workdir={trained.workdir}", "--temperature=0", stdin=f"{question}\n")
    assert alone.code == 0, alone.err
    assert rf"\boxed{{{number}}}" in alone.out.splitlines()[-1]


def test_an_answer_that_was_cut_says_so(command, trained):
    done = command("launch.chat", f"--workdir={trained.workdir}", "--max_response_tokens=3", stdin="What is 12 times 48?\n")
    assert done.out.splitlines()[-1] == "[the answer was cut at --max_response_tokens=3]"
    done = command("launch.chat", f"--workdir={trained.workdir}", "--max_turns=1", stdin="What is 12 times 48?\n")
    assert done.out.splitlines()[-1] == "[the last of --max_turns=1 turns asked for the tool]"


def test_an_interrupt_while_it_waits_for_a_question_ends_it(trained):
    # a shell starts what it runs in the background, perhaps this test, with interrupts ignored
    command = ["env", "--default-signal=INT", sys.executable, "-m", "launch.chat", f"--workdir={trained.workdir}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdin.write("What is 12 times 48?\n")
        process.stdin.flush()
        for line in process.stdout:  # the answer has begun
            assert line.startswith(LINE_STARTS)
            break
        process.send_signal(signal.SIGINT)  # the input stays open
        assert process.wait(TIMEOUT) == 130
        error = process.stderr.read()
    assert error.splitlines()[-1] == "interrupted" and "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--workdir is missing: give the directory of a trained run"),
        (["--workdir={}/nowhere"], "/nowhere: no such directory; give that of a trained run"),
        (["--workdir={}"], "holds no run (config.json is missing)"),
        (["--model={}/nowhere"], "/nowhere: no such directory"),
        (["--model={}"], "holds neither model.safetensors nor model.safetensors.index.json"),
        (["--workdir={}", "--model={}"], "--workdir and --model were both given; give one of them"),
        (["--workdir={}", "--max_turns=0"], "--max_turns=0"),
        (["--workdir={}", "--temperature=hot"], "--temperature=hot"),
        (["--workdir={}", "What is 1 + 1?"], "'What is 1 + 1?' is not a flag"),
    ],
)
def test_bad_arguments_end_in_one_line(command, tmp_path, arguments, words):
    done = command("launch.chat", *[argument.format(tmp_path) for argument in arguments], stdin="What is 1 + 1?\n")
    assert words in done.refusal()
    assert len(done.err.splitlines()) == 1 and done.out == ""
    assert contents(tmp_path) == {}
