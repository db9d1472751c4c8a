"""The process of one SQL query: opens the database read-only, answers one query, ends. Standard library alone.

Started by `sql_tool.SqlTool` as a script: `python -I -S -B sql_worker.py URI SETTINGS`. It writes the line `ready` once the
database is open, reads the query (UTF-8) up to the end of its standard input, and writes one JSON object:

    {"status": "ok" | "error" | "rejected" | "memory" | "output_limit", "text": TSV, "error": one line, "columns": [str],
     "rows": int, "more": bool, "cpu_seconds": float}
    {"failed": str}                                     the database could not be opened or read: not the query's fault

Four walls stand between a query and the machine: an authorizer that knows what reading needs and denies all else, SQLite's own
read-only mode, `RLIMIT_FSIZE` 0 (no file can grow by a byte), and limits on time and memory that the kernel keeps.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import sqlite3
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1
_OVERHEAD_BYTES = 256 << 20  # address space of the interpreter and of the rows that it holds
_GRACE_SECONDS = 1.0  # past the deadline: the process ends by itself when its owner cannot kill it

_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_PRAGMAS = {
    "table_list", "table_info", "table_xinfo", "index_list", "index_info", "index_xinfo", "foreign_key_list",
    "data_version",  # asked for by FTS5
}  # fmt: skip
_ACTIONS = {getattr(sqlite3, f"SQLITE_{name}"): name.replace("_", " ") for name in (
    "ALTER_TABLE", "ANALYZE", "ATTACH", "CREATE_INDEX", "CREATE_TABLE", "CREATE_TEMP_INDEX", "CREATE_TEMP_TABLE",
    "CREATE_TEMP_TRIGGER", "CREATE_TEMP_VIEW", "CREATE_TRIGGER", "CREATE_VIEW", "CREATE_VTABLE", "DELETE", "DETACH", "DROP_INDEX",
    "DROP_TABLE", "DROP_TEMP_INDEX", "DROP_TEMP_TABLE", "DROP_TEMP_TRIGGER", "DROP_TEMP_VIEW", "DROP_TRIGGER", "DROP_VIEW",
    "DROP_VTABLE", "FUNCTION", "INSERT", "PRAGMA", "REINDEX", "SAVEPOINT", "TRANSACTION", "UPDATE",
)}  # fmt: skip
_MACHINERY = {  # primary result codes that say something of the file, and nothing of the query
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_NOTADB,
}  # fmt: skip
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


class Guard:
    """The authorizer. `denied` is the first action that was refused, for the answer."""

    def __init__(self) -> None:
        self.denied = ""

    def __call__(self, action: int, first: str | None, second: str | None, database: str | None, source: str | None) -> int:
        if action in _ALLOWED:
            return sqlite3.SQLITE_OK
        name = f"{_ACTIONS.get(action, f'action {action}')} {first or ''}".strip()
        if action == sqlite3.SQLITE_FUNCTION:
            if (second or "").lower() != "load_extension":
                return sqlite3.SQLITE_OK
            name = "load_extension"
        elif action == sqlite3.SQLITE_PRAGMA and (first or "").lower() in _PRAGMAS:
            return sqlite3.SQLITE_OK
        elif action == sqlite3.SQLITE_UPDATE and first == "sqlite_master":
            # Asked for when a virtual table (`json_each`, say) declares its columns. A query's own update of this table is
            # refused by SQLite itself.
            return sqlite3.SQLITE_OK
        self.denied = self.denied or name
        return sqlite3.SQLITE_DENY


def limit_process(settings: dict[str, Any]) -> None:
    """Die with the owner, and keep within time and memory whatever the owner does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != settings["parent"]:
        os._exit(1)  # it died before the line above
    cpu = math.ceil(settings["timeout_s"] + _GRACE_SECONDS)
    memory = 2 * settings["memory_bytes"] + _OVERHEAD_BYTES
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def open_database(uri: str, settings: dict[str, Any]) -> tuple[sqlite3.Connection, Guard]:
    """A connection that can read and nothing else. Raises `sqlite3.Error` when the file cannot be read."""
    connection = sqlite3.connect(uri, uri=True, timeout=settings["timeout_s"], isolation_level=None, cached_statements=0)
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    for pragma in ("query_only=ON", "trusted_schema=OFF", "temp_store=MEMORY", f"hard_heap_limit={settings['memory_bytes']}"):
        connection.execute(f"PRAGMA {pragma}")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, settings["memory_bytes"] // 4)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE VIRTUAL TABLE%'").fetchall():
        with contextlib.suppress(sqlite3.Error):  # its module may not be known here; the query will hear of it
            quoted = name.replace('"', '""')
            connection.execute(f'SELECT 1 FROM "{quoted}" LIMIT 0')  # R-trees prepare to write when they are first touched
    guard = Guard()
    connection.set_authorizer(guard)
    return connection, guard


def field(value: Any, room: int) -> str | None:
    """One value as a TSV field, or None when it surely takes more than `room` characters."""
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"X'{value.hex().upper()}'" if 2 * len(value) + 3 <= room else None
    if isinstance(value, str):
        return value.translate(_ESCAPES) if len(value) <= room else None
    return str(value)


class Table:
    """TSV that grows line by line up to `max_bytes` of UTF-8; lines are kept or dropped as a whole."""

    def __init__(self, max_bytes: int):
        self.room = max_bytes
        self.lines: list[str] = []

    def add(self, values: tuple[Any, ...]) -> bool:
        """Whether the line had room."""
        fields: list[str] = []
        room = self.room
        for value in values:
            text = field(value, room)
            room -= 1 if text is None else len(text.encode()) + 1  # and a tab, or the newline
            if text is None or room < 0:
                return False
            fields.append(text)
        self.lines.append("\t".join(fields) + "\n")
        self.room = room
        return True


def answer(connection: sqlite3.Connection, guard: Guard, query: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The reply to one query, see the top of this file. Raises what SQLite raises."""
    cursor = connection.execute(query)
    if cursor.description is None:
        return {"status": "rejected", "error": "Error: the query holds no statement that returns rows"}
    columns = [column[0] for column in cursor.description]
    table = Table(settings["max_bytes"])
    rows, more = 0, False
    fits = table.add(tuple(columns))
    while fits and (row := cursor.fetchone()) is not None:
        if rows == settings["max_rows"]:
            more = True
            break
        fits = table.add(row)
        rows += fits
    reply = {"text": "".join(table.lines), "columns": columns, "rows": rows, "more": more or not fits}
    if fits:
        return reply | {"status": "ok"}
    return reply | {"status": "output_limit", "error": f"OutputLimitError: the result is longer than {settings['max_bytes']} bytes"}


def complaint(error: Exception, guard: Guard) -> dict[str, Any]:
    """The reply to a query that failed with `error`."""
    code = getattr(error, "sqlite_errorcode", None)
    text = " ".join(str(error).split())
    if code is not None and code & 0xFF in _MACHINERY:
        return {"failed": f"{error.sqlite_errorname}: {text}"}  # type: ignore[attr-defined]
    if guard.denied:
        return {"status": "rejected", "error": f"Error: the database can only be read; refused: {guard.denied}"}
    if isinstance(error, (sqlite3.Warning, sqlite3.ProgrammingError)):  # several statements, parameters without values
        return {"status": "rejected", "error": f"Error: {text}"}
    return {"status": "error", "error": f"{type(error).__name__}: {text}"}


def main() -> None:
    uri, settings = sys.argv[1], json.loads(sys.argv[2])
    limit_process(settings)
    guard = Guard()
    reply: dict[str, Any]
    try:
        connection, guard = open_database(uri, settings)
        os.write(1, b"ready\n")
        query = sys.stdin.buffer.read().decode()
        signal.setitimer(signal.ITIMER_REAL, settings["timeout_s"] + _GRACE_SECONDS)  # SIGALRM's default action ends the process
        reply = answer(connection, guard, query, settings)
    except MemoryError:
        reply = {"status": "memory", "error": "MemoryError: the query used more memory than it may"}
    except Exception as error:
        reply = complaint(error, guard)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    reply["cpu_seconds"] = usage.ru_utime + usage.ru_stime
    with contextlib.suppress(BrokenPipeError):  # the owner is gone
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()
    os._exit(0)  # the database was only read: there is nothing to close


if __name__ == "__main__":
    main()
