"""Write a run's newest weights as a Hugging Face checkpoint: `python -m launch.export --workdir=DIR --output=HF_DIR`.

transformers loads the result as it is: safetensors, config.json, generation_config.json and the tokenizer.
"""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Sequence

from absl import flags

from launch import cli
from rstar_jax.types import UserError

WORKDIR = flags.DEFINE_string("workdir", None, "Directory of a trained run.")
OUTPUT = flags.DEFINE_string("output", None, "Directory to write; new or empty.")
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "Of the stored weights; float32 loses nothing.")


def main(argv: Sequence[str]) -> None:
    """Validate, then write beside the target and move into place."""
    del argv
    cli.check_agent(WORKDIR.value, None)
    if not OUTPUT.value:
        raise UserError("--output is missing: give a new directory for the checkpoint")
    output = pathlib.Path(OUTPUT.value).absolute()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output={OUTPUT.value} exists and is not empty; give a new directory")
    cli.check_writable(output / "config.json")
    from rstar_jax.recipes import inference  # takes seconds: imported only when there is work to do

    trained = inference.load_trained(pathlib.Path(WORKDIR.value))
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as temporary:
        whole = pathlib.Path(temporary) / "checkpoint"
        inference.export(trained, pathlib.Path(WORKDIR.value), whole, DTYPE.value)
        if output.exists():
            output.rmdir()
        whole.rename(output)
    print(f"step {trained.position.global_step}: {output}")


if __name__ == "__main__":
    cli.run(main)
