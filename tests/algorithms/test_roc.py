"""Resample on Correct: penalties from records, how many of each sign, and which."""

import itertools
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rstar_jax.algorithms.roc import RULES, penalties, resample_on_correct, select, split_counts
from rstar_jax.types import Finish, Problem, Sampled, ToolRecord, ToolStatus, Trajectory, UserError

NAN = float("nan")


def call(status: ToolStatus | None) -> ToolRecord:
    return ToolRecord("python", {}, status)


OK, ERROR = call(ToolStatus.OK), call(ToolStatus.ERROR)


# --- penalties --------------------------------------------------------------------------------------------------------


def test_a_clean_trajectory_has_no_penalty():
    assert penalties([OK, OK], answer_tags=1, turns=3) == (0.0, 0.0)


def test_the_error_penalty_is_the_share_of_failed_calls():
    assert penalties([OK, ERROR, OK, OK], 1, 5)[0] == 0.25
    assert penalties([ERROR], 1, 2)[0] == 1.0


def test_without_tool_calls_the_error_penalty_is_one_half():
    assert penalties([], 1, 1) == (0.5, 0.0)


@pytest.mark.parametrize("status", sorted(set(ToolStatus) - {ToolStatus.OK, ToolStatus.INFRA_ERROR}))
def test_every_kind_of_failure_is_an_error(status):
    # the public code searches the text for "error", so that its time-outs and malformed calls pass as successes
    assert penalties([call(status), OK], 1, 3)[0] == 0.5


@pytest.mark.parametrize("status", [None, ToolStatus.INFRA_ERROR])
def test_a_call_without_an_answer_is_in_neither_number(status):
    assert penalties([ERROR, call(status), OK], 1, 3)[0] == 0.5
    assert penalties([call(status)], 1, 2)[0] == 0.5
    assert penalties([OK, call(status)], 1, 2)[0] == 0.0


@pytest.mark.parametrize(
    ("answer_tags", "turns", "expected"),
    [(0, 3, 1.0), (0, 0, 1.0), (1, 1, 0.0), (1, 9, 0.0), (2, 2, 0.5), (2, 1, 1.0), (3, 8, 0.25), (9, 4, 1.0)],
)
def test_the_format_penalty(answer_tags, turns, expected):
    assert penalties([OK], answer_tags, turns)[1] == expected


def test_text_that_the_model_wrote_to_look_like_a_tools_answer_is_not_a_call():
    trajectory = Trajectory(Problem("p", "q"), 0, [1])
    text = "<tool_response>\nerror: no\n</tool_response><answer>1</answer>"
    trajectory.append_sampled(Sampled((2,), (-0.1,), Finish.STOP), text)
    trajectory.close(Finish.STOP)
    assert penalties(trajectory.calls, trajectory.text.count("<answer>"), len(trajectory.turns)) == (0.5, 0.0)


def test_negative_counts_are_refused():
    with pytest.raises(ValueError, match="answer_tags=-1"):
        penalties([], -1, 1)


# --- how many of each sign ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["paper", "public"])
def test_the_split_sums_to_keep_and_holds_both_signs_for_every_size(rule):
    # the public code ends in an assertion error for (n, keep, negatives) = (10, 5, 5), (10, 5, 3), (4, 3, 2), ...
    for n in range(2, 65):
        for keep, negatives in itertools.product(range(1, n), range(n + 1)):
            positives = n - negatives
            kept = split_counts(negatives, positives, keep, rule)
            assert sum(kept) == keep and 0 <= kept[0] <= negatives and 0 <= kept[1] <= positives, (n, keep, negatives, kept)
            if keep >= 2 and negatives and positives:
                assert min(kept) >= 1, (n, keep, negatives, kept)


@pytest.mark.parametrize(
    ("negatives", "expected"),
    [
        (0, (0, 16)),
        (1, (1, 15)),
        (2, (1, 15)),
        (3, (1, 15)),
        (4, (2, 14)),
        (15, (7, 9)),
        (16, (8, 8)),
        (30, (15, 1)),
        (31, (15, 1)),
        (32, (16, 0)),
    ],
)
def test_the_papers_rule_keeps_half_of_the_negatives_rounded_down_but_one(negatives, expected):
    assert split_counts(negatives, 32 - negatives, 16, "paper") == expected


PUBLIC_TABLE = {
    0: (0, 16), 1: (1, 15), 2: (2, 14), 3: (2, 14), 4: (2, 14), 5: (2, 14), 6: (3, 13), 7: (4, 12), 8: (4, 12), 9: (4, 12),
    16: (8, 8), 27: (14, 2), 28: (14, 2), 29: (14, 2), 30: (14, 2), 31: (15, 1), 32: (16, 0),
}  # fmt: skip


@pytest.mark.parametrize("negatives", PUBLIC_TABLE)
def test_the_public_rule_gives_the_table_of_the_public_code(negatives):
    assert split_counts(negatives, 32 - negatives, 16, "public") == PUBLIC_TABLE[negatives]


@pytest.mark.parametrize(("n", "keep", "negatives"), [(10, 5, 5), (10, 5, 3), (4, 3, 2), (32, 15, 16), (30, 15, 9)])
def test_splits_on_which_the_public_code_fails_still_keep_exactly_keep(n, keep, negatives):
    rewards = np.r_[np.zeros(negatives), np.ones(n - negatives)]
    for rule in RULES:
        assert len(resample_on_correct(rewards, np.zeros(n), keep, np.random.default_rng(0), rule)) == keep


# --- which -------------------------------------------------------------------------------------------------------------

GROUPS = st.integers(0, 40).flatmap(
    lambda n: st.tuples(
        st.lists(st.sampled_from([0.0, 1.0, -1.0, 0.5, NAN]), min_size=n, max_size=n),
        st.lists(st.floats(0, 2), min_size=n, max_size=n),
    )
)


@pytest.mark.parametrize("rule", RULES)
@hypothesis.given(group=GROUPS, keep=st.integers(1, 20), seed=st.integers(0, 2**32 - 1))
def test_a_choice_is_ordered_known_without_duplicates_and_deterministic(rule, group, keep, seed):
    rewards, penalty = np.array(group[0], np.float64), np.array(group[1], np.float64)
    indices = resample_on_correct(rewards, penalty, keep, np.random.default_rng(seed), rule)
    known = ~np.isnan(rewards)
    assert len(indices) == min(keep, known.sum())
    assert (np.diff(indices) > 0).all()
    assert known[indices].all()
    np.testing.assert_array_equal(indices, resample_on_correct(rewards, penalty, keep, np.random.default_rng(seed), rule))
    if rule != "random" and keep >= 2 and len(indices):
        for sign in (rewards > 0, rewards <= 0):
            assert sign[indices].any() == sign.any()


@pytest.mark.parametrize("rule", ["paper", "random"])
@hypothesis.given(group=GROUPS, keep=st.integers(1, 20), seed=st.integers(0, 2**32 - 1))
def test_when_keys_move_with_their_rollouts_a_permutation_chooses_the_same_rollouts(rule, group, keep, seed):
    rewards, penalty = np.array(group[0], np.float64), np.array(group[1], np.float64)
    rng = np.random.default_rng(seed)
    keys, order = rng.random(len(rewards)), rng.permutation(len(rewards))
    moved = select(rewards[order], penalty[order], keys[order], keep, rule)
    assert sorted(order[moved]) == list(select(rewards, penalty, keys, keep, rule))


@pytest.mark.parametrize("rule", RULES)
def test_the_generator_advances_by_the_same_amount_whatever_is_chosen(rule):
    used = []
    for rewards in ([0, 0, 1, 1], [1, 1, 1, 1], [0, NAN, NAN, 1]):
        rng = np.random.default_rng(7)
        resample_on_correct(rewards, np.zeros(4), 2, rng, rule)
        used.append(rng.random())
    assert len(set(used)) == 1


@pytest.mark.parametrize("rule", RULES)
def test_no_more_rollouts_than_keep_are_all_kept(rule):
    # one failed rollout of 16: the public code would drop the whole prompt
    rewards = np.r_[np.zeros(8), np.ones(8)]
    rewards[3] = NAN
    np.testing.assert_array_equal(
        resample_on_correct(rewards, np.ones(16), 16, np.random.default_rng(0), rule), [i for i in range(16) if i != 3]
    )
    assert resample_on_correct([], [], 4, np.random.default_rng(0), rule).shape == (0,)
    assert resample_on_correct([NAN, NAN], [NAN, NAN], 4, np.random.default_rng(0), rule).shape == (0,)


def test_the_public_rule_takes_the_cleanest_positives_and_the_first_negatives():
    #                   0    1    2    3    4    5    6    7
    rewards = np.array([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    penalty = np.array([9.0, 0.5, 0.1, 0.0, 0.1, 0.0, 0.1, 0.0])
    for seed in range(3):
        chosen = resample_on_correct(rewards, penalty, 4, np.random.default_rng(seed), "public")
        np.testing.assert_array_equal(chosen, [0, 2, 3, 4])


def test_a_group_of_one_sign_is_thinned_from_that_sign():
    for rule, reward in itertools.product(RULES, (0.0, 1.0)):
        assert len(resample_on_correct([reward] * 9, [0.5] * 9, 4, np.random.default_rng(1), rule)) == 4


def _law(rewards, penalty, keep) -> dict[tuple[int, ...], float]:
    """Exact probabilities of each choice under the paper's rule, by enumerating the sequences of draws."""
    positive = [i for i, r in enumerate(rewards) if r > 0]
    negative = [i for i, r in enumerate(rewards) if r <= 0]
    n_negative = max(1, math.floor(len(negative) * keep / len(rewards)))
    subsets = list(itertools.combinations(negative, n_negative))
    law: dict[tuple[int, ...], float] = {}
    for draws in itertools.permutations(positive, keep - n_negative):
        probability, left = 1.0, {i: 1 / (penalty[i] + 0.05) for i in positive}
        for i in draws:
            probability *= left[i] / sum(left.values())
            del left[i]
        for subset in subsets:
            key = tuple(sorted(draws + subset))
            law[key] = law.get(key, 0.0) + probability / len(subsets)
    return law


def _chi_square(counts: dict[tuple[int, ...], int], law: dict[tuple[int, ...], float], draws: int) -> float:
    assert counts.keys() <= law.keys()
    return sum((counts.get(k, 0) - draws * p) ** 2 / (draws * p) for k, p in law.items())


def test_choices_follow_the_exact_law_of_draws_without_replacement():
    # 6 sets of positives x 3 negatives = 18 outcomes, 17 degrees of freedom: P(chi2 > 63) = 3e-7 for the right law (and the
    # seed is fixed, so a pass stays a pass)
    rewards, penalty = [0, 1, 1, 0, 1, 1, 0], [0.0, 0.0, 0.5, 0.0, 1.0, 2.0, 0.0]
    law, draws, rng = _law(rewards, penalty, 3), 20_000, np.random.default_rng(0)
    assert len(law) == 18 and abs(sum(law.values()) - 1) < 1e-12
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(draws):
        key = tuple(int(i) for i in resample_on_correct(rewards, penalty, 3, rng))
        counts[key] = counts.get(key, 0) + 1
    assert _chi_square(counts, law, draws) < 63
    # the test has power: under uniform choice of positives the statistic would be in the thousands
    uniform = dict.fromkeys(law, draws // 18)
    assert _chi_square(uniform, law, draws) > 1000


def test_the_control_chooses_every_set_equally_often():
    # C(5, 2) = 10 outcomes, 9 degrees of freedom: P(chi2 > 46) = 6e-7
    counts: dict[tuple[int, ...], int] = {}
    rng = np.random.default_rng(0)
    for _ in range(10_000):
        key = tuple(int(i) for i in resample_on_correct([0, 1, 1, 0, 1], [0, 2, 0, 0, 1], 2, rng, "random"))
        counts[key] = counts.get(key, 0) + 1
    assert _chi_square(counts, dict.fromkeys(itertools.combinations(range(5), 2), 0.1), 10_000) < 46


def test_bad_input_is_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(UserError, match="paper, public, random"):
        resample_on_correct([0, 1], [0, 0], 1, rng, "best")
    with pytest.raises(UserError, match="keep=0"):
        resample_on_correct([0, 1], [0, 0], 0, rng)
    with pytest.raises(ValueError, match="one penalty"):
        resample_on_correct([0, 1], [0], 1, rng)
    for penalty in (NAN, -0.1, math.inf):
        with pytest.raises(ValueError, match="penalties"):
            resample_on_correct([0, 1, 1], [0, penalty, 0], 1, rng)
