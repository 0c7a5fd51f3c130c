"""Which version sits in which device slot. Pure accounting: no torch, no copies.

Rules:

1. A version is in one slot at most; a slot holds one version at most.
2. A pinned version is never put out, and one slot at least is not pinned (promise 6).
3. An idle slot (no running request on its version) may be given away at any time, the least
   recently used first; a busy one only by the scheduler's clock (see `schedule.py`).
"""

from collections.abc import Container
from dataclasses import dataclass

from lorry.errors import EngineRejected
from lorry.ids import EngineId


@dataclass(slots=True)
class _Slot:
    engine_id: EngineId | None = None
    since: float = 0.0
    """Seconds; when the version came in, or when its slice of time began anew."""
    used: int = 0
    """A counter that rises with each use: the least is the least recently used."""


class SlotTable:
    """All slots of one engine, by number."""

    def __init__(self, slots: int) -> None:
        """All are empty."""
        self._slots = [_Slot() for _ in range(slots)]
        self._number: dict[EngineId, int] = {}
        self._pinned: set[EngineId] = set()
        self._uses = 0
        self.loads = 0
        """Versions put in, since the beginning."""
        self.evictions = 0
        """Versions put out to make room, since the beginning."""

    def holders(self) -> tuple[EngineId | None, ...]:
        """Slot by slot."""
        return tuple(slot.engine_id for slot in self._slots)

    def number_of(self, engine_id: EngineId) -> int | None:
        """The slot that holds it."""
        return self._number.get(engine_id)

    def touch(self, engine_id: EngineId) -> None:
        """It is used in this step."""
        self._uses += 1
        self._slots[self._number[engine_id]].used = self._uses

    def idle(self, busy: Container[EngineId]) -> int | None:
        """The best slot to give away: an empty one, else the least recently used idle one."""
        free = [
            (slot.used, number)
            for number, slot in enumerate(self._slots)
            if slot.engine_id is None
            or (slot.engine_id not in busy and slot.engine_id not in self._pinned)
        ]
        empty = [number for _, number in free if self._slots[number].engine_id is None]
        return empty[0] if empty else min(free)[1] if free else None

    def longest_held(self, held_before: float) -> EngineId | None:
        """The unpinned version that came in first, if that was not after `held_before`."""
        held = [
            (slot.since, slot.engine_id)
            for slot in self._slots
            if slot.engine_id is not None and slot.engine_id not in self._pinned
        ]
        since, engine_id = min(held, default=(0.0, None))
        return engine_id if engine_id is not None and since <= held_before else None

    def put(self, number: int, engine_id: EngineId, now: float) -> None:
        """It comes in at `now`; what was there is out."""
        slot = self._slots[number]
        if slot.engine_id is not None:
            self.evictions += 1
            del self._number[slot.engine_id]
        self._uses += 1
        self._slots[number] = _Slot(engine_id, now, self._uses)
        self._number[engine_id] = number
        self.loads += 1

    def remove(self, engine_id: EngineId) -> int | None:
        """It is given up, its pin with it; returns the slot that is empty now."""
        self._pinned.discard(engine_id)
        number = self._number.pop(engine_id, None)
        if number is not None:
            self._slots[number] = _Slot()
        return number

    def pin(self, engine_id: EngineId) -> None:
        """Never put it out from now on. Raises `EngineRejected` if no slot would stay unpinned."""
        if engine_id not in self._pinned and len(self._pinned) >= len(self._slots) - 1:
            raise EngineRejected(
                f"{len(self._pinned)} of {len(self._slots)} slots are pinned and one must stay "
                f"free, so engine id {engine_id} cannot be pinned; unpin another first."
            )
        self._pinned.add(engine_id)

    def unpin(self, engine_id: EngineId) -> None:
        """It may be put out again; nothing happens if it was not pinned."""
        self._pinned.discard(engine_id)

    def homeless(self) -> list[EngineId]:
        """Pinned versions that are not in a slot yet."""
        return sorted(self._pinned - self._number.keys())
