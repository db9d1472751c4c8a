"""Expert solutions as steps, and the training instances of SRL (SRL section 4).

A solution of N steps gives one instance for each step that is a target: the question and the steps before it are the prompt,
the step is the expert's action. Three readers produce the same `Steps`:

* `parse`: numbered, titled solutions, `1. **Title** action` (appendix B.3);
* `parse_socratic`: GSM8K's socratic answers, `Sub-question ** step` a line, `#### N` at the end;
* `parse_function_calls`: agent conversations in which each assistant turn holds one `<function=...>` block.

What cannot be read is a `Rejection` with its reason, never an exception and never a guess; `sift` counts them.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rstar_jax.types import Problem, UserError

TARGET_STEPS = ("first_n_minus_1", "all", "skip_first")

# A header starts a line. Its closing ** is one that could close bold text: not behind a space and not before a letter or digit
# (so `2**3` may stand in a title), unless a colon inside the bold precedes it.
_HEADER = re.compile(r"^([0-9]+)\.[ \t]*\*\*(?=\S)(.+?)(?:(?<=:)\*\*|(?<=\S)\*\*(?![\w*]))", re.MULTILINE)
_CONCLUSION = re.compile(r"^[ \t]*(?:#+[ \t]*)?\*\*(?:Final )?Answer:?\*\*", re.MULTILINE | re.IGNORECASE)
_SOLUTION_LABEL = re.compile(r"\A\s*SOLUTION:[ \t]*")
_SOCRATIC = re.compile(r"\s\*\*(?:\s+|$)")
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
_FUNCTION_START = re.compile(r"^<function=", re.MULTILINE)
_FUNCTION_END = "</function>"
_ISSUE = re.compile(r"<pr_description>\s*(.*?)\s*</pr_description>", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Step:
    """One decision of the expert. `title` None: the source has none. `observation`: what the environment answered."""

    action: str
    title: str | None = None
    observation: str = ""


@dataclasses.dataclass(frozen=True)
class Steps:
    """A solution in order. `preamble` stood before the first step, `conclusion` after the last; `issue` is the question where
    the source holds it (agent conversations)."""

    steps: tuple[Step, ...]
    preamble: str = ""
    conclusion: str = ""
    issue: str = ""


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Why a row cannot be used. `reason` is one of a few texts, for counting; `detail` says what was found."""

    reason: str
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class StepInstance:
    """One SRL prompt with its target.

    `index` counts from 1 and is the number of the step to write. `context` are the steps before it as text, `expert` is the
    text to be compared with. `title` is the title given to the model, in which case `expert` leaves it out; None otherwise.
    """

    problem_id: str
    question: str
    index: int
    context: tuple[str, ...]
    expert: str
    title: str | None = None


def parse(solution: str, *, preamble: str = "keep") -> Steps | Rejection:
    """Read `1. **Title** action` blocks.

    Numbers must run 1..N; a header starts a line (an indented one belongs to the step around it); the colon may stand inside
    or outside the bold, and is dropped. A closing `**Answer**` line ends the last step and becomes the conclusion.

    `preamble`: what to do with text before step 1: `keep` (it stays with the question) or `reject`. A leading `SOLUTION:` is
    the template's label, not a preamble.
    """
    if preamble not in ("keep", "reject"):
        raise ValueError(f"preamble must be keep or reject, not {preamble!r}")
    text = _SOLUTION_LABEL.sub("", solution.replace("\r\n", "\n"), count=1)
    headers = list(_HEADER.finditer(text))
    if not headers:
        return Rejection("no numbered, titled step")
    numbers = [header.group(1) for header in headers]
    if numbers != [str(i + 1) for i in range(len(headers))]:
        return Rejection("numbers do not run 1..N", ", ".join(numbers[:20]))
    before = text[: headers[0].start()].strip()
    if before and preamble == "reject":
        return Rejection("text before the first step", before[:80])
    last = _CONCLUSION.search(text, headers[-1].end())
    stop = last.start() if last else len(text)
    bounds = [*(header.start() for header in headers[1:]), stop]
    steps = []
    for number, (header, end) in enumerate(zip(headers, bounds, strict=True), 1):
        title = header.group(2).strip().removesuffix(":").strip()
        action = text[header.end() : end].lstrip().removeprefix(":").strip()
        if not title or not action:
            return Rejection("a step without a title" if not title else "a step without an action", f"step {number}")
        steps.append(Step(action, title))
    return Steps(tuple(steps), preamble=before, conclusion=text[stop:].strip())


def parse_socratic(answer: str) -> Steps | Rejection:
    """Read GSM8K's socratic answers: the sub-question is the title, what follows ` ** ` the action (empty in a few published
    rows, which are kept), `#### N` the conclusion. Calculator marks `<<...>>` are annotation and are taken out."""
    body, mark, final = answer.replace("\r\n", "\n").rpartition("####")
    if not mark or not final.strip():
        return Rejection("no final answer behind ####")
    steps = []
    for number, line in enumerate((line for line in body.splitlines() if line.strip()), 1):
        parts = _SOCRATIC.split(line, maxsplit=1)
        if len(parts) != 2 or not parts[0].strip():
            return Rejection("a line that is not `sub-question ** step`", f"line {number}")
        steps.append(Step(_CALCULATOR.sub("", parts[1]).strip(), parts[0].strip()))
    if not steps:
        return Rejection("no step before ####")
    return Steps(tuple(steps), conclusion=final.strip())


def parse_function_calls(messages: Sequence[Mapping[str, Any]], *, observation_chars: int = 2000) -> Steps | Rejection:
    """Read an agent conversation (SWE-smith's XML form; SRL section 5.2).

    The action of each assistant turn is its `<function=NAME>...</function>` block without the prose around it; the message
    that follows is the observation, cut to `observation_chars` characters. The issue is the first user message (the part
    inside `<pr_description>` where it has one).
    """
    issue: str | None = None
    steps: list[Step] = []
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(content, str):
            return Rejection("a message whose content is not text", f"message {number}")
        if role == "assistant":
            if issue is None:
                return Rejection("an assistant turn before the issue", f"message {number}")
            starts = [match.start() for match in _FUNCTION_START.finditer(content)]
            end = content.rfind(_FUNCTION_END)
            if len(starts) != 1 or end < starts[0]:
                return Rejection("an assistant turn without exactly one function call", f"message {number}: {len(starts)}")
            steps.append(Step(content[starts[0] : end + len(_FUNCTION_END)]))
        elif role in ("user", "tool") and issue is None:
            described = _ISSUE.search(content)
            issue = described.group(1) if described else content.strip()
        elif role in ("user", "tool"):
            if not steps or steps[-1].observation:
                return Rejection("an observation without a call before it", f"message {number}")
            steps[-1] = dataclasses.replace(steps[-1], observation=cut_middle(content, observation_chars))
    if issue is None or not steps:
        return Rejection("no issue" if issue is None else "no function call")
    return Steps(tuple(steps), issue=issue)


def cut_middle(text: str, limit: int) -> str:
    """At most `limit` characters of `text`, half from its head and half from its tail, around a notice of how many are left
    out (the notice comes on top)."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    return f"{text[:head]}\n[{len(text) - limit} characters left out]\n{text[len(text) - tail :]}"


def sift(parsed: Iterable[Steps | Rejection]) -> tuple[list[Steps], collections.Counter[str]]:
    """The solutions that could be read, in order, and how many were rejected for which reason."""
    kept: list[Steps] = []
    rejected: collections.Counter[str] = collections.Counter()
    for result in parsed:
        if isinstance(result, Rejection):
            rejected[result.reason] += 1
        else:
            kept.append(result)
    return kept, rejected


def instances(
    problem: Problem,
    steps: Steps,
    *,
    target_steps: str = "first_n_minus_1",
    give_title: bool = False,
    window: int | None = None,
) -> list[StepInstance]:
    """The SRL instances of one solution.

    Args:
      target_steps: of N steps, which are targets: `first_n_minus_1` (1..N-1, the paper's text), `all` (1..N) or `skip_first`
        (2..N).
      give_title: give the model the title of the step (SRL footnote 1); the expert's action is then the rest of the step.
      window: show only the last `window` steps (agent conversations: 2); None shows all.
    """
    if target_steps not in TARGET_STEPS:
        raise UserError(f"target_steps={target_steps!r} is not known; choose one of {', '.join(TARGET_STEPS)}")
    if give_title and any(step.title is None for step in steps.steps):
        raise UserError(f"give_step_title needs steps with titles, and the steps of problem {problem.id} have none")
    count = len(steps.steps)
    first_target = 2 if target_steps == "skip_first" else 1
    last_target = count - 1 if target_steps == "first_n_minus_1" else count
    question = steps.issue or problem.question
    if steps.preamble:
        question = f"{question}\n\n{steps.preamble}"
    rendered = [render_step(number, step) for number, step in enumerate(steps.steps, 1)]
    shown = [f"{text}\n{step.observation}" if step.observation else text for text, step in zip(rendered, steps.steps, strict=True)]
    result = []
    for index in range(first_target, last_target + 1):
        first = 0 if window is None else max(0, index - 1 - window)
        step = steps.steps[index - 1]
        expert, title = (step.action, step.title) if give_title else (rendered[index - 1], None)
        result.append(StepInstance(problem.id, question, index, tuple(shown[first : index - 1]), expert, title))
    return result


def render_step(number: int, step: Step) -> str:
    """A step as a solution shows it: `k. **Title** action`, or the bare action where there is no title."""
    return step.action if step.title is None else f"{number}. **{step.title}** {step.action}".rstrip()
