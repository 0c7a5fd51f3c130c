"""How Alembic reaches the database: always through a connection that the store hands over."""

from alembic import context

from lorry.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
