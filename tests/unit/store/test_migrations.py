"""State files of earlier releases are brought up to date, and lose nothing."""

import dataclasses
import sqlite3
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import create_engine

from lorry.adapter_settings import NO_SETTINGS, AdapterSettings
from lorry.errors import StorageFailed
from lorry.store import schema
from lorry.store.sql import SqlStore
from tests.conformance.store_suite import entry, record

FIRST = Path(__file__).parent / "schema_0001.sql"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file as the first release wrote it: one adapter, two audit rows."""
    state = tmp_path / "state.db"
    connection = sqlite3.connect(state)
    connection.executescript(FIRST.read_text())
    connection.close()
    return state


def test_promise_8_a_file_of_the_first_release_keeps_what_it_holds(old: Path) -> None:
    store = SqlStore(old)
    assert store.adapters() == (record(),)
    assert store.adapters()[0].settings == NO_SETTINGS
    assert [each.action for each in store.audit()] == ["pin", "register"]
    store.put(record("b", 2), entry("settings", "b", number=2))
    store.remove(record("b").name, entry("retire", "b", number=2))
    assert [each.action for each in store.audit(2)] == ["retire", "settings"]
    store.close()
    again = SqlStore(old)
    assert again.adapters() == (record(),)
    again.close()


def test_the_order_of_the_audit_rows_goes_on(old: Path) -> None:
    store = SqlStore(old)
    store.put(record(), entry("unpin"))
    store.close()
    with sqlite3.connect(old) as connection:
        rows = connection.execute("SELECT id, action FROM audit ORDER BY id").fetchall()
        indexes = connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")
        assert "audit_by_name" in {name for (name,) in indexes}
    connection.close()
    assert rows == [(1, "register"), (2, "pin"), (3, "unpin")]


def test_promise_4_a_file_that_cannot_be_brought_up_to_date_is_left_as_it_was(old: Path) -> None:
    with sqlite3.connect(old) as connection:
        connection.execute("ALTER TABLE adapters ADD COLUMN settings TEXT")  # half of it by hand
    connection.close()
    with pytest.raises(StorageFailed):
        SqlStore(old)
    with sqlite3.connect(old) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == ("0001",)
        assert connection.execute("SELECT count(*) FROM audit").fetchone() == (2,)
    connection.close()


def test_the_way_back_loses_the_settings_and_nothing_else(old: Path) -> None:
    store = SqlStore(old)
    changed = dataclasses.replace(record(), settings=AdapterSettings(owner="me"))
    store.put(changed, entry("settings"))
    store.close()
    engine = create_engine(f"sqlite:///{old}")
    with engine.begin() as connection:
        command.downgrade(schema._config(connection), "0001")
    engine.dispose()
    store = SqlStore(old)
    assert store.adapters() == (record(),)
    assert [each.action for each in store.audit()] == ["label", "pin", "register"]
    store.close()
