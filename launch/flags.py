"""Print the environment of an accelerator for a shell: `eval "$(python -m launch.flags --preset=mi300x)"`.

XLA aborts a process that has a flag it does not know, and flags come and go with its versions. So the preset's XLA_FLAGS first go to
a process of its own, which starts the CPU backend of the installed jax: it reads the flags of all backends. (An accelerator's plugin
reads them again; at the version of jaxlib, as the extras of setup.py have it, it knows the same ones.)
"""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version

from absl import flags

from launch import cli
from rstar_jax.types import UserError

FOLDER = pathlib.Path(__file__).parent / "presets"
START = "import jax; jax.devices()"
TIMEOUT_S = 120

PRESET = flags.DEFINE_string("preset", None, "Name of a file in launch/presets/, or a path that ends in .env.")


def find(preset: str | None) -> pathlib.Path:
    """The preset's file. Raises `UserError` with the known names."""
    known = sorted(path.stem for path in FOLDER.glob("*.env"))
    if preset in known:
        return FOLDER / f"{preset}.env"
    if preset and preset.endswith(".env") and pathlib.Path(preset).is_file():
        return pathlib.Path(preset)
    what = f"--preset={preset} is not known" if preset else "--preset is missing"
    raise UserError(f"{what}; choose one of {', '.join(known)}, or give a file whose name ends in .env")


def read(file: pathlib.Path) -> dict[str, str]:
    """Variables of a KEY=VALUE file; `#` begins a line that is a comment. Raises `UserError` with the line that is neither."""
    variables: dict[str, str] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        key, separator, value = line.partition("=")
        if not separator or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            raise UserError(f"{file}:{number}: {line!r} is not KEY=VALUE")
        if key in variables:
            raise UserError(f"{file}:{number}: {key} is set for the second time")
        variables[key] = value.strip()
    return variables


def check_xla_flags(file: pathlib.Path, value: str) -> None:
    """Raises `UserError` with the flags that the installed XLA does not know, or with what else it says against them."""
    environment = os.environ | {"XLA_FLAGS": value, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", START]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"{file}: jax did not start within {TIMEOUT_S} s, so its XLA_FLAGS are unchecked") from None
    if done.returncode == 0:
        return
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.+)", done.stderr)
    if unknown:
        raise UserError(f"{file}: flags in XLA_FLAGS that jaxlib {version('jaxlib')} does not know: {', '.join(unknown[1].split())}")
    complaint = re.search(r"^[EF]\d+ .*?\] (.+)$", done.stderr, re.MULTILINE)  # the first: what follows lists all flags there are
    reason = complaint[1] if complaint else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    raise UserError(f"{file}: jax does not start with its XLA_FLAGS: {reason}")


def exports(variables: dict[str, str]) -> str:
    """Lines for a shell."""
    return "".join(f"export {key}={shlex.quote(value)}\n" for key, value in variables.items())


def main(argv: Sequence[str]) -> None:
    """Check the preset, then print it."""
    del argv
    file = find(PRESET.value)
    variables = read(file)
    if "XLA_FLAGS" in variables:
        check_xla_flags(file, variables["XLA_FLAGS"])
    print(exports(variables), end="")


if __name__ == "__main__":
    cli.run(main)
