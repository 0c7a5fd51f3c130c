"""What owners set for their adapters, and the two actions that came with it."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_OLD = ("register", "replace", "rollback", "unload", "pin", "unpin", "label")
_NEW = (*_OLD, "settings", "retire")
_NAME = "action_is_known"


def _known(actions: tuple[str, ...]) -> str:
    return f"action IN ({', '.join(map(repr, actions))})"


def upgrade() -> None:
    """Every adapter that is there has no settings; what was audited stays."""
    op.add_column("adapters", sa.Column("settings", sa.Text, nullable=False, server_default="{}"))
    with op.batch_alter_table("audit") as batch:
        batch.drop_constraint(_NAME, type_="check")
        batch.create_check_constraint(_NAME, _known(_NEW))


def downgrade() -> None:
    """Back to what the release before knows: the settings are lost, and a retirement is an
    unload."""
    op.execute("UPDATE audit SET action = 'unload' WHERE action = 'retire'")
    op.execute("UPDATE audit SET action = 'label' WHERE action = 'settings'")
    with op.batch_alter_table("audit") as batch:
        batch.drop_constraint(_NAME, type_="check")
        batch.create_check_constraint(_NAME, _known(_OLD))
    op.drop_column("adapters", "settings")
