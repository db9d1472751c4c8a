"""Demonstrations as token rows (SFT) and as step-by-step problems (SRL)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rstar_jax.data.synthetic import Call, Demonstration, Step
from rstar_jax.text.chat import ChatFormat
from rstar_jax.tools.formatting import format_result
from rstar_jax.types import Problem, Tokenizer


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A demonstration as ids [n] int32, and trainable [n] bool: True on what the assistant writes, its stop token included."""

    ids: np.ndarray
    trainable: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


def action_pieces(step: Step, chat: ChatFormat, tool_name: str) -> list[str]:
    """What the assistant does in one turn: a tool call, or the final answer."""
    return chat.call_text(step.code, tool_name) if isinstance(step, Call) else chat.final_answer(step.text)


def turn_pieces(step: Step, chat: ChatFormat, tool_name: str) -> list[str]:
    """What the assistant writes in one turn, up to its stop token."""
    return [*chat.reason(step.thought), *action_pieces(step, chat, tool_name), chat.end_of_turn]


def answer_pieces(step: Step, chat: ChatFormat) -> list[str]:
    """What the tool's answer adds to the dialogue: nothing after a final answer."""
    return chat.tool_turn([format_result(step.result, style=chat.tool_style)]) if isinstance(step, Call) else []


def encode_demonstration(
    demonstration: Demonstration,
    chat: ChatFormat,
    tokenizer: Tokenizer,
    schemas: Sequence[Mapping[str, Any]],
    tool_name: str,
) -> Encoded:
    """The ids that a rollout with these turns would hold: prompt and tool answers observed, assistant turns trainable."""
    blocks = [(tokenizer.encode(chat.prompt(demonstration.problem.question, schemas)), False)]
    for step in demonstration.steps:
        blocks.append((tokenizer.encode(turn_pieces(step, chat, tool_name)), True))
        blocks.append((tokenizer.encode(answer_pieces(step, chat)), False))
    ids = np.concatenate([np.asarray(block, np.int32) for block, _ in blocks])
    trainable = np.concatenate([np.full(len(block), mine) for block, mine in blocks])
    return Encoded(ids, trainable)


def step_problems(
    expert: Demonstration, chat: ChatFormat, schemas: Sequence[Mapping[str, Any]], tool_name: str, target_steps: str
) -> list[Problem]:
    """SRL instances of an expert's solution in the agent's own dialogue: the prompt holds the expert's earlier turns with the
    tool's answers, and the expert's action is the reference (SRL section 4; for agents the action is the call, section 5.2).

    `target_steps` says which steps are targets: `first_n_minus_1` (the paper's text), `all`, or `skip_first`.
    """
    steps = expert.steps
    chosen = {"first_n_minus_1": range(len(steps) - 1), "all": range(len(steps)), "skip_first": range(1, len(steps))}
    pieces = list(chat.prompt(expert.problem.question, schemas))
    problems = []
    for k, step in enumerate(steps):
        if k in chosen[target_steps]:
            problems.append(
                dataclasses.replace(
                    expert.problem,
                    id=f"{expert.problem.id}/step{k + 1}",
                    expert=("".join(action_pieces(step, chat, tool_name)),),
                    metadata={"prompt_pieces": tuple(pieces)},
                )
            )
        pieces += [*turn_pieces(step, chat, tool_name), *answer_pieces(step, chat)]
    return problems


def training_texts(demonstrations: Sequence[Demonstration], chat: ChatFormat, tool_name: str) -> list[str]:
    """What a tokenizer is trained on: the text of whole demonstrations."""
    texts = []
    for demonstration in demonstrations:
        pieces = list(chat.prompt(demonstration.problem.question, ()))
        for step in demonstration.steps:
            pieces += [*turn_pieces(step, chat, tool_name), *answer_pieces(step, chat)]
        texts.append("".join(pieces))
    return texts
