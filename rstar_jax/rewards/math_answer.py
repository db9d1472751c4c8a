"""The outcome reward of maths problems: 1 if the final answer is right, else 0 (rStar2-Agent section 2.2.1, equation 3).

The final answer is the last `\\boxed{...}` inside the last closed `<answer>...</answer>` of *sampled* text: neither the prompt
nor what a tool printed is looked at, and there is no reward for format. Where several boxes stand in that block the last one
counts, so naming several candidates gains nothing. A chat format without answer tags has its final answer in the last box of the
last turn.

A whole-number reference is compared exactly, digit by digit. Any other reference goes to math-verify in a bounded process; a
comparison that fails there is unknown, not wrong.

Notation that is taken off both sides before comparing, as units: a percent sign, a degree sign, a leading dollar sign, a
trailing `\\text{...}`. So `50`, `50%` and `50\\%` are equal to each other, and `0.5` equals none of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from rstar_jax.rewards.verifier import Verifier
from rstar_jax.types import Finish, Problem, Trajectory, Verdict

_LAYERS = 4  # of delimiters and boxes around an answer that are taken off
_OPEN, _CLOSE = "<answer>", "</answer>"
_BOX = re.compile(r"\\boxed\s*\{")
_ESCAPED_OR_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_INTEGER = re.compile(r"([+-]?)([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.0*)?")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\[,!])(?=[0-9]{3}(?![0-9]))")
_SPACING = re.compile(r"\\[,;:! ]|~")
_UNIT = re.compile(r"(?:\\?%|°|\^\s*(?:\{\s*)?\\circ(?:\s*\})?|\\(?:text|mathrm|textrm)\s*\{[^{}]*\})$")
_MIXED = re.compile(r"([+-]?)([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)")
_SCIENTIFIC = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))[eE]([+-]?[0-9]+)")
_LATEX_COMMAND = re.compile(r"\\(?:(?:text|textbf|mathrm|operatorname|begin|end)\s*\{[^{}]*\}|[A-Za-z]+)")
_WORD = re.compile(r"[A-Za-z]{3,}")


def extract_answer(sampled_text: str) -> str | None:
    r"""The content of the last `\boxed{...}` in the last closed `<answer>...</answer>` of `sampled_text`, else None.

    Braces must balance (escaped ones do not count). If the last box does not close, there is no answer: an earlier box is not
    taken instead. `\fbox` is not an answer box.
    """
    end = sampled_text.rfind(_CLOSE)
    start = sampled_text.rfind(_OPEN, 0, end) if end >= 0 else -1
    return None if start < 0 else last_box(sampled_text[start + len(_OPEN) : end])


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` in `text` (of nested ones the outer); None without one, or if the last is open."""
    content, position = None, 0
    while match := _BOX.search(text, position):
        stop = _closing_brace(text, match.end())
        if stop is None:
            return None
        content, position = text[match.end() : stop].strip(), stop
    return content


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for match in _ESCAPED_OR_BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return None


def normalise(text: str) -> str:
    """An answer without its surroundings: math delimiters, a box, thin spaces, units, a final full stop; mixed numbers `1 1/4`
    as improper fractions; `6.5e-3` as a power of ten."""
    text = text.replace("\u2212", "-").strip()
    for _ in range(_LAYERS):
        for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            inner = text[len(left) : len(text) - len(right)]
            if text == f"{left}{inner}{right}" and left not in inner:
                text = inner.strip()
        box = _BOX.match(text)
        if box and _closing_brace(text, box.end()) == len(text) - 1:
            text = text[box.end() : -1].strip()
        text = text.removeprefix(r"\$").removesuffix(".").strip()
        stripped = _UNIT.sub("", text).strip()
        text = stripped or text  # an answer that is all text is not a unit
    text = _SPACING.sub(" ", _THOUSANDS.sub(",", text)).strip()
    if mixed := _MIXED.fullmatch(text):
        sign, whole, top, bottom = mixed.groups()
        return rf"{sign.removeprefix('+')}({whole}+\frac{{{top}}}{{{bottom}}})"
    if scientific := _SCIENTIFIC.fullmatch(text):
        return rf"{scientific.group(1)} \times 10^{{{scientific.group(2)}}}"
    return text


def integer_text(text: str) -> str | None:
    """The canonical digits of a whole number (`033` -> `33`, `1,234` -> `1234`, `27.0` -> `27`, `-0` -> `0`); None for anything
    else. Text, not int: a number of any length is compared without being built."""
    match = _INTEGER.fullmatch(normalise(text))
    if match is None:
        return None
    digits = match.group(2).replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if match.group(1) == "-" and digits != "0" else digits


def compare_integers(answer: str, gold: str) -> bool | None:
    """Whether `answer` is the whole number `gold`; None if `gold` is not a whole number.

    Exact: no tolerance, and an answer that would have to be computed (`2^{10}`, `84/2`) is not a whole number. Decimals count
    as whole when every digit behind the point is 0.
    """
    expected = integer_text(gold)
    return None if expected is None else integer_text(answer) == expected


def is_prose(gold: str) -> bool:
    """Whether a reference is a sentence rather than an expression: two or more words outside of LaTeX commands. math-verify
    would read it as a product of letters."""
    return len(_WORD.findall(_LATEX_COMMAND.sub(" ", gold))) >= 2


def last_answer(turn_texts: Iterable[str], answer_tags: bool = True) -> str | None:
    """The final answer of a rollout: `extract_answer` of the last turn that holds a closed answer block. A block does not reach
    over a turn's end. Without `answer_tags`: the last box of the last turn."""
    texts = tuple(turn_texts)
    if not answer_tags:
        return last_box(texts[-1]) if texts else None
    for text in reversed(texts):
        end = text.rfind(_CLOSE)
        if end >= 0 and text.rfind(_OPEN, 0, end) >= 0:
            return extract_answer(text)
    return None


@dataclasses.dataclass(frozen=True)
class MathReward:
    """The outcome reward as a `Reward`: value 1 or 0, or None (unknown) if the problem has no usable reference, the rollout
    failed for reasons of infrastructure, or the verifier failed. `verifier` is open while the reward is used; `answer_tags` are
    those of the chat format."""

    verifier: Verifier
    answer_tags: bool = True

    async def __call__(self, problem: Problem, trajectory: Trajectory) -> Verdict:
        gold = (problem.answer or "").strip()
        if trajectory.finish is Finish.FAILED:
            return Verdict(None, "the rollout failed")
        if not normalise(gold):
            return Verdict(None, "the problem has no reference answer")
        answer = last_answer((turn.text for turn in trajectory.turns), self.answer_tags)
        if not answer:
            return Verdict(0.0, "no boxed answer")
        equal = compare_integers(answer, gold)
        if equal is not None:
            return Verdict(1.0, "equal") if equal else Verdict(0.0, "different")
        if is_prose(gold):
            return Verdict(None, f"the reference answer {gold[:80]!r} is prose")
        return await self.verifier.verify(normalise(answer), normalise(gold))
