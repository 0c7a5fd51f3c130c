"""The feed of changes: what happened to adapters, for /v1/events and the log."""

from collections import deque
from collections.abc import AsyncGenerator

import anyio

from lorry.ids import AdapterName, VersionId
from lorry.views import ChangeEvent


class Changes:
    """A bounded history and the readers who wait for more. A reader that falls behind misses the
    oldest changes, and sees it by the gap in the sequence."""

    def __init__(self, kept: int) -> None:
        """Remember the last `kept` changes."""
        self._kept: deque[ChangeEvent] = deque(maxlen=kept)
        self._last = 0
        self._more = anyio.Event()

    def add(
        self,
        at_s: float,
        kind: str,
        name: AdapterName | None,
        version: VersionId | None,
        text: str,
    ) -> None:
        """Something happened."""
        self._last += 1
        self._kept.append(ChangeEvent(self._last, at_s, kind, name, version, text))
        self._more.set()
        self._more = anyio.Event()

    def so_far(self, after: int) -> tuple[ChangeEvent, ...]:
        """Those remembered with a sequence number above `after`."""
        return tuple(change for change in self._kept if change.sequence > after)

    async def follow(self, after: int) -> AsyncGenerator[ChangeEvent]:
        """Every change with a sequence number above `after`, for ever."""
        while True:
            more = self._more
            fresh = self.so_far(after)
            for change in fresh:
                after = change.sequence
                yield change
            if not fresh:
                await more.wait()

    def place(self, after: int) -> int:
        """Where a reader goes on who has seen number `after`. One that was not given yet is of an
        earlier life of the server: such a reader begins with the first."""
        return after if after <= self._last else 0
