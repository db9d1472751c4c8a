"""The Linux system calls that isolation is made of, through libc and ctypes: no compiled helper. Standard library alone.

Every function raises `OSError` with the kernel's error number. Numbers are those of the kernel's tables for x86-64 and aarch64.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import signal

# name: (x86-64, aarch64); None: that machine has no such call
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bind": (49, 200),
    "bpf": (321, 280),
    "capset": (126, 91),
    "chmod": (90, None),
    "chown": (92, None),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "clone3": (435, 435),
    "connect": (42, 203),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "file_setattr": (469, 469),
    "finit_module": (313, 273),
    "fremovexattr": (199, 16),
    "fsconfig": (431, 431),
    "fsetxattr": (190, 7),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "futimesat": (261, None),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "landlock_add_rule": (445, 445),
    "landlock_create_ruleset": (444, 444),
    "landlock_restrict_self": (446, 446),
    "lchown": (94, None),
    "lookup_dcookie": (212, 18),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "mbind": (237, 235),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "prlimit64": (302, 261),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "removexattr": (197, 14),
    "removexattrat": (466, 466),
    "request_key": (249, 218),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "seccomp": (317, 277),
    "semget": (64, 190),
    "set_mempolicy": (238, 237),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "settimeofday": (164, 170),
    "setxattr": (188, 5),
    "setxattrat": (463, 463),
    "shmget": (29, 194),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
    "vhangup": (153, 58),
}
_MACHINES = ("x86_64", "aarch64")
MACHINE = platform.machine()

CLONE_VM, CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x100, 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWTIME = 0x10000000, 0x20000000, 0x40000000, 0x80

MS_REC, MS_PRIVATE, MNT_DETACH = 0x4000, 0x40000, 2
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC, AT_RECURSIVE, AT_EMPTY_PATH, AT_FDCWD = 1, os.O_CLOEXEC, 0x8000, 0x1000, -100
MOVE_MOUNT_F_EMPTY_PATH = 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS = 1, 4, 8
PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 22, 36, 38, 47
PR_CAP_AMBIENT_RAISE = 2
CAP_DAC_READ_SEARCH, CAP_SYS_ADMIN, CAP_SETUID = 2, 21, 7

MADV_DONTFORK, MADV_DOFORK, MADV_COLLAPSE = 10, 11, 25

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_LIBC.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_LIBC.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]


def numbers() -> dict[str, int]:
    """System-call numbers of this machine by name. Raises `OSError` on a machine without a table."""
    if MACHINE not in _MACHINES:
        raise OSError(f"there is no table of system calls for the machine {MACHINE!r}; there is one for {' and '.join(_MACHINES)}")
    column = _MACHINES.index(MACHINE)
    return {name: row[column] for name, row in NUMBERS.items() if row[column] is not None}  # type: ignore[misc]


NUMBER = numbers() if MACHINE in _MACHINES else {}
"""Of this machine; empty where there is no table."""


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """The system call `name`. Integers are passed as 64 bits."""
    if name not in NUMBER:
        raise OSError(f"{name}: not known for the machine {MACHINE!r}")
    values = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _check(_LIBC.syscall(ctypes.c_long(NUMBER[name]), *values), name)


def prctl(option: int, value: int, third: int = 0) -> None:
    _check(_LIBC.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(third), ctypes.c_ulong(0), ctypes.c_ulong(0)), f"prctl({option})")


def unshare(flags: int) -> None:
    _check(_LIBC.unshare(flags), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    _check(_LIBC.setns(fd, kind), "setns")


def mount(kind: str, target: str, flags: int = 0, options: str = "") -> None:
    """Mount a new file system of `kind` on `target`; kind "": change the propagation of the mount that is there."""
    source = kind.encode() or None
    _check(_LIBC.mount(source, target.encode(), source, flags, options.encode()), f"mount {kind} on {target}")


def unmount(target: str) -> None:
    """Detach the mount at once; it goes when its last user does."""
    _check(_LIBC.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root() -> None:
    """Make the working directory, a mount point, the root of this mount namespace, and let go of the old root."""
    syscall("pivot_root", b".", b".")
    unmount(".")


def open_tree(path: int) -> int:
    """A file descriptor of a detached copy of the mounts at and below `path`, itself a descriptor (O_PATH is enough)."""
    return syscall("open_tree", path, b"", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE | AT_EMPTY_PATH)


def set_mount_flags(where: int | str, flags: int) -> None:
    """Add MOUNT_ATTR_ flags to the mount at a path, or to all mounts of a descriptor that `open_tree` gave."""
    attributes = flags.to_bytes(8, "little") + bytes(24)  # set, clear, propagation, user namespace
    if isinstance(where, int):
        syscall("mount_setattr", where, b"", AT_EMPTY_PATH | AT_RECURSIVE, attributes, len(attributes))
    else:
        syscall("mount_setattr", AT_FDCWD, os.fsencode(where), 0, attributes, len(attributes))


def attach(fd: int, target: str) -> None:
    """Mount on `target` what `open_tree` gave."""
    syscall("move_mount", fd, b"", AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH)


def effective_capabilities() -> int:
    """Bit mask of this process's effective capabilities."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))


def has_capability(number: int) -> bool:
    """Whether it is effective in this process."""
    return effective_capabilities() >> number & 1 == 1


def set_capabilities(mask: int) -> None:
    """Make `mask` the effective, permitted and inheritable capabilities of this thread."""
    header = (0x20080522).to_bytes(4, "little") + bytes(4)
    low, high = (mask & 0xFFFFFFFF).to_bytes(4, "little"), (mask >> 32).to_bytes(4, "little")
    syscall("capset", header, low * 3 + high * 3)


_FORK = ctypes.PyDLL(None).fork  # with the interpreter's lock held, as it is in the child
_PAUSE = ctypes.cast(_LIBC.pause, ctypes.c_void_p)


def start_idle_process(stack_top: int) -> int:
    """A child process that shares this one's memory and only waits, for ever. It costs next to nothing, and as the first process
    of a PID namespace it holds the namespace up: when it is killed, the kernel kills all others there. Returns its pid.

    `stack_top`: the end of at least 4 KiB that nothing else uses while the process lives."""
    return _check(_LIBC.clone(_PAUSE, stack_top, CLONE_VM | signal.SIGCHLD, None), "clone")


def fork() -> int:
    """The C library's fork alone. `os.fork` also gives the child's interpreter new locks and runs the functions that modules have
    registered; in a process that never had a second thread there is nothing to repair, and that costs 230 page faults of 300. The
    child has the state of `random` that the parent had."""
    return _check(_FORK(), "fork")


def inherit(memory: mmap.mmap, inherited: bool) -> None:
    """Whether processes forked from here on have this mapping."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _check(_LIBC.madvise(start, len(memory), MADV_DOFORK if inherited else MADV_DONTFORK), "madvise")


def collapse(start: int, length: int) -> bool:
    """Put the pages of [start, start + length), bounds in multiples of 2 MiB, on huge pages. False when the kernel declines."""
    return _LIBC.madvise(start, length, MADV_COLLAPSE) == 0
