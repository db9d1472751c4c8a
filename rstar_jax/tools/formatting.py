"""From a `ToolResult` to the text that the model sees. Pure; no clock reading enters unless it is asked for."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Callable, Sequence

from rstar_jax.types import ToolResult, ToolStatus

STYLES = ("rstar2", "jupyter", "last_line")

_NOTICE = "...(truncated)..."
_LOCATION = re.compile(r'^  File "<(?:code|cell \d+)>", line (\d+).*\n((?:    .*\n)?)', re.MULTILINE)
_MARKS = re.compile(r'^(  File "<(?:code|cell \d+)>", line \d+, in .*\n    .*\n)    [ ~^]+\n', re.MULTILINE)
_STATES = {
    "lost": "(The Python process ended; all variables are gone.)",
    "diverged": "(The Python process was started anew and its calls were repeated; some variables may have other values.)",
}
_TRACEBACK = "Traceback (most recent call last):\n"

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline
_LINE_END = re.compile(r"[\n\v\f\x84\x85]")  # each moves a terminal down
# What a terminal takes for a command and not for text. Nothing here can backtrack: each part is optional, and neighbouring
# parts have no character in common.
_COMMAND = re.compile(
    r"""(
    (?:\x1b\[|\x9b) [0-?]* [ -/]* [@-~]?                                           # CSI: colours, cursor, erasing
    | (?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f]) [^\x00-\x1f\x7f-\x9f]* (?:\x07|\x1b\\|\x9c)?   # OSC, DCS, ...: titles, links
    | \x1b [ -/]* [0-~]?                                                            # character sets, modes
    | [\x00-\x08\x0d-\x1a\x1c-\x1f\x7f-\x9f]
    )""",
    re.VERBOSE,
)
_ERASE_TO_END = ("\x1b[K", "\x1b[0K", "\x9bK", "\x9b0K")
_ERASE_LINE = ("\x1b[2K", "\x9b2K")


def clean_text(text: str) -> str:
    """`text` as a terminal shows it once it has been written: without escape sequences, and with what was overwritten gone.

    `\\r` returns to the start of the line and `\\b` goes one character back; what follows replaces the characters that it covers,
    so a progress bar leaves its last state (trailing spaces of such a line go too). `\\r\\n` is a newline, and so are `\\v` and
    `\\f`. The two commands that progress bars use to erase a line (`ESC[K`, `ESC[2K`) are obeyed; all other commands, complete
    or not, and all other control characters are dropped. The screen has one line: a command that moves the cursor to another
    line has no effect. Each code point counts as one column.

    Text without control characters (tab and newline are none) comes back unchanged, and so does cleaned text. Time is linear.
    """
    if not _CONTROL.search(text):
        return text
    return "\n".join(_shown_line(line.rstrip("\r")) for line in _LINE_END.split(text))


def _shown_line(line: str) -> str:
    if not _CONTROL.search(line):
        return line
    cells: list[str] = []
    cursor = 0
    overwritten = False
    for index, part in enumerate(_COMMAND.split(line)):
        if index % 2 == 0:  # text; the others are commands
            cells[cursor : cursor + len(part)] = part
            cursor += len(part)
            continue
        if part == "\r":
            cursor = 0
        elif part == "\b":
            cursor = max(0, cursor - 1)
        elif part in _ERASE_TO_END:
            del cells[cursor:]
        elif part in _ERASE_LINE:  # and the cursor goes home: bars write a `\r` before or behind it
            cells.clear()
            cursor = 0
        else:
            continue
        overwritten = True
    shown = "".join(cells)
    return shown.rstrip(" ") if overwritten else shown


@dataclasses.dataclass(frozen=True)
class _Error:
    """The uncaught exception that ends a standard error: what was written before it, where it was, what it says."""

    before: str
    line: int
    source: str
    text: str  # "NameError: name 'x' is not defined"; may have several lines


def _parse_error(stderr: str) -> _Error | None:
    """The last traceback of `stderr`, or None when its end is not one."""
    locations = list(_LOCATION.finditer(stderr))
    if not locations:
        return None
    last = locations[-1]
    rest = stderr[last.end() :].split("\n")
    while rest and rest[0].startswith(" "):  # carets, repeated frames
        rest.pop(0)
    text = "\n".join(rest).rstrip("\n")
    if not text:
        return None
    start = stderr.rfind(_TRACEBACK, 0, last.start())
    before = stderr[: start if start >= 0 else last.start()]
    return _Error(before, int(last[1]), last[2].strip(), text)


def _signal_name(result: ToolResult) -> str:
    number = -(result.exit_code or 0)
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _rstar2_stderr(result: ToolResult) -> str:
    """Standard error with its traceback in the one-line form of rStar2's tool:
    `NameError at line 2: name 'y' is not defined`, then the source line."""
    error = _parse_error(result.stderr) if result.status in (ToolStatus.ERROR, ToolStatus.MEMORY) else None
    if error is None:
        return result.stderr
    kind, _, message = error.text.partition(": ")
    if kind.rpartition(".")[2] in ("SyntaxError", "IndentationError", "TabError"):
        message += f" (<unknown>, line {error.line})"
    return f"{error.before}{kind} at line {error.line}: {message}\n" + (f"  {error.source}\n" if error.source else "")


def _rstar2_reason(result: ToolResult) -> str:
    """What rStar2's server says in `reason`; it has no words for the last four."""
    return {
        ToolStatus.ERROR: "",
        ToolStatus.MEMORY: "",
        ToolStatus.TIMEOUT: "worker_timeout",
        ToolStatus.CPU_LIMIT: "worker_timeout",
        ToolStatus.REJECTED: "invalid_input",
        ToolStatus.EXIT: f"exit code {result.exit_code}",
        ToolStatus.OUTPUT_LIMIT: "output_limit",
        ToolStatus.SIGNAL: f"killed by {_signal_name(result)}",
    }[result.status]


def _rstar2(result: ToolResult, show_time: bool) -> str:
    parts = ["Tool call success"]
    if result.status is not ToolStatus.OK:
        parts = ["Tool call failure", f"reason: {_rstar2_reason(result)}"]
    if result.stdout:
        parts.append(f"stdout: {result.stdout}")
    if stderr := _rstar2_stderr(result):
        parts.append(f"stderr: {stderr}")
    if show_time:
        parts.append(f"execution time: {result.seconds:.2f}s")
    return "\n".join(parts)


def _status_line(result: ToolResult) -> str:
    """One line for a status that has one whatever the program wrote; "" for the others."""
    return {
        ToolStatus.EXIT: f"SystemExit: {result.exit_code}",
        ToolStatus.TIMEOUT: "TimeoutError: the program did not end within the time limit",
        ToolStatus.CPU_LIMIT: "TimeoutError: the program used more processor time than it may",
        ToolStatus.MEMORY: "MemoryError: the program used more memory than it may",
        ToolStatus.OUTPUT_LIMIT: "OutputLimitError: the program printed more than it may",
        ToolStatus.SIGNAL: f"Error: the program was killed by {_signal_name(result)}",
    }.get(result.status, "")


def _error_line(result: ToolResult) -> str:
    """One line that says what went wrong."""
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    if result.status is ToolStatus.ERROR:
        error = _parse_error(result.stderr)
        return error.text.splitlines()[0] if error else (lines[-1] if lines else "Error: the program failed")
    if result.status is ToolStatus.REJECTED:
        return lines[-1] if lines else "Error: the call was malformed"
    if result.status is ToolStatus.EXIT:
        return lines[-1] if lines else _status_line(result)
    return _status_line(result)


def _last_line(result: ToolResult) -> str:
    stdout = result.stdout.rstrip("\n")
    if result.status is ToolStatus.OK:
        return stdout or "(no output)"
    return f"{stdout}\n{_error_line(result)}" if stdout else _error_line(result)


def _jupyter(result: ToolResult) -> str:
    parts = [result.stdout.rstrip("\n"), _MARKS.sub(r"\1", result.stderr).rstrip("\n")]
    if result.status is not ToolStatus.MEMORY or _parse_error(result.stderr) is None:  # else the traceback says it
        parts.append(_status_line(result))
    shown = "\n".join(part for part in parts if part)
    if result.status in (ToolStatus.ERROR, ToolStatus.REJECTED) and not result.stderr.strip():
        return f"{shown}\n{_error_line(result)}" if shown else _error_line(result)
    return shown or "(no output)"


def format_result(result: ToolResult, *, style: str, show_time: bool = False) -> str:
    """The text of one finished call. `clean_text` is applied to both streams first, in every style.

    `rstar2`: rStar2-Agent's wire text (`Tool call success`, `stdout: ...`; released code, `code_judge_utils.py`), whose last
    line, the execution time, comes with `show_time` alone: a clock reading makes rollouts irreproducible.
    `jupyter`: what stands below a notebook's cell: standard output, then standard error with the whole traceback (the
    program's own frames, without the `^^^^` below their lines: whether Python writes these is a flag of its process). A
    program that did not end by itself, or not with 0, has a last line that says so (`TimeoutError: ...`, `SystemExit: 3`).
    The value of a last expression is part of the standard output.
    `last_line`: what the program printed and, when it failed, one line that says how (ToRL shows errors in this way).

    Without the words of the `rstar2` style a program that wrote nothing and did not fail shows `(no output)`: an empty answer
    would look like a lost one.

    Whatever the style, a last line tells of a session that has lost its variables (`ToolResult.state`).

    A result of our own failure (`INFRA_ERROR`) is not for the model: `ValueError`.
    """
    if result.status is ToolStatus.INFRA_ERROR:
        raise ValueError("an infrastructure error is retried or raised; it has no text for the model")
    if style not in STYLES:
        raise ValueError(f"style={style!r} is not known; choose one of {', '.join(STYLES)}")
    if show_time and style != "rstar2":
        raise ValueError("show_time belongs to style='rstar2'")
    result = dataclasses.replace(result, stdout=clean_text(result.stdout), stderr=clean_text(result.stderr))
    if style == "rstar2":
        text = _rstar2(result, show_time)
    elif style == "jupyter":
        text = _jupyter(result)
    else:
        text = _last_line(result)
    return f"{text}\n{_STATES[result.state]}" if result.state else text


def _common_prefix(a: str, b: str) -> int:
    """Characters that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def truncate_text(
    text: str,
    limit_tokens: int,
    *,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    side: str = "middle",
) -> str:
    """`text` cut so that `len(encode(result)) <= limit_tokens`, with a notice where the cut is.

    `side` is where text is lost: `left` keeps the tail, `right` the head, `middle` both ends. The notice counts towards the
    limit; it shrinks to `...`, and at last to nothing, when it would take more than two thirds of it. The limit is checked on
    the text itself and not assumed from its parts: a cut can split a character or a token, and what is left of it may encode
    to more tokens than before.
    """
    if limit_tokens < 1:
        raise ValueError(f"limit_tokens={limit_tokens} must be at least 1")
    if side not in ("left", "right", "middle"):
        raise ValueError(f"side={side!r} is not known; choose left, right or middle")
    ids = encode(text)
    if len(ids) <= limit_tokens:
        return text
    notice = next(n for n in (_NOTICE, "...", "") if 3 * len(encode(n)) <= 2 * limit_tokens)
    budget = limit_tokens - len(encode(notice))
    tail_tokens = {"left": budget, "right": 0, "middle": budget // 2}[side]
    head_tokens = budget - tail_tokens
    # Characters that these tokens surely stand for; U+FFFD from a split character is not in the text.
    head = _common_prefix(text, decode(ids[:head_tokens]))
    tail = _common_prefix(text[::-1], decode(ids[len(ids) - tail_tokens :])[::-1])
    while True:
        result = text[:head] + notice + text[len(text) - tail :]
        excess = len(encode(result)) - limit_tokens
        if excess <= 0 or head + tail == 0:
            return result
        cut = max(1, excess // 4)
        if head >= tail:
            head = max(0, head - cut)
        else:
            tail = max(0, tail - cut)
