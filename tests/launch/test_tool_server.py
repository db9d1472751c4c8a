"""The command that serves the tool to other hosts."""

import asyncio
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from rstar_jax.tools.remote import RemotePool
from rstar_jax.tools.wire import read_token
from rstar_jax.types import ToolStatus

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "launch.tool_server"]
SMALL = ["--set", "tool.preload=", "--set", "tool.workers=1", "--set", "tool.concurrency=2"]
TIMEOUT = 100


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_it_serves_until_it_is_told_to_stop(kind, tmp_path):
    file, path = tmp_path / "token", tmp_path / "socket"
    address = f"unix:{path}" if kind == "unix" else "127.0.0.1:0"
    arguments = [f"--address={address}", f"--token_file={file}", *SMALL]
    process = subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        first, second = process.stdout.readline(), process.stdout.readline()
        assert first.startswith("tool server: ") and "2 calls at a time" in first
        assert second.startswith("tool isolation: ")
        token = read_token(file)
        assert token not in first + second

        async def go():
            async with RemotePool([first.split()[2]], token) as pool:
                assert str(pool.isolation) == second.strip()
                async with pool.session() as session:
                    await session.run("x = 20")
                    assert (await session.run("x + 1")).stdout == "21\n"
                assert (await pool.run("while True: pass", timeout=0.3)).status is ToolStatus.TIMEOUT
                endless = asyncio.create_task(pool.run("import time; time.sleep(1000)", timeout=1000))
                await asyncio.sleep(0.2)
                os.kill(process.pid, signal.SIGTERM)
                endless.cancel()
                return await asyncio.to_thread(process.communicate, timeout=TIMEOUT)

        out, err = asyncio.run(go())
        assert (process.returncode, out) == (0, "tool server: stopped\n"), err
        assert token not in err and "Traceback" not in err
        assert not path.exists()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--token_file="], "--token_file is missing"),
        (["--token_file={}/no/token"], "cannot be made: No such file or directory"),
        (["--token_file={}"], "cannot be read: Is a directory"),
        (["--token_file={}/token", "--address=nowhere"], "is not HOST:PORT"),
        (["--token_file={}/token", "--address=192.0.2.1:0", *SMALL], "cannot listen on 192.0.2.1:0"),
        (["--token_file={}/token", "--set", "model.num_layers=3"], "section tool only"),
        (["--token_file={}/token", "--set", "tool.worker=3"], "no such field"),
        (["--token_file={}/token", "--set", "tool.workers=0"], "tool.workers"),
    ],
)
def test_a_mistake_is_one_line(arguments, error, tmp_path):
    arguments = [argument.format(tmp_path) for argument in arguments]
    done = subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 2 and done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and error in lines[0]
    assert "Traceback" not in done.stderr
