"""The faults and attacks of `experiments.benchmarks.tool_cases`: all of them in the strongest tier that there is here, and in every
other tier, as root and as an ordinary user, those that try to get out."""

import json
import os
import subprocess
import sys

import pytest

from experiments.benchmarks.ordinary_user import REPOSITORY
from experiments.benchmarks.tool_cases import CASES, GROUPS

ATTACKS = "files,secrets,network,privileges"
ROOT = os.geteuid() == 0
RUNS = [
    ("ns-root" if ROOT else "userns", "root" if ROOT else "user", ",".join(GROUPS)),
    *((tier, "root", ATTACKS) for tier in ("userns", "landlock") if ROOT),
    *((tier, "user", ATTACKS) for tier in ("userns", "landlock", "rlimits") if ROOT or tier != "userns"),
]


def test_there_are_cases_in_every_group():
    assert len(CASES) >= 100 and {case.group for case in CASES} == set(GROUPS)
    assert len({(case.group, case.name) for case in CASES}) == len(CASES)


@pytest.mark.parametrize(("tier", "user", "groups"), RUNS, ids=lambda value: str(value).partition(",")[0])
def test_every_case_passes_and_nothing_is_left_behind(tier, user, groups):
    command = [sys.executable, "-m", "experiments.benchmarks.tool_faults", f"--tiers={tier}", f"--only={user}", f"--groups={groups}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    lines = done.stdout.splitlines()
    assert lines and lines[-1].startswith("RESULT "), done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(lines[-1].removeprefix("RESULT "))
    outcome = result["tiers"][f"{tier}/{user}"]
    if "unavailable" in outcome:
        pytest.skip(outcome["unavailable"])
    assert [line for line in lines if line.startswith(("FAILED", "LEFT BEHIND"))] == []
    assert outcome["passed"] > 10 and outcome["failed"] == 0 and result["leftovers"] == []
