"""The content-addressed disk cache: from a source folder to one immutable snapshot, or to an error
and nothing else.

Each snapshot is made in two passes over the source. The first reads everything, judges it and
computes the version; an adapter that is refused or already kept costs no room and evicts nobody.
The second copies, checking each tensor against the first pass, into a temporary folder that is
renamed into place once it is on the disk. Files are compared with what they were before and after,
so a source that is being rewritten is refused, never mixed."""

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from lorry.artifacts.adapter_config import CONFIG_FILE, shown
from lorry.artifacts.canonical import canonical_config, stored_order, version_of, weights_header
from lorry.artifacts.folder import Folder, OpenFolder
from lorry.artifacts.manifest import manifest_of
from lorry.artifacts.reading import TEMPLATE_FILE, WEIGHTS_FILE, Examined, Progress, examine
from lorry.artifacts.shelf import Shelf, Workbench
from lorry.artifacts.snapshot import Manifest, Snapshot
from lorry.artifacts.weights import PIECE_BYTES, SourceChanged, pieces
from lorry.engine import BaseShape
from lorry.errors import AdapterInvalid, LorryError, SourceNotFound, StorageFailed
from lorry.ids import VersionId

ATTEMPTS = 2
"""A source that changes while it is read twice in a row is being trained into; the caller must
wait, not we."""

FRESH_SECONDS_MAX = 600.0
"""How long a new snapshot is kept without being protected: longer than any load may take."""

_WAIT_S = 0.1

ProgressReport = Callable[[int, int], None]
Cancelled = Callable[[], bool]
Fill = Callable[[Path], None]
"""Writes and syncs the files of a snapshot into an empty folder."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """The disk cache in numbers."""

    bytes: int
    """Of complete snapshots."""
    count: int
    reserved_bytes: int
    """Held for snapshots being written."""
    limit_bytes: int | None
    evictions: int
    """Since the start."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A judged adapter in canonical form, not yet written."""

    examined: Examined
    manifest: Manifest
    small_files: tuple[tuple[str, bytes], ...]
    header: bytes


class DiskCache:
    """Snapshots below one folder. Every method may be called from any thread; the long ones
    block."""

    def __init__(self, root: Path, limit_bytes: int | None) -> None:
        """`limit_bytes` None: no limit. Raises `StorageFailed` when the folder cannot be used."""
        self.root = root
        with _storage(root):
            self._shelf = Shelf(root, limit_bytes)
        self._lock = threading.Condition()
        self._claims = threading.Lock()
        """Guards the next two; never held while the disk is used, so callers on an event loop do
        not wait for it."""
        self._protected: frozenset[VersionId] = frozenset()
        self._fresh: dict[VersionId, float] = {}
        self._writing: set[VersionId] = set()

    def snapshot(
        self,
        name: str,
        source: Path,
        base: BaseShape,
        max_rank: int,
        *,
        progress: ProgressReport | None = None,
        cancelled: Cancelled | None = None,
        roots: Sequence[Path] = (),
        label: str | None = None,
    ) -> Snapshot:
        """The snapshot of the adapter in `source`, made unless it is kept already.

        It is safe from eviction until `protect` names it, `release` gives it up, or ten minutes
        have passed. `progress` gets (bytes done, bytes in all); messages call the source `label`,
        if given, else by its path. Raises `AdapterInvalid` with every
        problem in its details, `SourceNotFound`, `Forbidden`, `CapacityExhausted`, `StorageFailed`,
        or `RequestAborted` once `cancelled`."""

        def work(folder: Folder) -> Snapshot:
            watch = Progress(name, progress, cancelled)
            draft = draft_of(name, folder, base, max_rank, watch)

            def fill(bench: Path) -> None:
                _fill(bench, draft, watch)
                changed = folder.changed()
                if changed is not None:
                    raise SourceChanged(changed)

            return self._keep(name, draft.manifest, fill, watch)

        return _consistently(name, source, roots, work, label)

    def check(
        self, name: str, source: Path, base: BaseShape, max_rank: int, *, roots: Sequence[Path] = ()
    ) -> Manifest:
        """What `snapshot` would make, without keeping anything. Raises as `snapshot` does."""
        return judged(name, source, base, max_rank, roots=roots)

    def adopt(self, name: str, snapshot: Snapshot) -> Snapshot:
        """Keep a copy of a snapshot that lies elsewhere so far, such as in memory. It is as safe
        from eviction as one made by `snapshot`. Raises `CapacityExhausted` or `StorageFailed`."""
        fill = partial(_copy, snapshot.path)
        return self._keep(name, snapshot.manifest, fill, Progress(name))

    def workbench(self) -> Workbench:
        """A temporary folder on the cache's disk, for what is not judged yet. It goes when closed,
        or at the next start. Raises `StorageFailed`."""
        with _storage(self.root):
            return self._shelf.workbench()

    def hold(self, name: str, more: int) -> None:
        """Take `more` bytes of the limit for a workbench, evicting snapshots that may go. Raises
        `CapacityExhausted`."""
        with _storage(self.root), self._lock:
            self._shelf.reserve(name, more, self._kept())

    def give_back(self, held: int) -> None:
        """A workbench does not need its bytes any more."""
        with self._lock:
            self._shelf.release(held)

    def get(self, version: VersionId, manifest: Manifest) -> Snapshot | None:
        """The kept snapshot of a version known from the registry; None when it is gone or not as
        big as it was."""
        path = self.open(version)
        with self._lock:
            complete = path is not None and self._shelf.sizes.get(version) == manifest.bytes
        return Snapshot(path, manifest) if complete and path is not None else None

    def open(self, version: VersionId) -> Path | None:
        """The folder of a complete snapshot, noted as used; None when there is none."""
        with _storage(self.root), self._lock:
            if self._shelf.forget_if_gone(version) is None:
                return None
            self._shelf.use(version)
            return self._shelf.path(version)

    def protect(self, versions: Collection[VersionId]) -> None:
        """From now on exactly these versions (and snapshots made since) are never evicted."""
        with self._claims:
            self._protected = frozenset(versions)
            for version in self._protected:
                self._fresh.pop(version, None)

    def release(self, version: VersionId) -> None:
        """A snapshot that was made is not going to be used, so it may be evicted."""
        with self._claims:
            self._fresh.pop(version, None)

    def remove(self, version: VersionId) -> bool:
        """Delete a snapshot, protected or not. False: it was not there."""
        self.release(version)
        with _storage(self.root), self._lock:
            return self._shelf.remove(version)

    def retain(
        self, versions: Collection[VersionId] | Callable[[VersionId], bool]
    ) -> tuple[VersionId, ...]:
        """Delete every snapshot but these, the protected and the fresh ones; answers which were
        deleted."""
        wanted = versions if callable(versions) else frozenset(versions).__contains__
        with _storage(self.root), self._lock:
            kept = self._kept()
            gone = tuple(
                version
                for version in self._shelf.sizes
                if version not in kept and not wanted(version)
            )
            for version in gone:
                self._shelf.remove(version)
            return gone

    def statistics(self) -> CacheStatistics:
        """The cache in numbers."""
        with self._lock:
            shelf = self._shelf
            return CacheStatistics(
                shelf.bytes,
                len(shelf.sizes),
                shelf.reserved_bytes,
                shelf.limit_bytes,
                shelf.evictions,
            )

    def _kept(self) -> frozenset[VersionId]:
        """What may not be evicted now. The lock is held."""
        oldest_s = time.monotonic() - FRESH_SECONDS_MAX
        with self._claims:
            self._fresh = {
                version: made_s for version, made_s in self._fresh.items() if made_s > oldest_s
            }
            return self._protected | self._fresh.keys() | self._writing

    def _keep(self, adapter: str, manifest: Manifest, fill: Fill, watch: Progress) -> Snapshot:
        """Write the version unless it is there; one writer per version, the others wait for it."""
        version = manifest.version
        with self._writer_of(version, watch):
            with _storage(self.root), self._lock:
                there = self._shelf.forget_if_gone(version) is not None
                if there:
                    self._shelf.use(version)
            if there:
                watch.step(watch.total)
            else:
                self._write(adapter, manifest, fill)
            with self._claims:
                self._fresh[version] = time.monotonic()
        return Snapshot(self._shelf.path(version), manifest)

    @contextmanager
    def _writer_of(self, version: VersionId, watch: Progress) -> Iterator[None]:
        with self._lock:
            while version in self._writing:
                self._lock.wait(_WAIT_S)
                watch.step(0)
            self._writing.add(version)
        try:
            yield
        finally:
            with self._lock:
                self._writing.discard(version)
                self._lock.notify_all()

    def _write(self, adapter: str, manifest: Manifest, fill: Fill) -> None:
        """Reserve, copy, make durable, rename. Whatever fails, nothing stays but what was there."""
        kept_bytes = 0
        with _storage(self.root):
            with self._lock:
                self._shelf.reserve(adapter, manifest.bytes, self._kept())
            try:
                bench = self._shelf.workbench()
                try:
                    fill(bench.path)
                    _sync_folder(bench.path)
                    bench.path.rename(self._shelf.path(manifest.version))
                    kept_bytes = manifest.bytes
                    _sync_folder(self.root)
                finally:
                    bench.close()
            finally:
                with self._lock:
                    self._shelf.release(manifest.bytes)
                    if kept_bytes:
                        self._shelf.add(manifest.version, kept_bytes)


def judged(
    name: str,
    source: Path,
    base: BaseShape,
    max_rank: int,
    *,
    roots: Sequence[Path] = (),
    label: str | None = None,
) -> Manifest:
    """What a snapshot of `source` would be; needs no cache. Raises as `DiskCache.snapshot` does."""
    return _consistently(
        name,
        source,
        roots,
        lambda folder: draft_of(name, folder, base, max_rank, Progress(name)).manifest,
        label,
    )


def _consistently(
    name: str,
    source: Path,
    roots: Sequence[Path],
    work: Callable[[Folder], Result],
    label: str | None = None,
) -> Result:
    """Do the work on files that belong together. What was found in a mix of old and new files is
    not believed, whether good or bad: the work is done again, and then given up."""
    for _ in range(ATTEMPTS):
        try:
            with Folder(source, roots, label=label) as folder:
                try:
                    result = work(folder)
                except (AdapterInvalid, SourceChanged):
                    if folder.changed() is None:
                        raise
                    continue
                if folder.changed() is None:
                    return result
        except SourceChanged:
            continue
        except OSError as error:
            raise _unreadable(name, label or str(source), error) from error
    where = shown(label or str(source))
    raise AdapterInvalid(
        f"Adapter {shown(name)} cannot be served: a file in {where} changed while "
        "being read; load it once the writer has finished, or write to another folder and rename "
        "it."
    )


def _unreadable(name: str, source: str, error: OSError) -> LorryError:
    if isinstance(error, FileNotFoundError):
        return SourceNotFound(
            f"The folder {shown(source)} of adapter {shown(name)} is gone.", param="source"
        )
    return AdapterInvalid(
        f"Adapter {shown(name)} cannot be served: {shown(source)} cannot be read "
        f"({error.strerror}); mend its permissions or its disk."
    )


def draft_of(
    name: str, folder: OpenFolder, base: BaseShape, max_rank: int, watch: Progress
) -> Draft:
    """The first pass: everything but the copy. Raises `AdapterInvalid`."""
    examined = examine(name, folder, base, max_rank, watch)
    config = canonical_config(examined, base)
    small_files = [(CONFIG_FILE, config)]
    if examined.chat_template is not None:
        small_files.append((TEMPLATE_FILE, examined.chat_template.encode()))
    tensors = stored_order(examined.judgement.modules)
    header = weights_header(tensors)
    size = (
        len(header)
        + sum(info.bytes for _, info in tensors)
        + sum(len(content) for _, content in small_files)
    )
    manifest = manifest_of(
        examined.judgement, version_of(examined, config), size, examined.chat_template
    )
    return Draft(examined, manifest, tuple(small_files), header)


def _fill(bench: Path, draft: Draft, watch: Progress) -> None:
    """The second pass: write and sync every file of the snapshot."""
    for name, content in draft.small_files:
        with (bench / name).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    with (bench / WEIGHTS_FILE).open("xb") as file:
        file.write(draft.header)
        for _, info in stored_order(draft.examined.judgement.modules):
            digest = hashlib.sha256()
            for piece in pieces(draft.examined.files, info):
                digest.update(piece)
                file.write(piece)
                watch.step(len(piece))
            if digest.hexdigest() != draft.examined.digests[info.name]:
                raise SourceChanged(info.file)
        file.flush()
        os.fsync(file.fileno())


def _copy(source: Path, bench: Path) -> None:
    """Copy and sync every file of a snapshot that cannot change."""
    for path in source.iterdir():
        with path.open("rb") as old, (bench / path.name).open("xb") as new:
            shutil.copyfileobj(old, new, PIECE_BYTES)
            new.flush()
            os.fsync(new.fileno())


def _sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _storage(root: Path) -> Iterator[None]:
    """Turn the file system's errors into ours at this one border."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(
            f"The disk cache {shown(str(root))} cannot be used: {error.strerror or error}; free "
            "space, mend its permissions, or choose another folder for the state."
        ) from error
