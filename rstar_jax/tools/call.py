"""A running call as its zygote sees it: the process, the two pipes that are drained, the deadline. Standard library alone."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from typing import Any

from rstar_jax.tools import child

_CHUNK = 1 << 16
_PIPE_CHUNKS = 17  # more than a pipe can hold


class Output:
    """What is kept of one stream: the first and the last bytes, and how many there were."""

    def __init__(self, fd: int, keep: int):
        self.fd = fd
        self.total = 0
        self._half = max(1, keep // 2)
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, chunk: bytes) -> None:
        self.total += len(chunk)
        room = self._half - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk
        if len(self._tail) > self._half + _CHUNK:
            del self._tail[: -self._half]

    def drain(self) -> int | None:
        """Read one chunk without waiting. Returns its size: 0 at the end of the stream, None when there is nothing now."""
        try:
            chunk = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return None
        self.add(chunk)
        return len(chunk)

    def text(self) -> tuple[str, bool]:
        """(text, truncated): bytes that are not UTF-8 become U+FFFD; a line in the middle counts the bytes that were cut."""
        head, tail = bytes(self._head), bytes(self._tail[-self._half :])
        if self.total == len(head) + len(tail):
            return (head + tail).decode("utf-8", "replace"), False
        head = head[: len(head) - _split_bytes(head)]
        while tail and tail[0] & 0xC0 == 0x80:  # the rest of a character whose start was cut
            tail = tail[1:]
        cut = self.total - len(head) - len(tail)
        return f"{head.decode('utf-8', 'replace')}\n[... {cut} bytes cut ...]\n{tail.decode('utf-8', 'replace')}", True


def _split_bytes(data: bytes) -> int:
    """How many bytes at the end of `data` are the start of a UTF-8 character that goes on behind it (0 to 3)."""
    for length in range(1, min(3, len(data)) + 1):
        lead = data[-length]
        if lead & 0xC0 != 0x80:  # not a continuation byte
            size = 2 if lead & 0xE0 == 0xC0 else 3 if lead & 0xF0 == 0xE0 else 4 if lead & 0xF8 == 0xF0 else 1
            return length if size > length else 0
    return 0


class Call:
    """A running call: its process, its two output pipes, its deadline."""

    def __init__(self, job: dict[str, Any], settings: dict[str, Any], cwd: str):
        self.id = job["id"]
        self.cwd = cwd
        self.reason: str | None = None
        self.note = mmap.mmap(-1, 1)
        with contextlib.ExitStack() as undo:
            os.mkdir(cwd, 0o700)
            undo.callback(os.rmdir, cwd)
            stdin = _input(job["stdin"])
            if stdin:
                undo.callback(os.close, stdin)
            pipes = []
            for _ in range(2):
                pipes.append(os.pipe())
                undo.callback(os.close, pipes[-1][0])
                undo.callback(os.close, pipes[-1][1])
                os.set_blocking(pipes[-1][0], False)
            os.environ["HOME"] = os.environ["TMPDIR"] = cwd  # here: a page that a child writes to has to be copied first
            self.started = time.monotonic()
            self.pid = os.fork()
            if self.pid == 0:
                child.run(job, settings, (stdin, pipes[0][1], pipes[1][1]), cwd, self.note)
            self.pidfd = os.pidfd_open(self.pid)  # should this fail, the child is an orphan that the next sweep kills
            undo.pop_all()
        for fd in (stdin, pipes[0][1], pipes[1][1]):
            if fd:
                os.close(fd)
        self.deadline = self.started + job["timeout"]
        self.outputs = [Output(fd, settings["output_bytes"]) for fd, _ in pipes]

    def kill(self, reason: str) -> None:
        """Kill the call's process group; the first reason stays."""
        self.reason = self.reason or reason
        _kill_group(self.pid)

    def finish(self) -> dict[str, Any]:
        """Reap the dead call, close what it held, and describe how it ended."""
        _kill_group(self.pid)  # before the pid is reaped, so that it cannot be another's
        for output in self.outputs:
            for _ in range(_PIPE_CHUNKS):  # a grandchild may hold the pipe and go on writing: there may be no end to wait for
                if not output.drain():
                    break
            os.close(output.fd)
        os.close(self.pidfd)
        _, status, usage = os.wait4(self.pid, 0)
        seconds = time.monotonic() - self.started
        (stdout, cut_stdout), (stderr, cut_stderr) = (output.text() for output in self.outputs)
        note = self.note[0]
        self.note.close()
        return {
            "id": self.id,
            "code": os.waitstatus_to_exitcode(status),
            "reason": self.reason,
            "note": note,
            "seconds": seconds,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "stdout": stdout,
            "stderr": stderr,
            "truncated": cut_stdout or cut_stderr,
        }


def _input(text: str) -> int:
    """A file descriptor that reads `text` and then ends; 0, which is /dev/null, for no text."""
    if not text:
        return 0
    data = text.encode("utf-8", "surrogatepass")
    fd = os.memfd_create("stdin")
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _kill_group(pid: int) -> None:
    """SIGKILL the process `pid` (not yet reaped) and its group, if it has made one already."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # killed before its setsid
        os.killpg(pid, signal.SIGKILL)
