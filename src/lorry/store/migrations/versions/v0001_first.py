"""The first schema: manifests, adapters and audit rows."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ACTIONS = "action IN ('register', 'replace', 'rollback', 'unload', 'pin', 'unpin', 'label')"


def upgrade() -> None:
    """Create every table. Written out rather than taken from tables.py, which will move on."""
    op.create_table(
        "manifests",
        sa.Column(
            "version", sa.String(64), sa.CheckConstraint("length(version) = 64"), primary_key=True
        ),
        sa.Column("content", sa.Text, nullable=False),
    )
    op.create_table(
        "adapters",
        sa.Column("name", sa.String(256), sa.CheckConstraint("length(name) > 0"), primary_key=True),
        sa.Column("version", sa.String(64), sa.ForeignKey("manifests.version"), nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column(
            "pinned", sa.Boolean(create_constraint=True, name="pinned_is_boolean"), nullable=False
        ),
        sa.Column("labels", sa.Text, nullable=False),
        sa.Column("created_s", sa.Float, nullable=False),
        sa.Column("updated_s", sa.Float, nullable=False),
        sa.Column("previous", sa.Text, nullable=False),
        sa.Column("previous_sources", sa.Text, nullable=False),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("at_s", sa.Float, nullable=False),
        sa.Column(
            "action",
            sa.String(16),
            sa.CheckConstraint(_ACTIONS, name="action_is_known"),
            nullable=False,
        ),
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("version", sa.String(64), nullable=True),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
    )
    op.create_index("audit_by_name", "audit", ["name", "id"])


def downgrade() -> None:
    """Back to an empty database."""
    op.drop_table("audit")
    op.drop_table("adapters")
    op.drop_table("manifests")
