"""A tar archive read as it arrives, by anybody: pushed in pieces of any size, never as a whole.

Only what a folder of an adapter needs is understood: regular files, folders (which carry nothing),
and the two ways to write long names (pax and GNU). Everything else, above all links and devices, is
refused and not skipped, since whoever packed it meant something by it. Python's own `tarfile` reads
from a file and would hold a thread for each upload; and it reads headers of any length into memory.
"""

from typing import Protocol

from lorry.artifacts.adapter_config import shown
from lorry.errors import RequestInvalid

BLOCK_BYTES = 512
HEADER_BYTES_MAX = 64 << 10
"""Of a long name or a pax header; real ones have some hundred bytes."""

_REGULAR = b"0\07"
_FOLDER = b"5"
_PAX, _PAX_GLOBAL, _LONG_NAME = b"x", b"g", b"L"
_KINDS = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device"}
_KINDS |= {b"6": "a FIFO", b"K": "a link", b"S": "a sparse file"}


class Sink(Protocol):
    """Gets the files of an archive or a form, one after the other."""

    def begin(self, name: str, size: int | None) -> None:
        """A file begins; `size` is None when it is not known before its end."""

    def data(self, piece: bytes) -> None:
        """More of it."""

    def end(self) -> None:
        """It is whole."""


class TarReader:
    """Push bytes in, get files out."""

    def __init__(self, sink: Sink) -> None:
        """`sink` gets the regular files."""
        self._sink = sink
        self._held = bytearray()
        """The beginning of a block."""
        self._left = 0
        """Bytes of the present content that have not come yet."""
        self._padding = 0
        self._header: bytearray | None = None
        """The present content, when it is a header's."""
        self._kind = b""
        self._long_name: str | None = None
        self._pax: dict[str, str] = {}
        self._in_file = False
        self._over = False

    def feed(self, data: bytes) -> None:
        """The next bytes. Raises `RequestInvalid`, and what the sink raises."""
        rest = memoryview(data)
        while rest and not self._over:
            if self._left:
                rest = self._content(rest)
            elif self._padding:
                count = min(self._padding, len(rest))
                self._padding -= count
                rest = rest[count:]
            else:
                rest = self._block(rest)

    def close(self) -> None:
        """No more comes. Raises `RequestInvalid` unless the archive's own end was seen."""
        if not self._over:
            raise RequestInvalid("The archive was cut short: its end is missing; send it again.")

    def _content(self, rest: memoryview) -> memoryview:
        count = min(self._left, len(rest))
        piece = bytes(rest[:count])
        self._left -= count
        if self._header is not None:
            self._header += piece
        elif self._in_file:
            self._sink.data(piece)
        if not self._left:
            self._content_is_whole()
        return rest[count:]

    def _content_is_whole(self) -> None:
        if self._in_file:
            self._in_file = False
            self._sink.end()
        elif self._header is not None:
            content, self._header = bytes(self._header), None
            if self._kind == _LONG_NAME:
                self._long_name = _text(content.partition(b"\0")[0])
            elif self._kind == _PAX:
                self._pax = _pax_fields(content)

    def _block(self, rest: memoryview) -> memoryview:
        missing = BLOCK_BYTES - len(self._held)
        self._held += rest[:missing]
        if len(self._held) == BLOCK_BYTES:
            block = bytes(self._held)
            self._held.clear()
            self._member(block)
        return rest[missing:]

    def _member(self, block: bytes) -> None:
        """One header."""
        if not any(block):
            self._over = True  # a second block of zeros and padding follow, which say nothing more
            return
        if _number(block[148:156]) != sum(block[:148]) + 8 * 32 + sum(block[156:]):
            raise RequestInvalid("The body is not a tar archive, or it is damaged; pack it again.")
        kind, size = block[156:157], _number(block[124:136])
        self._kind = kind
        if kind in (_PAX, _PAX_GLOBAL, _LONG_NAME):
            if size > HEADER_BYTES_MAX:
                raise RequestInvalid(
                    f"A header of the archive has {size} bytes, expected at most "
                    f"{HEADER_BYTES_MAX}; pack it again with shorter names."
                )
            self._header = bytearray()
        else:
            size = self._file(block, kind, size)
        self._left, self._padding = size, -size % BLOCK_BYTES
        if not size:
            self._content_is_whole()

    def _file(self, block: bytes, kind: bytes, size: int) -> int:
        """The size of what follows a header that is not about another header."""
        name = self._pax.get("path") or self._long_name or _name(block)
        if "size" in self._pax:
            size = _whole(self._pax["size"])
        sparse = any(key.startswith("GNU.sparse") for key in self._pax)
        self._long_name, self._pax = None, {}
        if kind == _FOLDER or (kind in _REGULAR and name.endswith("/")):
            return 0
        if kind not in _REGULAR or sparse:
            what = "a sparse file" if sparse else _KINDS.get(kind, f"of kind {kind!r}")
            raise RequestInvalid(
                f"{shown(name)} in the archive is {what}, expected files and folders only; pack "
                "the files themselves (tar --dereference)."
            )
        self._sink.begin(name, size)
        self._in_file = True
        return size


def _name(block: bytes) -> str:
    prefix = block[345:500].partition(b"\0")[0] if block[257:263] == b"ustar\0" else b""
    name = block[:100].partition(b"\0")[0]
    return _text(prefix + b"/" + name if prefix else name)


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise RequestInvalid(
            f"A name in the archive is not UTF-8 ({shown(raw)}); rename the file."
        ) from None


def _number(field: bytes) -> int:
    """Octal digits, or GNU's binary form for what is too big for them."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip()
    if digits.strip(b"01234567"):  # also a sign, which int() would take
        raise RequestInvalid("The body is not a tar archive, or it is damaged; pack it again.")
    return int(digits or b"0", 8)


def _whole(digits: str) -> int:
    if digits.isascii() and digits.isdigit() and len(digits) < 19:
        return int(digits)
    raise RequestInvalid("The archive is damaged: a size is no number; pack it again.")


def _pax_fields(content: bytes) -> dict[str, str]:
    """`LENGTH KEY=VALUE\\n`, over and over; LENGTH counts its own digits too."""
    fields: dict[str, str] = {}
    while content:
        digits, _, _ = content.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 6 else 0
        record, content = content[len(digits) + 1 : length], content[length:]
        key, equals, value = record.partition(b"=")
        if not equals or not value.endswith(b"\n"):
            raise RequestInvalid("The archive is damaged: a pax header is cut; pack it again.")
        if key in (b"path", b"size") or key.startswith(b"GNU.sparse"):
            fields[_text(key)] = _text(value[:-1])
    return fields
