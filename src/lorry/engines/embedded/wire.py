"""What the server's process and the engine's process say to each other.

A frame is a length of four bytes and a pickle. Both ends are our own code on a socket pair that
nobody else has, so the pickle is as safe as a function call.
"""

import pickle
import struct
from typing import NamedTuple

from lorry import errors
from lorry.engine import (
    EngineCapabilities,
    EngineHealth,
    FinishReason,
    GenerateRequest,
    LoraVersion,
    TokenLogprobs,
)
from lorry.engines.embedded.settings import EmbeddedSettings
from lorry.errors import EngineRejected, LorryError
from lorry.ids import EngineId

COUNTERS = (
    *("steps", "requests", "aborts", "failures", "prompt_tokens", "generation_tokens"),
    *("prefix_hit_tokens", "slot_loads", "slot_evictions", "slot_preemptions", "preemptions"),
)
"""What `EngineHealth.counters` has from the start, beside `restarts`."""

_LENGTH = struct.Struct("<I")

FRAME_BYTES_MAX = 1 << 30
"""A longer frame can only be a mistake; the prompt logprobs of a long prompt are some megabytes."""


class Failure(NamedTuple):
    """An error that crosses the border: its class in `errors.py`, and its words."""

    kind: str
    message: str

    def error(self) -> LorryError:
        """As an exception again."""
        found = getattr(errors, self.kind, EngineRejected)
        return found(self.message) if _plain(found) else EngineRejected(self.message)


def failure(error: Exception) -> Failure:
    """For any exception; those that are not ours become `EngineRejected`, with their type named."""
    if isinstance(error, LorryError):
        return Failure(type(error).__name__, error.message)
    return Failure("EngineRejected", f"{type(error).__name__}: {error}")


def _plain(kind: object) -> bool:
    known = isinstance(kind, type) and issubclass(kind, LorryError)
    return known and kind is not errors.BrokenInvariant


# To the engine.


class Start(NamedTuple):
    """The first frame: load the model."""

    settings: EmbeddedSettings


class AddLora(NamedTuple):
    """Load a version; answered by `Reply` with `Added`."""

    command: int
    version: LoraVersion


class CancelAdd(NamedTuple):
    """Nobody waits for that load any more: hold nothing because of it. Not answered."""

    command: int


class RemoveLora(NamedTuple):
    """Give a version up; answered by `Reply` with a bool."""

    command: int
    engine_id: EngineId


class ListLoras(NamedTuple):
    """Answered by `Reply` with a frozenset of ids."""

    command: int


class PinLora(NamedTuple):
    """Answered by `Reply` with None."""

    command: int
    engine_id: EngineId
    pinned: bool


class Generate(NamedTuple):
    """Begin a request; answered by `Outputs`. Keys are never used twice, unlike request ids."""

    key: int
    request: GenerateRequest


class Abort(NamedTuple):
    """End a request; its last output says so. Unknown keys are ignored."""

    key: int


class Ping(NamedTuple):
    """Answered by `Pong` between two steps."""


Command = AddLora | RemoveLora | ListLoras | PinLora
"""What is answered by a `Reply`."""

ToEngine = Start | AddLora | CancelAdd | RemoveLora | ListLoras | PinLora | Generate | Abort | Ping


# From the engine.


class Progress(NamedTuple):
    """The model is being read."""

    done: int
    total: int


class Ready(NamedTuple):
    """Requests can be taken."""

    capabilities: EngineCapabilities
    health: EngineHealth


class Added(NamedTuple):
    """What a load did, inside its `Reply`."""

    bytes: int
    seconds: float


class Failed(NamedTuple):
    """The model cannot be served; the process ends."""

    failure: Failure


class Reply(NamedTuple):
    """Answers one command."""

    command: int
    result: object
    failure: Failure | None = None


class Output(NamedTuple):
    """What one step did for one request."""

    key: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    failure: Failure | None = None
    """It ended by an error; nothing else is set then."""


class Outputs(NamedTuple):
    """What one step did: one frame, however many requests it held."""

    outputs: list[Output]


class Status(NamedTuple):
    """The engine's own word about itself."""

    health: EngineHealth


class Pong(NamedTuple):
    """Still alive, and not inside a step."""


FromEngine = Progress | Ready | Failed | Reply | Outputs | Status | Pong


def pack(message: ToEngine | FromEngine) -> bytes:
    """One frame."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Frames out of bytes that come in any pieces."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[object]:
        """The messages that are whole now. Raises `EngineRejected` for a length that cannot be."""
        self._bytes += data
        start, found = 0, []
        while len(self._bytes) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, start)
            if length > FRAME_BYTES_MAX:
                raise EngineRejected(f"A frame of {length} bytes; {FRAME_BYTES_MAX} is the limit.")
            end = start + _LENGTH.size + length
            if len(self._bytes) < end:
                break
            found.append(pickle.loads(self._bytes[start + _LENGTH.size : end]))
            start = end
        del self._bytes[:start]
        return found
