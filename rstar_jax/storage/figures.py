"""Curves of a report as inline SVG, whose colours are CSS variables of the page (so that they follow light and dark)."""

from __future__ import annotations

import dataclasses
import io
import math
import re

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

NUM_COLORS = 6
MAX_POINTS = 600  # more are averaged in bins
SMOOTH_FROM = 40  # shorter curves are drawn as they are

_TEXT, _GRID = "#0b0c01", "#0b0c02"  # stand-ins that the SVG is searched for
_SERIES = [f"#0b0d{i:02x}" for i in range(NUM_COLORS)]
_VARIABLES = {_TEXT: "var(--muted)", _GRID: "var(--line)"} | {c: f"var(--series-{i})" for i, c in enumerate(_SERIES)}


@dataclasses.dataclass(frozen=True)
class Series:
    """One curve: x and y [n]; `interval` holds the ends [n] of one, where it has it. `color` counts from 0."""

    label: str
    x: np.ndarray
    y: np.ndarray
    interval: tuple[np.ndarray, np.ndarray] | None = None
    color: int = 0
    dashed: bool = False


@dataclasses.dataclass(frozen=True)
class Panel:
    """One figure. `boundaries`: (x, stage) where each stage begins. `points`: few measured points rather than a curve."""

    title: str
    series: tuple[Series, ...]
    boundaries: tuple[tuple[float, str], ...] = ()
    points: bool = False


def binned(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Means over neighbouring points, the same number in every bin (the last may hold fewer), so that at most `most` are left;
    NaN points are left out of the means."""
    size = bin_size(len(x), most)
    if size == 1:
        return x, y
    starts = range(0, len(x), size)
    finite = [part[np.isfinite(part)] for part in (y[start : start + size] for start in starts)]
    means = [float(part.mean()) if len(part) else math.nan for part in finite]
    return np.asarray([x[start : start + size].mean() for start in starts]), np.asarray(means)


def bin_size(points: int, most: int) -> int:
    return -(-points // most)


def rolling_mean(y: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over `window` (odd) points, over fewer at the ends; NaN points are left out."""
    kernel = np.ones(window)
    finite = np.isfinite(y)
    sums = np.convolve(np.where(finite, y, 0.0), kernel, mode="same")
    counts = np.convolve(finite.astype(np.float64), kernel, mode="same")
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _window(points: int) -> int:
    return 1 if points < SMOOTH_FROM else 2 * (points // 40) + 1


def caption(panel: Panel) -> str:
    """What was done to the numbers before drawing, and which of them cannot be drawn."""
    parts = []
    longest = max(len(series.x) for series in panel.series)
    size = 1 if panel.points else bin_size(longest, MAX_POINTS)
    if size > 1:
        parts.append(f"each point is the mean of {size} steps")
    window = 1 if panel.points else _window(-(-longest // size))
    if window > 1:
        parts.append(f"thick line: mean of {window} points")
    if panel.points and any(series.interval is not None for series in panel.series):
        parts.append("bars: 95 % intervals")
    lost = sum(int((~np.isfinite(series.y)).sum()) for series in panel.series)
    if lost:
        parts.append(f"{lost} values were not finite and are not drawn")
    text = "; ".join(parts)
    return text[:1].upper() + text[1:]


def _draw_series(axes: Axes, series: Series, points: bool) -> None:
    color, style = _SERIES[series.color % NUM_COLORS], "--" if series.dashed else "-"
    y = np.where(np.isfinite(series.y), series.y, np.nan)
    if points:
        axes.plot(series.x, y, style, color=color, marker="o", markersize=4, linewidth=1.2, label=series.label)
        if series.interval is not None:
            axes.vlines(series.x, *series.interval, colors=color, linewidth=1.2)
        return
    x, y = binned(series.x, y, MAX_POINTS)
    window = _window(len(x))
    if window > 1:
        axes.plot(x, y, style, color=color, linewidth=0.6, alpha=0.35)
    marker = "o" if len(x) == 1 else None
    axes.plot(x, rolling_mean(y, window), style, color=color, marker=marker, linewidth=1.6, label=series.label)


def _draw_boundaries(axes: Axes, panel: Panel) -> None:
    left, right = axes.get_xlim()
    starts = [x for x, _ in panel.boundaries] + [right]
    for (x, stage), following in zip(panel.boundaries, starts[1:], strict=True):
        if left < x < right:
            axes.axvline(x, color=_GRID, linewidth=1.0, linestyle=(0, (3, 3)))
        position = max(x, left)
        if len(panel.boundaries) > 1 and following - position > 0.02 * len(stage) * (right - left):
            axes.annotate(
                stage, (position, 1.0), (2, 2), xycoords=("data", "axes fraction"), textcoords="offset points",
                fontsize=7.5, color=_TEXT,
            )  # fmt: skip


def svg(panel: Panel) -> str:
    """The panel as an `<svg>` element. The same panel gives the same text."""
    with matplotlib.rc_context():
        matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
        matplotlib.rcParams["svg.hashsalt"] = panel.title  # ids are the same in every run, and differ between panels
        matplotlib.rcParams["text.parse_math"] = False  # names come from the user; a dollar sign in one is a dollar sign
        matplotlib.rcParams["font.size"] = 8.5
        figure = Figure(figsize=(4.9, 2.5))
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.14, 0.17, 0.84, 0.74))
        for series in panel.series:
            _draw_series(axes, series, panel.points)
        _draw_boundaries(axes, panel)
        axes.set_xlabel("step of the run", color=_TEXT)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
        axes.tick_params(colors=_TEXT, length=0)
        axes.grid(axis="y", color=_GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(_GRID)
        axes.patch.set_visible(False)
        if len(panel.series) > 1:
            axes.legend(frameon=False, labelcolor=_TEXT, fontsize=8)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(buffer.getvalue())


def _for_page(document: str) -> str:
    """The `<svg>` element of a document, sized and styled by the page: without its own size, name spaces (HTML knows them),
    fonts, style sheet, metadata, and group ids (the same in every figure)."""
    element = document[document.index("<svg") :]
    element = re.sub(r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>", r"<svg \1>", element, count=1)
    element = re.sub(r"<(metadata|style)[^>]*>.*?</\1>", "", element, flags=re.DOTALL)
    element = re.sub(r"font-family: [^;]*; ", "", element)
    element = re.sub(r'<g id="[^"]*"', "<g", element)
    for stand_in, variable in _VARIABLES.items():
        element = element.replace(stand_in, variable)
    return element.strip()
