"""SRL's step reward: pinned values of the similarity, the format, the units."""

import difflib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar_jax.rewards.similarity import UNITS, normalise_whitespace, similarity, split_action, step_reward
from rstar_jax.types import UserError

LONG_EXPERT = "x = 2 + 3 = 5. Then " * 10
LONG_MODEL = "Then x = 2 + 3 = 5. " * 10


def encode(text):
    return [ord(c) for c in text]


# The similarity.


def test_hand_counted_values():
    assert similarity("abcd", "bcde") == 2 * 3 / 8  # the block bcd
    assert similarity("abc", "abc") == 1.0
    assert similarity("abc", "xyz") == 0.0


def test_the_order_of_the_arguments_is_model_then_expert():
    # 'tide' against 'diet': the first longest common run is one letter, t, found at the start of 'tide' and at the end of
    # 'diet', with nothing left on its sides: 2 * 1 / 8. The other way round d is found first, then e or i: 2 * 2 / 8.
    assert similarity("tide", "diet") == 0.25
    assert similarity("diet", "tide") == 0.5


def test_experts_of_two_hundred_characters_and_more_do_not_collapse():
    # The model's text is the expert's turned by "Then ". Without the trailing space each has 199 characters; they share a run
    # of 194, and with a "!" at the end of both one character more.
    model, expert = LONG_MODEL.strip(), LONG_EXPERT.strip()
    assert (len(model), len(expert)) == (199, 199)
    assert similarity(model, expert) == 2 * 194 / 398
    assert similarity(f"{model}!", f"{expert}!") == 2 * 195 / 400
    assert difflib.SequenceMatcher(None, f"{model}!", f"{expert}!").ratio() < 0.05  # what autojunk would do


@pytest.mark.parametrize("size", [150, 199, 200, 201, 400])
def test_there_is_no_jump_at_two_hundred_characters(size):
    model, expert = (LONG_MODEL * 2)[:size].strip(), (LONG_EXPERT * 2)[:size].strip()
    assert 0.9 < similarity(model, expert) < 1.0


@pytest.mark.parametrize("unit", UNITS)
def test_two_empty_actions_are_not_similar(unit):
    assert similarity("", "", unit, encode) == 0.0
    assert similarity(" \n", "\t", unit, encode) == 0.0
    assert similarity("", "abc", unit, encode) == 0.0
    assert similarity("abc", "", unit, encode) == 0.0


@settings(max_examples=300, deadline=None)
@given(model=st.text(alphabet="abc 1\n", max_size=40), expert=st.text(alphabet="abc 1\n", max_size=40))
def test_characters_equal_difflib_without_autojunk(model, expert):
    model, expert = normalise_whitespace(model), normalise_whitespace(expert)
    oracle = difflib.SequenceMatcher(None, model, expert, autojunk=False).ratio() if model or expert else 0.0
    assert similarity(model, expert) == oracle


@settings(max_examples=100, deadline=None)
@given(
    model=st.lists(st.sampled_from(["x", "12", "3.5", "+"]), min_size=1, max_size=12),
    expert=st.lists(st.sampled_from(["x", "12", "3.5", "+"]), min_size=1, max_size=12),
)
def test_words_and_numbers_equal_difflib_on_the_list_of_elements(model, expert):
    oracle = difflib.SequenceMatcher(None, model, expert, autojunk=False).ratio()
    assert similarity(" ".join(model), " ".join(expert), "word") == oracle
    assert similarity(" ".join(model), "\n ".join(expert), "number") == oracle


def test_long_random_texts_equal_difflib():
    rng = random.Random(0)
    for _ in range(5):
        model, expert = ("".join(rng.choices("abcde fg12", k=300)) for _ in range(2))
        model, expert = normalise_whitespace(model), normalise_whitespace(expert)
        assert similarity(model, expert) == difflib.SequenceMatcher(None, model, expert, autojunk=False).ratio()


def test_whitespace_counts_once_and_the_same_on_both_sides():
    assert similarity("a  b\n\n c ", "a b c") == 1.0
    assert similarity("a b c", "\ta\r\nb   c") == 1.0
    assert similarity("ab", "a b") == 2 * 2 / 5  # a space that is there and one that is not still differ


def test_a_wrong_number_costs_one_whole_element_in_the_number_unit():
    model, expert = "f(1234) = 5", "f(1239) = 5"
    assert similarity(model, expert, "char") == 2 * 10 / 22
    assert similarity(model, expert, "number") == 2 * 5 / 12  # f ( [number] ) = 5: five of six match
    assert similarity("x = 10", "x = 1", "number") == 2 * 2 / 6
    assert similarity("3.14", "3.15", "number") == 0.0
    assert similarity("x1+y2", "x1+y3", "number") == 2 * 4 / 10


def test_tokens_are_what_the_tokenizer_gives():
    assert similarity("abcd", "bcde", "token", encode) == 0.75
    with pytest.raises(UserError, match="tokenizer"):
        similarity("a", "a", "token")
    with pytest.raises(UserError, match="choose one of"):
        similarity("a", "a", "letter")


# The format.


@pytest.mark.parametrize(
    ("completion", "action"),
    [
        ("<think>t</think>act", "act"),
        ("  <think>\nt\n</think>\n\n act \n", "act"),
        ("<think>t</think><solution> act </solution>", "act"),
        ("<think>t</think>act<|im_end|>", "act"),
        ("<think>t</think><solution>act</solution>\n<|im_end|>\n", "act"),
        ("<think>t</think>a <|im_end|> b", "a <|im_end|> b"),
    ],
)
def test_the_action_is_what_follows_the_think_block(completion, action):
    assert split_action(completion).action == action
    assert step_reward(completion, [action]).value == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "act",
        "<think>t</think>",
        "<think>t</think> \n ",
        "<think>t</think><|im_end|>",
        "<think></think>act",
        "<think> \n</think>act",
        "<think>t act",
        "t</think>act",
        "</think>t<think>act",
        "<think>a</think><think>b</think>act",
        "<think>a</think>act</think>",
        "sure <think>t</think>act",
        "<think>t</think><solution>act",
        "<think>t</think>act</solution>",
        "<think>t</think><solution></solution>",
        "<think>t</think>so <solution>act</solution>",
        "<think>t</think><solution>a</solution><solution>act</solution>",
    ],
)
def test_a_broken_format_is_minus_one(completion):
    verdict = step_reward(completion, ["act"])
    assert verdict.value == -1.0
    assert verdict.reason


def test_a_truncated_completion_is_minus_one_even_if_it_could_be_read():
    assert step_reward("<think>t</think>act", ["act"], truncated=True).value == -1.0
    assert step_reward("<think>t</think>act", ["act"], truncated=True).reason == "truncated"


def test_the_think_block_may_be_absent_when_it_is_not_required_but_not_broken():
    assert step_reward("act", ["act"], require_think=False).value == 1.0
    assert step_reward("<think>t</think>act", ["act"], require_think=False).value == 1.0
    assert step_reward("<think>t act", ["act"], require_think=False).value == -1.0
    assert step_reward("", ["act"], require_think=False).value == -1.0


def test_the_compact_format_with_its_own_tags():
    completion = "<reason>multiply</reason><tool_call>print(2*3)</tool_call><|im_end|>"
    options = {"think_tags": ("<reason>", "</reason>")}
    assert step_reward(completion, ["<tool_call>print(2*3)</tool_call>"], **options).value == 1.0
    assert step_reward(completion, ["<tool_call>print(2*3)</tool_call>"]).value == -1.0


def test_the_best_expert_counts_whatever_its_place():
    experts = ["xyz", "abcd", "abce"]
    for order in (experts, experts[::-1]):
        assert step_reward("<think>t</think>abcd", order).value == 1.0
    assert step_reward("<think>t</think>abcf", experts).value == 0.75


def test_rewards_lie_between_zero_and_one_or_are_minus_one():
    assert step_reward("<think>t</think>abc", ["xyz"]).value == 0.0
    assert step_reward("<think>t</think>abc", [""]).value == 0.0


def test_a_problem_without_experts_is_an_error():
    with pytest.raises(UserError, match="at least one expert"):
        step_reward("<think>t</think>a", [])
