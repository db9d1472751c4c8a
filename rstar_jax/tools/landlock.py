"""Landlock: a process gives up, for itself and its children, access to files, TCP, abstract unix sockets and signals.

Unprivileged, and so the tier for containers without namespaces. What it can govern depends on the kernel (`abi`): 1 (5.13) files,
3 truncation, 4 TCP, 5 device ioctls, 6 (6.12) signals and abstract unix sockets.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from rstar_jax.tools import syscalls

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _MAKE_CHAR, _MAKE_BLOCK = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 6, 1 << 11
_IOCTL_DEV = 1 << 15
_FS_BITS = {1: 13, 2: 14, 3: 15, 4: 15}  # rights known by ABI; 5 and later: 16
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | _IOCTL_DEV
_CREATE_VERSION, _PATH_BENEATH = 1, 1

LIST = _READ_DIR  # names alone
READ = _EXECUTE | _READ_FILE | _READ_DIR
DEVICE = _READ_FILE | _WRITE_FILE
OWN = (1 << 15) - 1 & ~_MAKE_CHAR & ~_MAKE_BLOCK  # everything but device nodes


def abi() -> int:
    """The kernel's Landlock version. Raises `OSError` where there is none."""
    return syscalls.syscall("landlock_create_ruleset", None, 0, _CREATE_VERSION)


def ruleset(version: int, rules: Iterable[tuple[str, int]]) -> int:
    """A file descriptor of rules: all that `version` governs is refused but the given rights at and below each path. Paths that
    do not exist are left out."""
    handled = (1 << _FS_BITS.get(version, 16)) - 1
    attributes = handled.to_bytes(8, "little")
    if version >= 4:
        attributes += (3).to_bytes(8, "little")  # bind and connect of TCP
    if version >= 6:
        attributes += (3).to_bytes(8, "little")  # abstract unix sockets and signals
    fd = syscalls.syscall("landlock_create_ruleset", attributes, len(attributes), 0)
    for path, rights in rules:
        with contextlib.suppress(FileNotFoundError):
            _add(fd, path, rights & handled)
    return fd


def _add(fd: int, path: str, rights: int) -> None:
    at = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= _OF_FILES
        rule = rights.to_bytes(8, "little") + at.to_bytes(4, "little")
        syscalls.syscall("landlock_add_rule", fd, _PATH_BENEATH, rule, 0)
    finally:
        os.close(at)


def domain_only(version: int) -> int:
    """Rules that refuse next to nothing. Who restricts itself by them is still apart: processes of another domain cannot trace it."""
    attributes = _MAKE_BLOCK.to_bytes(8, "little") if version < 6 else bytes(16) + (3).to_bytes(8, "little")
    return syscalls.syscall("landlock_create_ruleset", attributes, len(attributes), 0)


def restrict(fd: int) -> None:
    """Live by the rules from here on. `no_new_privs` must be set."""
    syscalls.syscall("landlock_restrict_self", fd, 0)
