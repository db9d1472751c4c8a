"""Generated families of integer questions that need the Python tool, with imperfect demonstrations and expert solutions.

Item i of a split depends on (seed, split, i) alone. Which split a question belongs to is decided by a hash of its text, so that no
held-out question can be met in training. Demonstrations are imperfect on purpose: some answer without the tool, some begin with a
call that fails, and each family has plausible wrong code; that is what reinforcement learning has to mend.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import linecache
from collections.abc import Callable

import numpy as np

from rstar_jax.tools.child import FILENAME, execute, traceback_text
from rstar_jax.types import Problem, ToolResult, ToolStatus

HELD_OUT_SHARE = 8  # one question in eight is held out


@dataclasses.dataclass(frozen=True)
class Task:
    """A question, a short thought, code whose output is the answer, and code that looks right and is not."""

    family: str
    question: str
    thought: str
    code: str
    wrong: str


@dataclasses.dataclass(frozen=True)
class Call:
    """An assistant turn that calls the tool: a thought, the code, and what the tool answers."""

    thought: str
    code: str
    result: ToolResult


@dataclasses.dataclass(frozen=True)
class Answer:
    """The assistant's last turn: a thought and the answer."""

    thought: str
    text: str


Step = Call | Answer


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """A problem with the turns that a (fallible) demonstrator took."""

    problem: Problem
    steps: tuple[Step, ...]


def _pick(rng: np.random.Generator, *wordings: str) -> str:
    return wordings[rng.integers(len(wordings))]


def _product(rng: np.random.Generator) -> Task:
    a, b = rng.integers(11, 100), rng.integers(11, 100)
    question = _pick(rng, f"What is {a} times {b}?", f"Multiply {a} by {b}.", f"Find the product of {a} and {b}.")
    return Task("product", question, "multiply", f"print({a}*{b})", f"print({a}+{b})")


def _range_sum(rng: np.random.Generator) -> Task:
    a = rng.integers(2, 60)
    b = a + rng.integers(10, 140)
    question = _pick(rng, f"Add the integers from {a} to {b}.", f"What is the sum of all integers from {a} to {b}?")
    return Task("range_sum", question, "sum", f"print(sum(range({a},{b}+1)))", f"print(sum(range({a},{b})))")


def _squares(rng: np.random.Generator) -> Task:
    a = rng.integers(1, 15)
    b = a + rng.integers(5, 20)
    question = _pick(rng, f"Add the squares from {a} to {b}.", f"What is the sum of the squares from {a} to {b}?")
    return Task(
        "squares",
        question,
        "squares",
        f"print(sum(i*i for i in range({a},{b}+1)))",
        f"print(sum(i+i for i in range({a},{b}+1)))",
    )


def _multiples(rng: np.random.Generator) -> Task:
    k = rng.integers(3, 20)
    n = k * rng.integers(5, 20) + rng.integers(1, k)
    question = _pick(rng, f"Add the positive multiples of {k} below {n}.", f"What is the sum of the multiples of {k} below {n}?")
    return Task("multiples", question, "multiples", f"print(sum(range({k},{n},{k})))", f"print(len(range({k},{n},{k})))")


def _gcd(rng: np.random.Generator) -> Task:
    g = rng.integers(2, 25)
    a, b = g * rng.integers(10, 40), g * rng.integers(10, 40)
    question = _pick(rng, f"What is the gcd of {a} and {b}?", f"Find the greatest common divisor of {a} and {b}.")
    return Task("gcd", question, "gcd", f"import math\nprint(math.gcd({a},{b}))", f"print({a}%{b})")


def _lcm(rng: np.random.Generator) -> Task:
    g = rng.integers(2, 9)
    a, b = g * rng.integers(2, 12), g * rng.integers(2, 12)
    question = _pick(rng, f"What is the lcm of {a} and {b}?", f"Find the least common multiple of {a} and {b}.")
    return Task("lcm", question, "lcm", f"import math\nprint(math.lcm({a},{b}))", f"print({a}*{b})")


def _power(rng: np.random.Generator) -> Task:
    a, b, m = rng.integers(2, 40), rng.integers(5, 60), rng.integers(11, 100)
    question = _pick(rng, f"What is {a} to the power {b} modulo {m}?", f"Find the remainder of {a} to the {b} divided by {m}.")
    return Task("power", question, "power", f"print(pow({a},{b},{m}))", f"print({a}*{b}%{m})")


def _primes(rng: np.random.Generator) -> Task:
    a = rng.integers(10, 99)
    b = a + rng.integers(20, 100)
    question = _pick(rng, f"How many primes are there from {a} to {b}?", f"Count the primes from {a} to {b}.")
    right = f"print(sum(all(n%d for d in range(2,n)) for n in range({a},{b}+1)))"
    return Task("primes", question, "primes", right, f"print(sum(n%2 for n in range({a},{b}+1)))")


def _divisors(rng: np.random.Generator) -> Task:
    n = 6 * rng.integers(4, 160)
    question = _pick(rng, f"How many divisors does {n} have?", f"Count the divisors of {n}.")
    right = f"print(sum({n}%d<1 for d in range(1,{n}+1)))"
    return Task("divisors", question, "divisors", right, f"print(sum({n}%d for d in range(1,{n}+1)))")


def _digit_sum(rng: np.random.Generator) -> Task:
    a, b = rng.integers(2, 40), rng.integers(5, 40)
    question = _pick(rng, f"What is the digit sum of {a} to the power {b}?", f"Add the digits of {a} to the power {b}.")
    return Task("digit_sum", question, "digits", f"print(sum(map(int,str({a}**{b}))))", f"print(sum(map(int,str({a}*{b}))))")


def _base(rng: np.random.Generator) -> Task:
    n = rng.integers(64, 1000)
    question = _pick(rng, f"Write {n} in base 8.", f"What is {n} in octal?")
    return Task("base", question, "base", f"print(oct({n})[2:])", f"print(hex({n})[2:])")


def _boxes(rng: np.random.Generator) -> Task:
    a, b, c = rng.integers(11, 90), rng.integers(11, 90), rng.integers(11, 100)
    thing = _pick(rng, "pens", "eggs", "nails")
    question = f"A box holds {a} {thing}. {b} boxes arrive and {c} {thing} break. How many {thing} are left?"
    return Task("boxes", question, "boxes", f"print({a}*{b}-{c})", f"print({a}*{b}+{c})")


FAMILIES: dict[str, tuple[Callable[[np.random.Generator], Task], float]] = {
    "product": (_product, 0.7),
    "range_sum": (_range_sum, 0.4),
    "squares": (_squares, 0.5),
    "multiples": (_multiples, 0.5),
    "gcd": (_gcd, 0.6),
    "lcm": (_lcm, 0.4),
    "power": (_power, 0.5),
    "primes": (_primes, 0.4),
    "divisors": (_divisors, 0.5),
    "digit_sum": (_digit_sum, 0.5),
    "base": (_base, 0.6),
    "boxes": (_boxes, 0.6),
}
"""Each family's generator, and how often a demonstrator writes its right code."""


def run_template(code: str) -> ToolResult:
    """What the tool answers to code of this module's own templates.

    Only for these templates: code that a model wrote runs in the tool, in a process of its own. That both agree is a test.
    """
    out = io.StringIO()
    linecache.cache[FILENAME] = (len(code), None, code.splitlines(keepends=True), FILENAME)
    try:
        with contextlib.redirect_stdout(out):
            execute(code, {})
    except (SyntaxError, NameError, TypeError) as error:
        return ToolResult(ToolStatus.ERROR, stdout=out.getvalue(), stderr=traceback_text(error), exit_code=1)
    return ToolResult(ToolStatus.OK, stdout=out.getvalue(), exit_code=0)


def output_of(code: str) -> str:
    """What the code of a template prints, without the final newline."""
    return run_template(code).stdout.rstrip("\n")


def held_out(question: str) -> bool:
    """Whether a question belongs to the held-out split: by a hash of its text."""
    return hashlib.sha256(question.encode()).digest()[0] % HELD_OUT_SHARE == 0


def _task(rng: np.random.Generator, evaluation: bool) -> Task:
    names = list(FAMILIES)
    while True:
        family = names[rng.integers(len(names))]
        task = FAMILIES[family][0](rng)
        if held_out(task.question) == evaluation:
            return task


def _stream(seed: int, split: str, index: int) -> np.random.Generator:
    salt = int.from_bytes(hashlib.sha256(split.encode()).digest()[:4], "little")
    return np.random.default_rng([seed, salt, index])


def _problem(task: Task, name: str, expert: tuple[str, ...] = ()) -> Problem:
    return Problem(name, task.question, output_of(task.code), task.family, expert)


class ArithmeticProblems:
    """Problems of one split, endless and indexable (`types.PromptSource`). `train` and `evaluation` never share a question."""

    def __init__(self, split: str, seed: int):
        self.split, self.seed = split, seed

    def __getitem__(self, index: int) -> Problem:
        rng = _stream(self.seed, self.split, index)
        return _problem(_task(rng, self.split == "evaluation"), f"{self.split}:{self.seed}:{index}")


def _broken(rng: np.random.Generator, code: str) -> str:
    """A call that fails: an unknown name, an unclosed bracket, or a wrong type."""
    kind = rng.integers(3)
    if kind == 0:
        return "print(total)"
    if kind == 1:
        return code[:-1]
    return f"print(len({rng.integers(10, 1000)}))"


def demonstration(seed: int, index: int, no_tool: float, broken_call: float) -> Demonstration:
    """Training demonstration `index`: imperfect in the three ways that the module names."""
    rng = _stream(seed, "demonstration", index)
    task = _task(rng, evaluation=False)
    problem = _problem(task, f"demonstration:{seed}:{index}")
    right = rng.random() < FAMILIES[task.family][1]
    if rng.random() < no_tool:
        return Demonstration(problem, (Answer(task.thought, problem.answer or ""),))
    steps: list[Step] = []
    code = task.code if right else task.wrong
    if rng.random() < broken_call:
        broken = _broken(rng, code)
        steps.append(Call(task.thought, broken, run_template(broken)))
    steps.append(Call(task.thought, code, run_template(code)))
    steps.append(Answer("done", output_of(code)))
    return Demonstration(problem, tuple(steps))


def expert(seed: int, index: int) -> Demonstration:
    """Expert solution `index`: the right code at once, then the answer."""
    task = _task(_stream(seed, "expert", index), evaluation=False)
    problem = _problem(task, f"expert:{seed}:{index}")
    return Demonstration(problem, (Call(task.thought, task.code, run_template(task.code)), Answer("done", output_of(task.code))))
