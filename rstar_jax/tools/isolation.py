"""What a tier of isolation does and does not do: plain facts that the launcher prints and a run records."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Isolation:
    """`limits`: what a call cannot do or exceed. `unprotected`: what a hostile program can still reach."""

    tier: str
    limits: tuple[str, ...]
    unprotected: tuple[str, ...]

    def __str__(self) -> str:
        return f"tool isolation: {self.tier} (limits {', '.join(self.limits)}; does NOT protect {', '.join(self.unprotected)})"


RLIMITS = Isolation(
    tier="rlimits",
    limits=(
        "wall time",
        "processor time of each process",
        "address space of each process",
        "output",
        "size of each file",
        "open files",
        "core dumps",
        "environment variables",
        "inherited file descriptors",
        "processes left behind",
    ),
    unprotected=(
        "files that this user can read or write",
        "the network",
        "other processes of this user",
        "the number of processes",
        "the memory of several processes together",
        "disk space",
    ),
)
