"""What surrounds the server: threads that take virtual time, a disk and a store that fail, a clock
that jumps, and the adapters' folders.

Threads are outside of virtual time, so none is started: a stand-in for `anyio.to_thread.run_sync`
waits a drawn time, runs the function where it is, and waits again. It keeps what callers rely on:
the limiter, no end by cancellation unless asked for, and a thread given up goes on by itself.
"""

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import anyio
import anyio.to_thread
import trio

from lorry.artifacts.cache import judged
from lorry.artifacts.snapshot import Manifest
from lorry.clock import SystemClock
from lorry.engines.fake import FakeEngine
from lorry.engines.fake_script import FakeSettings
from lorry.errors import StorageFailed
from lorry.ids import AdapterName, VersionId
from lorry.store.sql import SqlStore
from lorry.store.store import AdapterRecord, AuditEntry
from tests.fixtures.adapters import good_adapter
from tests.simulation.shell.options import Faults

if TYPE_CHECKING:
    from tests.simulation.shell.engine import Deed

CRAWL_S = 20.0
"""A crawling disk takes up to this long for one call: more than most deadlines here."""

MEMORY = Path("/dev/shm")
Say = Callable[[str], None]


class Killed(BaseException):
    """The process of this life is dead: nothing that it still does has an effect."""


class Machine:
    """One machine over all lives of the server: its files stay, its faults come and go."""

    def __init__(self, rng: random.Random, faults: Faults, folder: Path, say: Say) -> None:
        """`folder` is empty, and gone when the world ends."""
        self.rng = rng
        self.faults = faults
        self.folder = folder
        self.say = say
        self.dead = False
        """Between a kill and the next life: whatever runs on has no effect."""
        self.seen: set[str] = set()
        """Kinds of faults that happened."""
        self.plan: Callable[[str], Deed | None] | None = None
        """Instead of chance, for the calls of engines."""
        self._background: trio.Nursery | None = None
        self._writing = False

    def happens(self, fault: str) -> bool:
        """Whether a fault happens now."""
        chance: float = getattr(self.faults, fault)
        if not chance or self.rng.random() >= chance:
            return False
        self.seen.add(fault)
        return True

    @contextmanager
    def installed(self, background: trio.Nursery) -> Iterator[None]:
        """Threads and `fsync` are ours within."""
        self._background = background
        with ExitStack() as stack:
            stack.enter_context(patch.object(anyio.to_thread, "run_sync", self.run_sync))
            stack.enter_context(patch.object(os, "fsync", self._fsync))
            yield

    def slowness(self) -> float:
        """How long the disk takes once."""
        if self.happens("disk_crawls"):
            return self.rng.uniform(1, CRAWL_S)
        return self.rng.uniform(0, 0.5) if self.happens("disk_slow") else 0.0

    async def run_sync(
        self,
        func: Callable[..., Any],
        *args: object,
        abandon_on_cancel: bool = False,
        cancellable: bool | None = None,
        limiter: anyio.CapacityLimiter | None = None,
    ) -> Any:
        """As `anyio.to_thread.run_sync`."""
        await anyio.lowlevel.checkpoint()
        limiter = limiter or anyio.to_thread.current_default_thread_limiter()
        thread = _Thread(lambda: func(*args))
        await limiter.acquire_on_behalf_of(thread)
        if abandon_on_cancel or cancellable:
            assert self._background is not None
            self._background.start_soon(self._run, thread, limiter)
            await thread.ended.wait()
        else:
            with anyio.CancelScope(shield=True):
                await self._run(thread, limiter)
        if thread.error is not None:
            raise thread.error
        return thread.result

    async def _run(self, thread: "_Thread", limiter: anyio.CapacityLimiter) -> None:
        try:
            await self._pause()
            if self.dead:
                thread.error = OSError(errno.EIO, "the process is dead")
            else:
                thread.run()
            await self._pause()
        finally:
            thread.ended.set()
            limiter.release_on_behalf_of(thread)

    async def _pause(self) -> None:
        wait_s = 0.0 if self.dead else self.slowness()
        if wait_s:
            await anyio.sleep(wait_s)

    def _fsync(self, descriptor: int) -> None:
        if self.happens("disk_fails"):
            code = self.rng.choice((errno.ENOSPC, errno.EIO))
            raise OSError(code, os.strerror(code))

    def lose_snapshot(self) -> None:
        """Somebody deletes a folder of the cache."""
        shelves = sorted(p for p in (self.folder / "cache").glob("*") if len(p.name) == 64)
        if shelves:
            gone = self.rng.choice(shelves)
            shutil.rmtree(gone)
            self.say(f"snapshot {gone.name[:12]} vanishes")


class _Thread:
    """One call of the stand-in."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.ended = anyio.Event()
        self.result: object = None
        self.error: Exception | None = None
        self._work = work

    def run(self) -> None:
        try:
            self.result = self._work()
        except Exception as error:  # noqa: BLE001 - handed to the caller
            self.error = error


class ShakyStore:
    """The real store, whose disk fails before a change, or after it."""

    def __init__(self, machine: Machine) -> None:
        """Opens the machine's file."""
        self._machine = machine
        self._real = SqlStore(machine.folder / "state.db")
        self.open = True
        self._read = False
        self.writes: list[tuple[AdapterName, VersionId | None]] = []
        """What was really written in this life, the latest last."""

    def adapters(self) -> tuple[AdapterRecord, ...]:
        """As the real one, or not at all when the server starts."""
        if not self._read:
            self._may_fail("store_fails", "read")
        self._read = True
        return self._real.adapters()

    def put(self, record: AdapterRecord, audit: AuditEntry) -> None:
        """As the real one, or not, or so and an error all the same."""
        self._may_fail("store_fails", "written")
        self._real.put(record, audit)
        self._wrote(record.name, record.manifest.version)

    def remove(self, name: AdapterName, audit: AuditEntry) -> None:
        """Likewise."""
        self._may_fail("store_fails", "written")
        self._real.remove(name, audit)
        self._wrote(name, None)

    def manifest(self, version: VersionId) -> Manifest | None:
        """As the real one."""
        return self._real.manifest(version)

    def audit(self, limit: int = 100, name: AdapterName | None = None) -> tuple[AuditEntry, ...]:
        """As the real one."""
        return self._real.audit(limit, name)

    def close(self) -> None:
        """The machine's end closes it too."""
        self.open = False
        self._real.close()

    def _wrote(self, name: AdapterName, version: VersionId | None) -> None:
        self.writes.append((name, version))
        self._machine.say(f"store: {name} = {version and version[:12]}")
        self._may_fail("store_fails_done", "written")

    def _may_fail(self, fault: str, doing: str) -> None:
        if self._machine.happens(fault):
            self._machine.say(f"store: {fault}")
            raise StorageFailed(f"The state cannot be {doing}: disk I/O error.")


class CrookedClock(SystemClock):
    """Its wall clock jumps; the event loop's clock is the virtual one."""

    def __init__(self, machine: Machine) -> None:
        """Begins somewhere in 2027."""
        self._machine = machine
        self._offset_s = 1_800_000_000.0

    def wall_s(self) -> float:
        """Seconds since 1970, more or less."""
        if self._machine.happens("clock_jumps"):
            self._offset_s += self._machine.rng.uniform(-3e5, 3e5)
        return self._offset_s + anyio.current_time()


@cache
def adapters_folder() -> Path:
    """Adapters that all worlds of this process load: `good-N`, and three that are refused."""
    where = TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None, prefix="lorry-shell-")
    _KEPT.append(where)
    folder = Path(where.name)
    for number in range(GOOD):
        good_adapter(number, base=SHAPE, rank=1 + number % 2).write(folder / f"good-{number}")
    good_adapter(7, base=SHAPE, rank=1).write(folder / "bad-cut")
    weights = folder / "bad-cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    good_adapter(8, base=SHAPE, rank=128).write(folder / "bad-rank")
    (folder / "bad-empty").mkdir()
    return folder


_KEPT: list[TemporaryDirectory[str]] = []
"""Folders that live as long as the process."""

GOOD = 6
"""Adapters that can be loaded."""

SHAPE = FakeEngine(FakeSettings(layers=1, hidden_size=16, vocab_size=512)).capabilities().base
"""Of the base that the engines pretend to have; small, so that a snapshot takes a millisecond."""


@cache
def version_of(folder: str) -> VersionId:
    """What loading that folder gives."""
    return judged(folder, adapters_folder() / folder, SHAPE, 64).version
