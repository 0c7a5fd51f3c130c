"""Engines that go, come back, forget, or hold what nobody asked them to hold."""

import pytest

from lorry.errors import AdapterUnavailable, EngineUnreachable
from lorry.ids import EngineId
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle.states import State
from tests.unit.lifecycle.rig import REFUSED, Rig, error_of, of, only, v, went_well


def test_promise_7_a_lost_engine_ends_its_requests_with_a_retryable_error() -> None:
    rig = Rig()
    rig.register("a", 1)
    tickets = [rig.run("a"), rig.run(None)]
    aborts = of(cm.Abort, rig.lose())
    assert sorted(abort.ticket for abort in aborts) == tickets
    assert all(isinstance(a.error, EngineUnreachable) and a.error.retryable for a in aborts)
    assert rig.finish(tickets[0]) == ()
    assert rig.world.counters.stale_reports == 1


def test_promise_8_what_was_resident_comes_back_unasked() -> None:
    rig = Rig()
    rig.register("a", 1)
    rig.register("b", 2)
    rig.lose()
    assert rig.reserved() == 0
    assert {load.version for load in of(cm.Load, rig.see())} == {v(1), v(2)}


def test_promise_8_the_registry_is_loaded_back_as_far_as_there_is_room() -> None:
    rig = Rig(places=2, up=False)
    rig.restore("a", "b", "c")
    loads = of(cm.Load, rig.see())
    assert len(loads) == 2
    for load in loads:
        assert of(cm.Unload, rig.answer(load)) == []
    assert rig.world.cold == {}


def test_an_unpinned_adapter_that_fails_to_come_back_is_left_until_somebody_asks() -> None:
    rig = Rig(up=False)
    rig.restore("a")
    load = only(cm.Load, rig.see())
    rig.tell(ev.LoadFailed(load.operation, REFUSED))
    assert rig.fleet.due_ms is None
    assert rig.world.cold == {}


def test_promise_1_what_went_by_itself_is_seen_and_loaded_again() -> None:
    rig = Rig()
    rig.register("a", 1)
    ticket = rig.run("a")
    done = rig.see()
    assert only(cm.Abort, done).ticket == ticket
    assert "dropped the adapter 'a'" in str(only(cm.Abort, done).error)
    assert only(cm.Load, done).version == v(1)


def test_promise_1_an_old_listing_does_not_judge_what_has_moved_since() -> None:
    rig = Rig()
    as_of = rig.fleet.revision
    rig.register("a", 1)
    assert rig.see(as_of=as_of) == ()
    assert rig.state(1) is State.RESIDENT


def test_a_listing_from_before_a_loss_does_not_bring_the_engine_up() -> None:
    rig = Rig()
    rig.register("a", 1)
    as_of, held = rig.fleet.revision, rig.engine_id(1)
    rig.lose()
    assert rig.see(held, as_of=as_of) == ()
    assert isinstance(rig.refused("a"), EngineUnreachable)


def test_strangers_are_unloaded_before_anything_is_loaded() -> None:
    rig = Rig(places=2, up=False)
    rig.restore("a")
    unloads = of(cm.Unload, rig.see(EngineId(1), EngineId(7)))
    assert [unload.engine_id for unload in unloads] == [1, 7]
    assert rig.answer(unloads[0]) == ()
    load = only(cm.Load, rig.answer(unloads[1]))
    assert load.engine_id > 7


def test_a_stranger_is_asked_to_go_once_while_its_unload_is_open() -> None:
    rig = Rig(up=False)
    assert len(rig.see(EngineId(7))) == 1
    assert rig.see(EngineId(7)) == ()


def test_a_stranger_that_will_not_go_takes_a_place_until_it_is_gone() -> None:
    rig = Rig(places=2, up=False)
    rig.restore("a", "b")
    unload = only(cm.Unload, rig.see(EngineId(7)))
    load = only(cm.Load, rig.tell(ev.UnloadFailed(unload.operation, REFUSED)))
    rig.answer(load)
    rig.run("a")
    assert rig.arrive("b")[1] == ()
    again = only(cm.Unload, rig.see(EngineId(7), rig.engine_id(1)))
    assert only(cm.Load, rig.answer(again)).version == v(2)


def test_an_engine_lost_with_its_strangers_leaves_nothing_open() -> None:
    rig = Rig(up=False)
    rig.see(EngineId(7))
    rig.lose()
    assert rig.world.opened == {}
    assert rig.see() == ()


def test_an_answer_from_before_the_loss_is_dropped() -> None:
    rig = Rig()
    rig.register("a", 1, load=False)
    load = only(cm.Load, rig.arrive("a")[1])
    rig.lose()
    assert rig.tell(ev.Loaded(load.operation)) == ()
    assert rig.state(1) is State.ON_DISK


def test_an_engine_lost_while_it_loaded_is_not_asked_for_the_same_again_at_once() -> None:
    """One bad adapter must not end the engine again and again."""
    rig = Rig()
    rig.register("a", 1, load=False)
    rig.arrive("a")
    pauses = []
    for _ in range(3):
        rig.lose()
        done = rig.see()
        assert of(cm.Load, done) == []
        error = rig.refused("a")
        assert isinstance(error, AdapterUnavailable)
        assert "lost while it loaded 'a'" in str(error)
        pauses.append(error.retry_after_s)
        rig.now_ms += int((error.retry_after_s or 0) * 1_000)
        assert only(cm.Load, rig.arrive("a")[1]).version == v(1)
    assert pauses == [0.5, 1.0, 2.0]


def test_a_load_call_fails_when_the_engine_goes_while_it_loads() -> None:
    rig = Rig()
    _, commands = rig.ask_load("a")
    rig.answer(only(cm.Fetch, commands))
    error = error_of(rig.lose())
    assert isinstance(error, EngineUnreachable)
    assert rig.world.residencies == {}


def test_a_load_call_that_waits_to_be_published_survives_a_loss() -> None:
    rig = Rig()
    operation, commands = rig.ask_load("a")
    load = only(cm.Load, rig.answer(only(cm.Fetch, commands)))
    commit = only(cm.Commit, rig.answer(load))
    assert of(cm.EndOperation, rig.lose()) == []
    assert went_well(rig.answer(commit), operation)
    assert only(cm.Load, rig.see()).version == v(1)


def test_a_drain_ends_with_its_engine() -> None:
    rig = Rig()
    rig.register("a", 1)
    rig.run("a")
    operation, _ = rig.ask_unload("a")
    done = rig.lose()
    assert only(cm.Abort, done)
    assert went_well(rig.answer_all(done), operation)


@pytest.mark.parametrize("lost", [0, 1])
def test_one_replica_serves_while_the_other_is_down(lost: int) -> None:
    rig = Rig(replicas=2)
    rig.register("a", 1)
    rig.answer_all(rig.lose(rig.replicas[lost]))
    ticket, commands = rig.arrive("a")
    commands = tuple(rig.answer_all(commands))
    admits = of(cm.Admit, commands)
    assert [admit.replica for admit in admits] == [rig.replicas[1 - lost]]
    assert admits[0].ticket == ticket


def test_an_engine_that_comes_back_with_what_it_had_is_cleaned_and_filled_again() -> None:
    """Its ids are of another life: nobody vouches for what lies behind them."""
    rig = Rig()
    rig.register("a", 1)
    old = rig.engine_id(1)
    rig.lose()
    unload = only(cm.Unload, rig.see(old))
    assert unload.engine_id == old
    load = only(cm.Load, rig.answer(unload))
    assert load.engine_id != old
