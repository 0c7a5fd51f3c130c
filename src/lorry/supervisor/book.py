"""The book of admin calls: what each is doing, how it ended, and who waits for that."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import anyio

from lorry.errors import LorryError, OperationCancelled, OperationNotFound
from lorry.ids import AdapterName, OperationId, VersionId
from lorry.views import OperationStatus, OperationView


@dataclass(slots=True)
class _Entry:
    view: OperationView
    ended: anyio.Event = field(default_factory=anyio.Event)


class Book:
    """Admin calls under way, and the last ones that ended."""

    def __init__(
        self, kept: int, progress: Callable[[AdapterName], tuple[str, VersionId | None]]
    ) -> None:
        """`progress` answers what the call under way on a name is doing, and its version if
        known."""
        self._kept = kept
        self._progress = progress
        self._entries: dict[OperationId, _Entry] = {}

    def begin(self, operation: OperationId, kind: str, name: AdapterName, at_s: float) -> None:
        """A call is asked."""
        running = OperationStatus.RUNNING
        view = OperationView(operation, kind, name, None, running, "asked", None, at_s, None)
        self._entries[operation] = _Entry(view)
        self._forget_old()

    def end(self, operation: OperationId, error: LorryError | None, at_s: float) -> None:
        """It has ended: well when `error` is None."""
        entry = self._entries[operation]
        status = OperationStatus.DONE
        if error is not None:
            cancelled = isinstance(error, OperationCancelled)
            status = OperationStatus.CANCELLED if cancelled else OperationStatus.FAILED
        view = self.view(operation)
        entry.view = replace(view, status=status, phase=status, error=error, ended_s=at_s)
        entry.ended.set()

    def view(self, operation: OperationId) -> OperationView:
        """How far it is. Raises `OperationNotFound`."""
        entry = self._entries.get(operation)
        if entry is None:
            raise OperationNotFound(f"There is no operation {operation}.")
        if entry.view.status is OperationStatus.RUNNING:
            phase, version = self._progress(entry.view.name)
            entry.view = replace(entry.view, phase=phase, version=version or entry.view.version)
        return entry.view

    def views(self) -> tuple[OperationView, ...]:
        """All that are remembered, oldest first."""
        return tuple(self.view(operation) for operation in self._entries)

    def running(self) -> int:
        """How many are under way."""
        return sum(not entry.ended.is_set() for entry in self._entries.values())

    async def wait(self, operation: OperationId) -> OperationView:
        """Its end. Raises the call's own error when it failed."""
        entry = self._entries.get(operation)
        if entry is None:
            raise OperationNotFound(f"There is no operation {operation}.")
        await entry.ended.wait()
        if entry.view.error is not None:
            raise entry.view.error
        return entry.view

    def _forget_old(self) -> None:
        while len(self._entries) > self._kept:
            oldest = next((i for i, e in self._entries.items() if e.ended.is_set()), None)
            if oldest is None:
                return
            del self._entries[oldest]
