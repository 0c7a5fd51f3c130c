"""Frames come through whole, whatever pieces they arrive in, and errors keep their class."""

import struct

import pytest

from lorry.engines.embedded import wire
from lorry.errors import (
    AdapterInvalid,
    BrokenInvariant,
    EngineRejected,
    LorryError,
    ModelInvalid,
    RequestInvalid,
)
from lorry.ids import EngineId


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_frames_survive_any_cut(piece: int) -> None:
    sent = [wire.Ping(), wire.RemoveLora(3, EngineId(4)), wire.Outputs([wire.Output(1, (2, 3))])]
    data = b"".join(map(wire.pack, sent))
    unpacker = wire.Unpacker()
    found: list[object] = []
    for start in range(0, len(data), piece):
        found += unpacker.feed(data[start : start + piece])
    assert found == sent
    assert [type(message) for message in found] == [type(message) for message in sent]


def test_a_length_that_cannot_be_is_refused() -> None:
    with pytest.raises(EngineRejected, match="limit"):
        wire.Unpacker().feed(struct.pack("<I", wire.FRAME_BYTES_MAX + 1))


@pytest.mark.parametrize("kind", [EngineRejected, RequestInvalid, AdapterInvalid, ModelInvalid])
def test_our_errors_keep_their_class(kind: type[LorryError]) -> None:
    error = wire.failure(kind("so and so")).error()
    assert type(error) is kind
    assert error.message == "so and so"


def test_other_errors_become_rejections_that_name_them() -> None:
    error = wire.failure(ZeroDivisionError("by zero")).error()
    assert type(error) is EngineRejected
    assert error.message == "ZeroDivisionError: by zero"
    assert type(wire.failure(BrokenInvariant(2, "x")).error()) is EngineRejected
    assert type(wire.Failure("Sequence", "not an error class").error()) is EngineRejected
