"""Alembic migrations, shipped with the package and run when a store is opened."""
