"""The feed of changes: what happened to adapters, for /v1/events and the log."""

from collections import deque
from collections.abc import AsyncIterator

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

    def since(self, after: int) -> tuple[ChangeEvent, ...]:
        """Those remembered with a sequence number above `after`. A number that was not given yet
        is of an earlier life of the server: then all."""
        if after > self._last:
            after = 0
        return tuple(change for change in self._kept if change.sequence > after)

    async def follow(self, after: int) -> AsyncIterator[ChangeEvent]:
        """As `since`, and then those that come, for ever."""
        while True:
            more = self._more
            fresh = self.since(after)
            for change in fresh:
                after = change.sequence
                yield change
            if not fresh:
                await more.wait()
