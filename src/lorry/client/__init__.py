"""Lorry's client for Python: `Client` with threads, `AsyncClient` with async. It needs httpx, and
nothing that computes: no torch, no server."""

from lorry.client.asynchronous import AsyncClient
from lorry.client.retry import NO_RETRY, Retry
from lorry.client.sync import Client
from lorry.client.values import (
    Adapter,
    Answer,
    Check,
    Event,
    Operation,
    Problem,
    Replica,
    Residency,
)

__all__ = [
    "NO_RETRY",
    "Adapter",
    "Answer",
    "AsyncClient",
    "Check",
    "Client",
    "Event",
    "Operation",
    "Problem",
    "Replica",
    "Residency",
    "Retry",
]
