"""What the client does, played by hand: nothing is sent and nobody waits."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from lorry.client import calls, flows
from lorry.client.flows import Flow, Pause, Send, Watch, no_progress
from lorry.client.retry import Retry
from lorry.client.values import Event, Operation
from lorry.errors import (
    AdapterInvalid,
    AnswerLost,
    CapacityExhausted,
    LorryError,
    OperationCancelled,
    OperationNotFound,
    QueueFull,
    ServerUnreachable,
)

T = TypeVar("T")
Reply = dict[str, Any] | LorryError


class World:
    """Virtual time, and a server that answers from a list."""

    def __init__(self, *replies: Reply) -> None:
        self.now = 0.0
        self.sent: list[str] = []
        self.pauses: list[float] = []
        self._replies: Iterator[Reply] = iter(replies)
        self.retry = Retry(
            deadline_s=60, first_pause_s=1, jitter=0, now=lambda: self.now, random=lambda: 0.0
        )

    def play(self, flow: Flow[T]) -> T:
        """A flow to its end."""
        try:
            step = next(flow)
            while True:
                step = self._answer(flow, step)
        except StopIteration as end:
            value: T = end.value
            return value

    def _answer(self, flow: Flow[T], step: Send | Pause) -> Send | Pause:
        if isinstance(step, Pause):
            self.now += step.seconds
            self.pauses.append(step.seconds)
            return flow.send({})
        self.sent.append(str(step.call))
        reply = next(self._replies)
        return flow.throw(reply) if isinstance(reply, LorryError) else flow.send(reply)


def operation(status: str = "running", **more: Any) -> dict[str, Any]:
    told = {"id": 3, "kind": "load", "name": "x", "status": status, "began": 10.0}
    return {**told, "phase": "loading", **more}


def failed(code: str) -> dict[str, Any]:
    return operation("failed", error={"code": code, "message": "because"})


ADAPTER = {"name": "x", "version": "a" * 64}
LOAD = calls.load("x", "/a")


def load(world: World, progress: Callable[[Operation], None] = no_progress) -> str:
    return world.play(flows.long_call_on("x", LOAD, world.retry, progress)).version


def test_a_load_is_followed_to_its_end_and_tells_how_far_it_is() -> None:
    phases: list[str] = []
    world = World(operation(phase="fetching"), operation(), operation("done"), ADAPTER)
    assert load(world, lambda seen: phases.append(seen.phase)) == "a" * 64
    assert phases == ["fetching", "loading"]
    assert world.sent == [
        "PUT /v1/adapters/x",
        *["GET /v1/operations/3"] * 2,
        "GET /v1/adapters/x",
    ]


def test_a_failed_load_raises_the_operations_own_error() -> None:
    with pytest.raises(AdapterInvalid, match="because"):
        load(World(operation(), failed("adapter_invalid")))
    with pytest.raises(OperationCancelled):
        load(World(operation("cancelled", error={"code": "operation_cancelled"})))


def test_a_load_that_met_no_room_is_begun_again_as_a_whole() -> None:
    world = World(operation(), failed("capacity_exhausted"), operation("done"), ADAPTER)
    load(world)
    assert world.sent.count("PUT /v1/adapters/x") == 2
    assert CapacityExhausted.retry_after_s in world.pauses


def test_a_load_whose_answer_was_lost_is_not_sent_again() -> None:
    world = World(AnswerLost("x"))
    with pytest.raises(AnswerLost):
        load(world)
    assert world.sent == ["PUT /v1/adapters/x"]


def test_looks_at_an_operation_survive_a_lost_connection() -> None:
    world = World(operation(), AnswerLost("x"), ServerUnreachable("x"), operation("done"), ADAPTER)
    load(world)
    assert world.sent.count("PUT /v1/adapters/x") == 1


def test_an_operation_of_the_servers_next_life_is_not_taken_for_ours() -> None:
    with pytest.raises(AnswerLost, match="started again before operation 3"):
        load(World(operation(), operation("done", began=99.0)))
    with pytest.raises(OperationNotFound):
        load(World(operation(), OperationNotFound("gone")))


def test_a_wait_has_an_end() -> None:
    world = World(*[operation()] * 100)
    begun = Operation.read(operation())
    with pytest.raises(TimeoutError, match=r"load of 'x' \(operation 3\).*within 5 s; it goes on"):
        world.play(flows.follow(begun, world.retry, no_progress, timeout_s=5))
    assert world.now <= 5


def test_a_busy_server_is_asked_again_until_the_deadline() -> None:
    world = World(*[QueueFull("full")] * 100)
    with pytest.raises(QueueFull):
        world.play(flows.request(calls.generate("x", "hi"), world.retry))
    assert world.now <= 60
    assert len(world.sent) > 5


def test_adapters_are_read_page_by_page() -> None:
    first = {"data": [{"name": "a"}, {"name": "b"}], "has_more": True, "next": "b"}
    world = World(first, {"data": [{"name": "c"}], "has_more": False, "next": None})
    found = world.play(flows.all_adapters(world.retry))
    assert [adapter.name for adapter in found] == ["a", "b", "c"]


def test_names_are_quoted_in_paths() -> None:
    assert str(calls.get_adapter("team/a b?#")) == "GET /v1/adapters/team%2Fa%20b%3F%23"


def test_a_wrong_argument_is_a_type_error_at_once() -> None:
    with pytest.raises(TypeError):
        calls.load("x", "/a", pin=True)  # type: ignore[call-arg]


# Following events


def seen_event(sequence: int, at: float = 1.0) -> Event:
    return Event(sequence=sequence, at=at, kind="loaded", text="t")


def told_event(sequence: int, at: float = 1.0) -> dict[str, Any]:
    return {"sequence": sequence, "at": at, "kind": "loaded", "text": "t"}


def resumed(*remembered: dict[str, Any]) -> str:
    """Where a reader that has seen number 5 goes on."""
    world = World({"data": list(remembered)})
    watch = Watch(0, None, world.retry)
    watch.seen(seen_event(5))
    world.play(watch.resume(AnswerLost("cut")))
    assert world.sent == ["GET /v1/events"]
    return watch.call().params["after"]


def test_a_feed_goes_on_where_it_was() -> None:
    assert resumed(told_event(5), told_event(6)) == "5"


def test_a_feed_of_another_life_of_the_server_begins_with_its_first_event() -> None:
    assert resumed(told_event(5, at=2.0)) == "0"
    assert resumed() == "0"
    assert resumed(told_event(1), told_event(2)) == "0"


def test_a_feed_whose_place_is_forgotten_goes_on_with_a_gap() -> None:
    assert resumed(told_event(9)) == "5"


def test_a_feed_gives_up_when_time_is_over() -> None:
    world = World()
    watch = Watch(0, None, replace(world.retry, deadline_s=0))
    with pytest.raises(ServerUnreachable):
        world.play(watch.resume(ServerUnreachable("x")))


def test_a_feed_that_was_quiet_for_an_hour_is_made_again() -> None:
    world = World({"data": [told_event(5)]})
    watch = Watch(0, None, world.retry)
    watch.seen(seen_event(5))
    watch.call()
    world.now += 3600
    world.play(watch.resume(AnswerLost("cut")))
    assert watch.call().params["after"] == "5"


def test_a_feed_that_breaks_again_and_again_gives_up_at_the_deadline() -> None:
    world = World()
    watch = Watch(0, None, world.retry)
    with pytest.raises(AnswerLost):
        for _ in range(1000):
            watch.call()
            world.now += 0.1
            world.play(watch.resume(AnswerLost("cut")))
    assert world.now <= 61
