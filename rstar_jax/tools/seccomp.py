"""The system-call filter that all calls of a zygote inherit: loaded once, because loading one costs milliseconds.

A deny-list, since programs need most of the kernel's calls and the list of the dangerous ones is short and known: debugging,
kernel modules and configuration, mounts, keys, raw performance and BPF interfaces, io_uring (which would bypass a filter), objects
that outlive a process (System V IPC, POSIX queues), files without a name (`memfd_create` escapes every limit on disk), new user
namespaces, and sockets of all families but AF_UNIX. System calls of another architecture or of the x32 interface end the process
with SIGSYS. The filter is a second line: what a tier promises about files and processes is kept by namespaces or Landlock.
"""

from __future__ import annotations

import ctypes
import errno
import socket

from rstar_jax.tools import syscalls
from rstar_jax.tools.syscalls import CLONE_NEWCGROUP, CLONE_NEWIPC, CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWUSER, CLONE_NEWUTS

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16

DENIED = (
    "acct", "add_key", "adjtimex", "bpf", "chroot", "clock_adjtime", "clock_settime", "delete_module", "fanotify_init",
    "file_setattr", "finit_module", "fremovexattr", "fsconfig", "fsetxattr", "fsmount", "fsopen", "fspick", "init_module",
    "io_uring_enter", "io_uring_register", "io_uring_setup", "ioperm", "iopl", "kcmp", "kexec_file_load", "kexec_load", "keyctl",
    "lookup_dcookie", "lremovexattr", "lsetxattr", "mbind", "memfd_create", "memfd_secret", "migrate_pages", "modify_ldt",
    "mount_setattr", "move_mount", "move_pages", "mq_open", "mq_unlink", "msgget", "name_to_handle_at", "nfsservctl",
    "open_by_handle_at", "open_tree", "open_tree_attr", "perf_event_open", "pidfd_getfd", "pivot_root", "process_vm_readv",
    "process_vm_writev", "ptrace", "quotactl", "quotactl_fd", "reboot", "removexattr", "removexattrat", "request_key", "semget",
    "set_mempolicy", "settimeofday", "setxattr", "setxattrat", "shmget", "swapoff", "swapon", "syslog", "uselib", "userfaultfd",
    "vhangup",
)  # fmt: skip
# Where no namespace hides the files of this user: Landlock governs opening and changing them, but not their metadata.
METADATA = (
    "chmod", "chown", "fchmod", "fchmodat", "fchmodat2", "fchown", "fchownat", "futimesat", "lchown", "utime", "utimensat",
    "utimes",
)  # fmt: skip
# And the processes of this user: Landlock governs signals and tracing, but not priority, processors and limits.
SCHEDULING = ("ioprio_set", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler", "setpriority")
_NAMESPACES = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def program(namespaces: bool, alone: bool, machine: str = syscalls.MACHINE) -> list[Instruction]:
    """The filter as classic BPF. `namespaces`: the zygote makes PID namespaces and mounts (its calls have no capability to) and
    its calls may use AF_UNIX sockets, which reach nothing outside; else those are refused too. `alone`: no file and
    no process of others with the same user is in reach; else what Landlock leaves open of them is refused."""
    column = ("x86_64", "aarch64").index(machine)
    number = {name: row[column] for name, row in syscalls.NUMBERS.items() if row[column] is not None}
    deny, no_access = _ERRNO | errno.EPERM, _ERRNO | errno.EACCES
    code: list[Instruction] = [(_LOAD, 0, 0, _ARCH_AT), (_JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]), (_RETURN, 0, 0, _KILL)]
    code += [(_LOAD, 0, 0, _NUMBER_AT)]
    if machine == "x86_64":
        code += [(_JUMP_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]

    def refuse(name: str, answer: int) -> None:
        if name in number:
            code.extend([(_JUMP_EQUAL, 0, 1, number[name] or 0), (_RETURN, 0, 0, answer)])

    def refuse_when(name: str, argument: int, tests: list[Instruction], answer: int) -> None:
        """`tests` fall through to the refusal, or skip it by jumping over it; the accumulator holds the argument."""
        body = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument), *tests, (_RETURN, 0, 0, answer), (_RETURN, 0, 0, _ALLOW)]
        code.extend([(_JUMP_EQUAL, 0, len(body), number[name] or 0), *body])

    for name in DENIED if alone else [*DENIED, *METADATA, *SCHEDULING]:
        refuse(name, deny)
    refuse("clone3", _ERRNO | errno.ENOSYS)  # its flags lie in memory, where a filter cannot look; libc falls back to clone
    if not alone:
        refuse_when("prlimit64", 0, [(_JUMP_EQUAL, 1, 0, 0)], deny)  # 0: this process
    refuse_when("clone", 0, [(_JUMP_BITS, 0, 1, _NAMESPACES)], deny)
    if namespaces:
        refuse_when("unshare", 0, [(_JUMP_BITS, 0, 1, 0xFFFFFFFF & ~(CLONE_NEWPID | CLONE_NEWNS))], deny)
        refuse_when("socket", 0, [(_JUMP_EQUAL, 1, 0, socket.AF_UNIX)], no_access)
    else:
        for name in ("unshare", "setns", "mount", "umount2"):
            refuse(name, deny)
        refuse("socket", no_access)
        # A datagram socket (a raw one too: of this family it is the same) can be pointed at any address, a connected one cannot.
        connected = [(_JUMP_EQUAL, 2, 0, socket.SOCK_STREAM), (_JUMP_EQUAL, 1, 0, socket.SOCK_SEQPACKET)]
        refuse_when("socketpair", 1, [(_AND, 0, 0, 0xF), *connected], no_access)
    return [*code, (_RETURN, 0, 0, _ALLOW)]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def load(namespaces: bool, alone: bool) -> None:
    """Filter this thread and all its later children. `no_new_privs` must be set."""
    if syscalls.MACHINE not in AUDIT_ARCH:
        raise OSError(f"there is no system-call filter for the machine {syscalls.MACHINE!r}")
    code = b"".join(
        c.to_bytes(2, "little") + bytes((yes, no)) + k.to_bytes(4, "little") for c, yes, no, k in program(namespaces, alone)
    )
    memory = ctypes.create_string_buffer(code, len(code))
    filter_ = _Program(len(code) // 8, ctypes.addressof(memory))
    syscalls.prctl(syscalls.PR_SET_SECCOMP, 2, ctypes.addressof(filter_))
