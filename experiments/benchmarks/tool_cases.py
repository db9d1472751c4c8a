"""Faults and attacks that the Python tool has to survive, as data.

A `Case` is a program with a check of what became of it, or, where one call is not enough, a coroutine. `Planted` is what a program
must not reach: files, an environment variable, sockets, processes. `needs` names the promises of a tier (`Isolation`) that a case
puts to the test; in a tier that does not make them the case is skipped. Programs that would harm the machine if a promise were
broken look for that before they go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import platform
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from experiments.benchmarks.ordinary_user import REPOSITORY
from rstar_jax.config import ToolConfig
from rstar_jax.tools.formatting import format_result
from rstar_jax.tools.pool import ToolPool
from rstar_jax.types import InfrastructureError, ToolResult, ToolStatus

GROUPS = (
    "time", "memory", "processes", "output", "input", "files", "secrets", "privileges", "network", "cross-call", "function", "session",
)  # fmt: skip
OK, ERROR, EXIT, TIMEOUT, SIGNAL = ToolStatus.OK, ToolStatus.ERROR, ToolStatus.EXIT, ToolStatus.TIMEOUT, ToolStatus.SIGNAL
CONFIG = ToolConfig(
    workers=2,
    concurrency=4,
    timeout_s=20.0,
    cpu_s=2.0,
    memory_bytes=512 << 20,
    output_bytes=2000,
    hard_output_bytes=4 << 20,
    retries=1,
)
"""What the cases are written for: every program of theirs fits in it, or does not, by a wide margin."""


# --- what is planted outside -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Planted:
    """Things outside that a call must not reach. `contacts` grows by a name whenever a listener hears of anybody."""

    directory: str
    key: str  # a file of this user's alone that holds the secret
    open_key: str  # a file that everybody may read, with the secret too
    open_directory: str  # a directory that everybody may write to
    open_file: str  # a file that everybody may write to
    temporary: str  # where pools make their directories
    secret: str
    variable: str  # of the environment, holding the secret
    port: int  # of a TCP listener on the loopback
    datagram_port: int  # of a UDP socket there
    abstract: str  # name of an abstract unix listener, without the NUL in front
    socket: str  # path of a unix listener
    datagram: str  # path of a unix datagram socket
    victim: int  # pid of another process of this user
    pid: int  # of this process
    fd: int  # inheritable, of `key`
    contacts: list[str] = dataclasses.field(default_factory=list)


def _listen(listener: socket.socket, name: str, contacts: list[str], gift: int) -> None:
    """Note everyone who comes until the socket is shut down; a connection over a unix socket gets the descriptor `gift`."""
    while True:
        try:
            if listener.type == socket.SOCK_DGRAM:
                if not listener.recv(100):
                    return
                contacts.append(name)
                continue
            with listener.accept()[0] as connection:
                contacts.append(name)
                if listener.family == socket.AF_UNIX:
                    socket.send_fds(connection, [b"key"], [gift])
        except OSError:
            return


@contextlib.contextmanager
def plant() -> Iterator[Planted]:
    """Plant everything; take it away again. Pools that are made within have their directories in `Planted.temporary`."""
    secret = f"planted-{secrets.token_hex(16)}"
    with contextlib.ExitStack() as undo:
        directory = pathlib.Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="tool_faults_", ignore_cleanup_errors=True)))
        directory.chmod(0o755)
        for name, mode in (("closed", 0o700), ("open", 0o777), ("tmp", 0o1777)):
            (directory / name).mkdir()
            (directory / name).chmod(mode)
        files = {"closed/answer_key": 0o600, "answer_key_open": 0o644, "writable": 0o666}
        for name, mode in files.items():
            (directory / name).write_text(secret if "key" in name else "untouched")
            (directory / name).chmod(mode)
        fd = os.open(directory / "closed/answer_key", os.O_RDONLY)
        undo.callback(os.close, fd)
        os.set_inheritable(fd, True)
        contacts: list[str] = []

        def listener(name: str, family: int, kind: int, address: Any) -> Any:
            one = socket.socket(family, kind)
            one.bind(address)
            if kind == socket.SOCK_STREAM:
                one.listen()
            if isinstance(address, str) and address[0] == "/":
                os.chmod(address, 0o777)
            thread = threading.Thread(target=_listen, args=(one, name, contacts, fd), daemon=True)
            thread.start()
            undo.callback(thread.join, 5.0)
            undo.callback(one.close)
            undo.callback(_shut_down, one)
            return one.getsockname()

        abstract = f"tool_faults_{secrets.token_hex(8)}"
        port = listener("TCP", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0))[1]
        datagram_port = listener("UDP", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))[1]
        listener("an abstract unix socket", socket.AF_UNIX, socket.SOCK_STREAM, f"\0{abstract}")
        listener("a unix socket", socket.AF_UNIX, socket.SOCK_STREAM, str(directory / "stream"))
        listener("a unix datagram socket", socket.AF_UNIX, socket.SOCK_DGRAM, str(directory / "datagram"))

        variable = "TOOL_FAULTS_CANARY"
        os.environ[variable] = secret
        undo.callback(os.environ.pop, variable, None)
        before = tempfile.tempdir
        undo.callback(setattr, tempfile, "tempdir", before)
        tempfile.tempdir = str(directory / "tmp")
        victim = undo.enter_context(subprocess.Popen(["sleep", "100000"], stdin=subprocess.DEVNULL))
        undo.callback(victim.kill)
        yield Planted(
            directory=str(directory),
            key=str(directory / "closed/answer_key"),
            open_key=str(directory / "answer_key_open"),
            open_directory=str(directory / "open"),
            open_file=str(directory / "writable"),
            temporary=str(directory / "tmp"),
            secret=secret,
            variable=variable,
            port=port,
            datagram_port=datagram_port,
            abstract=abstract,
            socket=str(directory / "stream"),
            datagram=str(directory / "datagram"),
            victim=victim.pid,
            pid=os.getpid(),
            fd=fd,
            contacts=contacts,
        )


def _shut_down(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


# --- processes of this machine ---------------------------------------------------------------------------------------


def parents() -> dict[int, int]:
    """Parent by pid, of all processes that can be seen."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def family(pid: int) -> set[int]:
    """Pids of all descendants of `pid`, zombies included."""
    known = parents()
    found: set[int] = set()
    generation = {pid}
    while generation:
        generation = {child for child, parent in known.items() if parent in generation} - found
        found |= generation
    return found


def state(pid: int) -> str:
    """The state letter of a process, "" when there is none."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def runs(pid: int) -> bool:
    return state(pid) not in ("", "Z", "X")


async def idle_family() -> int:
    """How many descendants this process has once their number has stood still for a while."""
    count, since = len(family(os.getpid())), time.monotonic()
    while time.monotonic() < since + 0.25:
        await asyncio.sleep(0.02)
        if (now := len(family(os.getpid()))) != count:
            count, since = now, time.monotonic()
    return count


async def settles(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether `condition()` becomes true within `seconds`."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        await asyncio.sleep(0.02)
    return True


# --- cases -----------------------------------------------------------------------------------------------------------

Program = str | Callable[[Planted], str]
Check = Callable[[ToolResult, Planted], str | None]
Story = Callable[[ToolPool, Planted], Awaitable[str | None]]


@dataclasses.dataclass(frozen=True)
class Case:
    """Either `code` with `check`, or `run`. `check` and `run` say what is wrong, in one line, or None.

    `needs`: promises of the tier without which the case is skipped. `tiers`: the tiers it is for, all when empty. `machines`: the
    processor architectures it is for, all when empty. `modules`: skipped where one of them is not installed. `within`: seconds that
    the whole case may take.
    """

    name: str
    group: str
    code: Program = ""
    check: Check | None = None
    run: Story | None = None
    needs: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    stdin: str | None = None
    timeout: float | None = None
    within: float = 40.0


CASES: list[Case] = []


def _case(group: str, name: str, code: Program, check: Check, **options: Any) -> None:
    CASES.append(Case(name, group, code, check, **options))


def _story(group: str, name: str, **options: Any) -> Callable[[Story], Story]:
    def add(run: Story) -> Story:
        CASES.append(Case(name, group, run=run, **options))
        return run

    return add


def seen(result: ToolResult) -> str:
    """A result in one line, for complaints."""
    return f"{result.status}, code {result.exit_code}, stdout {result.stdout[-300:]!r}, stderr {result.stderr[-200:]!r}"


def expect(
    status: ToolStatus | tuple[ToolStatus, ...] = OK,
    stdout: str | None = None,
    code: int | tuple[int, ...] | None = None,
    ending: str | None = None,
    also: Callable[[ToolResult], object] | None = None,
) -> Check:
    """A check of the status, the whole standard output, the exit code, the end of standard error, and `also`."""
    statuses = status if isinstance(status, tuple) else (status,)
    codes = code if isinstance(code, tuple) else (code,)

    def check(result: ToolResult, planted: Planted) -> str | None:
        del planted
        right = (
            result.status in statuses
            and (stdout is None or result.stdout == stdout)
            and (code is None or result.exit_code in codes)
            and (ending is None or result.stderr.endswith(ending))
            and (also is None or bool(also(result)))
        )
        return None if right else seen(result)

    return check


def story_expects(result: ToolResult, *arguments: Any, **named: Any) -> str | None:
    """`expect` for stories."""
    return expect(*arguments, **named)(result, None)  # type: ignore[arg-type]


NO = ("EPERM", "EACCES", "ENOSYS")  # what the kernel says to what it was forbidden to do
NOT_THERE = (*NO, "ENOENT", "ESRCH", "ENOTDIR", "EROFS", "EXDEV", "ELOOP", "ENXIO", "ENODEV", "ECONNREFUSED", "EBADF", "EAFNOSUPPORT")


def refused(count: int, how: tuple[str, ...] = NOT_THERE, status: ToolStatus = OK) -> Check:
    """`count` attempts (see `TRY`) were made, and every one of them was refused with one of the errors `how`."""

    def check(result: ToolResult, planted: Planted) -> str | None:
        del planted
        lines = result.stdout.splitlines()
        wrong = [line for line in lines if line not in {f"refused {name}" for name in how}]
        if wrong:
            return f"{len(wrong)} of {len(lines)} attempts: {'; '.join(wrong)[:400]}"
        return None if result.status is status and len(lines) == count else f"{len(lines)} attempts of {count}; {seen(result)}"

    return check


# One tier refuses to change modes, those of one's own files too.
CHMOD = "import os\ndef _chmod(path, mode):\n    try: os.chmod(path, mode)\n    except PermissionError: pass\n"
TRY = """import ctypes, errno, os, signal, socket, sys
def attempt(action, *arguments, **named):
    try:
        value = action(*arguments, **named)
    except ValueError as error:
        print("refused EPERM" if "not allowed" in str(error) else repr(error))
    except OSError as error:
        print("refused", errno.errorcode.get(error.errno, str(error)))
    else:
        print("DONE", getattr(action, "__name__", ""), ascii(arguments)[:100], ascii(value)[:100])
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
def kernel(number, *arguments):
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    value = _libc.syscall(ctypes.c_long(number), *wide)
    if value < 0:
        raise OSError(ctypes.get_errno(), "")
    return value
def read(path, *more):
    with open(path, "rb") as file:
        return file.read(200)
"""

_NUMBERS = {  # of system calls, (x86-64, aarch64), from the kernel's tables
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280), "chroot": (161, 51), "clone": (56, 220),
    "clock_settime": (227, 112), "clone3": (435, 435), "delete_module": (176, 106), "fanotify_init": (300, 262),
    "finit_module": (313, 273), "fsconfig": (431, 431), "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433),
    "init_module": (175, 105), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30), "kcmp": (312, 272), "kexec_load": (246, 104), "keyctl": (250, 219), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429), "mq_open": (240, 180),
    "msgget": (68, 186), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "open_tree": (428, 428),
    "perf_event_open": (298, 241), "pidfd_getfd": (438, 438), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "pivot_root": (155, 41), "process_madvise": (440, 440), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "ptrace": (101, 117), "quotactl": (179, 60), "reboot": (169, 142), "request_key": (249, 218), "rt_sigqueueinfo": (129, 138),
    "semget": (64, 190), "setdomainname": (171, 162), "sethostname": (170, 161), "setns": (308, 268), "settimeofday": (164, 170),
    "shmget": (29, 194), "swapoff": (168, 225), "swapon": (167, 224), "syslog": (103, 116), "tgkill": (234, 131),
    "umount2": (166, 39), "unshare": (272, 97), "userfaultfd": (323, 282),
}  # fmt: skip
MACHINES = ("x86_64", "aarch64")


def number(name: str) -> int:
    """The number of a system call on this machine; -1 where it is not known, and the cases that need it are skipped."""
    return _NUMBERS[name][MACHINES.index(platform.machine())] if platform.machine() in MACHINES else -1


def kernel_case(group: str, name: str, calls: list[tuple[str, str]], how: tuple[str, ...] = NO, **options: Any) -> None:
    """A case that makes system calls, (name, arguments as Python source), and expects every one to be refused."""
    code = TRY + "".join(f"attempt(kernel, {number(call)}{', ' * bool(given)}{given})\n" for call, given in calls)
    _case(group, name, code, refused(len(calls), how), machines=MACHINES, needs=options.pop("needs", ("syscalls",)), **options)


def other_pool(pool: ToolPool, **changes: Any) -> ToolPool:
    """A small pool in the same tier, with nothing preloaded."""
    settings: dict[str, Any] = {"workers": 1, "concurrency": 2, "preload": (), "isolation": pool.isolation.tier, **changes}
    return ToolPool(dataclasses.replace(pool.config, **settings))


# --- 1. time ---------------------------------------------------------------------------------------------------------

SLEEP = "import time; print('before'); time.sleep(1e6)"
IGNORE = "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
_HANGS = {
    "an endless loop": "print('before')\nwhile True: pass",
    "a sleep": SLEEP,
    "a long call into C": "print('before')\n10**10**9",
    "a regular expression that backtracks": "import re; print('before')\nre.match(r'(a+)+$', 'a' * 64 + 'b')",
    "an integer with millions of digits": "import sys; sys.set_int_max_str_digits(0); print('before'); str(1 << 10**8)",
    "all signals ignored": IGNORE + SLEEP,
    "all signals blocked": "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n" + SLEEP,
    "a cancelled alarm": "import signal; signal.alarm(0); signal.setitimer(signal.ITIMER_REAL, 0)\n" + SLEEP,
    "a storm of timer signals": "import signal; signal.signal(14, lambda *a: None); signal.setitimer(0, 1e-4, 1e-4)\n" + SLEEP
    + "\nwhile True: time.sleep(1)",
    "a stopped process": "import os; print('before'); os.kill(os.getpid(), 19)",
    "a text of an exception that never ends": "print('before')\nclass E(Exception):\n    def __str__(self):\n        while True: pass\nraise E",
    "a thread that never ends": "import threading, time; print('before'); threading.Thread(target=time.sleep, args=(1e6,)).start()",
    "a grandchild that holds the output": "import os, time; print('before', flush=True); os.fork(); time.sleep(1e6)",
    "another program in its place": "import os; print('before'); os.execvp('sleep', ['sleep', '100000'])",
    "a pipe that nobody opens": "import os; os.mkfifo('pipe'); print('before'); open('pipe')",
    "a value whose repr never ends": "print('before')\nclass R:\n    def __repr__(self):\n        while True: pass\nR()",
}  # fmt: skip
for _name, _code in _HANGS.items():
    _case("time", _name, _code, expect(TIMEOUT, "before\n", -9, also=lambda r: 0.5 <= r.seconds < 2.5), timeout=0.5, within=4.0)
_case("time", "a call returns soon after its limit (D3)", "import time; time.sleep(3)", expect(TIMEOUT), timeout=1.0, within=2.0)


@_story("time", "processor time ends before wall time", within=15.0)
async def _processor_time(pool: ToolPool, planted: Planted) -> str | None:
    ignoring = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
    results = await asyncio.gather(pool.run("while True: pass"), pool.run(ignoring + "while True: pass"))
    bad = [seen(r) for r in results if r.status is not ToolStatus.CPU_LIMIT or not 1.5 < r.cpu_seconds < 4.0]
    return "; ".join(bad) or None


@_story("time", "time in the queue does not count: 256 calls at once (D6)", within=60.0)
async def _queue(pool: ToolPool, planted: Planted) -> str | None:
    results = await asyncio.gather(*(pool.run(f"print({i})", timeout=5.0) for i in range(256)))
    bad = [seen(r) for i, r in enumerate(results) if (r.status, r.stdout) != (OK, f"{i}\n")]
    return f"{len(bad)} of 256: {bad[0]}" if bad else None


@_story("time", "hanging calls do not use up the pool (D4)", within=15.0)
async def _hanging(pool: ToolPool, planted: Planted) -> str | None:
    hanging = [pool.run("while True: pass", timeout=0.3) for _ in range(8)]
    *ended, good = await asyncio.gather(*hanging, pool.run("print('alive')"))
    return story_expects(good, OK, "alive\n") or next((seen(r) for r in ended if r.status is not TIMEOUT), None)


@_story("time", "a cancelled call is killed, and its place is free", within=15.0)
async def _cancelled(pool: ToolPool, planted: Planted) -> str | None:
    tasks = [asyncio.create_task(pool.run("import time; time.sleep(1e6)")) for _ in range(pool.config.concurrency)]
    await asyncio.sleep(0.3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return story_expects(await pool.run("print('free')"), OK, "free\n")


# --- 2. memory -------------------------------------------------------------------------------------------------------

_case("memory", "a list that grows", "x = []\nwhile True: x.append(bytes(1 << 22))", expect(ToolStatus.MEMORY, ending="MemoryError\n"))
_case("memory", "100 GB at once", "bytearray(100 << 30)", expect(ToolStatus.MEMORY, code=1, ending="MemoryError\n"))
_case(
    "memory", "a caught MemoryError", "try: bytearray(100 << 30)\nexcept MemoryError: print('small then')", expect(OK, "small then\n")
)
_case("memory", "100 GB of mapping", TRY + "import mmap\nattempt(mmap.mmap, -1, 100 << 30)", refused(1, ("ENOMEM",)))
_case(
    "memory",
    "a compressed bomb",
    "import zlib\nc = zlib.compressobj()\nb = b''.join(c.compress(bytes(1 << 24)) for _ in range(64)) + c.flush()\nlen(zlib.decompress(b))",
    expect((ToolStatus.MEMORY, ToolStatus.CPU_LIMIT)),
)
_case(
    "memory",
    "a stack that overflows in C",
    "import sys; sys.setrecursionlimit(10**9)\nclass A:\n    def __add__(self, other): return self + other\nA() + A()",
    expect((SIGNAL, ERROR, ToolStatus.MEMORY), code=(-11, 1)),
)
_case("memory", "deep JSON", "import json; json.loads('[' * 10**6)", expect(ERROR, also=lambda r: "RecursionError" in r.stderr))
_case(
    "memory",
    "a deep expression",
    "-" * 200_000 + "1",
    expect((ERROR, ToolStatus.MEMORY, SIGNAL), code=(1, -11), also=lambda r: len(r.stderr) < 5000),
)
_case("memory", "a deep nest of brackets", "(" * 5000 + ")" * 5000, expect(ERROR, also=lambda r: "too many nested" in r.stderr))
_case(
    "memory",
    "source text of 5 MB is rejected",
    "#" * (5 << 20),
    expect(ToolStatus.REJECTED, also=lambda r: "\n" not in r.stderr and str(5 << 20) in r.stderr),
)
_case("memory", "source text of just under 1 MB", "#" * (1_000_000) + "\nprint('read')", expect(OK, "read\n"))
_case(
    "memory",
    "limits cannot be raised",
    TRY
    + "import resource as r\nfor which in (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_NOFILE, r.RLIMIT_FSIZE, r.RLIMIT_CORE):\n"
    + "    attempt(r.setrlimit, which, (-1, -1))\n    attempt(r.prlimit, 0, which, (-1, -1))",
    refused(10),
    needs=("syscalls",),
)
_case(
    "memory",
    "a full directory",
    TRY + "import glob\nwritten = 0\ntry:\n    for i in range(300):\n        with open(f'f{i}', 'wb') as file:\n"
    "            for _ in range(64): written += file.write(bytes(1 << 20))\n"
    "except OSError as error: print(errno.errorcode[error.errno], written >> 20)",
    expect(OK, also=lambda r: re.fullmatch(r"ENOSPC \d+\n", r.stdout) and int(r.stdout.split()[1]) <= 64),
    needs=("disk",),
)
_case(
    "memory",
    "a full /dev/shm",
    TRY + "written = 0\ntry:\n    with open('/dev/shm/f1', 'wb') as a, open('/dev/shm/f2', 'wb') as b:\n        while written < 500:\n"
    "            a.write(bytes(1 << 20)); b.write(bytes(1 << 20)); written += 2\n"
    "except OSError as error: print(errno.errorcode[error.errno], written)",
    expect(OK, also=lambda r: re.fullmatch(r"ENOSPC \d+\n", r.stdout) and int(r.stdout.split()[1]) <= 64),
    needs=("disk",),
)
_case(
    "memory",
    "a million files",
    TRY + "try:\n    for i in range(10**6): open(str(i), 'x').close()\nexcept OSError as error: print(errno.errorcode[error.errno], i)",
    expect(OK, also=lambda r: re.fullmatch(r"ENOSPC \d+\n", r.stdout) and int(r.stdout.split()[1]) <= 2048),
    needs=("disk",),
)
_case("memory", "a file that is too large", TRY + "f = open('big', 'wb')\nattempt(f.truncate, 65 << 20)", refused(1, ("EFBIG",)))
_case("memory", "5,000 descriptors", TRY + "held = [open('/dev/null') for _ in range(5000)]", expect(ERROR, ending="'/dev/null'\n"))
_case(
    "memory",
    "memory of many processes together",
    "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        x = bytearray(400 << 20)\n        for i in range(0, len(x), 4096): x[i] = 1\n"
    "        time.sleep(3); os._exit(0)\nprint([os.waitpid(-1, 0)[1] for _ in range(8)])",
    expect((OK, SIGNAL, TIMEOUT, EXIT, ToolStatus.MEMORY), also=lambda r: r.stdout != f"{[0] * 8}\n"),
    needs=("memory",),
)


@_story("memory", "a string of 10 GB leaves this process as it is (D7)")
async def _huge_string(pool: ToolPool, planted: Planted) -> str | None:
    def resident() -> int:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    result = await pool.run("x = 'a' * 10**10")
    grown = resident() - before
    return story_expects(result, ToolStatus.MEMORY, code=1) or (f"grew by {grown} bytes" if grown > 50 << 20 else None)


# --- 3. processes ----------------------------------------------------------------------------------------------------

_case(
    "processes",
    "a fork bomb is bounded",
    TRY + "n = 0\ntry:\n    while n < 5000:\n        if os.fork() == 0:\n            signal.pause()\n        n += 1\n"
    "except OSError as error: print(errno.errorcode[error.errno], n)",
    expect(OK, also=lambda r: re.fullmatch(r"EAGAIN \d+\n", r.stdout) and int(r.stdout.split()[1]) <= 64),
    needs=("process_count", "process_tree"),
)
_case(
    "processes",
    "a fork bomb is bounded, if less sharply",
    TRY + "n = 0\ntry:\n    while n < 5000:\n        if os.fork() == 0:\n            signal.pause()\n        n += 1\n"
    "except OSError as error: print(errno.errorcode[error.errno], n < 5000)",
    expect(OK, "EAGAIN True\n"),
    needs=("process_count",),
)
_case(
    "processes",
    "a fork bomb that goes off in all its processes",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    expect((TIMEOUT, ToolStatus.CPU_LIMIT, SIGNAL)),
    needs=("process_count", "process_tree"),
    timeout=1.0,
    within=10.0,
)
_case(
    "processes",
    "a runner that forks away from whoever follows",
    "import os\nif os.fork() == 0:\n    while True:\n        if os.fork(): os._exit(0)\nprint('gone')",
    expect(OK, "gone\n"),
    needs=("process_tree",),
    within=10.0,
)
_case(
    "processes",
    "a thread bomb",
    "import threading, time\nn = 0\ntry:\n    while n < 20000:\n        threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1\n"
    "except RuntimeError as error: print(n < 2000, error)",
    expect(OK, "True can't start new thread\n"),
)

DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {own}time.sleep(1e6)
    os._exit(0)
os.wait()
print('parent done')
"""
_ESCAPES = {
    "a daemon": "",
    "a daemon that adopts no orphans": "import ctypes; ctypes.CDLL(None).prctl(36, 0, 0, 0, 0); ",
    "a daemon without an environment": "os.execve('/bin/sleep', ['sleep', '100000'], {})\n        ",
    "a daemon that ignores all signals": IGNORE.replace("\n", "\n        ") + "os.close(1); os.close(2); ",
    "a daemon that has stopped itself": "os.kill(os.getpid(), 19); ",
}
for _name, _own in _ESCAPES.items():

    async def _daemon(pool: ToolPool, planted: Planted, code: str = DAEMON.format(own=_own)) -> str | None:
        before = await idle_family()
        start = time.monotonic()
        result = await pool.run(code)
        late = time.monotonic() - start
        gone = await settles(lambda: len(family(os.getpid())) <= before)
        left = "" if gone else f"{len(family(os.getpid())) - before} processes are left"
        return story_expects(result, OK, "parent done\n") or left or (f"took {late:.1f} s" if late > 4 else None)

    _story("processes", _name)(_daemon)


@_story("processes", "50 loops with a limit of 0.2 s leave no zombie and no process (D1)", within=40.0)
async def _fifty(pool: ToolPool, planted: Planted) -> str | None:
    before = await idle_family()
    results = await asyncio.gather(*(pool.run("while True: pass", timeout=0.2) for _ in range(50)))
    bad = next((seen(r) for r in results if r.status is not TIMEOUT), None)

    def clean() -> bool:
        now = family(os.getpid())
        return len(now) <= before and not any(state(pid) == "Z" for pid in now)

    return bad or (None if await settles(clean) else f"{len(family(os.getpid()))} processes where there were {before}")


@_story("processes", "200 calls leave no process and no descriptor")
async def _two_hundred(pool: ToolPool, planted: Planted) -> str | None:
    await asyncio.gather(*(pool.run("1") for _ in range(8)))
    before, fds = await idle_family(), len(os.listdir("/proc/self/fd"))
    results = await asyncio.gather(*(pool.run(f"print({i})") for i in range(200)))
    wrong = [i for i, r in enumerate(results) if r.stdout != f"{i}\n"]
    grown = len(os.listdir("/proc/self/fd")) - fds
    still = await settles(lambda: len(family(os.getpid())) <= before)
    return (f"wrong: {wrong}" if wrong else None) or (f"{grown} descriptors more" if grown > 0 else None) or (
        None if still else f"{len(family(os.getpid())) - before} processes more"
    )  # fmt: skip


_case(
    "processes",
    "kill(-1)",
    # In a tier that breaks its promise this would end the machine: so look first.
    lambda p: (
        TRY
        + f"for pid in ({p.pid}, {p.victim}):\n    try: os.kill(pid, 0)\n    except OSError: continue\n    print('the outside can be signalled'); sys.exit(7)\n"
        + "attempt(os.kill, -1, 0)\nos.kill(-1, 9)\nprint('alive')"
    ),
    expect((OK, SIGNAL, ERROR), code=(0, -9, 1), also=lambda r: "outside" not in r.stdout),
    needs=("processes",),
)
_case(
    "processes",
    "signals to this process, to its victim and to the parent",
    lambda p: (
        TRY + f"for pid in ({p.pid}, {p.victim}):\n"
        "    attempt(os.kill, pid, 0)\n    attempt(os.kill, pid, signal.SIGCONT)\n    attempt(os.killpg, pid, 0)\n"
        f"    attempt(kernel, {number('tgkill')}, pid, pid, 0)\n"
        "    info = ctypes.create_string_buffer(128); info[8:12] = (-1).to_bytes(4, 'little', signed=True)\n"
        f"    attempt(kernel, {number('rt_sigqueueinfo')}, pid, 0, info)\n"
        "    try: fd = os.pidfd_open(pid)\n    except OSError: print('refused EPERM')\n    else: attempt(signal.pidfd_send_signal, fd, 0)\n"
        "parent = os.getppid()\nattempt(os.kill, parent, 0) if parent > 1 else print('refused ESRCH')"
    ),
    refused(13),
    needs=("processes",),
    machines=MACHINES,
)
_case(
    "processes",
    "limits, priority and processors of others",
    lambda p: (
        TRY + f"import resource as r\nfor pid in ({p.pid}, {p.victim}):\n"
        "    attempt(r.prlimit, pid, r.RLIMIT_CORE, (0, 0))\n    attempt(os.setpriority, os.PRIO_PROCESS, pid, 19)\n"
        "    attempt(os.sched_setaffinity, pid, {0})\n    attempt(os.sched_setscheduler, pid, os.SCHED_IDLE, os.sched_param(0))\n"
        f"    attempt(kernel, {number('ioprio_set')}, 1, pid, 3 << 13)"
    ),
    refused(10),
    needs=("processes",),
    machines=MACHINES,
)
_case(
    "processes",
    "the first process of its namespace",
    TRY
    + "for s in range(1, 65):\n    if s in (32, 33): continue\n    try: os.kill(1, s)\n    except OSError: pass\n"
    + "import resource as r\nfor action in (lambda: r.prlimit(1, r.RLIMIT_CPU, (0, 0)), lambda: os.setpriority(0, 1, 19),\n"
    + "        lambda: os.sched_setaffinity(1, {0})):\n    try: action()\n    except OSError: pass\n"
    + "import time; time.sleep(0.2)\nprint('done')",
    expect((OK, SIGNAL), also=lambda r: r.exit_code in (0, -9)),
    needs=("process_tree",),
)
_case(
    "processes",
    "memory of the first process of its namespace",
    TRY + "for name in ('mem', 'environ', 'maps', 'stat_', 'root/etc', 'cwd/x', 'fd/0', 'auxv', 'syscall'):\n"
    "    attempt(read, f'/proc/1/{name}')\nattempt(open, '/proc/1/mem', 'r+b')",
    refused(10),
    needs=("process_tree",),
)

for _text, _status, _exit in (
    ("import os; print('kept'); os._exit(3)", EXIT, 3),
    ("import sys; print('kept'); sys.exit(2)", EXIT, 2),
    ("import os; print('kept'); os.abort()", SIGNAL, -6),
    ("import ctypes; print('kept'); ctypes.string_at(0)", SIGNAL, -11),
    ("import os; print('kept'); os.kill(os.getpid(), 15)", SIGNAL, -15),
):
    _case("processes", f"the end by {_text.split(';')[-1].strip()} (D12, D15)", _text, expect(_status, "kept\n", _exit))
_case(
    "processes",
    "a call of the x32 interface",
    "import ctypes; print('kept', flush=True); ctypes.CDLL(None).syscall(0x40000000 | 39)",
    expect(SIGNAL, "kept\n", -31),
    needs=("syscalls",),
    machines=("x86_64",),
)
_case(
    "processes",
    "a call of the 32-bit interface",
    "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')\n"
    "at = ctypes.addressof(ctypes.c_char.from_buffer(m)); print('kept', flush=True); print(ctypes.CFUNCTYPE(ctypes.c_int)(at)())",
    expect(SIGNAL, "kept\n", (-31, -11)),
    needs=("syscalls",),
    machines=("x86_64",),
)
_case(
    "processes",
    "a forked process does not speak for its call",
    "import os, sys\nif os.fork() == 0:\n    1/0\nos.wait()\nsys.exit(1)",
    expect(EXIT, code=1),
)

# Everything that a program finds from its own frames upwards: the byte of its call lies there, and perhaps those of others.
FORGE = """import mmap, sys, time
found, seen, todo, frame = [], set(), [], sys._getframe()
while frame:
    todo += frame.f_locals.values()
    frame = frame.f_back
while todo and len(seen) < 100000:
    one = todo.pop()
    if id(one) in seen: continue
    seen.add(id(one))
    if isinstance(one, mmap.mmap): found.append(one)
    elif isinstance(one, dict): todo += one.values()
    elif isinstance(one, (list, tuple, set)): todo += one
    else:
        todo += vars(one).values() if hasattr(one, "__dict__") and not isinstance(one, (type, type(sys))) else []
def fill(value):
    for one in found:
        try: one[0] = value
        except (ValueError, TypeError): pass
"""


@_story("processes", "a program that forges what the pool notes of it")
async def _forged(pool: ToolPool, planted: Planted) -> str | None:
    for value in (0, 1, 2, 3, 4, 255):
        try:
            result = await pool.run(f"{FORGE}fill({value})\nsys.exit(5)")
        except InfrastructureError as error:
            return f"value {value} makes an infrastructure error of it: {error}"
        # Notes of others are not mapped here: who reaches for them ends itself.
        if (result.status, result.exit_code) != (SIGNAL, -11) and (bad := story_expects(result, EXIT, code=5)):
            return f"value {value}: {bad}"
    return None


@_story("cross-call", "a program that forges what the pool notes of others")
async def _forged_for_others(pool: ToolPool, planted: Planted) -> str | None:
    async with other_pool(pool, workers=1, concurrency=4, retries=0) as own:
        forge = f"{FORGE}limit = time.monotonic() + 1.2\nwhile time.monotonic() < limit:\n    fill(0)\n    time.sleep(0.001)"
        results = await asyncio.gather(
            own.run(forge, timeout=3.0),
            *(own.run("import sys, time; time.sleep(0.6); print('mine'); sys.exit(1)") for _ in range(3)),
            return_exceptions=True,
        )
    for result in results[1:]:
        if isinstance(result, BaseException):
            return f"{type(result).__name__}: {result}"
        if bad := story_expects(result, EXIT, "mine\n", 1):
            return bad
    return None


_case(
    "cross-call",
    "no memory to write to is shared with others",
    "import sys\ntry: lines = open('/proc/self/maps').read().splitlines()\nexcept OSError: lines = []\n"
    "shared = [line for line in lines if line.split()[1][1] == 'w' and line.split()[1][3] == 's']\n"
    "sizes = [int(b, 16) - int(a, 16) for a, b in (line.split()[0].split('-') for line in shared)]\n"
    "print('only a page' if sum(sizes) <= 4096 else f'{sum(sizes)} bytes: {shared}')",
    expect(OK, "only a page\n"),
)


async def _zygotes(before: set[int]) -> set[int]:
    """Children of this process that were not there before."""
    return {pid for pid, parent in parents().items() if parent == os.getpid()} - before


def _children() -> set[int]:
    return {pid for pid, parent in parents().items() if parent == os.getpid()}


@_story("processes", "a killed zygote is replaced, and its calls run again")
async def _killed_zygote(pool: ToolPool, planted: Planted) -> str | None:
    before = _children()
    async with other_pool(pool, retries=2) as own:
        calls = [asyncio.create_task(own.run(f"import time; time.sleep(0.7); print({i})")) for i in range(4)]
        await asyncio.sleep(0.4)
        zygotes = await _zygotes(before)
        old = {pid for zygote in zygotes for pid in (zygote, *family(zygote))}
        for pid in zygotes:
            os.kill(pid, signal.SIGKILL)
        results = await asyncio.gather(*calls)
        gone = await settles(lambda: not any(map(runs, old)))
    bad = [seen(r) for i, r in enumerate(results) if (r.status, r.stdout) != (OK, f"{i}\n")]
    return (bad[0] if bad else None) or (None if gone else f"{sum(map(runs, old))} processes of the killed zygote live on")


@_story("processes", "a call that cancelled its death signal dies with its zygote")
async def _no_death_signal(pool: ToolPool, planted: Planted) -> str | None:
    before = _children()
    code = "import ctypes, os, time\nos.setsid() if os.fork() == 0 else None\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\ntime.sleep(1e6)"
    async with other_pool(pool, retries=0) as own:
        call = asyncio.create_task(own.run(code))
        await asyncio.sleep(0.5)
        zygotes = await _zygotes(before)
        old = {pid for zygote in zygotes for pid in (zygote, *family(zygote))}
        for pid in zygotes:
            os.kill(pid, signal.SIGKILL)
        gone = await settles(lambda: not any(map(runs, old)))
        await asyncio.gather(call, return_exceptions=True)
    return None if gone else f"{sum(map(runs, old))} processes of the killed zygote live on"


@_story("processes", "a program that kills its zygote where it can")
async def _kills_zygote(pool: ToolPool, planted: Planted) -> str | None:
    async with other_pool(pool, retries=1) as own:
        try:
            await own.run("import os\nif os.getppid() > 1: os.kill(os.getppid(), 9)", timeout=3.0)
        except InfrastructureError as error:
            if pool.isolation.processes:
                return f"it could: {error}"
        return story_expects(await own.run("print('next')"), OK, "next\n")


TRAINER = """
import asyncio, json, sys
from rstar_jax.config import ToolConfig
from rstar_jax.tools.pool import ToolPool
async def main(config, code, calls, timeout):
    async with ToolPool(ToolConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in config.items()})) as pool:
        print("ready", flush=True)
        results = await asyncio.gather(*(pool.run(code, timeout=timeout) for _ in range(calls)))
    print(json.dumps([(result.status, result.stdout) for result in results]), flush=True)
asyncio.run(main(*json.loads(sys.argv[1])))
"""


@contextlib.asynccontextmanager
async def trainer(pool: ToolPool, planted: Planted, code: str, calls: int, timeout: float) -> Any:
    """A process with a pool of its own in the same tier, busy with `calls` calls. Gives (process, directory of its temporaries)."""
    config = dataclasses.replace(pool.config, preload=(), isolation=pool.isolation.tier)
    directory = tempfile.mkdtemp(prefix="trainer_", dir=planted.temporary)
    os.chmod(directory, 0o755)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TRAINER, json.dumps([dataclasses.asdict(config), code, calls, timeout]),
        cwd=REPOSITORY, env={**os.environ, "TMPDIR": directory}, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readline(), 60.0)
        yield process, directory
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        with contextlib.suppress(OSError):
            os.rmdir(directory)


for _number in (signal.SIGKILL, signal.SIGTERM):

    async def _killed_trainer(pool: ToolPool, planted: Planted, number: int = _number) -> str | None:
        code = "open('file', 'w').close()\nimport os, time\nif os.fork() == 0:\n    os.setsid()\ntime.sleep(1e6)"
        async with trainer(pool, planted, code, 4, 1000.0) as (process, directory):
            if not await settles(lambda: len(family(process.pid)) >= 2 + 4 * 2):
                return f"only {len(family(process.pid))} processes came up"
            await asyncio.sleep(0.3)
            old = family(process.pid)
            process.send_signal(number)
            await process.wait()
            if not await settles(lambda: not any(map(runs, old))):
                return f"{sum(map(runs, old))} of {len(old)} processes live on"
            if not await settles(lambda: not os.listdir(directory)):
                return f"left behind: {os.listdir(directory)}"
        return None

    _story("processes", f"the trainer gets {_number.name}", within=90.0)(_killed_trainer)


@_story("processes", "the trainer stands still while calls run", within=90.0)
async def _stopped_trainer(pool: ToolPool, planted: Planted) -> str | None:
    code = "import time; time.sleep(1); print('well')"
    async with trainer(pool, planted, code, 4, 2.0) as (process, _):
        await asyncio.sleep(0.4)
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(3.0)
        process.send_signal(signal.SIGCONT)
        results = json.loads(await asyncio.wait_for(process.stdout.readline(), 30.0))
        await process.wait()
    return None if results == [["ok", "well\n"]] * 4 else str(results)


# --- 4. output -------------------------------------------------------------------------------------------------------

_case(
    "output",
    "10 GB are ended",
    "for _ in range(10**6): print('x' * 10_000)",
    expect(ToolStatus.OUTPUT_LIMIT, also=lambda r: len(r.stdout) < 2100 and r.truncated),
)
_case(
    "output",
    "200 kB keep head and tail with a count of bytes",
    "for i in range(30_000): print(f'{i:06d}')",
    expect(OK, "".join(f"{i:06d}\n" for i in range(143))[:1000] + "\n[... 208000 bytes cut ...]\n" + "".join(f"{i:06d}\n" for i in range(29_857, 30_000))[-1000:],
           also=lambda r: r.truncated),
)  # fmt: skip
_case(
    "output",
    "one line of 1 MB",
    "print('x' * 10**6)",
    expect(OK, also=lambda r: r.truncated and f"[... {10**6 + 1 - 2000} bytes cut ...]" in r.stdout),
)
_case(
    "output",
    "bytes that are not UTF-8 (D9)",
    "import sys; n = sys.stdout.buffer.write(b'\\xff\\xfeA\\n')",
    expect(OK, "\ufffd\ufffdA\n"),
)
_case(
    "output",
    "random bytes",
    "import os\nfor _ in range(50): n = os.write(1, os.urandom(4096))",
    expect(OK, also=lambda r: r.stdout.encode("utf-8")),
)
_case("output", "a lone surrogate (D9)", "print('\\ud800')", expect(OK, "\\ud800\n"))
_case("output", "a NUL", "print('a\\0b')", expect(OK, "a\0b\n"))
_case("output", "standard output closed", "import os; os.close(1); print('x')", expect((OK, ERROR, EXIT), ""))
_case(
    "output",
    "standard output and error closed",
    "import os; os.close(1); os.close(2); print('x')",
    expect((OK, ERROR, EXIT), "", (0, 1)),
)
_case("output", "all descriptors closed, then an exception", "import os; os.closerange(0, 100); 1/0", expect((ERROR, EXIT), "", 1))
_case("output", "standard output turned to /dev/null", "import os; os.dup2(os.open('/dev/null', 1), 1); print('x')", expect(OK, ""))
_case("output", "standard output replaced", "import io, sys; sys.stdout = io.StringIO(); print('kept to itself')", expect(OK, ""))
_case("output", "standard output None", "import sys; sys.stdout = sys.stderr = None; print('x')", expect(OK, ""))
_case(
    "output",
    "standard output an object that breaks",
    "import sys\nclass S:\n    def __getattr__(self, name): raise RuntimeError\nsys.stdout = sys.stderr = S()",
    expect(OK, ""),
)
_case(
    "output",
    "what was printed before an exception is kept",
    "print('p1')\nprint('p2', end='')\n1/0",
    expect(ERROR, "p1\np2", 1, "ZeroDivisionError: division by zero\n"),
)
_case(
    "output",
    "forged marks are only text (D15)",
    "print('@@E'); print('@@D1.0'); print('{\"status\": \"error\"}'); import sys; sys.exit(0)",
    expect(OK, '@@E\n@@D1.0\n{"status": "error"}\n'),
)
_case(
    "output",
    "forged lines of the pool are only text",
    "print('[... 5 bytes cut ...]'); print('RESULT {}')",
    expect(OK, "[... 5 bytes cut ...]\nRESULT {}\n", also=lambda r: not r.truncated),
)
_case(
    "output",
    "forged frames on the output",
    "import os\nfor n in (4, 2**31 - 1): k = os.write(1, n.to_bytes(4, 'big') + b'{\"id\": 1}')",
    expect(OK, also=lambda r: r.stdout.endswith('{"id": 1}')),
)
_case(
    "output",
    "the exit code is not what was written",
    "import os, sys; os.write(2, b'exit code 0 \\0\\0\\0\\0'); os._exit(9)",
    expect(EXIT, code=9),
)
_case(
    "output", "functions of atexit do not run", "import atexit; n = atexit.register(print, 'late'); print('end')", expect(OK, "end\n")
)
_case(
    "output",
    "__del__ does not run at the end",
    "class A:\n    def __del__(self): print('late')\na = A(); print('end')",
    expect(OK, "end\n"),
)
_case(
    "output",
    "both streams at once",
    "import sys\nfor i in range(3): print('o' * 200_000); print('e' * 200_000, file=sys.stderr)",
    expect(OK, also=lambda r: "bytes cut" in r.stdout and "bytes cut" in r.stderr),
)
_case(
    "output",
    "a tiny pipe that does not block",
    "import fcntl, os\nfcntl.fcntl(1, 1031, 4096); os.set_blocking(1, False)\nn = 0\nwhile n < 100_000:\n    try: n += os.write(1, b'x' * 1000)\n    except BlockingIOError: pass",
    expect(OK, also=lambda r: "[... 98000 bytes cut ...]" in r.stdout),
)
_case(
    "output",
    "who reads its own pipe takes only its own output",
    "import os\nprint('a' * 100, flush=True)\ntry: fd = os.open('/proc/self/fd/1', os.O_RDONLY | os.O_NONBLOCK); os.read(fd, 10)\nexcept OSError: pass\nprint('end')",
    expect(OK, also=lambda r: r.stdout.endswith("end\n")),
)
_case(
    "output",
    "a character is never split",
    "print('漢' * 2000, end='')",
    expect(OK, "漢" * 333 + "\n[... 4002 bytes cut ...]\n" + "漢" * 333),
)
_case(
    "output",
    "what a background process printed in time",
    "import os, time\nif os.fork() == 0:\n    print('child'); os._exit(0)\nos.wait(); print('parent')",
    expect(OK, "child\nparent\n"),
)


@_story("output", "colours and progress bars leave what a terminal shows")
async def _terminal(pool: ToolPool, planted: Planted) -> str | None:
    code = "import sys\nprint('\\x1b[31mred\\x1b[0m')\nfor i in range(101): sys.stdout.write(f'\\r{i} %')\nprint()"
    shown = format_result(await pool.run(code), style="rstar2")
    return None if shown.endswith("stdout: red\n100 %\n") else repr(shown)


# --- 5. input --------------------------------------------------------------------------------------------------------

_case("input", "no input (D10)", "input()", expect(ERROR, "", 1, "EOFError: EOF when reading a line\n"))
_case("input", "no input for help() (D10)", "help()", expect(OK), timeout=10.0)
_case(
    "input",
    "no input for getpass",
    "import getpass, warnings; warnings.simplefilter('ignore'); getpass.getpass('')",
    expect(ERROR, ending="EOFError\n"),
)
_case(
    "input",
    "no input for pdb",
    "import pdb; pdb.set_trace()\nprint('on')",
    expect((ERROR, OK), also=lambda r: "<code>" in r.stdout or "bdb" in r.stderr),
    timeout=10.0,
)
for _text in ("3\n4\n", "no newline", "漢🎉", "\ud800x", "x" * 600_000):
    _case(
        "input",
        f"input of {len(_text)} characters beginning with {_text[:3]!a}",
        "import sys; t = sys.stdin.read(); print(len(t), ascii(t[:5]))",
        expect(OK, f"{len(_text)} {_text[:5]!a}\n"),
        stdin=_text,
    )
_case(
    "input",
    "input read by descriptor, line and subprocess",
    "import os, subprocess, sys\na = os.read(0, 2); subprocess.run(['head', '-c', '2']); print(); print(a, sys.stdin.readline())",
    expect(OK, also=lambda r: r.stdout.startswith("cd\n") and "b'ab'" in r.stdout),
    stdin="abcdef\n",
)
_case(
    "input",
    "input closed",
    "import os; os.close(0)\ntry: input()\nexcept (OSError, EOFError) as e: print('closed')",
    expect(OK, "closed\n"),
    stdin="text",
)
_case(
    "input",
    "input that is written to is bounded",
    TRY
    + "n = 0\ntry:\n    os.lseek(0, 0, 2)\n    while n < 500: n += os.write(0, bytes(1 << 20)) >> 20\nexcept OSError as e: print('refused')\nprint(n <= 64)",
    expect((OK, SIGNAL), also=lambda r: r.stdout in ("refused\nTrue\n", "")),
    stdin="x",
)
_case("input", "input too large is rejected", "1", expect(ToolStatus.REJECTED), stdin="x" * (2 << 20))


# --- 6. files --------------------------------------------------------------------------------------------------------

_READS = ("file_reads",)
_WRITES = ("file_writes",)
_case(
    "files",
    "a key by its path",
    lambda p: TRY + f"for path in ({p.key!r}, {p.open_key!r}): attempt(read, path); attempt(os.listdir, os.path.dirname(path))",
    refused(4),
    needs=_READS,
)
_case(
    "files",
    "a key by symbolic links",
    lambda p: (
        TRY
        + f"for i, path in enumerate(({p.key!r}, {p.open_key!r}, {p.directory!r}, '/')):\n    os.symlink(path, f'l{{i}}')\nattempt(read, 'l0'); attempt(read, 'l1'); attempt(read, 'l2/answer_key_open'); attempt(read, 'l3' + {p.open_key!r})"
    ),
    refused(4),
    needs=_READS,
)
_case(
    "files",
    "a key by hard links",
    lambda p: TRY + f"for i, path in enumerate(({p.key!r}, {p.open_key!r})): attempt(os.link, path, f'h{{i}}')",
    refused(2),
    needs=_READS,
)
_case(
    "files",
    "a key by the way up",
    lambda p: (
        TRY
        + "for _ in range(60):\n    try: os.chdir('..')\n    except OSError: break\n"
        + f"attempt(read, '.' + {p.open_key!r}); attempt(read, '.' + {p.key!r})"
    ),
    refused(2),
    needs=_READS,
)
_case(
    "files",
    "a key by directory descriptors",
    lambda p: (
        TRY
        + "fd = os.open('.', os.O_RDONLY)\nfor _ in range(60):\n    try: fd = os.open('..', os.O_PATH, dir_fd=fd)\n    except OSError: break\n"
        + f"for path in ({p.open_key!r}, {p.key!r}): attempt(os.open, path[1:], 0, dir_fd=fd)"
    ),
    refused(2),
    needs=_READS,
)
_case(
    "files",
    "a key by /proc/self",
    lambda p: (
        TRY
        + f"for way in ('root', 'cwd/../../../../..', 'task/self/root', 'map_files/..'): attempt(read, f'/proc/self/{{way}}' + {p.open_key!r})"
    ),
    refused(4),
    needs=_READS,
)
_case(
    "files",
    "a key by /proc of others",
    lambda p: (
        TRY
        + f"for pid in ({p.pid}, {p.victim}, 1, os.getppid()):\n    for way in ('root' + {p.open_key!r}, 'cwd/pyproject.toml', 'fd/{p.fd}', 'exe'):\n        attempt(read, f'/proc/{{pid}}/{{way}}') if pid else print('refused ESRCH')"
    ),
    refused(16),
    needs=("file_reads", "processes"),
)
_case(
    "files",
    "a key by /proc/*/root",
    lambda p: (
        TRY
        + f"import glob\nfor path in glob.glob('/proc/[0-9]*/root' + {p.open_key!r}) + glob.glob('/proc/*/task/*/root' + {p.open_key!r}): attempt(read, path)\nprint('refused EPERM')"
    ),
    refused(1),
    needs=_READS,
)
_case(
    "files", "a key by walking from /",
    "import os\ndef skip(path): return path in ('/proc', '/sys', '/usr', '/lib', '/lib64') or path.endswith(('site-packages', '/python3.11'))\n"
    "for top, folders, files in os.walk('/'):\n    folders[:] = [f for f in folders if not skip(os.path.join(top, f))]\n"
    "    for f in files:\n        if 'answer_key' in f: print(os.path.join(top, f), open(os.path.join(top, f)).read())\nprint('end')",
    expect(OK, "end\n"), needs=_READS,
)  # fmt: skip
kernel_case(
    "files",
    "a key by its handle",
    [
        ("name_to_handle_at", "-100, b'/', ctypes.create_string_buffer(256), ctypes.create_string_buffer(8), 0"),
        ("open_by_handle_at", "-100, ctypes.create_string_buffer(256), 0"),
    ],
)
kernel_case(
    "files", "files without a name or a place", [("memfd_create", "b'x', 0"), ("memfd_create", "b'x', 2"), ("memfd_secret", "0")]
)
_case(
    "files",
    "this repository and other packages",
    lambda p: (
        TRY
        + f"for path in ({str(REPOSITORY / 'pyproject.toml')!r}, {str(REPOSITORY / 'rstar_jax/types.py')!r}, {_package_file('jax')!r}, {_package_file('absl')!r}):\n    attempt(read, path)"
    ),
    refused(4),
    needs=_READS,
)
_case(
    "files",
    "files of the system that are no program's business",
    TRY
    + "for path in ('/etc/passwd', '/etc/shadow', '/etc/hostname', '/etc/hosts', '/etc/gshadow', '/proc/cmdline', '/proc/kcore', '/proc/config.gz', '/proc/kallsyms', '/proc/1/environ', '/proc/mounts_', '/sys/kernel/notes', '/boot/x', '/var/log/dpkg.log', '/dev/kmsg', '/dev/mem', '/dev/sda', '/dev/vda'):\n    attempt(read, path)",
    refused(18),
    needs=_READS,
)
_case(
    "files", "devices",
    TRY + "ok = {'null', 'zero', 'full', 'random', 'urandom'}\nimport glob, stat\n"
    "for path in ['/dev/kfd', '/dev/dri/renderD128', '/dev/nvidia0', '/dev/fuse', '/dev/tty', '/dev/ptmx', '/dev/console', '/dev/kvm', '/dev/vhost-vsock', '/dev/net/tun', '/dev/loop-control', *glob.glob('/dev/*')]:\n"
    "    try: mode = os.stat(path).st_mode\n    except OSError: continue\n    device = os.stat(path).st_rdev\n    if device in {os.makedev(1, n) for n in (3, 5, 7, 8, 9)}: continue\n"
    "    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):\n        for flags in (os.O_RDONLY, os.O_RDWR): attempt(os.open, path, flags | os.O_NONBLOCK | os.O_NOCTTY)\n"
    "for name in sorted(ok): os.close(os.open(f'/dev/{name}', os.O_RDWR))\nprint('refused EPERM')",
    lambda r, p: None if r.status is OK and "DONE" not in r.stdout else seen(r), needs=_READS,
)  # fmt: skip
_case(
    "files",
    "no /sys, no settings of the kernel",
    TRY
    + "attempt(os.listdir, '/sys/class'); attempt(os.listdir, '/sys/fs/cgroup'); attempt(read, '/proc/sys/kernel/core_pattern'); attempt(read, '/proc/meminfo_'); attempt(open, '/proc/sysrq-trigger', 'a'); attempt(open, '/proc/sys/kernel/core_pattern', 'a'); attempt(open, '/proc/sys/vm/overcommit_memory', 'a')",
    refused(7),
    needs=_READS,
)
_case(
    "files",
    "device nodes, and pipes with names",
    TRY
    + "import stat\nfor kind in (stat.S_IFBLK, stat.S_IFCHR): attempt(os.mknod, f'd{kind}', kind | 0o666, os.makedev(1, 3))\nos.mkfifo('fifo'); os.mknod('plain')",
    refused(2),
    needs=("syscalls",),
)
_case(
    "files",
    "metadata of a file that everybody may write to",
    lambda p: (
        TRY
        + f"for path in ({p.open_file!r}, {p.key!r}, {p.open_directory!r}):\n    attempt(os.chmod, path, 0o777); attempt(os.utime, path, (1, 1)); attempt(os.chown, path, os.getuid(), -1); attempt(os.setxattr, path, 'user.x', b'1')"
    ),
    refused(12),
    needs=_WRITES,
)


def _package_file(name: str) -> str:
    """The first file of an installed package, without importing it."""
    import importlib.util  # only this function finds packages

    spec = importlib.util.find_spec(name)
    return str(spec.origin) if spec and spec.origin else f"/{name}"


@_story("files", "writing outside of the own directory", needs=_WRITES)
async def _writes_outside(pool: ToolPool, planted: Planted) -> str | None:
    name = f"probe_{secrets.token_hex(8)}"
    site = os.path.dirname(os.path.dirname(_package_file("numpy")))
    places = ["/", "/etc", "/usr", "/usr/lib", "/tmp", "/var/tmp", "/dev", "/dev/shm", "/run", "/proc", str(pathlib.Path.home()), sys.prefix,
              site, f"{site}/numpy", str(REPOSITORY), planted.directory, planted.open_directory, planted.temporary, "/run/lock"]  # fmt: skip
    code = (
        TRY
        + f"for place in {places!r}:\n    for make in (lambda p: open(p, 'w').close(), os.mkdir, lambda p: os.symlink('x', p), os.mkfifo):\n        try: make(place + '/{name}')\n        except OSError: pass\n"
    )
    code += f"import json\nfor path in (json.__file__, sys.executable, {planted.open_file!r}, {planted.key!r}, {planted.open_key!r}):\n"
    code += "    attempt(open, path, 'r+b'); attempt(open, path, 'ab'); attempt(os.truncate, path, 0); attempt(os.unlink, path); attempt(os.rename, path, path + 'x')"
    before = {path: os.stat(path).st_mtime_ns for path in (json.__file__, planted.open_file, planted.key, planted.open_key)}
    result = await pool.run(code)
    found = [place for place in places if os.path.lexists(f"{place}/{name}")]
    changed = [path for path, when in before.items() if not os.path.exists(path) or os.stat(path).st_mtime_ns != when]
    for place in found:
        with contextlib.suppress(OSError):
            os.unlink(f"{place}/{name}")
    if found or changed:
        return f"written: {found}, changed: {changed}"
    return refused(25, (*NOT_THERE, "ETXTBSY", "EBUSY"))(result, planted)


@_story("files", "the directory of another call", needs=_READS)
async def _other_directory(pool: ToolPool, planted: Planted) -> str | None:
    mark = f"private-{secrets.token_hex(8)}"
    async with other_pool(pool, workers=1, concurrency=3) as own:
        owner = asyncio.create_task(
            own.run(
                CHMOD
                + f"import time; open('mine', 'w').write({mark!r}); _chmod('mine', 0o666); _chmod('.', 0o777); time.sleep(1.5); print(os.getcwd(), open('mine').read())"
            )
        )
        await asyncio.sleep(0.5)
        spy = (
            TRY + "import glob\nhere = os.getcwd(); up = os.path.dirname(here)\ncwds = [f'{up}/{i}' for i in range(40)] + glob.glob('/proc/[0-9]*/cwd') + glob.glob('/proc/[0-9]*/r??t/box')\n"
            "found = []\nfor cwd in cwds:\n    if os.path.realpath(cwd) == here and not cwd.startswith('/proc'): continue\n    try: found.append(open(cwd + '/mine').read())\n    except OSError: pass\n"
            "    try: open(cwd + '/mine', 'a').write('spoiled')\n    except OSError: pass\n    try: open(cwd + '/theirs', 'x')\n    except OSError: pass\nprint(found)"
        )  # fmt: skip
        spied = await own.run(spy)
        owned = await owner
    if mark in spied.stdout or spied.status is not OK:
        return f"the spy: {seen(spied)}"
    return story_expects(owned, OK, also=lambda r: r.stdout.endswith(f" {mark}\n"))


@_story("files", "the directory is empty at each call, and gone with it")
async def _empty(pool: ToolPool, planted: Planted) -> str | None:
    look = "import os\nprint([os.listdir(d) for d in ('.', os.environ['TMPDIR'], os.environ['HOME'])], os.environ['HOME'] == os.environ['TMPDIR'] == os.getcwd())"
    make = (
        CHMOD
        + "import socket\nos.makedirs('a/b'); open('a/b/f', 'w').write('x'); os.symlink('/', 'root'); open(b'\\xff\\n* -rf', 'w').close(); os.mkfifo('pipe')\n"
        "os.mkdir('closed'); open('closed/x', 'w').close(); _chmod('closed', 0); _chmod('a', 0); _chmod('.', 0)"
    )
    for _ in range(pool.config.concurrency):
        made = await pool.run(make)
        if made.status is not OK:
            return seen(made)
    results = await asyncio.gather(*(pool.run(look) for _ in range(2 * pool.config.concurrency)))
    return next((seen(r) for r in results if r.stdout != "[[], [], []] True\n"), None)


_case(
    "files",
    "a deep tree of directories",
    "import os\nfor _ in range(1500):\n    os.mkdir('d'); os.chdir('d')\nprint('deep')",
    expect(OK, "deep\n"),
)
_case(
    "files",
    "a farm of symbolic links",
    lambda p: (
        f"import os\nfor i in range(500): os.symlink({p.directory!r}, f's{{i}}'); os.symlink(f's{{i}}', f't{{i}}')\nos.symlink('loop', 'loop'); print('planted')"
    ),
    expect(OK, "planted\n"),
)
_case(
    "files", "a program can import what it wrote", "open('helper.py', 'w').write('x = 5')\nimport helper\nhelper.x", expect(OK, "5\n")
)
_case(
    "files",
    "temporary files",
    "import tempfile, os\nwith tempfile.TemporaryDirectory() as d, tempfile.NamedTemporaryFile() as f: f.write(b'x'); print(os.path.dirname(d) == os.environ['TMPDIR'])",
    expect(OK, "True\n"),
)
_case(
    "files",
    "/tmp can be written to",
    "open('/tmp/x', 'w').write('y'); print(open('/tmp/x').read())",
    expect(OK, "y\n"),
    # an environment that lies below /tmp itself is mounted there for reading
    tiers=("nowhere",) if sys.prefix.startswith("/tmp/") else ("ns-root", "userns"),
)


@_story("files", "the directory of the next call cannot be made before it", needs=_WRITES)
async def _squatting(pool: ToolPool, planted: Planted) -> str | None:
    code = "import os\nfor i in range(50):\n    try: os.mkdir(f'../{i}')\n    except OSError: pass\n    try: open(f'../{i}/trap', 'w')\n    except OSError: pass"
    await asyncio.gather(*(pool.run(code) for _ in range(4)))
    results = await asyncio.gather(*(pool.run("import os; print(os.listdir('.'))") for _ in range(12)))
    return next((seen(r) for r in results if r.stdout != "[]\n"), None)


# --- 7. secrets ------------------------------------------------------------------------------------------------------

SEARCH = """import re
def search(prefix):
    pattern, found = re.compile(prefix.encode() + b"[0-9a-f]{32}"), set()
    try:
        maps, memory = open("/proc/self/maps").read().splitlines(), open("/proc/self/mem", "rb", 0)
    except OSError:
        return found  # it may not look into itself
    for line in maps:
        area, rights, *_ = line.split()
        if rights[0] != "r" or "[v" in line: continue
        at, end = (int(x, 16) for x in area.split("-"))
        while at < end:
            size = min(end - at, 1 << 20)
            try:
                memory.seek(at)
                found.update(pattern.findall(memory.read(size)))
            except (OSError, ValueError, OverflowError): break
            at += size
    return found
"""
_case(
    "secrets",
    "the environment",
    lambda p: (
        f"import os\nprint({p.variable!r} in os.environ, sorted(os.environ))\ntry: print(open('/proc/self/environ').read())\nexcept OSError: pass"
    ),
    expect(OK, also=lambda r: r.stdout.startswith("False")),
)
_case(
    "secrets",
    "the environment of a child process",
    "import subprocess; print(subprocess.run(['env'], capture_output=True, text=True).stdout)",
    expect(OK, also=lambda r: "CANARY" not in r.stdout and "PATH=" in r.stdout),
)
_case("secrets", "the own memory", SEARCH + "print(len(search('planted-')))", expect(OK, "0\n"), timeout=15.0)
_case(
    "secrets",
    "what others' /proc says",
    lambda p: (
        TRY
        + f"for pid in ({p.pid}, {p.victim}):\n    for name in ('environ', 'cmdline', 'maps', 'mem', 'stat', 'status', 'auxv', 'stack', 'wchan_', 'io', 'limits'):\n        attempt(read, f'/proc/{{pid}}/{{name}}')\n    attempt(os.listdir, f'/proc/{{pid}}/fd'); attempt(os.listdir, f'/proc/{{pid}}/task'); attempt(os.readlink, f'/proc/{{pid}}/exe'); attempt(os.readlink, f'/proc/{{pid}}/cwd')"
    ),
    refused(30),
    needs=("processes", "file_reads"),
)
_case(
    "secrets",
    "who is there",
    "import os\ntry: pids = [p for p in os.listdir('/proc') if p.isdigit()]\nexcept OSError: pids = []\nprint(len(pids) <= 2, pids)",
    expect(OK, also=lambda r: r.stdout.startswith("True")),
    needs=("processes", "file_reads"),
)
_case(
    "secrets",
    "inherited descriptors",
    "import os\nn = 0\nfor fd in range(3, 4096):\n    for use in (os.fstat, lambda fd: os.write(fd, b'forged'), lambda fd: os.read(fd, 1)):\n        try: use(fd); n += 1\n        except OSError: pass\nprint(n)",
    expect(OK, "0\n"),
)
_case(
    "secrets",
    "no core dumps",
    "import os, resource\nprint(resource.getrlimit(resource.RLIMIT_CORE), flush=True)\nif os.fork() == 0: os.abort()\nos.wait(); print(os.listdir('.'))",
    expect(OK, "(0, 0)\n[]\n"),
)
_case(
    "secrets",
    "the arguments of its own process",
    "import sys\ntry: text = open('/proc/self/cmdline').read()\nexcept OSError: text = ''\nprint(sys.argv, len(text) < 5000)",
    expect(OK, "[''] True\n"),
)
kernel_case(
    "secrets",
    "keys, and messages of the kernel",
    [
        ("keyctl", "0, -3, 1"),
        ("keyctl", "6, -4, 0, 0"),
        ("add_key", "b'user', b'x', b'y', 1, -3"),
        ("request_key", "b'user', b'x', 0, 0"),
        ("syslog", "3, ctypes.create_string_buffer(100), 100"),
    ],
)


@_story("secrets", "the program and the input of an earlier call are in no memory")
async def _earlier(pool: ToolPool, planted: Planted) -> str | None:
    mark = f"earlier-{secrets.token_hex(16)}"
    async with other_pool(pool, workers=1, concurrency=1) as own:
        for i in range(5):
            await own.run(f"x = {mark!r}\n#{i}\nprint(x)", stdin=mark)
        result = await own.run(SEARCH + "print(len(search('ear' + 'lier-')))", timeout=15.0)
    return story_expects(result, OK, "0\n")


# --- 8. privileges ---------------------------------------------------------------------------------------------------

_case(
    "privileges", "what it holds",
    "want = ('CapInh', 'CapPrm', 'CapEff', 'CapAmb', 'NoNewPrivs', 'Seccomp', 'Groups')\n"
    "for line in open('/proc/self/status'):\n    name, _, value = line.partition(':')\n    if name in want: print(name, value.split())",
    expect(OK, also=lambda r: "NoNewPrivs ['1']" in r.stdout and "Seccomp ['2']" in r.stdout and "Groups []" in r.stdout
           and all(f"{c} ['0000000000000000']" in r.stdout for c in ("CapPrm", "CapEff", "CapInh", "CapAmb"))),
    needs=("syscalls",), tiers=("ns-root",),
)  # fmt: skip
_case(
    "privileges",
    "it is not root",
    "import os; print(0 in os.getresuid(), 0 in os.getresgid())",
    expect(OK, "False False\n"),
    needs=("user",),
)
_case(
    "privileges",
    "no capability works",
    TRY
    + "attempt(os.setgroups, [0]); attempt(os.nice, -20); attempt(os.setpriority, 0, 0, -20); attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)); attempt(os.chroot, '.'); attempt(os.mknod, 'd', 0o60666, 2048)\nattempt(lambda: os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1000'))\nimport fcntl; attempt(fcntl.ioctl, os.open('.', 0), 0x40086602, b'\\x20' + bytes(7))",
    refused(8, (*NO, "ENOENT", "ENOTTY", "EROFS", "EOPNOTSUPP", "EINVAL")),
    needs=("syscalls",),
)
_case(
    "privileges",
    "becoming another user",
    TRY
    + "for f in (os.setuid, os.seteuid, os.setgid, os.setegid): attempt(f, 0)\nattempt(os.setresuid, 0, 0, 0); attempt(os.setresgid, 0, 0, 0); attempt(os.setreuid, 12345, 12345); attempt(os.setuid, 65534)",
    refused(8, (*NO, "EINVAL")),
    needs=("syscalls",),
)
_case(
    "privileges",
    "programs with the set-user-id bit",
    "import os, subprocess\nfor name in ('/usr/bin/su', '/usr/bin/mount', '/bin/ping'):\n    try: r = subprocess.run([name, '-c', 'id -u'], capture_output=True, text=True, stdin=subprocess.DEVNULL)\n    except OSError: continue\n    print(r.stdout.strip() == '0', end=' ')\nopen('s', 'w').close(); os.chmod('s', 0o4755)\nprint('end')",
    expect((OK, ERROR), also=lambda r: "True" not in r.stdout),
    needs=("syscalls",),
)
kernel_case(
    "privileges",
    "mounts",
    [
        ("mount", "b'none', b'/', 0, 0x44000, 0"),
        ("mount", "b'tmpfs', b'.', b'tmpfs', 0, 0"),
        ("mount", "b'/', b'.', 0, 4096, 0"),
        ("umount2", "b'/proc', 2"),
        ("pivot_root", "b'.', b'.'"),
        ("chroot", "b'.'"),
        ("open_tree", "-100, b'/', 1"),
        ("fsopen", "b'tmpfs', 0"),
        ("fsmount", "3, 0, 0"),
        ("fsconfig", "3, 6, 0, 0, 0"),
        ("fspick", "-100, b'/', 0"),
        ("move_mount", "-100, b'/', -100, b'.', 0"),
        ("mount_setattr", "-100, b'/', 0, bytes(32), 32"),
    ],
)
_FLAGS = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80, 0x10020000, 0x7E020000)
kernel_case("privileges", "new namespaces", [("unshare", hex(flags)) for flags in _FLAGS])
_case(
    "privileges",
    "new namespaces by clone",
    TRY
    + f"def clone(flags):\n    pid = kernel({number('clone')}, flags | 17, 0, 0, 0, 0)\n    if pid == 0: os._exit(0)\n    return pid\nfor flags in {(*_FLAGS[:-3], 0x10020000)!r}: attempt(clone, flags)".replace(
        ", 128", ""
    ),
    refused(8, (*NO, "EINVAL")),
    needs=("syscalls",),
    machines=MACHINES,
)
kernel_case("privileges", "clone3", [("clone3", "bytes(88), 88")], ("ENOSYS",))
_case(
    "privileges",
    "namespaces of others",
    lambda p: (
        TRY
        + f"for pid in ({p.pid}, {p.victim}, 1, 'self'):\n    for name in ('mnt', 'net', 'pid', 'user'):\n        attempt(lambda: kernel({number('setns')}, os.open(f'/proc/{{pid}}/ns/{{name}}', 0), 0))"
    ),
    refused(16, (*NOT_THERE, "EINVAL")),
    needs=("syscalls", "processes"),
    machines=MACHINES,
)
kernel_case(
    "privileges",
    "io_uring",
    [
        ("io_uring_setup", "8, ctypes.create_string_buffer(200)"),
        ("io_uring_enter", "0, 0, 0, 0, 0, 0"),
        ("io_uring_register", "0, 0, 0, 0"),
    ],
)
_case(
    "privileges",
    "tracing",
    lambda p: (
        TRY
        + f"child = os.fork()\nif child == 0: signal.pause()\nfor pid in ({p.pid}, {p.victim}, 1, child):\n    for request in (16, 0x4206): attempt(kernel, {number('ptrace')}, request, pid, 0, 0)\nattempt(kernel, {number('ptrace')}, 0, 0, 0, 0)\nos.kill(child, 9)"
    ),
    refused(9, NO),
    needs=("syscalls",),
    machines=MACHINES,
)
_case(
    "privileges",
    "memory of others",
    lambda p: (
        TRY
        + f"here = ctypes.create_string_buffer(64)\nclass Vec(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]\nv = Vec(ctypes.addressof(here), 64)\nfor pid in ({p.pid}, {p.victim}, 1, os.getpid()):\n    for n in ({number('process_vm_readv')}, {number('process_vm_writev')}): attempt(kernel, n, pid, ctypes.byref(v), 1, ctypes.byref(v), 1, 0)"
    ),
    refused(8, NO),
    needs=("syscalls",),
    machines=MACHINES,
)
_case(
    "privileges",
    "descriptors of others",
    lambda p: (
        TRY
        + f"child = os.fork()\nif child == 0: signal.pause()\nfor pid in ({p.pid}, {p.victim}, 1, child):\n    attempt(lambda: kernel({number('pidfd_getfd')}, os.pidfd_open(pid), 0, 0))\nos.kill(child, 9)"
    ),
    refused(4),
    needs=("syscalls", "processes"),
    machines=MACHINES,
)
kernel_case(
    "privileges",
    "raw interfaces",
    [
        ("bpf", "0, bytes(128), 128"),
        ("perf_event_open", "bytes(128), 0, -1, -1, 0"),
        ("userfaultfd", "1"),
        ("kcmp", "1, 1, 0, 0, 0"),
        ("fanotify_init", "0, 0"),
    ],
)
kernel_case(
    "privileges",
    "objects that outlive their process",
    [("shmget", "0, 4096, 0o1600"), ("semget", "0, 1, 0o1600"), ("msgget", "0, 0o1600"), ("mq_open", "b'queue', 0o102, 0o600, 0")],
)
kernel_case(
    "privileges",
    "administration of the kernel",
    [
        ("init_module", "bytes(8), 8, b''"),
        ("finit_module", "0, b'', 0"),
        ("delete_module", "b'nothing_of_that_name', 0"),
        ("kexec_load", "0, 0, 0, 0"),
        ("swapon", "b'/nothing', 0"),
        ("swapoff", "b'/nothing'"),
        ("reboot", "0, 0, 0, 0"),
        ("settimeofday", "0, 0"),
        ("clock_settime", "0, bytes(16)"),
        ("adjtimex", "ctypes.create_string_buffer(256)"),
        ("acct", "b'/nothing'"),
        ("quotactl", "0x80000100, 0, 0, 0"),
        ("sethostname", "b'x', 1"),
        ("setdomainname", "b'x', 1"),
    ],
)
_case(
    "privileges",
    "keystrokes for a terminal",
    TRY
    + "import fcntl\nattempt(os.open, '/dev/tty', os.O_RDWR)\nfor fd in (0, 1, 2): attempt(fcntl.ioctl, fd, 0x5412, b'x')\nattempt(os.open, '/dev/console', os.O_RDWR)",
    refused(5, (*NOT_THERE, "ENOTTY", "EINVAL")),
    needs=_READS,
)
_case(
    "privileges",
    "no_new_privs stays",
    TRY + "attempt(kernel, 157 if os.uname().machine == 'x86_64' else 167, 38, 0, 0, 0, 0)",
    refused(1, ("EINVAL",)),
    machines=MACHINES,
)

# --- 9. network ------------------------------------------------------------------------------------------------------

_NET = ("network",)
_case(
    "network",
    "TCP to a listener on the loopback",
    lambda p: (
        TRY + f"attempt(socket.create_connection, ('127.0.0.1', {p.port}), 2); attempt(socket.create_connection, ('::1', {p.port}), 2)"
    ),
    refused(2, NO),
    needs=_NET,
)
_case(
    "network",
    "UDP to a socket on the loopback",
    lambda p: TRY + f"attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {p.datagram_port})))",
    refused(1, NO),
    needs=_NET,
)
_case(
    "network",
    "names and web pages",
    lambda p: (
        f"import socket, urllib.request\nfor f in (lambda: socket.getaddrinfo('example.com', 80), lambda: socket.gethostbyname('example.com'), lambda: urllib.request.urlopen('http://127.0.0.1:{p.port}', timeout=2), lambda: urllib.request.urlopen('http://example.com', timeout=2)):\n    try: print('DONE', f())\n    except OSError as error: print('refused')"
    ),
    expect(OK, "refused\n" * 4),
    needs=_NET,
    within=10.0,
)
_case(
    "network",
    "sockets of other families",
    TRY
    + "for family, kind, protocol in ((2, 1, 0), (2, 2, 0), (2, 3, 1), (2, 2, 1), (2, 5, 132), (10, 1, 0), (10, 2, 0), (16, 3, 0), (16, 3, 15), (17, 3, 0), (31, 3, 0), (38, 5, 0), (40, 1, 0), (44, 3, 0), (15, 3, 2), (30, 5, 0), (43, 1, 0), (29, 3, 1), (2, 1, 262)):\n    attempt(socket.socket, family, kind, protocol)",
    refused(19, NO),
    needs=_NET,
)
_case(
    "network",
    "listening",
    TRY
    + "def listen(family, address):\n    s = socket.socket(family); s.bind(address); s.listen()\nattempt(listen, socket.AF_INET, ('0.0.0.0', 0)); attempt(listen, socket.AF_INET6, ('::', 0))",
    refused(2, NO),
    needs=_NET,
)
_case(
    "network",
    "an abstract unix socket outside, and the descriptor that it gives away",
    lambda p: (
        TRY
        + f"def connect():\n    s = socket.socket(socket.AF_UNIX); s.settimeout(2); s.connect('\\0{p.abstract}')\n    return [os.read(fd, 100) for fd in socket.recv_fds(s, 10, 1)[1]]\nattempt(connect)"
    ),
    refused(1),
    needs=_NET,
)
_case(
    "network",
    "a unix socket outside by its path",
    lambda p: (
        TRY
        + f"def connect(path):\n    s = socket.socket(socket.AF_UNIX); s.settimeout(2); s.connect(path)\n    return [os.read(fd, 100) for fd in socket.recv_fds(s, 10, 1)[1]]\nattempt(connect, {p.socket!r})\nos.symlink({p.socket!r}, 'l'); attempt(connect, 'l')"
    ),
    refused(2),
    needs=_NET,
)
_case(
    "network", "a unix socket outside from one end of a pair",
    lambda p: TRY + f"for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):\n    for path in ({p.datagram!r}, {p.socket!r}, '\\0{p.abstract}'):\n"
    "        try: a, b = socket.socketpair(socket.AF_UNIX, kind)\n        except OSError: continue\n        for use in (lambda: a.connect(path), lambda: a.sendto(b'x', path), lambda: b.close() or a.connect(path)):\n            try: use()\n            except OSError: continue\n            print('DONE', kind, path)\nprint('refused EPERM')",
    # A connected stream ignores the address of sendto: it goes to the other end of the pair.
    lambda r, p: None if r.status is OK and not p.contacts and not [l for l in r.stdout.splitlines() if l.startswith(("DONE 2", "DONE 3"))] else f"{p.contacts} {seen(r)}",
    needs=_NET,
)  # fmt: skip
_case(
    "network",
    "pairs of sockets and pipes work",
    "import os, socket\na, b = socket.socketpair(); a.send(b'x'); r, w = os.pipe(); n = os.write(w, b'y'); print(b.recv(1) + os.read(r, 1))",
    expect(OK, "b'xy'\n"),
)
_case(
    "network",
    "asyncio works",
    "import asyncio\nasync def main():\n    await asyncio.sleep(0.01); return await asyncio.to_thread(lambda: 5)\nprint(asyncio.run(main()))",
    expect(OK, "5\n"),
)
_case(
    "network",
    "descriptors over a pair of the own",
    "import os, socket\na, b = socket.socketpair(); r, w = os.pipe()\nif os.fork() == 0:\n    n = socket.send_fds(a, [b'x'], [w]); os._exit(0)\nfds = socket.recv_fds(b, 10, 2)[1]; n = os.write(fds[0], b'passed'); print(os.read(r, 10)); p = os.wait()",
    expect(OK, "b'passed'\n"),
)


# --- 10. one call and the next ---------------------------------------------------------------------------------------

SPOIL = """
import atexit, builtins, gc, math, os, random, signal, sys, threading, time
import numpy, sympy
math.sqrt = numpy.sqrt = sympy.sqrt = lambda x: 'spoiled'
sympy.core.cache.clear_cache(); sympy.Symbol.__str__ = lambda self: 'spoiled'
builtins.print = None; builtins.left = 1; builtins._ = 'left'
sys.modules['json'] = None; sys.path[:] = []; sys.stdout.reconfigure(encoding='ascii'); sys.displayhook = None
sys.setrecursionlimit(60); sys.argv.append('left'); sys.path_hooks.clear(); sys.meta_path.clear(); sys.path_importer_cache.clear()
os.environ['LEFT'] = '1'; os.umask(0o777); gc.disable(); signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); random.seed(1); numpy.random.seed(1); numpy.seterr(all='raise')
atexit.register(os._exit, 9); threading.Thread(target=time.sleep, args=(0.01,), daemon=True).start()
for name in ('json.py', 'random.py', 'math.py', 'sitecustomize.py', 'numpy.py', 'secrets.py'):
    with open(name, 'w') as file: n = file.write('raise SystemExit(9)')
class Bomb:
    def __del__(self): os._exit(9)
bomb = Bomb()
"""
LOOK = """
import builtins, gc, json, math, os, random, secrets, signal, sys
import numpy, sympy
print(math.sqrt(4), numpy.sqrt(4.0), sympy.sqrt(4), sympy.Symbol('x'), hasattr(builtins, 'left'), hasattr(builtins, '_'), json.dumps(1))
print('LEFT' in os.environ, sys.getrecursionlimit(), sys.argv, sys.stdout.encoding, gc.isenabled(), os.getpriority(0, 0))
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.pthread_sigmask(0, ()), random.random(), numpy.random.rand())
print(numpy.geterr()['over'], os.listdir('.'), os.umask(0o22) != 0o777)
"""


@_story("cross-call", "nothing of a call reaches the next")
async def _nothing_left(pool: ToolPool, planted: Planted) -> str | None:
    spoilt = await asyncio.gather(*(pool.run(SPOIL) for _ in range(8)))
    if bad := next((seen(r) for r in spoilt if r.status is not OK), None):
        return f"spoiling itself failed: {bad}"
    results = await asyncio.gather(*(pool.run(LOOK) for _ in range(8)))
    texts = {r.stdout for r in results} | {r.stderr for r in results} - {""}
    start = "2.0 2.0 2 x False False 1\nFalse 1000 [''] utf-8 True"
    clean = len(texts) == 1 and next(iter(texts)).startswith(start) and "True set() 0.84" in next(iter(texts))
    return None if clean else str(texts)[:600]


@_story("cross-call", "files of a call do not reach the next, wherever they can be written")
async def _files_left(pool: ToolPool, planted: Planted) -> str | None:
    mark = f"left_{secrets.token_hex(8)}"
    places = "('.', '/tmp', '/dev/shm', '/var/tmp', os.environ['HOME'], os.path.expanduser('~'))"
    if not pool.isolation.file_writes:
        places = "('.', os.environ['HOME'], os.environ['TMPDIR'])"  # elsewhere the tier keeps nobody from writing
    write = f"import os\nfor p in {places}:\n    try: open(p + '/{mark}.py', 'w').write('x=1')\n    except OSError: pass"
    look = f"import os\nprint([p for p in {places} if os.path.exists(p + '/{mark}.py')])\ntry: import {mark}\nexcept ImportError: print('not there')"
    await asyncio.gather(*(pool.run(write) for _ in range(8)))
    results = await asyncio.gather(*(pool.run(look) for _ in range(8)))
    return next((seen(r) for r in results if r.stdout != "[]\nnot there\n"), None)


@_story("cross-call", "calls at the same time cannot meet", needs=("network", "file_writes", "processes"))
async def _meeting(pool: ToolPool, planted: Planted) -> str | None:
    mark = secrets.token_hex(8)
    wait = (
        "import os, socket, time\ndef tries(*actions):\n    for a in actions:\n        try: a()\n        except Exception: pass\n"
        f"s = []\ndef listen():\n    x = socket.socket(socket.AF_UNIX); x.bind('\\0{mark}'); x.listen(); s.append(x)\n"
        f"tries(listen, lambda: open('/tmp/{mark}', 'w').write('x'), lambda: open('/dev/shm/{mark}', 'w').write('x'), lambda: os.mkfifo('/tmp/f{mark}'))\n"
        "import multiprocessing.shared_memory as m\n"
        f"tries(lambda: m.SharedMemory('s{mark}', create=True, size=10))\ntime.sleep(1.5)\n"
    )
    seek = (
        f"import os, socket, signal\ndef connect():\n    x = socket.socket(socket.AF_UNIX); x.connect('\\0{mark}'); print('MET by socket')\n"
        "import multiprocessing.shared_memory as m\n"
        f"for a in (connect, lambda: print('MET in /tmp', open('/tmp/{mark}').read()), lambda: print('MET in /dev/shm', open('/dev/shm/{mark}').read()), lambda: print('MET', m.SharedMemory('s{mark}'))):\n"
        "    try: a()\n    except OSError: pass\n"
        "me = os.getpid()\nfor pid in [p for p in range(2, 70000) if p != me]:\n    try: os.kill(pid, 0); print('MET by signal', pid)\n    except OSError: pass"
    )
    async with other_pool(pool, workers=1, concurrency=3) as own:
        waiting = [asyncio.create_task(own.run(wait)) for _ in range(2)]
        await asyncio.sleep(0.5)
        result = await own.run(seek)
        await asyncio.gather(*waiting)
    return story_expects(result, OK, "")


@_story("cross-call", "random numbers and hashes are the same in every call and zygote")
async def _seeds(pool: ToolPool, planted: Planted) -> str | None:
    code = "import random, numpy; print(random.random(), numpy.random.rand(), hash('abc'), {'a', 'b', 'c', 'd'}, {1.5, 'x', (2, 'y')})"
    results = await asyncio.gather(*(pool.run(code) for _ in range(12)))
    texts = {r.stdout for r in results}
    return None if len(texts) == 1 and "" not in texts else str(texts)[:500]


@_story("cross-call", "alone or among 64: the same result", within=60.0)
async def _alone(pool: ToolPool, planted: Planted) -> str | None:
    code = "import sympy as s\nx, y = s.symbols('x y')\nprint(s.solve([x**2 + y - 3, x - y], [x, y]), s.factor(x**6 - 1), s.integrate(x * s.sin(x), x))"
    alone = await pool.run(code)
    results = await asyncio.gather(*(pool.run(code) for _ in range(64)))
    texts = {(r.status, r.stdout) for r in (alone, *results)}
    return None if len(texts) == 1 and alone.status is OK else f"{len(texts)} results: {seen(alone)}"


@_story("cross-call", "exit() of one call does not end the next (D16)")
async def _exit(pool: ToolPool, planted: Planted) -> str | None:
    first = await pool.run("exit(0)")
    return story_expects(first, OK, "", 0) or story_expects(await pool.run("print('next')"), OK, "next\n")


@_story("cross-call", "a background process of one call outlives another's end")
async def _background(pool: ToolPool, planted: Planted) -> str | None:
    long = asyncio.create_task(pool.run("import os, time\nos.system('(sleep 0.8; echo background) &')\ntime.sleep(1.6)\nprint('end')"))
    for _ in range(10):
        await pool.run("1")
    return story_expects(await long, OK, "background\nend\n")


# --- 11. function ----------------------------------------------------------------------------------------------------

for _code, _stdout in {
    "print(2+2)": "4\n",
    "34*57": "1938\n",
    "a=3; a+1": "4\n",
    "None": "",
    "x = 1": "",
    "'text'": "'text'\n",
    "": "",
    "# a comment": "",
    "def f():\n    print('once')\n    return 7\nf()": "once\n7\n",
    "for i in range(2):\n    i": "",
    "from __future__ import annotations\nx: undefined = 1\nx": "1\n",
    "__name__": "'__main__'\n",
}.items():
    _case("function", f"what is shown of {_code.splitlines()[-1] if _code else 'nothing'!r} (D13)", _code, expect(OK, _stdout, 0, ""))
_case(
    "function",
    "a last expression that raises runs once",
    "def f():\n    print('x')\n    raise ValueError('no')\nf()",
    expect(ERROR, "x\n", 1, "ValueError: no\n", lambda r: r.stderr.count("Traceback") == 1),
)
_case(
    "function",
    "a syntax error has a caret and no frame of ours",
    "x = 1\ndef f(:\n    pass",
    expect(
        ERROR,
        "",
        1,
        '  File "<code>", line 2\n    def f(:\n          ^\nSyntaxError: invalid syntax\n',
        lambda r: r.stderr.startswith("  File"),
    ),
)
_case(
    "function",
    "a traceback has the program's frames and lines alone",
    "import json\ndef f(): json.loads('{')\ntry: f()\nexcept ValueError as e: raise KeyError('k') from e",
    expect(
        ERROR,
        also=lambda r: (
            "def f(): json.loads" in r.stderr and not [x for x in r.stderr.splitlines() if "File" in x and '"<code>"' not in x]
        ),
    ),
)
_case(
    "function",
    "recursion without end",
    "def f(): return f()\nf()",
    expect(ERROR, "", 1, "RecursionError: maximum recursion depth exceeded\n", lambda r: len(r.stderr.splitlines()) < 62),
)
_case(
    "function",
    "a long chain of exceptions",
    "def f(n):\n    try: raise ValueError(n)\n    except ValueError: f(n - 1) if n else 1/0\nf(60)",
    expect(ERROR, also=lambda r: len(r.stderr.splitlines()) <= 61 and r.stderr.endswith("ZeroDivisionError: division by zero\n")),
)
_case(
    "function",
    "an exception whose text fails",
    "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
    expect(ERROR, ending="E: <exception str() failed>\n"),
)
_case(
    "function",
    "an exception group",
    "raise ExceptionGroup('g', [ValueError('inner'), TypeError('other')])",
    expect(ERROR, also=lambda r: "ValueError: inner" in r.stderr),
)
_case("function", "SystemExit(2)", "raise SystemExit(2)", expect(EXIT, "", 2, ""))
_case("function", "exit('bye')", "exit('bye')", expect(EXIT, "", 1, "bye\n"))
_case("function", "KeyboardInterrupt", "raise KeyboardInterrupt", expect(ERROR, "", 1, "KeyboardInterrupt\n"))
_case("function", "source with a surrogate", "x = '\ud800'", expect(ERROR, ending="surrogates not allowed\n"))
_case("function", "source with a NUL", "x = 1\0", expect(ERROR, code=1, ending="null bytes\n"))
_case("function", "the digits limit of int", "str(1 << 10**5)", expect(ERROR, also=lambda r: "Exceeds the limit" in r.stderr))
_case(
    "function",
    "sympy prints",
    "import sympy as sp\nx = sp.Symbol('x')\nsp.pprint(sp.Integral(x**2, x), use_unicode=True)\nsp.sqrt(8) * x",
    expect(OK, "⌠      \n⎮  2   \n⎮ x  dx\n⌡      \n2*sqrt(2)*x\n"),
)
_case(
    "function",
    "numpy prints",
    "import numpy as np\nnp.arange(4).reshape(2, 2) @ np.eye(2)",
    expect(OK, "array([[0., 1.],\n       [2., 3.]])\n"),
)
_case(
    "function",
    "linear algebra with threads of its own",
    "import numpy as np\na = np.random.rand(300, 300); print(np.allclose(np.linalg.inv(a) @ a, np.eye(300), atol=1e-6))",
    expect(OK, "True\n"),
)
_case(
    "function",
    "scipy",
    "import scipy.optimize, scipy.integrate\nprint(round(scipy.optimize.brentq(lambda x: x**2 - 2, 0, 2), 6), round(scipy.integrate.quad(lambda x: x, 0, 1)[0], 6))",
    expect(OK, "1.414214 0.5\n"),
    modules=("scipy",),
)
_case(
    "function",
    "much of the standard library",
    "import bisect, collections, csv, dataclasses, datetime, decimal, fractions, functools, hashlib, heapq, itertools, json, lzma, math, pickle, queue, sqlite3, statistics, string, struct, textwrap, typing, unicodedata, uuid, zoneinfo\nsqlite3.connect(':memory:').execute('select 1'); print(hashlib.sha256(b'').hexdigest()[:4], len(uuid.uuid4().hex), fractions.Fraction(3, 6))",
    expect(OK, "e3b0 32 1/2\n"),
)
_case(
    "function",
    "a module that was loaded late",
    "import xml.dom.minidom, wsgiref.util, ensurepip, turtledemo",
    expect((OK, ERROR), also=lambda r: r.status is OK or "turtle" in r.stderr or "tkinter" in r.stderr),
)
_case(
    "function",
    "processes of multiprocessing",
    "import multiprocessing\ndef f(x): print(x)\np = multiprocessing.Process(target=f, args=('process',)); p.start(); p.join()",
    expect(OK, "process\n"),
)
_case(
    "function",
    "a pool of multiprocessing",
    "import multiprocessing\ndef f(x): return x * x\nwith multiprocessing.Pool(2) as p: print(p.map(f, range(4)))",
    expect(OK, "[0, 1, 4, 9]\n"),
    tiers=("ns-root", "userns", "rlimits"),
    within=15.0,
)
_case(
    "function",
    "threads",
    "import threading\nfrom concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as p: print(sum(p.map(len, ['a', 'bb'])))\nthreading.Thread(target=print, args=('thread',)).start()",
    expect(OK, "3\nthread\n"),
)
_case(
    "function",
    "programs of the system",
    "import subprocess, sys\nsubprocess.run(['echo', 'echoed']); print(subprocess.check_output([sys.executable, '-c', 'import numpy; print(7)'], text=True), end='')",
    expect(OK, "echoed\n7\n"),
    timeout=15.0,
)
_case(
    "function",
    "modules that are not allowed",
    "for name in ('jax', 'jaxlib', 'absl', 'rstar_jax', 'pytest', 'launch', 'experiments', 'transformers', 'pip', 'setuptools'):\n    try: __import__(name); print('imported', name)\n    except ModuleNotFoundError as e: assert str(e) == f'No module named {name!r}', e\nimport jax",
    expect(ERROR, "", 1, "ModuleNotFoundError: No module named 'jax'\n"),
)
_case(
    "function",
    "UTF-8",
    "import locale, sys, os\nprint(sys.getfilesystemencoding(), locale.getpreferredencoding(), os.environ['LANG']); open('漢', 'w').write('é'); print(os.listdir('.'), open('漢').read())",
    expect(OK, "utf-8 utf-8 C.UTF-8\n['漢'] é\n", also=lambda r: True)
    if sys.version_info < (3, 11)
    else expect(OK, also=lambda r: r.stdout.lower().startswith("utf-8 utf-8 c.utf-8\n['漢'] é")),
)
_case(
    "function",
    "the clock",
    lambda p: (
        f"import time, datetime\nprint(abs(time.time() - {time.time()}) < 86400, time.tzname[0], datetime.datetime.now().astimezone().utcoffset())"
    ),
    expect(OK, "True UTC 0:00:00\n"),
)
_case(
    "function",
    "a class can be pickled",
    "class A: pass\nimport pickle\ntype(pickle.loads(pickle.dumps(A()))).__name__",
    expect(OK, "'A'\n"),
)


@_story("function", "further packages: pandas", modules=("pandas",), within=60.0)
async def _pandas(pool: ToolPool, planted: Planted) -> str | None:
    async with other_pool(pool, packages=("pandas",), memory_bytes=2 << 30, cpu_s=20.0) as own:
        result = await own.run("import pandas as pd\npd.DataFrame({'a': [1, 2]}).a.sum()", timeout=30.0)
    return story_expects(result, OK, also=lambda r: r.stdout in ("np.int64(3)\n", "3\n"))


@_story("function", "further packages: matplotlib without a display", modules=("matplotlib",), within=60.0)
async def _matplotlib(pool: ToolPool, planted: Planted) -> str | None:
    code = "import matplotlib.pyplot as plt, os\nplt.plot([1, 2]); plt.show(); plt.savefig('a.png'); print(os.path.getsize('a.png') > 1000)"
    async with other_pool(pool, packages=("matplotlib",), memory_bytes=2 << 30, cpu_s=30.0) as own:
        result = await own.run(code, timeout=40.0)
    return story_expects(result, OK, "True\n")


@_story("function", "a file that is allowed to be read can be")
async def _readable(pool: ToolPool, planted: Planted) -> str | None:
    async with other_pool(pool, readable=(planted.open_key,)) as own:
        result = await own.run(TRY + f"print(read({planted.open_key!r}).decode())\nattempt(os.truncate, {planted.open_key!r}, 0)")
    first, _, second = result.stdout.partition("\n")
    written = "DONE" in second and pool.isolation.file_writes
    return None if first == planted.secret and not written else seen(result)


# --- 12. sessions ----------------------------------------------------------------------------------------------------


async def _turns(pool: ToolPool, *turns: tuple[str, Check], timeout: float | None = None) -> str | None:
    """Run turns in one session; the first complaint."""
    async with pool.session() as session:
        for index, (code, check) in enumerate(turns):
            result = await session.run(code, timeout=timeout)
            if bad := check(result, None):  # type: ignore[arg-type]
                return f"turn {index}: {bad}"
    return None


_SESSIONS: dict[str, tuple[float | None, list[tuple[str, Check]]]] = {
    "names live on": (None, [("x = 2\ndef f(): return x + 1", expect(OK, "")), ("f()", expect(OK, "3\n")), ("x = 5; f()", expect(OK, "6\n"))]),
    "modules, files and random numbers live on": (None, [("import random as r, json; open('f', 'w').write('kept'); a = r.random()", expect(OK)), ("print(open('f').read(), r.random() != a)", expect(OK, "kept True\n"))]),
    "an error keeps the names": (None, [("x = 1; 1/0", expect(ERROR, "")), ("x", expect(OK, "1\n")), ("def f(:", expect(ERROR)), ("x", expect(OK, "1\n"))]),
    "exit() keeps the session (D16)": (None, [("x = 1; exit(0)", expect(OK)), ("print(x)", expect(OK, "1\n")), ("exit(3)", expect(EXIT, code=3)), ("print(x)", expect(OK, "1\n"))]),
    "a time-out interrupts and keeps the names": (0.7, [("x = 1", expect(OK)), ("import time; print('a'); time.sleep(60)", expect(TIMEOUT, "a\n", also=lambda r: "KeyboardInterrupt" in r.stderr)), ("x", expect(OK, "1\n"))]),
    "a time-out of a loop that catches everything loses the names": (0.7, [("x = 1", expect(OK)), ("import time\nwhile True:\n    try: time.sleep(60)\n    except BaseException: pass", expect(TIMEOUT, also=lambda r: r.state == "lost")), ("x", expect(ERROR, ending="NameError: name 'x' is not defined\n"))]),
    "a time-out with SIGINT ignored loses the names": (0.7, [("import signal; signal.signal(2, signal.SIG_IGN); x = 1", expect(OK)), ("import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)", expect(TIMEOUT, also=lambda r: r.state == "lost")), ("'x' in globals()", expect(OK, "False\n"))]),
    "a time-out while it is stopped": (0.7, [("x = 1", expect(OK)), ("import os; os.kill(os.getpid(), 19)", expect(TIMEOUT, also=lambda r: r.state == "lost")), ("'x' in globals()", expect(OK, "False\n"))]),
    "os._exit loses the names and says so": (None, [("x = 1", expect(OK)), ("print('kept'); import os; os._exit(3)", expect(EXIT, "kept\n", 3, also=lambda r: r.state == "lost")), ("'x' in globals()", expect(OK, "False\n")), ("y = 1", expect(OK, also=lambda r: r.state == ""))]),
    "a crash loses the names and says so": (None, [("x = 1", expect(OK)), ("import ctypes; ctypes.string_at(0)", expect(SIGNAL, code=-11, also=lambda r: r.state == "lost")), ("'x' in globals()", expect(OK, "False\n"))]),
    "a MemoryError keeps the names": (None, [("x = 1", expect(OK)), ("y = bytearray(100 << 30)", expect(ToolStatus.MEMORY)), ("x", expect(OK, "1\n"))]),
    "too much output ends it": (None, [("x = 1", expect(OK)), ("while True: print('x' * 10_000)", expect(ToolStatus.OUTPUT_LIMIT)), ("print('next')", expect(OK, "next\n"))]),
    "fork() without a wait": (None, [("import os; pid = os.fork()\nprint('here')", expect(OK, also=lambda r: r.stdout.count("here") >= 1)), ("print('next')", expect(OK, also=lambda r: r.stdout.replace("here\n", "") == "next\n")), ("print('last')", expect(OK, "last\n"))]),
    "processor time is counted per turn": (10.0, [("import time\nwhile time.process_time() < 0.9: pass", expect(OK)), *[(f"t = time.process_time()\nwhile time.process_time() < t + 0.9: pass\nprint({i})", expect(OK, f"{i}\n")) for i in range(3)]]),
    "a thread goes on between turns": (None, [("import threading, time\nn = [0]\ndef count():\n    while True: n[0] += 1; time.sleep(0.01)\nthreading.Thread(target=count, daemon=True).start()", expect(OK)), ("a = n[0]; time.sleep(0.3); print(n[0] > a)", expect(OK, "True\n"))]),
    "junk on every descriptor": (None, [("x = 1", expect(OK)), ("import os\nfor fd in range(3, 128):\n    for data in (b'\\0\\0\\0\\2{}', b'\\xff' * 8):\n        try: n = os.write(fd, data)\n        except OSError: pass", expect((OK, ERROR, EXIT, TIMEOUT, SIGNAL)))]),
    "every descriptor closed": (3.0, [("x = 1", expect(OK)), ("import os; os.closerange(0, 128)", expect((OK, ERROR, EXIT, TIMEOUT, SIGNAL)))]),
    "standard output replaced for ever": (None, [("import io, sys; sys.stdout = io.StringIO(); print('x')", expect(OK, "")), ("sys.stdout = sys.__stdout__; print('back')", expect(OK, "back\n"))]),
    "tracebacks of functions of earlier turns": (None, [("def f():\n    return 1/0", expect(OK)), ("f()", expect(ERROR, also=lambda r: "return 1/0" in r.stderr and "ZeroDivisionError" in r.stderr))]),
    "no input in every turn": (None, [("input()", expect(ERROR, ending="EOFError: EOF when reading a line\n")), ("input()", expect(ERROR, ending="EOFError: EOF when reading a line\n"))]),
}  # fmt: skip
for _name, (_limit, _cells) in _SESSIONS.items():

    async def _session(pool: ToolPool, planted: Planted, cells: Any = _cells, limit: float | None = _limit) -> str | None:
        return await _turns(pool, *cells, timeout=limit)

    _story("session", _name, within=25.0)(_session)


@_story("session", "sessions do not share names")
async def _apart(pool: ToolPool, planted: Planted) -> str | None:
    async with pool.session() as a, pool.session() as b:
        await a.run("import math; x = 1; math.pi = 3; open('mine', 'w').close()")
        result = await b.run("import math, os; print('x' in globals(), math.pi > 3.1, os.listdir('.'))")
        again = await a.run("print(x, math.pi)")
    return story_expects(result, OK, "False True []\n") or story_expects(again, OK, "1 3\n")


@_story("session", "turns run in the order in which they were asked for")
async def _order(pool: ToolPool, planted: Planted) -> str | None:
    async with pool.session() as session:
        turns = ["n = []", *(f"n.append({i}); print(len(n))" for i in range(20)), "print(n)"]
        results = await asyncio.gather(*(session.run(turn) for turn in turns))
    return story_expects(results[-1], OK, f"{list(range(20))}\n")


@_story("session", "24 sessions over 4 places", within=60.0)
async def _many_sessions(pool: ToolPool, planted: Planted) -> str | None:
    async def one(i: int) -> list[str]:
        async with pool.session() as session:
            return [(await session.run(code)).stdout for code in (f"x = {i}", "x += 1; print(x)", "print(x * 2)")]

    results = await asyncio.gather(*(one(i) for i in range(24)))
    bad = [r for i, r in enumerate(results) if r != ["", f"{i + 1}\n", f"{2 * i + 2}\n"]]
    return str(bad[:3]) if bad else None


@_story("session", "a session that gave way is rebuilt", within=30.0)
async def _evicted(pool: ToolPool, planted: Planted) -> str | None:
    async with other_pool(pool, max_sessions=2) as own, own.session() as a, own.session() as b, own.session() as c:
        await a.run("x = 41; print('once')")
        await a.run("import time; clock = time.time(); open('f', 'w').write('kept')")
        await b.run("y = 1")
        await c.run("z = 1")
        result = await a.run("print(x + 1, open('f').read())")
        again = await b.run("y")
    return story_expects(result, OK, "42 kept\n", also=lambda r: r.state == "") or story_expects(again, OK, "1\n")


@_story("session", "a rebuilt session whose past came out differently says so", within=30.0)
async def _diverged(pool: ToolPool, planted: Planted) -> str | None:
    async with other_pool(pool, max_sessions=1) as own, own.session() as a, own.session() as b:
        await a.run("import time; print(time.time_ns())")
        await b.run("1")
        return story_expects(await a.run("'time' in globals()"), OK, "True\n", also=lambda r: r.state == "diverged")


@_story("session", "a session of a finished rollout is freed")
async def _freed(pool: ToolPool, planted: Planted) -> str | None:
    before = await idle_family()
    for _ in range(5):
        async with pool.session() as session:
            await session.run("import os, time\nif os.fork() == 0: time.sleep(1e6)")
    return None if await settles(lambda: len(family(os.getpid())) <= before) else f"{len(family(os.getpid())) - before} processes more"


@_story("session", "a killed zygote: the session is rebuilt", within=30.0)
async def _session_of_killed(pool: ToolPool, planted: Planted) -> str | None:
    before = _children()
    async with other_pool(pool, retries=2) as own, own.session() as session:
        await session.run("x = 5")
        for pid in await _zygotes(before):
            os.kill(pid, signal.SIGKILL)
        return story_expects(await session.run("x"), OK, "5\n")


@_story("session", "input of a turn")
async def _turn_input(pool: ToolPool, planted: Planted) -> str | None:
    async with pool.session() as session:
        first = await session.run("a = input()", stdin="one\n")
        second = await session.run("print(a, input())", stdin="two\n")
    return story_expects(first, OK) or story_expects(second, OK, "one two\n")


@_story("session", "a cancelled turn")
async def _cancelled_turn(pool: ToolPool, planted: Planted) -> str | None:
    async with pool.session() as session:
        await session.run("x = 1")
        task = asyncio.create_task(session.run("import time; time.sleep(1e6)"))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return story_expects(await session.run("print('next')"), OK, "next\n")


def skip_reason(case: Case, pool: ToolPool) -> str:
    """Why `case` is not for this tier or this machine, or nothing."""
    import importlib.util

    if missing := [name for name in case.needs if not getattr(pool.isolation, name)]:
        return f"the tier does not promise {', '.join(missing)}"
    if case.tiers and pool.isolation.tier not in case.tiers:
        return "not for this tier"
    if case.machines and platform.machine() not in case.machines:
        return f"not for {platform.machine()}"
    if absent := [name for name in case.modules if importlib.util.find_spec(name) is None]:
        return f"{', '.join(absent)} is not installed"
    return ""


async def examine(case: Case, pool: ToolPool, planted: Planted) -> str | None:
    """Run one case. What is wrong, in one line, or None."""
    planted.contacts.clear()
    try:
        async with asyncio.timeout(case.within):
            if case.run is not None:
                wrong = await case.run(pool, planted)
            else:
                assert case.check is not None
                code = case.code if isinstance(case.code, str) else case.code(planted)
                result = await pool.run(code, case.stdin, case.timeout)
                shown = planted.secret in result.stdout + result.stderr
                wrong = "the secret was shown" if shown else case.check(result, planted)
    except TimeoutError:
        return f"not done within {case.within:.0f} s"
    except Exception as error:  # whatever a case raises is its failure, and the others go on
        return f"{type(error).__name__}: {error}"
    if wrong is None and pool.isolation.network and planted.contacts:
        return f"reached from inside: {planted.contacts}"
    return wrong


assert errno.errorcode[errno.EPERM] == "EPERM" and {case.group for case in CASES} == set(GROUPS)
