"""What every entry point shares: absl flags, one clear line for a mistake, no positional arguments."""

from __future__ import annotations

import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import app, flags, logging

from rstar_jax.types import UserError


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


def trained_directory(workdir: str | None, model: str | None) -> pathlib.Path:
    """The directory of the run that `--workdir` names; exactly one of `--workdir` and `--model` must be given."""
    if workdir and model:
        raise UserError("--workdir and --model were both given; give one of them")
    if model:
        if not pathlib.Path(model).is_dir():
            raise UserError(f"--model={model}: no such directory")
        raise UserError(
            f"--model={model}: this version works with runs of its own, given as --workdir; it cannot load Hugging Face checkpoints yet"
        )
    if not workdir:
        raise UserError("--workdir is missing: give the directory of a trained run")
    directory = pathlib.Path(workdir)
    if not directory.is_dir():
        raise UserError(f"--workdir={workdir}: no such directory; give that of a trained run")
    return directory


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
