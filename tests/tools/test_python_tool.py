"""The Python tool as the agent sees it, and the scripted one that stands in for it."""

import asyncio
import time

import pytest

from rstar_jax.tools.fake import ScriptedTool
from rstar_jax.tools.python_tool import PythonTool
from rstar_jax.types import InfrastructureError, Tool, ToolResult, ToolStatus, UserError


@pytest.fixture
def call(shared):
    tool = PythonTool(shared.pool)
    return lambda arguments: shared.runner.run(tool.call(arguments))


def test_a_call_with_input(call):
    result = call({"code": "a, b = map(int, input().split())\nprint(a * b)", "input": "34 57\n"})
    assert (result.status, result.stdout) == (ToolStatus.OK, "1938\n")


def test_input_may_be_left_out(call):
    assert call({"code": "print(1)"}).stdout == "1\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "argument 'code' is missing: python_code_with_standard_io takes 'code' and 'input'"),
        ({"input": ""}, "argument 'code' is missing: python_code_with_standard_io takes 'code' and 'input'"),
        ({"code": 1}, "argument 'code' must be a string, not int"),
        ({"code": None, "input": ""}, "argument 'code' must be a string, not NoneType"),
        ({"code": "1", "input": ["3"]}, "argument 'input' must be a string, not list"),
        ({"code": "1", "stdin": "3"}, "unknown argument 'stdin': python_code_with_standard_io takes 'code' and 'input'"),
        (["code"], "arguments must be an object with the keys 'code' and 'input', not list"),
        ("print(1)", "arguments must be an object with the keys 'code' and 'input', not str"),
    ],
)
def test_malformed_arguments_are_rejected_with_one_line(call, arguments, complaint):
    result = call(arguments)
    assert (result.status, result.stderr) == (ToolStatus.REJECTED, complaint)


def test_calls_share_no_state(call):
    assert call({"code": "x = 5"}).status is ToolStatus.OK
    assert call({"code": "x"}).stderr.endswith("NameError: name 'x' is not defined\n")


def test_a_program_from_call_to_text(shared):
    last_line, rstar2 = PythonTool(shared.pool, style="last_line"), PythonTool(shared.pool)
    result = shared.runner.run(last_line.call({"code": "print('a')\nx"}))
    assert last_line.format(result) == "a\nNameError: name 'x' is not defined"
    assert rstar2.format(result) == (
        "Tool call failure\nreason: \nstdout: a\n\nstderr: NameError at line 2: name 'x' is not defined\n  x\n"
    )


def test_the_schema_is_what_the_released_models_know(shared):
    tool = PythonTool(shared.pool)
    function = tool.schema["function"]
    assert tool.name == function["name"] == "python_code_with_standard_io"
    assert list(function["parameters"]["properties"]) == ["code", "input"]
    assert function["parameters"]["required"] == ["code", "input"]


@pytest.mark.parametrize("arguments", [{"style": "fancy"}, {"style": "last_line", "show_time": True}])
def test_an_unknown_style_is_a_user_error(shared, arguments):
    with pytest.raises(UserError, match="style"):
        PythonTool(shared.pool, **arguments)


def test_both_tools_keep_the_protocol(shared):
    assert isinstance(PythonTool(shared.pool), Tool)
    assert isinstance(ScriptedTool([]), Tool)


def test_a_scripted_tool_answers_in_order_and_remembers_what_it_was_asked():
    tool = ScriptedTool([ToolResult(ToolStatus.OK, "1\n"), ToolResult(ToolStatus.TIMEOUT)])

    async def run():
        return [await tool.call({"code": code}) for code in "ab"]

    results = asyncio.run(run())
    assert [tool.format(r) for r in results] == ["1", "TimeoutError: the program did not end within the time limit"]
    assert tool.calls == [{"code": "a"}, {"code": "b"}]
    with pytest.raises(IndexError, match="2 answers"):
        asyncio.run(tool.call({}))


def test_a_scripted_tool_can_compute_delay_and_fail():
    def answer(arguments):
        if arguments["code"] == "broken":
            raise InfrastructureError("played")
        return ToolResult(ToolStatus.OK, arguments["code"].upper())

    tool = ScriptedTool(answer, delay=lambda arguments: 0.05 if arguments["code"] == "slow" else 0.0)
    start = time.monotonic()
    assert asyncio.run(tool.call({"code": "slow"})).stdout == "SLOW"
    assert time.monotonic() - start >= 0.05
    with pytest.raises(InfrastructureError):
        asyncio.run(tool.call({"code": "broken"}))
