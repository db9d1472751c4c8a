"""Noise on a scripted tool: what it does, and that it depends on nothing but the seed and the call."""

import asyncio
import itertools
import random
import time

import pytest

from rstar_jax.tools.fake import ScriptedTool
from rstar_jax.tools.noisy import NoiseCounts, NoisyTool
from rstar_jax.types import InfrastructureError, Tool, ToolResult, ToolStatus, UserError

LONG = "the answer is 1938\n" * 50


def scripted(text="42\n", **options):
    return ScriptedTool(lambda arguments: ToolResult(ToolStatus.OK, text, "warned\n", seconds=0.25), **options)


def noisy(tool=None, p_error=0.0, p_slow=0.0, p_garbled=0.0, seed=0, slow_s=0.0):
    return NoisyTool(tool or scripted(), p_error, p_slow, p_garbled, seed, slow_s)


def answers(tool, calls):
    """The results of calls, one after another."""

    async def run():
        return [await tool.call(arguments) for arguments in calls]

    return asyncio.run(run())


CALLS = [{"code": f"print({i})", "input": ""} for i in range(200)]


def test_without_noise_nothing_changes():
    inner = scripted()
    tool = noisy(inner)
    assert answers(tool, CALLS) == answers(scripted(), CALLS)
    assert inner.calls == CALLS
    assert tool.counts == NoiseCounts(calls=200)


def test_it_looks_like_the_tool_it_wraps():
    inner = scripted()
    tool = noisy(inner)
    assert isinstance(tool, Tool)
    assert (tool.name, tool.schema) == (inner.name, inner.schema)
    assert tool.format(ToolResult(ToolStatus.OK, "4\n")) == "4"


def test_an_injected_error_is_answered_without_a_call():
    inner = scripted()
    tool = noisy(inner, p_error=1.0)
    results = answers(tool, CALLS)
    assert inner.calls == []
    assert tool.counts == NoiseCounts(calls=200, errors=200)
    assert {(result.status, result.stdout, result.exit_code) for result in results} == {(ToolStatus.ERROR, "", 1)}
    texts = {tool.format(result) for result in results}
    assert len(texts) == 6 and all(text.partition(": ")[0].endswith("Error") and "\n" not in text for text in texts)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_noise_comes_as_often_as_it_should_and_independently(p):
    calls = [{"code": str(i)} for i in range(4000)]
    tool = noisy(p_error=p, p_slow=p, p_garbled=p)
    results = answers(tool, calls)
    counts = tool.counts
    spread = 4 * (p * (1 - p) / 4000) ** 0.5
    assert counts.errors / 4000 == pytest.approx(p, abs=spread)
    assert counts.slow / 4000 == pytest.approx(p, abs=spread)
    assert counts.garbled / (4000 - counts.errors) == pytest.approx(p, abs=2 * spread + 0.01)
    assert counts.errors == sum(result.status is ToolStatus.ERROR for result in results)
    assert counts.garbled == sum(result.status is ToolStatus.OK and result.stdout != "42\n" for result in results)


def test_the_order_of_calls_does_not_matter():
    calls = CALLS * 3
    shuffled = random.Random(1).sample(calls, len(calls))
    options = {"p_error": 0.3, "p_garbled": 0.5, "seed": 7}

    def by_call(order, concurrent):
        tool = noisy(scripted(delay=lambda arguments: 0.001 * (hash(arguments["code"]) % 5)) if concurrent else None, **options)

        async def run():
            return await asyncio.gather(*(tool.call(arguments) for arguments in order))

        results = asyncio.run(run()) if concurrent else answers(tool, order)
        found = {}
        for arguments, result in zip(order, results, strict=True):
            found.setdefault(arguments["code"], []).append(result)
        return found, tool.counts

    expected = by_call(calls, False)
    assert by_call(shuffled, False) == expected
    assert by_call(shuffled, True) == expected
    assert any(len({result.status for result in results}) > 1 for results in expected[0].values())  # repeats are drawn anew


def test_the_seed_and_the_arguments_decide():
    def statuses(seed, calls):
        return [result.status for result in answers(noisy(p_error=0.5, seed=seed), calls)]

    assert statuses(1, CALLS) == statuses(1, CALLS) != statuses(2, CALLS)
    assert statuses(1, CALLS) == statuses(1, [dict(reversed(call.items())) for call in CALLS])  # keys have no order
    assert statuses(1, CALLS) != statuses(1, [call | {"input": "x"} for call in CALLS])


def test_noise_is_the_same_on_every_machine():
    results = answers(noisy(p_error=0.5, p_garbled=1.0, seed=3), CALLS[:8])
    assert "".join("e" if result.status is ToolStatus.ERROR else "." for result in results) == "e.....ee"


def test_one_probability_leaves_the_other_draws_as_they_are():
    def errors(**options):
        return [result.status is ToolStatus.ERROR for result in answers(noisy(p_error=0.4, **options), CALLS)]

    assert errors() == errors(p_garbled=1.0) == errors(p_slow=1.0)


def test_a_garbled_text_keeps_its_lines_and_most_of_its_characters():
    tool = noisy(scripted(LONG), p_garbled=1.0)
    for result in answers(tool, CALLS[:20]):
        assert result.status is ToolStatus.OK
        assert len(result.stdout) == len(LONG) and result.stdout.count("\n") == 50
        changed = sum(a != b for a, b in zip(result.stdout, LONG, strict=True))
        assert changed == 90  # a tenth of 50 lines of 18
        assert sum(a != b for a, b in zip(result.stderr, "warned\n", strict=True)) == 1
    assert tool.counts.garbled == 20


def test_there_is_nothing_to_garble_in_no_output():
    tool = NoisyTool(ScriptedTool(lambda arguments: ToolResult(ToolStatus.OK, "\n")), 0.0, 0.0, 1.0, seed=0)
    assert answers(tool, CALLS[:5]) == [ToolResult(ToolStatus.OK, "\n")] * 5
    assert tool.counts == NoiseCounts(calls=5)


def test_a_slow_call_takes_longer_and_says_so():
    tool = noisy(p_error=0.5, p_slow=1.0, slow_s=0.05)

    async def run():
        return await asyncio.gather(*(tool.call(arguments) for arguments in CALLS))

    start = time.monotonic()
    results = asyncio.run(run())
    assert 0.05 <= time.monotonic() - start < 5  # the delays overlap
    assert {round(result.seconds, 6) for result in results} == {0.05, 0.3}
    assert tool.counts.slow == 200 and 0 < tool.counts.errors < 200


def test_a_broken_tool_stays_broken():
    def broken(arguments):
        raise InfrastructureError("played")

    with pytest.raises(InfrastructureError, match="played"):
        answers(NoisyTool(ScriptedTool(broken), 0.0, 1.0, 1.0, seed=0), [{}])


@pytest.mark.parametrize(
    "arguments",
    [{}, [], "code", None, {"code": "\ud800"}, {"code": {1, 2}}, {1: 2, "a": 3}, {"code": float("nan")}, {"code": 10**5000}],
)
def test_arguments_of_any_shape_are_the_wrapped_tools_business(arguments):
    inner = scripted()
    assert answers(noisy(inner), [arguments])[0].status is ToolStatus.OK
    assert inner.calls == [arguments]


@pytest.mark.parametrize("name", ["p_error", "p_slow", "p_garbled", "slow_s"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "0.5", None])
def test_impossible_noise_is_a_user_error(name, value):
    with pytest.raises(UserError, match=f"^{name}=.*must be") as caught:
        noisy(**{name: value})
    assert "\n" not in str(caught.value)


def test_certain_and_impossible_noise_is_allowed():
    for p_error, p_slow, p_garbled in itertools.product((0, 1), repeat=3):
        assert len(answers(noisy(p_error=p_error, p_slow=p_slow, p_garbled=p_garbled), CALLS[:2])) == 2
    with pytest.raises(UserError):
        noisy(p_error=1.1)
