"""From a stranger's files, as they arrive, to a folder that may be judged: names, number, size and
compression are limited, and what no judge looks at is not kept.

Three rules:

1. Everything is written into one fresh folder that nobody else knows. Names are taken apart and
   checked, nothing but folders and regular files is ever made there, so no name can lead outside.
2. Every byte counts, also of files that are not kept: before it is written, not after.
3. Whatever goes wrong, the folder is removed by who made it.
"""

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from lorry.artifacts.adapter_config import CONFIG_FILE, shown
from lorry.artifacts.tar import TarReader
from lorry.errors import BodyTooLarge, RequestInvalid

FILES_MAX = 256
"""A checkpoint of a trainer has about 20, one in many shards some dozens more."""
NAME_CHARACTERS_MAX = 255
DEPTH_MAX = 8
RATIO_MAX = 100
"""Weights hardly shrink, JSON by 20; zeros shrink by 1,000."""
RATIO_FREE_BYTES = 4 << 20
"""Unpacked before the ratio counts: small files of configs may shrink well."""

_KEPT = re.compile(
    r"adapter_config\.json|added_tokens\.json|tokenizer_config\.json|chat_template\.jinja"
    r"|.*\.safetensors|.*\.safetensors\.index\.json"
)
"""What the judge reads. Of the others only the name is kept, by which it tells a pickle."""


class Unpacked:
    """A folder that fills; a `lorry.artifacts.tar.Sink`."""

    def __init__(self, root: Path, bytes_max: int, hold: Callable[[int], None]) -> None:
        """`root` is empty. `hold` is told of bytes before they are written, and may raise."""
        self._root = root
        self._bytes_max = bytes_max
        self._hold = hold
        self._names: set[str] = set()
        self._file: BinaryIO | None = None
        self._name = ""
        self.bytes = 0

    def begin(self, name: str, size: int | None) -> None:
        """Raises `RequestInvalid` for a name that cannot be, `BodyTooLarge` for too much."""
        path = safe_path(name)
        if str(path) in self._names:
            raise RequestInvalid(f"{shown(name)} is there twice; send it once.")
        if len(self._names) >= FILES_MAX:
            raise RequestInvalid(
                f"The upload has more than {FILES_MAX} files; send only those of the adapter."
            )
        self._names.add(str(path))
        self._name = name
        self._check(self.bytes + (size or 0))
        place = self._root / path
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            file = place.open("xb")
        except (FileExistsError, NotADirectoryError):
            raise RequestInvalid(
                f"{shown(name)} is both a file and a folder; send one of them."
            ) from None
        if _KEPT.fullmatch(path.name):
            self._file = file
        else:
            file.close()

    def data(self, piece: bytes) -> None:
        """Raises `BodyTooLarge`."""
        self._check(self.bytes + len(piece))
        self.bytes += len(piece)
        if self._file is not None:
            self._hold(len(piece))
            self._file.write(piece)

    def end(self) -> None:
        """The file is whole."""
        self.close()

    def close(self) -> None:
        """Close what is open. Safe to call twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def folder(self) -> Path:
        """Where the adapter lies: the folder of its config. Raises `RequestInvalid` when several
        have one, or nothing came."""
        if not self._names:
            raise RequestInvalid("The upload has no files; send the adapter's folder.")
        found = sorted(name for name in self._names if Path(name).name == CONFIG_FILE)
        places = sorted({len(Path(name).parts) for name in found})
        nearest = [name for name in found if len(Path(name).parts) == places[0]]
        if len(nearest) > 1:
            raise RequestInvalid(
                f"The upload has {len(nearest)} adapters ({', '.join(map(shown, nearest[:3]))}); "
                "send one at a time."
            )
        return (self._root / nearest[0]).parent if nearest else self._root

    def _check(self, size: int) -> None:
        if size > self._bytes_max:
            raise BodyTooLarge(
                f"The upload has {size} bytes or more when unpacked, at {shown(self._name)}; the "
                f"server takes {self._bytes_max} at most (--max-upload-bytes)."
            )


def safe_path(name: str) -> Path:
    """The relative path of a file in an upload. Raises `RequestInvalid` for one that leads
    anywhere else."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    fault = ""
    if name.startswith("/") or "\\" in name or re.match("[A-Za-z]:", name):
        fault = "is an absolute or foreign path"
    elif ".." in parts:
        fault = "leads out of its folder"
    elif not name.isprintable():
        fault = "holds a control character"
    elif not parts or name.endswith("/"):
        fault = "names no file"
    elif len(parts) > DEPTH_MAX or any(len(part.encode()) > NAME_CHARACTERS_MAX for part in parts):
        fault = f"is too long or deeper than {DEPTH_MAX} folders"
    if fault:
        raise RequestInvalid(
            f"The file name {shown(name)} {fault}; send the plain names of the adapter's files."
        )
    return Path(*parts)


class GzipReader:
    """Unpacks a gzip stream into a tar reader, and stops at what expands like a bomb."""

    def __init__(self, tar: TarReader) -> None:
        """Nothing has come."""
        self._tar = tar
        self._engine = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._in = self._out = 0

    def feed(self, data: bytes) -> None:
        """The next bytes. Raises `RequestInvalid`, and what the tar reader raises."""
        self._in += len(data)
        while data:
            try:
                piece = self._engine.decompress(data, 1 << 20)
            except zlib.error as error:
                raise RequestInvalid(
                    f"The body is not a gzip archive, or it is damaged ({error}); pack it again."
                ) from None
            self._out += len(piece)
            if self._out > max(RATIO_FREE_BYTES, self._in * RATIO_MAX):
                raise RequestInvalid(
                    f"The archive expands more than {RATIO_MAX} times ({self._in} bytes to "
                    f"{self._out} so far); send it as a plain tar if that is meant."
                )
            self._tar.feed(piece)
            data = self._engine.unconsumed_tail
            if self._engine.eof:
                data = self._engine.unused_data
                self._engine = zlib.decompressobj(zlib.MAX_WBITS | 16)
                if not data.strip(b"\0"):
                    return  # padding of a tape

    def close(self) -> None:
        """No more comes. Raises `RequestInvalid` when something is missing."""
        self._tar.feed(self._engine.flush())
        self._tar.close()
