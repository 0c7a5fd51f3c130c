"""What came with a request, until it is served: weights in memory, or files in a temporary folder
beside the disk cache. A parcel is a source like any other, except that it can be read only once and
only by the load that it came with."""

import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from lorry.artifacts.cache import DiskCache
from lorry.artifacts.memory import MemoryFolder, MemorySnapshot, snapshot_in_memory
from lorry.artifacts.shelf import Workbench
from lorry.artifacts.snapshot import Snapshot
from lorry.engine import BaseShape
from lorry.errors import RequestAborted

UPLOAD = "upload:"
"""Begins the source of an adapter that came with a request and is on the disk once the load has
been answered."""

MEMORY = "memory:"
"""Begins the source of one whose copy on the disk follows later, so that it may be lost."""

Stop = Callable[[], bool]


def came_with_a_request(source: str) -> bool:
    """Whether the source can be read no more once its load has ended."""
    return source.startswith((UPLOAD, MEMORY))


class Parcel(Protocol):
    """What a load takes over with its request, and closes."""

    @property
    def source(self) -> str:
        """What the registry says of where the adapter is from."""

    @property
    def in_memory(self) -> bool:
        """Whether nothing of it is on a disk."""

    def snapshot(
        self, name: str, cache: DiskCache, base: BaseShape, max_rank: int, stop: Stop
    ) -> Snapshot:
        """Judge it. Blocks; raises as `DiskCache.snapshot` does."""

    def close(self) -> None:
        """Give it up, at the latest when who is reading it has done so. Safe to call twice."""


class _Shared:
    """Lets one thread use something that another may close."""

    def __init__(self, free: Callable[[], None]) -> None:
        """`free` is called once: at `close`, or after the last use of what was closed meanwhile."""
        self._free = free
        self._lock = threading.Lock()
        self._used = 0
        self._closed = False

    def __enter__(self) -> None:
        with self._lock:
            if self._closed:
                raise RequestAborted("The load was ended before its files were read.")
            self._used += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._used -= 1
            over = self._closed and not self._used
        if over:
            self._free()

    def close(self) -> None:
        with self._lock:
            over = not self._closed and not self._used
            self._closed = True
        if over:
            self._free()


class WeightsParcel:
    """Weights and config in memory."""

    in_memory = True

    def __init__(
        self, folder: MemoryFolder, *, durable: bool, on_close: Callable[[], None] = lambda: None
    ) -> None:
        """Takes the folder over. `durable`: the load is answered once its copy is on the disk."""
        self.durable = durable
        self.source = f"{UPLOAD if durable else MEMORY}{secrets.token_hex(8)}"
        self.made: MemorySnapshot | None = None
        """What `snapshot` made; whoever takes it sets None, else `close` gives it up."""
        self._folder = folder
        self._on_close = on_close
        self._shared = _Shared(self._free)

    def snapshot(
        self, name: str, cache: DiskCache, base: BaseShape, max_rank: int, stop: Stop
    ) -> Snapshot:
        """Judge it; the snapshot lies in memory. Blocks."""
        with self._shared:
            try:
                self.made = snapshot_in_memory(name, self._folder, base, max_rank, stop)
            finally:
                self._folder.close()  # it is read once, and need not take its room twice
            return self.made.snapshot

    def close(self) -> None:
        """Give the memory back."""
        self._shared.close()

    def _free(self) -> None:
        self._folder.close()
        if self.made is not None:
            self.made.close()
            self.made = None
        self._on_close()


class FolderParcel:
    """A folder of files that were sent, on the disk cache's disk."""

    in_memory = False
    durable = True

    def __init__(self, bench: Workbench, folder: Path, on_close: Callable[[], None]) -> None:
        """Takes the workbench over; the adapter lies in `folder` on it."""
        self.source = f"{UPLOAD}{secrets.token_hex(8)}"
        self._bench = bench
        self._folder = folder
        self._on_close = on_close
        self._shared = _Shared(self._free)

    def snapshot(
        self, name: str, cache: DiskCache, base: BaseShape, max_rank: int, stop: Stop
    ) -> Snapshot:
        """Judge it and copy it into the disk cache. Blocks."""
        with self._shared:
            return cache.snapshot(name, self._folder, base, max_rank, cancelled=stop)

    def close(self) -> None:
        """Remove the files."""
        self._shared.close()

    def _free(self) -> None:
        self._bench.close()
        self._on_close()
