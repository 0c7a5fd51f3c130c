"""Memory, file descriptors and threads of the server's processes, and whether they stay flat.

Each life of a process is judged by itself: the engine is killed on purpose and starts again. The
first part of a life is warm-up: caches and pools fill. Then the median of an early window is held
against that of the last one, so that a moment's peak says nothing and a leak cannot hide.
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil

from tests.fixtures.server_process import ServerProcess

INTERVAL_S = 1.0
LIFE_MIN_S = 100.0
"""Shorter lives are all warm-up."""
EARLY = (0.35, 0.55)
LAST = (0.8, 1.0)
"""Windows, as shares of a life."""
MIB = 1 << 20
RSS_GROWTH = 0.05
RSS_GROWTH_BYTES = 12 * MIB
"""Allowed together: an allocator's fragments, and what is kept within limits that the warm-up has
not reached: the rings of changes and operations, earlier versions of each name, and metrics of
names that were not asked for before. A leak of 2 KiB per request is more than that in 20
minutes."""
FDS_GROWTH = 6
"""A few connections and files open more or fewer at the moments of sampling."""
THREADS_GROWTH = 4
"""Worker threads come and go with the work."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment."""

    at_s: float
    rss: int
    fds: int
    threads: int


@dataclass(slots=True)
class Life:
    """A process from its start to its end."""

    what: str
    samples: list[Sample] = field(default_factory=list)

    def window(self, shares: tuple[float, float]) -> list[Sample]:
        """The samples of that part of it."""
        first, last = self.samples[0].at_s, self.samples[-1].at_s
        begin, end = (first + share * (last - first) for share in shares)
        return [sample for sample in self.samples if begin <= sample.at_s <= end]

    @property
    def seconds(self) -> float:
        """How long it was watched."""
        return self.samples[-1].at_s - self.samples[0].at_s if self.samples else 0.0

    def judge(self) -> tuple[list[str], str]:
        """What has grown too much, and all of it in words."""
        if self.seconds < LIFE_MIN_S:
            return [], f"{self.what}: {self.seconds:.0f} s, too short to judge"
        early, last = self.window(EARLY), self.window(LAST)
        grown, words = [], []
        for name, of, allowed in _MEASURES:
            before, after = _median(early, of), _median(last, of)
            unit, shown = (f"{name} {before:.0f}", f"{after:.0f}")
            if name == "RSS":
                unit, shown = (f"RSS {before / MIB:.1f} MiB", f"{after / MIB:.1f} MiB")
            words.append(f"{unit} -> {shown}")
            if after - before > allowed(before):
                grown.append(f"{self.what}: {unit} grew to {shown}")
        return grown, f"{self.what}, {self.seconds:.0f} s: {', '.join(words)}"


_MEASURES: tuple[tuple[str, Callable[[Sample], int], Callable[[float], float]], ...] = (
    ("RSS", lambda sample: sample.rss, lambda before: before * RSS_GROWTH + RSS_GROWTH_BYTES),
    ("descriptors", lambda sample: sample.fds, lambda before: FDS_GROWTH),
    ("threads", lambda sample: sample.threads, lambda before: THREADS_GROWTH),
)


def _median(samples: Sequence[Sample], of: Callable[[Sample], int]) -> float:
    return statistics.median(map(of, samples))


class Watch:
    """Samples a server and its engines for as long as `run` runs."""

    def __init__(self, server: ServerProcess) -> None:
        """Nothing is sampled yet."""
        self._server = server
        self.lives: dict[int, Life] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(INTERVAL_S)

    def sample(self) -> None:
        """Now. A process that has just gone, or not become what it will be, is left out."""
        for process in self._server.tree():
            with contextlib.suppress(psutil.Error):
                self._sample(process)

    def _sample(self, process: psutil.Process) -> None:
        with process.oneshot():
            words = process.cmdline()
            if process.pid == self._server.process.pid:
                what = "server"
            elif "lorry.engines.embedded.process" in words:
                what = f"engine {process.pid}"
            else:
                return
            rss, threads = process.memory_info().rss, process.num_threads()
        sample = Sample(time.monotonic(), rss, process.num_fds(), threads)
        self.lives.setdefault(process.pid, Life(what)).samples.append(sample)

    def judge(self) -> tuple[list[str], list[str]]:
        """What has grown, and a line for each life."""
        judged = [life.judge() for life in self.lives.values()]
        return [text for grown, _ in judged for text in grown], [line for _, line in judged]
