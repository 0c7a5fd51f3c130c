"""A stranger's folder, opened without trust.

Three rules:

1. Nothing outside the allowed roots is opened. Every path is first taken as an O_PATH handle, which
   follows links but opens nothing (a FIFO or a device does not notice); the handle's real place is
   checked, and only then is it opened for reading through /proc/self/fd, so that no link can be
   swapped in between.
2. Only regular files are read.
3. What was read belongs together: `changed` compares every file that was looked up with what is
   there now."""

import os
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from lorry.artifacts.sources import require_inside
from lorry.errors import AdapterInvalid, SourceNotFound

SETTLE_S = 0.015
"""A file changed less than one clock tick ago (4 to 10 ms) can change again without a new time
stamp. So the youngest file must be this old before reading begins."""

Identity = tuple[int, int, int, int, int]
"""device, inode, size, mtime, ctime: a change of content changes at least one."""


class SourceFile:
    """One regular file, open for reading at any offset."""

    def __init__(self, name: str, descriptor: int, size: int) -> None:
        """Takes over the descriptor."""
        self.name = name
        self.size = size
        self._descriptor = descriptor

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`; fewer only at the end of the file."""
        parts = []
        while length > 0 and (part := os.pread(self._descriptor, min(length, 1 << 24), offset)):
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._descriptor)


class OpenFolder(Protocol):
    """What the judge needs of a folder, wherever it lies."""

    @property
    def label(self) -> str:
        """What messages call it."""

    def names(self) -> frozenset[str]:
        """What it holds."""

    def open(self, name: str) -> SourceFile | None:
        """A file of it, or None. The folder closes it."""

    def changed(self) -> str | None:
        """The name of a file that is no longer what it was, if any."""

    def settle(self, names: Sequence[str]) -> None:
        """Wait until none of them is being written."""


class Folder:
    """An open folder; closes everything that was opened through it."""

    def __init__(self, path: Path, roots: Sequence[Path] = (), *, label: str | None = None) -> None:
        """`label` is what messages call it, else its path. Raises `SourceNotFound`, `Forbidden` or
        `AdapterInvalid`. No roots allow everything."""
        self.path = path
        self.label = str(path) if label is None else label
        self._roots = tuple(roots)
        self._seen: dict[str, Identity | None] = {}
        self._stack = ExitStack()
        try:
            self._handle = self._take(path, os.O_DIRECTORY)
        except FileNotFoundError:
            raise SourceNotFound(f"There is no folder {str(path)!r}.", param="source") from None
        except NotADirectoryError:
            raise AdapterInvalid(
                f"{str(path)!r} is not a folder; give the folder of an adapter."
            ) from None
        self._stack.callback(os.close, self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def names(self) -> frozenset[str]:
        """What the folder holds."""
        return frozenset(os.listdir(f"/proc/self/fd/{self._handle}"))  # noqa: PTH208

    def open(self, name: str) -> SourceFile | None:
        """A file of the folder, or None. Raises `Forbidden` for a link that leads outside,
        `AdapterInvalid` for anything but a regular file. The folder closes it."""
        try:
            handle = self._take(Path(name))
        except FileNotFoundError:
            self._seen.setdefault(name, None)
            return None
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise AdapterInvalid(
                    f"{name} is not a regular file; put the file itself into the folder."
                )
            self._seen.setdefault(name, _identity(status))
            descriptor = os.open(
                f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            )
        finally:
            os.close(handle)
        file = SourceFile(name, descriptor, status.st_size)
        self._stack.callback(file.close)
        return file

    def changed(self) -> str | None:
        """The name of a file that is no longer what it was when it was opened, if any."""
        return next(
            (name for name, seen in self._seen.items() if self._identity_now(name) != seen), None
        )

    def settle(self, names: Sequence[str]) -> None:
        """Wait until each of these files has been left alone for a clock tick."""
        identities = [
            identity for name in names if (identity := self._identity_now(name)) is not None
        ]
        youngest_ns = max((max(identity[3:]) for identity in identities), default=0)
        age_s = time.time() - youngest_ns / 1e9
        if 0 <= age_s < SETTLE_S:
            threading.Event().wait(SETTLE_S - age_s)

    def _identity_now(self, name: str) -> Identity | None:
        try:
            handle = self._take(Path(name))
        except OSError:
            return None
        try:
            return _identity(os.fstat(handle))
        finally:
            os.close(handle)

    def _take(self, path: Path, flags: int = 0) -> int:
        """An O_PATH handle on something inside the roots; the caller closes it."""
        folder = None if flags & os.O_DIRECTORY else self._handle
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC | flags, dir_fd=folder)
        try:
            place = Path(f"/proc/self/fd/{handle}").readlink()
            require_inside(place, self._roots, shown=str(path))
        except BaseException:
            os.close(handle)
            raise
        return handle


def _identity(status: os.stat_result) -> Identity:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
