"""Load calls: register, replace, roll back, fail, be cancelled."""

from dataclasses import replace

import pytest

from lorry.errors import (
    AdapterConflict,
    AdapterNotFound,
    AllPinned,
    CapacityExhausted,
    EngineTimeout,
    EngineUnreachable,
    LorryError,
    OperationCancelled,
    QueueFull,
    SourceNotFound,
    SourceUnreachable,
    StorageFailed,
    VersionMismatch,
)
from lorry.ids import AdapterName
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle.states import State
from tests.unit.lifecycle.rig import LIMITS, REFUSED, Rig, error_of, of, only, v, went_well

A = AdapterName("a")


def fetched(rig: Rig, commands: tuple[cm.Command, ...], digit: int) -> tuple[cm.Command, ...]:
    """Answer the fetch only."""
    return rig.answer(only(cm.Fetch, commands), digit=digit)


def test_a_load_fetches_loads_commits_and_only_then_serves() -> None:
    rig = Rig()
    operation, commands = rig.ask_load("a")
    assert only(cm.Fetch, commands).source == "/a"
    load = only(cm.Load, fetched(rig, commands, 1))
    assert isinstance(rig.refused("a"), AdapterNotFound)
    commit = only(cm.Commit, rig.answer(load))
    assert (commit.action, commit.version, commit.pinned) == ("register", v(1), False)
    assert isinstance(rig.refused("a"), AdapterNotFound)
    assert went_well(rig.answer(commit), operation)
    rig.run("a")


def test_load_false_registers_and_loads_at_the_first_request() -> None:
    rig = Rig()
    _, commands = rig.ask_load("a", load=False)
    assert of(cm.Load, rig.answer_all(commands)) == []
    assert only(cm.Load, rig.arrive("a")[1]).version == v(1)


def test_create_refuses_a_name_that_is_taken() -> None:
    rig = Rig()
    rig.register("a", 1)
    error = error_of(rig.ask_load("a", mode=ev.Mode.CREATE)[1])
    assert isinstance(error, AdapterConflict)
    assert str(error) == "The adapter 'a' has already been loaded."


def test_replace_refuses_a_name_that_is_not() -> None:
    error = error_of(Rig().ask_load("a", mode=ev.Mode.REPLACE)[1])
    assert isinstance(error, AdapterNotFound)
    assert str(error) == "The adapter 'a' cannot be found."


def test_if_match_compares_with_what_is_served_when_its_turn_comes() -> None:
    rig = Rig()
    rig.register("a", 1)
    error = error_of(rig.ask_load("a", if_match=v(2))[1])
    assert isinstance(error, VersionMismatch)
    assert str(error) == "'a' serves 111111111111, not 222222222222."
    assert rig.register("a", 2, if_match=v(1)) == v(2)
    assert isinstance(error_of(rig.ask_load("b", if_match=v(1))[1]), VersionMismatch)


def test_promise_4_a_failed_fetch_leaves_the_old_version_serving() -> None:
    rig = Rig()
    rig.register("a", 1)
    _, commands = rig.ask_load("a")
    fetch = only(cm.Fetch, commands)
    done = rig.tell(ev.FetchFailed(fetch.operation, SourceNotFound("nothing there")))
    assert isinstance(error_of(done), SourceNotFound)
    rig.run("a")


def test_promise_4_a_failed_load_returns_its_reservation_and_is_forgotten() -> None:
    rig = Rig()
    rig.register("a", 1)
    _, commands = rig.ask_load("a")
    load = only(cm.Load, fetched(rig, commands, 2))
    assert rig.reserved() == 2
    assert error_of(rig.tell(ev.LoadFailed(load.operation, REFUSED))) is REFUSED
    assert rig.reserved() == 1
    assert (v(2), rig.replicas[0]) not in rig.world.residencies
    assert only(cm.Admit, rig.arrive("a")[1]).version == v(1)


def test_promise_4_a_failed_commit_unloads_what_was_loaded() -> None:
    rig = Rig()
    _, commands = rig.ask_load("a")
    commit = only(cm.Commit, rig.answer(only(cm.Load, fetched(rig, commands, 1))))
    error = StorageFailed("disk full")
    done = rig.tell(ev.CommitFailed(commit.operation, error))
    assert error_of(done) is error
    rig.answer(only(cm.Unload, done))
    assert rig.world.residencies == {}
    assert rig.reserved() == 0


def test_a_load_whose_end_nobody_knows_is_removed_to_be_sure() -> None:
    rig = Rig()
    _, commands = rig.ask_load("a")
    load = only(cm.Load, fetched(rig, commands, 1))
    timeout = EngineTimeout("no answer")
    done = rig.tell(ev.LoadFailed(load.operation, timeout, unsure=True))
    assert error_of(done) is timeout
    assert only(cm.Unload, done).engine_id == load.engine_id
    assert rig.reserved() == 1
    rig.tell(ev.Unloaded(only(cm.Unload, done).operation, existed=False))
    assert rig.reserved() == 0


def test_a_late_answer_of_a_load_that_was_given_up_is_dropped_and_counted() -> None:
    rig = Rig()
    _, commands = rig.ask_load("a")
    load = only(cm.Load, fetched(rig, commands, 1))
    rig.tell(ev.LoadFailed(load.operation, EngineTimeout("no answer"), unsure=True))
    assert rig.tell(ev.Loaded(load.operation)) == ()
    assert rig.state(1) is State.UNLOADING
    assert rig.world.counters.stale_reports == 1


def test_promise_2_a_replace_switches_at_once_and_running_requests_keep_their_version() -> None:
    rig = Rig()
    rig.register("a", 1)
    ticket = rig.run("a")
    rig.register("a", 2)
    assert only(cm.Admit, rig.arrive("a")[1]).version == v(2)
    assert rig.state(1) is State.DRAINING
    assert only(cm.Unload, rig.finish(ticket)).engine_id == rig.engine_id(1)


def test_the_same_version_again_ends_well_without_a_load() -> None:
    rig = Rig()
    rig.register("a", 1)
    operation, commands = rig.ask_load("a")
    done = rig.answer_all(commands, digit=1)
    assert of(cm.Load, done) == []
    assert went_well(done, operation)


def test_promise_4_a_replace_without_room_beside_is_refused_before_any_side_effect() -> None:
    rig = Rig(places=1, pins=0)
    rig.register("a", 1)
    _, commands = rig.ask_load("a")
    done = fetched(rig, commands, 2)
    error = error_of(done)
    assert isinstance(error, CapacityExhausted)
    assert "room for the old version and the new one at once" in str(error)
    assert "drain-first" in str(error)
    assert of(cm.Unload, done) == []
    rig.run("a")


def test_drain_first_gives_the_old_version_up_for_the_new_one() -> None:
    rig = Rig(places=1, pins=0)
    rig.register("a", 1)
    ticket = rig.run("a")
    operation, commands = rig.ask_load("a", strategy=ev.Strategy.DRAIN_FIRST)
    assert fetched(rig, commands, 2) == ()
    assert rig.state(1) is State.DRAINING
    waiting, none = rig.arrive("a")
    assert none == ()
    load = only(cm.Load, rig.answer(only(cm.Unload, rig.finish(ticket))))
    assert load.version == v(2)
    done = rig.answer_all([load])
    assert went_well(done, operation)
    admit = only(cm.Admit, done)
    assert (admit.ticket, admit.version) == (waiting, v(2))


def test_promise_4_a_drain_first_that_fails_brings_the_old_version_back() -> None:
    rig = Rig(places=1, pins=0)
    rig.register("a", 1)
    _, commands = rig.ask_load("a", strategy=ev.Strategy.DRAIN_FIRST)
    load = only(cm.Load, rig.answer(only(cm.Unload, fetched(rig, commands, 2))))
    done = rig.tell(ev.LoadFailed(load.operation, REFUSED))
    assert error_of(done) is REFUSED
    assert only(cm.Load, done).version == v(1)


def test_drain_first_takes_a_pinned_version_of_its_own_name() -> None:
    rig = Rig(places=2, room=2, pins=1)
    rig.register("a", 1, size=2, pinned=True)
    _, commands = rig.ask_load("a", strategy=ev.Strategy.DRAIN_FIRST)
    done = rig.answer(only(cm.Fetch, commands), digit=2, size=2)
    load = only(cm.Load, rig.answer(only(cm.Unload, done)))
    assert load.version == v(2)
    rig.answer_all([load])
    assert rig.residency(2).engine_pinned is True


def test_promise_5_drain_first_spares_a_version_that_another_name_has() -> None:
    rig = Rig(places=1, pins=0)
    rig.register("a", 1)
    rig.register("b", 1)
    ticket = rig.run("b")
    _, commands = rig.ask_load("a", strategy=ev.Strategy.DRAIN_FIRST)
    fetched(rig, commands, 2)
    assert rig.state(1) is State.RESIDENT
    rig.run("b")
    rig.finish(ticket)
    assert rig.state(1) is State.RESIDENT


def test_requests_do_not_load_a_version_again_that_gives_way() -> None:
    rig = Rig(places=2, pins=0)
    rig.register("a", 1)
    rig.register("b", 2)
    ticket = rig.run("b")
    rig.arrive("b"), rig.run("a")
    _, commands = rig.ask_load("b", strategy=ev.Strategy.DRAIN_FIRST)
    fetched(rig, commands, 3)
    assert rig.state(2) is State.DRAINING
    assert rig.arrive("b")[1] == ()
    rig.finish(ticket)


def test_a_rollback_needs_no_fetch() -> None:
    rig = Rig()
    rig.register("a", 1)
    rig.register("a", 2)
    operation, commands = rig.ask_load("a", known=ev.VersionSpec(v(1), 1))
    done = rig.answer_all(commands)
    assert of(cm.Fetch, done) == []
    assert only(cm.Commit, done).action == "rollback"
    assert went_well(done, operation)


def test_a_snapshot_that_is_gone_is_fetched_again_and_must_be_the_same_version() -> None:
    rig = Rig()
    rig.register("a", 1, load=False)
    ticket, commands = rig.arrive("a")
    load = only(cm.Load, commands)
    gone = StorageFailed("gone")
    fetch = only(cm.Fetch, rig.tell(ev.LoadFailed(load.operation, gone, missing=True)))
    assert (fetch.source, fetch.expected) == ("/a", v(1))
    again = only(cm.Load, rig.answer(fetch))
    assert only(cm.Admit, rig.answer(again)).ticket == ticket


def test_promise_5_a_snapshot_is_fetched_from_each_source_of_its_names_before_that_fails() -> None:
    """Else whoever shares a version, and lost its source, kept it from all others."""
    rig = Rig(up=False)
    rig.restore_more("a", 1, 1), rig.restore_more("b", 1, 1)
    load, gone = only(cm.Load, rig.see()), StorageFailed("gone")
    ticket, _ = rig.arrive("b")
    first = only(cm.Fetch, rig.tell(ev.LoadFailed(load.operation, gone, missing=True)))
    second = only(cm.Fetch, rig.tell(ev.FetchFailed(first.operation, SourceNotFound("no /a"))))
    assert {first.source, second.source} == {"/a", "/b"}
    done = rig.tell(ev.FetchFailed(second.operation, SourceNotFound("no")))
    assert only(cm.Refuse, done).ticket == ticket
    assert of(cm.Fetch, done) == []


def test_a_snapshot_that_goes_again_and_again_is_not_fetched_in_a_circle() -> None:
    rig = Rig()
    rig.register("a", 1, load=False)
    _, commands = rig.arrive("a")
    gone = StorageFailed("gone")
    done = rig.tell(ev.LoadFailed(only(cm.Load, commands).operation, gone, missing=True))
    again = only(cm.Load, rig.answer(only(cm.Fetch, done)))
    done = rig.tell(ev.LoadFailed(again.operation, gone, missing=True))
    assert of(cm.Fetch, done) == []
    assert "could not be loaded: gone" in str(only(cm.Refuse, done).error)


def test_a_snapshot_that_goes_again_after_a_while_is_fetched_at_once_again() -> None:
    """Its first fetch had come too late for whoever asked; the next one was refused for that."""
    rig = Rig()
    rig.register("a", 1, load=False)
    ticket, commands = rig.arrive("a")
    gone = StorageFailed("gone")
    done = rig.tell(ev.LoadFailed(only(cm.Load, commands).operation, gone, missing=True))
    rig.tell(ev.Cancelled(ticket))
    rig.answer_all(done)
    rig.now_ms += LIMITS.retry_last_ms + 1
    load = only(cm.Load, rig.arrive("a")[1])
    done = rig.tell(ev.LoadFailed(load.operation, gone, missing=True))
    only(cm.Load, rig.answer(only(cm.Fetch, done)))


def test_a_fresh_load_mends_a_version_whose_snapshot_was_gone() -> None:
    rig = Rig()
    rig.register("a", 1, load=False)
    _, commands = rig.arrive("a")
    gone = StorageFailed("gone")
    done = rig.tell(ev.LoadFailed(only(cm.Load, commands).operation, gone, missing=True))
    rig.tell(ev.FetchFailed(only(cm.Fetch, done).operation, SourceNotFound("nothing")))
    rig.register("b", 1, load=False)
    assert only(cm.Load, rig.arrive("a")[1]).version == v(1)


def test_a_snapshot_that_another_call_brings_ends_the_wait_for_a_fetch() -> None:
    """The fetch failed later, its source had changed, and the snapshot was missed for ever."""
    rig = Rig()
    _, asked = rig.ask_load("b")
    _, commands = rig.ask_load("a", known=ev.VersionSpec(v(1), 1))
    load, gone = only(cm.Load, commands), StorageFailed("gone")
    fetch = only(cm.Fetch, rig.tell(ev.LoadFailed(load.operation, gone, missing=True)))
    again = only(cm.Load, fetched(rig, asked, 1))
    rig.tell(ev.FetchFailed(fetch.operation, SourceNotFound("nothing")))
    assert len(of(cm.Commit, rig.answer(again))) == 2


def test_a_snapshot_that_comes_while_it_is_missed_is_not_fetched_again() -> None:
    rig = Rig()
    _, asked = rig.ask_load("b")
    _, commands = rig.ask_load("a", known=ev.VersionSpec(v(1), 1))
    fetched(rig, asked, 1)
    gone = StorageFailed("gone")
    done = rig.tell(ev.LoadFailed(only(cm.Load, commands).operation, gone, missing=True))
    assert of(cm.Fetch, done) == []
    assert len(of(cm.Commit, rig.answer(only(cm.Load, done)))) == 2


@pytest.mark.parametrize("pinned", [True, False])
def test_nothing_is_loaded_while_every_engine_is_down(pinned: bool) -> None:
    rig = Rig(up=False)
    error = error_of(rig.ask_load("a", pinned=pinned)[1])
    assert isinstance(error, EngineUnreachable)
    operation, commands = rig.ask_load("b", load=False)
    assert went_well(rig.answer_all(commands), operation)


def test_an_adapter_larger_than_the_engine_is_refused() -> None:
    rig = Rig(room=10)
    for load in (True, False):
        _, commands = rig.ask_load("a", load=load)
        error = error_of(rig.answer(only(cm.Fetch, commands), size=11))
        assert isinstance(error, CapacityExhausted)
        assert "needs 11 bytes" in str(error)


def test_promise_6_a_load_that_pins_make_impossible_is_refused() -> None:
    rig = Rig(places=2, room=10)
    rig.register("p", 1, size=8, pinned=True)
    _, commands = rig.ask_load("a")
    error = error_of(rig.answer(only(cm.Fetch, commands), digit=2, size=3))
    assert isinstance(error, AllPinned)
    assert str(error) == "No room for 'a': the pinned adapters p fill it."


def test_promise_6_a_load_that_waits_is_refused_when_pins_make_it_impossible() -> None:
    rig = Rig(places=2, room=10)
    rig.register("p", 1, size=8)
    rig.run("p")
    _, commands = rig.ask_load("a")
    assert rig.answer(only(cm.Fetch, commands), digit=2, size=3) == ()
    done = rig.answer_all(rig.ask_pin("p")[1])
    errors = [end.error for end in of(cm.EndOperation, done)]
    assert any(isinstance(error, AllPinned) for error in errors)


def test_one_call_at_a_time_for_a_name_in_the_order_asked() -> None:
    rig = Rig()
    first, commands = rig.ask_load("a")
    second, none = rig.ask_load("a", mode=ev.Mode.CREATE)
    assert none == ()
    done = rig.answer_all(commands)
    ends = of(cm.EndOperation, done)
    assert [end.operation for end in ends] == [first, second]
    assert ends[0].error is None
    assert isinstance(ends[1].error, AdapterConflict)


def test_too_many_calls_for_one_name_are_refused() -> None:
    rig = Rig(limits=replace(LIMITS, operations_per_adapter_max=1))
    rig.ask_load("a")
    error = error_of(rig.ask_load("a")[1])
    assert isinstance(error, QueueFull)
    assert str(error) == "1 operations on 'a' are waiting already."


def test_a_call_can_be_cancelled_until_it_writes() -> None:
    rig = Rig()
    operation, commands = rig.ask_load("a")
    load = only(cm.Load, fetched(rig, commands, 1))
    error = error_of(rig.tell(ev.CancelAsked(operation)))
    assert isinstance(error, OperationCancelled)
    assert str(error) == "load of 'a' was cancelled."
    rig.answer_all(rig.answer(load))
    assert rig.world.residencies == {}

    operation, commands = rig.ask_load("a")
    commit = only(cm.Commit, rig.answer(only(cm.Load, fetched(rig, commands, 1))))
    assert rig.tell(ev.CancelAsked(operation)) == ()
    assert went_well(rig.answer(commit), operation)


def time_out(rig: Rig) -> LorryError:
    """Let the deadline of the one admin call pass."""
    return error_of(rig.wait(LIMITS.operation_ms))


def test_a_call_ends_at_its_deadline_whatever_it_waits_for() -> None:
    rig = Rig(places=1, pins=0, limits=replace(LIMITS, patience_ms=100_000))
    _, commands = rig.ask_load("a")
    error = time_out(rig)
    assert isinstance(error, SourceUnreachable)
    assert str(error) == "Load of 'a' did not end within 10 s; it was fetching."
    assert fetched(rig, commands, 1) == ()

    _, commands = rig.ask_load("a")
    load = only(cm.Load, fetched(rig, commands, 1))
    assert "it was loading" in str(time_out(rig))
    rig.answer_all(rig.answer(load))

    rig.register("b", 2)
    rig.run("b")
    _, commands = rig.ask_load("a")
    fetched(rig, commands, 1)
    error = time_out(rig)
    assert isinstance(error, CapacityExhausted)
    assert "it was waiting for room" in str(error)


def test_calls_that_time_out_together_each_end_once() -> None:
    """A call whose turn came because the one before it timed out may end at once, too."""
    rig = Rig()
    first, _ = rig.ask_load("a")
    second, _ = rig.ask_pin("a")
    third, _ = rig.ask_pin("a", pinned=False)
    ends = of(cm.EndOperation, rig.wait(LIMITS.operation_ms))
    assert [end.operation for end in ends] == [first, second, third]


def test_a_call_that_writes_is_not_ended_by_its_deadline() -> None:
    rig = Rig()
    operation, commands = rig.ask_load("a", load=False)
    commit = only(cm.Commit, fetched(rig, commands, 1))
    assert rig.wait(LIMITS.operation_ms) == ()
    assert went_well(rig.answer(commit), operation)


def test_labels_are_written_and_change_nothing_else() -> None:
    rig = Rig()
    rig.register("a", 1)
    operation = rig.fleet.next_operation()
    commands = rig.tell(ev.SettingsAsked(operation, A, {"team": "x"}))
    commit = only(cm.Commit, commands)
    assert (commit.action, commit.version, commit.labels) == ("label", v(1), {"team": "x"})
    assert went_well(rig.answer(commit), operation)


def test_a_prefetch_ends_when_the_version_is_resident() -> None:
    rig = Rig()
    rig.register("a", 1, load=False)
    operation = rig.fleet.next_operation()
    commands = rig.tell(ev.PrefetchAsked(operation, A))
    assert went_well(rig.answer(only(cm.Load, commands)), operation)
    again = rig.fleet.next_operation()
    assert went_well(rig.tell(ev.PrefetchAsked(again, A)), again)


def test_an_admins_word_ends_the_back_off_of_a_failed_version() -> None:
    rig = Rig()
    rig.register("a", 1, load=False)
    _, commands = rig.arrive("a")
    rig.tell(ev.LoadFailed(only(cm.Load, commands).operation, REFUSED))
    operation = rig.fleet.next_operation()
    assert only(cm.Load, rig.tell(ev.PrefetchAsked(operation, A))).version == v(1)


def test_what_one_call_makes_possible_for_the_next_happens_at_once() -> None:
    """The unload's turn comes in the middle of the plan that ends the prefetch."""
    rig = Rig()
    rig.register("a", 1, load=False)
    commands = rig.tell(ev.PrefetchAsked(rig.fleet.next_operation(), A))
    rig.ask_unload("a")
    assert only(cm.Unload, rig.answer(only(cm.Load, commands)))


def test_a_source_that_was_pinned_while_it_was_fetched_is_what_is_written_and_shown() -> None:
    rig = Rig()
    operation, commands = rig.ask_load("a", load=False, digest="sha256:1")
    fetch = only(cm.Fetch, commands)
    assert (fetch.source, fetch.digest) == ("/a", "sha256:1")
    found = ev.Fetched(fetch.operation, ev.VersionSpec(v(1), 3), "hf://a/b@commit")
    commit = only(cm.Commit, rig.tell(found))
    assert commit.source == "hf://a/b@commit"
    assert went_well(rig.answer(commit), operation)
    assert rig.fleet.world.adapters[AdapterName("a")].source == "hf://a/b@commit"
