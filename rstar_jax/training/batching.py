"""From trajectories and demonstrations to padded rows of static shapes.

A microbatch has a bucket's length and that bucket's fixed number of rows, so a run uses one program per bucket. Rows that do not
fill a microbatch of their bucket are carried to the next longer one, so that only the last microbatch of an update is padded with
dead rows; what is dead or padding weighs 0. With packing there is one bucket, and its rows hold several sequences each.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from rstar_jax.types import TrainBatch, Trajectory, UserError


@dataclasses.dataclass(frozen=True)
class Row:
    """One sequence for training: ids [n] int32, trainable [n] bool, sampler log-probs [n] float32 (NaN where not sampled), its
    advantage (constant over the sequence), and the experts [n, L, k] int16 to route it to again (None: the router chooses)."""

    ids: np.ndarray
    trainable: np.ndarray
    logps: np.ndarray
    advantage: float = 0.0
    experts: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.trainable[0]:
            raise ValueError("the first token of a sequence has no log-prob and cannot be trainable")

    def __len__(self) -> int:
        return len(self.ids)


def trajectory_row(trajectory: Trajectory, advantage: float) -> Row:
    """The row of one rollout: exactly the ids that existed, trainable where they were sampled."""
    return Row(trajectory.ids, trajectory.trainable, trajectory.logps, float(advantage), trajectory.experts)


def rows_per_microbatch(length: int, microbatch_tokens: int, nominal_rows: int, shards: int) -> int:
    """Rows of a microbatch of this length: the token budget's worth, but no more than an update has, in whole shards."""
    wanted = min(max(1, microbatch_tokens // length), nominal_rows)
    return max(shards, wanted // shards * shards) if wanted >= shards else shards


def microbatch_shapes(
    buckets: Sequence[int], microbatch_tokens: int, nominal_rows: int, shards: int, packing: bool = False
) -> tuple[tuple[int, int], ...]:
    """Every shape [rows, tokens] that `microbatches` can give."""
    used = buckets[-1:] if packing else buckets
    return tuple((rows_per_microbatch(bucket, microbatch_tokens, nominal_rows, shards), bucket) for bucket in used)


def dead_microbatch(rows: int, tokens: int, routed: tuple[int, int] | None = None) -> TrainBatch:
    """A microbatch that weighs nothing."""
    return _stack([], tokens, rows, 0, routed)


def pack(rows: Sequence[Row], length: int) -> list[list[Row]]:
    """The rows in bins of at most `length` tokens: longest first, each into the fullest bin that has room (best-fit decreasing, at
    most 11/9 of the fewest bins and one more; Johnson 1973). Bins keep the order in which they were opened."""
    bins: list[list[Row]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for row in sorted(rows, key=len, reverse=True):
        at = bisect.bisect_left(room, (len(row), -1))
        left, index = room.pop(at) if at < len(room) else (length, len(bins))
        if index == len(bins):
            bins.append([])
        bins[index].append(row)
        bisect.insort(room, (left - len(row), index))
    return bins


def microbatches(
    rows: Sequence[Row],
    *,
    buckets: Sequence[int],
    microbatch_tokens: int,
    nominal_rows: int,
    shards: int = 1,
    pad_id: int = 0,
    routed: tuple[int, int] | None = None,
    packing: bool = False,
) -> list[TrainBatch]:
    """Batches of numpy arrays that hold every row once, shortest bucket first; with `packing` several to a row of the last bucket's
    length, each a segment of its own.

    `nominal_rows` is the number of rows of a full update: it fixes shapes even when fewer are given. `routed` is that of a model with
    experts (`ModelConfig.routed`). Raises `UserError` for a row longer than the last bucket.
    """
    longest = max(map(len, rows), default=0)
    if longest > buckets[-1]:
        raise UserError(f"a sequence of {longest} tokens is longer than the last of training.buckets={tuple(buckets)}")
    if packing:
        remaining, buckets = pack(rows, buckets[-1]), buckets[-1:]
    else:
        remaining = [[row] for row in sorted(rows, key=len)]
    batches = []
    for bucket in buckets:
        size = rows_per_microbatch(bucket, microbatch_tokens, nominal_rows, shards)
        fitting = sum(sum(map(len, row)) <= bucket for row in remaining)
        last = fitting == len(remaining)
        while fitting >= size or (last and fitting):
            batches.append(_stack(remaining[:size], bucket, size, pad_id, routed))
            fitting -= min(size, fitting)
            remaining = remaining[size:]
    return batches


def _stack(rows: Sequence[Sequence[Row]], length: int, size: int, pad_id: int, routed: tuple[int, int] | None) -> TrainBatch:
    """Each row holds its sequences one behind the other."""

    def filled(value: float, dtype: type) -> np.ndarray:
        return np.full((size, length), value, dtype)

    tokens, segments, trainable = filled(pad_id, np.int32), filled(0, np.int32), filled(0, bool)
    advantage, logps = filled(0, np.float32), filled(np.nan, np.float32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (size, length)).copy()
    experts = None if routed is None else np.full((size, length, *routed), -1, np.int16)
    for i, row in enumerate(rows):
        start = 0
        for number, sequence in enumerate(row, 1):
            here = i, slice(start, start + len(sequence))
            tokens[here], segments[here], trainable[here] = sequence.ids, number, sequence.trainable
            logps[here], advantage[here] = sequence.logps, sequence.advantage
            positions[here] = np.arange(len(sequence))
            if experts is not None and sequence.experts is not None:
                experts[here] = sequence.experts
            start += len(sequence)
    return TrainBatch(tokens, positions, segments, trainable, advantage, logps, logps.copy(), experts)
