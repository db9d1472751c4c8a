"""What a report shows of the recorded rollouts: some steps and problems of each stage, within a budget of bytes."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rstar_jax.storage.metrics import finite_or_name
from rstar_jax.storage.trajectories import iterate_trajectories, recorded_steps

MAX_BYTES = 3_000_000  # of all embedded rollouts
MAX_GROUPS = 12  # problems of one step
MAX_TEXT = 6_000  # characters of one piece of text

_OF_PROBLEM = ("question", "answer", "family")
_OF_ROLLOUT = ("sample", "finish", "reward", "reason", "selected", "advantage", "penalties", "tokens", "spans", "turns")


@dataclasses.dataclass(frozen=True)
class Embedded:
    """`data`: JSON that may stand inside a `<script>` element; `notes`: one sentence for each thing that was left out."""

    data: str
    notes: tuple[str, ...]
    rollouts: int


def script_json(value: Any) -> str:
    """`value` as ASCII JSON that cannot end or open a `<script>` element or a comment, whatever its strings hold."""
    text = json.dumps(finite_or_name(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def clipped(value: Any) -> Any:
    """`value` with the middle of every long text replaced by a remark of how much is missing."""
    if isinstance(value, str) and len(value) > MAX_TEXT:
        half = MAX_TEXT // 2
        return f"{value[:half]}\n[... {len(value) - 2 * half} characters left out of this page ...]\n{value[-half:]}"
    if isinstance(value, Mapping):
        return {key: clipped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clipped(item) for item in value]
    return value


def _is_clipped(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_is_clipped(item) for item in value.values())
    if isinstance(value, list):
        return any(_is_clipped(item) for item in value)
    return isinstance(value, str) and len(value) > MAX_TEXT


def _rollout(record: Mapping[str, Any]) -> dict[str, Any]:
    rollout = {key: clipped(record.get(key)) for key in _OF_ROLLOUT}
    # a turn's text is already in its span
    rollout["turns"] = [{key: item for key, item in turn.items() if key != "text"} for turn in rollout["turns"]]
    return rollout


@dataclasses.dataclass
class _Step:
    """One step as the page holds it, and what it leaves out."""

    groups: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    size: int = 0
    shown: int = 0
    total: int = 0
    clipped: int = 0


def _read_step(path: pathlib.Path, budget: int) -> _Step:
    """The first problems of a step, in the order recorded, as far as they fit in `budget` bytes."""
    step = _Step()
    groups: dict[str, dict[str, Any]] = {}
    totals: collections.Counter[str] = collections.Counter()
    for record in iterate_trajectories(path):
        name = record["problem_id"]
        totals[name] += 1
        if name not in groups and (len(groups) == MAX_GROUPS or step.size >= budget):
            continue
        rollout = _rollout(record)
        group = groups.get(name) or {"id": name, "rollouts": [], **{key: clipped(record.get(key)) for key in _OF_PROBLEM}}
        size = len(script_json(rollout)) + (0 if name in groups else len(script_json(group)))
        if step.size + size > budget:
            continue
        groups[name] = group
        group["rollouts"].append(rollout)
        step.size += size
        step.shown += 1
        step.clipped += _is_clipped([record[key] for key in ("spans", "turns")])
    step.total = totals.total()
    step.groups = [{**group, "total": totals[name]} for name, group in groups.items()]
    return step


def _step_number(path: pathlib.Path) -> int:
    return int(path.stem.removeprefix("step_"))


def embed(workdir: str | os.PathLike[str], stages: Sequence[str], *, max_bytes: int = MAX_BYTES) -> Embedded:
    """Rollouts of a run for the page: of each stage the first, the last and the middle recorded step, and of each of these the
    first problems, as many as fit. The budget goes to first and last steps before middle ones."""
    files = recorded_steps(workdir, stages)
    ends = [path for paths in files.values() for path in dict.fromkeys((paths[0], paths[-1]))]
    middles = [paths[len(paths) // 2] for paths in files.values() if len(paths) > 2]
    order = [*ends, *middles]
    left = max_bytes
    read: dict[pathlib.Path, _Step] = {}
    for index, path in enumerate(order):
        read[path] = _read_step(path, left // (len(order) - index))
        left -= read[path].size
    steps = [
        {"stage": stage, "step": _step_number(path), "total": read[path].total, "groups": read[path].groups}
        for stage, paths in files.items()
        for path in paths
        if path in read
    ]
    shown, total = sum(step.shown for step in read.values()), sum(step.total for step in read.values())
    clipped_rollouts, recorded = sum(step.clipped for step in read.values()), sum(len(paths) for paths in files.values())
    notes = []
    if len(read) < recorded:
        notes.append(f"The viewer holds {len(read)} of {recorded} recorded steps: the first, the middle and the last of each stage.")
    if shown < total:
        notes.append(
            f"Of the {total} rollouts of these steps it holds {shown}: the first problems of each step "
            f"(at most {MAX_GROUPS}), as far as they fit in {max_bytes / 1e6:.1f} MB."
        )
    if clipped_rollouts:
        notes.append(f"In {clipped_rollouts} rollouts a text of more than {MAX_TEXT} characters lacks its middle.")
    return Embedded(script_json({"steps": steps}), tuple(notes), shown)
