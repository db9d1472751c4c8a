"""The tiers with namespaces: a root directory, a network and, for each call, a PID namespace of its own. Standard library alone."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
from collections.abc import Callable, Iterator

from rstar_jax.tools import landlock, rootfs, seccomp, syscalls
from rstar_jax.tools.sandbox import USERS_PER_ZYGOTE, Forked, Landlocked, Sandbox, Slot, Unavailable, become, first_user, new_note
from rstar_jax.tools.syscalls import CLONE_NEWIPC, CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWUSER, CLONE_NEWUTS

_IDLE_STACK = 16 << 10
_INNER_ID = 1000  # in a user namespace, of the user who made it
_FIRST_INNER_ID = 2000  # and of the slots, where they have users of their own


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
        slot = Slot(index, self.user(index), rootfs.BOX, new_note())
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
                os.kill(first, signal.SIGKILL)
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
        if not syscalls.has_capability(syscalls.CAP_SYS_ADMIN):
            raise Unavailable("it needs CAP_SYS_ADMIN")
        self.first_uid = first_user(self.settings["number"])
        super().start()

    def user(self, index: int) -> int:
        return self.first_uid + index

    def confine(self, slot: Slot) -> None:
        become(slot.uid)
        self.set_apart()


class Unprivileged(Namespaced):
    """The tier `userns`: needs nothing but a kernel that lets users make user namespaces. All slots have one user; those of root, who
    may map others, have one each."""

    tier = "userns"
    namespaces = Namespaced.namespaces | CLONE_NEWUSER

    def unshare(self) -> None:
        self.own_user = self.root and syscalls.has_capability(syscalls.CAP_SETUID)
        uid, gid = os.geteuid(), os.getegid()
        if self.own_user:
            base = first_user(self.settings["number"])
            slots = f"\n{_FIRST_INNER_ID} {base} {USERS_PER_ZYGOTE}"
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
            become(slot.uid)
        else:
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # calls with one user cannot look at each other's memory
        syscalls.set_capabilities(0)
        self.set_apart()


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


SANDBOXES: dict[str, type[Sandbox]] = {kind.tier: kind for kind in (Privileged, Unprivileged, Landlocked, Sandbox)}
"""All tiers by name, the strongest first."""
