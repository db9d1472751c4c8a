"""`python -m launch.flags`: the presets against the installed XLA, and what a shell makes of them."""

import os
import pathlib
import subprocess
import sys

import pytest
from commands import ENVIRONMENT, ROOT, real

PRESETS = sorted((ROOT / "launch" / "presets").glob("*.env"))


def evaluated(exports):
    """The environment of a shell that has begun with nothing and evaluated `exports`."""
    script = 'eval "$EXPORTS"; env -0 -u EXPORTS -u PWD -u SHLVL -u _'
    shell = subprocess.run(["bash", "-c", script], env={"EXPORTS": exports}, capture_output=True, text=True, check=True)
    return dict(item.split("=", 1) for item in shell.stdout.split("\0") if item)


def written(file):
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def test_there_is_a_preset_for_each_kind_of_accelerator():
    assert [path.stem for path in PRESETS] == ["h100", "mi300x", "tpu"]


@pytest.mark.parametrize("file", PRESETS, ids=lambda path: path.stem)
def test_the_installed_xla_knows_a_preset_and_a_shell_reads_it(file):
    done = real("launch.flags", f"--preset={file.stem}")
    assert (done.code, done.err) == (0, "")
    assert evaluated(done.out) == written(file)


def test_the_contract_as_it_is_typed():
    typed = 'eval "$(python -m launch.flags --preset=mi300x)"; echo "$XLA_FLAGS"'
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    shell = subprocess.run(
        ["bash", "-c", typed], cwd=ROOT, env=ENVIRONMENT | {"PATH": path}, capture_output=True, text=True, check=True
    )
    assert "--xla_gpu_enable_command_buffer=" in shell.stdout.split()


def test_the_mi300x_preset_records_no_command_buffers_and_never_falls_back_to_the_cpu():
    variables = written(ROOT / "launch" / "presets" / "mi300x.env")
    assert "--xla_gpu_enable_command_buffer=" in variables["XLA_FLAGS"].split()
    assert variables["JAX_PLATFORMS"].split(",")[0] == "rocm"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("XLA_FLAGS=--xla_gpu_autotune_level=0 --xla_gpu_made_up=1", ["jaxlib", "does not know: --xla_gpu_made_up=1"]),
        ("XLA_FLAGS=--xla_made_up --xla_gpu_graph_level=0", ["does not know: --xla_made_up, --xla_gpu_graph_level=0"]),
        ("XLA_FLAGS=--xla_gpu_autotune_level=high", ["Couldn't interpret value high for flag xla_gpu_autotune_level"]),
        ("A=1\nexport B=2", [":2: 'export B=2' is not KEY=VALUE"]),
        ("A=1\n\n# B\nA=2", [":4: A is set for the second time"]),
    ],
    ids=["an unknown flag", "two unknown flags", "a bad value", "not KEY=VALUE", "twice"],
)
def test_a_preset_that_does_not_hold_is_refused_in_one_line(text, parts, tmp_path):
    file = tmp_path / "own.env"
    file.write_text(text + "\n")
    done = real("launch.flags", f"--preset={file}")
    assert done.out == ""
    message = done.refusal()
    assert message.startswith(str(file)) and len(message) < 300
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "--preset is missing; choose one of h100, mi300x, tpu"), (("--preset=h200",), "--preset=h200 is not known; choose one of")],
)
def test_an_unknown_preset_is_refused_with_the_known_ones(arguments, message, command):
    assert command("launch.flags", *arguments).refusal().startswith(message)


def test_what_a_shell_could_misread_is_quoted(command, tmp_path):
    file = tmp_path / "own.env"
    file.write_text("A=$HOME `id` 'x' \"y\" ; exit 1\nB=\n")
    done = command("launch.flags", f"--preset={file}")
    assert done.code == 0
    assert evaluated(done.out) == {"A": "$HOME `id` 'x' \"y\" ; exit 1", "B": ""}


def test_xla_flags_that_are_set_already_do_not_reach_the_check():
    done = subprocess.run(
        [sys.executable, "-m", "launch.flags", "--preset=h100"],
        cwd=ROOT, env=ENVIRONMENT | {"XLA_FLAGS": "--xla_made_up=1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
