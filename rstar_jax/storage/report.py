"""A run as one HTML page that needs no network: what it learned, curves, evaluations, configuration, and its rollouts.

The page is made from a run's directory alone: `config.json`, `metrics.jsonl`, `trajectories/`, and optionally `summary.json`
({"title": ..., "shows": ..., "does_not_show": ...}), in which an experiment says what its numbers mean.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import markupsafe
import numpy as np

from rstar_jax.config import differences
from rstar_jax.storage import figures, timeline, viewer
from rstar_jax.storage.metrics import MetricsRow, read_metrics, write_atomically
from rstar_jax.types import UserError

LABELS = {
    "reward": "Mean reward",
    "loss": "Loss",
    "accuracy": "Accuracy",
    "response_length": "Response length (tokens)",
    "tool_calls": "Tool calls per rollout",
    "tool_error_share": "Tool error share",
    "entropy": "Entropy (nats per token)",
    "logp_gap_max": "Largest log-prob gap, sampler to trainer (nats)",
    "logp_gap_mean": "Mean log-prob gap, sampler to trainer (nats)",
    "clip_fraction": "Share of clipped tokens",
    "live_share": "Share of live rows",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
}
MAIN_CURVES = ("reward", "loss", "response_length", "tool_calls", "tool_error_share", "entropy", "logp_gap_max")
PER_KIND = ("loss", "grad_norm")  # another quantity in SFT than in RL: never on one axis
SHARES = ("accuracy", "share", "pass@", "fraction", "error_rate")
HEADLINES = ("sampled/accuracy", "greedy/accuracy", "accuracy")
SUMMARY_KEYS = ("title", "shows", "does_not_show")


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run's directory holds."""

    label: str
    config: Mapping[str, Any]
    rows: Sequence[MetricsRow]
    summary: Mapping[str, str]

    @property
    def stages(self) -> list[str]:
        return [stage["name"] for stage in self.config["stages"]]

    def kind(self, stage: str) -> str:
        return next((s["kind"] for s in self.config["stages"] if s["name"] == stage), stage)


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The last evaluation of a stage, or the first one of all before any step; `when` says which in words."""

    when: str
    metrics: Mapping[str, float]

    def interval(self, name: str) -> tuple[float, float] | None:
        low, high = self.metrics.get(f"{name}_low"), self.metrics.get(f"{name}_high")
        return None if low is None or high is None else (low, high)


# --- reading ---------------------------------------------------------------------------------------------------------


def _json_object(path: pathlib.Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object")
    return value


def load_run(directory: str | os.PathLike[str]) -> Run:
    """Raises `UserError` when `directory` holds no run, or a file that is not what it should be."""
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; give the work directory of a run")
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory} holds no run: it has no config.json")
    config = _json_object(directory / "config.json")
    stages = config.get("stages")
    if not isinstance(stages, list) or not all(isinstance(s, dict) and {"name", "kind", "steps"} <= s.keys() for s in stages):
        raise UserError(f"{directory / 'config.json'} is not the configuration of a run: its stages are missing")
    summary = _json_object(directory / "summary.json") if (directory / "summary.json").exists() else {}
    if not summary.keys() <= set(SUMMARY_KEYS) or not all(isinstance(text, str) for text in summary.values()):
        raise UserError(f"{directory / 'summary.json'} must hold texts under {', '.join(SUMMARY_KEYS)} and nothing else")
    return Run(str(config.get("name") or directory.name), config, read_metrics(directory), summary)


def load_runs(directories: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Runs with distinct labels: names, or directories where two names are equal, numbered where these are equal too."""
    runs = [load_run(directory) for directory in directories]
    names = [run.label for run in runs]
    if len(set(names)) < len(names):
        names = [str(pathlib.Path(directory)) for directory in directories]
    if len(set(names)) < len(names):
        names = [f"{name} ({number})" for number, name in enumerate(names, 1)]
    return [dataclasses.replace(run, label=name) for run, name in zip(runs, names, strict=True)]


def evaluations(run: Run) -> list[Evaluated]:
    """One entry for each evaluated stage, in order, and before them one for an evaluation before the first step."""
    rows = [row for row in run.rows if row.kind == "evaluation"]
    ends = {row.stage_index: row.step for row in run.rows if row.kind == "stage_end"}
    found = [Evaluated("before training", rows[0].metrics)] if rows and rows[0].global_step == 0 else []
    last = {row.stage_index: row for row in rows if row.global_step > 0}
    for index, row in sorted(last.items()):
        finished = index in ends and row.step >= ends[index]
        found.append(Evaluated(f"after {row.stage}" if finished else f"{row.stage}, step {row.step}", row.metrics))
    return found


def progress(run: Run) -> list[str]:
    """One phrase for each stage: how far it came."""
    ended = {row.stage for row in run.rows if row.kind == "stage_end"}
    reached = {row.stage: row.step for row in run.rows}
    phrases = []
    for stage in run.config["stages"]:
        name = stage["name"]
        if name in ended:
            phrases.append(f"{name}: {reached[name]} steps")
        elif name in reached:
            phrases.append(f"{name}: stopped or still running at step {reached[name]} of {stage['steps']}")
        else:
            phrases.append(f"{name}: not begun")
    return phrases


# --- words and numbers -----------------------------------------------------------------------------------------------


def label(name: str) -> str:
    """`sampled/tool_calls` as "Tool calls per rollout, sampled"."""
    prefix, _, base = name.rpartition("/")
    text = LABELS.get(base) or base[:1].upper() + base[1:].replace("_", " ")
    return f"{text}, {prefix.replace('/', ', ')}" if prefix else text


def number(name: str, value: float) -> str:
    """A share as a percentage, anything else with four digits."""
    if not math.isfinite(value):
        return str(value)
    share = any(part in name for part in SHARES) and not name.endswith("_problems")
    return f"{100 * value:.1f} %" if share else f"{value:.4g}"


def _span(name: str, interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"[{number(name, interval[0])}, {number(name, interval[1])}]"


def _change(name: str, before: float, after: float) -> str:
    """`rose from 40.0 % to 80.0 %`, in the digits that are shown."""
    first, second = number(name, before), number(name, after)
    if not (math.isfinite(before) and math.isfinite(after)):
        return f"went from {first} to {second}"
    return f"stayed at {first}" if first == second else f"{'rose' if after > before else 'fell'} from {first} to {second}"


def _step_sentence(name: str, before: Evaluated, after: Evaluated) -> str:
    intervals = before.interval(name), after.interval(name)
    text = f"{label(name)}, {_change(name, before.metrics[name], after.metrics[name])} ({before.when} to {after.when})"
    if intervals[0] is None or intervals[1] is None:
        return f"{text}."
    apart = intervals[0][1] < intervals[1][0] or intervals[1][1] < intervals[0][0]
    verdict = "do not overlap" if apart else "overlap: this evaluation alone does not establish a difference"
    return f"{text}; the 95 % intervals {_span(name, intervals[0])} and {_span(name, intervals[1])} {verdict}."


def headline(run: Run) -> dict[str, Any]:
    """What the run learned, in plain words: `figures` (large), `caption`, `sentences`."""
    found = evaluations(run)
    names = [n for n in HEADLINES if any(n in e.metrics for e in found)]
    if not names:
        return {"figures": "", "caption": "", "sentences": [*_reward_sentence(run), "No evaluation has been recorded yet."]}
    name = names[0]
    measured = [e for e in found if name in e.metrics]
    first, last = measured[0], measured[-1]
    before, after = first.metrics[name], last.metrics[name]
    if len(measured) == 1:
        sentence = f"{label(name)} {number(name, after)} {_span(name, last.interval(name))}; nothing to compare it with yet."
        return {"figures": number(name, after), "caption": f"{label(name)} ({last.when})", "sentences": [sentence]}
    sentences = [_step_sentence(name, a, b) for a, b in itertools.pairwise(measured)]
    if before < after <= 1:
        gap = (after - before) / (1 - before)
        sentences.append(f"That closes {100 * gap:.0f} % of the gap between the first of these figures and 100 %.")
    others = [n for n in last.metrics if n in first.metrics and n != name and not n.endswith(("_low", "_high"))]
    wanted = ("accuracy", "tool_error_share", "tool_calls", "response_length")
    others = [n for n in others if n.rpartition("/")[2] in wanted]
    sentences += [f"{label(n)}, {_change(n, first.metrics[n], last.metrics[n])}." for n in others]
    return {
        "figures": f"{number(name, before)} → {number(name, after)}",
        "caption": f"{label(name)}: {first.when} → {last.when}",
        "sentences": sentences,
    }


def _reward_sentence(run: Run) -> list[str]:
    rewards = [row.metrics["reward"] for row in run.rows if row.kind == "train" and "reward" in row.metrics]
    if not rewards:
        return []
    part = max(1, len(rewards) // 10)
    change = _change("reward", float(np.mean(rewards[:part])), float(np.mean(rewards[-part:])))
    return [f"Mean training reward {change} (first to last tenth of the {len(rewards)} steps that had one)."]


def evaluation_table(columns: Sequence[tuple[str, Mapping[str, float]]]) -> dict[str, Any]:
    """`head`: names of the columns; `body`: (label, [(value, interval)]) for each metric that is not an interval's end."""
    names = list(dict.fromkeys(name for _, metrics in columns for name in metrics))
    bounds = {f"{name}{end}" for name in names for end in ("_low", "_high") if f"{name}_low" in names and f"{name}_high" in names}
    body = []
    for name in (n for n in names if n not in bounds):
        cells = []
        for _, metrics in columns:
            entry = Evaluated("", metrics)
            cells.append((number(name, metrics[name]), _span(name, entry.interval(name))) if name in metrics else ("", ""))
        body.append((label(name), cells))
    return {"head": [head for head, _ in columns], "body": body}


# --- curves ----------------------------------------------------------------------------------------------------------


def _boundaries(runs: Sequence[Run]) -> tuple[tuple[float, str], ...]:
    """Where stages begin, when all runs agree on it."""
    starts = []
    for run in runs:
        first = {row.stage: float(row.global_step) for row in reversed(run.rows) if row.kind == "train"}
        starts.append(tuple(sorted((step, stage) for stage, step in first.items())))
    return starts[0] if len(set(starts)) == 1 else ()


def _train_panel(runs: Sequence[Run], part: str, name: str, kind: str | None) -> figures.Panel | None:
    """Curve of `name` of a row's `part` (metrics or time), of the stages of one kind or of all."""
    series = []
    for color, run in enumerate(runs):
        rows = [row for row in run.rows if row.kind == "train" and name in getattr(row, part)]
        rows = [row for row in rows if kind is None or run.kind(row.stage) == kind]
        if rows:
            x = np.asarray([row.global_step for row in rows], np.float64)
            y = np.asarray([getattr(row, part)[name] for row in rows], np.float64)
            series.append(figures.Series(run.label, x, y, color=color))
    title = label(name) if kind is None else f"{label(name)}, {kind.upper()}"
    return figures.Panel(title, tuple(series), _boundaries(runs)) if series else None


def _evaluation_panel(runs: Sequence[Run], base: str) -> figures.Panel | None:
    """Every `prefix/base` of the evaluations, with its interval."""
    series = []
    for index, run in enumerate(runs):
        rows = [row for row in run.rows if row.kind == "evaluation"]
        names = [n for n in dict.fromkeys(n for row in rows for n in row.metrics) if n.rpartition("/")[2] == base]
        for place, name in enumerate(names):
            having = [row for row in rows if name in row.metrics]
            x = np.asarray([row.global_step for row in having], np.float64)
            y, low, high = (
                np.asarray([row.metrics.get(key, math.nan) for row in having], np.float64)
                for key in (name, f"{name}_low", f"{name}_high")
            )
            prefix = name.rpartition("/")[0] or "evaluation"
            text, color = (f"{run.label}, {prefix}", index) if len(runs) > 1 else (prefix, place)
            interval = (low, high) if np.isfinite(low + high).any() else None
            series.append(figures.Series(text, x, y, interval, color=color, dashed=place > 0))
    title = f"{label(base)} on held-out problems"
    return figures.Panel(title, tuple(series), _boundaries(runs), points=True) if series else None


def curves(runs: Sequence[Run]) -> dict[str, list[figures.Panel]]:
    """Panels under `main`, `more` and `time`; every name that the rows hold is in one of them."""
    train = [row for run in runs for row in run.rows if row.kind == "train"]
    names = list(dict.fromkeys(name for row in train for name in row.metrics))
    kinds = list(dict.fromkeys(run.kind(stage) for run in runs for stage in run.stages))

    def panels(name: str) -> list[figures.Panel]:
        split: list[str | None] = [*kinds] if name in PER_KIND and len(kinds) > 1 else [None]
        return [panel for kind in split if (panel := _train_panel(runs, "metrics", name, kind))]

    evaluated = [row for run in runs for row in run.rows if row.kind == "evaluation"]
    bases = dict.fromkeys(n.rpartition("/")[2] for row in evaluated for n in row.metrics if not n.endswith(("_low", "_high")))
    by_base = {base: panel for base in bases if (panel := _evaluation_panel(runs, base))}
    main = [by_base.pop("accuracy")] if "accuracy" in by_base else []
    main += [panel for name in MAIN_CURVES for panel in panels(name)]
    more = [panel for name in names if name not in MAIN_CURVES for panel in panels(name)]
    more += [panel for panel in by_base.values() if max(len(series.x) for series in panel.series) > 1]
    clocks = dict.fromkeys(name for row in train for name in row.time)
    time = [panel for name in clocks if (panel := _train_panel(runs, "time", name, None))]
    return {"main": main, "more": more, "time": time}


def _drawn(panels: Sequence[figures.Panel]) -> list[dict[str, Any]]:
    return [{"title": panel.title, "svg": markupsafe.Markup(figures.svg(panel)), "caption": figures.caption(panel)} for panel in panels]


# --- the page --------------------------------------------------------------------------------------------------------


def configuration(config: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(section, [(field, value)]) of a resolved configuration, each stage a section of its own."""

    def fields(section: Mapping[str, Any]) -> list[tuple[str, str]]:
        return [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in section.items()]

    nested = {key for key, value in config.items() if isinstance(value, dict)} | {"stages"}
    sections = [("run", fields({key: value for key, value in config.items() if key not in nested}))]
    sections += [(f"stage {stage['name']}", fields(stage)) for stage in config["stages"]]
    return sections + [(key, fields(config[key])) for key in config if key in nested - {"stages"}]


def _comparison(runs: Sequence[Run]) -> dict[str, Any]:
    last = [(run, found[-1]) for run in runs if (found := evaluations(run))]
    columns = [(f"{run.label} ({evaluated.when})", evaluated.metrics) for run, evaluated in last]
    return {
        "table": evaluation_table(columns),
        "without": [run.label for run in runs if not evaluations(run)],
        "differences": [(run.label, differences(dict(runs[0].config), dict(run.config))) for run in runs[1:]],
    }


def _timelines(workdir: str | os.PathLike[str], run: Run) -> list[dict[str, Any]]:
    """A picture of the newest recorded step of every stage that has one."""
    found = [(stage, timeline.last_timeline(workdir, stage)) for stage in run.stages]
    return [
        {"stage": stage, "step": last["step"], "svg": markupsafe.Markup(timeline.timeline_svg(last["spans"]))}
        for stage, last in found
        if last is not None and last["spans"]
    ]


def build_report(workdir: str | os.PathLike[str], compare: Sequence[str | os.PathLike[str]] = ()) -> str:
    """The page of the run in `workdir`, its curves over those of the runs in `compare`. Raises `UserError` for a directory that
    holds no run."""
    runs = load_runs([workdir, *compare])
    run = runs[0]
    found = evaluations(run)
    embedded = viewer.embed(workdir, run.stages)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("report.html.j2").render(
        title=run.summary.get("title") or run.label,
        run=run,
        labels=[r.label for r in runs],
        headline=headline(run),
        progress=progress(run),
        curves={group: _drawn(panels) for group, panels in curves(runs).items()},
        table=evaluation_table([(evaluated.when, evaluated.metrics) for evaluated in found]),
        comparison=_comparison(runs) if compare else None,
        configuration=configuration(run.config),
        timelines=_timelines(workdir, run),
        embedded=embedded,
        data=markupsafe.Markup(embedded.data),
    )


def write_report(
    workdir: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    compare: Sequence[str | os.PathLike[str]] = (),
) -> pathlib.Path:
    """Write the page to `output` (`report.html` in `workdir`) and return its path; the file is complete or unchanged."""
    path = pathlib.Path(workdir) / "report.html" if output is None else pathlib.Path(output)
    page = build_report(workdir, compare)
    try:
        write_atomically(path, [page.encode("utf-8", "backslashreplace")])
    except OSError as error:
        raise UserError(f"cannot write the report to {path}: {error.strerror}") from None
    return path
