"""What every entry point shares: absl flags, one clear line for a mistake, no positional arguments."""

from __future__ import annotations

import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import app, flags, logging

from rstar_jax.types import UserError

MODELS = ("smollm2-135m-instruct",)  # that --model knows by name


def say_error(message: object) -> None:
    """One line on standard error, whatever the message holds."""
    print(f"error: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def _refuse(message: object) -> NoReturn:
    say_error(message)
    sys.exit(2)


def _parse(argv: Sequence[str]) -> list[str]:
    try:
        rest = flags.FLAGS(list(argv))
    except flags.Error as error:
        _refuse(error)
    if len(rest) > 1:
        _refuse(f"{rest[1]!r} is not a flag; settings are given as --name=value")
    return rest


def run(main: Callable[[Sequence[str]], None]) -> None:
    """Run `main`; a `UserError` becomes one line on standard error and exit code 2."""

    def guarded(argv: Sequence[str]) -> None:
        try:
            main(argv)
        except UserError as error:
            _refuse(error)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    logging.set_verbosity(logging.WARNING)
    app.run(guarded, flags_parser=_parse)


def check_agent(workdir: str | None, model: str | None) -> None:
    """Raises `UserError` unless exactly one of `--workdir` and `--model` names something that is there."""
    if workdir and model:
        raise UserError("--workdir and --model were both given; give one of them")
    if model:
        if model not in MODELS and not pathlib.Path(model).exists():
            raise UserError(f"--model={model}: no such directory, and no known name ({', '.join(MODELS)})")
        return
    if not workdir:
        raise UserError("--workdir is missing: give the directory of a trained run, or --model")
    if not pathlib.Path(workdir).is_dir():
        raise UserError(f"--workdir={workdir}: no such directory; give that of a trained run")


def check_writable(file: pathlib.Path) -> None:
    """Raises `UserError` when `file` cannot be written: before the work whose result goes there, not after it. Leaves nothing."""
    if file.is_dir():
        raise UserError(f"{file} is a directory; give the file to write")
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from None
