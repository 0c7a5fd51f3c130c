"""The tables as the newest migration leaves them. CHECKs repeat what the contract promises, so that
not even a hand with a database shell can store a record that the server would choke on."""

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

metadata = MetaData()

manifests = Table(
    "manifests",
    metadata,
    Column("version", String(64), CheckConstraint("length(version) = 64"), primary_key=True),
    Column("content", Text, nullable=False),
)
"""Facts of every version that was ever registered, as JSON."""

adapters = Table(
    "adapters",
    metadata,
    Column("name", String(256), CheckConstraint("length(name) > 0"), primary_key=True),
    Column("version", String(64), ForeignKey("manifests.version"), nullable=False),
    Column("source", Text, nullable=False),
    Column("pinned", Boolean(create_constraint=True, name="pinned_is_boolean"), nullable=False),
    Column("labels", Text, nullable=False),
    Column("created_s", Float, nullable=False),
    Column("updated_s", Float, nullable=False),
    Column("previous", Text, nullable=False),
    Column("previous_sources", Text, nullable=False),
    Column("settings", Text, nullable=False, server_default="{}"),
)
"""What should be served: one row per name. `labels`, `previous`, `previous_sources` and `settings`
are JSON."""

audit = Table(
    "audit",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("at_s", Float, nullable=False),
    Column(
        "action",
        String(16),
        CheckConstraint(
            "action IN ('register', 'replace', 'rollback', 'unload', 'pin', 'unpin', 'label', "
            "'settings', 'retire')",
            name="action_is_known",
        ),
        nullable=False,
    ),
    Column("name", String(256), nullable=False),
    Column("version", String(64), nullable=True),
    Column("actor", Text, nullable=False),
    Column("detail", Text, nullable=False),
    Index("audit_by_name", "name", "id"),
)
"""Who changed what, in the order of `id`."""
