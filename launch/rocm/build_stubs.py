"""Build stand-ins for the libraries of XLA's ROCm plugin: `python -m launch.rocm.build_stubs --plugins=DIR --output=DIR`.

`make rocm-compiler` calls it. With them on LD_LIBRARY_PATH the plugin loads, and compiles, on a machine without ROCm.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from absl import flags

from launch import cli
from rstar_jax.planning import stubs
from rstar_jax.types import UserError

PLUGINS = flags.DEFINE_string("plugins", None, "Directory that the plugin's wheels were installed in (a site-packages).")
OUTPUT = flags.DEFINE_string("output", None, "Directory to write the libraries to.")


def main(argv: Sequence[str]) -> None:
    """Read the plugin's shared objects, and write one library for each that they need."""
    del argv
    if not PLUGINS.value or not OUTPUT.value:
        raise UserError("--plugins and --output are needed: where the plugin is installed, and where the libraries go")
    folder = pathlib.Path(PLUGINS.value)
    objects = sorted([*folder.glob("jax_plugins/xla_rocm*/*.so"), *folder.glob("jax_rocm*_plugin/*.so")])
    if not objects:
        raise UserError(f"--plugins={folder}: no ROCm plugin is there; install jax-rocm7-plugin and jax-rocm7-pjrt into it")
    built = stubs.build(objects, pathlib.Path(OUTPUT.value))
    print(f"{len(built)} libraries in {OUTPUT.value}: {', '.join(built)}")


if __name__ == "__main__":
    cli.run(main)
