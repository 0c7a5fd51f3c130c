"""From a source to a snapshot, in threads: fetching from elsewhere and reading the disk each have
their own, so that no slow network holds up a load from the disk (promise 5)."""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
from anyio import to_thread

from lorry.artifacts.cache import DiskCache
from lorry.artifacts.digests import Digest
from lorry.artifacts.remote.fetcher import Fetcher, Found
from lorry.artifacts.remote.uri import is_remote
from lorry.artifacts.snapshot import Snapshot
from lorry.engine import EngineCapabilities
from lorry.ids import OperationId
from lorry.lifecycle import commands as cm

FETCHES_MAX = 4
"""Snapshots made at once; more would share one disk and finish no sooner."""

DOWNLOADS_MAX = 16
"""Remote sources fetched at once. They wait for the network, each for --load-timeout at most."""

DOWNLOADS_PER_HOST_MAX = 4
"""Of one scheme and host, so that one place that hangs leaves room for the others."""

MIB = 1024**2


@dataclass(slots=True)
class Fetching:
    """One fetch under way: how far it is, and whether it is still wanted."""

    operation: OperationId | None = None
    """Of the command that asked for it."""
    stop: threading.Event = field(default_factory=threading.Event)
    done: int = 0
    total: int = 0

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self.stop.set()

    def report(self, done: int, total: int) -> None:
        """Bytes that are there, and in all."""
        self.done, self.total = done, total

    def __str__(self) -> str:
        """For people: behind the word "fetching"."""
        return f"({self.done / MIB:.1f} of {self.total / MIB:.1f} MiB)"


@dataclass(frozen=True, slots=True)
class Fetched:
    """A snapshot, and where the same can be fetched again."""

    snapshot: Snapshot
    source: str


class Sources:
    """Makes snapshots for one supervisor."""

    def __init__(self, fetcher: Fetcher, cache: DiskCache) -> None:
        """Both are used from worker threads."""
        self._fetcher = fetcher
        self._cache = cache
        self.disk_threads = anyio.CapacityLimiter(FETCHES_MAX)
        self._downloads = anyio.CapacityLimiter(DOWNLOADS_MAX)
        self._hosts: dict[str, anyio.CapacityLimiter] = {}

    async def snapshot(
        self, command: cm.Fetch, can: EngineCapabilities, fetching: Fetching
    ) -> Fetched:
        """Find the source, judge it, keep it. Ends early once `fetching` is cancelled, and so does
        the thread when this task is."""
        async with stopping(fetching):
            found = await self._find(command, fetching)
            try:
                snapshot = await to_thread.run_sync(
                    self._keep, command, can, found, fetching, limiter=self.disk_threads
                )
            finally:
                with anyio.CancelScope(shield=True):
                    await to_thread.run_sync(found.close)
        return Fetched(snapshot, found.source)

    async def _find(self, command: cm.Fetch, fetching: Fetching) -> Found:
        def find() -> Found:
            return self._fetcher.find(
                command.name,
                command.source,
                cancelled=fetching.stop.is_set,
                report=fetching.report,
            )

        if not is_remote(command.source):
            return await to_thread.run_sync(find, limiter=self.disk_threads)
        async with self._turn(command.source):
            return await to_thread.run_sync(find, limiter=self._downloads)

    @asynccontextmanager
    async def _turn(self, source: str) -> AsyncIterator[None]:
        """A place among the fetches from the source's host."""
        host = "/".join(source.lower().split("/", 3)[:3])
        limiter = self._hosts.setdefault(host, anyio.CapacityLimiter(DOWNLOADS_PER_HOST_MAX))
        try:
            async with limiter:
                yield
        finally:
            if not limiter.borrowed_tokens and not limiter.statistics().tasks_waiting:
                self._hosts.pop(host, None)

    def _keep(
        self, command: cm.Fetch, can: EngineCapabilities, found: Found, fetching: Fetching
    ) -> Snapshot:
        """In a worker thread."""
        digest = Digest.parse(command.digest) if command.digest is not None else None
        if digest is not None:
            digest.check_folder(found.source, found.folder, found.roots)
        snapshot = self._cache.snapshot(
            command.name,
            found.folder,
            can.base,
            can.max_lora_rank,
            cancelled=fetching.stop.is_set,
            roots=found.roots,
            label=found.label,
        )
        if digest is not None:
            try:
                digest.check_version(found.source, snapshot.manifest.version)
            except BaseException:
                self._cache.release(snapshot.manifest.version)
                raise
        return snapshot


@asynccontextmanager
async def stopping(fetching: Fetching) -> AsyncIterator[None]:
    """Cancels the fetch when the task around it is cancelled: threads do not notice by themselves.

    The watcher is told at once, while the wait for a thread is told when the thread is done."""

    async def watch(cancel: Callable[[], None]) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cancel()

    failure: Exception | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(watch, fetching.cancel)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below, where no group wraps it
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
