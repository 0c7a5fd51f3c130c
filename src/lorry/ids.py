"""The names and numbers that every layer shares, each with a type of its own."""

from typing import NewType

AdapterName = NewType("AdapterName", str)
"""What a user sends as `model`."""

VersionId = NewType("VersionId", str)
"""SHA-256 (64 hex digits) of an adapter's canonical config and tensors."""

ReplicaId = NewType("ReplicaId", str)
"""One engine instance."""

EngineId = NewType("EngineId", int)
"""The positive integer by which an engine knows a version; never reused in an engine's life."""

TicketId = NewType("TicketId", int)
"""A request, from its arrival to its one answer."""

OperationId = NewType("OperationId", int)
"""Joins a command to the event that answers it, or names a long call of the admin API."""

SHORT_VERSION_DIGITS = 12


def short(version: VersionId) -> str:
    """The first 12 hex digits, which is how people see a version."""
    return version[:SHORT_VERSION_DIGITS]
