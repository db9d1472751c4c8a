"""SRL's reward: how similar the model's action is to the expert's (SRL section 4).

    R(model, expert) = 2 M / T

T is the number of elements in both actions together, M the number in the matching blocks that are found by taking the longest
common run and then looking left and right of it: `difflib.SequenceMatcher(None, model, expert, autojunk=False).ratio()`,
computed by `cydifflib`. Four details are fixed here:

* order: (model, expert). The ratio is not symmetric.
* `autojunk=False`: difflib's default drops every element that makes up more than 1 % of an expert action of 200 elements or
  more, which at character level is nearly all of them.
* two empty actions have similarity 0, not difflib's 1.
* whitespace: on both sides alike, every run of whitespace (line breaks included) counts as one space, and none at the ends.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Hashable, Sequence

import cydifflib

from rstar_jax.types import UserError, Verdict

UNITS = ("char", "word", "token", "number")
FORMAT_PENALTY = -1.0

# A decimal or whole number, a run of letters, or any single other character.
_NUMBER_UNITS = re.compile(r"[0-9]+(?:\.[0-9]+)?|[^\W\d_]+|\S")

Encode = Callable[[str], Sequence[int]]


def normalise_whitespace(text: str) -> str:
    """`text` with every run of whitespace as one space and none at the ends."""
    return " ".join(text.split())


def elements(text: str, unit: str, encode: Encode | None = None) -> Sequence[Hashable]:
    """What is compared, of whitespace-normalised `text`.

    `char`: characters. `word`: what whitespace separates. `token`: the ids that `encode` gives. `number`: numbers (a whole
    or decimal number is one element, so that a wrong number costs as much as a wrong word), runs of letters, and single
    other characters, without whitespace.
    """
    text = normalise_whitespace(text)
    if unit == "char":
        return text
    if unit == "word":
        return text.split()
    if unit == "number":
        return _NUMBER_UNITS.findall(text)
    if unit == "token":
        if encode is None:
            raise UserError("similarity_unit=token needs the run's tokenizer to encode the actions")
        return list(encode(text)) if text else []
    raise UserError(f"similarity_unit={unit!r} is not known; choose one of {', '.join(UNITS)}")


def similarity(model_action: str, expert_action: str, unit: str = "char", encode: Encode | None = None) -> float:
    """2 M / T of the two actions, in [0, 1]; 0 when both are empty. `encode` is needed for the unit `token` only."""
    model, expert = elements(model_action, unit, encode), elements(expert_action, unit, encode)
    if not model and not expert:
        return 0.0
    return float(cydifflib.SequenceMatcher(None, model, expert, autojunk=False).ratio())


@dataclasses.dataclass(frozen=True)
class Split:
    """A completion taken apart. `error` None: the format was kept and `action` is not empty."""

    action: str
    error: str | None = None


def split_action(
    completion: str,
    *,
    think_tags: tuple[str, str] = ("<think>", "</think>"),
    require_think: bool = True,
    end_of_turn: str = "<|im_end|>",
) -> Split:
    """The action in a completion that must read: one think block with text in it, then an action with text in it.

    Only whitespace may stand before the block. An action wrapped in `<solution>...</solution>` is unwrapped; half a wrapper is
    an error. One `end_of_turn` at the end is not part of the action. With `require_think=False` the block may be absent, but
    one that is there must be well formed.
    """
    opening, closing = think_tags
    text = completion.strip().removesuffix(end_of_turn).strip()
    counts = text.count(opening), text.count(closing)
    if counts == (1, 1):
        before, _, rest = text.partition(opening)
        thought, closed, action = rest.partition(closing)
        if before.strip():
            return Split("", "text before the think block")
        if not closed:
            return Split("", "think block closed before it is opened")
        if not thought.strip():
            return Split("", "empty think block")
    elif counts == (0, 0) and not require_think:
        action = text
    else:
        return Split("", "no think block" if counts == (0, 0) else "not exactly one think block")
    action = action.strip()
    wrappers = action.count("<solution>"), action.count("</solution>")
    if wrappers != (0, 0):
        if wrappers != (1, 1) or not (action.startswith("<solution>") and action.endswith("</solution>")):
            return Split("", "broken solution wrapper")
        action = action.removeprefix("<solution>").removesuffix("</solution>").strip()
    return Split(action) if action else Split("", "empty action")


def step_reward(
    completion: str,
    experts: Sequence[str],
    *,
    unit: str = "char",
    encode: Encode | None = None,
    think_tags: tuple[str, str] = ("<think>", "</think>"),
    require_think: bool = True,
    truncated: bool = False,
    end_of_turn: str = "<|im_end|>",
) -> Verdict:
    """SRL's reward of one sampled step: the similarity to the most similar of the `experts`, in [0, 1], or -1.

    -1 is for a completion that breaks the format (see `split_action`) or that the token budget cut off (`truncated`).
    `completion` starts with the think block: where the chat format opens the block itself, the caller puts that text in front.
    """
    if not experts:
        raise UserError("an SRL problem needs at least one expert action")
    if truncated:
        return Verdict(FORMAT_PENALTY, "truncated")
    split = split_action(completion, think_tags=think_tags, require_think=require_think, end_of_turn=end_of_turn)
    if split.error is not None:
        return Verdict(FORMAT_PENALTY, split.error)
    return Verdict(max(similarity(split.action, expert, unit, encode) for expert in experts), "similarity")
