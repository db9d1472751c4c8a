"""The SQL tool against real SQLite files: what it answers, what it refuses, and that nothing outlives it."""

import asyncio
import json
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from rstar_jax.tools import sql_tool
from rstar_jax.tools.noisy import NoisyTool
from rstar_jax.tools.sql_tool import SqlTool
from rstar_jax.types import InfrastructureError, Tool, ToolResult, ToolStatus, UserError

COUNT_FOREVER = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
NUMBERS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < {}) SELECT x FROM c"
PERSON = [(1, "Ada\tL.", b"\x00\xff", 1.5), (2, None, None, None), (3, "漢\n🎉\\", b"", float("inf"))]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("sql") / "a 100% real?database#1.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE person (id INTEGER PRIMARY KEY, name TEXT, photo BLOB, score REAL)")
        connection.executemany("INSERT INTO person VALUES (?, ?, ?, ?)", PERSON)
        connection.execute("CREATE VIEW names AS SELECT name FROM person")
        connection.execute("CREATE VIRTUAL TABLE note USING fts5(body)")
        connection.execute("INSERT INTO note VALUES ('the quick fox')")
        connection.execute("CREATE TABLE broken (x)")
        connection.execute("INSERT INTO broken VALUES (CAST(x'ff41' AS TEXT))")
    connection.close()
    return path


@pytest.fixture
def ask(path):
    """`ask(*queries, **limits)`: the results of queries on a tool of their own; of one query, its result."""

    def ask(*queries, **limits):
        async def run():
            async with SqlTool(path, **limits) as tool:
                return [await tool.call({"query": query}) for query in queries]

        results = asyncio.run(run())
        return results[0] if len(results) == 1 else results

    return ask


def shown(path, result, **limits):
    return SqlTool(path, **limits).format(result)


# --- answers ---------------------------------------------------------------------------------------------------------


def test_rows_are_tab_separated_below_their_names(ask, path):
    result = ask("SELECT * FROM person ORDER BY id")
    assert (result.status, result.stderr, result.exit_code, result.truncated) == (ToolStatus.OK, "", 0, False)
    assert result.stdout == ("id\tname\tphoto\tscore\n1\tAda\\tL.\tX'00FF'\t1.5\n2\tNULL\tNULL\tNULL\n3\t漢\\n🎉\\\\\tX''\tinf\n")
    assert result.value == {"columns": ["id", "name", "photo", "score"], "rows": 3}
    assert result.seconds > 0 and result.cpu_seconds > 0
    assert shown(path, result) == result.stdout.rstrip("\n")


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("SELECT 1 + 1;", "1 + 1\n2"),
        ("SELECT name FROM names WHERE name LIKE 'A%' -- a comment", "name\nAda\\tL."),
        ("VALUES (1, 'a'), (2, 'b')", "column1\tcolumn2\n1\ta\n2\tb"),
        ("SELECT id FROM person WHERE id > 5", "id\n(no rows)"),
        ("SELECT '漢字 é 🎉' AS \"名\t前\"", "名\\t前\n漢字 é 🎉"),
        ("SELECT 9223372036854775807 AS big, -1e-7 AS small", "big\tsmall\n9223372036854775807\t-1e-07"),
        ("SELECT char(27) || '[31mred' AS x", "x\nred"),
        ("SELECT x FROM broken", "x\n\ufffdA"),
        ("SELECT name FROM pragma_table_info('person') LIMIT 2", "name\nid\nname"),
        ("PRAGMA foreign_key_list(person)", "id\tseq\ttable\tfrom\tto\ton_update\ton_delete\tmatch\n(no rows)"),
        ("SELECT body FROM note WHERE note MATCH 'fox'", "body\nthe quick fox"),
        ("SELECT value FROM json_each('[1, 2]')", "value\n1\n2"),
        ("SELECT length(zeroblob(30000000)) AS n", "n\n30000000"),
    ],
)
def test_what_can_be_read(ask, path, query, text):
    result = ask(query)
    assert result.status is ToolStatus.OK, result
    assert shown(path, result) == text


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("SELECT * FROM nobody", "OperationalError: no such table: nobody"),
        ("SELEC 1", 'OperationalError: near "SELEC": syntax error'),
        (".load ./evil", 'OperationalError: near ".": syntax error'),
        ("SELECT randomblob(1000000000)", "DataError: string or blob too big"),
        ("SELECT zeroblob(1000000000)", "DataError: string or blob too big"),
        ("SELECT writefile('/tmp/x', 'y')", "OperationalError: no such function: writefile"),
        ("UPDATE sqlite_master SET name = 'x'", "OperationalError: table sqlite_master may not be modified"),
        ("SELECT " + "(" * 5000 + "1" + ")" * 5000, "OperationalError: parser stack overflow"),
    ],
)
def test_errors_have_one_line(ask, path, query, complaint):
    result = ask(query)
    assert (result.status, result.stdout, result.stderr) == (ToolStatus.ERROR, "", complaint)
    assert shown(path, result) == complaint


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "query",
    [
        "INSERT INTO person VALUES (9, 'x', NULL, NULL)",
        "REPLACE INTO person VALUES (1, 'x', NULL, NULL)",
        "UPDATE person SET name = 'x'",
        "WITH x AS (SELECT 1) DELETE FROM person",
        "DELETE FROM person RETURNING id",
        "DROP TABLE person",
        "CREATE TABLE t (x)",
        "CREATE TEMP TABLE t (x)",
        "CREATE INDEX i ON person (name)",
        "ALTER TABLE person ADD COLUMN x",
        "INSERT INTO note(note) VALUES ('optimize')",
        "ATTACH '{aside}' AS aside",
        "VACUUM",
        "VACUUM INTO '{aside}'",
        "PRAGMA journal_mode = WAL",
        "PRAGMA writable_schema = 1",
        "PRAGMA user_version = 5",
        "PRAGMA query_only = 0",
        "PRAGMA hard_heap_limit = 0",
        "PRAGMA temp_store_directory = '/'",
        "SELECT * FROM pragma_database_list",
        "BEGIN EXCLUSIVE",
        "SAVEPOINT s",
        "REINDEX",
        "ANALYZE",
        "SELECT load_extension('{aside}')",
        "SELECT Load_Extension('{aside}', 'main')",
        "SELECT 1; SELECT 2",
        "SELECT 1; DROP TABLE person",
        "SELECT ?",
        "",
        " ;",
        "-- nothing",
    ],
)
def test_all_but_one_reading_statement_is_rejected_and_changes_nothing(ask, path, tmp_path, query):
    before, beside = path.read_bytes(), sorted(path.parent.iterdir())
    result = ask(query.format(aside=tmp_path / "aside.db"))
    assert result.status is ToolStatus.REJECTED, result
    assert result.stderr.startswith("Error: ") and "\n" not in result.stderr and not result.stdout
    assert path.read_bytes() == before and sorted(path.parent.iterdir()) == beside
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "Error: argument 'query' is missing: sql_query takes 'query'"),
        ({"query": 1}, "Error: argument 'query' must be a string, not int"),
        ({"query": "SELECT 1", "sql": ""}, "Error: unknown argument 'sql': sql_query takes 'query'"),
        (["SELECT 1"], "Error: arguments must be an object with the key 'query', not list"),
        ({"query": "SELECT '\0'"}, "Error: the query contains a null character"),
        ({"query": "SELECT '\ud800'"}, "Error: the query contains a lone surrogate, which is not text"),
        ({"query": "SELECT '" + "漢" * 40_000 + "'"}, "Error: the query is 120009 bytes long; at most 100000 are allowed"),
    ],
)
def test_malformed_arguments_are_rejected_with_one_line(path, arguments, complaint):
    async def run():
        async with SqlTool(path) as tool:
            return await tool.call(arguments)

    assert asyncio.run(run()) == ToolResult(ToolStatus.REJECTED, stderr=complaint)


# --- limits ----------------------------------------------------------------------------------------------------------


def test_rows_over_the_limit_are_left_out_and_the_text_says_so(ask, path):
    some, exact, endless = ask(NUMBERS.format(6), NUMBERS.format(5), NUMBERS.format(10**18), max_rows=5)
    assert shown(path, some, max_rows=5) == "x\n1\n2\n3\n4\n5\n(only the first 5 rows are shown)"
    assert (some.status, some.truncated, some.value["rows"]) == (ToolStatus.OK, True, 5)
    assert (exact.status, exact.truncated, exact.stdout) == (ToolStatus.OK, False, some.stdout)
    assert (endless.status, endless.truncated, endless.stdout) == (ToolStatus.OK, True, some.stdout)


def test_bytes_over_the_limit_end_the_answer_after_a_whole_row(ask, path):
    rows = "SELECT '漢字' AS x UNION ALL SELECT '漢字漢' UNION ALL SELECT 'z'"  # 2 + 7 + 10 + 2 bytes
    fits, over, wide, blob = ask(
        rows, rows + " UNION ALL SELECT ''", "SELECT 1 AS abcdefghijklmnopqrstu", "SELECT zeroblob(10)", max_bytes=21
    )
    assert (fits.status, fits.stdout) == (ToolStatus.OK, "x\n漢字\n漢字漢\nz\n")
    assert (over.status, over.stdout, over.truncated) == (ToolStatus.OUTPUT_LIMIT, fits.stdout, True)
    assert shown(path, over) == fits.stdout + "OutputLimitError: the result is longer than 21 bytes"
    assert (wide.status, wide.stdout) == (ToolStatus.OUTPUT_LIMIT, "")
    assert (blob.status, blob.stdout) == (ToolStatus.OUTPUT_LIMIT, "zeroblob(10)\n")


def test_a_huge_value_is_not_even_written_out(ask):
    result = ask("SELECT zeroblob(60000000), 1")
    assert (result.status, result.stdout) == (ToolStatus.OUTPUT_LIMIT, "zeroblob(60000000)\t1\n")


@pytest.mark.parametrize(
    "query",
    [
        COUNT_FOREVER,
        "SELECT count(*) FROM " + ", ".join(f"person AS p{i}" for i in range(30)),
    ],
)
def test_a_query_that_does_not_end_is_killed_at_its_deadline(ask, path, query):
    start = time.monotonic()
    late, next_one = ask(query, "SELECT 1", timeout_s=0.5)
    assert time.monotonic() - start < 5
    assert (late.status, late.exit_code, late.stdout) == (ToolStatus.TIMEOUT, -signal.SIGKILL, "")
    assert shown(path, late) == "TimeoutError: the query did not end within 0.5 s"
    assert 0.5 <= late.seconds < 2
    assert next_one.status is ToolStatus.OK


def test_memory_is_limited(ask, path):
    doubling = "WITH RECURSIVE c(x) AS (VALUES ('a') UNION ALL SELECT x || x FROM c) SELECT length(x) FROM c"
    hoard = f"SELECT count(*) FROM (SELECT zeroblob(1000000) AS b, x FROM ({NUMBERS.format(10**9)}) ORDER BY b, x)"
    for result in ask(hoard, doubling, memory_bytes=32 << 20, timeout_s=20):
        assert result.status in (ToolStatus.MEMORY, ToolStatus.ERROR), result
    assert shown(path, ask(hoard, memory_bytes=32 << 20, timeout_s=20)) == "MemoryError: the query used more memory than it may"


# --- processes -------------------------------------------------------------------------------------------------------


def test_fifty_calls_at_once_come_back_in_place_and_leave_nothing(path, processes):
    before = os.listdir("/proc/self/fd")

    async def run():
        async with SqlTool(path, concurrency=4) as tool:
            most = 0
            calls = [asyncio.create_task(tool.call({"query": f"SELECT {i} AS x"})) for i in range(50)]
            while not all(call.done() for call in calls):
                most = max(most, len(processes.children(os.getpid())))
                await asyncio.sleep(0.002)
            return most, [call.result() for call in calls], processes.children(os.getpid())

    others = len(processes.children(os.getpid()))
    most, results, left = asyncio.run(run())
    assert [result.stdout for result in results] == [f"x\n{i}\n" for i in range(50)]
    assert 1 <= most - others <= 4 and len(left) == others
    assert os.listdir("/proc/self/fd") == before


def test_the_event_loop_goes_on_while_a_query_runs(path):
    async def run():
        async with SqlTool(path, timeout_s=1.0) as tool:
            call = asyncio.create_task(tool.call({"query": COUNT_FOREVER}))
            longest, last = 0.0, time.monotonic()
            while not call.done():
                await asyncio.sleep(0.01)
                longest, last = max(longest, time.monotonic() - last), time.monotonic()
            return longest

    assert asyncio.run(run()) < 0.5


def test_a_cancelled_call_takes_its_process_with_it(path, processes):
    others = processes.children(os.getpid())

    async def run():
        async with SqlTool(path, timeout_s=60, concurrency=1) as tool:
            for delay in (0.0, 0.005, 0.3):  # before, during and after the start of its process
                call = asyncio.create_task(tool.call({"query": COUNT_FOREVER}))
                await asyncio.sleep(delay)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                assert processes.children(os.getpid()) == others
            return await tool.call({"query": "SELECT 1"})  # and its place is free again

    assert asyncio.run(run()).status is ToolStatus.OK


def test_closing_ends_running_and_waiting_calls_and_leaves_no_process(path, processes):
    others = processes.children(os.getpid())

    async def run():
        async with SqlTool(path, timeout_s=60, concurrency=2) as tool:
            calls = [asyncio.create_task(tool.call({"query": COUNT_FOREVER})) for _ in range(5)]
            await asyncio.sleep(0.3)
        assert processes.children(os.getpid()) == others
        answers = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(RuntimeError, match="not open"):
            await tool.call({"query": "SELECT 1"})
        return answers

    start = time.monotonic()
    answers = asyncio.run(run())
    assert time.monotonic() - start < 10
    assert [type(answer) for answer in answers] == [InfrastructureError] * 5


def test_a_killed_owner_takes_its_query_with_it(path, processes):
    program = (
        "import asyncio, sys\nfrom rstar_jax.tools.sql_tool import SqlTool\n"
        "async def run():\n"
        "    async with SqlTool(sys.argv[1], timeout_s=600) as tool:\n"
        "        await tool.call({'query': sys.argv[2]})\n"
        "asyncio.run(run())\n"
    )
    root = pathlib.Path(__file__).resolve().parents[2]
    owner = subprocess.Popen([sys.executable, "-c", program, str(path), COUNT_FOREVER], cwd=root)
    assert processes.eventually(lambda: processes.children(owner.pid), 60)
    (worker,) = processes.children(owner.pid)
    owner.kill()
    owner.wait()
    assert processes.eventually(lambda: not processes.runs(worker))


def test_a_worker_that_nobody_kills_ends_by_itself(path):
    settings = {"timeout_s": 0.2, "max_rows": 1, "max_bytes": 100, "memory_bytes": 32 << 20, "parent": os.getpid()}
    command = [sys.executable, "-I", "-S", "-B", sql_tool._SCRIPT, sql_tool._database_uri(path), json.dumps(settings)]
    done = subprocess.run(command, input=COUNT_FOREVER.encode(), capture_output=True, timeout=30)
    assert (done.returncode, done.stdout) == (-signal.SIGALRM, b"ready\n")


@pytest.mark.parametrize(
    "query",
    [
        "INSERT INTO person VALUES (9, 'x', NULL, NULL)",
        "CREATE TABLE t (x)",
        "ATTACH '{aside}' AS aside",
        "VACUUM INTO '{aside}'",
        "PRAGMA journal_mode = WAL",
        "PRAGMA user_version = 5",
        "CREATE TEMP TABLE t AS SELECT zeroblob(5000000)",
    ],
)
def test_the_other_walls_hold_without_the_authorizer(path, tmp_path, query):
    program = (
        "import runpy, sqlite3, sys\n"
        "worker = runpy.run_path(sys.argv[3])\n"
        "worker['Guard'].__call__ = lambda *arguments: sqlite3.SQLITE_OK\n"
        "worker['main']()\n"
    )
    settings = {"timeout_s": 20, "max_rows": 1, "max_bytes": 100, "memory_bytes": 32 << 20, "parent": os.getpid()}
    command = [sys.executable, "-I", "-B", "-c", program, sql_tool._database_uri(path), json.dumps(settings), sql_tool._SCRIPT]
    before, beside = path.read_bytes(), sorted(path.parent.iterdir())
    subprocess.run(command, input=query.format(aside=tmp_path / "aside.db").encode(), capture_output=True, timeout=60, check=True)
    assert path.read_bytes() == before and sorted(path.parent.iterdir()) == beside
    assert not list(tmp_path.iterdir())


def test_a_crash_of_sqlite_is_the_querys_and_a_kill_from_outside_is_ours(path, processes):
    others = set(processes.children(os.getpid()))

    async def killed_by(*numbers):
        async with SqlTool(path, timeout_s=60) as tool:
            call = asyncio.create_task(tool.call({"query": COUNT_FOREVER}))
            for number in numbers:
                await asyncio.sleep(0.5)
                (worker,) = set(processes.children(os.getpid())) - others
                os.kill(worker, number)
            return await call

    crash = asyncio.run(killed_by(signal.SIGSEGV))
    assert (crash.status, crash.exit_code) == (ToolStatus.SIGNAL, -signal.SIGSEGV)
    assert crash.stderr == "Error: the query was killed by SIGSEGV"
    with pytest.raises(InfrastructureError, match="failed 2 times; the last time: its process ended with code -9"):
        asyncio.run(killed_by(signal.SIGKILL, signal.SIGKILL))


# --- what is not the query's fault -----------------------------------------------------------------------------------


def test_a_worker_that_cannot_start_is_an_infrastructure_error(path, ask, monkeypatch):
    monkeypatch.setattr(sql_tool.sys, "executable", "/nowhere/python")
    with pytest.raises(InfrastructureError, match="cannot be started"):
        ask("SELECT 1")
    monkeypatch.setattr(sql_tool.sys, "executable", "/bin/true")
    with pytest.raises(InfrastructureError, match="ended with code 0"):
        ask("SELECT 1")
    monkeypatch.undo()
    monkeypatch.setattr(sql_tool, "START_SECONDS", 0.0)
    with pytest.raises(InfrastructureError, match="not ready"):
        ask("SELECT 1")


def test_a_database_that_goes_away_or_is_locked_is_an_infrastructure_error(tmp_path):
    path = tmp_path / "a.db"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("CREATE TABLE t (x)")

    async def ask(tool):
        return await tool.call({"query": "SELECT * FROM t"})

    async def run():
        async with SqlTool(path, timeout_s=0.3) as tool:
            assert (await ask(tool)).status is ToolStatus.OK
            connection.execute("BEGIN EXCLUSIVE")
            with pytest.raises(InfrastructureError, match="SQLITE_BUSY"):
                await ask(tool)
            connection.close()
            path.unlink()
            with pytest.raises(InfrastructureError, match="SQLITE_CANTOPEN"):
                await ask(tool)
            path.write_bytes(b"no database at all, and long enough to be read as one" * 100)
            with pytest.raises(InfrastructureError, match="SQLITE_NOTADB"):
                await ask(tool)

    asyncio.run(run())


def test_a_database_in_wal_mode_is_read_while_it_is_open_elsewhere(tmp_path):
    path = tmp_path / "a.db"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE t AS SELECT 5 AS x")
    connection.commit()

    async def run():
        async with SqlTool(path) as tool:
            return await tool.call({"query": "SELECT x FROM t"})

    assert asyncio.run(run()).stdout == "x\n5\n"
    connection.close()
    with pytest.raises(UserError, match="journal_mode=DELETE"):
        SqlTool(path)
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_database_is_a_user_error(tmp_path):
    (tmp_path / "text").write_text("id,name\n1,Ada\n")
    (tmp_path / "empty").touch()
    SqlTool(tmp_path / "empty")
    for name, complaint in (("text", "not an SQLite database"), ("absent", "cannot be read: No such file"), ("", "Is a directory")):
        with pytest.raises(UserError, match=complaint):
            SqlTool(tmp_path / name)


@pytest.mark.parametrize(
    "limits",
    [{"timeout_s": 0}, {"timeout_s": float("nan")}, {"timeout_s": float("inf")}, {"max_rows": 0}, {"max_bytes": 0}, {"concurrency": 0}],
)
def test_impossible_limits_are_user_errors(path, limits):
    with pytest.raises(UserError, match=next(iter(limits))):
        SqlTool(path, **limits)


# --- the seam --------------------------------------------------------------------------------------------------------


def test_it_keeps_the_protocol(path):
    tool = SqlTool(path)
    function = tool.schema["function"]
    assert isinstance(tool, Tool)
    assert tool.name == function["name"] == "sql_query"
    assert list(function["parameters"]["properties"]) == function["parameters"]["required"] == ["query"]
    json.dumps(tool.schema)
    with pytest.raises(RuntimeError, match="not open"):
        asyncio.run(tool.call({"query": "SELECT 1"}))


@pytest.mark.parametrize("status", ToolStatus)
def test_every_status_but_our_own_failure_has_a_text_without_a_clock_reading(path, status):
    tool = SqlTool(path)
    first, second = (ToolResult(status, stderr="Error: x", seconds=s, cpu_seconds=s) for s in (1.2345, 6.789))
    if status is ToolStatus.INFRA_ERROR:
        with pytest.raises(ValueError, match="infrastructure"):
            tool.format(first)
    else:
        assert tool.format(first) == tool.format(second) == "Error: x"


def test_it_is_as_noisy_as_any_tool(path):
    async def run():
        async with SqlTool(path) as tool:
            noisy = NoisyTool(tool, p_error=0.5, p_slow=0.0, p_garbled=0.0, seed=1)
            results = [await noisy.call({"query": f"SELECT {i} AS x"}) for i in range(20)]
            return noisy, results

    noisy, results = asyncio.run(run())
    assert noisy.name == "sql_query"
    assert 0 < noisy.counts.errors == sum(result.status is ToolStatus.ERROR for result in results) < 20
    assert {noisy.format(r) for r in results if r.status is ToolStatus.OK} <= {f"x\n{i}" for i in range(20)}
