"""The store contract. Synchronous: the supervisor calls it in a worker thread."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from lorry.adapter_settings import NO_SETTINGS, AdapterSettings
from lorry.artifacts.snapshot import Manifest
from lorry.ids import AdapterName, VersionId


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """One registered adapter, as it should be served."""

    name: AdapterName
    source: str
    """As the caller gave it, for people and for `root` in /v1/models."""
    manifest: Manifest
    pinned: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    created_s: float = 0.0
    """Seconds since 1970 of the first registration under this name."""
    updated_s: float = 0.0
    previous: tuple[VersionId, ...] = ()
    """Versions served before under this name, newest first; at most 8 are remembered."""
    previous_sources: Mapping[VersionId, str] = field(default_factory=dict)
    """Where each of them came from; what a rollback names as source again."""
    settings: AdapterSettings = NO_SETTINGS


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Who changed what: one row per acknowledged change."""

    at_s: float
    action: str
    """register, replace, rollback, unload, pin, unpin, label, settings, retire."""
    name: AdapterName
    version: VersionId | None
    actor: str = ""
    detail: str = ""


class Store(Protocol):
    """Raises `StorageFailed` for every foreign error, after which nothing has changed."""

    def adapters(self) -> tuple[AdapterRecord, ...]:
        """All registered adapters, by name."""

    def put(self, record: AdapterRecord, audit: AuditEntry) -> None:
        """Insert or overwrite one adapter and its manifest, with the audit row, in one
        transaction."""

    def remove(self, name: AdapterName, audit: AuditEntry) -> None:
        """Forget one adapter; manifests that no adapter names any more stay for rollback of
        others."""

    def manifest(self, version: VersionId) -> Manifest | None:
        """A version's manifest, also of one that is no longer served (for rollback)."""

    def audit(self, limit: int = 100, name: AdapterName | None = None) -> tuple[AuditEntry, ...]:
        """Newest first."""

    def close(self) -> None:
        """Safe to call twice."""
