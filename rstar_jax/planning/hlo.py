"""What a compiled program says of its communication: the collectives in XLA's text of it."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of one kind, as one device sees them.

    `count` instructions of the program have results of `size` bytes together. In one run of the program they are executed `runs`
    times with results of `moved` bytes: an instruction in a loop counts as often as the loop runs, once where XLA does not know.
    """

    count: int = 0
    size: int = 0
    runs: int = 0
    moved: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.count + other.count, self.size + other.size, self.runs + other.runs, self.moved + other.moved)


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf' = ([^"]*?) ({"|".join(KINDS)})(-done)?\(')
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,<=]*)\]")
_CALLED = re.compile(r"\b(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def collectives(text: str) -> dict[str, Traffic]:
    """Kind -> traffic of every kind that occurs in a compiled program's text (`Compiled.as_text()`).

    A pair of -start and -done is one collective, and its result that of the -done. Of a conditional, all branches count.
    """
    found: dict[str, Traffic] = {}
    computations = dict(_computations(text))
    for name, runs in _runs(text, computations).items():
        for line in computations[name]:
            if match := _COLLECTIVE.search(line):
                size = result_bytes(match[1])
                found[match[2]] = found.get(match[2], Traffic()) + Traffic(1, size, runs, runs * size)
    return {kind: found[kind] for kind in KINDS if kind in found}


def result_bytes(shape: str) -> int:
    """Bytes of an HLO shape, of all its elements when it is a tuple: "(bf16[2,3]{1,0}, f32[4])" -> 28."""
    total = 0
    for letters, bits, sizes in _ARRAY.findall(shape):
        width = 8 if letters == "pred" else int(bits or 0)  # token[] and opaque[] hold nothing
        total += -(-math.prod(int(size.removeprefix("<=")) for size in sizes.split(",") if size) * width // 8)
    return total


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    lines: list[str] = []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = []
            yield header[2], lines
        elif " = " in line:
            lines.append(line)


def _runs(text: str, computations: Mapping[str, list[str]]) -> dict[str, int]:
    """How often one run of the program executes each computation that it reaches."""
    entries = [match[2] for line in text.splitlines() if (match := _COMPUTATION.match(line)) and match[1]]
    runs: collections.Counter[str] = collections.Counter()
    waiting = [(name, 1) for name in entries]
    while waiting:
        name, times = waiting.pop()
        runs[name] += times
        for line in computations.get(name, ()):
            trips = _TRIPS.search(line)
            inner = times * int(trips[1]) if trips and " while(" in line else times
            called = _CALLED.findall(line)
            for branches in _BRANCHES.findall(line):
                called += [branch.strip().lstrip("%") for branch in branches.split(",")]
            waiting += [(other, inner) for other in called if other in computations]
    return dict(runs)
