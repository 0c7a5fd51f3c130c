"""Tensors out of the forms in which Python programs send them, read without running anything.

A pickle is a program for a small machine, and Python's own machine calls whatever the program
names. The machine here calls nothing: it only takes note of what would be called with which
arguments (`Made`), and whoever wants tensors looks at these notes for the few forms in which
PyTorch writes them. It knows the opcodes that those need, takes a limited number of them, and
refuses the rest.

    torch.save(tensors)            a zip, or the older sequence of pickles
    pickle.dumps(tensors)          each tensor a torch.save inside
    ForkingPickler.dumps(tensors)  handles to shared memory: read when it is a named one (torch's
                                   "file_system" sharing) of this machine and user, else refused
    safetensors.torch.save(...)    the form to prefer
"""

import io
import math
import os
import pickletools
import re
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lorry.artifacts.adapter_config import shown
from lorry.artifacts.tensors import LENGTH_BYTES, HeaderInvalid, header_length, parse_header
from lorry.errors import RequestInvalid

OPCODES_MAX = 1_000_000
"""A tensor takes about 30, an adapter has some thousand tensors at most."""

PREFER = (
    "send safetensors instead: base64 of safetensors.torch.save(tensors), or PUT "
    "/v1/adapters/{name}/weights"
)

_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How the older torch.save begins."""

_STORAGES = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "DoubleStorage": "F64",
    "ByteStorage": "U8",
}
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "uint8": "U8"}
_ITEM = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "U8": 1}
_SHARED_HEADER_BYTES = 64
"""What PyTorch keeps in front of shared memory: the count of its users, and padding."""
_SHARED = re.compile(r"/torch_\d+_\d+_\d+")
"""Names that PyTorch gives its shared memory."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor, its numbers in order."""

    name: str
    dtype: str
    """As safetensors spells it."""
    shape: tuple[int, ...]
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class _Named:
    """Something that a pickle names and that is never looked up."""

    module: str
    name: str


@dataclass(slots=True, eq=False)
class Made:
    """What a pickle would have made by calling something."""

    what: Any
    arguments: tuple[Any, ...]
    state: Any = None
    items: dict[str | int, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of what would be called, without its module."""
        return self.what.name if isinstance(self.what, _Named) else ""


_MARK = object()
_STRANGE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""What Python raises when values are of other kinds or sizes than a form has them."""


class _Machine:
    """The stack and the memo of one pickle."""

    def __init__(self, left: list[int]) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self._left = left
        """Opcodes that may still come, shared by all pickles of one body."""

    def run(self, file: io.BytesIO) -> Any:
        """One pickle from the file's position."""
        try:
            for opcode, argument, _ in pickletools.genops(file):
                self._left[0] -= 1
                if self._left[0] < 0:
                    raise RequestInvalid(
                        f"The serialised tensors take more than {OPCODES_MAX} steps; {PREFER}."
                    )
                if opcode.name == "STOP":
                    return self.stack.pop()
                self._step(opcode.name, argument)
        except _STRANGE as error:
            raise RequestInvalid(
                f"The serialised tensors are damaged ({shown(str(error))}); {PREFER}."
            ) from None
        raise RequestInvalid(f"The serialised tensors are cut; {PREFER}.")

    def _step(self, name: str, argument: Any) -> None:
        if name in _PUSHES:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[len(self.memo) if argument is None else argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            self.stack.append(self.memo[argument])
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        elif name not in ("PROTO", "FRAME"):
            raise RequestInvalid(
                f"The serialised tensors hold the pickle step {name}, which tensors do not need, "
                f"so they are not read; {PREFER}."
            )

    def since_mark(self) -> list[Any]:
        """What lies above the last mark; the mark goes too."""
        place = max(i for i, value in enumerate(self.stack) if value is _MARK)
        found = self.stack[place + 1 :]
        del self.stack[place:]
        return found

    def take(self, count: int) -> tuple[Any, ...]:
        """The topmost `count` values."""
        found = tuple(self.stack[len(self.stack) - count :])
        if len(found) != count or any(value is _MARK for value in found):
            raise ValueError("a step lacks its values")
        del self.stack[len(self.stack) - count :]
        return found

    def tuple_of(self, count: int) -> None:
        self.stack.append(self.take(count))

    def append(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("items are added to what is no list")
        self.stack[-1].extend(values)

    def set_items(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        items: Any = target.items if isinstance(target, Made) else target
        if not isinstance(items, dict):
            raise ValueError("items are set in what is no dict")
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            if not isinstance(key, str | int):
                raise ValueError("a key is neither text nor a number")
            items[key] = value

    def make(self) -> None:
        what, arguments = self.take(2)
        if not isinstance(arguments, tuple):
            raise ValueError("arguments are no tuple")
        self.stack.append(Made(what, arguments))

    def build(self) -> None:
        (state,) = self.take(1)
        if not isinstance(self.stack[-1], Made):
            raise ValueError("a state is given to what has none")
        self.stack[-1].state = state

    def named(self, argument: Any) -> None:
        module, name = self.take(2) if argument is None else argument.split(" ", 1)
        self.stack.append(_Named(str(module), str(name)))

    def persistent(self) -> None:
        (key,) = self.take(1)
        self.stack.append(Made(_Named("", "persistent"), key if isinstance(key, tuple) else (key,)))


_PUSHES = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "LONG1", "INT", "LONG", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "SHORT_BINSTRING", "BINSTRING"),
    )
)
"""Opcodes whose argument is the value."""
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "MARK": lambda: _MARK,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "TUPLE": lambda m, _: m.stack.append(tuple(m.since_mark())),
    "TUPLE1": lambda m, _: m.tuple_of(1),
    "TUPLE2": lambda m, _: m.tuple_of(2),
    "TUPLE3": lambda m, _: m.tuple_of(3),
    "APPEND": lambda m, _: m.append(list(m.take(1))),
    "APPENDS": lambda m, _: m.append(m.since_mark()),
    "SETITEM": lambda m, _: m.set_items(list(m.take(2))),
    "SETITEMS": lambda m, _: m.set_items(m.since_mark()),
    "GLOBAL": _Machine.named,
    "STACK_GLOBAL": lambda m, _: m.named(None),
    "REDUCE": lambda m, _: m.make(),
    "NEWOBJ": lambda m, _: m.make(),
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.persistent(),
}


Storages = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class _Reader:
    """Looks for tensors in what a pickle would have made."""

    storages: Storages
    left: list[int]
    room: Callable[[int], None]
    """Told of the bytes of each tensor before they are laid out; raises when it is too much."""

    def tensor(self, name: str, value: Any) -> Tensor:
        """One tensor. Raises `RequestInvalid`."""
        try:
            dtype, data, offset, size, stride = self._parts(value)
            return self._laid_out(name, dtype, data, offset, size, stride)
        except _STRANGE:
            raise RequestInvalid(
                f"{shown(name)} is no tensor in a form that is read here; {PREFER}."
            ) from None

    def _parts(self, value: Made) -> tuple[str, bytes, int, tuple[int, ...], tuple[int, ...]]:
        given = value.arguments
        if value.name == "_rebuild_parameter":
            return self._parts(given[0])
        if value.name == "_rebuild_tensor_v2":
            storage, offset, size, stride = given[:4]
        elif value.name == "rebuild_tensor":
            storage, (offset, size, stride, *_) = given[1], given[2]
        else:
            raise _handle(value.name)
        dtype, data = self._storage(storage)
        return dtype, data, int(offset), _sizes(size), _sizes(stride)

    def _storage(self, value: Made) -> tuple[str, bytes]:
        given = value.arguments
        if value.name == "_load_from_bytes":
            inner, storages = _older_save(given[0], self.left)
            return _Reader(storages, self.left, self.room)._storage(inner)
        if value.name == "rebuild_typed_storage":
            return _DTYPES[given[1].name], self._storage(given[0])[1]
        if value.name == "rebuild_storage_filename":
            return "U8", _shared_memory(given[2], int(given[3]))
        if value.name == "persistent":
            return _STORAGES[given[1].name], self.storages[str(given[2])]
        raise _handle(value.name)

    def _laid_out(
        self,
        name: str,
        dtype: str,
        data: bytes,
        offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> Tensor:
        item, count = _ITEM[dtype], math.prod(size)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if min((*size, *stride, offset), default=0) < 0 or (
            count and (last + 1) * item > len(data)
        ):
            raise RequestInvalid(f"{shown(name)} lies outside its storage; {PREFER}.")
        self.room(count * item)
        if not count:
            return Tensor(name, dtype, size, b"")
        flat = np.frombuffer(data, dtype=f"<u{item}", count=last + 1 - offset, offset=offset * item)
        steps = tuple(step * item for step in stride)
        view = np.lib.stride_tricks.as_strided(flat, size, steps, writeable=False)
        return Tensor(name, dtype, size, view.tobytes())


def _handle(name: str) -> RequestInvalid:
    return RequestInvalid(
        f"The serialised tensors hold {shown(name)}, which is a handle to memory of the process "
        f"that sent them and cannot be opened here; {PREFER}."
    )


def _sizes(value: Any) -> tuple[int, ...]:
    if isinstance(value, Made):
        value = value.arguments[0]
    if not isinstance(value, tuple) or len(value) > 16:
        raise ValueError("sizes are no short tuple")
    return tuple(int(number) for number in value)


def _older_save(data: bytes, left: list[int]) -> tuple[Any, Storages]:
    """Magic number, protocol and system, the object, the storages' keys; then the storages."""
    file = io.BytesIO(data)
    *_, value, keys = [_Machine(left).run(file) for _ in range(5)]
    numels = {given[2]: (given[1].name, given[4]) for given in _persistent(value)}
    storages: dict[str, bytes] = {}
    for key in keys:
        kind, _ = numels[key]
        count = int.from_bytes(file.read(8), "little")
        size = count * _ITEM[_STORAGES[kind]]
        storages[str(key)] = content = file.read(min(size, len(data)))
        if len(content) != size:
            raise RequestInvalid(f"The serialised tensors are cut; {PREFER}.")
    return value, storages


def _persistent(value: Any) -> Iterator[tuple[Any, ...]]:
    """The arguments of every storage below a value; a set of those seen keeps it linear."""
    seen: set[int] = set()
    rest = [value]
    while rest:
        one = rest.pop()
        if id(one) in seen or not isinstance(one, Made | list | tuple | dict):
            continue
        seen.add(id(one))
        if isinstance(one, Made):
            if one.name == "persistent":
                yield one.arguments
            rest += [*one.arguments, one.state, *one.items.values()]
        else:
            rest += one.values() if isinstance(one, dict) else one


def _shared_memory(handle: Any, size: int) -> bytes:
    """A copy of PyTorch's shared memory of that name, if it is this user's."""
    name = handle.decode("ascii") if isinstance(handle, bytes) else str(handle)
    if not _SHARED.fullmatch(name):
        raise _handle(name)
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(f"/dev/shm{name}", flags)
    except OSError as error:
        raise RequestInvalid(
            f"The shared memory {shown(name)} of the tensors cannot be opened "
            f"({error.strerror}): the sender is on another machine, or has freed it; {PREFER}."
        ) from None
    try:
        status = os.fstat(descriptor)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not ours or status.st_size < size + _SHARED_HEADER_BYTES:
            raise _handle(name)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            file.seek(_SHARED_HEADER_BYTES)
            return file.read(size)
    finally:
        os.close(descriptor)


def read_tensors(data: bytes, load_format: str | None, room: Callable[[int], None]) -> list[Tensor]:
    """The tensors in any of the forms above. Blocks; `room` is told of the bytes of each tensor
    before they are laid out. Raises `RequestInvalid`, and what `room` raises."""
    try:
        return _read(data, load_format, room)
    except _STRANGE as error:
        raise RequestInvalid(
            f"The serialised tensors are in a form that is not read here ({shown(str(error))}); "
            f"{PREFER}."
        ) from None


def _read(data: bytes, load_format: str | None, room: Callable[[int], None]) -> list[Tensor]:
    if data[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{":
        return _from_safetensors(data)
    left = [OPCODES_MAX]
    storages: Storages = {}
    if data.startswith(b"PK\x03\x04"):
        value, storages = _zip_save(data, left, room)
    elif data.startswith(_MAGIC):
        value, storages = _older_save(data, left)
    else:
        value = _Machine(left).run(io.BytesIO(data))
    reader = _Reader(storages, left, room)
    if load_format == "flattened_bucket":
        return _unflattened(value, reader)
    return [reader.tensor(name, one) for name, one in _pairs(value)]


def _from_safetensors(data: bytes) -> list[Tensor]:
    try:
        length = header_length("the tensors", data[:LENGTH_BYTES], len(data))
        infos = parse_header("the tensors", data[LENGTH_BYTES : LENGTH_BYTES + length], len(data))
    except HeaderInvalid as error:
        raise RequestInvalid(f"The serialised tensors are damaged: {error}") from error
    view = memoryview(data)
    return [
        Tensor(one.name, one.dtype, one.shape, view[one.begin : one.begin + one.bytes])
        for one in infos
    ]


def _zip_save(data: bytes, left: list[int], room: Callable[[int], None]) -> tuple[Any, Storages]:
    """torch.save's zip: never compressed, so nothing in it can be bigger than itself."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {one.filename: one for one in archive.infolist()}
            if any(one.compress_type != zipfile.ZIP_STORED for one in members.values()):
                raise RequestInvalid(f"The serialised tensors are compressed; {PREFER}.")
            if sum(one.file_size for one in members.values()) > len(data):
                raise RequestInvalid(f"The serialised tensors overlap in their zip; {PREFER}.")
            root = next(name for name in members if name.endswith("/data.pkl"))
            stem = root.removesuffix("data.pkl")
            room(len(data))
            value = _Machine(left).run(io.BytesIO(archive.read(root)))
            prefix = f"{stem}data/"
            names = [name for name in members if name.startswith(prefix)]
            return value, {name.removeprefix(prefix): archive.read(name) for name in names}
    except (zipfile.BadZipFile, StopIteration, OSError, RuntimeError, EOFError) as error:
        raise RequestInvalid(
            f"The serialised tensors are a damaged zip ({shown(str(error))}); {PREFER}."
        ) from None


def _pairs(value: Any) -> list[tuple[str, Any]]:
    """(name, tensor) of a dict or of a list of pairs."""
    if isinstance(value, Made) and value.name == "OrderedDict":
        value = value.items
    pairs = list(value.items()) if isinstance(value, dict) else value
    sound = isinstance(pairs, list) and all(
        isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)
        for pair in pairs
    )
    if not sound:
        raise RequestInvalid(
            "The serialised tensors are neither a dict nor a list of names and tensors (a bucket "
            f"needs load_format 'flattened_bucket'); {PREFER}."
        )
    return [(name, one) for name, one in pairs]


def _unflattened(value: Any, reader: _Reader) -> list[Tensor]:
    """SGLang's bucket: all tensors in one of bytes, and a record for each."""
    try:
        flat = reader.tensor("flattened_tensor", value["flattened_tensor"])
        data = memoryview(flat.data)
        records = [record.state for record in value["metadata"]]
        return [_slice(data, record, flat.dtype) for record in records]
    except _STRANGE:
        raise RequestInvalid(
            "The serialised bucket lacks flattened_tensor or metadata, or they are in another "
            f"form; {PREFER}."
        ) from None


def _slice(data: memoryview, record: Mapping[str, Any], flat_dtype: str) -> Tensor:
    dtype, shape = _DTYPES[record["dtype"].name], _sizes(record["shape"])
    item = _ITEM[flat_dtype]
    begin, end = int(record["start_idx"]) * item, int(record["end_idx"]) * item
    name = str(record["name"])
    if not 0 <= begin <= end <= len(data) or end - begin != math.prod(shape) * _ITEM[dtype]:
        raise RequestInvalid(f"{shown(name)} lies outside its bucket; {PREFER}.")
    return Tensor(name, dtype, shape, data[begin:end])
