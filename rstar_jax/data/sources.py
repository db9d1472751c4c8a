"""Prompt sources: endless, indexable streams of problems, so that a position is all that a resume needs."""

from __future__ import annotations

from collections.abc import Sequence

import grain

from rstar_jax.config import DataConfig
from rstar_jax.data.readers import read_problems
from rstar_jax.data.synthetic import ArithmeticProblems
from rstar_jax.types import Problem, PromptSource


class Shuffled:
    """A fixed list of problems in shuffled epochs without end (`types.PromptSource`)."""

    def __init__(self, problems: Sequence[Problem], seed: int):
        self._problems = problems
        self._order = grain.MapDataset.range(len(problems)).seed(seed).shuffle().repeat()

    def __getitem__(self, index: int) -> Problem:
        return self._problems[int(self._order[index])]


def problem_source(config: DataConfig, seed: int, instances: Sequence[Problem] | None = None) -> PromptSource:
    """Training problems: the given instances, the generated family, or a file's rows."""
    if instances is not None:
        return Shuffled(instances, seed + config.seed)
    if config.source == "arithmetic":
        return ArithmeticProblems("train", seed + config.seed)
    return Shuffled(read_problems(config.source).problems, seed + config.seed)


def evaluation_problems(config: DataConfig, count: int) -> list[Problem]:
    """`count` held-out problems, the same for every run's seed, so that runs can be compared."""
    source = ArithmeticProblems("evaluation", config.seed)
    return [source[i] for i in range(count)]
