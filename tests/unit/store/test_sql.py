"""The SQLite store against broken files, other programs, second servers, full disks and kill -9."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect

from lorry.errors import StorageFailed
from lorry.ids import AdapterName
from lorry.store import sql, tables
from lorry.store.sql import SqlStore
from tests.conformance.store_suite import entry, record


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Where the state file is or will be."""
    return tmp_path / "state.db"


@pytest.fixture
def filled(state: Path) -> Path:
    """A state file with one adapter, closed."""
    store = SqlStore(state)
    store.put(record(), entry())
    store.close()
    return state


@pytest.fixture
def shell(filled: Path) -> Iterator[sqlite3.Connection]:
    """Another program that has the file open."""
    connection = sqlite3.connect(filled, isolation_level=None)
    yield connection
    connection.close()


def names(state: Path) -> list[str]:
    """What a new start finds."""
    store = SqlStore(state)
    try:
        return [each.name for each in store.adapters()]
    finally:
        store.close()


def fails_to_open(state: Path | str, *words: str) -> None:
    """The error at opening holds every word, and nothing of ours keeps the file."""
    with pytest.raises(StorageFailed) as caught:
        SqlStore(state)
    for word in words:
        assert word in caught.value.message


def test_promise_8_a_restart_finds_what_was_acknowledged(filled: Path) -> None:
    store = SqlStore(filled)
    assert store.adapters() == (record(),)
    assert store.audit() == (entry(),)
    store.close()


def test_the_file_is_in_wal_mode_and_durable(filled: Path, shell: sqlite3.Connection) -> None:
    assert shell.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store = SqlStore(filled)
    with store._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == 1
    store.close()


def test_a_tilde_and_a_relative_path_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for path in ("~/a.db", "b.db"):
        SqlStore(path).close()
    assert (tmp_path / "a.db").exists() and (tmp_path / "b.db").exists()


def test_the_migrations_make_exactly_the_tables_of_tables_py(filled: Path) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.runtime.migration import MigrationContext

    engine = create_engine(f"sqlite:///{filled}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, tables.metadata) == []
        checks = {
            check["name"]
            for table in ("adapters", "manifests", "audit")
            for check in inspect(connection).get_check_constraints(table)
        }
    engine.dispose()
    assert {"pinned_is_boolean", "action_is_known"} <= checks


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE adapters SET name = ''",
        "UPDATE adapters SET pinned = 7",
        "UPDATE adapters SET version = NULL",
        "UPDATE manifests SET version = 'short'",
        "UPDATE audit SET action = 'explode'",
    ],
)
def test_the_tables_refuse_what_the_contract_forbids(
    statement: str, shell: sqlite3.Connection
) -> None:
    with pytest.raises(sqlite3.IntegrityError):
        shell.execute(statement)


class TestBrokenFiles:
    """Each is refused with what to do, and is left as it was."""

    def test_no_database(self, state: Path) -> None:
        state.write_bytes(b"these are not the bytes of a database" * 100)
        fails_to_open(state, "not a database", "choose another --state")

    def test_a_cut_file(self, filled: Path) -> None:
        content = filled.read_bytes()
        filled.write_bytes(content[: len(content) // 2])
        fails_to_open(filled, str(filled), "backup")

    def test_a_file_cut_to_nothing_is_not_taken_for_a_new_one(self, filled: Path) -> None:
        filled.write_bytes(b"")
        fails_to_open(filled, "is empty", "backup")
        filled.unlink()
        assert names(filled) == []

    def test_an_empty_file_that_never_held_anything_is_a_new_one(self, state: Path) -> None:
        state.touch()
        assert names(state) == []

    def test_corrupt_pages(self, filled: Path) -> None:
        content = bytearray(filled.read_bytes())
        content[4096:] = os.urandom(len(content) - 4096)
        filled.write_bytes(content)
        fails_to_open(filled, str(filled), "backup")

    def test_another_programs_database(self, state: Path) -> None:
        with sqlite3.connect(state) as connection:
            connection.execute("CREATE TABLE songs (id INTEGER)")
        connection.close()
        before = state.read_bytes()[:4096]
        fails_to_open(state, "another program", "'songs'")
        assert b"adapters" not in state.read_bytes()
        assert before

    def test_promise_8_a_newer_schema_is_refused_by_name(
        self, filled: Path, shell: sqlite3.Connection
    ) -> None:
        shell.execute("UPDATE alembic_version SET version_num = '9999'")
        fails_to_open(filled, "9999", "newer Lorry", "0002")
        shell.execute("UPDATE alembic_version SET version_num = '0002'")
        assert names(filled) == ["pirate"]

    def test_a_row_that_we_did_not_write(self, filled: Path, shell: sqlite3.Connection) -> None:
        shell.execute("UPDATE manifests SET content = '{}'")
        store = SqlStore(filled)
        with pytest.raises(StorageFailed, match="cannot be read"):
            store.adapters()
        store.close()

    def test_a_missing_folder(self, tmp_path: Path) -> None:
        fails_to_open(tmp_path / "nowhere" / "state.db", "create its folder")

    def test_a_folder_in_place_of_a_file(self, tmp_path: Path) -> None:
        fails_to_open(tmp_path, str(tmp_path))

    @pytest.mark.parametrize("url", ["nonsense://", "://", "oracle://host/x"])
    def test_an_impossible_url(self, url: str) -> None:
        fails_to_open(url)


class TestOtherPrograms:
    """Promise 4: whatever else holds the file, nothing is half written."""

    def test_promise_4_a_locked_file_fails_in_time_and_works_again(
        self, filled: Path, shell: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sql, "BUSY_TIMEOUT_MS", 50)
        store = SqlStore(filled)
        shell.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageFailed, match=r"locked.*another program"):
            store.put(record("b"), entry(name="b"))
        shell.execute("ROLLBACK")
        assert [each.name for each in store.adapters()] == ["pirate"]
        store.put(record("b"), entry(name="b"))
        store.close()

    def test_promise_4_a_failure_between_the_rows_undoes_all(
        self, filled: Path, shell: sqlite3.Connection
    ) -> None:
        shell.execute(
            "CREATE TRIGGER no_audit BEFORE INSERT ON audit BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
        store = SqlStore(filled)
        with pytest.raises(StorageFailed, match="cannot be written: no"):
            store.put(record("b", 2), entry(name="b", number=2))
        with pytest.raises(StorageFailed):
            store.remove(AdapterName("pirate"), entry("unload"))
        assert [each.name for each in store.adapters()] == ["pirate"]
        assert store.manifest(record("b", 2).manifest.version) is None
        store.close()

    def test_promise_4_a_full_disk_is_said_and_nothing_is_half_written(self, filled: Path) -> None:
        store = SqlStore(filled)
        with store._engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StorageFailed, match=r"full.*free space"):
            for number in range(500):
                store.put(record(f"a{number}"), entry(name=f"a{number}"))
        assert len(store.audit(1000)) == len(store.adapters())
        store.close()

    @pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may write everywhere")
    def test_a_read_only_folder_is_said(self, filled: Path) -> None:
        filled.parent.chmod(0o500)
        try:
            fails_to_open(filled, "permissions")
        finally:
            filled.parent.chmod(0o700)

    def test_a_file_that_turns_read_only_is_said(self, filled: Path) -> None:
        store = SqlStore(filled)
        with store._engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA query_only = ON")
        with pytest.raises(StorageFailed, match=r"readonly.*writable"):
            store.put(record("b"), entry(name="b"))
        store.close()

    def test_promise_8_a_removed_file_is_said_and_may_come_back(self, filled: Path) -> None:
        store = SqlStore(filled)
        elsewhere = filled.rename(filled.with_name("elsewhere"))
        with pytest.raises(StorageFailed, match=r"removed while the server runs; put the same"):
            store.put(record("b"), entry(name="b"))
        elsewhere.rename(filled)
        store.put(record("b"), entry(name="b"))
        store.close()
        assert names(filled) == ["b", "pirate"]

    @pytest.mark.parametrize("content", ["", "another file"])
    def test_promise_8_an_emptied_or_replaced_file_is_said(
        self, content: str, filled: Path
    ) -> None:
        store = SqlStore(filled)
        if content:
            filled.unlink()
        filled.write_text(content)
        with pytest.raises(StorageFailed, match=r"emptied or replaced.*restart the server"):
            store.put(record("b"), entry(name="b"))
        store.close()


class TestSecondServer:
    """One server per state file."""

    def test_the_second_is_refused_and_the_first_goes_on(self, filled: Path) -> None:
        first = SqlStore(filled)
        fails_to_open(filled, "another Lorry server", "another --state")
        first.put(record("b"), entry(name="b"))
        first.close()
        assert names(filled) == ["b", "pirate"]

    def test_a_failed_start_leaves_no_lock(self, state: Path) -> None:
        state.write_bytes(b"x" * 5000)
        fails_to_open(state)
        state.unlink()
        assert names(state) == []

    def test_the_lock_dies_with_its_holder(self, filled: Path) -> None:
        process = start_writer(filled)
        fails_to_open(filled, "another Lorry server")
        process.kill()
        process.communicate()
        assert names(filled)


WRITER = """
import sys
from lorry.store.sql import SqlStore
from tests.conformance.store_suite import entry, record
store = SqlStore(sys.argv[1])
number = 0
while True:
    number += 1
    name = f"a{number % 50}"
    store.put(record(name, number), entry("replace", name, number=number))
    print(number, flush=True)
"""


def start_writer(state: Path) -> "subprocess.Popen[bytes]":
    """A process that writes without end and prints each number once it is acknowledged."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(state)], stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"1\n"
    return process


@pytest.mark.parametrize("after", [1, 7, 30])
def test_promise_8_kill_9_loses_nothing_that_was_acknowledged(after: int, state: Path) -> None:
    process = start_writer(state)
    assert process.stdout is not None
    for _ in range(after):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    rest = process.communicate()[0].split(b"\n")
    acknowledged = max([after + 1, *(int(line) for line in rest[:-1])])
    store = SqlStore(state)
    audit = store.audit(100_000)
    assert len(audit) in (acknowledged, acknowledged + 1)
    newest = {each.name: each.version for each in reversed(audit)}
    assert {each.name: each.manifest.version for each in store.adapters()} == newest
    store.close()


def test_close_gives_back_every_file(filled: Path) -> None:
    before = {path.name for path in Path("/proc/self/fd").iterdir()}
    store = SqlStore(filled)
    thread = threading.Thread(target=store.adapters)
    thread.start()
    thread.join()
    store.close()
    assert {path.name for path in Path("/proc/self/fd").iterdir()} == before
    assert sorted(path.name for path in filled.parent.iterdir()) == ["state.db", "state.db.lock"]
