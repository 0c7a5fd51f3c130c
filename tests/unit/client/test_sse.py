"""Events come whole, however the bytes are cut."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lorry.client.sse import EventReader

BODY = (
    'data: {"text": "one\u2028two\x85three"}\n\n'
    ": still here\n\n"
    'id: 7\r\nevent: loaded\r\ndata: {"a": 1}\r\n\r\n'
    "data: first\ndata:second\n\n"
    "data: [DONE]\r\r"
    "data: never ended\n"
).encode()
EVENTS = ['{"text": "one\u2028two\x85three"}', '{"a": 1}', "first\nsecond", "[DONE]"]


@given(st.lists(st.integers(0, len(BODY)), max_size=12))
def test_events_come_whole_however_the_bytes_are_cut(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(BODY)]
    reader = EventReader()
    found = [data for begin, end in pairwise(places) for data in reader.feed(BODY[begin:end])]
    assert found == EVENTS


def test_every_single_byte_may_come_alone() -> None:
    reader = EventReader()
    found = [data for byte in BODY for data in reader.feed(bytes([byte]))]
    assert found == EVENTS
