"""Sources of every kind as folders on this disk.

A local source is its own folder. A remote one is fetched into a folder of its own, which lives
until the snapshot has been made or the adapter refused. Fetching runs in an event loop of its own
in the caller's thread: when it is cancelled or out of time, its connections close and it is over,
whatever the other side does."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio import to_thread

from lorry.artifacts.adapter_config import shown
from lorry.artifacts.remote.buckets import BucketSite, require_extra
from lorry.artifacts.remote.download import Download, pauses, too_large, unreachable
from lorry.artifacts.remote.hub import HubSite
from lorry.artifacts.remote.policy import SourcePolicy
from lorry.artifacts.remote.site import Interrupted, Listing, Site
from lorry.artifacts.remote.staging import Bench, Staging
from lorry.artifacts.remote.uri import RemoteUri, is_remote, parse_uri
from lorry.artifacts.remote.web import WebSite
from lorry.artifacts.sources import resolve_local
from lorry.errors import (
    AdapterInvalid,
    Forbidden,
    LorryError,
    RequestAborted,
    SourceUnreachable,
    StorageFailed,
)

log = logging.getLogger(__name__)

DOWNLOADS = ".downloads"
"""In the disk cache's folder: where remote sources are fetched to."""

WATCH_S = 0.1
"""Between two looks at whether the fetch is still wanted."""

ATTEMPTS = 2
"""A source that changed during two fetches in a row is being written; its owner must wait."""

Report = Callable[[int, int], None]
"""Told (bytes that are there, bytes in all); 0 in all while nobody knows."""


@dataclass(slots=True)
class Found:
    """A folder that may be judged and copied."""

    folder: Path
    source: str
    """As it is kept and shown: pinned to a commit where there are commits, without credentials."""
    roots: tuple[Path, ...] = ()
    """The folder, and every link in it, must lead below one of these; none: anywhere."""
    remote: bool = False
    _close: Callable[[], None] = field(default=lambda: None)

    @property
    def label(self) -> str | None:
        """What messages call the folder, when its own path means nothing to anybody."""
        return self.source if self.remote else None

    def close(self) -> None:
        """The folder is not needed any more. Safe to call twice."""
        self._close()


class Fetcher:
    """Finds sources. Its methods may be called from any thread; they block."""

    def __init__(self, policy: SourcePolicy, staging: Path, roots: Sequence[Path] = ()) -> None:
        """`staging` is the folder for downloads; `roots` limit local sources."""
        self.policy = policy
        self._roots = tuple(roots)
        self._staging = Staging(staging, policy.download_bytes_max)

    def require(self, source: str, name: str | None = None) -> None:
        """Refuse what can be refused without a connection, for the adapter `name` if there is one
        already. Never blocks. Raises `RequestInvalid`,
        `Forbidden` or `SourceUnsupported` for a remote source; says nothing of a local one."""
        if is_remote(source):
            uri = parse_uri(source)
            try:
                self.policy.check(uri)
            except Forbidden as error:
                if name is None:
                    raise
                message = f"'{name}' cannot be fetched. {error.message}"
                raise Forbidden(message, param=error.param) from None
            require_extra(uri.scheme)

    def remove_abandoned(self) -> None:
        """Remove what downloads of killed processes left and nobody can go on from. Blocks."""
        try:
            self._staging.remove_abandoned()
        except OSError as error:
            log.warning("what earlier downloads left stays on the disk: %s", error)

    def find(
        self,
        name: str,
        source: str,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        report: Report = lambda done, total: None,
    ) -> Found:
        """The folder that `source` means, for the adapter `name`; close it when done.

        Raises what `resolve_local` does, and for remote sources `SourceDenied`,
        `SourceUnreachable`, `SourceUnsupported`, `CapacityExhausted`, `StorageFailed`, or
        `RequestAborted` once `cancelled`."""
        if not is_remote(source):
            return Found(resolve_local(source, self._roots), source, self._roots)
        self.require(source)
        fetch = _Fetch(name, parse_uri(source), self.policy, self._staging, cancelled, report)
        bench, listing = fetch.run()
        close = threading.Lock()

        def end() -> None:
            if close.acquire(blocking=False):
                self._staging.close(bench, keep=False)

        return Found(bench.path, listing.source, (), True, end)


@dataclass(slots=True)
class _Fetch:
    """One fetch of one remote source."""

    name: str
    uri: RemoteUri
    policy: SourcePolicy
    staging: Staging
    cancelled: Callable[[], bool]
    report: Report
    total: int = 0
    done: int = 0

    def run(self) -> tuple[Bench, Listing]:
        """Blocks until it is over, however that comes about."""
        try:
            return anyio.run(self._run, backend="asyncio")
        except BaseExceptionGroup as group:
            raise _first(group) from None
        except OSError as error:
            raise StorageFailed(
                f"'{self.uri}' cannot be kept on the disk: {error.strerror or error}; free space, "
                "or choose another folder for the state."
            ) from error

    async def _run(self) -> tuple[Bench, Listing]:
        """The fetch beside a watcher that ends it."""
        made: list[tuple[Bench, Listing]] = []
        with anyio.move_on_after(self.policy.fetch_timeout_s) as deadline:
            async with anyio.create_task_group() as group:

                async def fetch() -> None:
                    made.append(await self._fetch())
                    group.cancel_scope.cancel()

                group.start_soon(fetch)
                while not self.cancelled():  # noqa: ASYNC110 - it is set by another thread
                    await anyio.sleep(WATCH_S)
                group.cancel_scope.cancel()
        if made:
            return made[0]
        if deadline.cancelled_caught:
            seconds = self.policy.fetch_timeout_s
            raise SourceUnreachable(
                f"'{self.uri}' was not fetched within {seconds:g} s ({self.done} bytes came).",
                param="source",
            )
        raise RequestAborted(
            f"The load of adapter {shown(self.name)} was cancelled; nothing has changed."
        )

    async def _fetch(self) -> tuple[Bench, Listing]:
        site = self._site()
        try:
            for _ in range(ATTEMPTS):
                listing = await self._listing(site)
                bench = await self._download(site, listing)
                try:
                    if listing.fixed or (await self._listing(site)).files == listing.files:
                        return bench, listing
                except BaseException:
                    self.staging.close(bench, keep=listing.resumable)
                    raise
                self.staging.close(bench, keep=False)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(1.0):
                await site.aclose()
        raise AdapterInvalid(
            f"Adapter {shown(self.name)} cannot be served: a file of '{self.uri}' changed while "
            "being fetched; load it once the writer has finished."
        )

    def _site(self) -> Site:
        if self.uri.scheme == "https":
            return WebSite(self.uri, self.policy)
        if self.uri.scheme == "hf":
            return HubSite(self.uri, self.policy)
        return BucketSite(self.uri)

    async def _listing(self, site: Site) -> Listing:
        reason = ""
        for pause in pauses():
            await anyio.sleep(pause)
            try:
                listing = await site.listing()
            except BaseExceptionGroup as group:
                first = _first(group)
                if not isinstance(first, Interrupted):
                    raise first from None
                reason = str(first)
            except Interrupted as error:
                reason = str(error)
            else:
                if (listing.bytes or 0) > self.policy.source_bytes_max:
                    raise too_large(listing.source, self.policy.source_bytes_max)
                return listing
        raise unreachable(str(self.uri), reason)

    async def _download(self, site: Site, listing: Listing) -> Bench:
        """Raises with the parts that came kept, when they can be told again."""
        limit = self.policy.source_bytes_max
        self.total = listing.bytes or 0
        bench = self.staging.open(listing, limit if listing.bytes is None else listing.bytes)
        try:
            if listing.resumable:
                self.done = await to_thread.run_sync(bench.resume, listing.files)
            self._count(0)
            await Download(site, listing, bench, limit).run(self._count)
        except AdapterInvalid:
            self.staging.close(bench, keep=False)  # its parts would be as wrong the next time
            raise
        except BaseException:
            self.staging.close(bench, keep=listing.resumable)
            raise
        return bench

    def _count(self, more: int) -> None:
        self.done += more
        self.report(self.done, self.total)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that a group stands for: one of ours before any other."""
    flat: list[BaseException] = []
    waiting: list[BaseException] = [group]
    while waiting:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting += error.exceptions
        else:
            flat.append(error)
    ours = (error for error in flat if isinstance(error, LorryError))
    passing = (error for error in flat if isinstance(error, Interrupted))
    return next(ours, None) or next(passing, None) or flat[0]
