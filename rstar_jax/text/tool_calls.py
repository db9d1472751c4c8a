"""Find the tool calls in the text of one assistant turn.

`parse_tool_calls` is total: any text gives a list. A call that cannot be run carries an `error`, a short message that is
shown to the model so that it can mend the call; nothing that looks like a call is dropped silently.

Two syntaxes stand between `<tool_call>` and `</tool_call>`:

* `json` (Hermes, rStar2-Agent section 2.1): one object `{"name": ..., "arguments": {...}}`;
* `code`: the bare code, an argument `code` of the first tool.

A call counts as part of the reasoning if it stands in an open reasoning block that is closed later in the same turn. Such a
call is a thought about a call: it is reported, with an error, and is not to be run.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"

_SHAPE = '{"name": ..., "arguments": {...}}'
_NOT_CLOSED = f"the tool call was never closed with {CALL_CLOSE}"
_NOT_OPENED = f"{CALL_CLOSE} came without {CALL_OPEN} before it"
_INSIDE_REASONING = "a tool call inside the reasoning is not run; close the reasoning first"


@dataclasses.dataclass(frozen=True)
class ParsedCall:
    """One tool call. It may be run if and only if `error` is None; then `name` is a known tool and `arguments` an object.

    `body` is the text between the tags as it was written. With an error, `name` is what could be read of it (or "") and
    `arguments` is empty.
    """

    name: str
    arguments: Mapping[str, Any]
    error: str | None
    inside_reasoning: bool
    body: str


@dataclasses.dataclass(frozen=True)
class _Region:
    """A candidate call: its body, where it starts and stops in the turn, and what is wrong with its tags."""

    start: int
    stop: int
    body: str
    tag_error: str | None
    in_open_reasoning: bool


class _Unrunnable(Exception):
    """A call cannot be run. `name`: what was read of the tool's name."""

    def __init__(self, message: str, name: str = ""):
        super().__init__(message)
        self.name = name


def parse_tool_calls(
    text: str,
    *,
    syntax: str,
    tool_names: Sequence[str],
    reasoning_tags: tuple[str, str] = ("<reason>", "</reason>"),
    forced_opening: str = "",
) -> list[ParsedCall]:
    """The tool calls of one assistant turn, in order; an empty list when the text holds none.

    Args:
      text: what the model sampled in this turn, special tokens included, without the forced opening.
      syntax: `json` or `code`.
      tool_names: the tools that may be called; bare code goes to the first.
      reasoning_tags: opening and closing tag of a reasoning block.
      forced_opening: what the chat format wrote before `text`; a block opened there is open at the start of `text`.
    """
    if syntax not in ("json", "code"):
        raise ValueError(f"syntax must be json or code, not {syntax!r}")
    opening, closing = reasoning_tags
    open_at_start = forced_opening.rfind(opening) > forced_opening.rfind(closing)
    regions, last_closing = _regions(text, syntax, opening, closing, open_at_start)
    return [_parsed(r, r.in_open_reasoning and last_closing >= r.stop, syntax, tool_names) for r in regions]


def _parsed(region: _Region, inside: bool, syntax: str, tool_names: Sequence[str]) -> ParsedCall:
    name, error = "", region.tag_error
    arguments: dict[str, Any] = {}
    if error is None:
        try:
            name, arguments = (_json_call if syntax == "json" else _code_call)(region.body, tool_names)
        except _Unrunnable as problem:
            name, error = problem.name, str(problem)
    if inside:
        arguments, error = {}, _INSIDE_REASONING
    return ParsedCall(name, arguments, error, inside, region.body)


def _regions(text: str, syntax: str, opening: str, closing: str, reasoning: bool) -> tuple[list[_Region], int]:
    """Everything in `text` that is, or half is, a call, and where the last closed reasoning block closes (-1: nowhere). Tags
    inside the body of a call are part of that body. `reasoning`: a block is open at the start."""
    tag = re.compile("|".join(map(re.escape, (CALL_OPEN, CALL_CLOSE, opening, closing))))
    regions = []
    position, last_closing = 0, -1
    while match := tag.search(text, position):
        position = match.end()
        if match.group() == opening:
            reasoning = True
        elif match.group() == closing:
            reasoning, last_closing = False, match.start()
        elif match.group() == CALL_CLOSE:
            regions.append(_Region(match.start(), position, text[: match.start()].rpartition("\n")[2], _NOT_OPENED, reasoning))
        else:
            stop = _body_stop(text, position, syntax, closing if reasoning else None)
            if stop is None:
                following = tag.search(text, position)
                end = following.start() if following else len(text)
                regions.append(_Region(match.start(), end, text[position:end], _NOT_CLOSED, reasoning))
                position = end
            else:
                regions.append(_Region(match.start(), stop + len(CALL_CLOSE), text[position:stop], None, reasoning))
                position = stop + len(CALL_CLOSE)
    return regions, last_closing


def _body_stop(text: str, start: int, syntax: str, closing: str | None) -> int | None:
    """Where the closing tag of the call body that starts at `start` stands; None if the call is not closed.

    A complete JSON object may hold tags in its strings, so its own end decides. Otherwise the first closing tag does, unless
    another call is opened, or the reasoning around it is closed (`closing`), before it."""
    if syntax == "json":
        try:
            _, end = json.JSONDecoder(strict=False).raw_decode(text, _skip_space(text, start))
        except (ValueError, RecursionError):
            pass  # not an object: the tags decide
        else:
            after = _skip_space(text, end)
            if text.startswith(CALL_CLOSE, after):
                return after
    stop = text.find(CALL_CLOSE, start)
    barriers = [text.find(barrier, start) for barrier in (CALL_OPEN, closing) if barrier]
    if stop < 0 or any(0 <= barrier < stop for barrier in barriers):
        return None
    return stop


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _code_call(body: str, tool_names: Sequence[str]) -> tuple[str, dict[str, Any]]:
    if not tool_names:
        raise _Unrunnable("there is no tool to call")
    if not body.strip():
        raise _Unrunnable("the tool call is empty", tool_names[0])
    return tool_names[0], {"code": body}


def _json_call(body: str, tool_names: Sequence[str]) -> tuple[str, dict[str, Any]]:
    call = _json_object(body)
    if "name" not in call:
        raise _Unrunnable(f'the tool call has no "name"; write {_SHAPE}')
    name = call["name"]
    if not isinstance(name, str):
        raise _Unrunnable('the "name" of a tool call must be a string')
    if name not in tool_names:
        known = f"known tools: {', '.join(tool_names)}" if tool_names else "there is no tool to call"
        raise _Unrunnable(f"unknown tool {name[:80]!r}; {known}", name)
    extra = [key for key in call if key not in ("name", "arguments")]
    if extra:
        named = ", ".join(f'"{key[:40]}"' for key in extra[:4])
        raise _Unrunnable(f'{named} must stand inside "arguments": {_SHAPE}', name)
    if "arguments" not in call:
        raise _Unrunnable(f'the tool call has no "arguments"; write {_SHAPE}', name)
    arguments = call["arguments"]
    if not isinstance(arguments, dict):
        raise _Unrunnable(f'"arguments" must be an object, not {_json_type(arguments)}', name)
    return name, arguments


def _json_object(body: str) -> dict[str, Any]:
    """The single JSON object in `body`, or `_Unrunnable` saying everything that keeps it from being one."""
    text = body.strip()
    if not text:
        raise _Unrunnable(f"the tool call is empty; write {_SHAPE}")
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
    lenient = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, strict=False)
    problems = []
    try:
        value, end = decoder.raw_decode(text)
    except json.JSONDecodeError as error:
        problems.append(_where(error))
        if error.msg.startswith("Invalid control character"):
            problems[0] = rf"raw control character in a string at {_place(error)} (write a line break as \n)"
            try:
                lenient.raw_decode(text)
            except (ValueError, RecursionError) as second:
                problems.append(_where(second) if isinstance(second, json.JSONDecodeError) else str(second)[:80])
        missing = next((n for n in (1, 2) if _parses(lenient, text + "}" * n)), 0)
        if missing:
            problems.append(f"{missing} closing brace{'s' if missing > 1 else ''} missing at the end")
    except ValueError as error:  # a repeated key, NaN, or a number too long to convert
        raise _Unrunnable(f"the tool call is not valid JSON: {str(error)[:120]}") from None
    except RecursionError:
        raise _Unrunnable("the tool call is not valid JSON: nested too deeply") from None
    if problems:
        raise _Unrunnable(f"the tool call is not valid JSON: {'; '.join(problems)}")
    if text[end:].strip():
        raise _Unrunnable(f"text after the JSON object at character {end + 1}; write one object in each {CALL_OPEN}")
    if not isinstance(value, dict):
        raise _Unrunnable(f"the tool call must be an object {_SHAPE}, not {_json_type(value)}")
    return value


def _parses(decoder: json.JSONDecoder, text: str) -> bool:
    try:
        decoder.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def _place(error: json.JSONDecodeError) -> str:
    return f"line {error.lineno} column {error.colno}"


def _where(error: json.JSONDecodeError) -> str:
    return f"{error.msg} at {_place(error)}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f'the key "{key[:40]}" stands twice')
        result[key] = value
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _json_type(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names[type(value)]
