"""The registry in SQLite (one file, the default) or in any database that SQLAlchemy reaches.

SQLite runs in WAL mode with synchronous=FULL: a change that was acknowledged is on the disk, also
after a power cut. Every change is one transaction, so a failure leaves what was there.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    Row,
    create_engine,
    delete,
    event,
    insert,
    make_url,
    select,
    update,
)
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from lorry.adapter_settings import settings_from_json, settings_to_json
from lorry.artifacts.snapshot import Manifest
from lorry.errors import StorageFailed
from lorry.ids import AdapterName, VersionId
from lorry.store import tables
from lorry.store.lockfile import LockFile
from lorry.store.schema import upgrade
from lorry.store.store import AdapterRecord, AuditEntry
from lorry.store.values import (
    check_storable,
    manifest_from_json,
    manifest_to_json,
    previous_from_json,
    trimmed,
)

BUSY_TIMEOUT_MS = 2_000
"""How long a change waits for another program (a backup, a shell) that holds the file."""

POOL_TIMEOUT_S = 30.0
"""How long a call waits for the one connection; each holds it for milliseconds."""


class SqlStore:
    """The `Store` contract on SQL. Calls may come from any thread; they take turns."""

    def __init__(self, url_or_path: str | Path) -> None:
        """Opens, locks, checks and migrates. A path, or a string without "://", is an SQLite file.

        Raises `StorageFailed` for whatever makes the state unusable; then nothing was changed.
        """
        url = _url(url_or_path)
        self._shown = repr(url.database if _is_sqlite(url) else url.render_as_string())
        self._cleanup = ExitStack()
        with self._border("opened"), ExitStack() as stack:
            lock = _lock(url, stack)
            self._engine = _engine(url)
            stack.callback(self._engine.dispose)
            with self._engine.begin() as connection:
                _check_integrity(connection)
                upgrade(connection, self._shown)
            if lock is not None:
                lock.mark_written()
            self._file = None if lock is None else _StateFile(Path(str(url.database)))
            self._cleanup = stack.pop_all()
        self._open = True

    def adapters(self) -> tuple[AdapterRecord, ...]:
        """All registered adapters, by name."""
        query = (
            select(tables.adapters, tables.manifests.c.content)
            .join(tables.manifests)
            .order_by(tables.adapters.c.name)
        )
        with self._transaction("read") as connection:
            return tuple(sorted(map(_record, connection.execute(query)), key=lambda r: r.name))

    def put(self, record: AdapterRecord, audit: AuditEntry) -> None:
        """Insert or overwrite one adapter; see `Store.put`."""
        check_storable(record, audit)
        kept = trimmed(record)
        manifest = kept.manifest
        with self._transaction("written") as connection:
            _upsert(
                connection,
                tables.manifests,
                {"version": manifest.version},
                {"content": manifest_to_json(manifest)},
            )
            _upsert(connection, tables.adapters, {"name": kept.name}, _adapter_row(kept))
            connection.execute(insert(tables.audit).values(**_audit_row(audit)))

    def remove(self, name: AdapterName, audit: AuditEntry) -> None:
        """Forget one adapter; see `Store.remove`."""
        check_storable(None, audit)
        with self._transaction("written") as connection:
            connection.execute(delete(tables.adapters).where(tables.adapters.c.name == name))
            connection.execute(insert(tables.audit).values(**_audit_row(audit)))

    def manifest(self, version: VersionId) -> Manifest | None:
        """A version's manifest, also of one that is no longer served."""
        query = select(tables.manifests.c.content).where(tables.manifests.c.version == version)
        with self._transaction("read") as connection:
            content = connection.execute(query).scalar_one_or_none()
            return None if content is None else manifest_from_json(content)

    def audit(self, limit: int = 100, name: AdapterName | None = None) -> tuple[AuditEntry, ...]:
        """Newest first."""
        query = select(tables.audit).order_by(tables.audit.c.id.desc()).limit(max(0, limit))
        if name is not None:
            query = query.where(tables.audit.c.name == name)
        with self._transaction("read") as connection:
            return tuple(map(_audit_entry, connection.execute(query)))

    def close(self) -> None:
        """Release the file and its lock. Safe to call twice."""
        self._open = False
        self._cleanup.close()

    @contextmanager
    def _transaction(self, doing: str) -> Iterator[Connection]:
        """One transaction, committed at the end of the block."""
        if not self._open:
            raise StorageFailed(f"The state {self._shown} is closed; open it again.")
        with self._border(doing):
            if self._file is not None:
                self._file.check()
            with self._engine.begin() as connection:
                yield connection

    @contextmanager
    def _border(self, doing: str) -> Iterator[None]:
        """Foreign errors become ours here and nowhere else."""
        try:
            yield
        except StorageFailed:
            raise
        except (SQLAlchemyError, sqlite3.Error, OSError, ValueError, TypeError, KeyError) as error:
            reason = str(getattr(error, "orig", None) or error).split("\n")[0]
            raise StorageFailed(
                f"The state {self._shown} cannot be {doing}: {reason}; {_advice(reason)}."
            ) from error


class _StateFile:
    """The file that was opened. SQLite goes on writing to one that was removed or replaced, and all
    that it acknowledges is lost with the process (promise 8); so somebody has to look."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when it is not there."""
        self._path = path
        self._identity = self._look()

    def check(self) -> None:
        """Raises OSError unless it is still there, and has content."""
        try:
            identity = self._look()
        except FileNotFoundError:
            raise OSError(_REMOVED) from None
        if identity != self._identity:
            raise OSError(_REPLACED)

    def _look(self) -> tuple[int, int, bool]:
        status = self._path.stat()
        return status.st_dev, status.st_ino, status.st_size > 0


_REMOVED = "the file was removed while the server runs"
_REPLACED = "the file was emptied or replaced while the server runs"

_ADVICE: Mapping[str, str] = {
    _REMOVED: "put the same file back, or restore it from a backup and restart the server",
    _REPLACED: "put the right file in its place and restart the server",
    "locked": "another program holds the file, close it and try again",
    "readonly": "make the file and its folder writable",
    "read-only": "make the file and its folder writable",
    "full": "free space on the disk",
    "no space": "free space on the disk",
    "too large": "free space on the disk",
    "disk i/o": "free space on the disk and look at its health",
    "not a database": "choose another --state, or restore the file from a backup",
    "malformed": "restore the file from a backup",
    "permission denied": "mend the permissions of the file and its folder",
    "unable to open": "create its folder and mend its permissions",
    "no such file": "create its folder",
}
"""What to do, by a word of the database's reason."""


def _advice(reason: str) -> str:
    found = (advice for word, advice in _ADVICE.items() if word in reason.lower())
    return next(found, "see the server's log, and restore the state from a backup if it stays so")


def _url(url_or_path: str | Path) -> URL:
    text = str(url_or_path)
    if isinstance(url_or_path, Path) or "://" not in text:
        return URL.create("sqlite", database=str(Path(text).expanduser().absolute()))
    try:
        return make_url(text)
    except ArgumentError:
        raise StorageFailed(
            f"The state {text!r} is not a database URL; write a path, or dialect://host/database."
        ) from None


def _is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def _lock(url: URL, stack: ExitStack) -> LockFile | None:
    """The lock beside an SQLite file; databases with a server lock by themselves."""
    if not _is_sqlite(url) or url.database in (None, "", ":memory:"):
        return None
    state = Path(str(url.database))
    lock = LockFile(state)
    stack.callback(lock.close)
    lock.check_not_emptied()
    return lock


def _engine(url: URL) -> Engine:
    """One connection, shared by all threads in turn: SQLite has one writer anyway."""
    arguments: dict[str, Any] = {"check_same_thread": False} if _is_sqlite(url) else {}
    try:
        engine = create_engine(
            url,
            poolclass=QueuePool,
            pool_size=1,
            max_overflow=0,
            pool_timeout=POOL_TIMEOUT_S,
            pool_pre_ping=not _is_sqlite(url),
            connect_args=arguments,
        )
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise StorageFailed(
            f"The state's database needs a driver that is not installed ({error}); install it."
        ) from error
    if _is_sqlite(url):
        event.listen(engine, "connect", _configure_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    # Python's own transaction handling would leave DDL outside of transactions.
    connection.isolation_level = None
    for pragma in (
        f"busy_timeout = {BUSY_TIMEOUT_MS}",
        "journal_mode = WAL",
        "synchronous = FULL",
        "foreign_keys = ON",
    ):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: Connection) -> None:
    # IMMEDIATE: a transaction that will write waits for its turn at its start, not half-way.
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _check_integrity(connection: Connection) -> None:
    if connection.dialect.name != "sqlite":
        return
    found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
    if found != "ok":
        raise ValueError(f"the file is malformed ({found})")


def _upsert(
    connection: Connection, table: Any, key: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """In any dialect: update, and insert when there was nothing to update."""
    conditions: list[Any] = [table.c[column] == value for column, value in key.items()]
    if connection.execute(update(table).where(*conditions).values(**values)).rowcount == 0:
        connection.execute(insert(table).values(**key, **values))


def _adapter_row(record: AdapterRecord) -> dict[str, Any]:
    return {
        "version": record.manifest.version,
        "source": record.source,
        "pinned": record.pinned,
        "labels": json.dumps(dict(record.labels), sort_keys=True),
        "created_s": record.created_s,
        "updated_s": record.updated_s,
        "previous": json.dumps(list(record.previous)),
        "previous_sources": json.dumps(dict(record.previous_sources), sort_keys=True),
        "settings": settings_to_json(record.settings),
    }


def _record(row: Row[Any]) -> AdapterRecord:
    return AdapterRecord(
        name=AdapterName(row.name),
        source=row.source,
        manifest=manifest_from_json(row.content),
        pinned=row.pinned,
        labels=json.loads(row.labels),
        created_s=row.created_s,
        updated_s=row.updated_s,
        previous=previous_from_json(row.previous),
        previous_sources=json.loads(row.previous_sources),
        settings=settings_from_json(row.settings),
    )


def _audit_row(entry: AuditEntry) -> dict[str, Any]:
    return {
        "at_s": entry.at_s,
        "action": entry.action,
        "name": entry.name,
        "version": entry.version,
        "actor": entry.actor,
        "detail": entry.detail,
    }


def _audit_entry(row: Row[Any]) -> AuditEntry:
    version = None if row.version is None else VersionId(row.version)
    return AuditEntry(row.at_s, row.action, AdapterName(row.name), version, row.actor, row.detail)
