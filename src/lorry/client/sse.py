"""Server-sent events from the bytes of a body, whatever pieces they come in."""

from collections.abc import Iterator


class EventReader:
    """Feed it bytes, take the data of whole events. Lines are ended by LF, CR or CRLF and by
    nothing else: JSON may hold U+2028, where `str.splitlines` would cut."""

    def __init__(self) -> None:
        """Nothing has come."""
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[str]:
        """The data of each event that ends in this piece; comments are dropped."""
        whole = (self._rest + piece).replace(b"\r\n", b"\n")
        held = b"\r" if whole.endswith(b"\r") else b""  # its LF may come with the next piece
        lines = whole.removesuffix(held).replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + held
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data).decode("utf-8", "replace")
                self._data.clear()
