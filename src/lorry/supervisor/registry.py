"""The registry as the store has it, beside the manifests of every version that may still be asked
for."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from lorry.adapter_settings import NO_SETTINGS
from lorry.artifacts.cache import DiskCache
from lorry.artifacts.parcels import MEMORY, came_with_a_request
from lorry.artifacts.snapshot import Manifest
from lorry.errors import BrokenInvariant, StorageFailed
from lorry.ids import AdapterName, VersionId, short
from lorry.lifecycle import commands as cm
from lorry.store.store import AdapterRecord, AuditEntry, Store
from lorry.store.values import trimmed
from lorry.supervisor.learning import LABEL

log = logging.getLogger(__name__)

PREVIOUS_MAX = 8
"""Versions a name remembers for rollback."""


class Registry:
    """A mirror of the store, changed only after the store has been. Its blocking methods say so."""

    def __init__(self, store: Store) -> None:
        """Empty until `read`."""
        self._store = store
        self.records: dict[AdapterName, AdapterRecord] = {}
        self.manifests: dict[VersionId, Manifest] = {}

    def read(self) -> None:
        """Read everything. Blocks; raises `StorageFailed`."""
        for record in self._store.adapters():
            self.records[record.name] = record
            self.manifests[record.manifest.version] = record.manifest
            for version in record.previous:
                manifest = self._store.manifest(version)
                if manifest is not None:
                    self.manifests[version] = manifest

    def mend(self, cache: DiskCache, at_s: float) -> None:
        """Give each name whose version was in memory only, and went with the last server, its
        newest earlier version that is on the disk; without one it stays as it is, and says so when
        it is asked for. Then remove what an unload or a replacement was about to remove when the
        last server was killed. Blocks; raises `StorageFailed`."""
        for record in tuple(self.records.values()):
            version = record.manifest.version
            if not record.source.startswith(MEMORY) or cache.get(version, record.manifest):
                continue
            for place, previous in enumerate(record.previous):
                manifest = self.manifests.get(previous)
                if manifest is not None and cache.get(previous, manifest) is not None:
                    self._fall_back(record, place, manifest, at_s)
                    break
            else:
                log.warning("'%s': its weights were in memory only; send them again", record.name)
        self._remove_unwanted(cache)

    def _remove_unwanted(self, cache: DiskCache) -> None:
        """Snapshots that this registry once named, and that no name can come back to. A snapshot it
        never knew may be another registry's, or of a load that was not answered; the cache's limit
        is enough for those."""
        wanted = self.served().union(*(record.previous for record in self.records.values()))
        try:
            gone = cache.retain(lambda v: v in wanted or self._store.manifest(v) is None)
        except StorageFailed as error:
            log.warning("snapshots that nobody wants stay on the disk: %s", error)
        else:
            for version in gone:
                log.info("removed the snapshot %s, which no name can come back to", short(version))

    def _fall_back(
        self, record: AdapterRecord, place: int, manifest: Manifest, at_s: float
    ) -> None:
        version = manifest.version
        earlier = record.previous[place + 1 :]
        sources = record.previous_sources
        mended = replace(
            record,
            manifest=manifest,
            source=sources.get(version, record.source),
            previous=earlier,
            previous_sources={v: sources[v] for v in earlier if v in sources},
            updated_s=at_s,
        )
        detail = f"{short(record.manifest.version)} was in memory only"
        self._store.put(mended, AuditEntry(at_s, "rollback", record.name, version, detail=detail))
        self.records[record.name] = mended
        log.warning(
            "'%s': version %s was in memory only and went with the last server; it serves %s again",
            *(record.name, short(record.manifest.version), short(version)),
        )

    def change(self, command: cm.Commit, at_s: float) -> AdapterRecord | None:
        """What a commit makes of its adapter's record; None: it is erased."""
        if command.version is None:
            return None
        manifest = self.manifests.get(command.version)
        if manifest is None:
            raise BrokenInvariant(1, f"no manifest of {command.version}, which is to be served")
        old = self.records.get(command.name)
        previous: tuple[VersionId, ...] = ()
        sources: dict[VersionId, str] = {}
        if old is not None:
            kept = (old.manifest.version, *old.previous)
            previous = tuple(v for v in kept if v != command.version)[:PREVIOUS_MAX]
            sources = {**old.previous_sources, old.manifest.version: old.source}
        labels = _labels(old, command)
        settings = old.settings if old is not None else NO_SETTINGS
        return AdapterRecord(
            name=command.name,
            source=command.source,
            manifest=manifest,
            pinned=command.pinned,
            labels=labels,
            created_s=old.created_s if old is not None else at_s,
            updated_s=at_s,
            previous=previous,
            previous_sources={v: sources[v] for v in previous if v in sources},
            settings=settings if command.settings is None else command.settings.apply(settings),
        )

    def write(self, command: cm.Commit, record: AdapterRecord | None, at_s: float) -> None:
        """Write a change. Blocks; raises `StorageFailed` and then nothing has changed, unless the
        store cannot even be read."""
        audit = AuditEntry(
            at_s, command.action, command.name, command.version, detail=command.detail
        )
        try:
            if record is None:
                old = self.records[command.name]
                self._store.remove(command.name, replace(audit, version=old.manifest.version))
            else:
                self._store.put(record, audit)
        except StorageFailed as error:
            if not self._holds(command.name, record):
                raise
            log.warning(
                "the change of '%s' is written, though the store said: %s",
                *(command.name, error.message),
            )

    def _holds(self, name: AdapterName, record: AdapterRecord | None) -> bool:
        """Whether the store has a record, after a write of which it said that it failed: a commit
        whose answer is lost is a commit, and would come out at the next start."""
        try:
            found = {stored.name: stored for stored in self._store.adapters()}.get(name)
        except StorageFailed:
            return False
        return found == (None if record is None else trimmed(record))

    def apply(self, command: cm.Commit, record: AdapterRecord | None) -> tuple[VersionId, ...]:
        """Take a written change over; the versions that the name may have stood for last."""
        old = self.records.pop(command.name, None)
        if record is not None:
            self.records[command.name] = record
        return () if old is None else (old.manifest.version, *old.previous)

    def served(self) -> frozenset[VersionId]:
        """The versions that names stand for now."""
        return frozenset(record.manifest.version for record in self.records.values())

    def sent(self) -> frozenset[VersionId]:
        """The versions, also earlier ones, that came with a request."""
        sources = (
            {**record.previous_sources, record.manifest.version: record.source}
            for record in self.records.values()
        )
        return frozenset(v for each in sources for v, s in each.items() if came_with_a_request(s))

    def forget_unused(self, version: VersionId) -> None:
        """Drop the manifest of a version that no name stands for or could be rolled back to."""
        used = any(
            version == record.manifest.version or version in record.previous
            for record in self.records.values()
        )
        if not used:
            self.manifests.pop(version, None)


def _labels(old: AdapterRecord | None, command: cm.Commit) -> Mapping[str, str]:
    """The labels after a commit. A learnt name that somebody gives other weights or settings is his
    own from then on: forgotten and learnt again, it would come back without them."""
    if command.labels is not None:
        return dict(command.labels)
    labels = dict(old.labels) if old is not None else {}
    if command.settings is not None or command.action in ("replace", "rollback"):
        labels.pop(LABEL, None)
    return labels
