"""Time, handed in: the only place that reads a clock."""

import time
from typing import Protocol

import anyio


class Clock(Protocol):
    """What the shell needs of time. Milliseconds, as integers, so that the core stays exact."""

    def now_ms(self) -> int:
        """Milliseconds on a clock that never goes back."""

    def wall_s(self) -> float:
        """Seconds since 1970, for people and for `created` fields; may jump."""

    async def sleep_until(self, due_ms: int) -> None:
        """Return at or after `due_ms` of `now_ms`."""


class SystemClock:
    """The machine's own clocks."""

    def now_ms(self) -> int:
        """Milliseconds of the event loop, so that virtual time reaches it in simulations."""
        return int(anyio.current_time() * 1000)

    def wall_s(self) -> float:
        """Seconds since 1970."""
        return time.time()

    async def sleep_until(self, due_ms: int) -> None:
        """Sleep on the event loop's clock."""
        await anyio.sleep_until(due_ms / 1000)
