"""What was sampled, readable: one rollout a line in `trajectories/<stage>/step_000012.jsonl` of a run's directory."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rstar_jax.storage.metrics import json_line, write_atomically
from rstar_jax.types import Tokenizer, ToolRecord, Trajectory, Turn, UserError, Verdict

DIRECTORY = "trajectories"


def _spans(trajectory: Trajectory, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Maximal runs of tokens of one kind, the prompt apart: `kind` is prompt, sampled or observed; tokens [start, stop)."""
    ids, sampled, logps = trajectory.ids, trajectory.trainable, trajectory.logps
    kinds = ["prompt"] * trajectory.prompt_length
    kinds += ["sampled" if flag else "observed" for flag in sampled[trajectory.prompt_length :]]
    spans = []
    start = 0
    for kind, tokens in itertools.groupby(kinds):
        stop = start + len(list(tokens))
        span = {"kind": kind, "start": start, "stop": stop, "text": tokenizer.decode(ids[start:stop].tolist())}
        if kind == "sampled":
            span["mean_logp"] = float(np.mean(logps[start:stop], dtype=np.float64))
        spans.append(span)
        start = stop
    return spans


def _call(record: ToolRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "arguments": record.arguments if isinstance(record.arguments, str) else dict(record.arguments),
        "status": None if record.status is None else str(record.status),
        "is_error": record.is_error,
        "shown": record.shown,
        "executed": record.executed,
        "inside_reasoning": record.inside_reasoning,
    }


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "start": turn.start,
        "stop": turn.stop,
        "finish": str(turn.finish),
        "text": turn.text,
        "calls": [_call(record) for record in turn.calls],
    }


def trajectory_record(
    trajectory: Trajectory,
    verdict: Verdict,
    *,
    tokenizer: Tokenizer,
    stage: str,
    step: int,
    selected: bool,
    advantage: float | None,
    penalties: tuple[float, float] | None,
) -> dict[str, Any]:
    """One rollout as a JSON value.

    `selected`: whether RoC kept it for training; `advantage`: None where none was computed; `penalties`: RoC's
    (p_error, p_format) of rStar2-Agent section 2.2.3, None where it was not applied. `reward` None means unknown. Run times of
    calls are left out, so that equal runs give equal files.
    """
    problem = trajectory.problem
    return {
        "stage": stage,
        "step": step,
        "problem_id": problem.id,
        "question": problem.question,
        "answer": problem.answer,
        "family": problem.family,
        "sample": trajectory.sample,
        "finish": None if trajectory.finish is None else str(trajectory.finish),
        "reward": verdict.value,
        "reason": verdict.reason,
        "selected": selected,
        "advantage": advantage,
        "penalties": None if penalties is None else {"error": float(penalties[0]), "format": float(penalties[1])},
        "tokens": {
            "prompt": trajectory.prompt_length,
            "response": trajectory.response_length,
            "sampled": trajectory.sampled_length,
        },
        "spans": _spans(trajectory, tokenizer),
        "turns": [_turn(turn) for turn in trajectory.turns],
        "ids": trajectory.ids.tolist(),
    }


def write_trajectories(directory: str | os.PathLike[str], stage: str, step: int, records: Iterable[Mapping[str, Any]]) -> pathlib.Path:
    """Write the rollouts of one step under the run's `directory` and return the path. The file is complete or absent; a file
    of the same step (of an attempt that was killed) is replaced. Rollouts of one problem should stand together."""
    path = pathlib.Path(directory) / DIRECTORY / stage / f"step_{step:06d}.jsonl"
    write_atomically(path, (json_line(record).encode() for record in records))
    return path


def iterate_trajectories(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Rollouts of one file, one at a time. Raises `UserError` naming the first line that is not one."""
    with pathlib.Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path} line {number} is not a recorded rollout ({error})") from None
            if not isinstance(record, dict) or not {"problem_id", "spans", "turns"} <= record.keys():
                raise UserError(f"{path} line {number} is not a recorded rollout; expected problem_id, spans and turns")
            yield record


def read_trajectories(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All rollouts of one file, in the order written."""
    return list(iterate_trajectories(path))


def recorded_steps(directory: str | os.PathLike[str], stages: Sequence[str]) -> dict[str, list[pathlib.Path]]:
    """The files of each stage in the order of steps; stages without any are left out."""
    root = pathlib.Path(directory) / DIRECTORY
    found = {stage: sorted((root / stage).glob("step_*.jsonl")) for stage in stages}
    return {stage: paths for stage, paths in found.items() if paths}
