"""Requests: admitted, waiting, refused; exactly one answer each."""

from dataclasses import replace

import pytest

from lorry.errors import (
    AdapterNotFound,
    AdapterUnavailable,
    AdapterUnloading,
    AllPinned,
    BrokenInvariant,
    CapacityExhausted,
    EngineTimeout,
    EngineUnreachable,
    QueueFull,
    RequestAborted,
)
from lorry.ids import AdapterName
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from tests.unit.lifecycle.rig import LIMITS, REFUSED, Rig, of, only, v


def test_a_resident_adapter_admits_at_once() -> None:
    rig = Rig()
    rig.register("a", 1)
    ticket, commands = rig.arrive("a")
    assert commands == (cm.Admit(ticket, rig.replicas[0], rig.engine_id(1), v(1)),)
    assert rig.world.counters.hits == 1


def test_the_base_model_admits_at_once_without_an_adapter() -> None:
    rig = Rig()
    ticket, commands = rig.arrive(None)
    assert commands == (cm.Admit(ticket, rig.replicas[0], None, None),)


def test_one_load_for_all_who_wait_and_then_all_are_admitted() -> None:
    rig = Rig()
    rig.register("a", 1, load=False)
    first, commands = rig.arrive("a")
    load = only(cm.Load, commands)
    second, none = rig.arrive("a")
    assert none == ()
    admitted = of(cm.Admit, rig.answer(load))
    assert [admit.ticket for admit in admitted] == [first, second]
    assert rig.world.counters.misses == 2


def test_the_replica_with_fewer_running_requests_is_chosen() -> None:
    rig = Rig(replicas=2)
    rig.run(None)
    assert only(cm.Admit, rig.arrive(None)[1]).replica == rig.replicas[1]


def test_promise_10_an_unknown_name_is_an_error_and_never_the_base() -> None:
    rig = Rig()
    error = rig.refused("nobody")
    assert isinstance(error, AdapterNotFound)
    assert str(error) == "The adapter 'nobody' is not loaded on this server."


def test_promise_2_another_version_than_the_served_one_is_refused() -> None:
    rig = Rig()
    rig.register("a", 1)
    error = rig.refused("a", v(2))
    assert isinstance(error, AdapterNotFound)
    assert str(error) == "'a' serves version 111111111111, not 222222222222."
    assert only(cm.Admit, rig.arrive("a", v(1))[1]).version == v(1)


def test_promise_2_who_waits_for_a_version_is_refused_when_it_is_replaced() -> None:
    rig = Rig(places=1, limits=replace(LIMITS, patience_ms=100_000))
    rig.register("b", 2)
    rig.register("a", 1, load=False)
    rig.run("b")
    ticket, _ = rig.arrive("a", v(1))
    _, commands = rig.ask_load("a", load=False)
    done = rig.answer_all(commands, digit=3)
    refusal = only(cm.Refuse, done)
    assert refusal.ticket == ticket
    assert "a@111111111111" in str(refusal.error)


def test_nobody_waits_while_every_engine_is_down() -> None:
    rig = Rig(up=False)
    rig.restore("a")
    for name in ("a", None):
        error = rig.refused(name)
        assert isinstance(error, EngineUnreachable)
        assert "down or starting" in str(error)


def test_who_waits_when_the_engine_goes_waits_for_its_return() -> None:
    rig = Rig()
    rig.register("a", 1, load=False)
    ticket, _ = rig.arrive("a")
    assert rig.lose() == ()
    rig.now_ms += 1_000
    load = only(cm.Load, rig.see())
    assert only(cm.Admit, rig.answer(load)).ticket == ticket


def test_who_waits_too_long_for_a_lost_engine_is_told_so() -> None:
    rig = Rig()
    rig.register("a", 1, load=False)
    rig.arrive("a")
    rig.lose()
    error = only(cm.Refuse, rig.wait(LIMITS.ticket_wait_ms)).error
    assert isinstance(error, EngineUnreachable)


def test_a_failed_adapter_is_refused_with_its_reason_and_the_time_of_the_next_try() -> None:
    rig = Rig(limits=replace(LIMITS, retry_first_ms=500))
    rig.register("a", 1, load=False)
    ticket, commands = rig.arrive("a")
    refusal = only(cm.Refuse, rig.tell(ev.LoadFailed(only(cm.Load, commands).operation, REFUSED)))
    assert refusal.ticket == ticket
    error = rig.refused("a")
    assert isinstance(error, AdapterUnavailable)
    assert "the engine would not" in str(error)
    assert error.retry_after_s == 0.5
    rig.now_ms += 500
    assert only(cm.Load, rig.arrive("a")[1]).version == v(1)


def test_a_ticket_that_waits_for_room_is_refused_in_the_end() -> None:
    rig = Rig(places=1, limits=replace(LIMITS, patience_ms=100_000))
    rig.register("a", 1)
    rig.register("b", 2, load=False)
    rig.run("a")
    rig.arrive("b")
    error = only(cm.Refuse, rig.wait(LIMITS.ticket_wait_ms)).error
    assert isinstance(error, CapacityExhausted)
    assert "No room for the adapter 'b'" in str(error)


def test_a_ticket_that_waits_for_a_slow_load_is_refused_in_the_end() -> None:
    rig = Rig()
    rig.register("a", 1, load=False)
    rig.arrive("a")
    assert isinstance(only(cm.Refuse, rig.wait(LIMITS.ticket_wait_ms)).error, EngineTimeout)


def test_a_full_queue_refuses_by_adapter_and_in_sum() -> None:
    rig = Rig(limits=replace(LIMITS, tickets_max=3, tickets_per_adapter_max=2))
    for digit, name in enumerate("abc", start=1):
        rig.register(name, digit, load=False)
    rig.arrive("a"), rig.arrive("a")
    error = rig.refused("a")
    assert isinstance(error, QueueFull)
    assert str(error) == "2 requests are waiting, 2 of them for 'a'."
    rig.arrive("b")
    assert isinstance(rig.refused("c"), QueueFull)


def test_those_who_wait_count_as_running_to_be() -> None:
    """Else a load's end would admit more than may run."""
    rig = Rig(limits=replace(LIMITS, leases_max=2))
    rig.register("a", 1, load=False)
    rig.run(None)
    rig.arrive("a")
    error = rig.refused("a")
    assert isinstance(error, QueueFull)
    assert str(error) == "2 requests run or wait already."


def test_promise_6_what_pins_make_impossible_is_refused_before_any_side_effect() -> None:
    rig = Rig(places=2, room=10, pins=1)
    rig.register("a", 1, size=8, pinned=True)
    rig.restore_more("b", 2, size=5)
    error = rig.refused("b")
    assert isinstance(error, AllPinned)
    assert str(error) == "No room for 'b': the pinned adapters a fill it."


def test_what_is_larger_than_the_engine_is_refused_with_both_numbers() -> None:
    rig = Rig(room=10)
    rig.restore_more("a", 1, size=11)
    error = rig.refused("a")
    assert isinstance(error, CapacityExhausted)
    assert str(error) == "'a' needs 11 bytes of host memory; --host-cache-bytes is 10."


def test_a_name_that_is_being_unloaded_admits_nobody() -> None:
    rig = Rig()
    rig.register("a", 1)
    rig.run("a")
    rig.ask_unload("a")
    error = rig.refused("a")
    assert isinstance(error, AdapterUnloading)
    assert str(error) == "The adapter 'a' is being unloaded."


def test_promise_7_a_cancelled_ticket_gets_no_answer_and_no_lease() -> None:
    rig = Rig()
    rig.register("a", 1, load=False)
    ticket, commands = rig.arrive("a")
    rig.tell(ev.Cancelled(ticket))
    assert rig.answer(only(cm.Load, commands)) == ()
    assert rig.residency(1).leases == 0


@pytest.mark.parametrize("end", [ev.Finished, ev.Cancelled])
def test_promise_7_a_lease_is_released_once(end: type[ev.Finished] | type[ev.Cancelled]) -> None:
    rig = Rig()
    rig.register("a", 1)
    ticket = rig.run("a")
    rig.tell(end(ticket))
    rig.tell(end(ticket))
    assert rig.residency(1).leases == 0
    assert rig.world.counters.stale_reports == 1


def test_promise_7_a_ticket_cannot_arrive_twice() -> None:
    rig = Rig()
    ticket = rig.run(None)
    with pytest.raises(BrokenInvariant, match="arrived twice"):
        rig.fleet.handle(ev.Arrived(ticket, None), 0)


def test_a_request_that_runs_too_long_is_aborted_once() -> None:
    rig = Rig(limits=replace(LIMITS, lease_ms=500))
    ticket = rig.run(None)
    assert rig.fleet.due_ms == 500
    abort = only(cm.Abort, rig.wait(500))
    assert abort.ticket == ticket
    assert isinstance(abort.error, RequestAborted)
    assert str(abort.error) == "The request ran longer than the limit of 0.5 s."
    assert rig.wait(500) == ()
    assert rig.fleet.due_ms is None


def test_statistics_count_what_there_is() -> None:
    rig = Rig()
    rig.register("a", 1, size=7)
    rig.register("b", 2, size=5, load=False)
    rig.run("a")
    rig.arrive("b")
    found = rig.fleet.statistics()
    assert (found.registered, found.waiting, found.running, found.operations) == (2, 1, 1, 0)
    assert found.bytes_reserved == {rig.replicas[0]: 12}
    assert found.resident == {rig.replicas[0]: 1}
    assert found.waiting_by_name == {AdapterName("b"): 1}
    assert found.running_by_name == {AdapterName("a"): 1}
