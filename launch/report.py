"""Write the report of a run: one HTML file with its curves, its evaluations and its rollouts.

python -m launch.report --workdir=runs/quickstart
python -m launch.report --workdir=runs/a --compare=runs/b --compare=runs/c --output=comparison.html
"""

from collections.abc import Sequence

from absl import flags

from launch import cli
from rstar_jax.types import UserError

WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run.")
COMPARE = flags.DEFINE_multi_string("compare", [], "Directory of a run to draw beside it; may be repeated.")
OUTPUT = flags.DEFINE_string("output", None, "File to write; by default report.html in the work directory.")


def main(argv: Sequence[str]) -> None:
    """Write the page and print where it is."""
    del argv
    if not WORKDIR.value:
        raise UserError("--workdir is missing: give the directory of a run")
    from rstar_jax.storage import report  # draws figures: imported only when there is one to draw

    print(f"report: {report.write_report(WORKDIR.value, OUTPUT.value, COMPARE.value)}")


if __name__ == "__main__":
    cli.run(main)
