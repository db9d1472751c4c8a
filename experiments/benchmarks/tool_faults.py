"""Does the Python tool survive what a program can do to it? All faults and attacks of `tool_cases`, in every tier of isolation.

    python -m experiments.benchmarks.tool_faults [--tiers=ns-root,userns] [--groups=files,secrets] [--cases=substring] [--only=root]

Started by root it runs every tier as root and, in a second process, those for ordinary users as one (`ordinary_user`). After every
case the next calls, on every zygote, have to be right. At the end it looks for anything that was left behind. The exit code is 1
when a case failed or something was left.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from absl import flags

from experiments.benchmarks import tool_cases
from experiments.benchmarks.ordinary_user import REPOSITORY, command_as_user
from experiments.benchmarks.tool_cases import CASES, CONFIG, GROUPS, Case, Planted, examine, parents, plant, skip_reason, state
from launch import cli
from rstar_jax.config import TIERS
from rstar_jax.tools.pool import ToolPool
from rstar_jax.types import InfrastructureError, UserError

_TIERS = flags.DEFINE_list("tiers", [], "Tiers to run; default: all.")
_GROUPS = flags.DEFINE_list("groups", [], "Groups of cases to run; default: all.")
_CASES = flags.DEFINE_string("cases", "", "Run the cases whose names hold this text.")
_ONLY = flags.DEFINE_enum("only", None, ["root", "user"], "Run as this user alone; default: as every user that this one can be.")

_TIERS_OF = {"root": TIERS, "user": TIERS[1:]}
_MARK = b"rstar_tool_"  # of the pools' directories, in the environment of their processes


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One case in one tier. `status`: passed, failed or skipped; `detail`: what is wrong, or why it was skipped."""

    case: Case
    status: str
    detail: str = ""
    seconds: float = 0.0
    next_seconds: float = 0.0


async def _next_calls(pool: ToolPool) -> tuple[float, str]:
    """(seconds of the next call, what is wrong with it and with one more on every place)."""
    start = time.monotonic()
    results = [await asyncio.wait_for(pool.run("print(6*7)"), 30.0)]
    seconds = time.monotonic() - start
    results += await asyncio.wait_for(asyncio.gather(*(pool.run("print(6*7)") for _ in range(pool.config.concurrency))), 30.0)
    bad = [tool_cases.seen(result) for result in results if result.stdout != "42\n" or result.stderr]
    return seconds, f"the next call: {bad[0]}" if bad else ""


async def run_case(case: Case, pool: ToolPool, planted: Planted) -> Outcome:
    """One case and the calls after it."""
    if reason := skip_reason(case, pool):
        return Outcome(case, "skipped", reason)
    start = time.monotonic()
    wrong = await examine(case, pool, planted)
    seconds = time.monotonic() - start
    try:
        next_seconds, next_wrong = await _next_calls(pool)
    except (TimeoutError, InfrastructureError) as error:
        next_seconds, next_wrong = 30.0, f"the next call: {type(error).__name__} {error}"
    detail = "; ".join(text for text in (wrong, next_wrong) if text)
    return Outcome(case, "failed" if detail else "passed", detail, seconds, next_seconds)


def _row(outcome: Outcome) -> str:
    name = f"{outcome.case.group}: {outcome.case.name}"
    return f"  {outcome.status:<8}{outcome.seconds:>7.2f} s {1e3 * outcome.next_seconds:>7.0f} ms  {name}"


async def run_tier(tier: str, cases: Sequence[Case], planted: Planted) -> list[Outcome]:
    """All cases in one tier. Raises `UserError` when the tier cannot be had."""
    outcomes = []
    async with ToolPool(dataclasses.replace(CONFIG, isolation=tier)) as pool:
        print(pool.isolation, flush=True)
        for case in cases:
            outcome = await run_case(case, pool, planted)
            outcomes.append(outcome)
            if outcome.status != "skipped":
                print(_row(outcome) + ("" if outcome.status == "passed" else f"\n           {outcome.detail}"), flush=True)
    return outcomes


# --- what is left behind ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What pools could add to a machine."""

    children: frozenset[int]
    descriptors: int
    mounts: frozenset[str]
    groups: frozenset[str]
    objects: frozenset[str]  # of System V IPC, and files of POSIX shared memory

    @classmethod
    def look(cls) -> Surroundings:
        mounts = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
        objects = set()
        for kind in ("shm", "sem", "msg"):
            with contextlib.suppress(OSError):
                lines = pathlib.Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
                objects |= {f"{kind} {line.split()[1]}" for line in lines}
        with contextlib.suppress(OSError):
            objects |= {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
        return cls(
            frozenset(pid for pid, parent in parents().items() if parent == os.getpid()),
            len(os.listdir("/proc/self/fd")),
            frozenset(" ".join(line.split()[3:5]) for line in mounts),
            frozenset(str(path) for path in pathlib.Path("/sys/fs/cgroup").glob("**/*rstar*")),
            frozenset(objects),
        )


def _is_ours(pid: int) -> bool:
    """Whether this is a process of a pool: its command line is a keeper's, or its environment names a pool's directory."""
    with contextlib.suppress(OSError):
        if b"keeper.main" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
            return True
    with contextlib.suppress(OSError):
        return _MARK in pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    return False


def orphans() -> set[int]:
    """Processes of pools whose owner is gone: those whose first ancestor that is no process of a pool is a reaper. The pools of
    another program that runs now have that program as their owner."""
    known = parents()
    reapers = set()
    pid = os.getpid()
    while pid in known:
        pid = known[pid]
        reapers.add(pid)
    found = set()
    for pid in known:
        if _is_ours(pid):
            owner = known[pid]
            while owner in known and _is_ours(owner):
                owner = known[owner]
            if owner in reapers or owner == os.getpid() or owner == 1:
                found.add(pid)
    return found


def leftovers(before: Surroundings, orphans_before: set[int], planted: Planted) -> list[str]:
    """What is there now and was not before, after some seconds of patience."""
    limit = time.monotonic() + 5.0
    while True:
        now = Surroundings.look()
        found = [f"child process {pid} ({state(pid)})" for pid in sorted(now.children - before.children) if state(pid)]
        found += [f"process {pid} without its owner" for pid in sorted(orphans() - orphans_before - now.children) if state(pid)]
        if now.descriptors > before.descriptors:
            found.append(f"{now.descriptors - before.descriptors} file descriptors")
        for what in ("mounts", "groups", "objects"):
            found += [f"{what[:-1]} {one}" for one in sorted(getattr(now, what) - getattr(before, what))]
        found += [f"{planted.temporary}/{name}" for name in sorted(os.listdir(planted.temporary))]
        if not found or time.monotonic() > limit:
            return found
        time.sleep(0.1)


# --- all together ----------------------------------------------------------------------------------------------------


def _run_here(user: str, tiers: Sequence[str], cases: Sequence[Case]) -> tuple[dict[str, object], list[str]]:
    """(results by tier, leftovers) as the user that this process is."""
    results: dict[str, object] = {}
    orphans_before = orphans()
    with plant() as planted:
        asyncio.run(asyncio.sleep(0))
        before = Surroundings.look()
        for tier in tiers:
            print(f"\n=== {tier}/{user}", flush=True)
            start = time.monotonic()
            try:
                outcomes = asyncio.run(run_tier(tier, cases, planted))
            except (UserError, InfrastructureError) as error:
                print(f"unavailable: {error}", flush=True)
                results[f"{tier}/{user}"] = {"passed": 0, "failed": 0, "skipped": len(cases), "unavailable": str(error)}
                continue
            counts = collections.Counter(outcome.status for outcome in outcomes)
            failures = [outcome for outcome in outcomes if outcome.status == "failed"]
            print(f"{tier}/{user}: {dict(counts)} in {time.monotonic() - start:.0f} s")
            for outcome in failures:
                print(f"FAILED {tier}/{user} {outcome.case.group}: {outcome.case.name}: {outcome.detail}")
            results[f"{tier}/{user}"] = {status: counts[status] for status in ("passed", "failed", "skipped")}
        found = [f"{one} ({user})" for one in leftovers(before, orphans_before, planted)]
    return results, found


def _run_as_user(tiers: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """The same in a process of an ordinary user."""
    here = [sys.executable, "-m", "experiments.benchmarks.tool_faults", "--only=user", f"--cases={_CASES.value}"]
    here += [f"--groups={','.join(_GROUPS.value)}", f"--tiers={','.join(tiers)}"]
    with subprocess.Popen(command_as_user(here), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            last = line
            if not line.startswith("RESULT "):
                print(line, end="", flush=True)
    if not last.startswith("RESULT "):
        reason = f"the process of the ordinary user ended with code {process.returncode}"
        return {f"{tier}/user": {"passed": 0, "failed": 0, "skipped": 0, "unavailable": reason} for tier in tiers}, []
    result = json.loads(last.removeprefix("RESULT "))
    return result["tiers"], result["leftovers"]


def run(tiers: Sequence[str], cases: Sequence[Case], only: str | None) -> Mapping[str, object]:
    """The RESULT object: everything that this user can run, or what `only` asks for."""
    root = os.geteuid() == 0
    if only == "root" and not root:
        raise UserError("--only=root needs root")
    results: dict[str, object] = {}
    found: list[str] = []
    for user in ("root", "user"):
        mine = [tier for tier in _TIERS_OF[user] if tier in tiers]
        if only not in (None, user) or not mine or (user == "root" and not root):
            continue
        part, left = _run_as_user(mine) if user == "user" and root else _run_here(user, mine, cases)
        results |= part
        found += left
    return {"tiers": results, "leftovers": found}


def main(argv: Sequence[str]) -> None:
    """Run, print the tables and the RESULT line."""
    del argv
    for flag, value, allowed in (("tiers", _TIERS.value, TIERS), ("groups", _GROUPS.value, GROUPS)):
        if unknown := [name for name in value if name not in allowed]:
            raise UserError(f"--{flag}={unknown[0]} is not known; choose from {', '.join(allowed)}")
    groups, tiers = _GROUPS.value or list(GROUPS), _TIERS.value or list(TIERS)
    cases = [case for case in CASES if case.group in groups and _CASES.value in case.name]
    if not cases:
        raise UserError(f"--cases={_CASES.value}: no such case in the groups {', '.join(groups)}")
    result = run(tiers, cases, _ONLY.value)
    for one in result["leftovers"]:  # type: ignore[attr-defined]
        print(f"LEFT BEHIND {one}")
    print("RESULT " + json.dumps(result), flush=True)
    failed = sum(tier["failed"] for tier in result["tiers"].values())  # type: ignore[attr-defined]
    sys.exit(1 if failed or result["leftovers"] else 0)


if __name__ == "__main__":
    cli.run(main)
