"""The header of a safetensors file, read with suspicion: it comes from a stranger and decides how
much is read.

Layout of a file: 8 bytes little-endian header length, a JSON object, then the data the object's
offsets point into."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeGuard

HEADER_BYTES_MAX = 16 << 20
"""1,000 modules need about 300 KB; the safetensors library itself stops at 100 MB."""

LENGTH_BYTES = 8

DTYPES: dict[str, tuple[str, int]] = {
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
}
"""Served dtypes: name in the header -> (name for people, bytes per element)."""

_OTHER_BYTES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
_OTHER_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of one weight file."""

    file: str
    name: str
    """As the file spells it."""
    dtype: str
    """As the header spells it, such as BF16."""
    shape: tuple[int, ...]
    begin: int
    """First byte in the file."""
    bytes: int

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


class HeaderInvalid(Exception):
    """The file is not a safetensors file; the text is one sentence that names it."""


def header_length(file: str, first: bytes, file_bytes: int) -> int:
    """The header's length from the file's first eight bytes, once it is sure to be sane."""
    if len(first) < LENGTH_BYTES:
        raise HeaderInvalid(
            f"{file} has {file_bytes} bytes, expected at least {LENGTH_BYTES + 2}; the file was "
            "cut, copy it again."
        )
    length = int.from_bytes(first, "little")
    if length > HEADER_BYTES_MAX:
        raise HeaderInvalid(
            f"{file}: the header length is {length} bytes, expected at most {HEADER_BYTES_MAX}; "
            "the file is corrupt or no safetensors file, save it again."
        )
    if LENGTH_BYTES + length > file_bytes:
        raise HeaderInvalid(
            f"{file} has {file_bytes} bytes, expected at least {LENGTH_BYTES + length} for its "
            "header; the file was cut, copy it again."
        )
    return length


def parse_header(file: str, content: bytes, file_bytes: int) -> tuple[TensorInfo, ...]:
    """Every tensor of the file, in the order of its data. Raises `HeaderInvalid` unless the data
    fills the file."""
    entries = _entries(file, content)
    start = LENGTH_BYTES + len(content)
    infos = sorted(
        (_info(file, name, entry, start) for name, entry in entries if name != "__metadata__"),
        key=lambda info: (info.begin, info.bytes),
    )
    end = start
    for info in infos:
        if info.begin != end:
            raise HeaderInvalid(
                f"{file}: tensor {info.name!a} begins at byte {info.begin}, expected {end}; the "
                "file is corrupt, save it again."
            )
        end += info.bytes
    if end != file_bytes:
        state = (
            "was cut, copy it again"
            if file_bytes < end
            else "has stray bytes at its end, save it again"
        )
        raise HeaderInvalid(
            f"{file} has {file_bytes} bytes, expected {end} by its header; the file {state}."
        )
    return tuple(infos)


def _entries(file: str, content: bytes) -> list[tuple[str, Any]]:
    """Name and description of each tensor; a name that occurs twice is refused, since parsers would
    disagree."""
    try:
        entries = json.loads(content.decode("utf-8"), object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise HeaderInvalid(
            f"{file}: the header is not JSON ({str(error)[:80]!a}); the file is corrupt, save it "
            "again."
        ) from None
    if not isinstance(entries, _Pairs):
        raise HeaderInvalid(
            f"{file}: the header is not a JSON object; the file is corrupt, save it again."
        )
    twice = [name for name, count in Counter(name for name, _ in entries).items() if count > 1]
    if twice:
        raise HeaderInvalid(
            f"{file}: tensor {twice[0]!a} is in the header twice, expected once; save it again."
        )
    _check_metadata(file, dict(entries).get("__metadata__"))
    return list(entries)


def _check_metadata(file: str, metadata: object) -> None:
    """Texts by name or nothing, or the safetensors library would not read the file."""
    pairs = metadata if isinstance(metadata, _Pairs) else ()
    if metadata not in (None, pairs) or not all(isinstance(value, str) for _, value in pairs):
        raise HeaderInvalid(
            f"{file}: the header's __metadata__ is {str(metadata)[:80]!a}, expected an object of "
            "texts; save it again."
        )


class _Pairs(list[tuple[str, Any]]):
    """A JSON object that has not lost its duplicate keys; unlike a plain list it is told from a
    JSON array."""


def _info(file: str, name: str, entry: object, start: int) -> TensorInfo:
    fields = dict(entry) if isinstance(entry, _Pairs) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (isinstance(dtype, str) and _whole(shape) and _whole(offsets) and len(offsets) == 2):
        raise HeaderInvalid(
            f"{file}: the header's entry for {name[:80]!a} lacks a dtype, a shape or two "
            "data_offsets; save it again."
        )
    size = offsets[1] - offsets[0]
    item = DTYPES[dtype][1] if dtype in DTYPES else _OTHER_BYTES.get(dtype)
    if (item is not None and size != item * math.prod(shape)) or size < 0:
        raise HeaderInvalid(
            f"{file}: tensor {name[:80]!a} of shape {shape} in {dtype} has {size} bytes, expected "
            f"{(item or 1) * math.prod(shape)}; the file is corrupt, save it again."
        )
    return TensorInfo(file, name, dtype, tuple(shape), start + offsets[0], size)


def _whole(value: Any) -> TypeGuard[list[int]]:
    """A short list of whole numbers from 0. Bounds keep the product of a shape cheap to compute."""
    return (
        isinstance(value, list)
        and len(value) <= 16
        and all(
            isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 1 << 62
            for number in value
        )
    )
