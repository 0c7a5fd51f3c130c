"""From a listing to complete files: parts side by side, each tried again for as long as that may
help, every byte counted."""

import hashlib
from collections import deque
from collections.abc import Callable
from pathlib import Path

import anyio
from anyio import to_thread

from lorry.artifacts.remote.site import Interrupted, Listing, RemoteFile, Site
from lorry.artifacts.remote.staging import PART_BYTES, Bench, Part, parts
from lorry.errors import AdapterInvalid, SourceUnreachable

WORKERS = 8
"""Parts fetched at once, so at most 64 MiB in memory; object stores give one connection a tenth of
what they have."""

TRIES = 4
FIRST_PAUSE_S = 0.25

Count = Callable[[int], None]
"""Told how many more bytes are there."""


class Download:
    """One download into one folder."""

    def __init__(self, site: Site, listing: Listing, bench: Bench, bytes_max: int) -> None:
        """`bytes_max` holds for files whose size nobody said, too."""
        self._site = site
        self._listing = listing
        self._bench = bench
        self._bytes_max = self._left = bytes_max

    async def run(self, count: Count) -> None:
        """Fetch what is not there yet. Raises `SourceUnreachable`, `AdapterInvalid` and what the
        site raises; parts that came stay in the folder."""
        whole = [file for file in self._listing.files if not file.ranges or file.size is None]
        ranged = [file for file in self._listing.files if file not in whole]
        todo = deque(
            part for file in ranged for part in parts(file) if part not in self._bench.done
        )
        by_name = {file.name: file for file in ranged}

        async def work() -> None:
            while todo:
                part = todo.popleft()
                data = await self._part(by_name[part[0]], part)
                self._bench.write(part, data)
                count(len(data))

        async with anyio.create_task_group() as group:
            for _ in range(min(WORKERS, len(todo))):
                group.start_soon(work)
        for file in ranged:
            if not file.size:
                self._bench.place(file.name, 0, b"")
        for file in whole:
            await self._whole(file, count)
        await to_thread.run_sync(self._verify)
        for name in self._listing.telling:
            self._bench.place(name, 0, b"")

    def _verify(self) -> None:
        """In a worker thread."""
        for file in self._listing.files:
            verify(self._bench.path, file, self._listing.source)

    async def _part(self, file: RemoteFile, part: Part) -> bytes:
        reason = ""
        for pause in pauses():
            await anyio.sleep(pause)
            try:
                return await self._site.read(file, part[1], part[2])
            except Interrupted as error:
                reason = str(error)
        raise unreachable(self._listing.source, reason)

    async def _whole(self, file: RemoteFile, count: Count) -> None:
        """One that comes in one piece only, from its beginning each time."""
        reason = ""
        for pause in pauses():
            await anyio.sleep(pause)
            try:
                await self._stream(file, count)
            except Interrupted as error:
                reason = str(error)
            else:
                return
        raise unreachable(self._listing.source, reason)

    async def _stream(self, file: RemoteFile, count: Count) -> None:
        place, room = 0, self._left if file.size is None else file.size
        (self._bench.path / file.name).unlink(missing_ok=True)
        self._bench.place(file.name, 0, b"")
        async for piece in self._site.stream(file):
            if place + len(piece) > room and file.size is None:
                raise too_large(self._listing.source, self._bytes_max)
            self._bench.place(file.name, place, piece[: room - place])
            place += len(piece)
            if place > room:
                break
        if file.size is not None and place != file.size:
            raise Interrupted(f"{file.name} has {file.size} bytes, and {place} came")
        self._left -= place
        count(place)


def pauses() -> tuple[float, ...]:
    """Before each try, in seconds: none, then doubling."""
    return (0.0, *(FIRST_PAUSE_S * 2**number for number in range(TRIES - 1)))


def unreachable(source: str, reason: str) -> SourceUnreachable:
    """The answer when trying again did not help."""
    return SourceUnreachable(f"'{source}' could not be fetched: {reason}.", param="source")


def too_large(source: str, bytes_max: int) -> AdapterInvalid:
    """The answer to more bytes than an adapter may have."""
    return AdapterInvalid(
        f"'{source}' has more than {bytes_max} bytes, expected at most that many; raise "
        "--max-source-bytes if it is an adapter.",
        param="source",
    )


def verify(folder: Path, file: RemoteFile, source: str) -> None:
    """What the other side vouched for is what came. Raises `AdapterInvalid`."""
    if file.sha256 is None:
        return
    digest = hashlib.sha256()
    with (folder / file.name).open("rb") as opened:
        while piece := opened.read(PART_BYTES):
            digest.update(piece)
    if digest.hexdigest() != file.sha256:
        raise AdapterInvalid(
            f"{file.name} of '{source}' has the SHA-256 {digest.hexdigest()}, expected "
            f"{file.sha256} as its host says; fetch it again, or upload it there again."
        )
