"""Bodies of uploads, taken in as they arrive: within the limits, and with nothing left when they
end early."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from anyio import to_thread
from starlette.requests import ClientDisconnect, Request

from lorry.artifacts.adapter_config import CONFIG_FILE, shown
from lorry.artifacts.cache import DiskCache
from lorry.artifacts.memory import MemoryFile, MemoryFolder
from lorry.artifacts.parcels import FolderParcel, WeightsParcel
from lorry.artifacts.reading import TEMPLATE_FILE, WEIGHTS_FILE
from lorry.artifacts.tar import TarReader
from lorry.artifacts.tensors import LENGTH_BYTES, HeaderInvalid, header_length
from lorry.artifacts.unpacking import GzipReader, Unpacked
from lorry.errors import (
    AdapterInvalid,
    BodyTooLarge,
    CapacityExhausted,
    RequestInvalid,
    StorageFailed,
)
from lorry.server.multipart import FormReader, Reader

SMALL_BYTES_MAX = 2 << 20
"""Of a config or a chat template, as for those in folders."""

BATCH_BYTES = 1 << 20
"""Collected before a thread is used to write them: a thread for each piece of the network would
cost more than the writing."""

HOLD_BYTES = 16 << 20
"""The disk cache is asked for room in steps of this."""

FORM = "multipart/form-data"
RAW = ("application/octet-stream", "application/vnd.safetensors", "application/x-safetensors")
TAR = ("application/x-tar", "application/tar")
GZIP = ("application/gzip", "application/x-gzip", "application/x-gtar", "application/x-tgz")


@dataclass(slots=True)
class UploadRoom:
    """Memory that all uploads under way take together."""

    used: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Some uploads are unpacked in threads."""

    def take(self, more: int, limit: int) -> None:
        """Raises `CapacityExhausted` when the others leave too little."""
        with self.lock:
            if self.used + more > limit:
                raise CapacityExhausted(
                    f"Uploads under way take {self.used} of {limit} bytes of memory "
                    f"(--max-upload-bytes), so there is no room for {more} more now."
                )
            self.used += more

    def give_back(self, held: int) -> None:
        """An upload is over."""
        with self.lock:
            self.used -= held


class Held:
    """One upload's part of the room."""

    def __init__(self, room: UploadRoom, limit: int) -> None:
        """Nothing yet."""
        self._room = room
        self._limit = limit
        self.bytes = 0

    def grow_to(self, size: int) -> None:
        """Have at least so much. Raises `BodyTooLarge` or `CapacityExhausted`."""
        if size > self._limit:
            raise BodyTooLarge(
                f"The upload has {size} bytes or more; the server takes {self._limit} at most "
                "(--max-upload-bytes)."
            )
        if size > self.bytes:
            self._room.take(size - self.bytes, self._limit)
            self.bytes = size

    def release(self) -> None:
        """Give it back. Safe to call twice."""
        self._room.give_back(self.bytes)
        self.bytes = 0


class Weights:
    """The parts of an adapter in memory; a `lorry.artifacts.tar.Sink`."""

    NAMES = (CONFIG_FILE, WEIGHTS_FILE, TEMPLATE_FILE)

    def __init__(self, folder: MemoryFolder, held: Held) -> None:
        """`folder` is empty; `held` grows with it."""
        self._folder = folder
        self._held = held
        self._file: MemoryFile | None = None

    def begin(self, name: str, size: int | None) -> None:
        """Raises `RequestInvalid` for a part that means nothing here."""
        last = PurePosixPath(name).name
        if last not in self.NAMES:
            raise RequestInvalid(
                f"The part {shown(name)} is none of {', '.join(self.NAMES)}; name the parts so, "
                "and leave others out."
            )
        self._file = self._folder.create(last)

    def data(self, piece: bytes) -> None:
        """Raises `BodyTooLarge`, `RequestInvalid` or `CapacityExhausted`."""
        assert self._file is not None
        if self._file.name != WEIGHTS_FILE and self._file.size + len(piece) > SMALL_BYTES_MAX:
            raise RequestInvalid(
                f"{self._file.name} has more than {SMALL_BYTES_MAX} bytes; shorten it."
            )
        self._held.grow_to(self._folder.size + len(piece))
        self._file.write(piece)

    def end(self) -> None:
        """The part is whole."""


async def receive_weights(
    request: Request, adapter: str, room: UploadRoom, limit: int, *, durable: bool
) -> WeightsParcel:
    """Weights and config in memory. Raises what is wrong with the body; then nothing is left."""
    held = Held(room, limit)
    folder = MemoryFolder("the request")
    try:
        held.grow_to(_announced(request))
        kind = _content_type(request)
        sink = Weights(folder, held)
        if kind == FORM:
            await _pour(request, FormReader(request.headers["content-type"], sink))
        elif kind in RAW:
            await _pour(request, _Whole(sink))
            _config_of_metadata(adapter, folder)
        else:
            raise _wrong_type(kind, (FORM, RAW[0]), "weights")
    except BaseException:
        folder.close()
        held.release()
        raise
    return WeightsParcel(folder, durable=durable, on_close=held.release)


class _Whole:
    """A body that is one file; implements `Reader`."""

    def __init__(self, sink: Weights) -> None:
        sink.begin(WEIGHTS_FILE, None)
        self._sink = sink

    def feed(self, data: bytes) -> None:
        """The next bytes."""
        self._sink.data(data)

    def close(self) -> None:
        """No more comes."""
        self._sink.end()


def _config_of_metadata(adapter: str, folder: MemoryFolder) -> None:
    """The config of a body that is one safetensors file lies in the metadata of its header."""
    file = folder.open(WEIGHTS_FILE)
    assert file is not None
    try:
        length = header_length(WEIGHTS_FILE, file.read(0, LENGTH_BYTES), file.size)
        header: Any = json.loads(file.read(LENGTH_BYTES, length))
        metadata = header.get("__metadata__") if isinstance(header, dict) else None
    except HeaderInvalid as error:
        raise AdapterInvalid(f"Adapter {shown(adapter)} cannot be served: {error}") from error
    except (ValueError, RecursionError):
        metadata = None
    config = metadata.get(CONFIG_FILE) if isinstance(metadata, dict) else None
    if not isinstance(config, str):
        raise RequestInvalid(
            f"The body's safetensors header has no {CONFIG_FILE!r} in its __metadata__; save the "
            f"tensors with metadata={{{CONFIG_FILE!r}: json.dumps(config)}}, or send {FORM}.",
        )
    folder.create(CONFIG_FILE).write(config.encode("utf-8", "replace"))


async def receive_folder(
    request: Request, adapter: str, cache: DiskCache, limit: int
) -> FolderParcel:
    """Files in a temporary folder beside the disk cache. Raises what is wrong with the body; then
    nothing is left."""
    bench = await to_thread.run_sync(cache.workbench)
    held = _DiskRoom(adapter, cache)
    unpacked = Unpacked(bench.path, limit, held.grow)

    try:
        reader = _files_reader(request, unpacked)
        await _pour(request, reader, in_thread=True)
        unpacked.close()
        return FolderParcel(bench, unpacked.folder(), held.release)
    except BaseException:
        unpacked.close()
        bench.close()
        held.release()
        raise


class _DiskRoom:
    """An upload's part of the disk cache's limit."""

    def __init__(self, adapter: str, cache: DiskCache) -> None:
        self._adapter = adapter
        self._cache = cache
        self._held = self._used = 0

    def grow(self, more: int) -> None:
        self._used += more
        if self._used > self._held:
            step = max(HOLD_BYTES, self._used - self._held)
            self._cache.hold(self._adapter, step)
            self._held += step

    def release(self) -> None:
        self._cache.give_back(self._held)
        self._held = 0


def _files_reader(request: Request, unpacked: Unpacked) -> Reader:
    kind = _content_type(request)
    if kind == FORM:
        return FormReader(request.headers["content-type"], unpacked)
    if kind in TAR:
        return TarReader(unpacked)
    if kind in GZIP:
        return GzipReader(TarReader(unpacked))
    raise _wrong_type(kind, (FORM, TAR[0], GZIP[0]), "files")


def _wrong_type(kind: str, wanted: tuple[str, ...], what: str) -> RequestInvalid:
    return RequestInvalid(
        f"Content-Type is {kind or 'missing'}; {what} are sent as {' or '.join(wanted)}. (An "
        f"adapter whose own name ends in /{what} is loaded with POST /v1/load_lora_adapter.)",
        param="Content-Type",
    )


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _announced(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() else 0


async def _pour(request: Request, reader: Reader, *, in_thread: bool = False) -> None:
    """The body into the reader, piece by piece. A client that leaves is an error like any other."""

    received, batch = 0, bytearray()
    try:
        async for piece in request.stream():
            received += len(piece)
            if not in_thread:
                reader.feed(piece)
                continue
            batch += piece
            if len(batch) >= BATCH_BYTES:
                await to_thread.run_sync(_on_disk, reader.feed, bytes(batch))
                batch.clear()
    except ClientDisconnect:
        raise RequestInvalid(
            f"The connection was closed after {received} bytes of the body, so nothing was kept; "
            "send it again."
        ) from None
    if not received:
        raise RequestInvalid("The body is empty; send the adapter in it.")
    if batch:
        await to_thread.run_sync(_on_disk, reader.feed, bytes(batch))
    reader.close()


def _on_disk(feed: Callable[[bytes], None], data: bytes) -> None:
    """The file system's errors as ours."""
    try:
        feed(data)
    except OSError as error:
        raise StorageFailed(
            f"The upload could not be written to the disk cache ({error.strerror}); free space "
            "there."
        ) from error
