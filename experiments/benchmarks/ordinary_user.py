"""Run a command as an ordinary user, wherever the interpreter and this repository lie.

    python -m experiments.benchmarks.ordinary_user -- COMMAND [ARGUMENT...]

Root becomes a user who owns nothing. The trees that the command needs (the interpreter, its environment, this repository) may lie
below a directory that only root can enter, as `/root` is. So this process takes a mount namespace of its own, covers every such
directory there with an empty one that everybody can enter, and mounts the trees back into it; outside nothing changes. An ordinary
user stays who he is.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import pwd
import sys
from collections.abc import Sequence

from rstar_jax.types import UserError

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_CLONE_NEWNS = 0x20000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
_FIRST_UID, _LAST_UID = 61_184, 61_439  # reserved by no distribution, and below the 65,536 that a container may have

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]


def needed() -> list[pathlib.Path]:
    """The trees that a Python program of this repository needs."""
    return sorted({pathlib.Path(os.path.realpath(path)) for path in (sys.base_prefix, sys.prefix, REPOSITORY)})


def command_as_user(argv: Sequence[str]) -> list[str]:
    """`argv` as a command that an ordinary user runs, to be started in the repository. Root gets a helper in front of it."""
    if os.geteuid() != 0:
        return list(argv)
    return [sys.executable, "-m", "experiments.benchmarks.ordinary_user", "--", *argv]


def unused_uid() -> int:
    """A user id without a name and without a process."""
    taken = {entry.pw_uid for entry in pwd.getpwall()}
    for process in pathlib.Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                taken.add(process.stat().st_uid)
            except OSError:
                continue  # it has ended
    return next(uid for uid in range(_FIRST_UID, _LAST_UID) if uid not in taken)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _closed(path: pathlib.Path) -> bool:
    """Whether only its owner or group can enter and list the directory `path`."""
    return path.stat().st_mode & 0o5 != 0o5


def _bind(fd: int, target: pathlib.Path) -> None:
    """Mount what `fd` refers to on `target`, which is made."""
    if os.path.isdir(f"/proc/self/fd/{fd}"):
        target.mkdir(mode=0o755, parents=True, exist_ok=True)
    else:
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        target.touch(mode=0o644)
    _check(_LIBC.mount(f"/proc/self/fd/{fd}".encode(), os.fsencode(target), None, _MS_BIND | _MS_REC, None), f"bind {target}")


def open_the_way(trees: Sequence[pathlib.Path]) -> None:
    """Make `trees` reachable by everybody, in a mount namespace that this process gets for it."""
    _check(_LIBC.unshare(_CLONE_NEWNS), "unshare of the mount namespace")
    _check(_LIBC.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "private mounts")
    covers: dict[pathlib.Path, list[pathlib.Path]] = {}  # closed directory: what is needed of it
    for tree in trees:
        closed = next((path for path in [*reversed(tree.parents), tree] if _closed(path)), None)
        if closed is not None:
            covers.setdefault(closed, []).extend(sorted(tree.iterdir()) if closed == tree else [tree])
    for closed, parts in covers.items():
        held = {part: os.open(part, os.O_PATH) for part in parts if not part.is_symlink()}
        links = {part: os.readlink(part) for part in parts if part.is_symlink()}
        _check(_LIBC.mount(b"tmpfs", os.fsencode(closed), b"tmpfs", _MS_NOSUID | _MS_NODEV, b"size=1m,mode=755"), f"cover {closed}")
        for part, fd in held.items():
            if not part.exists():
                _bind(fd, part)
            os.close(fd)
        for part, target in links.items():
            part.symlink_to(target)


def become_ordinary() -> None:
    """Make this process one of a user who owns nothing. Raises `UserError` when this cannot be done here."""
    uid = unused_uid()
    directory = os.getcwd()
    try:
        open_the_way(needed())
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        os.chdir(directory)
    except OSError as error:
        raise UserError(f"root cannot become an ordinary user here: {error}") from None
    os.environ["HOME"] = "/"


def main(argv: Sequence[str]) -> None:
    """Become ordinary, then turn into the command."""
    if len(argv) < 3 or argv[1] != "--":
        raise UserError("usage: python -m experiments.benchmarks.ordinary_user -- COMMAND [ARGUMENT...]")
    if os.geteuid() == 0:
        become_ordinary()
    try:
        os.execvp(argv[2], list(argv[2:]))
    except OSError as error:
        raise UserError(f"{argv[2]} cannot be started: {error}") from None


if __name__ == "__main__":
    try:
        main(sys.argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
