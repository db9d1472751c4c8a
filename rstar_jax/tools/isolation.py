"""What a tier of isolation promises: plain facts that the launcher prints, a run records and the pool's self-test checks."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Isolation:
    """Each field is a promise: True when it is kept for every call in this tier on this machine.

    Kept in every tier, and so no fields: wall and processor time, address space of each process, output, size of each file, open
    files, an environment and file descriptors without anything of the trainer's, no process left behind.
    """

    tier: str
    file_reads: bool = False  # nothing can be read but the interpreter, the allowed packages and the call's own directory
    file_writes: bool = False  # nothing can be written but the call's own directory
    network: bool = False  # no internet socket, loopback included; no unix socket that lies outside, named or abstract
    processes: bool = False  # no process outside the call can be seen, signalled or traced
    process_tree: bool = False  # the kernel ends all that a call has started, at once
    process_count: bool = False  # the number of processes is bounded
    memory: bool = False  # the memory of all processes of all calls together is bounded (control group)
    disk: bool = False  # bytes and files in the call's directory are bounded
    user: bool = False  # a user of its own
    syscalls: bool = False  # a filter refuses system calls that a program for calculations has no use for

    @property
    def promises(self) -> tuple[str, ...]:
        """Names of the promises that are kept."""
        return tuple(name for name in PROMISES if getattr(self, name))

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the promises that are not kept."""
        return tuple(name for name in PROMISES if not getattr(self, name))

    def __str__(self) -> str:
        does = f"isolates {', '.join(self.promises)}" if self.promises else "isolates nothing"
        lacks = f"; does NOT isolate {', '.join(self.missing)}" if self.missing else ""
        return f"tool isolation: {self.tier} ({does}{lacks})"


PROMISES = tuple(field.name for field in dataclasses.fields(Isolation) if field.name != "tier")
