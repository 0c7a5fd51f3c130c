"""Bring a database to the schema this release knows, in one transaction, or refuse it.

The caller makes sure that nobody else does the same at the same time (the lock beside the file).
"""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text

from lorry.errors import StorageFailed

_POSTGRESQL_LOCK = 0x6C6F727279
"""Advisory lock id: "lorry" in ASCII."""


def upgrade(connection: Connection, shown: str) -> None:
    """Run what is missing inside the connection's transaction.

    Raises `StorageFailed` for a database of a newer release or of another program; `shown` names
    it.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_POSTGRESQL_LOCK})"))
    config = _config(connection)
    scripts = ScriptDirectory.from_config(config)
    head = scripts.get_current_head()
    current = MigrationContext.configure(connection).get_current_revision()
    if current == head:
        return
    known = {script.revision for script in scripts.walk_revisions()}
    if current is not None and current not in known:
        raise StorageFailed(
            f"The state {shown} has schema {current}, but this release knows only up to {head}: it "
            "was written by a newer Lorry; start that release, or choose another --state."
        )
    strangers = inspect(connection).get_table_names() if current is None else []
    if set(strangers) - {"alembic_version"}:
        raise StorageFailed(
            f"The state {shown} is a database of another program (it has the table "
            f"{strangers[0]!r}); choose another --state."
        )
    command.upgrade(config, "head")


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
