"""Tool-call parsing: what runs, what does not, and what the model is told."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar_jax.text.tool_calls import parse_tool_calls

GOOD = '{"name": "python", "arguments": {"code": "print(1)"}}'


def parse(text, forced_opening="", syntax="json", tool_names=("python", "search"), **options):
    return parse_tool_calls(text, syntax=syntax, tool_names=tool_names, forced_opening=forced_opening, **options)


def call(body):
    return f"<tool_call>\n{body}\n</tool_call>"


def error_of(body):
    (parsed,) = parse(call(body))
    assert parsed.error is not None
    assert parsed.arguments == {}
    return parsed.error


def test_a_well_formed_call():
    (parsed,) = parse(f"so </reason>\n{call(GOOD)}<|im_end|>", "<reason>")
    assert (parsed.name, parsed.arguments, parsed.error) == ("python", {"code": "print(1)"}, None)
    assert not parsed.inside_reasoning


@pytest.mark.parametrize("text", ["", "no call here", "a tool_call of <b>", GOOD, "<tool_call", "</reason> <answer>1</answer>"])
def test_text_without_a_call_gives_nothing(text):
    assert parse(text, "<reason>") == []


def test_several_calls_come_in_order():
    second = GOOD.replace("print(1)", "print(2)")
    assert [c.arguments["code"] for c in parse(call(GOOD) + call(second))] == ["print(1)", "print(2)"]


# A call inside the reasoning (verl#4757).


@pytest.mark.parametrize("forced", [True, False])
def test_a_call_inside_a_closed_think_block_is_not_run_and_the_real_one_is(forced):
    text = f"let me try {call(GOOD)} hm</think>\n{call(GOOD)}"
    text, opening = (text, "<think>") if forced else (f"<think>{text}", "")
    calls = parse(text, opening, reasoning_tags=("<think>", "</think>"))
    assert [c.inside_reasoning for c in calls] == [True, False]
    assert [c.error is None for c in calls] == [False, True]
    assert "inside the reasoning" in calls[0].error


def test_a_call_in_reasoning_that_is_never_closed_counts_as_a_real_one():
    (parsed,) = parse(f"thinking {call(GOOD)}<|im_end|>", "<reason>")
    assert (parsed.error, parsed.inside_reasoning) == (None, False)


def test_a_call_between_two_reasoning_blocks_is_not_inside_either():
    text = f"<reason>a</reason>{call(GOOD)}<reason>b</reason>{call(GOOD)}"
    assert [c.inside_reasoning for c in parse(text)] == [False, False]


def test_a_closing_tag_within_a_call_does_not_close_the_reasoning():
    quoting = json.dumps({"name": "python", "arguments": {"code": "print('</reason>')"}})
    calls = parse(f"hm {call(GOOD)} and {call(quoting)}", "<reason>")
    assert [c.inside_reasoning for c in calls] == [False, False]
    assert calls[1].arguments == {"code": "print('</reason>')"}


def test_a_tag_mentioned_in_the_reasoning_does_not_swallow_the_real_call():
    calls = parse(f"I could use <tool_call> here</reason>{call(GOOD)}", "<reason>")
    assert [(c.inside_reasoning, c.error is None) for c in calls] == [(True, False), (False, True)]


def test_tags_in_a_string_of_the_code_belong_to_the_code():
    code = "print('</tool_call><tool_call>')"
    (parsed,) = parse(call(json.dumps({"name": "python", "arguments": {"code": code}})))
    assert (parsed.error, parsed.arguments) == (None, {"code": code})


# Malformed calls: each gets a message that says what to mend.


def test_a_raw_newline_with_one_brace_short_names_both_faults():
    # {"name":"python","arguments":{"code":"print(1)  is 47 characters; the raw newline is the next one
    message = error_of('{"name":"python","arguments":{"code":"print(1)\nprint(2)"}')
    assert "raw control character in a string at line 1 column 47" in message
    assert r"\n" in message
    assert "1 closing brace missing" in message


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ('{"name": "python", "arguments": {"code": "x"}', "1 closing brace missing"),
        ('{"name": "python", "arguments": {"code": "x"', "2 closing braces missing"),
        ('{"name": "python" "arguments": {}}', "line 1 column 19"),
        ("{'name': 'python'}", "line 1 column 2"),
        (GOOD + GOOD, "text after the JSON object at character 54"),
        ('{"a":1}{"a":1}', "text after the JSON object at character 8"),
        (GOOD + " thanks", "text after the JSON object"),
        (f"[{GOOD}]", "must be an object"),
        ('"python"', "not a string"),
        ("null", "not null"),
        ("", "empty"),
        ('{"arguments": {}}', 'no "name"'),
        ('{"name": 3, "arguments": {}}', '"name" of a tool call must be a string'),
        ('{"name": "WolframAlpha", "arguments": {}}', "unknown tool 'WolframAlpha'; known tools: python, search"),
        ('{"name": "python"}', 'no "arguments"'),
        ('{"name": "python", "code": "print(1)"}', '"code" must stand inside "arguments"'),
        ('{"name": "python", "arguments": {}, "code": "print(1)"}', '"code" must stand inside "arguments"'),
        ('{"name": "python", "parameters": {"code": "1"}}', '"parameters" must stand inside "arguments"'),
        ('{"name": "python", "arguments": "{\\"code\\": \\"1\\"}"}', '"arguments" must be an object, not a string'),
        ('{"name": "python", "arguments": null}', "not null"),
        ('{"name": "python", "arguments": ["print(1)"]}', "not a list"),
        ('{"name": "python", "name": "search", "arguments": {}}', 'the key "name" stands twice'),
        ('{"name": "python", "arguments": {"code": "1", "code": "2"}}', 'the key "code" stands twice'),
        ('{"name": "python", "arguments": {"code": NaN}}', "NaN is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"name": "python", "arguments": {"code": ' + "1" * 5000 + "}}", "not valid JSON"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(body, part):
    message = error_of(body)
    assert part in message
    assert "\n" not in message
    assert len(message) < 250


@pytest.mark.parametrize("body", [f"\n{GOOD}", "", GOOD[:20], f"{GOOD}<|im_end|>"])
def test_a_call_that_is_never_closed_is_an_error(body):
    (parsed,) = parse(f"<tool_call>{body}")
    assert "never closed" in parsed.error


def test_a_closing_tag_alone_is_an_error():
    (parsed,) = parse(f"{GOOD}\n</tool_call>")
    assert "without <tool_call>" in parsed.error


def test_an_unclosed_call_does_not_swallow_the_next_one():
    first, second = parse(f"<tool_call>{GOOD[:-1]}<tool_call>{GOOD}</tool_call>")
    assert "never closed" in first.error
    assert second.error is None


def test_no_tools_at_all():
    (parsed,) = parse(call(GOOD), tool_names=())
    assert "no tool" in parsed.error
    (parsed,) = parse("<tool_call>1</tool_call>", syntax="code", tool_names=())
    assert "no tool" in parsed.error


def test_bare_code_goes_to_the_first_tool_as_it_is_written():
    code = 'for i in range(2):\n    print({"i": i})'
    (parsed,) = parse(f"<reason>r</reason><tool_call>{code}</tool_call><|im_end|>", syntax="code")
    assert (parsed.name, parsed.arguments, parsed.error) == ("python", {"code": code}, None)


@pytest.mark.parametrize(("text", "part"), [("<tool_call> </tool_call>", "empty"), ("<tool_call>print(1)", "never closed")])
def test_bare_code_errors(text, part):
    (parsed,) = parse(text, syntax="code")
    assert part in parsed.error


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<reason>",
    "</reason>",
    GOOD,
    "{",
    "}",
    '"',
    "\\",
    "\n",
    "name",
    ":",
    "[",
    "é",
    "1",
]


@settings(max_examples=400, deadline=None)
@given(
    parts=st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=5)), max_size=14),
    syntax=st.sampled_from(["json", "code"]),
    forced=st.sampled_from(["", "<reason>"]),
)
def test_any_text_parses_and_no_tag_is_passed_over_in_silence(parts, syntax, forced):
    text = "".join(parts)
    calls = parse(text, forced, syntax)
    assert bool(calls) == ("<tool_call>" in text or "</tool_call>" in text)
    for parsed in calls:
        if parsed.error is None:
            assert parsed.name == "python"
            assert isinstance(parsed.arguments, dict)
            assert not parsed.inside_reasoning
        else:
            assert parsed.error
            assert parsed.arguments == {}
