"""Who may grow idle, and when to look at each of them again.

Uses are written down and nothing else; only when the time that was last planned for a name has come
is it asked when it was really used (`retirement.py`). So a request costs one assignment, however
many adapters there are.
"""

from heapq import heappop, heappush

from lorry.ids import AdapterName


class IdleTimes:
    """When to look at each watched name again: never later than its time can be up."""

    def __init__(self) -> None:
        """Nobody is watched."""
        self._due: dict[AdapterName, int] = {}
        self._heap: list[tuple[int, AdapterName]] = []
        """Holds an entry for each of `_due`, and some that are out of date."""

    def __len__(self) -> int:
        """How many are watched."""
        return len(self._due)

    def watch(self, name: AdapterName, due_ms: int) -> None:
        """Look at a name by then; an earlier look that is planned already is as good."""
        planned = self._due.get(name)
        if planned is None or due_ms < planned:
            self._due[name] = due_ms
            heappush(self._heap, (due_ms, name))

    def forget(self, name: AdapterName) -> None:
        """Watch it no more."""
        self._due.pop(name, None)

    def due_ms(self, name: AdapterName) -> int | None:
        """When it will be looked at; None: it is not watched."""
        return self._due.get(name)

    def first_ms(self) -> int | None:
        """When the next look is due."""
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_ms: int) -> AdapterName | None:
        """A name whose look is due, watched no more; None when there is none left."""
        first_ms = self.first_ms()
        if first_ms is None or first_ms > now_ms:
            return None
        name = heappop(self._heap)[1]
        del self._due[name]
        return name
