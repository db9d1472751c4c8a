"""The commands of `launch/` in processes of their own, and the settings of a tiny run."""

import dataclasses
import hashlib
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TIMEOUT = 300
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # one device, as on a laptop

OVERRIDES = (
    "model=tiny", "data.demonstrations=512", "stages.sft.steps=80", "stages.sft.rows_per_step=16", "stages.rl1.steps=1",
    "stages.rl2.steps=1", "stages.rl1.prompts_per_step=4", "stages.rl1.group=4", "stages.rl1.keep=2", "stages.rl2.prompts_per_step=4",
    "stages.rl2.group=4", "stages.rl2.keep=2", "rollout.slots=16", "rollout.prefill_rows=4", "rollout.extend_rows=4",
    "evaluation.problems=4", "training.buckets=128", "training.microbatch_tokens=1024",
)  # fmt: skip
"""A run of seconds, in the shapes of tests/recipes/tiny.py, so that the suite compiles them once. Its SFT teaches the model to call
the tool and to answer with a number, though not with the right one."""


def train_arguments(workdir, *more):
    """Arguments of `launch.train` for the tiny run; later `--set` values win."""
    overrides = [f"--set={override}" for override in OVERRIDES]
    return ["--experiment=quickstart", f"--workdir={workdir}", *overrides, *more]


@dataclasses.dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    def refusal(self):
        """The one line with which the command refused its input: exit code 2, and nothing after or beside it but progress."""
        lines = self.err.splitlines()
        assert self.code == 2, self
        assert [line.startswith("error: ") for line in lines].count(True) == 1, self
        assert lines[-1].startswith("error: ") and "Traceback" not in self.err, self
        return lines[-1].removeprefix("error: ")


def real(module, *arguments, stdin=""):
    """Run `python -m module` as a person does."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT, env=ENVIRONMENT, input=stdin, capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


def contents(directory):
    """Every file and directory below, with a hash of what it holds: equal before and after where nothing was touched."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "directory"
        for path in sorted(pathlib.Path(directory).rglob("*"))
    }
