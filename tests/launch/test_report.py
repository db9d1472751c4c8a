import json
import pathlib
import subprocess
import sys

import pytest

from rstar_jax.config import RunConfig, StageConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def report(*arguments):
    command = [sys.executable, "-m", "launch.report", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def run_directory(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    config = RunConfig("toy run", (StageConfig("sft", "sft", 4),))
    (directory / "config.json").write_text(json.dumps(config.to_dict()))
    return directory


def test_the_command_writes_the_page_and_says_where(run_directory, tmp_path):
    output = tmp_path / "page.html"
    done = report(f"--workdir={run_directory}", f"--compare={run_directory}", f"--output={output}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"report: {output}"
    assert "toy run" in output.read_text()
    assert not (run_directory / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--workdir is missing"),
        (["--workdir=/nonexistent/run"], "/nonexistent/run: no such directory"),
        (["--workdir=.", "stray"], "stray"),
        (["--workdirs=."], "workdirs"),
    ],
)
def test_bad_arguments_end_in_one_line(arguments, words):
    done = report(*arguments)
    assert done.returncode != 0
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
