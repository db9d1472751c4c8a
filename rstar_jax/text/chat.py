"""Chat formats as pure functions from text to pieces of a conversation.

A conversation is a list of pieces: `Marker` pieces are control text, which becomes a special token where the tokenizer has
one; plain `str` pieces are content, which never does. `"".join(pieces)` is the text as a person reads it.

A rollout is: `prompt`, then what the model samples up to and including `end_of_turn`, then `tool_turn` with the answers to its
calls, then the model again. What the format itself writes at the start of an assistant's turn (`forced_opening`) belongs to
`prompt` and `tool_turn`, and is not sampled. A demonstration of one assistant turn is
`reason(...) + call_text(...) + [end_of_turn]` or `reason(...) + final_answer(...) + [end_of_turn]`.

Sources: rStar2-Agent section 2.1 and its public prompt (`rstar2`); the chat template of Qwen3 (`chatml`); SRL section 4 and
appendix B.2.1 (`srl_prompt`).
"""

from __future__ import annotations

import abc
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rstar_jax.config import TextConfig
from rstar_jax.text.tool_calls import CALL_CLOSE, CALL_OPEN, ParsedCall, parse_tool_calls
from rstar_jax.types import Marker, UserError

TURN_START = Marker("<|im_start|>")
TURN_END = Marker("<|im_end|>")
PAD = Marker("<|pad|>")

COMPACT_SPECIALS: tuple[str, ...] = (
    "<|pad|>", "<|im_start|>", "<|im_end|>", "<reason>", "</reason>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<answer>", "</answer>",
)  # fmt: skip
"""The special tokens of a tokenizer trained for the `compact` format."""

DEFAULT_TOOL = "python_code_with_standard_io"

_CONTROL = (*COMPACT_SPECIALS, "<think>", "</think>")

_SYSTEM = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant first "
    "thinks about the reasoning process in the mind and then provides the User with the answer. The reasoning process is "
    "enclosed within <reason> </reason> and answer is enclosed within <answer> </answer> tags, respectively, i.e., <reason> "
    "reasoning process here </reason> <answer> answer here </answer>."
)
_TOOLS_BEFORE = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_QUESTION_BEFORE = (
    "You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. And your final answer will "
    "be extracted automatically by the \\boxed{} tag.\nThis is the problem:\n"
)
_CHATML_SYSTEM = "You are a helpful assistant that solves problems step by step."
_CHATML_QUESTION_AFTER = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
_SRL_SYSTEM = (
    "You are a helpful assistant for solving mathematical problems. A user will provide a math problem, which may include a "
    "partial solution. Your task is to continue the solution by providing the very next logical step.\n\n"
    "A user will ask you to solve a task. You should first draft your thinking process (inner monologue). Then, generate the "
    "solution.\n\n"
    "Your response format must follow the template below: <think> Your thoughts or/and draft, like working through an exercise "
    "on scratch paper. Be as casual and as long as you want until you are confident to generate a correct solution. </think> "
    "Provide only the single, next step to continue the solution. Do not solve the entire problem."
)


def _control(template: str) -> list[str]:
    """Pieces of a template of ours: control text becomes `Marker`s. Never applied to content."""
    parts = re.split("(" + "|".join(map(re.escape, _CONTROL)) + ")", template)
    return [Marker(part) if part in _CONTROL else part for part in parts if part]


@dataclasses.dataclass(frozen=True)
class ChatFormat(abc.ABC):
    """What the formats share. `call_syntax`: how the body of a tool call is written (see `tool_calls`). `turn_separator`:
    what follows the model's `<|im_end|>`: nothing (`rstar2`, as the public code trains) or a newline (`template`, as the
    Hugging Face template renders a history). Training and inference must use the same. `tool_style`: how a tool's result is shown
    (see `tools.formatting`). `answer_tags`: the final answer stands in `<answer>` tags, not in a box by itself."""

    name: str
    call_syntax: str
    forced_opening: str
    tool_style: str
    turn_separator: str = "rstar2"
    reasoning_tags: tuple[str, str] = ("<reason>", "</reason>")
    end_of_turn: Marker = TURN_END
    answer_tags: bool = True

    @abc.abstractmethod
    def prompt(self, question: str, tools_schemas: Sequence[Mapping[str, Any]] = ()) -> list[str]:
        """The prompt, up to and including the forced opening of the assistant's turn."""

    @abc.abstractmethod
    def srl_prompt(self, question: str, steps_so_far: Sequence[str], next_title: str | None = None) -> list[str]:
        """The prompt for the next step of a partial solution (SRL section 4). `next_title`, when given, is shown as the header
        of the step to write (SRL footnote 1), and the model writes the rest of that step."""

    @abc.abstractmethod
    def tool_turn(self, texts: Sequence[str]) -> list[str]:
        """What follows a turn that ended in `end_of_turn`: the answers to its tool calls, in order, and the opening of the
        assistant's next turn."""

    @abc.abstractmethod
    def reason(self, text: str) -> list[str]:
        """The reasoning that opens a demonstrated turn, behind the forced opening."""

    @abc.abstractmethod
    def call_text(self, code: str, tool_name: str = DEFAULT_TOOL) -> list[str]:
        """A demonstrated call of the Python tool, without `end_of_turn`."""

    def final_answer(self, text: str) -> list[str]:
        """The demonstrated final answer with `text` in a box, without `end_of_turn`."""
        return [*_control("<answer>"), f"\\boxed{{{text}}}", *_control("</answer>")]

    def count_answers(self, text: str) -> int:
        """How many final answers the sampled text of a turn holds."""
        return text.count("<answer>" if self.answer_tags else "\\boxed")

    def parse_calls(self, text: str, tool_names: Sequence[str]) -> list[ParsedCall]:
        """The tool calls in the sampled text of one turn."""
        return parse_tool_calls(
            text,
            syntax=self.call_syntax,
            tool_names=tool_names,
            reasoning_tags=self.reasoning_tags,
            forced_opening=self.forced_opening,
        )


@dataclasses.dataclass(frozen=True)
class HermesFormat(ChatFormat):
    """ChatML turns with Hermes tool calls, as Qwen's templates render them. A format adds its system text, what it writes around
    a question, and how a turn reasons and answers."""

    _system: ClassVar[str]
    _around_question: ClassVar[tuple[str, str]]

    def _header(self) -> list[str]:
        return _control(f"<|im_start|>assistant\n{self.forced_opening}")

    def prompt(self, question: str, tools_schemas: Sequence[Mapping[str, Any]] = ()) -> list[str]:
        before, after = self._around_question
        pieces = _control(f"<|im_start|>system\n{self._system}")
        if tools_schemas:
            pieces += _control(_TOOLS_BEFORE)
            pieces += [f"\n{json.dumps(schema, ensure_ascii=False)}" for schema in tools_schemas]
            pieces += _control(_TOOLS_AFTER)
        pieces += _control(f"<|im_end|>\n<|im_start|>user\n{before}")
        return [*pieces, question, *_control(f"{after}<|im_end|>\n"), *self._header()]

    def srl_prompt(self, question: str, steps_so_far: Sequence[str], next_title: str | None = None) -> list[str]:
        """The system prompt of SRL appendix B.2.1. The user turn is not published; here it is `Question:` and `Solution:` with
        one step after another. The model opens its own `<think>`."""
        shown = list(steps_so_far)
        if next_title is not None:
            shown.append(f"{len(steps_so_far) + 1}. **{next_title}**")
        user = f"Question: {question}\n\nSolution:" + "".join(f"\n{step}" for step in shown)
        before = _control(f"<|im_start|>system\n{_SRL_SYSTEM}<|im_end|>\n<|im_start|>user\n")
        return [*before, user, *_control("<|im_end|>\n<|im_start|>assistant\n")]

    def tool_turn(self, texts: Sequence[str]) -> list[str]:
        pieces = ["\n"] if self.turn_separator == "template" else []
        pieces += _control("<|im_start|>user")
        for text in texts:
            pieces += [*_control("\n<tool_response>\n"), text, *_control("\n</tool_response>")]
        return [*pieces, *_control("<|im_end|>\n"), *self._header()]

    def call_text(self, code: str, tool_name: str = DEFAULT_TOOL) -> list[str]:
        call = json.dumps({"name": tool_name, "arguments": {"code": code, "input": ""}}, ensure_ascii=False)
        return [*_control("<tool_call>\n"), call, *_control("\n</tool_call>")]


@dataclasses.dataclass(frozen=True)
class RStar2Format(HermesFormat):
    """The public prompt byte for byte, with a forced `<reason>` in every assistant turn."""

    _system: ClassVar[str] = _SYSTEM
    _around_question: ClassVar[tuple[str, str]] = (_QUESTION_BEFORE, "")

    def reason(self, text: str) -> list[str]:
        return [text, *_control("</reason>\n")]


@dataclasses.dataclass(frozen=True)
class ChatMLFormat(HermesFormat):
    """For instruct models as they are (Qwen, SmolLM2): nothing is forced, reasoning goes where Qwen3 puts it, and the answer
    stands in a box without tags."""

    _system: ClassVar[str] = _CHATML_SYSTEM
    _around_question: ClassVar[tuple[str, str]] = ("", _CHATML_QUESTION_AFTER)

    def reason(self, text: str) -> list[str]:
        return [*_control("<think>\n"), text, *_control("\n</think>\n\n")]

    def final_answer(self, text: str) -> list[str]:
        return [f"The final answer is \\boxed{{{text}}}."]


@dataclasses.dataclass(frozen=True)
class CompactFormat(ChatFormat):
    """The fewest tokens, for models of well under a million parameters: no system prompt, no role names, no newlines; every
    control text is one special token (`COMPACT_SPECIALS`) and a call is the bare code. Turns alternate, so an opening
    `<|im_start|>` needs no role. Tools are not announced: the model learns the one tool from demonstrations."""

    def prompt(self, question: str, tools_schemas: Sequence[Mapping[str, Any]] = ()) -> list[str]:
        return [TURN_START, question, TURN_END, TURN_START]

    def srl_prompt(self, question: str, steps_so_far: Sequence[str], next_title: str | None = None) -> list[str]:
        shown = [question, *steps_so_far] + ([] if next_title is None else [next_title])
        return [TURN_START, "\n".join(shown), TURN_END, TURN_START]

    def tool_turn(self, texts: Sequence[str]) -> list[str]:
        pieces: list[str] = []
        for text in texts:
            pieces += [*_control("<tool_response>"), text, *_control("</tool_response>")]
        return [*pieces, TURN_START]

    def reason(self, text: str) -> list[str]:
        return [*_control("<reason>"), text, *_control("</reason>")]

    def call_text(self, code: str, tool_name: str = DEFAULT_TOOL) -> list[str]:
        return [*_control(CALL_OPEN), code, *_control(CALL_CLOSE)]


CHAT_FORMATS: dict[str, ChatFormat] = {
    "rstar2": RStar2Format(name="rstar2", call_syntax="json", forced_opening="<reason>", tool_style="rstar2"),
    "chatml": ChatMLFormat(
        name="chatml",
        call_syntax="json",
        forced_opening="",
        tool_style="rstar2",
        reasoning_tags=("<think>", "</think>"),
        answer_tags=False,
    ),
    "compact": CompactFormat(name="compact", call_syntax="code", forced_opening="", tool_style="last_line"),
}


def chat_format(config: TextConfig) -> ChatFormat:
    """The format that `text.chat` and `text.turn_separator` ask for."""
    if config.chat not in CHAT_FORMATS:
        raise UserError(f"text.chat={config.chat!r} is not known; choose one of {', '.join(CHAT_FORMATS)}")
    chosen = CHAT_FORMATS[config.chat]
    if chosen.name == "compact" and config.turn_separator != "rstar2":
        raise UserError("text.turn_separator=template needs text.chat=rstar2 or chatml: the compact format has no separator")
    return dataclasses.replace(chosen, turn_separator=config.turn_separator)
