"""The root directory that calls see in the namespace tiers: read-only, and empty but for what a program needs. Standard library alone.

It is a tmpfs in a private mount namespace, so nothing of it exists on the host, and it goes with its last process: the interpreter
and the system's libraries are bind mounts, of `site-packages` only the allowed entries, `/dev` has five harmless devices, `/proc`
shows a program itself and nobody else, and `/box`, also reached as `/tmp` and `/dev/shm`, is where a call may write.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from collections.abc import Iterable, Mapping, Sequence

from rstar_jax.tools import syscalls
from rstar_jax.tools.syscalls import MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY

BOX = "/box"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# What libraries read of /etc. Copied, so that nothing else of it is there.
ETC = ("/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types", "/etc/protocols", "/etc/services")
_READ_ONLY = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
_LINKS = {"/dev/shm": BOX, "/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1",
          "/dev/stderr": "/proc/self/fd/2"}  # fmt: skip
_SCRATCH = ("/tmp", "/var/tmp")


def resolve(paths: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """(symbolic links by path, real paths) that together make every one of `paths` that exists reachable. Real paths below other
    real paths are left out."""
    links: dict[str, str] = {}
    real: set[str] = set()

    def visit(path: str) -> None:
        current = "/"
        parts = [part for part in os.path.normpath(path).split("/") if part]
        for index, part in enumerate(parts):
            current = os.path.join(current, part)
            if os.path.islink(current):
                if current not in links:
                    links[current] = os.readlink(current)
                visit(os.path.join(os.path.dirname(current), links[current], *parts[index + 1 :]))
                return
        if os.path.lexists(current):
            real.add(current)

    for path in paths:
        visit(path)
    return links, sorted(path for path in real if not any(path.startswith(f"{other}/") for other in real))


def _below(path: str, trees: Iterable[str]) -> bool:
    return any(path == tree or path.startswith(f"{tree}/") for tree in trees)


def _open(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


@dataclasses.dataclass
class Sources:
    """Descriptors of all that will be mounted: opened while they can still be, and by whoever may."""

    links: dict[str, str]
    trees: dict[str, int]
    sites: dict[str, dict[str, int]]
    devices: dict[str, int]
    etc: dict[str, bytes]

    @classmethod
    def open(cls, trees: Sequence[str], sites: Mapping[str, Sequence[str]]) -> Sources:
        """`sites`: directories of packages, with the names of the entries that may be seen."""
        links, real = resolve(trees)
        etc: dict[str, bytes] = {}
        for path in ETC:
            with contextlib.suppress(OSError), open(path, "rb") as file:
                etc[path] = file.read()
        return cls(
            links,
            {path: _open(path) for path in real},
            {site: {name: _open(f"{site}/{name}") for name in names} for site, names in sites.items()},
            {path: _open(path) for path in DEVICES},
            etc,
        )

    def close(self) -> None:
        for group in (self.trees, self.devices, *self.sites.values()):
            for fd in group.values():
                os.close(fd)


def _place(fd: int, target: str, flags: int) -> None:
    """Mount what `fd` refers to on `target`, which is made."""
    directory = stat.S_ISDIR(os.fstat(fd).st_mode)
    os.makedirs(target if directory else os.path.dirname(target), exist_ok=True)
    if not directory and not os.path.exists(target):
        with open(target, "x"):
            pass
    tree = syscalls.open_tree(fd)
    try:
        syscalls.set_mount_flags(tree, flags)
        syscalls.attach(tree, target)
    finally:
        os.close(tree)


def build(sources: Sources, over: str, show_processes: bool) -> None:
    """Build the root on a tmpfs that covers the directory `over`, and enter it. The mount namespace must be this process's own."""
    syscalls.mount("", "/", syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.mount("tmpfs", over, syscalls.MS_NOSUID, "size=16m,mode=755")
    os.chdir(over)
    for path, fd in sources.trees.items():
        _place(fd, f".{path}", _READ_ONLY)
    for site, entries in sources.sites.items():
        os.makedirs(f".{site}", exist_ok=True)
        covered = _below(site, sources.trees)
        if covered:
            syscalls.mount("tmpfs", f".{site}", syscalls.MS_NOSUID, "size=1m,mode=755")
        for name, fd in entries.items():
            _place(fd, f".{site}/{name}", _READ_ONLY)
        if covered:
            syscalls.set_mount_flags(f".{site}", _READ_ONLY)
    for path, fd in sources.devices.items():
        _place(fd, f".{path}", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC)
    for path, content in sources.etc.items():
        os.makedirs(os.path.dirname(f".{path}"), exist_ok=True)
        with open(f".{path}", "wb") as file:
            file.write(content)
    os.mkdir(f".{BOX}")
    for path in _SCRATCH:
        if not os.path.lexists(f".{path}"):  # else something is mounted below it
            sources.links[path] = BOX
    for path, target in {**sources.links, **(_LINKS if show_processes else {"/dev/shm": BOX})}.items():
        if not os.path.lexists(f".{path}"):
            os.makedirs(os.path.dirname(f".{path}"), exist_ok=True)
            os.symlink(target, f".{path}")
    os.mkdir("./proc")
    if show_processes:
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
        syscalls.mount("proc", "./proc", flags, "hidepid=invisible,subset=pid")
    syscalls.set_mount_flags(".", _READ_ONLY)
    syscalls.pivot_root()


def mount_box(size: int, files: int, uid: int) -> None:
    """A fresh, empty directory of the user `uid`, bounded in bytes and in files, on `/box` of this mount namespace."""
    options = f"size={size},nr_inodes={files + 1},mode=700,uid={uid},gid={uid}"
    syscalls.mount("tmpfs", BOX, syscalls.MS_NOSUID | syscalls.MS_NODEV, options)
