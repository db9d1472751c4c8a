"""Problems from files as they are published: JSONL and parquet rows of the forms that the field uses.

A row needs a question and a reference answer; both are looked for in a fixed order:

* question: `problem`, `question`, or `prompt` (a text, a list of chat messages, or either as a JSON string: verl and DAPO);
* answer: `reward_model.ground_truth` (verl), `answer` (of GSM8K's worked solutions, what follows the last `####`), the last
  balanced `\\boxed{}` of `solution`, or a `solution` that is a plain number (DAPO).

A row that gives no problem is returned as a `SkippedRow` with its line and the reason; nothing is dropped silently.
"""

from __future__ import annotations

import dataclasses
import decimal
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow
import pyarrow.parquet

from rstar_jax.types import Problem, UserError

SUFFIXES = (".jsonl", ".json", ".parquet")

_QUESTION_FIELDS = ("problem", "question")
_ID_FIELDS = ("id", "unique_id")
_FAMILY_FIELDS = ("family", "data_source", "subject", "type")
_TRAINING_FIELDS = ("messages", "conversations")
_FINAL_ANSWER = re.compile(r"^[ \t]*####[ \t]*(.*)$", re.MULTILINE)
_NUMBER = re.compile(r"([-+]?)\s*\$?\s*(\d{1,3}(?:[, ]\d{3})+|\d+|(?=\.\d))(?:\.(\d+))?")


@dataclasses.dataclass(frozen=True)
class SkippedRow:
    """A row that gives no problem: its line (JSONL) or row (parquet, JSON array), counted from 1, and why."""

    line: int
    reason: str


@dataclasses.dataclass(frozen=True)
class ReadResult:
    """What a file holds: problems with distinct ids, in the order of the file, and the rows that are none."""

    problems: list[Problem]
    skipped: list[SkippedRow]


class _BadRow(Exception):
    """The row gives no problem; the message is the reason."""


class _TrainingRow(_BadRow):
    """The row is a recorded conversation: material for training."""


# --- answers ---------------------------------------------------------------------------------------------------------


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}` whose braces balance and that is not empty; None without one.
    Escaped braces do not count as braces."""
    for match in reversed(list(re.finditer(r"\\f?box(?:ed)?\s*\{", text))):
        depth, position = 1, match.end()
        while position < len(text) and depth:
            if text[position] == "\\":
                position += 1
            else:
                depth += {"{": 1, "}": -1}.get(text[position], 0)
            position += 1
        content = text[match.end() : position - 1].strip()
        if depth == 0 and content:
            return content
    return None


def _plain_number(text: str) -> str | None:
    """A number without thousands separators, currency sign, plus sign and a fraction of zeros; None for anything else."""
    match = _NUMBER.fullmatch(text.replace("\u2212", "-").strip().rstrip("."))
    if match is None:
        return None
    sign, whole, fraction = match.groups()
    whole = re.sub(r"[, ]", "", whole) or "0"
    number = f"{whole}.{fraction}" if fraction and fraction.strip("0") else whole
    return f"-{number}" if sign == "-" and number.strip("0.") else number


def _answer_text(value: Any, field: str) -> str | None:
    """A reference answer as text; None when the field is absent or empty."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None:
        return None
    if isinstance(value, str):
        final = _FINAL_ANSWER.findall(value)
        if final:
            value = _plain_number(final[-1]) or final[-1]
        return value.strip() or None
    if isinstance(value, bool) or not isinstance(value, int | float | decimal.Decimal):
        raise _BadRow(f"{field} is of type {type(value).__name__}; expected text or a number")
    if not math.isfinite(value):
        raise _BadRow(f"{field} is {value}")
    text = format(decimal.Decimal(repr(value) if isinstance(value, float) else value), "f")
    return _plain_number(text) or text


def _decoded(value: Any) -> Any:
    """A list or object that was stored as a JSON string; anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _answer(row: Mapping[str, Any]) -> str:
    reward_model = _decoded(row.get("reward_model"))
    if reward_model is not None and not isinstance(reward_model, dict):
        raise _BadRow("reward_model is not an object with ground_truth")
    answer = _answer_text((reward_model or {}).get("ground_truth"), "reward_model.ground_truth")
    answer = answer or _answer_text(row.get("answer"), "answer")
    solution = row.get("solution")
    if answer is None and isinstance(solution, str):
        answer = last_boxed(solution) or _plain_number(solution)
    if answer is None:
        raise _BadRow(r"no answer: none of reward_model.ground_truth, answer, and \boxed{} in solution")
    return answer


# --- questions -------------------------------------------------------------------------------------------------------


def _message_text(content: Any) -> str:
    """The text of a chat message, whose content is a text or a list of text parts."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    strings = [text for text in texts if isinstance(text, str)]
    if len(strings) < len(texts):
        raise _BadRow("prompt holds a message with something other than text")
    return "".join(strings)


def _prompt_question(prompt: Any) -> str | None:
    """The question of a `prompt`. System messages are left out: a run's own chat format brings its own."""
    decoded = _decoded(prompt)
    if isinstance(decoded, list) and (decoded is prompt or any(isinstance(m, dict) and "role" in m for m in decoded)):
        messages = [m for m in decoded if not (isinstance(m, dict) and m.get("role") == "system")]
        if len(messages) != 1 or not isinstance(messages[0], dict) or messages[0].get("role") != "user":
            raise _BadRow("prompt must be one user message (and system messages)")
        return _message_text(messages[0].get("content"))
    if prompt is not None and not isinstance(prompt, str):
        raise _BadRow(f"prompt is of type {type(prompt).__name__}; expected text or messages")
    return prompt


def _question(row: Mapping[str, Any]) -> str:
    named = [field for field in (*_QUESTION_FIELDS, "prompt") if row.get(field) is not None]
    for field in named:
        question = _prompt_question(row[field]) if field == "prompt" else row[field]
        if not isinstance(question, str):
            raise _BadRow(f"{field} is of type {type(question).__name__}; expected text")
        if question.strip():
            return question.strip()
    if named:
        raise _BadRow(f"{' and '.join(named)} is empty")
    if any(field in row for field in _TRAINING_FIELDS):
        raise _TrainingRow("a recorded conversation (messages), not a question with its answer")
    fields = ", ".join(list(row)[:8]) or "none"
    raise _BadRow(f"no question: none of problem, question, prompt among its fields ({fields})")


# --- rows ------------------------------------------------------------------------------------------------------------


def _problem(row: Any, fallback_id: str, family: str) -> Problem:
    if not isinstance(row, dict):
        raise _BadRow(f"not a JSON object but {type(row).__name__}")
    question = _question(row)
    answer = _answer(row)
    if any("\ud800" <= c <= "\udfff" for c in question + answer):
        raise _BadRow("the text holds half of a surrogate pair, which no encoding can store")
    names = [row[f] for f in _ID_FIELDS if isinstance(row.get(f), str | int) and not isinstance(row[f], bool) and row[f] != ""]
    families = [row[f] for f in _FAMILY_FIELDS if isinstance(row.get(f), str) and row[f]]
    return Problem(str(names[0]) if names else fallback_id, question, answer, [*families, family][0], metadata=row)


def _json_row(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return _BadRow(f"not UTF-8 at byte {error.start + 1} of the line")
    except RecursionError:
        return _BadRow("not JSON: nested too deeply")
    except ValueError as error:
        return _BadRow(f"not JSON: {str(error).splitlines()[0]}")


def _json_rows(path: pathlib.Path) -> Iterator[tuple[int, Any]]:
    """(line number, value or the reason why there is none); a `.json` file may also hold one array of rows."""
    if path.suffix.lower() == ".json":
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
        whole = _json_row(data) if data.lstrip().startswith(b"[") else None
        if isinstance(whole, list):
            yield from enumerate(whole, 1)
            return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                yield number, _json_row(text)


def _parquet_value(value: pyarrow.Scalar) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return _BadRow("not UTF-8")


def _parquet_rows(path: pathlib.Path) -> Iterator[tuple[int, Any]]:
    numbers = itertools.count(1)
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            for index in range(batch.num_rows):
                row = {name: _parquet_value(column[index]) for name, column in zip(batch.schema.names, batch, strict=True)}
                bad = [f"{name} is {value}" for name, value in row.items() if isinstance(value, _BadRow)]
                yield next(numbers), _BadRow(bad[0]) if bad else row


def _checked(path: pathlib.Path) -> pathlib.Path:
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if not path.is_file():
        raise UserError(f"{path}: is not a file; give one file ({', '.join(SUFFIXES)})")
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path}: unknown extension {path.suffix!r}; expected one of {', '.join(SUFFIXES)}")
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty")
    return path


def read_problems(path: str | os.PathLike[str], *, limit: int | None = None) -> ReadResult:
    """Problems of a JSONL (`.jsonl`, `.json`) or parquet file; with `limit`, reading stops after that many problems.

    `Problem.id` is the row's `id` or `unique_id`, or `<file stem>:<line>` where it has none or another row has the same; two
    rows with equal text stay two problems. `metadata` is the whole row. Raises `UserError`, naming the file, when it is
    missing, empty, of an unknown kind, of a training format, or when none of its rows is a problem.
    """
    path = _checked(pathlib.Path(path))
    if limit is not None and limit < 1:
        raise UserError(f"limit={limit}: read at least one problem, or leave the limit out to read all")
    rows = _parquet_rows(path) if path.suffix.lower() == ".parquet" else _json_rows(path)
    problems: dict[str, Problem] = {}
    skipped: list[SkippedRow] = []
    training_rows = 0
    try:
        for line, row in rows:
            try:
                if isinstance(row, _BadRow):
                    raise row
                fallback_id = f"{path.stem}:{line}"
                problem = _problem(row, fallback_id, path.stem)
                if problem.id in problems:
                    names = itertools.chain([fallback_id], (f"{fallback_id}.{n}" for n in itertools.count(2)))
                    problem = dataclasses.replace(problem, id=next(name for name in names if name not in problems))
                problems[problem.id] = problem
            except _BadRow as reason:
                training_rows += isinstance(reason, _TrainingRow)
                skipped.append(SkippedRow(line, str(reason)))
            if len(problems) == limit:
                break
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not problems:
        raise _no_problem(path, skipped, training_rows)
    return ReadResult(list(problems.values()), skipped)


def _no_problem(path: pathlib.Path, skipped: list[SkippedRow], training_rows: int) -> UserError:
    if not skipped:
        return UserError(f"{path}: holds no rows")
    if training_rows == len(skipped):
        return UserError(
            f"{path}: its rows are recorded conversations (`messages`), a training format; evaluation needs a question "
            "(`problem`, `question` or `prompt`) and an answer (`answer`, `reward_model` or `solution`) in each row"
        )
    first = skipped[0]
    return UserError(f"{path}: none of its {len(skipped)} rows is a problem; line {first.line}: {first.reason}")


def find_dataset(name_or_path: str, data_dir: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """A path to a data set given as a path, or as the name of a file in `data_dir` (`aime24` for `aime24.jsonl`)."""
    path = pathlib.Path(name_or_path)
    if path.is_file() or len(path.parts) > 1 or (data_dir is None and path.suffix.lower() in SUFFIXES):
        return path
    if data_dir is None:
        raise UserError(f"no file {name_or_path}; a data set's name needs the directory that holds it (data_dir)")
    directory = pathlib.Path(data_dir)
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory of data sets")
    for candidate in (directory / name_or_path, *(directory / f"{name_or_path}{suffix}" for suffix in SUFFIXES)):
        if candidate.is_file():
            return candidate
    known = sorted({file.stem for file in directory.iterdir() if file.suffix.lower() in SUFFIXES})
    raise UserError(f"no data set {name_or_path!r} in {directory}; it has {', '.join(known) or 'none'}")
