"""Frames between a pool and its keepers: JSON behind its length in four bytes (big endian). Standard library alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def frame(message: Mapping[str, Any]) -> bytes:
    """One message, ready to be sent. Text may hold surrogates: everything but ASCII is escaped."""
    body = json.dumps(message).encode("ascii")
    return len(body).to_bytes(4, "big") + body


def take_messages(inbox: bytearray) -> list[dict[str, Any]]:
    """The messages of all whole frames at the start of `inbox`, which are taken out of it."""
    messages = []
    while len(inbox) >= 4 and len(inbox) >= 4 + (size := int.from_bytes(inbox[:4], "big")):
        messages.append(json.loads(inbox[4 : 4 + size]))
        del inbox[: 4 + size]
    return messages
