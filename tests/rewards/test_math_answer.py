"""Answer extraction and comparison; the reward on whole trajectories."""

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar_jax.rewards.math_answer import MathReward, compare_integers, extract_answer, is_prose, normalise
from rstar_jax.rewards.verifier import Verifier
from rstar_jax.types import Finish, Problem, Sampled, Trajectory


def box(content):
    return f"<answer>\\boxed{{{content}}}</answer>"


# Extraction.


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<answer>\boxed{42}</answer>", "42"),
        (r"so <answer> The answer is \boxed{ 42 }. </answer><|im_end|>", "42"),
        (r"<answer>\boxed{\frac{1}{2}}</answer>", r"\frac{1}{2}"),
        (r"<answer>\boxed{\{1,2\}}</answer>", r"\{1,2\}"),
        (r"<answer>\boxed{\left\{ 1 \right.}</answer>", r"\left\{ 1 \right."),
        (r"<answer>\boxed {7}</answer>", "7"),
        (r"<answer>\boxed{70} or \boxed{71}</answer>", "71"),
        (r"<answer>\boxed{1}</answer> no: <answer>\boxed{2}</answer>", "2"),
        (r"<answer>\boxed{1}</answer> <answer>\boxed{2}", "1"),
        (r"<answer> <answer>\boxed{3}</answer>", "3"),
        (r"<answer>\boxed{a \boxed{b}}</answer>", r"a \boxed{b}"),
        (box("1" * 120), "1" * 120),
        (r"<answer>\boxed{}</answer>", ""),
        # no answer
        ("", None),
        ("The answer is 42.", None),
        (r"\boxed{42}", None),
        (r"<answer>42</answer>", None),
        (r"<answer>\boxed{42}", None),
        (r"\boxed{42}</answer>", None),
        (r"<answer>\fbox{42}</answer>", None),
        (r"<answer>\boxed{42</answer>", None),
        (r"<answer>\boxed{70} \boxed{71</answer>", None),
        (r"<answer>\boxed{1}</answer> <answer>I do not know</answer>", None),
        (r"<answer></answer>\boxed{42}", None),
        ("put your answer in \\boxed{} inside <answer> </answer>", None),
    ],
)
def test_the_answer_is_the_last_box_of_the_last_closed_block(text, answer):
    assert extract_answer(text) == answer


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["<answer>", "</answer>", r"\boxed{", "{", "}", "\\", "1", " "]), max_size=15).map("".join))
def test_any_text_can_be_searched(text):
    answer = extract_answer(text)
    assert answer is None or (answer in text and "</answer>" in text)


# Whole numbers.


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("33", "33", True),
        ("033", "33", True),
        ("33", "033", True),
        ("1,234", "1234", True),
        ("1{,}234", "1234", True),
        (r"1\,234\,567", "1234567", True),
        (r"12,\!345", "12345", True),
        ("27", "27.0", True),
        ("27.0", "27", True),
        ("27.", "27", True),
        ("+5", "5", True),
        ("-5", "-5", True),
        ("\u22125", "-5", True),
        ("-0", "0", True),
        ("$42$", "42", True),
        (r"\(42\)", "42", True),
        ("42", r"$\boxed{42}$", True),
        (r"\$42", "42", True),
        (r"42^\circ", "42", True),
        (r"42\text{ cm}", "42", True),
        ("9" * 6000, "9" * 6000, True),
        # different
        ("5", "-5", False),
        ("10001", "10000", False),
        ("1000001", "1000000", False),
        ("0.5", "50", False),
        ("5000", "50", False),
        ("42.0001", "42", False),
        ("1 1/4", "1", False),
        (r"1\frac{1}{4}", "1", False),
        ("12,34", "1234", False),
        ("1 234", "1234", False),
        ("42 or 43", "42", False),
        ("42, 43", "42", False),
        ("42", "42000", False),
        ("2^{10}", "1024", False),
        ("84/2", "42", False),
        ("9^{9^{9^9}}", "42", False),
        ("١٢", "12", False),
        ("", "0", False),
        ("forty-two", "42", False),
        # not a whole number: not decided here
        ("1", r"\frac{1}{2}", None),
        ("1", "0.5", None),
        ("1", "", None),
        ("1", "(1, 2)", None),
        ("1", "1 1/4", None),
    ],
)
def test_whole_numbers_are_compared_exactly(answer, gold, equal):
    assert compare_integers(answer, gold) is equal


PERCENTS = ["50", "0.5", "50%", r"50\%"]


@pytest.mark.parametrize("gold", PERCENTS)
@pytest.mark.parametrize("answer", PERCENTS)
def test_a_percent_sign_is_a_unit(answer, gold):
    same = (answer == "0.5") == (gold == "0.5")
    expected = None if gold == "0.5" else same
    assert compare_integers(answer, gold) is expected
    assert (normalise(answer) == normalise(gold)) is same


@settings(max_examples=200, deadline=None)
@given(a=st.integers(), b=st.integers())
def test_integers_equal_as_python_integers(a, b):
    assert compare_integers(str(a), str(b)) is (a == b)
    assert compare_integers(f"{a:,}", str(a)) is True
    assert compare_integers(f"${a}.00$", str(a)) is True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"$\frac{1}{2}$", r"\frac{1}{2}"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"$$x$$", "x"),
        ("$a$ and $b$", "$a$ and $b$"),
        (r"\text{east}", r"\text{east}"),
        (r"5\text{ cm}", "5"),
        ("-1 1/4", r"-(1+\frac{1}{4})"),
        ("6.5e-3", r"6.5 \times 10^{-3}"),
    ],
)
def test_normal_form(text, expected):
    assert normalise(text) == expected


def test_prose_is_told_from_expressions():
    assert is_prose("the answer is blue")
    for expression in (
        r"\text{the first of them}",
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        r"\arctan \frac12",
        "p - q",
        "east",
    ):
        assert not is_prose(expression)


@pytest.mark.parametrize(
    "text",
    ["9" * 50_000, "1" + " " * 50_000 + "x", "{" * 50_000, r"\boxed{" * 5_000 + "}" * 5_000, r"\text{" * 9_000, "$" * 50_001,
     "." * 50_000, "1," * 25_000, r"^\circ" * 9_000],
    ids=["digits", "spaces", "braces", "boxes", "texts", "dollars", "dots", "commas", "degrees"],
)  # fmt: skip
def test_long_degenerate_answers_are_cheap(text):
    start = time.process_time()
    assert compare_integers(text, "7") is False
    assert extract_answer(f"<answer>{text}</answer>") is None or "boxed" in text
    assert time.process_time() - start < 5.0


# Whole trajectories.


def rollout(problem, *turns, observed=(), finish=Finish.STOP):
    trajectory = Trajectory(problem, 0, [1])
    for number, text in enumerate(turns):
        trajectory.append_sampled(Sampled((2,), (-0.1,), Finish.STOP), text)
        if number < len(observed):
            trajectory.append_observed([3])
    trajectory.close(finish)
    return trajectory


def score(gold, *turns, finish=Finish.STOP):
    problem = Problem("p", r"Put your answer in \boxed{42} inside <answer>\boxed{42}</answer>.", gold)

    async def run():
        async with Verifier() as verifier:
            verdict = await MathReward(verifier)(problem, rollout(problem, *turns, finish=finish))
            assert verifier.pids == ()  # nothing here needs a worker
            return verdict

    return asyncio.run(run()).value


def test_integer_rewards_need_no_worker():
    assert score("42", box(42)) == 1.0
    assert score("042", "thinking</reason>" + box(42)) == 1.0
    assert score("42", box(41)) == 0.0


def test_an_empty_response_scores_zero_though_the_prompt_holds_a_box():
    assert score("42") == 0.0
    assert score("42", "") == 0.0
    assert score("42", box("")) == 0.0


def test_naming_two_answers_pays_only_the_last():
    assert score("71", r"<answer>\boxed{70} \boxed{71}</answer>") == 1.0
    assert score("70", r"<answer>\boxed{70} \boxed{71}</answer>") == 0.0
    assert score("70", box(70), box(71)) == 0.0


def test_the_last_answer_of_any_turn_counts_and_no_block_reaches_over_a_turn():
    assert score("42", box(42), "one more thought") == 1.0
    assert score("42", "<answer>", r"\boxed{42}</answer>") == 0.0


def test_a_cut_off_rollout_is_scored_by_what_it_said():
    assert score("42", "<answer>\\boxed{42", finish=Finish.LENGTH) == 0.0
    assert score("42", "<tool_call>", finish=Finish.TURNS) == 0.0


def test_a_failed_rollout_is_unknown():
    assert score("42", box(42), finish=Finish.FAILED) is None


@pytest.mark.parametrize("gold", [None, "", "  ", "$$", "the answer is blue"])
def test_an_unusable_reference_is_unknown_and_never_one(gold):
    assert score(gold, box("the answer is blue")) is None
    assert score(gold, box("")) in (None, 0.0)
