"""Unload calls: drained, out of every engine, out of the registry, in this order."""

from lorry.errors import AdapterNotFound, EngineTimeout, RequestAborted, StorageFailed
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle.states import State
from tests.unit.lifecycle.rig import LIMITS, REFUSED, Rig, error_of, of, only, v, went_well


def test_promise_3_an_unload_leaves_no_trace_and_a_second_one_finds_nothing() -> None:
    rig = Rig()
    rig.register("a", 1)
    operation, commands = rig.ask_unload("a")
    done = rig.answer_all(commands)
    assert [type(command) for command in done] == [cm.Unload, cm.Commit, cm.EndOperation]
    assert only(cm.Commit, done).version is None
    assert went_well(done, operation)
    assert isinstance(rig.refused("a"), AdapterNotFound)
    assert rig.world.residencies == {}
    assert rig.reserved() == 0
    assert isinstance(error_of(rig.ask_unload("a")[1]), AdapterNotFound)


def test_field_report_one_false_from_the_engine_is_success() -> None:
    rig = Rig()
    rig.register("a", 1)
    operation, commands = rig.ask_unload("a")
    commands = rig.tell(ev.Unloaded(only(cm.Unload, commands).operation, existed=False))
    assert went_well(rig.answer_all(commands), operation)
    assert isinstance(rig.refused("a"), AdapterNotFound)


def test_field_report_one_an_exception_leaves_the_adapter_registered_and_serving() -> None:
    rig = Rig()
    rig.register("a", 1)
    _, commands = rig.ask_unload("a")
    done = rig.tell(ev.UnloadFailed(only(cm.Unload, commands).operation, REFUSED))
    assert error_of(done) is REFUSED
    assert of(cm.Commit, done) == []
    assert rig.state(1) is State.RESIDENT
    rig.run("a")


def test_after_a_refused_unload_the_next_one_asks_the_engine_at_once() -> None:
    rig = Rig()
    rig.register("a", 1)
    _, commands = rig.ask_unload("a")
    rig.tell(ev.UnloadFailed(only(cm.Unload, commands).operation, REFUSED))
    operation, commands = rig.ask_unload("a")
    assert went_well(rig.answer_all(commands), operation)


def test_promise_1_an_unload_that_nobody_knows_the_end_of_admits_nobody() -> None:
    rig = Rig()
    rig.register("a", 1)
    _, commands = rig.ask_unload("a")
    timeout = EngineTimeout("no answer")
    unload = only(cm.Unload, commands)
    done = rig.tell(ev.UnloadFailed(unload.operation, timeout, unsure=True))
    assert error_of(done) is timeout
    assert rig.state(1) is State.DRAINING
    assert rig.reserved() == 1
    ticket, none = rig.arrive("a")
    assert none == ()
    again = only(cm.Unload, rig.wait(500))
    assert again.engine_id == unload.engine_id
    load = only(cm.Load, rig.answer(again))
    assert only(cm.Admit, rig.answer(load)).ticket == ticket


def test_a_listing_settles_what_a_lost_answer_left_open() -> None:
    rig = Rig()
    rig.register("a", 1)
    _, commands = rig.ask_unload("a")
    unload = only(cm.Unload, commands)
    rig.tell(ev.UnloadFailed(unload.operation, EngineTimeout("no answer"), unsure=True))
    load = only(cm.Load, rig.see())
    assert load.version == v(1)
    assert load.engine_id != unload.engine_id


def test_an_unload_waits_for_running_requests_and_then_aborts_them() -> None:
    rig = Rig()
    rig.register("a", 1)
    first, second = rig.run("a"), rig.run("a")
    operation, commands = rig.ask_unload("a", drain_ms=3_000)
    assert commands == ()
    assert rig.finish(first) == ()
    abort = only(cm.Abort, rig.wait(3_000))
    assert abort.ticket == second
    assert isinstance(abort.error, RequestAborted)
    assert str(abort.error) == "The adapter 'a' was unloaded before this request ended."
    assert rig.wait(1) == ()
    assert went_well(rig.answer_all(rig.finish(second)), operation)


def test_a_drain_of_no_time_aborts_at_once() -> None:
    rig = Rig()
    rig.register("a", 1)
    ticket = rig.run("a")
    assert only(cm.Abort, rig.ask_unload("a", drain_ms=0)[1]).ticket == ticket


def test_who_waits_for_a_name_that_is_unloaded_is_answered_at_once() -> None:
    rig = Rig()
    rig.register("a", 1, load=False)
    ticket, commands = rig.arrive("a")
    operation, done = rig.ask_unload("a")
    assert only(cm.Refuse, done).ticket == ticket
    done = rig.answer_all(rig.answer(only(cm.Load, commands)))
    assert only(cm.Unload, done)
    assert went_well(done, operation)


def test_a_stuck_unload_ends_at_its_deadline_and_the_name_is_open_again() -> None:
    rig = Rig()
    rig.register("a", 1)
    _, commands = rig.ask_unload("a", drain_ms=3_000)
    error = error_of(rig.wait(LIMITS.operation_ms + 3_000))
    assert isinstance(error, EngineTimeout)
    assert "it was removing" in str(error)
    ticket, none = rig.arrive("a")
    assert none == ()
    load = only(cm.Load, rig.answer(only(cm.Unload, commands)))
    assert only(cm.Admit, rig.answer(load)).ticket == ticket


def test_promise_4_a_failed_commit_leaves_the_name_registered_and_brings_it_back() -> None:
    rig = Rig()
    rig.register("a", 1, pinned=True)
    _, commands = rig.ask_unload("a")
    commit = only(cm.Commit, rig.answer(only(cm.Unload, commands)))
    done = rig.tell(ev.CommitFailed(commit.operation, StorageFailed("disk full")))
    assert isinstance(error_of(done), StorageFailed)
    rig.answer_all([only(cm.Load, done)])
    assert rig.residency(1).engine_pinned is True
    rig.run("a")


def test_a_cancelled_unload_serves_again() -> None:
    rig = Rig()
    rig.register("a", 1)
    rig.run("a")
    operation, _ = rig.ask_unload("a")
    assert error_of(rig.tell(ev.CancelAsked(operation))).code == "operation_cancelled"
    assert rig.state(1) is State.RESIDENT
    rig.run("a")


def test_a_version_with_two_names_leaves_with_the_last() -> None:
    rig = Rig()
    rig.register("a", 1)
    rig.register("b", 1)
    kept = rig.run("b")
    operation, commands = rig.ask_unload("a", drain_ms=0)
    assert of(cm.Abort, commands) == []
    done = rig.answer_all(commands)
    assert of(cm.Unload, done) == []
    assert went_well(done, operation)
    rig.finish(kept)
    _, commands = rig.ask_unload("b")
    assert only(cm.Unload, commands)


def test_an_unload_drains_its_own_requests_even_when_another_name_has_the_version() -> None:
    rig = Rig()
    rig.register("a", 1)
    rig.register("b", 1)
    mine = rig.run("a")
    operation, commands = rig.ask_unload("a")
    assert commands == ()
    assert went_well(rig.answer_all(rig.finish(mine)), operation)


def test_promise_3_an_unload_waits_for_versions_that_the_name_stood_for_before() -> None:
    rig = Rig(places=3)
    rig.register("a", 1)
    _, commands = rig.ask_load("a")
    done: list[cm.Command] = []
    for command in commands:
        load = only(cm.Load, rig.answer(command, digit=2))
        done += rig.answer(only(cm.Commit, rig.answer(load)))
    old = only(cm.Unload, done)
    operation, commands = rig.ask_unload("a")
    rig.answer(only(cm.Unload, commands))
    assert "a" in rig.world.adapters
    assert went_well(rig.answer_all(rig.answer(old)), operation)


def test_promise_3_an_old_version_that_the_engine_will_not_give_up_fails_the_unload() -> None:
    rig = Rig(places=3)
    rig.register("a", 1)
    ticket = rig.run("a")
    rig.register("a", 2)
    unload = only(cm.Unload, rig.finish(ticket))
    rig.ask_unload("a")
    done = rig.tell(ev.UnloadFailed(unload.operation, REFUSED))
    assert error_of(done) is REFUSED
    assert "a" in rig.world.adapters


def test_promise_3_an_unload_waits_for_what_a_failed_load_of_its_name_left_behind() -> None:
    rig = Rig(places=3)
    rig.register("a", 1)
    _, commands = rig.ask_load("a")
    load = only(cm.Load, rig.answer(only(cm.Fetch, commands), digit=2))
    error = EngineTimeout("no answer")
    left = only(cm.Unload, rig.tell(ev.LoadFailed(load.operation, error, unsure=True)))
    operation, commands = rig.ask_unload("a")
    rig.answer(only(cm.Unload, commands))
    assert "a" in rig.world.adapters
    assert went_well(rig.answer_all(rig.answer(left)), operation)


def test_promise_5_a_stuck_drain_delays_neither_a_load_nor_another_unload() -> None:
    """One lock over all of this is what the field report on SGLang was about."""
    rig = Rig(places=3)
    rig.register("a", 1)
    rig.register("c", 3)
    rig.run("a")
    rig.ask_unload("a", drain_ms=60_000)
    load, commands = rig.ask_load("b")
    assert went_well(rig.answer_all(commands, digit=2), load)
    unload, commands = rig.ask_unload("c")
    assert went_well(rig.answer_all(commands), unload)
    assert rig.state(1) is State.DRAINING


def test_promise_5_room_is_made_elsewhere_while_a_drain_is_stuck() -> None:
    rig = Rig(places=2)
    rig.register("a", 1)
    rig.register("c", 3)
    rig.run("a")
    rig.ask_unload("a", drain_ms=60_000)
    load, commands = rig.ask_load("b")
    done = rig.answer_all(commands, digit=2)
    assert only(cm.Unload, done)
    assert went_well(done, load)


def test_promise_5_a_busy_version_is_drained_although_a_stuck_drain_might_end_some_time() -> None:
    rig = Rig(places=2)
    rig.register("a", 1)
    rig.register("c", 3)
    rig.run("a")
    busy = rig.run("c")
    rig.ask_unload("a", drain_ms=60_000)
    load, commands = rig.ask_load("b")
    rig.answer_all(commands, digit=2)
    rig.wait(LIMITS.patience_ms)
    assert rig.state(3) is State.DRAINING
    assert went_well(rig.answer_all(rig.finish(busy), digit=2), load)


def test_purge_removes_the_snapshot_unless_another_name_has_it() -> None:
    rig = Rig()
    rig.register("a", 1)
    rig.register("b", 1)
    _, commands = rig.ask_unload("a", purge=True)
    assert of(cm.Purge, rig.answer_all(commands)) == []
    _, commands = rig.ask_unload("b", purge=True)
    assert only(cm.Purge, rig.answer_all(commands)).version == v(1)


def test_purge_spares_a_version_whose_other_name_is_being_unloaded() -> None:
    """That unload may fail, and then its name needs the snapshot."""
    rig = Rig()
    rig.register("a", 1)
    rig.register("b", 1)
    rig.run("b")
    rig.ask_unload("b")
    _, commands = rig.ask_unload("a", purge=True)
    assert of(cm.Purge, rig.answer_all(commands)) == []


def test_an_unload_while_the_engine_is_down_ends_at_once() -> None:
    rig = Rig()
    rig.register("a", 1)
    rig.lose()
    operation, commands = rig.ask_unload("a")
    assert went_well(rig.answer_all(commands), operation)
    assert rig.see() == ()
