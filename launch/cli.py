"""What every entry point shares: absl flags, one clear line for a mistake, no positional arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging

from rstar_jax.types import UserError


def _parse(argv: Sequence[str]) -> list[str]:
    try:
        rest = flags.FLAGS(list(argv))
    except flags.Error as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    if len(rest) > 1:
        print(f"error: {rest[1]!r} is not a flag; settings are given as --name=value", file=sys.stderr)
        sys.exit(2)
    return rest


def run(main: Callable[[Sequence[str]], None]) -> None:
    """Run `main`; a `UserError` becomes one line on standard error and exit code 2."""

    def guarded(argv: Sequence[str]) -> None:
        try:
            main(argv)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    logging.set_verbosity(logging.WARNING)
    app.run(guarded, flags_parser=_parse)
