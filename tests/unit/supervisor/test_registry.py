"""What a start does about the disk: the registry says what is wanted there."""

import logging
from pathlib import Path

import pytest

from lorry.artifacts.cache import DiskCache
from lorry.artifacts.snapshot import Manifest
from lorry.errors import StorageFailed
from lorry.ids import AdapterName
from lorry.store.memory import MemoryStore
from lorry.store.store import AdapterRecord, AuditEntry
from lorry.supervisor.registry import Registry
from tests.fixtures.adapters import TINY_BASE, good_adapter


def snapshots(folder: Path, count: int) -> tuple[DiskCache, list[Manifest]]:
    """A disk cache with so many versions, as a start finds it."""
    cache = DiskCache(folder / "cache", None)
    manifests = []
    for seed in range(count):
        source = good_adapter(seed).write(folder / str(seed))
        manifests.append(cache.snapshot("x", source, TINY_BASE, 8).manifest)
    return DiskCache(folder / "cache", None), manifests


def registered(store: MemoryStore, name: str, *manifests: Manifest) -> None:
    """The name stands for the first; the others it had before."""
    for place in reversed(range(len(manifests))):
        previous = tuple(m.version for m in manifests[place + 1 :])
        record = AdapterRecord(AdapterName(name), "/x", manifests[place], previous=previous)
        store.put(record, AuditEntry(1.0, "register", record.name, record.manifest.version))


def mended(store: MemoryStore, cache: DiskCache) -> None:
    """A start."""
    registry = Registry(store)
    registry.read()
    registry.mend(cache, 2.0)


def test_promise_3_a_start_removes_what_no_name_can_come_back_to(tmp_path: Path) -> None:
    cache, (gone, earlier, served, unknown) = snapshots(tmp_path, 4)
    store = MemoryStore()
    registered(store, "gone", gone)
    registered(store, "kept", served, earlier)
    store.remove(AdapterName("gone"), AuditEntry(2.0, "unload", AdapterName("gone"), gone.version))
    mended(store, cache)
    assert cache.get(gone.version, gone) is None
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted(
        manifest.version for manifest in (earlier, served, unknown)
    )


def test_a_disk_on_which_nothing_can_be_removed_keeps_no_server_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, (gone,) = snapshots(tmp_path, 1)
    store = MemoryStore()
    registered(store, "gone", gone)
    store.remove(AdapterName("gone"), AuditEntry(2.0, "unload", AdapterName("gone"), gone.version))

    def refuse(*_: object) -> None:
        raise StorageFailed("The disk is read-only.")

    monkeypatch.setattr(cache, "retain", refuse)
    with caplog.at_level(logging.WARNING):
        mended(store, cache)
    assert "read-only" in caplog.text
