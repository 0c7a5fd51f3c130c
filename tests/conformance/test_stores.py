"""The store suite, run for every store that ships."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lorry.store.memory import MemoryStore
from lorry.store.sql import SqlStore
from lorry.store.store import Store
from tests.conformance.store_suite import StoreSuite


class TestMemoryStore(StoreSuite):
    """The store that forgets."""

    @pytest.fixture
    def make(self) -> Callable[[], Store]:
        return MemoryStore


class TestSqliteFile(StoreSuite):
    """The default: one file, given as a path."""

    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: SqlStore(tmp_path / "state.db")


class TestSqliteUrl(StoreSuite):
    """The same through a URL."""

    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: SqlStore(f"sqlite:///{tmp_path / 'state.db'}")


class TestSqliteInMemory(StoreSuite):
    """SQLite without a file has no lock and no next start, and is a store all the same."""

    @pytest.fixture
    def make(self) -> Callable[[], Store]:
        return lambda: SqlStore("sqlite://")
