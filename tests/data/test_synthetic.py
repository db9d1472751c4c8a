"""The generated families, against the real tool."""

import asyncio
import collections

import numpy as np
import pytest

from rstar_jax.config import ToolConfig
from rstar_jax.data import dialogues
from rstar_jax.data.synthetic import FAMILIES, ArithmeticProblems, Call, demonstration, expert, held_out
from rstar_jax.text.chat import CHAT_FORMATS
from rstar_jax.text.tokenizer import train_tokenizer
from rstar_jax.tools.base import Job
from rstar_jax.tools.formatting import STYLES, format_result
from rstar_jax.tools.pool import ToolPool
from rstar_jax.tools.python_tool import PythonTool

CHAT = CHAT_FORMATS["compact"]


def shown(call):
    return format_result(call.result, style="last_line")


@pytest.mark.parametrize("style", STYLES)
def test_what_demonstrations_show_is_what_the_real_tool_answers(style):
    calls = [s for i in range(150) for s in demonstration(3, i, 0.1, 0.6).steps if isinstance(s, Call)]
    calls += [s for i in range(50) for s in expert(3, i).steps if isinstance(s, Call)]

    async def run():
        async with ToolPool(ToolConfig()) as pool:
            tool = PythonTool(pool, style=style)
            return [tool.format(result) for result in await pool.run_many(Job(s.code) for s in calls)]

    assert len({s.result.stderr.splitlines()[-1].split(":")[0] for s in calls if s.result.stderr}) == 3
    assert asyncio.run(run()) == [format_result(s.result, style=style) for s in calls]


def test_an_item_depends_on_its_seed_and_index_alone():
    source, again = ArithmeticProblems("train", 1), ArithmeticProblems("train", 1)
    assert [again[i] for i in (5, 3)] == [source[5], source[3]]
    assert ArithmeticProblems("train", 2)[5] != source[5]
    assert demonstration(1, 4, 0.1, 0.5) == demonstration(1, 4, 0.1, 0.5)


def test_no_held_out_question_is_met_in_training():
    evaluation = {ArithmeticProblems("evaluation", 0)[i].question for i in range(1000)}
    training = {ArithmeticProblems("train", 0)[i].question for i in range(1000)}
    training |= {demonstration(0, i, 0.1, 0.5).problem.question for i in range(1000)}
    training |= {expert(0, i).problem.question for i in range(500)}
    assert not evaluation & training
    assert all(map(held_out, evaluation)) and not any(map(held_out, training))


def test_answers_are_integers_and_every_family_appears():
    problems = [ArithmeticProblems("evaluation", 0)[i] for i in range(600)]
    assert all(p.answer.lstrip("-").isdigit() for p in problems)
    assert set(collections.Counter(p.family for p in problems)) == set(FAMILIES)
    assert len({p.id for p in problems}) == 600


def test_demonstrations_are_imperfect_as_often_as_asked():
    demonstrations = [demonstration(0, i, 0.08, 0.45) for i in range(4000)]
    no_tool = np.mean([len(d.steps) == 1 for d in demonstrations])
    broken = np.mean([len(d.steps) == 3 for d in demonstrations if len(d.steps) > 1])
    right = np.mean([d.steps[-1].text == d.problem.answer for d in demonstrations if len(d.steps) > 1])
    assert abs(no_tool - 0.08) < 0.02 and abs(broken - 0.45) < 0.03 and 0.4 < right < 0.65


def test_a_demonstration_is_encoded_as_a_rollout_would_hold_it():
    d = next(d for d in (demonstration(0, i, 0.0, 1.0) for i in range(9)) if len(d.steps) == 3)
    tokenizer = train_tokenizer(dialogues.training_texts([d], CHAT, "python"), 320)
    row = dialogues.encode_demonstration(d, CHAT, tokenizer, (), "python")
    text = tokenizer.decode(row.ids)
    assert text.startswith(f"<|im_start|>{d.problem.question}<|im_end|><|im_start|><reason>")
    assert text.endswith(f"\\boxed{{{d.steps[2].text}}}</answer><|im_end|>")
    observed = tokenizer.decode(row.ids[~row.trainable])
    assert observed == f"<|im_start|>{d.problem.question}<|im_end|><|im_start|>" + "".join(
        f"<tool_response>{shown(s)}</tool_response><|im_start|>" for s in d.steps[:2]
    )


def test_step_problems_of_an_expert_follow_the_target_rule():
    e = expert(0, 1)
    build = {rule: dialogues.step_problems(e, CHAT, (), "python", rule) for rule in ("first_n_minus_1", "all", "skip_first")}
    assert [len(build[rule]) for rule in ("first_n_minus_1", "all", "skip_first")] == [1, 2, 1]
    call, answer = build["all"]
    assert call.expert == (f"<tool_call>{e.steps[0].code}</tool_call>",)
    assert answer.expert == (f"<answer>\\boxed{{{e.steps[1].text}}}</answer>",)
    assert "".join(answer.metadata["prompt_pieces"]).endswith(f"<tool_response>{shown(e.steps[0])}</tool_response><|im_start|>")
