"""What a zygote does to itself, once, and to each of its calls, so that a tier's promises hold. Standard library alone.

A `Sandbox` is the tier in use; a `Slot` is a place for one call (or one session) at a time, with a directory and, where the tier
has them, a user and a mount namespace of its own. All that can be inherited is set up in the zygote; a call pays for its fork, a
PID namespace, a change of user and its limits.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
import os
import resource
import stat
from collections.abc import Callable, Iterator
from typing import Any

from rstar_jax.tools import landlock, rootfs, seccomp, syscalls
from rstar_jax.tools.syscalls import CLONE_NEWIPC, CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWUSER, CLONE_NEWUTS

OPEN_FILES = 128
_IDLE_STACK = 16 << 10
_INNER_ID = 1000  # in a user namespace, of the user who made it
_FIRST_INNER_ID = 2000  # and of the slots, where they have users of their own
_FIRST_UID, _UIDS_PER_ZYGOTE = 1 << 30, 1 << 10
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
        slot = Slot(index, self.user(index), f"{self.settings['directory']}/{index}", _new_note())
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
        capabilities = syscalls.effective_capabilities()
        self.own_user = self.root and capabilities >> syscalls.CAP_SETUID & 1 == 1
        self.uid_base = _uid_base(self.settings["number"]) if self.own_user else 0
        self.read_anything = self.own_user and not all(map(_everyone_reads, self.readable()))

    def readable(self) -> list[str]:
        trees = rootfs.resolve([*self.settings["trees"], *rootfs.ETC])[1]
        sites = self.settings["sites"]
        return [*trees, *sites, *(f"{site}/{name}" for site, names in sites.items() for name in names)]

    @property
    def counts_processes(self) -> bool:
        return self.own_user or not self.root

    def enter(self) -> None:
        super().enter()
        if self.own_user:
            for path in (self.settings["directory"], os.path.dirname(self.settings["directory"])):
                os.chmod(path, 0o711)
        modern = self.abi >= 6
        self.promises |= {
            "file_reads": True,
            "file_writes": True,
            "network": True,
            "processes": modern,
            "syscalls": True,
            "user": self.own_user,
        }

    def seal(self) -> None:
        trees, sites = self.settings["trees"], self.settings["sites"]
        self.rules = [(path, landlock.READ) for path in rootfs.resolve([*trees, *rootfs.ETC])[1]]
        self.rules += [(site, 1 << 3) for site in sites]  # its list alone
        self.rules += [(f"{site}/{name}", landlock.READ) for site, names in sites.items() for name in names]
        self.rules += [(path, landlock.DEVICE) for path in rootfs.DEVICES]
        seccomp.load(namespaces=False, alone=self.own_user)  # a user of one's own owns no file of others

    def user(self, index: int) -> int:
        return self.uid_base + index if self.own_user else os.geteuid()

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
            slot.rules = landlock.ruleset(self.abi, [*self.rules, (slot.cwd, landlock.OWN)])
        return super().fork(slot)

    def process_limit(self) -> int:
        return int(self.settings["processes"]) if self.own_user else super().process_limit()

    def confine(self, slot: Slot) -> None:
        keep = 1 << syscalls.CAP_DAC_READ_SEARCH if self.read_anything else 0
        if self.own_user:
            if keep:  # to read an interpreter that lies below a closed directory; Landlock says what else can be read: nothing
                syscalls.prctl(syscalls.PR_SET_KEEPCAPS, 1)
            _become(slot.uid)
        if self.root:
            syscalls.set_capabilities(keep)
            if keep:
                syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_RAISE, syscalls.CAP_DAC_READ_SEARCH)
        landlock.restrict(slot.rules)


class Namespaced(Sandbox):
    """What `ns-root` and `userns` have in common: a root of its own, empty network, a PID namespace for each call."""

    has_process_namespace = True
    namespaces = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS

    def start(self) -> None:
        try:
            seccomp.program(namespaces=True, alone=True)
            self.unshare()
        except (OSError, ValueError) as error:
            raise Unavailable(str(error)) from None

    def unshare(self) -> None:
        syscalls.unshare(self.namespaces)

    def enter(self) -> None:
        self.pid = os.getpid()
        # Calls of one zygote share its network, where abstract unix sockets live, and may share a user: domains keep them apart.
        try:
            self.rules = landlock.domain_only(landlock.abi())
        except OSError:
            self.rules = -1
        host = os.open("/proc/self", os.O_PATH | os.O_CLOEXEC)
        self.processes = os.open("ns/pid", os.O_RDONLY | os.O_CLOEXEC, dir_fd=host)
        sources = rootfs.Sources.open(self.settings["trees"], self.settings["sites"])
        rootfs.build(sources, self.settings["cover"], self.shows_processes())
        sources.close()
        self.host = host
        self.base = self.mounts()
        os.environ["HOME"] = os.environ["TMPDIR"] = rootfs.BOX
        os.chdir("/")
        names = ("file_reads", "file_writes", "network", "processes", "process_tree", "process_count", "disk", "syscalls", "user")
        self.promises = dict.fromkeys(names, True)

    def shows_processes(self) -> bool:
        """Whether calls get a `/proc`."""
        return True

    def mounts(self) -> int:
        """A descriptor of the mount namespace that this process is in now."""
        return os.open("ns/mnt", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.host)

    def seal(self) -> None:
        seccomp.load(namespaces=True, alone=True)

    def slot(self, index: int) -> Slot:
        slot = Slot(index, self.user(index), rootfs.BOX, _new_note())
        # Private, and in no child: who could write to it would decide what the idle process does when it wakes.
        slot.stack = mmap.mmap(-1, _IDLE_STACK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        syscalls.inherit(slot.stack, False)
        syscalls.setns(self.base, CLONE_NEWNS)
        syscalls.unshare(CLONE_NEWNS)
        slot.mounts = self.mounts()
        self.make_directory(slot)
        return slot

    def make_directory(self, slot: Slot) -> None:
        rootfs.mount_box(self.settings["disk_bytes"], self.settings["disk_files"], slot.uid)
        slot.fresh = self.look()

    @staticmethod
    def look() -> tuple[int, ...]:
        """What would be different if a call had left anything in `/box`."""
        entry = os.stat(rootfs.BOX)
        return (entry.st_mode, entry.st_uid, entry.st_gid, entry.st_ctime_ns, os.statvfs(rootfs.BOX).f_ffree)

    def clean(self, slot: Slot, discard: Callable[[str], None]) -> None:
        if slot.used:
            syscalls.setns(slot.mounts, CLONE_NEWNS)
            if self.look() != slot.fresh:
                syscalls.unmount(rootfs.BOX)
                self.make_directory(slot)
        slot.used = False

    def fork(self, slot: Slot) -> Forked:
        syscalls.setns(slot.mounts, CLONE_NEWNS)
        syscalls.unshare(CLONE_NEWPID)
        first = 0
        try:
            assert slot.stack is not None
            first = syscalls.start_idle_process(ctypes.addressof(ctypes.c_char.from_buffer(slot.stack)) + _IDLE_STACK)
            return Forked(self.fork_with_note(slot), first)
        except BaseException:
            if first:
                os.kill(first, 9)
                os.waitpid(first, 0)
            raise
        finally:
            if os.getpid() == self.pid:
                syscalls.setns(self.processes, CLONE_NEWPID)

    def set_apart(self) -> None:
        """In the child, where the kernel has Landlock: no signal to, no trace of, no abstract socket of another call."""
        if self.rules >= 0:
            landlock.restrict(self.rules)

    def process_limit(self) -> int:
        return int(self.settings["processes"])

    def orphaned(self, zygote: int) -> bool:
        return False  # a PID namespace below the zygote's ends with it


class Privileged(Namespaced):
    """The tier `ns-root`: needs CAP_SYS_ADMIN; each slot has a user of its own."""

    tier = "ns-root"

    def start(self) -> None:
        if not syscalls.effective_capabilities() >> syscalls.CAP_SYS_ADMIN & 1:
            raise Unavailable("it needs CAP_SYS_ADMIN")
        self.uid_base = _uid_base(self.settings["number"])
        super().start()

    def user(self, index: int) -> int:
        return self.uid_base + index

    def confine(self, slot: Slot) -> None:
        _become(slot.uid)
        self.set_apart()


class Unprivileged(Namespaced):
    """The tier `userns`: needs nothing but a kernel that lets users make user namespaces. All slots have one user; those of root, who
    may map others, have one each."""

    tier = "userns"
    namespaces = Namespaced.namespaces | CLONE_NEWUSER

    def unshare(self) -> None:
        self.own_user = self.root and syscalls.effective_capabilities() >> syscalls.CAP_SETUID & 1 == 1
        uid, gid = os.geteuid(), os.getegid()
        if self.own_user:
            base = _uid_base(self.settings["number"])
            slots = f"\n{_FIRST_INNER_ID} {base} {_UIDS_PER_ZYGOTE}"
            with _helper({"uid_map": f"{_INNER_ID} {uid} 1{slots}", "gid_map": f"{_INNER_ID} {gid} 1{slots}"}):
                syscalls.unshare(self.namespaces)
        else:
            syscalls.unshare(self.namespaces)
            _write_maps("self", {"setgroups": "deny", "uid_map": f"{_INNER_ID} {uid} 1", "gid_map": f"{_INNER_ID} {gid} 1"})

    def enter(self) -> None:
        super().enter()
        self.promises |= {"user": self.own_user, "process_count": self.own_user or not self.root}

    def shows_processes(self) -> bool:
        return self.own_user or self.rules >= 0

    def user(self, index: int) -> int:
        return _FIRST_INNER_ID + index if self.own_user else _INNER_ID

    def process_limit(self) -> int:
        if self.own_user:
            return super().process_limit()
        return int(self.settings["processes"]) + 2 * self.children + 3  # with those of other calls, the zygote and the keeper

    def confine(self, slot: Slot) -> None:
        if self.own_user:
            _become(slot.uid)
        else:
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # calls with one user cannot look at each other's memory
        syscalls.set_capabilities(0)
        self.set_apart()


def _new_note() -> mmap.mmap:
    note = mmap.mmap(-1, mmap.PAGESIZE)
    syscalls.inherit(note, False)
    return note


SANDBOXES: dict[str, type[Sandbox]] = {kind.tier: kind for kind in (Privileged, Unprivileged, Landlocked, Sandbox)}


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # it may read its own /proc entry, which would be root's


def _write_maps(process: str, files: dict[str, str]) -> None:
    for name, content in files.items():
        with open(f"/proc/{process}/{name}", "w") as file:
            file.write(content)


@contextlib.contextmanager
def _helper(maps: dict[str, str]) -> Iterator[None]:
    """After the body, which makes a user namespace, write its maps from outside: only there does root have the right to map others."""
    process = str(os.getpid())
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(write_end)
            if os.read(read_end, 1):
                _write_maps(process, maps)
                code = 0
        finally:
            os._exit(code)
    os.close(read_end)
    try:
        yield
        os.write(write_end, b"x")
    finally:
        os.close(write_end)
        _, status = os.waitpid(pid, 0)
    if status:
        raise OSError("the users of the calls could not be mapped into the user namespace")


def _uid_base(number: int) -> int:
    """The first user id of the zygote with this number: far above those that people have, or as high as this namespace goes."""
    with open("/proc/self/uid_map") as file:
        ranges = [(int(inside), int(count)) for inside, _, count in map(str.split, file)]
    for first, room in ((_FIRST_UID, 1 << 20), (_SMALL_RANGE, 5)):
        for inside, count in ranges:
            last = first + room * _UIDS_PER_ZYGOTE
            if inside <= first and last <= inside + count:
                return first + number % room * _UIDS_PER_ZYGOTE
    raise Unavailable(f"there are no user ids {_SMALL_RANGE} to {_SMALL_RANGE + 5 * _UIDS_PER_ZYGOTE} to take here")


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
