"""The values that pass between rooms, and the protocols that rooms meet each other through (floor 0).

Everything here is plain data. The laws that the rest of the code keeps are stated where the value is defined:

* a `Trajectory` is a list of token ids that existed. It grows by `append_sampled` and `append_observed` only; nothing is
  decoded and encoded again;
* whether a token is trained on is decided by *how it was appended*, never by its value;
* losses travel as `Sums` (numerators and counts), and are divided once.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

Array = jax.Array | np.ndarray


class UserError(Exception):
    """What the user gave cannot work. The message is one line: what was wrong, and what would be right."""


class InfrastructureError(Exception):
    """The machinery failed (a worker died, a socket broke): never shown to the model, never scored."""


# --- problems and verdicts -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Problem:
    """One question with its reference answer.

    `id` identifies the item (two items may have the same text). `answer` is the reference in plain text, None when the
    reward needs none. `family` groups problems in reports. `expert` holds expert decisions for SRL (see `text/steps.py`).
    `metadata` is carried along untouched.
    """

    id: str
    question: str
    answer: str | None = None
    family: str = ""
    expert: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a reward says of a trajectory. `value` None means *unknown* (the verifier failed): the trajectory leaves its
    group's statistics; it is not a zero."""

    value: float | None
    reason: str = ""


# --- the tool --------------------------------------------------------------------------------------------------------


class ToolStatus(enum.StrEnum):
    """How a tool call ended. `REJECTED`: the call itself was malformed and nothing ran. `INFRA_ERROR`: our machinery failed;
    such a call is retried and never reaches the model."""

    OK = "ok"
    ERROR = "error"
    EXIT = "exit"
    TIMEOUT = "timeout"
    CPU_LIMIT = "cpu_limit"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    SIGNAL = "signal"
    REJECTED = "rejected"
    INFRA_ERROR = "infra_error"


@dataclasses.dataclass(frozen=True)
class ToolResult:
    """One finished call. `seconds` is run time from the start of execution, not queue time; `exit_code` comes from the
    kernel (negative: signal number). `value` carries a tool's structured result when it has one. `state`, of a session: "" when
    its variables are as the last call left them, "lost" or "diverged" (see `tools.session`)."""

    status: ToolStatus
    stdout: str = ""
    stderr: str = ""
    value: Any = None
    exit_code: int | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    truncated: bool = False
    state: str = ""


@dataclasses.dataclass(frozen=True)
class ToolRecord:
    """What a trajectory keeps of one tool call: `shown` is the text the model saw. `executed` is False for calls that were
    answered without running (malformed, over the parallel limit, no budget left). `status` None: never answered."""

    name: str
    arguments: Mapping[str, Any] | str
    status: ToolStatus | None
    shown: str = ""
    seconds: float = 0.0
    executed: bool = True
    inside_reasoning: bool = False

    @property
    def is_error(self) -> bool:
        """True for every call that was answered with something other than success."""
        return self.status is not None and self.status is not ToolStatus.OK


# --- trajectories ----------------------------------------------------------------------------------------------------


class Finish(enum.StrEnum):
    """Why sampling stopped (`STOP`, `LENGTH`) or why a trajectory ended (the rest)."""

    STOP = "stop"  # a stop id was sampled; of a trajectory: the last turn held no tool call
    LENGTH = "length"  # the token budget ended inside a turn
    TURNS = "turns"  # the last allowed turn asked for a tool
    OBSERVATION = "observation"  # the tool's answer would not fit in the token budget
    FAILED = "failed"  # infrastructure failed; the verdict is unknown


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Tokens sampled in one turn: `ids` [n] with the log-probs [n] (nats) of the distribution they were drawn from, and the
    weight version that produced each. The stop id, when one ended the turn, is the last id."""

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    finish: Finish
    version: int = 0


@dataclasses.dataclass(frozen=True)
class Turn:
    """One assistant turn: tokens [start, stop) of the trajectory, its text (decoded once), and its tool calls."""

    start: int
    stop: int
    text: str
    finish: Finish
    calls: tuple[ToolRecord, ...] = ()


class Trajectory:
    """Append-only record of one rollout: `ids` [n], and for each token whether it was sampled, its log-prob (NaN for observed
    tokens) and its weight version (-1 for observed tokens).

    The prompt is the first observed block. `append_sampled` and `append_observed` are the only ways to add a token.
    """

    def __init__(self, problem: Problem, sample: int, prompt_ids: Sequence[int]):
        if not len(prompt_ids):
            raise ValueError("a trajectory starts from a prompt of at least one token")
        self.problem = problem
        self.sample = sample
        self.prompt_length = len(prompt_ids)
        self.finish: Finish | None = None
        self._ids: list[int] = [int(i) for i in prompt_ids]
        self._sampled: list[bool] = [False] * len(prompt_ids)
        self._logps: list[float] = [float("nan")] * len(prompt_ids)
        self._versions: list[int] = [-1] * len(prompt_ids)
        self._turns: list[Turn] = []
        self._experts: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> np.ndarray:
        """Token ids [n] int32, a copy."""
        return np.asarray(self._ids, np.int32)

    @property
    def trainable(self) -> np.ndarray:
        """[n] bool: True where the token was sampled."""
        return np.asarray(self._sampled, bool)

    @property
    def logps(self) -> np.ndarray:
        """[n] float32 nats; NaN where the token was observed."""
        return np.asarray(self._logps, np.float32)

    @property
    def versions(self) -> np.ndarray:
        """[n] int32 weight versions; -1 where the token was observed."""
        return np.asarray(self._versions, np.int32)

    @property
    def experts(self) -> np.ndarray | None:
        """[n, L, k] int16: the experts that each of L layers used for a token; -1 for tokens that were never fed to the model, such
        as the last. None for a model without experts."""
        if self._experts is None:
            return None
        unknown = np.full((len(self._ids) - len(self._experts), *self._experts.shape[1:]), -1, np.int16)
        return np.concatenate([self._experts, unknown])

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    @property
    def calls(self) -> tuple[ToolRecord, ...]:
        """All tool calls of all turns, in order."""
        return tuple(call for turn in self._turns for call in turn.calls)

    @property
    def response_length(self) -> int:
        """Tokens after the prompt, sampled and observed alike (the budget of the papers counts both)."""
        return len(self._ids) - self.prompt_length

    @property
    def sampled_length(self) -> int:
        return sum(self._sampled)

    @property
    def text(self) -> str:
        """The sampled text of all turns, joined by newlines; what the tool printed is not in it."""
        return "\n".join(turn.text for turn in self._turns)

    def _open(self) -> None:
        if self.finish is not None:
            raise ValueError(f"the trajectory has ended ({self.finish}); nothing can be appended")

    def append_sampled(self, sampled: Sampled, text: str) -> None:
        """Append the ids of one sampled turn, with its text decoded once from exactly these ids."""
        self._open()
        if len(sampled.ids) != len(sampled.logps):
            raise ValueError(f"{len(sampled.ids)} sampled ids came with {len(sampled.logps)} log-probs")
        start = len(self._ids)
        self._ids.extend(int(i) for i in sampled.ids)
        self._sampled.extend([True] * len(sampled.ids))
        self._logps.extend(float(x) for x in sampled.logps)
        self._versions.extend([sampled.version] * len(sampled.ids))
        self._turns.append(Turn(start, len(self._ids), text, sampled.finish))

    def append_observed(self, ids: Sequence[int], calls: Sequence[ToolRecord] = ()) -> None:
        """Append ids that the model did not sample (a tool's answer and the next header), with the records of the calls of
        the last turn that they answer. `ids` may be empty when the answer did not fit."""
        self._open()
        if calls and not self._turns:
            raise ValueError("tool records belong to a sampled turn, and nothing has been sampled yet")
        self._ids.extend(int(i) for i in ids)
        self._sampled.extend([False] * len(ids))
        self._logps.extend([float("nan")] * len(ids))
        self._versions.extend([-1] * len(ids))
        if calls:
            last = self._turns[-1]
            self._turns[-1] = dataclasses.replace(last, calls=last.calls + tuple(calls))

    def record_experts(self, experts_nlk: np.ndarray | None) -> None:
        """What the tokens that were fed to the model were routed to, from the first on (`Slot.experts`)."""
        if experts_nlk is not None and len(experts_nlk) > len(self._ids):
            raise ValueError(f"experts of {len(experts_nlk)} tokens came with a trajectory of {len(self._ids)}")
        self._experts = experts_nlk

    def close(self, finish: Finish) -> None:
        """End the trajectory; nothing can be appended after it."""
        self._open()
        self.finish = finish


@dataclasses.dataclass(frozen=True)
class Group:
    """All rollouts of one problem in one step, with one verdict each (same order)."""

    problem: Problem
    trajectories: tuple[Trajectory, ...]
    verdicts: tuple[Verdict, ...]

    def __post_init__(self) -> None:
        if len(self.trajectories) != len(self.verdicts):
            raise ValueError(f"{len(self.trajectories)} trajectories came with {len(self.verdicts)} verdicts")

    def rewards(self) -> np.ndarray:
        """[n] float64; NaN where the verdict is unknown."""
        return np.asarray([np.nan if v.value is None else v.value for v in self.verdicts], np.float64)

    def take(self, indices: Sequence[int]) -> Group:
        """The same problem with the chosen rollouts, in the order of `indices`."""
        return Group(self.problem, tuple(self.trajectories[i] for i in indices), tuple(self.verdicts[i] for i in indices))


# --- what crosses to the device --------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """Rows of token sequences for one update, padded on the right. B rows, T tokens.

    Token-aligned: entry t speaks of token t itself; its log-prob comes from the hidden state at t - 1. Masked entries of any
    float field may hold NaN.
    """

    tokens_bt: Array  # int32 [B, T]
    positions_bt: Array  # int32 [B, T], counted from 0 within each sequence
    segments_bt: Array  # int32 [B, T], 0 = padding, 1.. = the sequence within the row (the attention mask)
    trainable_bt: Array  # bool [B, T], True where the token was sampled and its row is live (the loss mask)
    advantage_bt: Array  # float32 [B, T], constant over a sequence
    old_logp_bt: Array  # float32 [B, T], log-probs that the ratio is taken against
    sampler_logp_bt: Array  # float32 [B, T], log-probs reported by the engine
    experts_btlk: Array | None = None  # int16 [B, T, L, k], experts to route to again in each of L layers; -1 leaves it to the router
    reference_logp_bt: Array | None = None  # float32 [B, T], log-probs under the reference policy of a divergence

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tokens_bt.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Named numerators with their counts. Adding two `Sums` adds both; `means` divides once, at the very end."""

    values: Mapping[str, Array]
    counts: Mapping[str, Array]

    def __add__(self, other: Sums) -> Sums:
        if self.values.keys() != other.values.keys():
            raise ValueError(f"sums of {sorted(self.values)} and of {sorted(other.values)} do not add")
        return Sums(
            {k: self.values[k] + other.values[k] for k in self.values},
            {k: self.counts[k] + other.counts[k] for k in self.counts},
        )

    def means(self) -> dict[str, float]:
        """Each numerator over its count; 0 where nothing was counted. Reads device values: call it once a step."""
        values, counts = jax.device_get((dict(self.values), dict(self.counts)))
        return {k: float(values[k]) / float(counts[k]) if float(counts[k]) else 0.0 for k in values}


# --- protocols between rooms -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: from p = softmax(logits / temperature), renormalised over the tokens that pass every filter;
    temperature 0 is argmax. `top_k` (0: off) keeps the k most probable, `top_p` the most probable until their sum reaches it, and
    `min_p` those at least that fraction as probable as the first. The most probable token always passes."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def filtered(self) -> bool:
        """Whether any filter is on."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclasses.dataclass(frozen=True)
class SampleKey:
    """What a trajectory's random draws depend on, beside the position: nothing else may enter."""

    seed: int
    step: int
    prompt: int
    sample: int


@dataclasses.dataclass(frozen=True)
class SlotSpan:
    """What a slot did from `start` to `stop` (seconds of a monotonic clock), for which prompt and rollout: `what` is "sample", "tool"
    (its trajectory waits for an observation) or "idle" (placed, nothing asked yet)."""

    pool: int
    index: int
    what: str
    prompt: int
    sample: int
    start: float
    stop: float


class Slot(Protocol):
    """One trajectory's place in the engine: its KV cache and its random key."""

    async def generate(self, max_new_tokens: int, stop: Sequence[str] = ()) -> Sampled:
        """Sample until a stop id, until the text holds one of `stop`, or `max_new_tokens`."""
        ...

    async def append(self, ids: Sequence[int]) -> None:
        """Append observed ids behind what the slot holds."""
        ...

    def experts(self) -> np.ndarray | None:
        """[n, L, k] int16: what the tokens fed so far were routed to; None for a model without experts."""
        ...

    def close(self) -> None:
        """Give the slot back. Calling it twice is harmless."""
        ...


class Engine(Protocol):
    """Ids in, ids out: the engine never sees text."""

    async def open(self, prompt_ids: Sequence[int], key: SampleKey, sampling: Sampling, longest: int | None = None) -> Slot:
        """Wait for a free slot, place the prompt in it. `longest`: tokens that the trajectory may come to hold (None: as many as a
        slot takes). Raises `UserError` when the prompt cannot fit."""
        ...


@runtime_checkable
class Tool(Protocol):
    """A tool that a model may call. `schema` is the JSON-schema function description shown to the model."""

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> Mapping[str, Any]: ...

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Run one call. Bad arguments give status `REJECTED` with the reason in `stderr`; never raises for what the model
        wrote. Raises `InfrastructureError` when the call could not be run at all, after the tool's own retries."""
        ...

    def format(self, result: ToolResult) -> str:
        """The text that the model sees. It holds no clock reading."""
        ...


@runtime_checkable
class SessionTool(Protocol):
    """A tool that keeps something from one call of a trajectory to the next. Such a tool is opened once for each trajectory."""

    def session(self) -> AbstractAsyncContextManager[Tool]:
        """The tool of one trajectory; what it keeps is gone at the end of the context."""
        ...


class Marker(str):
    """A piece of a chat template that is control text (`<|im_start|>`, `<tool_call>`): encoded as its special token where
    the tokenizer has one. Plain `str` pieces are content, and never become special tokens whatever they contain."""

    __slots__ = ()


class Tokenizer(Protocol):
    """Text to ids and back. `vocab_size` counts every id that `encode` can return."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every id that ends a turn (there may be several)."""
        ...

    def encode(self, pieces: Sequence[str]) -> list[int]:
        """Ids of a sequence of `Marker` and plain pieces; neighbouring plain pieces are encoded as one text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        ...


Reward = Callable[[Problem, Trajectory], Awaitable[Verdict]]
"""Scores one finished trajectory."""


class PromptSource(Protocol):
    """An endless, indexable stream of problems: item i is always the same, so that a position is all a resume needs."""

    def __getitem__(self, index: int) -> Problem: ...


class WorkQueue(Protocol):
    """Hands out the indices of the groups of a step; on several hosts, from a shared counter."""

    async def next(self) -> int | None:
        """The next group's index, or None when the step has no more."""
        ...
