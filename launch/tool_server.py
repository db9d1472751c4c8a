"""Run the Python tool for other hosts: `python -m launch.tool_server --address=HOST:PORT --token_file=FILE [--set tool.key=value ...]`.

Stops with SIGTERM or Ctrl-C. Clients are `rstar_jax.tools.remote.RemotePool`s with the same token.
"""

from __future__ import annotations

import asyncio
import pathlib
import signal
import sys
from collections.abc import Sequence

from absl import flags

from launch import cli
from rstar_jax.config import RunConfig, StageConfig, ToolConfig
from rstar_jax.overrides import apply_overrides
from rstar_jax.types import UserError

ADDRESS = flags.DEFINE_string("address", "127.0.0.1:0", "HOST:PORT to listen on (port 0: any), or unix:/path.")
TOKEN_FILE = flags.DEFINE_string("token_file", None, "File with the token that clients show; made with a new one if it does not exist.")
SET = flags.DEFINE_multi_string("set", [], "tool.key=value; may be repeated.")
GRACE = flags.DEFINE_float("grace_s", 10.0, "Seconds that the calls of a lost client go on.", lower_bound=0.0)


def tool_config(overrides: Sequence[str]) -> ToolConfig:
    """The tool's configuration with `tool.key=value` applied, as `launch.train --set` does it. Raises `UserError`."""
    for override in overrides:
        if not override.strip().startswith("tool."):
            raise UserError(f"--set {override}: a tool server has the settings of the section tool only, such as tool.workers=8")
    return apply_overrides(RunConfig("tool_server", (StageConfig("none", "sft", 1),)), overrides).tool


async def serve(config: ToolConfig, token: str, address: str, grace_s: float) -> None:
    """Serve until SIGTERM or SIGINT, then end every call."""
    from rstar_jax.tools import wire
    from rstar_jax.tools.pool import ToolPool
    from rstar_jax.tools.server import ToolServer

    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with ToolPool(config) as pool, ToolServer(pool, token, address, grace_s=grace_s) as server:
        print(f"tool server: {server.address} (token {wire.fingerprint(token)}, {config.concurrency} calls at a time)")
        print(pool.isolation, flush=True)
        if not wire.is_local(server.address):
            print("note: nothing is encrypted, and whoever has the token can run programs here", file=sys.stderr, flush=True)
        await stopped.wait()
    print("tool server: stopped", flush=True)


def main(argv: Sequence[str]) -> None:
    """Validate everything, then serve."""
    del argv
    config = tool_config(SET.value)
    if not TOKEN_FILE.value:
        raise UserError("--token_file is missing: give a file with the token, or the name of one that is to be made")
    from rstar_jax.tools import wire

    wire.parse_address(ADDRESS.value)
    token = wire.read_or_make_token(pathlib.Path(TOKEN_FILE.value))
    asyncio.run(serve(config, token, ADDRESS.value, GRACE.value))


if __name__ == "__main__":
    cli.run(main)
