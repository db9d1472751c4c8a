"""A small finished run on disk, and the pieces it is made of."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence

import pytest

from rstar_jax.config import RunConfig, StageConfig
from rstar_jax.storage.metrics import MetricsWriter
from rstar_jax.storage.trajectories import trajectory_record, write_trajectories
from rstar_jax.types import Finish, Problem, Sampled, ToolRecord, ToolStatus, Trajectory, Verdict


class CharacterTokenizer:
    """One id per character: the code point."""

    vocab_size = 0x110000
    pad_id = 0
    stop_ids = (10,)

    def encode(self, pieces: Sequence[str]) -> list[int]:
        return [ord(character) for piece in pieces for character in piece]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids)


TOKENIZER = CharacterTokenizer()


def rollout(sample: int = 0, question: str = "2+2?", shown: str = "4", problem_id: str = "p:1") -> Trajectory:
    """Prompt `question`, sampled `call`, observed `shown`, sampled `done`; log-probs -1 and -2."""
    trajectory = Trajectory(Problem(problem_id, question, "4", "sums"), sample, TOKENIZER.encode([question]))
    trajectory.append_sampled(Sampled(tuple(TOKENIZER.encode(["call"])), (-1.0,) * 4, Finish.STOP), "call")
    call = ToolRecord("python", {"code": "print(2+2)"}, ToolStatus.ERROR, shown, seconds=0.25, inside_reasoning=True)
    trajectory.append_observed(TOKENIZER.encode([shown]), [call])
    trajectory.append_sampled(Sampled(tuple(TOKENIZER.encode(["done"])), (-1.0, -2.0, -2.0, -3.0), Finish.STOP), "done")
    trajectory.close(Finish.STOP)
    return trajectory


def record(trajectory: Trajectory, stage: str = "rl", step: int = 1, reward: float | None = 1.0) -> dict:
    return trajectory_record(
        trajectory, Verdict(reward, "as expected"), tokenizer=TOKENIZER, stage=stage, step=step, selected=True, advantage=0.5,
        penalties=(0.5, 0.0),
    )  # fmt: skip


def make_run(directory: pathlib.Path, name: str = "toy run", *, seed: int = 0, accuracies: Sequence[float] = (0.4, 0.8)) -> None:
    """Stages sft (4 steps) and rl (6 steps), sampled accuracy after each (+-0.05), rollouts of steps 1, 3 and 6 of rl."""
    config = RunConfig(name, (StageConfig("sft", "sft", 4), StageConfig("rl", "rl", 6)), seed=seed)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    with MetricsWriter(directory, resume_after=None) as writer:
        step_of_run = 0
        for index, stage in enumerate(config.stages):
            for step in range(1, stage.steps + 1):
                step_of_run += 1
                metrics = {"loss": 1.0 / step_of_run} | ({"reward": step / 10} if stage.kind == "rl" else {})
                writer.write(stage.name, index, step, step_of_run, "train", metrics, {"seconds": 0.5})
            accuracy = accuracies[index]
            evaluation = {"sampled/accuracy": accuracy, "sampled/accuracy_low": accuracy - 0.05}
            evaluation |= {"sampled/accuracy_high": accuracy + 0.05, "greedy/accuracy": 0.5, "sampled/tool_calls": 1.25}
            writer.write(stage.name, index, stage.steps, step_of_run, "evaluation", evaluation, {"seconds": 2.0})
            writer.write(stage.name, index, stage.steps, step_of_run, "stage_end", {}, {"seconds": 9.0})
    for step in (1, 3, 6):
        records = [record(rollout(sample, problem_id=f"p:{p}"), step=step, reward=float(sample)) for p in (1, 2) for sample in (0, 1)]
        write_trajectories(directory, "rl", step, records)


@pytest.fixture
def run_directory(tmp_path: pathlib.Path) -> pathlib.Path:
    make_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def new_run() -> Callable[..., None]:
    return make_run


@pytest.fixture
def new_rollout() -> Callable[..., Trajectory]:
    return rollout


@pytest.fixture
def new_record() -> Callable[..., dict]:
    return record
