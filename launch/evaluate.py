"""Evaluate a trained agent: `python -m launch.evaluate --workdir=DIR --dataset=PATH.jsonl|.parquet|NAME [--data_dir=DIR]`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence

from absl import flags

from launch import cli
from rstar_jax.data.readers import ReadResult, find_dataset, read_problems
from rstar_jax.types import Sampling, UserError

WORKDIR = flags.DEFINE_string("workdir", None, "Directory of a trained run.")
MODEL = flags.DEFINE_string("model", None, "A pretrained model instead of --workdir: a Hugging Face directory, a .gguf file or a name.")
CHAT = flags.DEFINE_enum("chat", "chatml", ["chatml", "rstar2"], "Chat format that a pretrained --model is used with.")
DATASET = flags.DEFINE_string("dataset", None, "A .jsonl or .parquet file, or a name to be found in --data_dir.")
DATA_DIR = flags.DEFINE_string("data_dir", None, "Where named datasets are.")
LIMIT = flags.DEFINE_integer("limit", None, "Take the first so many problems.", lower_bound=1)
TOOLS = flags.DEFINE_enum("tools", "python", ["python", "none"], "Tools that the agent may call.")
SAMPLES = flags.DEFINE_integer("samples", 16, "Rollouts per problem.", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.6, "Sampling temperature; 0 is greedy.", lower_bound=0.0)
TOP_K = flags.DEFINE_integer("top_k", 0, "Sample from so many most probable tokens; 0: from all.", lower_bound=0)
TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample from the most probable tokens that sum to this.", lower_bound=0.0, upper_bound=1.0)
MIN_P = flags.DEFINE_float(
    "min_p", 0.0, "Sample from tokens at least this fraction as probable as the first.", lower_bound=0.0, upper_bound=1.0
)
MAX_TURNS = flags.DEFINE_integer("max_turns", 30, "Assistant turns per rollout.", lower_bound=1)
MAX_RESPONSE_TOKENS = flags.DEFINE_integer("max_response_tokens", None, "Tokens after the prompt; default: the run's.", lower_bound=1)
MAX_PROMPT_TOKENS = flags.DEFINE_integer("max_prompt_tokens", None, "Leave out, and count, longer prompts.", lower_bound=1)
SLOTS = flags.DEFINE_integer("slots", 64, "Rollouts at a time.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the sampling.")
OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "JSON file for the results; default: evaluations/NAME.json in the run's directory.",
)

SHOWN_SKIPPED = 5
FILTER_CANDIDATES = 1024  # most probable tokens that --top_p and --min_p look at
SETTINGS = (
    "samples",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_turns",
    "max_response_tokens",
    "max_prompt_tokens",
    "tools",
    "seed",
    "limit",
)


def main(argv: Sequence[str]) -> None:
    """Validate, evaluate, print the table."""
    del argv
    if not DATASET.value:
        raise UserError("--dataset is missing: give a .jsonl or .parquet file, or a name in --data_dir")
    cli.check_agent(WORKDIR.value, MODEL.value)
    sampling = Sampling(TEMPERATURE.value, TOP_K.value, TOP_P.value, MIN_P.value)
    if not sampling.top_p:
        raise UserError("--top_p=0 leaves no token; give a number above 0, up to 1 for all")
    path, rows = read_dataset()
    output = default_output(path.stem) if OUTPUT.value is None else pathlib.Path(OUTPUT.value)
    cli.check_writable(output)
    from rstar_jax.algorithms.evaluation import summarize  # takes seconds: imported only when there is work to do
    from rstar_jax.recipes import inference, run
    from rstar_jax.recipes.progress import Progress
    from rstar_jax.storage.metrics import finite_or_name, write_atomically

    run.configure_jax()
    trained = inference.load_agent(WORKDIR.value, MODEL.value, CHAT.value)
    result = asyncio.run(
        inference.evaluate_dataset(
            trained,
            rows,
            samples=SAMPLES.value,
            sampling=sampling,
            candidates=max(FILTER_CANDIDATES, sampling.top_k) if sampling.filtered else 0,
            max_turns=MAX_TURNS.value,
            max_response_tokens=MAX_RESPONSE_TOKENS.value or trained.stage.max_response_tokens,
            max_prompt_tokens=MAX_PROMPT_TOKENS.value,
            use_tools=TOOLS.value == "python",
            slots=SLOTS.value,
            seed=SEED.value,
            progress=Progress(),
        )
    )
    summary = summarize(result.groups)
    summary |= {"skipped_rows": float(len(rows.skipped)), "too_long": float(result.too_long)}
    print(table(path.name, len(result.groups), SAMPLES.value, summary))
    content = {
        "dataset": path.name,
        "global_step": trained.position.global_step,
        "settings": {flag: flags.FLAGS[flag].value for flag in SETTINGS},
        "metrics": summary,
        "skipped": [dataclasses.asdict(row) for row in rows.skipped],
    }
    write_atomically(output, [json.dumps(finite_or_name(content), indent=1, allow_nan=False).encode()])
    print(f"results: {output}")


def default_output(dataset: str) -> pathlib.Path:
    """Where results go that --output names no file for."""
    if WORKDIR.value:
        return pathlib.Path(WORKDIR.value) / "evaluations" / f"{dataset}.json"
    return pathlib.Path("evaluations") / f"{pathlib.Path(MODEL.value).stem}_{dataset}.json"


def read_dataset() -> tuple[pathlib.Path, ReadResult]:
    """The file that --dataset names and its problems; rows that are none are named."""
    path = find_dataset(DATASET.value, DATA_DIR.value)
    rows = read_problems(path, limit=LIMIT.value)
    for row in rows.skipped[:SHOWN_SKIPPED]:
        print(f"skipped line {row.line}: {row.reason}")
    if len(rows.skipped) > SHOWN_SKIPPED:
        print(f"skipped {len(rows.skipped) - SHOWN_SKIPPED} more rows")
    return path, rows


def table(name: str, tried: int, samples: int, summary: Mapping[str, float]) -> str:
    """The numbers of an evaluation, one a line; `-` stands for a mean of nothing."""
    lines = [f"{name}: {tried} problem{'s' * (tried != 1)}, {samples} sample{'s' * (samples != 1)} each"]
    interval = "" if math.isnan(summary["accuracy"]) else f"  95 % [{summary['accuracy_low']:.4f}, {summary['accuracy_high']:.4f}]"
    lines.append(f"{f'avg@{samples}':<20}{_cell(summary['accuracy'], 4)}{interval}")
    means = [key for key in summary if key.startswith("pass@") and not key.endswith("_problems")]
    means += ["response_length", "turns", "tool_calls", "tool_error_rate", "tool_error_share"]
    counts = ["unknown", *(key for key in summary if key.startswith("finish/")), "skipped_rows", "too_long"]
    lines += [f"{key:<20}{_cell(summary[key], 4)}" for key in means]
    return "\n".join(lines + [f"{key:<20}{_cell(summary[key], 0)}" for key in counts])


def _cell(value: float, digits: int) -> str:
    return f"{'-':>10}" if math.isnan(value) else f"{value:>10.{digits}f}"


if __name__ == "__main__":
    cli.run(main)
