"""The disk cache's folder: what lies in it, in which order it was used, and how room is made. Not
yet thread-safe: the cache holds its lock around every call."""

import fcntl
import os
import re
import secrets
import shutil
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from lorry.artifacts.adapter_config import CONFIG_FILE
from lorry.artifacts.reading import TEMPLATE_FILE, WEIGHTS_FILE
from lorry.errors import CapacityExhausted
from lorry.ids import VersionId

TEMPORARY_PREFIX = ".tmp-"

_VERSION_FOLDER = re.compile(r"[0-9a-f]{64}")


@dataclass(slots=True)
class Workbench:
    """A temporary folder, locked while its owner lives so that nobody else takes it for a
    left-over."""

    path: Path
    lock: int

    def close(self) -> None:
        """Remove what is left of it and give the lock back. Safe to call twice."""
        if self.lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)
            self.lock = -1


class Shelf:
    """Complete snapshots by version, least recently used first, within a byte limit."""

    def __init__(self, root: Path, limit_bytes: int | None) -> None:
        """Takes stock of `root`; removes what killed processes left behind."""
        self.root = root
        self.limit_bytes = limit_bytes
        self.sizes: OrderedDict[VersionId, int] = OrderedDict()
        self.reserved_bytes = 0
        self.evictions = 0
        root.mkdir(parents=True, exist_ok=True)
        self._take_stock()

    @property
    def bytes(self) -> int:
        """What the complete snapshots take."""
        return sum(self.sizes.values())

    def path(self, version: VersionId) -> Path:
        """Where a version lies, if it does."""
        return self.root / version

    def workbench(self) -> Workbench:
        """A new locked temporary folder."""
        path = self.root / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return Workbench(path, lock)

    def reserve(self, adapter: str, need: int, kept: Collection[VersionId]) -> None:
        """Hold `need` bytes, evicting the least recently used snapshots that are not `kept`. All or
        nothing."""
        if self.limit_bytes is not None:
            over = self.bytes + self.reserved_bytes + need - self.limit_bytes
            for victim in self._victims(adapter, need, over, kept):
                self.remove(victim)
                self.evictions += 1
        self.reserved_bytes += need

    def release(self, held: int) -> None:
        """Give a reservation back."""
        self.reserved_bytes -= held

    def add(self, version: VersionId, size: int) -> None:
        """A complete snapshot has taken its place."""
        self.sizes[version] = size
        self.sizes.move_to_end(version)

    def use(self, version: VersionId) -> None:
        """Note that a version was used, also for the next start."""
        self.sizes.move_to_end(version)
        os.utime(self.path(version))

    def remove(self, version: VersionId) -> bool:
        """Take a snapshot away: out of sight in one step, then deleted. False: it was not there."""
        if self.sizes.pop(version, None) is None:
            return False
        bench = self.workbench()
        try:
            self.path(version).rename(bench.path / version)
        except FileNotFoundError:
            return False
        finally:
            bench.close()
        return True

    def forget_if_gone(self, version: VersionId) -> int | None:
        """The size of a complete snapshot, or None: then it is no longer on the books either."""
        size = snapshot_bytes(self.path(version)) if version in self.sizes else None
        if size is None or size != self.sizes[version]:
            self.remove(version)
            return None
        return size

    def _victims(
        self, adapter: str, need: int, over: int, kept: Collection[VersionId]
    ) -> list[VersionId]:
        victims: list[VersionId] = []
        for version, size in self.sizes.items():
            if over <= 0:
                break
            if version not in kept:
                victims.append(version)
                over -= size
        if over > 0:
            raise CapacityExhausted(
                f"Adapter {adapter!r} needs {need} bytes in the disk cache, but its limit of "
                f"{self.limit_bytes} bytes (--disk-cache-bytes) is taken by snapshots in use "
                f"({self.bytes + self.reserved_bytes} bytes held); unload an adapter or raise the "
                "limit."
            )
        return victims

    def _take_stock(self) -> None:
        found: list[tuple[int, VersionId, int]] = []
        for path in self.root.iterdir():
            if path.name.startswith(TEMPORARY_PREFIX):
                _remove_if_abandoned(path)
            elif _VERSION_FOLDER.fullmatch(path.name):
                size = snapshot_bytes(path)
                if size is None:
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    found.append((path.stat().st_mtime_ns, VersionId(path.name), size))
        for _, version, size in sorted(found):
            self.add(version, size)


def snapshot_bytes(path: Path) -> int | None:
    """What a complete snapshot takes; None when a file is missing."""
    try:
        sizes = [(path / name).stat().st_size for name in (CONFIG_FILE, WEIGHTS_FILE)]
    except OSError:
        return None
    template = path / TEMPLATE_FILE
    return sum(sizes) + (template.stat().st_size if template.exists() else 0)


def _remove_if_abandoned(path: Path) -> None:
    """Remove a temporary folder unless a living process, of whatever id, holds its lock."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(lock)
