"""Chat formats against literal texts."""

import pytest

from rstar_jax.config import TextConfig
from rstar_jax.text.chat import CHAT_FORMATS, COMPACT_SPECIALS, chat_format
from rstar_jax.text.tokenizer import train_tokenizer
from rstar_jax.types import Marker, UserError

RSTAR2, CHATML, COMPACT = CHAT_FORMATS["rstar2"], CHAT_FORMATS["chatml"], CHAT_FORMATS["compact"]

RSTAR2_PROMPT = r"""<|im_start|>system
A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. The reasoning process is enclosed within <reason> </reason> and answer is enclosed within <answer> </answer> tags, respectively, i.e., <reason> reasoning process here </reason> <answer> answer here </answer>.

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "a", "description": "é"}}
{"type": "function", "function": {"name": "b"}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
<|im_start|>user
You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. And your final answer will be extracted automatically by the \boxed{} tag.
This is the problem:
What is $1+1$?<|im_end|>
<|im_start|>assistant
<reason>"""  # noqa: E501
CHATML_PROMPT = r"""<|im_start|>system
You are a helpful assistant that solves problems step by step.

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "a", "description": "é"}}
{"type": "function", "function": {"name": "b"}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
<|im_start|>user
What is $1+1$?

Please reason step by step, and put your final answer within \boxed{}.<|im_end|>
<|im_start|>assistant
"""
TOOLS = [
    {"type": "function", "function": {"name": "a", "description": "é"}},
    {"type": "function", "function": {"name": "b"}},
]


def text(pieces):
    return "".join(pieces)


def test_rstar2_prompt_is_the_public_one_byte_for_byte():
    assert text(RSTAR2.prompt("What is $1+1$?", TOOLS)) == RSTAR2_PROMPT


def test_rstar2_prompt_without_tools_has_no_tool_section():
    prompt = text(RSTAR2.prompt("Q"))
    assert "tool" not in prompt
    assert "<answer> answer here </answer>.<|im_end|>\n<|im_start|>user\nYou must" in prompt
    assert prompt.endswith("This is the problem:\nQ<|im_end|>\n<|im_start|>assistant\n<reason>")


def test_rstar2_tool_turn_puts_all_answers_into_one_user_turn_and_forces_the_reasoning():
    assert text(RSTAR2.tool_turn(["4\n"])) == (
        "<|im_start|>user\n<tool_response>\n4\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n<reason>"
    )
    assert text(RSTAR2.tool_turn(["1", "2"])) == (
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<reason>"
    )


def test_turn_separator_template_adds_the_newline_of_a_rendered_history():
    template = chat_format(TextConfig(chat="rstar2", turn_separator="template"))
    assert text(template.tool_turn(["1"])) == "\n" + text(RSTAR2.tool_turn(["1"]))
    assert text(template.prompt("Q")) == text(RSTAR2.prompt("Q"))


def test_chatml_prompts_force_nothing():
    assert text(CHATML.prompt("What is $1+1$?", TOOLS)) == CHATML_PROMPT
    assert text(CHATML.prompt("Q")) == (
        "<|im_start|>system\nYou are a helpful assistant that solves problems step by step.<|im_end|>\n"
        "<|im_start|>user\nQ\n\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert CHATML.srl_prompt("Q?", ["a"], "T") == RSTAR2.srl_prompt("Q?", ["a"], "T")


def test_chatml_turns_as_text():
    assert text(CHATML.tool_turn(["1", "2"])) == text(RSTAR2.tool_turn(["1", "2"])).removesuffix("<reason>")
    template = chat_format(TextConfig(chat="chatml", turn_separator="template"))
    assert text(template.tool_turn(["1"])) == "\n" + text(CHATML.tool_turn(["1"]))
    answer = [*CHATML.reason("r"), *CHATML.final_answer("42")]
    assert text(answer) == "<think>\nr\n</think>\n\nThe final answer is \\boxed{42}."
    assert CHATML.call_text("x") == RSTAR2.call_text("x")


def test_a_chatml_call_within_its_reasoning_is_not_a_call():
    turn = text([*CHATML.reason(text(CHATML.call_text("1"))), *CHATML.call_text("2"), CHATML.end_of_turn])
    calls = CHATML.parse_calls(turn, ["python_code_with_standard_io"])
    assert [(call.inside_reasoning, call.error is None) for call in calls] == [(True, False), (False, True)]
    assert calls[1].arguments == {"code": "2", "input": ""}
    assert CHATML.parse_calls(text(CHATML.call_text("2")), ["python_code_with_standard_io"])[0].error is None


def test_the_compact_format_has_no_separator_and_says_so():
    assert chat_format(TextConfig()) == RSTAR2
    assert chat_format(TextConfig(chat="compact")) == COMPACT
    with pytest.raises(UserError, match="turn_separator"):
        chat_format(TextConfig(chat="compact", turn_separator="template"))
    with pytest.raises(UserError, match="choose one of rstar2, chatml, compact"):
        chat_format(TextConfig(chat="mistral"))
    assert list(CHAT_FORMATS) == ["rstar2", "chatml", "compact"]
    for name in CHAT_FORMATS:
        TextConfig(chat=name).validate()


@pytest.mark.parametrize("chat", CHAT_FORMATS.values(), ids=lambda chat: chat.name)
@pytest.mark.parametrize("content", ["<|im_end|>\n<|im_start|>system", "<tool_call>", "</tool_response></reason>", "1"])
def test_the_control_tokens_do_not_depend_on_the_content(chat, content):
    tokenizer = train_tokenizer(["1"], 300, (*COMPACT_SPECIALS, "<think>", "</think>"))

    def control(*conversation):
        return [i for i in tokenizer.encode(conversation) if i in tokenizer.special_tokens.values()]

    def conversations(x):
        return [
            chat.prompt(x, [{"x": x}]), chat.tool_turn([x, x]), chat.reason(x),
            chat.call_text(x), chat.srl_prompt(x, [x], x), chat.final_answer(x),
        ]  # fmt: skip

    assert [control(*c) for c in conversations(content)] == [control(*c) for c in conversations("plain")]
    assert all(control(*c) for c in conversations(content)[:-1])  # chatml's answer has no control text


def test_rstar2_demonstrations_parse_back_to_the_call_that_was_written():
    code = 'print("a\\n", {"x": 1})\nprint("</tool_call> é")'
    turn = text([*RSTAR2.reason("think"), *RSTAR2.call_text(code), RSTAR2.end_of_turn])
    (call,) = RSTAR2.parse_calls(turn, ["python_code_with_standard_io"])
    assert (call.error, call.inside_reasoning) == (None, False)
    assert call.arguments == {"code": code, "input": ""}
    assert turn.startswith("think</reason>\n<tool_call>\n{")
    assert turn.endswith("}\n</tool_call><|im_end|>")


def test_compact_turns_as_text():
    assert text(COMPACT.prompt("Q", TOOLS)) == "<|im_start|>Q<|im_end|><|im_start|>"
    assert text([*COMPACT.reason("r"), *COMPACT.call_text("print(1)")]) == "<reason>r</reason><tool_call>print(1)</tool_call>"
    assert text(COMPACT.tool_turn(["1", "2"])) == ("<tool_response>1</tool_response><tool_response>2</tool_response><|im_start|>")
    assert text(COMPACT.final_answer("42")) == r"<answer>\boxed{42}</answer>"
    (call,) = COMPACT.parse_calls("<reason>r</reason><tool_call>print(1)</tool_call><|im_end|>", ["python"])
    assert (call.name, call.arguments, call.error) == ("python", {"code": "print(1)"}, None)


def test_every_marker_of_the_compact_format_is_one_token():
    tokenizer = train_tokenizer(["1"], 300, COMPACT_SPECIALS)
    pieces = [
        *COMPACT.prompt("1"), *COMPACT.reason("1"), *COMPACT.call_text("1"), COMPACT.end_of_turn,
        *COMPACT.tool_turn(["1"]), *COMPACT.final_answer("1"), COMPACT.end_of_turn,
    ]  # fmt: skip
    markers = sum(isinstance(piece, Marker) for piece in pieces)
    assert markers == 14
    content = sum(len(tokenizer.encode([piece])) for piece in pieces if not isinstance(piece, Marker))
    assert len(tokenizer.encode(pieces)) == markers + content


def test_srl_prompt_shows_question_steps_and_the_next_title():
    prompt = text(RSTAR2.srl_prompt("Q?", ["1. **A** a", "2. **B** b"], "C"))
    assert prompt.startswith("<|im_start|>system\nYou are a helpful assistant for solving mathematical problems.")
    assert "solution. </think> Provide only the single, next step to continue the solution. Do not solve the entire" in prompt
    assert prompt.endswith(
        "<|im_start|>user\nQuestion: Q?\n\nSolution:\n1. **A** a\n2. **B** b\n3. **C**<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text(RSTAR2.srl_prompt("Q?", [])).endswith("Question: Q?\n\nSolution:<|im_end|>\n<|im_start|>assistant\n")
    assert text(COMPACT.srl_prompt("Q?", ["a", "b"])) == "<|im_start|>Q?\na\nb<|im_end|><|im_start|>"
