"""What a zygote does to itself, once, and to each of its calls, so that a tier's promises hold: the tiers without namespaces (those
with them: `namespaces.py`). Standard library alone.

A `Sandbox` is the tier in use; a `Slot` is a place for one call (or one session) at a time, with a directory and, where the tier
has them, a user and a mount namespace of its own. All that can be inherited is set up in the zygote; a call pays for its fork, a
PID namespace, a change of user and its limits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import resource
import stat
from collections.abc import Callable
from typing import Any

from rstar_jax.tools import landlock, rootfs, seccomp, syscalls

OPEN_FILES = 128
_FIRST_UID, USERS_PER_ZYGOTE = 1 << 30, 1 << 10
_SMALL_RANGE = 60_000  # first user to take where the 2^30s do not exist, as in most user namespaces of containers


class Unavailable(Exception):
    """The tier cannot be had here; the text says why."""


@dataclasses.dataclass
class Slot:
    """A place for one call. `cwd` is its directory, `note` a byte that the call shares with the zygote (see `child.py`)."""

    index: int
    uid: int
    cwd: str
    note: mmap.mmap
    used: bool = False
    mounts: int = -1  # descriptor of its mount namespace
    fresh: tuple[int, ...] = ()  # what its directory looked like when nothing had happened in it
    rules: int = -1  # descriptor of its Landlock rules
    stack: mmap.mmap | None = None  # of its idle first process


@dataclasses.dataclass(frozen=True)
class Forked:
    """`pid` 0: this is the child. `first`: the idle process that holds the call's PID namespace, 0 without one."""

    pid: int
    first: int


class Sandbox:
    """The tier `rlimits`: limits and a clean environment alone. The other tiers build on it."""

    tier = "rlimits"
    has_process_namespace = False

    def __init__(self, settings: dict[str, Any]):
        self.settings = settings
        self.root = os.geteuid() == 0
        self.promises: dict[str, bool] = {}
        self.children = 0  # of the zygote, now

    @property
    def counts_processes(self) -> bool:
        """Whether RLIMIT_NPROC binds: it does for every user but root."""
        return not self.root

    def start(self) -> None:
        """In the keeper, before it forks the zygote. Raises `Unavailable`."""

    # in the zygote, once

    def enter(self) -> None:
        """Before modules are preloaded."""
        self.promises = {"process_count": self.counts_processes}
        os.chdir(self.settings["directory"])

    def seal(self) -> None:
        """After modules are preloaded, before the first call."""

    # in the zygote, for each slot or call

    def slot(self, index: int) -> Slot:
        """A new place."""
        slot = Slot(index, self.user(index), f"{self.settings['directory']}/{index}", new_note())
        self.make_directory(slot)
        return slot

    def user(self, index: int) -> int:
        return os.geteuid()

    def make_directory(self, slot: Slot) -> None:
        os.mkdir(slot.cwd, 0o700)

    def clean(self, slot: Slot, discard: Callable[[str], None]) -> None:
        """Make a slot whose call is dead as good as new. `discard` removes a directory in a process of its own."""
        if slot.used and (stat.S_IMODE(os.stat(slot.cwd).st_mode) != 0o700 or os.listdir(slot.cwd)):
            trash = f"{slot.cwd}.{os.urandom(8).hex()}"
            os.rename(slot.cwd, trash)
            self.make_directory(slot)
            self.forget(slot)
            discard(trash)
        slot.used = False

    def forget(self, slot: Slot) -> None:
        """Its directory is another one now."""

    def fork(self, slot: Slot) -> Forked:
        os.environ["HOME"] = os.environ["TMPDIR"] = slot.cwd  # here: a page that a child writes to has to be copied first
        return Forked(self.fork_with_note(slot), 0)

    def fork_with_note(self, slot: Slot) -> int:
        """Fork a process that shares the note of its own slot and no other: what is shared could be read and forged."""
        syscalls.inherit(slot.note, True)
        pid = syscalls.fork()
        if pid:
            syscalls.inherit(slot.note, False)
        return pid

    # in the child

    def limits(self) -> list[tuple[int, int]]:
        """Resource limits (soft and hard alike) beside those of processor time."""
        settings = self.settings
        limits = [(resource.RLIMIT_AS, settings["memory_bytes"]), (resource.RLIMIT_NOFILE, OPEN_FILES)]
        if self.promises["process_count"]:
            limits.append((resource.RLIMIT_NPROC, self.process_limit()))
        return limits

    def process_limit(self) -> int:
        """Without a user of one's own, others count too: all tasks of the system now, which is at least those of this user, and
        the call's share on top."""
        with open("/proc/loadavg") as file:
            running = int(file.read().split()[3].partition("/")[2])
        return running + int(self.settings["processes"])

    def confine(self, slot: Slot) -> None:
        """Give up what a call may not have."""

    def orphaned(self, zygote: int) -> bool:
        """In the child, after it has asked for a death signal: whether the zygote had died before."""
        return os.getppid() != zygote


class Landlocked(Sandbox):
    """The tier `landlock`: no namespace, no privilege. Root without CAP_SYS_ADMIN, as in a container, gets users of its own."""

    tier = "landlock"

    def start(self) -> None:
        try:
            self.abi = landlock.abi()
        except OSError as error:
            raise Unavailable(f"the kernel has no Landlock ({error})") from None
        if self.abi < 3:
            raise Unavailable(f"this kernel's Landlock (version {self.abi}) does not govern truncation; 3 (Linux 6.2) does")
        try:
            seccomp.program(namespaces=False, alone=False)
        except (OSError, ValueError) as error:
            raise Unavailable(str(error)) from None
        sites = self.settings["sites"]
        self.rules = [(path, landlock.READ) for path in rootfs.resolve([*self.settings["trees"], *rootfs.ETC])[1]]
        self.rules += [(site, landlock.LIST) for site in sites]
        self.rules += [(f"{site}/{name}", landlock.READ) for site, names in sites.items() for name in names]
        self.own_user = self.root and syscalls.has_capability(syscalls.CAP_SETUID)
        self.first_uid = first_user(self.settings["number"]) if self.own_user else 0
        self.read_anything = self.own_user and not all(_everyone_reads(path) for path, _ in self.rules)

    @property
    def counts_processes(self) -> bool:
        return self.own_user or not self.root

    def enter(self) -> None:
        super().enter()
        if self.own_user:
            for path in (self.settings["directory"], os.path.dirname(self.settings["directory"])):
                os.chmod(path, 0o711)
        self.promises |= dict.fromkeys(("file_reads", "file_writes", "network", "syscalls"), True)
        self.promises |= {"processes": self.abi >= 6, "user": self.own_user}

    def seal(self) -> None:
        seccomp.load(namespaces=False, alone=self.own_user)  # a user of one's own owns no file of others

    def user(self, index: int) -> int:
        return self.first_uid + index if self.own_user else os.geteuid()

    def make_directory(self, slot: Slot) -> None:
        super().make_directory(slot)
        if self.own_user:
            os.chown(slot.cwd, slot.uid, slot.uid)

    def forget(self, slot: Slot) -> None:
        if slot.rules >= 0:
            os.close(slot.rules)
        slot.rules = -1

    def fork(self, slot: Slot) -> Forked:
        if slot.rules < 0:
            devices = [(path, landlock.DEVICE) for path in rootfs.DEVICES]
            slot.rules = landlock.ruleset(self.abi, [*self.rules, *devices, (slot.cwd, landlock.OWN)])
        return super().fork(slot)

    def process_limit(self) -> int:
        return int(self.settings["processes"]) if self.own_user else super().process_limit()

    def confine(self, slot: Slot) -> None:
        keep = 1 << syscalls.CAP_DAC_READ_SEARCH if self.read_anything else 0
        if self.own_user:
            if keep:  # to read an interpreter that lies below a closed directory; Landlock says what else can be read: nothing
                syscalls.prctl(syscalls.PR_SET_KEEPCAPS, 1)
            become(slot.uid)
        if self.root:
            syscalls.set_capabilities(keep)
            if keep:
                syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_RAISE, syscalls.CAP_DAC_READ_SEARCH)
        landlock.restrict(slot.rules)


def new_note() -> mmap.mmap:
    """A page that a process and its fork can share, and that no fork has unless it is told to."""
    note = mmap.mmap(-1, mmap.PAGESIZE)
    syscalls.inherit(note, False)
    return note


def become(uid: int) -> None:
    """Be the user `uid`, and of no group but that of the same number."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # it may read its own /proc entry, which would be root's


def first_user(number: int) -> int:
    """The first user id of the zygote with this number: far above those that people have, or as high as this namespace goes."""
    with open("/proc/self/uid_map") as file:
        ranges = [(int(inside), int(count)) for inside, _, count in map(str.split, file)]
    for first, room in ((_FIRST_UID, 1 << 20), (_SMALL_RANGE, 5)):
        for inside, count in ranges:
            last = first + room * USERS_PER_ZYGOTE
            if inside <= first and last <= inside + count:
                return first + number % room * USERS_PER_ZYGOTE
    raise Unavailable(f"there are no user ids {_SMALL_RANGE} to {_SMALL_RANGE + 5 * USERS_PER_ZYGOTE} to take here")


def _everyone_reads(path: str) -> bool:
    """Whether `path` can be reached and read by a user who is nobody's."""
    while path != "/":
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(path).st_mode
            wanted = 0o5 if stat.S_ISDIR(mode) else 0o4
            if mode & wanted != wanted:
                return False
        path = os.path.dirname(path)
    return True
