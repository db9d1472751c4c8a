"""What the engine's slots did during one step: a JSON file a step in `timeline/<stage>/`, and a picture of it."""

from __future__ import annotations

import html
import itertools
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from rstar_jax.storage.metrics import write_atomically
from rstar_jax.types import SlotSpan, UserError

DIRECTORY = "timeline"
MAX_ROWS = 48  # slots that a picture shows
_KINDS = {
    "sample": ("sampling", "var(--series-0)"),
    "tool": ("waiting for a tool", "var(--series-1)"),
    "idle": ("placed, waiting for its turn", "var(--line)"),
}
_WIDTH, _ROW, _LEFT, _TOP = 860, 9, 64, 8


def write_timeline(workdir: pathlib.Path, stage: str, step: int, spans: Sequence[SlotSpan]) -> None:
    """Seconds are counted from the first span's start."""
    begin = min((span.start for span in spans), default=0.0)
    rows = [
        [span.pool, span.index, span.what, span.prompt, span.sample, round(span.start - begin, 6), round(span.stop - begin, 6)]
        for span in spans
    ]
    file = workdir / DIRECTORY / stage / f"step_{step:06d}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, [json.dumps({"stage": stage, "step": step, "spans": rows}).encode()])


def last_timeline(workdir: str | os.PathLike[str], stage: str) -> dict[str, Any] | None:
    """The newest file of a stage; None without. Raises `UserError` for one that is damaged."""
    files = sorted((pathlib.Path(workdir) / DIRECTORY / stage).glob("step_*.json"))
    if not files:
        return None
    try:
        content = json.loads(files[-1].read_bytes())
        spans = [
            SlotSpan(pool, index, what, prompt, sample, start, stop)
            for pool, index, what, prompt, sample, start, stop in content["spans"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{files[-1]} is not a timeline ({error})") from None
    return {"step": content.get("step"), "spans": spans}


def timeline_svg(spans: Sequence[SlotSpan], most_rows: int = MAX_ROWS) -> str:
    """One row a slot, time to the right: who samples, who waits for a tool, and what is empty. At most `most_rows` slots are shown."""
    slots = sorted({(span.pool, span.index) for span in spans})[:most_rows]
    rows = {slot: number for number, slot in enumerate(slots)}
    end = max((span.stop for span in spans), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - 8) / end
    height = _TOP + len(slots) * _ROW + 40
    parts = []
    for span in spans:
        row = rows.get((span.pool, span.index))
        if row is None:
            continue
        label, color = _KINDS[span.what]
        title = html.escape(f"prompt {span.prompt}, rollout {span.sample}: {label}, {span.start:.2f} to {span.stop:.2f} s")
        x, width = _LEFT + span.start * scale, max(0.4, (span.stop - span.start) * scale)
        parts.append(
            f'<rect x="{x:.1f}" y="{_TOP + row * _ROW}" width="{width:.1f}" height="{_ROW - 2}" '
            f'fill="{color}"><title>{title}</title></rect>'
        )
    for pool, group in itertools.groupby(slots, key=lambda slot: slot[0]):
        first = rows[next(iter(group))]
        parts.append(f'<text x="0" y="{_TOP + first * _ROW + 8}" font-size="10" fill="var(--muted)">pool {pool}</text>')
    base = _TOP + len(slots) * _ROW
    for tick in range(5):
        seconds = end * tick / 4
        anchor = "end" if tick == 4 else "middle"
        parts.append(f'<text x="{_LEFT + seconds * scale:.1f}" y="{base + 14}" font-size="10" text-anchor="{anchor}" '
                     f'fill="var(--muted)">{seconds:.2f} s</text>')  # fmt: skip
    for number, (label, color) in enumerate(_KINDS.values()):
        x = _LEFT + number * 200
        parts.append(f'<rect x="{x}" y="{base + 24}" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{x + 14}" y="{base + 33}" font-size="11" fill="var(--muted)">{label}</text>')
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="What each slot did" xmlns="http://www.w3.org/2000/svg">'
        + "".join(parts)
        + "</svg>"
    )
