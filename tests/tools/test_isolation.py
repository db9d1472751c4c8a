"""Which tier is taken, what happens where there is none, and the rules that the tiers are made of."""

import asyncio
import ctypes
import dataclasses
import errno
import mmap
import os
import socket
import struct
import subprocess
import sys
import textwrap

import pytest

from rstar_jax.config import TIERS, ToolConfig
from rstar_jax.tools import landlock, rootfs, seccomp, syscalls
from rstar_jax.tools.pool import ToolPool
from rstar_jax.tools.probe import broken_promises
from rstar_jax.tools.view import view
from rstar_jax.tools.worker import clean_environment
from rstar_jax.types import UserError

SMALL = ToolConfig(workers=1, concurrency=1, preload=())


def tier_of(config):
    async def run():
        async with ToolPool(config) as pool:
            return pool.isolation

    return asyncio.run(run())


def available(tier):
    try:
        return tier_of(dataclasses.replace(SMALL, isolation=tier)).tier == tier
    except UserError:
        return False


def need(tier):
    if not available(tier):
        pytest.skip(f"{tier} cannot be had here")


# --- the choice ------------------------------------------------------------------------------------------------------


def test_the_strongest_tier_is_taken_and_the_weakest_only_by_name():
    there = [tier for tier in TIERS if available(tier)]
    assert "rlimits" in there
    if there == ["rlimits"]:
        with pytest.raises(UserError, match=r"tool\.isolation=rlimits runs without isolation"):
            tier_of(SMALL)
    else:
        assert tier_of(SMALL).tier == there[0]


# Takes privileges away from itself as a container does, then opens a pool and says which tier it got.
LIMITED = """
import asyncio, ctypes, sys
from rstar_jax.config import ToolConfig
from rstar_jax.tools import seccomp, syscalls
from rstar_jax.tools.pool import ToolPool
from rstar_jax.types import UserError

denied = {denied!r}
if {drop}:
    for capability in {drop}:
        syscalls.prctl(24, capability)  # PR_CAPBSET_DROP
    import os
    mask = syscalls.effective_capabilities()
    for capability in {drop}:
        mask &= ~(1 << capability)
    syscalls.set_capabilities(mask)
syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
numbers = syscalls.numbers()
code = [(0x20, 0, 0, 4), (0x15, 1, 0, seccomp.AUDIT_ARCH[syscalls.MACHINE]), (6, 0, 0, 0x7FFF0000), (0x20, 0, 0, 0)]
for name, flag in denied:
    if flag:  # an argument with this bit
        code += [(0x15, 0, 4, numbers[name]), (0x20, 0, 0, 16), (0x45, 0, 1, flag), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)]
    else:
        code += [(0x15, 0, 1, numbers[name]), (6, 0, 0, 0x50001)]
code += [(6, 0, 0, 0x7FFF0000)]
seccomp.program = lambda *_, **__: code
seccomp.load(True, True)

async def main():
    try:
        async with ToolPool(ToolConfig(workers=1, concurrency=1, preload=(), require={require!r}, isolation={isolation!r})) as pool:
            print(pool.isolation.tier, (await pool.run("6 * 7")).stdout)
    except UserError as error:
        print("refused", error)

asyncio.run(main())
"""


def limited(drop=(), denied=(), require="", isolation="auto"):
    program = LIMITED.format(drop=tuple(drop), denied=tuple(denied), require=require, isolation=isolation)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


NO_ADMIN = (syscalls.CAP_SYS_ADMIN,)
NO_NAMESPACES = (("unshare", syscalls.CLONE_NEWUSER),)
NO_LANDLOCK = (("landlock_create_ruleset", 0),)
root = pytest.mark.skipif(os.geteuid() != 0, reason="takes capabilities away, and has none")


@root
def test_without_cap_sys_admin_user_namespaces_are_taken():
    need("userns")
    assert limited(NO_ADMIN) == "userns 42\n\n"


@root
def test_in_an_unprivileged_container_the_next_tier_is_taken():
    need("landlock")
    assert limited(NO_ADMIN, NO_NAMESPACES) == "landlock 42\n\n"


@root
def test_a_requirement_that_cannot_be_met_is_refused_with_every_reason_in_one_line():
    said = limited(NO_ADMIN, NO_NAMESPACES, require="userns")
    assert said.startswith("refused no tier of tool isolation can be had (ns-root: it needs CAP_SYS_ADMIN; userns: ")
    assert said.count("\n") == 1 and "landlock" not in said


@root
def test_where_nothing_is_to_be_had_the_pool_does_not_start_unless_asked_by_name():
    said = limited(NO_ADMIN, NO_NAMESPACES + NO_LANDLOCK)
    assert said.startswith("refused") and "the kernel has no Landlock" in said and "tool.isolation=rlimits" in said
    assert limited(NO_ADMIN, NO_NAMESPACES + NO_LANDLOCK, isolation="rlimits") == "rlimits 42\n\n"


@root
def test_root_of_a_container_without_any_privilege_still_gets_a_tier():
    need("landlock")
    everything = [number for number in range(64) if syscalls.has_capability(number)]
    assert limited(everything, NO_NAMESPACES) == "landlock 42\n\n"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"isolation": "docker"}, "tool.isolation='docker' is not known"),
        ({"require": "root"}, "tool.require='root' is not known"),
        ({"isolation": "rlimits", "require": "landlock"}, "tool.isolation=rlimits is weaker than tool.require=landlock"),
        ({"packages": ("no-such-thing",)}, "tool.packages=no-such-thing is not installed"),
        ({"readable": ("/no/such/file",)}, "tool.readable=/no/such/file does not exist"),
        ({"servers": ("a:1",)}, "tool.servers needs tool.token_file"),
        ({"processes": 0}, "tool.processes=0"),
    ],
)
def test_settings_that_cannot_be_are_named_in_one_line(changes, complaint):
    with pytest.raises(UserError) as error:
        tier_of(dataclasses.replace(SMALL, **changes))
    assert complaint in str(error.value) and "\n" not in str(error.value)


def test_a_promise_that_does_not_hold_is_found():
    """The self-test, run in the tier that promises nothing, against all promises."""

    async def run():
        async with ToolPool(dataclasses.replace(SMALL, isolation="rlimits")) as pool:
            names = ("file_reads", "file_writes", "network", "process_tree", "syscalls", "disk")
            return [await broken_promises(pool.run, [name], pool.config, clean_environment("")) for name in names]

    found = asyncio.run(run())
    assert all(found), found
    assert "a file outside was read" in found[0] and "an abstract unix socket was reached" in found[2]


def test_further_files_can_be_made_readable(tmp_path):
    (tmp_path / "table.csv").write_text("1,2\n")
    tmp_path.chmod(0o755)

    async def run():
        async with ToolPool(dataclasses.replace(SMALL, readable=(str(tmp_path),))) as pool:
            code = f"print(open('{tmp_path}/table.csv').read())\nopen('{tmp_path}/new', 'w')"
            return pool.isolation, await pool.run(code)

    isolation, result = asyncio.run(run())
    assert result.stdout == "1,2\n\n"
    assert (result.status == "error") == isolation.file_writes


# --- the parts -------------------------------------------------------------------------------------------------------


def decide(program, machine, number, *arguments):
    """What the filter answers: an interpreter of classic BPF, written from the kernel's documentation."""
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, seccomp.AUDIT_ARCH[machine], 0, *arguments, *[0] * (6 - len(arguments)))
    at = accumulator = 0
    while True:
        code, yes, no, k = program[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif code == 0x54:
            accumulator &= k
        elif code == 0x06:
            return k
        else:
            holds = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: accumulator & k != 0}[code]
            at += yes if holds else no


ALLOW, EPERM, EACCES, ENOSYS = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.EACCES, 0x50000 | errno.ENOSYS


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("namespaces", [True, False])
def test_the_filter_refuses_what_it_should_on_both_machines(machine, namespaces):
    column = ("x86_64", "aarch64").index(machine)
    number = {name: row[column] for name, row in syscalls.NUMBERS.items() if row[column] is not None}
    program = seccomp.program(namespaces, namespaces, machine)
    assert len(program) < 4096 and all(max(yes, no) < 256 for _, yes, no, _ in program)
    answers = {name: decide(program, machine, number[name]) for name in number}
    assert {answers[name] for name in seccomp.DENIED if name in number} == {EPERM}
    assert {answers[name] for name in seccomp.METADATA if name in number} == {ALLOW if namespaces else EPERM}
    assert {answers[name] for name in seccomp.SCHEDULING} == {ALLOW if namespaces else EPERM}
    assert decide(program, machine, number["prlimit64"], 0) == ALLOW
    assert decide(program, machine, number["prlimit64"], 4321) == (ALLOW if namespaces else EPERM)
    assert answers["clone3"] == ENOSYS
    for ordinary in {"x86_64": (0, 1, 9, 39, 57, 59, 231), "aarch64": (63, 64, 222, 172, 221, 94)}[machine]:  # read, write, mmap...
        assert decide(program, machine, ordinary) == ALLOW
    assert decide(program, machine, number["clone"], syscalls.CLONE_VM | 17) == ALLOW
    assert decide(program, machine, number["clone"], syscalls.CLONE_NEWUSER | 17) == EPERM
    assert decide(program, machine, number["unshare"], syscalls.CLONE_NEWUSER) == EPERM
    assert decide(program, machine, number["unshare"], syscalls.CLONE_NEWPID) == (ALLOW if namespaces else EPERM)
    assert decide(program, machine, number["socket"], socket.AF_UNIX, 1) == (ALLOW if namespaces else EACCES)
    for family in (socket.AF_INET, socket.AF_INET6, 16, 38, 40):  # netlink, alg, vsock
        assert decide(program, machine, number["socket"], family, 1) == EACCES
    for kind, answer in ((1, ALLOW), (5, ALLOW), (2, EACCES), (3, EACCES), (2 | 0x80000, EACCES), (1 | 0x80800, ALLOW)):
        assert decide(program, machine, number["socketpair"], 1, kind) == (ALLOW if namespaces else answer)
    if machine == "x86_64":
        assert decide(program, machine, 0x40000000 | 39) == 0x80000000
    other = "aarch64" if machine == "x86_64" else "x86_64"
    assert decide(program, other, number["clone"]) == 0x80000000


def test_links_on_the_way_to_a_path_are_kept(tmp_path):
    real = tmp_path.resolve()
    (real / "a" / "b").mkdir(parents=True)
    (real / "link").symlink_to("a")
    (real / "a" / "up").symlink_to("../c")
    (real / "c").mkdir()
    links, trees = rootfs.resolve([f"{real}/link/b", f"{real}/a/up", f"{real}/missing", f"{real}/a/b/../b"])
    assert links == {f"{real}/link": "a", f"{real}/a/up": "../c"}
    assert trees == [f"{real}/a/b", f"{real}/c"]
    assert rootfs.resolve([f"{real}/a", f"{real}/a/b"])[1] == [f"{real}/a"]


def test_what_packages_need_can_be_seen_and_nothing_else():
    ((site, names),) = view(("sympy",), ()).sites.items()
    assert {"sympy", "mpmath"} <= set(names) and not {"numpy", "jax", "scipy"} & set(names)
    assert os.path.isdir(f"{site}/sympy")


def test_landlock_rules_leave_out_paths_that_do_not_exist(tmp_path):
    try:
        version = landlock.abi()
    except OSError:
        pytest.skip("the kernel has no Landlock")
    fd = landlock.ruleset(version, [(str(tmp_path), landlock.READ), (str(tmp_path / "missing"), landlock.OWN)])
    os.close(fd)


def test_an_idle_process_waits_and_costs_nothing_to_kill():
    stack = mmap.mmap(-1, 1 << 14, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pid = syscalls.start_idle_process(ctypes.addressof(ctypes.c_char.from_buffer(stack)) + (1 << 14))
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.kill(pid, 9)
    assert os.waitpid(pid, 0) == (pid, 9)
