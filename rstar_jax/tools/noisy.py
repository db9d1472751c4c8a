"""A tool that fails, stalls and garbles now and then: what a policy meets when the real environment is not clean."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import json
import math
import random
from collections.abc import Mapping
from typing import Any

from rstar_jax.types import Tool, ToolResult, ToolStatus, UserError

GARBLED_SHARE = 0.1  # of the characters of a garbled text

_ERRORS = (
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "BlockingIOError: [Errno 11] Resource temporarily unavailable",
    "OSError: [Errno 28] No space left on device",
    "TimeoutError: the tool server did not answer",
    "RuntimeError: the kernel appears to have died and will restart",
)
_GARBAGE = "".join(map(chr, range(33, 127))) + "\ufffd"


@dataclasses.dataclass(frozen=True)
class NoiseCounts:
    """Calls received, and what was injected into them. A call can be both slow and garbled, or slow and an error."""

    calls: int = 0
    errors: int = 0
    slow: int = 0
    garbled: int = 0


class NoisyTool:
    """`tool` with noise; name, schema and text format are those of `tool`.

    * With probability `p_error` the call is not run, and answered by an `ERROR` whose `stderr` is one of a few exceptions of a
      flaky service. A malformed call can meet it too.
    * With probability `p_slow` the answer, whichever it is, comes `slow_s` seconds later; `seconds` of the result grows by it.
    * With probability `p_garbled` a call that was run has a tenth of the characters of its `stdout` and of its `stderr`, at
      least one of each where there are any, replaced by printable characters or U+FFFD. Newlines stay, and so do the status
      and `value`. It can change digits: a garbled result can be wrong, and not only ugly.

    The three are drawn independently. What a call meets is a function of `seed`, of its arguments (as JSON with sorted keys)
    and of how many calls with the same arguments this object received before; calls with other arguments, and the order in
    which concurrent calls come, do not matter. So a rollout that is repeated with a new object meets the same noise, as long
    as no other rollout makes the very same call; those that do share one sequence of draws. Changing one probability
    leaves the draws of the others as they are. The counts of calls live as long as this object (some 150 bytes for each distinct
    call) and are not part of a checkpoint. Arguments that JSON cannot express all count as the same.

    `InfrastructureError` of `tool` passes through. Raises `UserError` for what is no probability, or no time.
    """

    def __init__(self, tool: Tool, p_error: float, p_slow: float, p_garbled: float, seed: int, slow_s: float = 1.0):
        for name, value in (("p_error", p_error), ("p_slow", p_slow), ("p_garbled", p_garbled)):
            if not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise UserError(f"{name}={value} must be a probability, between 0 and 1")
        if not isinstance(slow_s, (int, float)) or not 0 <= slow_s < math.inf:
            raise UserError(f"slow_s={slow_s} must be a number of seconds, 0 or more")
        self._tool = tool
        self._p_error = p_error
        self._p_slow = p_slow
        self._p_garbled = p_garbled
        self._seed = seed
        self._slow_s = slow_s
        self._repeats: collections.Counter[bytes] = collections.Counter()
        self._counts = NoiseCounts()

    @property
    def name(self) -> str:
        return self._tool.name

    @property
    def schema(self) -> Mapping[str, Any]:
        return self._tool.schema

    @property
    def counts(self) -> NoiseCounts:
        """What happened so far."""
        return self._counts

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """The wrapped tool's answer, with noise. See the class."""
        draw = self._random(arguments)
        error, slow, garbled = (draw.random() < p for p in (self._p_error, self._p_slow, self._p_garbled))
        message = draw.choice(_ERRORS)
        self._count(calls=1, errors=error, slow=slow)
        if error:
            result = ToolResult(ToolStatus.ERROR, stderr=f"{message}\n", exit_code=1)
        else:
            result = await self._tool.call(arguments)
            if garbled:
                clean, result = result, _garbled(result, draw)
                self._count(garbled=result != clean)
        if slow:
            await asyncio.sleep(self._slow_s)
            result = dataclasses.replace(result, seconds=result.seconds + self._slow_s)
        return result

    def format(self, result: ToolResult) -> str:
        return self._tool.format(result)

    def _random(self, arguments: Any) -> random.Random:
        """The random numbers of this call, and of no other."""
        content = _digest(self._seed, _canonical(arguments))
        repeat = self._repeats[content]
        self._repeats[content] += 1
        return random.Random(int.from_bytes(_digest(content.hex(), repeat)))

    def _count(self, **more: int) -> None:
        self._counts = dataclasses.replace(self._counts, **{name: getattr(self._counts, name) + n for name, n in more.items()})


def _canonical(arguments: Any) -> str:
    """The content of the arguments, whatever the order of their keys."""
    try:
        return json.dumps(dict(arguments) if isinstance(arguments, Mapping) else arguments, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return type(arguments).__name__


def _digest(*parts: object) -> bytes:
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=16).digest()


def _garbled(result: ToolResult, draw: random.Random) -> ToolResult:
    return dataclasses.replace(result, stdout=_garble(result.stdout, draw), stderr=_garble(result.stderr, draw))


def _garble(text: str, draw: random.Random) -> str:
    """`text` with `GARBLED_SHARE` of its characters, newlines aside, replaced by others."""
    characters = list(text)
    places = [i for i, character in enumerate(characters) if character != "\n"]
    for i in draw.sample(places, math.ceil(GARBLED_SHARE * len(places))):
        characters[i] = draw.choice([other for other in _GARBAGE if other != characters[i]])
    return "".join(characters)
