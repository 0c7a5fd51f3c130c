"""The ups and downs of one engine, kept in order for its one reader."""

from collections import deque
from collections.abc import AsyncIterator

import anyio

from lorry.engine import EngineEvent


class EventFeed:
    """A queue that begins with the present state when its reader comes; nothing is kept before."""

    def __init__(self) -> None:
        """Nothing is kept until `read` is called."""
        self._events: deque[EngineEvent] = deque()
        self._news = anyio.Event()
        self._read = False
        self._closed = False

    def publish(self, event: EngineEvent) -> None:
        """Hand an event to the reader; dropped when there is none, for `read` begins anew."""
        if self._read:
            self._events.append(event)
            self._news.set()

    def close(self) -> None:
        """End the reader's iteration once it has read what is left."""
        self._closed = True
        self._news.set()

    def read(self, present: EngineEvent) -> AsyncIterator[EngineEvent]:
        """Iterate from `present` on; keeping begins with this call, not at the first step."""
        self._read = True
        self._events.clear()
        self._events.append(present)
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[EngineEvent]:
        while True:
            while self._events:
                yield self._events.popleft()
            if self._closed:
                return
            self._news = anyio.Event()
            await self._news.wait()
