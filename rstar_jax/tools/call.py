"""The process of a call or a session as its keeper sees it: two pipes that are drained, a channel, a deadline. Standard library
alone."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Any

from rstar_jax.tools import child

_CHUNK = 1 << 16
_PIPE_CHUNKS = 17  # more than a pipe can hold


class Output:
    """What is kept of one stream: the first and the last bytes, and how many there were."""

    def __init__(self, fd: int, keep: int):
        self.fd = fd
        self._half = max(1, keep // 2)
        self.clear()

    def clear(self) -> None:
        """Forget what came so far."""
        self.total = 0
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


class Program:
    """A process that waits for a job, or runs one. As a session it runs one cell after another. The keeper's end of it: two pipes
    and a channel; `others` are the child's ends."""

    def __init__(self, number: int, keep: int):
        """Open its pipes; `keep` bytes of each are kept. Raises `OSError` when there is no descriptor to be had."""
        self.number = number
        self.session: int | None = None
        self.job: int | None = None  # the call in hand
        self.reason: str | None = None
        self.new = True  # the call in hand is its first
        self.unsent = b""
        self.started = self.deadline = 0.0  # `deadline`: infinite once it is being killed
        self.ready = False  # set up and confined
        with contextlib.ExitStack() as undo:
            pipes = []
            for _ in range(2):
                pipes.append(os.pipe())
                undo.callback(os.close, pipes[-1][0])
                undo.callback(os.close, pipes[-1][1])
                os.set_blocking(pipes[-1][0], False)
            self.channel, theirs = socket.socketpair()
            undo.pop_all()
        self.channel.setblocking(False)
        self.others = [pipes[0][1], pipes[1][1], theirs.detach()]
        self.outputs = [Output(fd, keep) for fd, _ in pipes]

    def close_others(self) -> None:
        """The child has its ends now."""
        for fd in self.others:
            os.close(fd)

    def close(self) -> None:
        for output in self.outputs:
            os.close(output.fd)
        self.channel.close()

    def begin(self, job: dict[str, Any]) -> None:
        """Hand it a call. What the socket does not take at once is in `unsent`."""
        self.job, self.session, self.reason = job["id"], job["session"], None
        for output in self.outputs:
            output.clear()
        program, stdin = (job[name].encode("utf-8", "surrogatepass") for name in ("code", "stdin"))
        self.unsent = child.JOB.pack(self.session is not None, len(program), len(stdin)) + program + stdin
        self.started = time.monotonic()
        self.deadline = self.started + job["timeout"]
        self.send()

    def send(self) -> None:
        """Write what the socket takes now."""
        try:
            while self.unsent:
                self.unsent = self.unsent[self.channel.send(self.unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # it is dead: its end will be seen
            self.unsent = b""

    def answer(self) -> bytes | None:
        """What a session says of its cell: two bytes, note and exit code. None when it has said nothing yet, no bytes when it will say
        nothing any more."""
        return self._read(2) if self.look() else None

    def look(self) -> bool:
        """Whether it has been confined and is ready for its job."""
        self.ready = self.ready or self._read(1) == child.READY
        return self.ready

    def _read(self, count: int) -> bytes | None:
        try:
            return self.channel.recv(count)
        except BlockingIOError:
            return None
        except ConnectionError:  # it died with something unread
            return b""

    def _drain(self) -> None:
        for output in self.outputs:
            for _ in range(_PIPE_CHUNKS):  # a grandchild may hold the pipe and go on writing: there may be no end to wait for
                if not output.drain():
                    break

    def _report(self, note: int, code: int, cpu_seconds: float, alive: bool) -> dict[str, Any]:
        (stdout, cut_stdout), (stderr, cut_stderr) = (output.text() for output in self.outputs)
        report = {
            "id": self.job,
            "code": code,
            "reason": self.reason,
            "note": note,
            "seconds": time.monotonic() - self.started,
            "cpu_seconds": cpu_seconds,
            "stdout": stdout,
            "stderr": stderr,
            "truncated": cut_stdout or cut_stderr,
            "alive": alive,
            "ready": self.ready,
        }
        self.job = None
        return report

    def finish_cell(self, note: int, code: int) -> dict[str, Any]:
        """The report on a session's cell that has ended."""
        self._drain()
        return self._report(note, code, 0.0, True)

    def finish(self, status: int, microseconds: int, note: int) -> dict[str, Any]:
        """Describe how the process ended, and close what it held."""
        self._drain()
        self.look()
        self.close()
        return self._report(note, os.waitstatus_to_exitcode(status), microseconds / 1e6, False)
