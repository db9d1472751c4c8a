"""Checkpoints through orbax: the train state and the position of the run, complete or invisible."""

from __future__ import annotations

import dataclasses
import pathlib
import types
from typing import Any

import jax
import orbax.checkpoint as ocp


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a run stands: everything that a resume needs beside the train state.

    `stage_step` steps of stage `stage` are done (`global_step` in all), and `consumed` items of its data have been used.
    """

    stage: int = 0
    stage_step: int = 0
    global_step: int = 0
    consumed: int = 0


class Checkpoints:
    """The checkpoints of one run, labelled by global step; the newest `keep` are kept.

    Saving returns as soon as the state is copied to the host; a checkpoint that was not finished is never seen by `latest`.
    `read_only` leaves the directory as it is, unfinished checkpoints included: a run that is still training may be writing one.
    """

    def __init__(self, directory: pathlib.Path, keep: int, *, read_only: bool = False):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=not read_only, cleanup_tmp_directories=not read_only)
        items = ("params", "optimizer", "reference", "position")
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options, item_names=items)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self._manager.close()

    def latest(self) -> Position | None:
        """The position of the newest complete checkpoint, None when there is none."""
        step = self._manager.latest_step()
        if step is None:
            return None
        restored = self._manager.restore(step, args=ocp.args.Composite(position=ocp.args.JsonRestore()))
        return Position(**restored["position"])

    def restore(self, position: Position, item: str, target: Any) -> Any:
        """`params`, `optimizer` or `reference` at `position`, in the tree, shapes, dtypes and shardings of `target` (abstract or
        real)."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, target)
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(abstract)})
        return self._manager.restore(position.global_step, args=args)[item]

    def save(self, position: Position, params: Any, optimizer: Any, reference: Any = None) -> None:
        """Write a checkpoint; does nothing when this step has one already. `reference`: of a stage that has a reference policy."""
        if self._manager.latest_step() == position.global_step:
            return
        items = {
            "params": ocp.args.StandardSave(params),
            "optimizer": ocp.args.StandardSave(optimizer),
            "position": ocp.args.JsonSave(dataclasses.asdict(position)),
        }
        if reference is not None:
            items["reference"] = ocp.args.StandardSave(reference)
        self._manager.save(position.global_step, args=ocp.args.Composite(**items))

    def wait(self) -> None:
        """Until everything saved so far is complete."""
        self._manager.wait_until_finished()
