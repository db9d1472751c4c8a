"""Expert solutions as steps, and SRL instances."""

import pytest

from rstar_jax.text.steps import (
    Rejection,
    Step,
    Steps,
    cut_middle,
    instances,
    parse,
    parse_function_calls,
    parse_socratic,
    sift,
)
from rstar_jax.types import Problem, UserError

PROBLEM = Problem("p1", "What is 2 * 3 + 1?")
THREE = parse("1. **Multiply** 2 * 3 = 6\n2. **Add** 6 + 1 = 7\n3. **Conclude** The answer is 7.")


def test_a_numbered_solution():
    assert Steps((Step("2 * 3 = 6", "Multiply"), Step("6 + 1 = 7", "Add"), Step("The answer is 7.", "Conclude"))) == THREE


@pytest.mark.parametrize(
    ("line", "title", "action"),
    [
        ("1. **Title** action", "Title", "action"),
        ("1. **Title**: action", "Title", "action"),
        ("1. **Title:** action", "Title", "action"),
        ("1. **Title:**action", "Title", "action"),
        ("1. **Title**:\n- first\n- second", "Title", "- first\n- second"),
        ("1.**Title** action", "Title", "action"),
        ("1. **Compute a*b** now", "Compute a*b", "now"),
        ("1. **Expand 2**3 first** then", "Expand 2**3 first", "then"),
        ("1. **Take x = a*** so", "Take x = a*", "so"),
        (r"1. **Prime Factorization of \(20!\)**: it is **big**.", r"Prime Factorization of \(20!\)", "it is **big**."),
        ("1. **Title** a\r\nb", "Title", "a\nb"),
    ],
)
def test_the_colon_stands_inside_or_outside_the_bold_and_titles_may_hold_stars(line, title, action):
    assert parse(line) == Steps((Step(action, title),))


def test_a_header_stands_at_the_start_of_a_line_and_an_indented_list_belongs_to_its_step():
    solution = "1. **A** see 2. **not a header** here\n   1. **nested** x\n   2. **nested** y\n2. **B** end"
    assert [step.title for step in parse(solution).steps] == ["A", "B"]
    assert parse(solution).steps[0].action.endswith("2. **nested** y")


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ("1. **A** a\n3. **C** c", "numbers do not run 1..N"),
        ("2. **B** b", "numbers do not run 1..N"),
        ("1. **A** a\n1. **B** b\n2. **C** c", "numbers do not run 1..N"),
        ("The answer is 7.", "no numbered, titled step"),
        ("1. Title without bold", "no numbered, titled step"),
        ("", "no numbered, titled step"),
        ("1. **A** a\n2. **B**\n3. **C** c", "a step without an action"),
        ("1. **:** a", "a step without a title"),
    ],
)
def test_what_cannot_be_read_is_rejected_with_its_reason(solution, reason):
    assert parse(solution).reason == reason


def test_a_preamble_is_kept_with_the_question_or_rejects_the_row():
    solution = "We know x > 0.\n\n1. **A** a\n2. **B** b"
    assert parse(solution).preamble == "We know x > 0."
    assert parse(solution, preamble="reject").reason == "text before the first step"
    first, second = instances(PROBLEM, parse(solution), target_steps="all")
    assert first.question == second.question == "What is 2 * 3 + 1?\n\nWe know x > 0."


def test_the_label_of_the_template_is_no_preamble():
    assert parse("SOLUTION:\n\n1. **A** a", preamble="reject") == Steps((Step("a", "A"),))


def test_a_closing_answer_is_not_part_of_the_last_step():
    parsed = parse("1. **A** a\n2. **B** b\n\n**Answer**: \\boxed{7}")
    assert parsed.steps[-1] == Step("b", "B")
    assert parsed.conclusion == "**Answer**: \\boxed{7}"


SOCRATIC = (
    "How many does she sell? ** She sells 16 - 3 = <<16-3=13>>13 eggs.\n"
    "What is left? ** \n"
    "How much is 2 ** 3? ** 2 ** 3 = 8\n"
    "#### 1,234"
)


def test_socratic_lines_with_calculator_marks_an_empty_action_and_powers():
    assert parse_socratic("A? ** 1 + 1 = <<1+1=2>>2\nB? ** \n#### 2") == Steps(
        (Step("1 + 1 = 2", "A?"), Step("", "B?")), conclusion="2"
    )
    parsed = parse_socratic(SOCRATIC)
    assert parsed.steps[0] == Step("She sells 16 - 3 = 13 eggs.", "How many does she sell?")
    assert parsed.conclusion == "1,234"
    assert len(parsed.steps) == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("A? ** 1", "no final answer behind ####"),
        ("A? ** 1\n####", "no final answer behind ####"),
        ("#### 3", "no step before ####"),
        ("She sells 3.\n#### 3", "a line that is not `sub-question ** step`"),
    ],
)
def test_socratic_rejections(answer, reason):
    assert parse_socratic(answer).reason == reason


def test_rejected_rows_are_counted_by_reason():
    kept, rejected = sift([THREE, parse("x"), parse("y"), parse("2. **B** b")])
    assert kept == [THREE]
    assert rejected == {"no numbered, titled step": 2, "numbers do not run 1..N": 1}


# Instances.


def test_n_minus_one_instances_predict_steps_one_to_n_minus_one_from_what_came_before():
    first, second = instances(PROBLEM, THREE)
    assert (first.index, first.context, first.expert) == (1, (), "1. **Multiply** 2 * 3 = 6")
    assert (second.index, second.context, second.expert) == (2, ("1. **Multiply** 2 * 3 = 6",), "2. **Add** 6 + 1 = 7")
    assert {first.problem_id, second.problem_id} == {"p1"}
    assert first.title is None


@pytest.mark.parametrize(("target_steps", "targets"), [("first_n_minus_1", [1, 2]), ("all", [1, 2, 3]), ("skip_first", [2, 3])])
def test_which_steps_are_targets(target_steps, targets):
    found = instances(PROBLEM, THREE, target_steps=target_steps)
    assert [instance.index for instance in found] == targets
    assert all(len(instance.context) == instance.index - 1 for instance in found)


def test_one_step_gives_no_instance_under_the_papers_rule():
    assert instances(PROBLEM, parse("1. **A** a")) == []


def test_a_given_title_is_taken_out_of_the_experts_action():
    instance = instances(PROBLEM, THREE, give_title=True)[1]
    assert (instance.title, instance.expert) == ("Add", "6 + 1 = 7")
    assert instance.context == ("1. **Multiply** 2 * 3 = 6",)


def test_an_empty_socratic_action_stays_an_instance():
    found = instances(PROBLEM, parse_socratic(SOCRATIC), target_steps="all")
    assert [instance.expert for instance in found][1] == "2. **What is left?**"
    assert instances(PROBLEM, parse_socratic(SOCRATIC), give_title=True)[1].expert == ""


def test_unknown_target_rule_and_missing_titles_are_one_clear_line():
    with pytest.raises(UserError, match="choose one of first_n_minus_1, all, skip_first"):
        instances(PROBLEM, THREE, target_steps="last")
    with pytest.raises(UserError, match="need"):
        instances(PROBLEM, Steps((Step("a"), Step("b"))), give_title=True)


# Agent conversations.


def block(name, value):
    return f"<function={name}>\n<parameter=command>{value}</parameter>\n</function>"


def conversation():
    return [
        {"role": "system", "content": "You may call functions. <function=example>\n</function>"},
        {"role": "user", "content": "Look:\n<pr_description>\nIt breaks.\n</pr_description>\nFix it."},
        {"role": "assistant", "content": f"I look first.\n\n{block('bash', 'ls')}"},
        {"role": "user", "content": "OBSERVATION: a.py"},
        {"role": "assistant", "content": f"Now the edit.\n\n{block('bash', 'sed </function> a.py')}"},
        {"role": "user", "content": "x" * 100},
        {"role": "assistant", "content": block("bash", "pytest")},
        {"role": "user", "content": "ok"},
        {"role": "assistant", "content": f"Done.\n\n{block('submit', '')}"},
    ]


def test_the_action_of_each_assistant_turn_is_its_function_block():
    parsed = parse_function_calls(conversation())
    assert parsed.issue == "It breaks."
    assert [step.action for step in parsed.steps] == [
        block("bash", "ls"), block("bash", "sed </function> a.py"), block("bash", "pytest"), block("submit", "")
    ]  # fmt: skip
    assert [step.observation for step in parsed.steps] == ["OBSERVATION: a.py", "x" * 100, "ok", ""]


def test_the_context_is_the_issue_and_the_last_two_pairs():
    parsed = parse_function_calls(conversation())
    found = instances(Problem("swe", ""), parsed, target_steps="all", window=2)
    assert [len(instance.context) for instance in found] == [0, 1, 2, 2]
    assert found[3].context == (f"{block('bash', 'sed </function> a.py')}\n{'x' * 100}", f"{block('bash', 'pytest')}\nok")
    assert found[3].expert == block("submit", "")
    assert found[3].question == "It breaks."


def test_several_submits_are_allowed():
    messages = conversation()
    messages += [{"role": "user", "content": "sure?"}, {"role": "assistant", "content": block("submit", "")}]
    assert len(parse_function_calls(messages).steps) == 5


def test_observations_are_cut_at_head_and_tail():
    parsed = parse_function_calls(conversation(), observation_chars=10)
    assert parsed.steps[1].observation == "xxxxx\n[90 characters left out]\nxxxxx"
    assert cut_middle("abcdefg", 3) == "a\n[4 characters left out]\nfg"
    assert cut_middle("abc", 3) == "abc"
    assert cut_middle("abc", 0) == "\n[3 characters left out]\n"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": "i"}, {"role": "assistant", "content": "no call"}], "exactly one function call"),
        ([{"role": "user", "content": "i"}, {"role": "assistant", "content": "<function=a>"}], "exactly one function call"),
        (
            [{"role": "user", "content": "i"}, {"role": "assistant", "content": block("a", 1) + "\n" + block("b", 2)}],
            "exactly one",
        ),
        ([{"role": "assistant", "content": block("a", 1)}], "before the issue"),
        ([{"role": "user", "content": "i"}, {"role": "user", "content": "o"}], "an observation without a call"),
        ([{"role": "user", "content": None}], "not text"),
        ([{"role": "user", "content": "i"}], "no function call"),
        ([], "no issue"),
    ],
)
def test_conversations_that_cannot_be_used_are_rejected(messages, reason):
    rejection = parse_function_calls(messages)
    assert isinstance(rejection, Rejection)
    assert reason in rejection.reason
