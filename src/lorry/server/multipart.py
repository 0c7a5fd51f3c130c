"""multipart/form-data as it arrives: each part goes to a sink under its file name."""

from typing import Protocol

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from lorry.artifacts.tar import Sink
from lorry.errors import RequestInvalid

HEADER_BYTES_MAX = 16 << 10
"""Of one part; real ones have two or three lines."""


class Reader(Protocol):
    """What a body is pushed into."""

    def feed(self, data: bytes) -> None:
        """The next bytes."""

    def close(self) -> None:
        """No more comes. Raises when something is missing."""


class FormReader:
    """Push bytes in, get parts out. A part's name is its file name, or else its field's name."""

    def __init__(self, content_type: str, sink: Sink) -> None:
        """Raises `RequestInvalid` when the content type names no boundary."""
        _, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if not boundary:
            raise RequestInvalid("The Content-Type multipart/form-data names no boundary.")
        self._sink = sink
        self._field = b""
        self._value = b""
        self._disposition = b""
        self._header_bytes = 0
        self._whole = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": lambda data, start, end: sink.data(data[start:end]),
                "on_part_end": sink.end,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """The next bytes. Raises `RequestInvalid`, and what the sink raises."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise RequestInvalid(f"The body is no multipart/form-data ({error}).") from error

    def close(self) -> None:
        """No more comes. Raises `RequestInvalid` when the last boundary is missing."""
        if not self._whole:
            raise RequestInvalid("The body ends before its last boundary; send it again.")

    def _begin_part(self) -> None:
        self._field = self._value = self._disposition = b""
        self._header_bytes = 0

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]
        self._count_header(end - start)

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._count_header(end - start)

    def _count_header(self, more: int) -> None:
        self._header_bytes += more
        if self._header_bytes > HEADER_BYTES_MAX:
            raise RequestInvalid(f"A part's header has more than {HEADER_BYTES_MAX} bytes.")

    def _header_end(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._disposition = self._value
        self._field = self._value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        raw = options.get(b"filename") or options.get(b"name") or b""
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            raise RequestInvalid(f"A part's file name is not UTF-8 ({raw[:80]!r}).") from None
        if not name:
            raise RequestInvalid("A part has neither a file name nor a name; give it one.")
        self._sink.begin(name, None)

    def _end(self) -> None:
        self._whole = True
