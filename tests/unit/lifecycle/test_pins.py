"""Pins: kept resident, kept in a slot, never all of them."""

import pytest

from lorry.errors import AdapterNotFound, AllPinned, StorageFailed
from lorry.ids import AdapterName
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle.states import State
from tests.unit.lifecycle.rig import LIMITS, REFUSED, Rig, error_of, of, only, v, went_well


def test_a_pin_loads_pins_and_only_then_writes() -> None:
    rig = Rig()
    rig.register("a", 1, load=False)
    operation, commands = rig.ask_pin("a")
    done = rig.answer_all(commands)
    assert [type(c) for c in done] == [cm.Load, cm.SetPin, cm.Commit, cm.EndOperation]
    assert only(cm.Commit, done).pinned
    assert went_well(done, operation)


def test_an_unpin_writes_first_and_then_tells_the_engine() -> None:
    rig = Rig()
    rig.register("a", 1, pinned=True)
    operation, commands = rig.ask_pin("a", pinned=False)
    done = rig.answer_all(commands)
    assert [type(c) for c in done] == [cm.Commit, cm.EndOperation, cm.SetPin]
    assert went_well(done, operation)
    assert rig.residency(1).engine_pinned is False


def test_a_pin_of_an_unknown_name_is_refused() -> None:
    assert isinstance(error_of(Rig().ask_pin("a")[1]), AdapterNotFound)


def test_promise_6_not_all_slots_can_be_pinned() -> None:
    rig = Rig(places=3, pins=1)
    rig.register("a", 1, pinned=True)
    rig.register("b", 2)
    for commands in (rig.ask_pin("b")[1], rig.ask_load("c", pinned=True)[1]):
        error = error_of(commands)
        assert isinstance(error, AllPinned)
        assert "at most 1 may be pinned" in str(error)
        assert "Pinned now: a." in str(error)


def test_promise_6_a_pin_under_way_counts() -> None:
    rig = Rig(places=3, pins=1)
    rig.register("a", 1)
    rig.register("b", 2)
    rig.ask_pin("a")
    assert isinstance(error_of(rig.ask_pin("b")[1]), AllPinned)


def test_promise_6_a_pinned_version_is_never_evicted() -> None:
    rig = Rig(places=2)
    rig.register("a", 1, pinned=True)
    rig.register("b", 2)
    rig.run("b")
    rig.register("c", 3, load=False)
    rig.arrive("c")
    rig.wait(LIMITS.patience_ms)
    assert rig.state(1) is State.RESIDENT
    assert rig.state(2) is State.DRAINING


def test_a_refused_pin_fails_the_call_and_leaves_the_adapter_unpinned() -> None:
    rig = Rig()
    rig.register("a", 1)
    _, commands = rig.ask_pin("a")
    done = rig.tell(ev.PinFailed(only(cm.SetPin, commands).operation, REFUSED))
    assert error_of(done) is REFUSED
    assert not rig.world.adapters[AdapterName("a")].pinned
    unpin = only(cm.SetPin, rig.wait(500))
    assert not unpin.pinned
    rig.answer(unpin)
    assert rig.residency(1).engine_pinned is False


def test_promise_4_a_pin_that_cannot_be_written_is_taken_back() -> None:
    rig = Rig()
    rig.register("a", 1)
    _, commands = rig.ask_pin("a")
    commit = only(cm.Commit, rig.answer(only(cm.SetPin, commands)))
    done = rig.tell(ev.CommitFailed(commit.operation, StorageFailed("disk full")))
    assert isinstance(error_of(done), StorageFailed)
    assert not only(cm.SetPin, done).pinned


def test_a_replace_keeps_the_pin_and_moves_it_within_the_limit() -> None:
    """The old version's slot may be the only one that may be pinned."""
    rig = Rig(places=2, pins=1)
    rig.register("a", 1, pinned=True)
    operation, commands = rig.ask_load("a")
    done = rig.answer_all(commands, digit=2)
    assert [pin.pinned for pin in of(cm.SetPin, done)] == [False, True]
    assert only(cm.Commit, done).pinned
    assert went_well(done, operation)
    assert rig.residency(2).engine_pinned is True


def test_promise_4_a_replace_that_fails_pins_the_old_version_again() -> None:
    rig = Rig(places=2, pins=1)
    rig.register("a", 1, pinned=True)
    _, commands = rig.ask_load("a")
    load = only(cm.Load, rig.answer(only(cm.Fetch, commands), digit=2))
    unpin = only(cm.SetPin, rig.answer(load))
    pin = only(cm.SetPin, rig.answer(unpin))
    done = rig.tell(ev.PinFailed(pin.operation, REFUSED))
    assert error_of(done) is REFUSED
    rig.answer_all(done)
    rig.answer_all(rig.wait(500))
    assert (v(2), rig.replicas[0]) not in rig.world.residencies
    assert rig.residency(1).engine_pinned is True


def test_a_pinned_adapter_comes_back_after_its_engine_was_lost() -> None:
    rig = Rig()
    rig.register("a", 1, pinned=True)
    rig.lose()
    rig.answer_all(rig.see())
    assert rig.residency(1).engine_pinned is True


def test_a_pinned_adapter_makes_room_for_itself() -> None:
    rig = Rig(places=1, pins=0)
    rig.register("a", 1)
    commands = rig.restore("a", "p", pinned=["p"])
    unload = only(cm.Unload, commands)
    assert only(cm.Load, rig.answer(unload)).version == v(2)


def test_a_pinned_adapter_is_tried_until_it_is_in() -> None:
    rig = Rig()
    commands = rig.restore("p", pinned=["p"])
    for _ in range(5):
        rig.tell(ev.LoadFailed(only(cm.Load, commands).operation, REFUSED))
        due = rig.fleet.due_ms
        assert due is not None
        commands = rig.wait(due - rig.now_ms)
    rig.answer_all(commands)
    assert rig.state(1) is State.RESIDENT


def test_more_pins_restored_than_may_be_are_kept_resident_but_not_all_in_slots() -> None:
    rig = Rig(places=3, pins=1)
    rig.answer_all(rig.restore("a", "b", pinned=["a", "b"]))
    assert rig.state(1) is rig.state(2) is State.RESIDENT
    assert [rig.residency(digit).engine_pinned for digit in (1, 2)] == [True, False]


@pytest.mark.parametrize("unpinned_first", [True, False])
def test_a_version_is_pinned_while_any_of_its_names_is(unpinned_first: bool) -> None:
    rig = Rig(pins=1, places=3)
    rig.register("a", 1, pinned=True)
    rig.register("b", 1)
    _, commands = rig.ask_unload("b" if unpinned_first else "a")
    rig.answer_all(commands)
    assert rig.residency(1).engine_pinned is unpinned_first


def test_promise_6_a_pinned_version_that_drained_for_a_failed_successor_stays() -> None:
    """An older need could have had its room, since it had waited longer than the pin."""
    rig = Rig(places=2, room=2, pins=1)
    rig.register("p", 1, pinned=True)
    rig.register("b", 2)
    rig.register("c", 3, load=False)
    running = rig.run("p"), rig.run("b")
    operation, asked = rig.ask_load("p", strategy=ev.Strategy.DRAIN_FIRST)
    rig.now_ms += 1
    rig.arrive("c")
    rig.tell(ev.Fetched(only(cm.Fetch, asked).operation, ev.VersionSpec(v(4), 1)))
    assert rig.state(1) is State.DRAINING
    rig.tell(ev.CancelAsked(operation))
    assert rig.state(1) is State.RESIDENT
    assert of(cm.Unload, rig.finish(running[0])) == []


def test_promise_6_a_version_is_not_drained_for_one_name_when_the_other_stays_pinned() -> None:
    """It began to drain while its pinned name was being unloaded, which was then given up."""
    rig = Rig(places=2, room=2, pins=1)
    rig.register("p", 1, size=2, pinned=True)
    rig.register("q", 1, size=2)
    running = rig.run("p"), rig.run("q")
    unload, unpin = rig.ask_unload("p", drain_ms=9_000)
    rig.answer_all(unpin)
    _, asked = rig.ask_load("q", strategy=ev.Strategy.DRAIN_FIRST)
    rig.tell(ev.Fetched(only(cm.Fetch, asked).operation, ev.VersionSpec(v(4), 2)))
    rig.wait(LIMITS.patience_ms)
    assert rig.state(1) is State.DRAINING
    rig.tell(ev.CancelAsked(unload))
    assert rig.state(1) is State.RESIDENT
    for ticket in running:
        assert of(cm.Unload, rig.finish(ticket)) == []
