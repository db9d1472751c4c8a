"""What a person sees while a run works: bars with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm


class Progress:
    """Says lines, and shows one bar at a time. On a pipe a bar is a line every `interval` seconds."""

    def __init__(self, stream: TextIO | None = None, interval: float = 15.0):
        self._stream = stream or sys.stderr
        self._interval = interval
        self._bar: tqdm | None = None
        self._name, self._total, self._first, self._done = "", 0, 0, 0
        self._started = self._last = 0.0

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)

    def start(self, name: str, total: int, done: int = 0) -> None:
        """Begin a bar of `total` steps, of which `done` are done already."""
        self.stop()
        self._name, self._total, self._first, self._done = name, total, done, done
        self._started = time.monotonic()
        self._last = self._started - self._interval
        if self._stream.isatty():
            self._bar = tqdm(total=total, initial=done, desc=name, file=self._stream, dynamic_ncols=True)

    def step(self, shown: Mapping[str, float]) -> None:
        """One more step, with the numbers that matter."""
        self._done += 1
        text = " ".join(f"{key}={value:.3g}" for key, value in shown.items())
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
            return
        now = time.monotonic()
        if now - self._last >= self._interval or self._done == self._total:
            self._last = now
            left = (now - self._started) / max(self._done - self._first, 1) * (self._total - self._done)
            print(f"{self._name} {self._done}/{self._total} {text} eta={left:.0f}s", file=self._stream, flush=True)

    def stop(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
