"""A store that forgets when the process ends: for simulations and tests."""

import threading

from lorry.artifacts.snapshot import Manifest
from lorry.errors import StorageFailed
from lorry.ids import AdapterName, VersionId
from lorry.store.store import AdapterRecord, AuditEntry
from lorry.store.values import check_storable, trimmed


class MemoryStore:
    """The `Store` contract on three plain containers."""

    def __init__(self) -> None:
        """Begins empty."""
        self._lock = threading.Lock()
        self._records: dict[AdapterName, AdapterRecord] = {}
        self._manifests: dict[VersionId, Manifest] = {}
        self._audit: list[AuditEntry] = []
        self._open = True

    def adapters(self) -> tuple[AdapterRecord, ...]:
        """All registered adapters, by name."""
        with self._ready():
            return tuple(self._records[name] for name in sorted(self._records))

    def put(self, record: AdapterRecord, audit: AuditEntry) -> None:
        """Insert or overwrite one adapter; see `Store.put`."""
        check_storable(record, audit)
        with self._ready():
            self._records[record.name] = trimmed(record)
            self._manifests[record.manifest.version] = record.manifest
            self._audit.append(audit)

    def remove(self, name: AdapterName, audit: AuditEntry) -> None:
        """Forget one adapter; see `Store.remove`."""
        check_storable(None, audit)
        with self._ready():
            self._records.pop(name, None)
            self._audit.append(audit)

    def manifest(self, version: VersionId) -> Manifest | None:
        """A version's manifest, also of one that is no longer served."""
        with self._ready():
            return self._manifests.get(version)

    def audit(self, limit: int = 100, name: AdapterName | None = None) -> tuple[AuditEntry, ...]:
        """Newest first."""
        with self._ready():
            found = [entry for entry in reversed(self._audit) if name in (None, entry.name)]
            return tuple(found[: max(0, limit)])

    def close(self) -> None:
        """Refuse every later call, as a closed file would."""
        self._open = False

    def _ready(self) -> threading.Lock:
        if not self._open:
            raise StorageFailed("The store is closed; open it again.")
        return self._lock
