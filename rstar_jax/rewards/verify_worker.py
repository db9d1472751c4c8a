"""The process that runs math-verify: one JSON request a line in, one JSON reply a line out.

Started by `verifier.Verifier` as a script. It imports neither jax nor the rest of the package, so that it starts fast. Its
address space is limited, and a request that takes far longer than its limit ends the process even when the parent is gone.

    request  {"answer": str, "gold": str}           LaTeX without a box around it
    reply    {"equal": bool} | {"unparseable": "gold"}
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

_PR_SET_PDEATHSIG = 1


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the signal was asked for
        os._exit(1)


def _verdict(answer: str, gold: str) -> dict[str, Any]:
    from math_verify import LatexExtractionConfig, parse, verify

    def parsed(text: str) -> list[Any]:
        # Time is limited from outside; math-verify's own limit uses signals, and does not interrupt big-number arithmetic.
        boxed = [LatexExtractionConfig(boxed_match_priority=0)]
        return parse(f"\\boxed{{{text}}}", extraction_config=boxed, fallback_mode="no_fallback", parsing_timeout=None)

    gold_value = parsed(gold)
    if not gold_value:
        return {"unparseable": "gold"}
    return {"equal": bool(verify(gold_value, parsed(answer), timeout_seconds=None))}


def _serve(requests: BinaryIO, replies: BinaryIO, hard_limit_s: float) -> None:
    _verdict(r"\frac{1}{2}", "0.5")  # the first use builds the grammar, which is not to count against a request
    replies.write(b'{"ready": true}\n')
    replies.flush()
    for line in requests:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, hard_limit_s)  # SIGALRM's default action ends the process
        reply = _verdict(request["answer"], request["gold"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def main() -> None:
    parent, memory_bytes, hard_limit_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    _die_with_parent(parent)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is not a reply
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _serve(sys.stdin.buffer, replies, hard_limit_s)


if __name__ == "__main__":
    main()
