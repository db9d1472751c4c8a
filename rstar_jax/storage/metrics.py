"""Metrics of a run: one JSON object a line in `metrics.jsonl`, and the same numbers as TensorBoard events.

A row separates what a resumed run must reproduce (`metrics`) from what a clock decides (`time`), so that two runs are
compared with `deterministic_part`. JSON has no NaN and no infinity; such values are written as the strings "nan", "inf" and
"-inf" and read back as floats.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from absl import logging

from rstar_jax.types import UserError

FILE_NAME = "metrics.jsonl"
EVENTS_DIRECTORY = "tensorboard"
KINDS = ("train", "evaluation", "stage_end")


@dataclasses.dataclass(frozen=True)
class MetricsRow:
    """One line of `metrics.jsonl`. `step` counts within the stage, `global_step` over the run."""

    stage: str
    stage_index: int
    step: int
    global_step: int
    kind: str
    metrics: Mapping[str, float]
    time: Mapping[str, float]


def finite_or_name(value: Any) -> Any:
    """`value` with every float that JSON cannot hold replaced by its name, in containers too."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): finite_or_name(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_name(item) for item in value]
    return value


def json_line(value: Any) -> str:
    """`value` as one line of strict JSON in ASCII, newline included."""
    return json.dumps(finite_or_name(value), allow_nan=False) + "\n"


def write_atomically(path: pathlib.Path, chunks: Iterable[bytes]) -> None:
    """Write a file that is either complete or absent: a temporary file beside it, then a rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _row(line: bytes, where: str) -> MetricsRow:
    try:
        fields = json.loads(line)
        for part in ("metrics", "time"):
            fields[part] = {name: float(value) for name, value in fields[part].items()}
        return MetricsRow(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{where} is not a row of metrics ({error}); the file was changed by something else") from None


def _complete_lines(path: pathlib.Path) -> list[bytes]:
    """Lines that end in a newline. A kill leaves at most one line without, at the end of the file; it was never complete."""
    return path.read_bytes().split(b"\n")[:-1]


def read_metrics(directory: str | os.PathLike[str]) -> list[MetricsRow]:
    """Rows of `directory/metrics.jsonl` in the order written; none when the file does not exist. A last line that a kill left
    incomplete is not a row. Raises `UserError` for any other line that does not parse."""
    path = pathlib.Path(directory) / FILE_NAME
    if not path.exists():
        return []
    return [_row(line, f"{path} line {number}") for number, line in enumerate(_complete_lines(path), 1)]


def deterministic_part(rows: Sequence[MetricsRow]) -> list[dict[str, Any]]:
    """Everything but `time`, in a form in which equal runs compare equal (NaN stands as "nan")."""
    parts = [dataclasses.asdict(row) for row in rows]
    for part in parts:
        del part["time"]
    return [finite_or_name(part) for part in parts]


class MetricsWriter:
    """Appends rows to `directory/metrics.jsonl` and to TensorBoard event files under `directory/tensorboard`.

    `resume_after` None begins a run: what an earlier, never checkpointed attempt left there is dropped. Otherwise the run
    continues from a checkpoint of global step `resume_after`, and rows with a larger global step, which are about to be
    computed again, are dropped (by rename, so that a kill meanwhile loses nothing). One process of a run may hold a writer.
    """

    def __init__(self, directory: str | os.PathLike[str], *, resume_after: int | None):
        self._path = pathlib.Path(directory) / FILE_NAME
        if resume_after is not None and not self._path.exists():
            logging.warning("%s is missing: metrics up to global step %d are lost", self._path, resume_after)
        import tensorboardX  # imports torch where that is installed, for seconds: only a training run pays for it

        rows = [] if resume_after is None else [row for row in read_metrics(directory) if row.global_step <= resume_after]
        try:
            write_atomically(self._path, (json_line(dataclasses.asdict(row)).encode() for row in rows))
            self._file = self._path.open("ab")
            self._events = tensorboardX.SummaryWriter(
                str(self._path.parent / EVENTS_DIRECTORY), purge_step=0 if resume_after is None else resume_after + 1
            )
        except OSError as error:
            raise UserError(f"cannot write metrics to {self._path}: {error.strerror}") from None

    def write(
        self,
        stage: str,
        stage_index: int,
        step: int,
        global_step: int,
        kind: str,
        metrics: Mapping[str, float],
        time: Mapping[str, float],
    ) -> None:
        """Append one row; it is in `metrics.jsonl` when this returns (the event files may lack the last moments before a kill).
        Values may be any scalar that `float` takes."""
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
        numbers = {name: float(value) for name, value in metrics.items()}
        clock = {name: float(value) for name, value in time.items()}
        row = MetricsRow(stage, stage_index, step, global_step, kind, numbers, clock)
        self._file.write(json_line(dataclasses.asdict(row)).encode())
        self._file.flush()
        for name, value in numbers.items():
            if math.isfinite(value):  # a curve has no place for NaN, and the writer would warn on standard error each time
                self._events.add_scalar(f"{stage}/{name}", value, global_step)
        for name, value in clock.items():
            self._events.add_scalar(f"{stage}/time/{name}", value, global_step)
        self._events.flush()

    def close(self) -> None:
        """Close both files. Calling it twice is harmless."""
        self._file.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
