"""Room on the disk for downloads: one folder each, counted in bytes, kept after a broken download
so that the next one of the same files goes on from there.

Parts are believed by their digests: the journal holds the SHA-256 of every part that was written,
and a part that no longer has it, after a power cut or whatever else, is fetched again."""

import fcntl
import hashlib
import os
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lorry.artifacts.remote.site import Listing, RemoteFile
from lorry.errors import CapacityExhausted

JOURNAL = ".parts"

ONCE = "once-"
"""Begins the names of folders that no later download can go on from."""

KEPT_S = 24 * 3600.0
"""What nobody came back for within a day is removed by the next download or start."""

PART_BYTES = 8 << 20
"""Large enough that asking for it costs little beside its bytes, small enough to be lost."""

Part = tuple[str, int, int]
"""File, first byte, byte after the last."""


@dataclass(slots=True)
class Bench:
    """The folder of one download, locked while its owner lives."""

    path: Path
    lock: int
    held_bytes: int
    done: dict[Part, str] = field(default_factory=dict)
    """Parts that are on the disk, with their digests."""

    def write(self, part: Part, data: bytes) -> None:
        """Put a part in its place, then into the journal."""
        self.place(part[0], part[1], data)
        self.done[part] = digest = hashlib.sha256(data).hexdigest()
        with (self.path / JOURNAL).open("a") as journal:
            journal.write(f"{part[1]} {part[2]} {digest} {part[0]}\n")

    def place(self, name: str, begin: int, data: bytes) -> None:
        """Write bytes of a file."""
        descriptor = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.lseek(descriptor, begin, os.SEEK_SET)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)

    def resume(self, files: tuple[RemoteFile, ...]) -> int:
        """Take over what an earlier download left; how many bytes that is. Blocks: it reads
        them."""
        wanted = {part for file in files for part in parts(file)}
        for part, digest in journal_parts(self.path):
            if part in wanted and _digest(self.path, part) == digest:
                self.done[part] = digest
        return sum(end - begin for _, begin, end in self.done)

    def close(self, *, keep: bool) -> None:
        """Give the folder back; `keep` leaves it for the next try. Safe to call twice."""
        if self.lock >= 0:
            if not keep:
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)
            self.lock = -1


class Staging:
    """All downloads below one folder. Every method may be called from any thread."""

    def __init__(self, root: Path, bytes_max: int) -> None:
        """The folder is made when it is needed."""
        self._root = root
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._held_bytes = 0

    def open(self, listing: Listing, need: int) -> Bench:
        """A folder with `need` bytes held for it, the one of an earlier try if there is one and
        nobody uses it. Raises `CapacityExhausted`, OSError."""
        with self._lock:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            bench = self._take(key_of(listing)) if listing.resumable else None
            bench = bench or self._take(f"{ONCE}{secrets.token_hex(16)}")
            if bench is None:
                raise BlockingIOError("a new folder is locked")
            try:
                self._make_room(need)
            except BaseException:
                bench.close(keep=listing.resumable)
                raise
            self._held_bytes += need
            bench.held_bytes = need
        return bench

    def close(self, bench: Bench, *, keep: bool) -> None:
        """The download is over: copied and judged, or given up."""
        with self._lock:
            bench.close(keep=keep)
            self._held_bytes -= bench.held_bytes
            bench.held_bytes = 0
            if not keep:
                self._remove_if_empty()

    def remove_abandoned(self) -> None:
        """Remove what killed processes left and no download can go on from. Raises OSError."""
        with self._lock:
            if self._root.exists():
                deque(self._abandoned(), maxlen=0)
                self._remove_if_empty()

    def _remove_if_empty(self) -> None:
        if self._root.exists() and not any(self._root.iterdir()):
            self._root.rmdir()

    def _take(self, name: str) -> Bench | None:
        """The folder of that name, locked; None when another download has it."""
        path = self._root / name
        path.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        os.utime(path)
        return Bench(path, lock, 0)

    def _make_room(self, need: int) -> None:
        """Remove what earlier downloads left, oldest first, until `need` bytes more fit."""
        left = sorted(self._abandoned(), key=lambda found: found[0])
        over = self._held_bytes + need + sum(size for _, size, _ in left) - self._bytes_max
        for _, size, path in left:
            if over <= 0:
                return
            shutil.rmtree(path, ignore_errors=True)
            over -= size
        if over > 0:
            raise CapacityExhausted(
                f"A download of {need} bytes does not fit beside those under way "
                f"({self._held_bytes} bytes) into --download-bytes {self._bytes_max}; try again "
                "later or raise the limit."
            )

    def _abandoned(self) -> Iterator[tuple[float, int, Path]]:
        """(last use, bytes, folder) of each folder that nobody has locked, and that may be of use
        again; the others are removed."""
        for path in self._root.iterdir():
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                used_s = path.stat().st_mtime
                if path.name.startswith(ONCE) or used_s < time.time() - KEPT_S:
                    shutil.rmtree(path, ignore_errors=True)
                    continue
                yield used_s, sum(file.stat().st_size for file in path.iterdir()), path
            except BlockingIOError:
                continue
            finally:
                os.close(lock)


def parts(file: RemoteFile) -> Iterator[Part]:
    """A file of known size in parts."""
    for begin in range(0, file.size or 0, PART_BYTES):
        yield file.name, begin, min(begin + PART_BYTES, file.size or 0)


def key_of(listing: Listing) -> str:
    """The folder's name: another one for another content of the same source."""
    digest = hashlib.sha256(listing.source.encode())
    for file in listing.files:
        digest.update(f"\n{file.name}\n{file.size}\n{file.tag}".encode())
    return digest.hexdigest()


def journal_parts(path: Path) -> Iterator[tuple[Part, str]]:
    """What the journal of a folder says; a line that was cut says nothing."""
    try:
        lines = (path / JOURNAL).read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(" ", 3)
        if len(fields) == 4 and fields[0].isdigit() and fields[1].isdigit():
            yield (fields[3], int(fields[0]), int(fields[1])), fields[2]


def _digest(path: Path, part: Part) -> str | None:
    """Of what the disk holds of a part."""
    name, begin, end = part
    try:
        with (path / name).open("rb") as file:
            file.seek(begin)
            data = file.read(end - begin)
    except OSError:
        return None
    return hashlib.sha256(data).hexdigest() if len(data) == end - begin else None
