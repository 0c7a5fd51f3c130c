"""Adapters that came with a request and lie in memory alone: from their arrival to a snapshot that
an engine can read, without a byte of theirs on a disk.

Three rules:

1. The bytes lie in memory files (`memfd_create`), which have no name on any file system and vanish
   with the process that made them, however it ends.
2. An engine is given a folder of links to them, in the form of any snapshot; the folder lies in the
   system's memory file system where there is one, so that not even names reach a disk.
3. Whoever reads has a descriptor of his own, so that nothing can be taken away under him.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lorry.artifacts.adapter_config import shown
from lorry.artifacts.cache import Draft, draft_of
from lorry.artifacts.canonical import stored_order
from lorry.artifacts.folder import SourceFile
from lorry.artifacts.reading import WEIGHTS_FILE, Progress
from lorry.artifacts.snapshot import Snapshot
from lorry.artifacts.weights import pieces
from lorry.engine import BaseShape
from lorry.errors import CapacityExhausted, RequestInvalid

LINKS_PREFIX = f"lorry-{os.getuid()}-"
"""Of the folders of links, which other users have too."""


class MemoryFile:
    """One file in memory; written once from its beginning to its end."""

    def __init__(self, name: str) -> None:
        """Empty. `name` is for messages."""
        self.name = name
        self.size = 0
        self._descriptor = os.memfd_create(f"lorry {name}"[:200], os.MFD_CLOEXEC)

    @property
    def path(self) -> Path:
        """Where any process of the same user can open it, while it is not closed."""
        return Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    def write(self, data: bytes | memoryview) -> None:
        """Append. Raises `CapacityExhausted` when the system has no memory left."""
        rest = memoryview(data)
        try:
            while rest:
                count = os.write(self._descriptor, rest)
                rest = rest[count:]
                self.size += count
        except OSError as error:
            raise CapacityExhausted(
                f"{shown(self.name)} does not fit into memory after {self.size} bytes "
                f"({error.strerror})."
            ) from error

    def open(self) -> SourceFile:
        """For reading; whoever gets it closes it."""
        return SourceFile(self.name, os.dup(self._descriptor), self.size)

    def close(self) -> None:
        """Give it up; the memory goes once no reader has it open. Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class MemoryFolder:
    """A PEFT folder in memory; implements `lorry.artifacts.folder.OpenFolder`."""

    def __init__(self, label: str) -> None:
        """Empty. `label` is what messages call it."""
        self.label = label
        self._files: dict[str, MemoryFile] = {}
        self._opened: list[SourceFile] = []

    def create(self, name: str) -> MemoryFile:
        """A new file. Raises `RequestInvalid` when there is one of that name."""
        if name in self._files:
            raise RequestInvalid(f"The body has {shown(name)} twice; send it once.")
        file = self._files[name] = MemoryFile(name)
        return file

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self._files.values())

    def names(self) -> frozenset[str]:
        """What it holds."""
        return frozenset(self._files)

    def open(self, name: str) -> SourceFile | None:
        """A file of it, or None. The folder closes it."""
        file = self._files.get(name)
        if file is None:
            return None
        self._opened.append(file.open())
        return self._opened[-1]

    def changed(self) -> str | None:
        """Nobody else can write to it."""
        return None

    def settle(self, names: Sequence[str]) -> None:
        """It is whole when it is read."""

    def close(self) -> None:
        """Give everything up. Safe to call twice."""
        for opened in self._opened:
            opened.close()
        self._opened.clear()
        for file in self._files.values():
            file.close()


class MemorySnapshot:
    """One judged version in memory, in the form of a snapshot."""

    def __init__(self, draft: Draft) -> None:
        """Copies it out of the folder that the draft was made of. Raises `CapacityExhausted`."""
        self._files: list[MemoryFile] = []
        self._links = _Links()
        self.snapshot = Snapshot(self._links.path, draft.manifest)
        try:
            for name, content in draft.small_files:
                self._create(name).write(content)
            weights = self._create(WEIGHTS_FILE)
            weights.write(draft.header)
            for _, info in stored_order(draft.examined.judgement.modules):
                for piece in pieces(draft.examined.files, info):
                    weights.write(piece)
        except BaseException:
            self.close()
            raise

    def _create(self, name: str) -> MemoryFile:
        file = MemoryFile(name)
        self._files.append(file)
        (self._links.path / name).symlink_to(file.path)
        return file

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        self._links.close()
        for file in self._files:
            file.close()


def snapshot_in_memory(
    name: str,
    folder: MemoryFolder,
    base: BaseShape,
    max_rank: int,
    cancelled: Callable[[], bool] | None = None,
) -> MemorySnapshot:
    """Judge an adapter as any other source is judged. Blocks; raises `AdapterInvalid` with every
    problem in its details, `CapacityExhausted`, or `RequestAborted` once `cancelled`."""
    watch = Progress(name, None, cancelled)
    draft = draft_of(name, folder, base, max_rank, watch)
    return MemorySnapshot(draft)


class _Links:
    """A folder for links, locked while its owner lives."""

    def __init__(self) -> None:
        made = None
        while made is None:
            made = _locked_folder()
        self.path, self._lock = made

    def close(self) -> None:
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _locked_folder() -> tuple[Path, int] | None:
    """A new folder of links and its lock; None when a server that starts took it for abandoned in
    the moment before it was locked."""
    path = _place() / f"{LINKS_PREFIX}{secrets.token_hex(8)}"
    path.mkdir(mode=0o700)
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    fcntl.flock(lock, fcntl.LOCK_EX)
    if os.fstat(lock).st_nlink:
        return path, lock
    os.close(lock)
    return None


def _place() -> Path:
    """The system's memory file system, or its folder for temporary files."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def remove_abandoned(place: Path | None = None) -> int:
    """Remove the folders of links that killed processes of this user left; answers how many."""
    removed = 0
    for path in (place or _place()).glob(f"{LINKS_PREFIX}*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed += 1
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
    return removed
