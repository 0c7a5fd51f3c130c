"""One server per state file: an advisory lock that the kernel gives back when its holder dies.

The lock file also remembers that a registry was once written, so that a state file cut to nothing
is not mistaken for a new one.
"""

import fcntl
import os
from pathlib import Path

from lorry.errors import StorageFailed

_MARK = b"a registry has been written\n"


class LockFile:
    """Held from construction to `close`."""

    def __init__(self, state: Path) -> None:
        """Raises `StorageFailed` when another process holds the lock, OSError when there can be no
        lock file."""
        self._state = state
        path = state.with_name(state.name + ".lock")
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise StorageFailed(
                f"The state {str(state)!r} is in use by another Lorry server (it holds "
                f"{path.name}); stop that server or choose another --state."
            ) from None

    def check_not_emptied(self) -> None:
        """Raise `StorageFailed` for a state file without content that once had some."""
        empty = self._state.exists() and self._state.stat().st_size == 0
        if empty and os.pread(self._descriptor, len(_MARK), 0) == _MARK:
            raise StorageFailed(
                f"The state {str(self._state)!r} is empty, but a registry was written to it before;"
                " restore it from a backup, or delete it to begin anew."
            )

    def mark_written(self) -> None:
        """Remember that the state file has content from now on."""
        os.pwrite(self._descriptor, _MARK, 0)

    def close(self) -> None:
        """Give the lock back. Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
