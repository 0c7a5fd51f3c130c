"""Adapters that retire when nobody uses them."""

import pytest

from lorry.adapter_settings import SettingsChange
from lorry.errors import StorageFailed
from lorry.ids import AdapterName
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle.idle import IdleTimes
from lorry.lifecycle.invariants import check
from tests.unit.lifecycle.rig import LIMITS, REFUSED, Rig, of, only, v, went_well

A, B = AdapterName("a"), AdapterName("b")
IDLE = SettingsChange({"idle_ttl_s": 5.0})
IDLE_MS = 5_000


def rig_with_idle(**options: object) -> Rig:
    """`a` retires after five seconds."""
    rig = Rig(**options)  # type: ignore[arg-type]
    rig.register("a", 1, settings=IDLE)
    return rig


def retired(rig: Rig, commands: tuple[cm.Command, ...]) -> list[cm.Command]:
    """The retirement that began in these commands, carried to its end."""
    begun = only(cm.BeginOperation, commands)
    assert begun.kind == "retire"
    done = rig.answer_all(commands)
    assert went_well(done, begun.operation)
    return done


def test_an_adapter_that_nobody_uses_is_unloaded_and_forgotten() -> None:
    rig = rig_with_idle()
    assert rig.fleet.due_ms == IDLE_MS
    assert rig.wait(IDLE_MS - 1) == ()
    done = retired(rig, rig.wait(1))
    assert only(cm.Unload, done)
    commit = only(cm.Commit, done)
    assert (commit.action, commit.version) == ("retire", None)
    assert commit.detail == "nobody used it for 5 s, its idle time-to-live"
    assert A not in rig.world.adapters
    assert rig.refused("a").code == "adapter_not_found"
    assert rig.fleet.due_ms is None


def test_people_are_told_why_it_went() -> None:
    rig = rig_with_idle()
    commands = rig.fleet.handle(ev.TimerDue(), IDLE_MS)
    (begun,) = [c for c in commands if isinstance(c, cm.Note)]
    assert begun.text == "unload of 'a': nobody used it for 5 s, its idle time-to-live"


def test_a_request_is_a_use_when_it_comes_and_when_it_ends() -> None:
    rig = rig_with_idle()
    rig.wait(4_000)
    ticket = rig.run("a")
    assert rig.wait(50_000) == ()
    rig.finish(ticket)
    assert rig.wait(IDLE_MS - 1) == ()
    retired(rig, rig.wait(1))


def test_a_refused_request_is_a_use_too() -> None:
    rig = rig_with_idle()
    rig.wait(4_000)
    assert rig.refused("a", v(9)).code == "adapter_not_found"
    assert rig.wait(4_000) == ()
    retired(rig, rig.wait(1_000))


def test_an_admin_call_is_a_use() -> None:
    rig = rig_with_idle()
    rig.wait(4_000)
    operation = rig.fleet.next_operation()
    rig.answer_all(rig.tell(ev.SettingsAsked(operation, A, {"team": "x"})))
    assert rig.wait(4_999) == ()
    retired(rig, rig.wait(1))


def test_promise_6_a_pinned_adapter_does_not_retire_until_it_is_unpinned() -> None:
    rig = Rig()
    rig.register("a", 1, settings=IDLE, pinned=True)
    assert rig.fleet.due_ms is None
    assert rig.wait(60_000) == ()
    rig.answer_all(rig.ask_pin("a", False)[1])
    assert rig.wait(IDLE_MS - 1) == ()
    retired(rig, rig.wait(1))


def test_a_replacement_and_a_rollback_keep_the_idle_time() -> None:
    rig = rig_with_idle()
    rig.register("a", 2)
    rig.register("a", 1, known=ev.VersionSpec(v(1), 1))
    retired(rig, rig.wait(IDLE_MS))


@pytest.mark.parametrize("idle_s", [None, 60.0])
def test_the_idle_time_can_be_taken_back_or_made_longer(idle_s: float | None) -> None:
    rig = rig_with_idle()
    operation = rig.fleet.next_operation()
    change = SettingsChange({"idle_ttl_s": idle_s})
    rig.answer_all(rig.tell(ev.SettingsAsked(operation, A, None, change)))
    assert rig.wait(IDLE_MS * 4) == ()
    assert (rig.fleet.due_ms is None) == (idle_s is None)


def test_it_can_be_made_shorter() -> None:
    rig = rig_with_idle()
    operation = rig.fleet.next_operation()
    change = SettingsChange({"idle_ttl_s": 1})
    rig.answer_all(rig.tell(ev.SettingsAsked(operation, A, None, change)))
    retired(rig, rig.wait(1_000))


def test_promise_4_a_failed_change_of_the_idle_time_changes_nothing() -> None:
    rig = rig_with_idle()
    operation = rig.fleet.next_operation()
    change = SettingsChange({"idle_ttl_s": None})
    commit = only(cm.Commit, rig.tell(ev.SettingsAsked(operation, A, None, change)))
    rig.tell(ev.CommitFailed(commit.operation, StorageFailed("disk full")))
    retired(rig, rig.wait(IDLE_MS))


def test_an_engine_that_will_not_give_it_up_is_asked_again_later() -> None:
    rig = rig_with_idle()
    commands = rig.wait(IDLE_MS)
    unload = only(cm.Unload, commands)
    ended = only(cm.EndOperation, rig.tell(ev.UnloadFailed(unload.operation, REFUSED)))
    assert ended.error is REFUSED
    rig.run("a")
    rig.fleet.handle(ev.Finished(rig.fleet.world.leases.copy().popitem()[0]), rig.now_ms)
    again = rig.wait(IDLE_MS + LIMITS.retry_last_ms)
    retired(rig, again)


def test_promise_8_a_restart_begins_the_idle_time_anew() -> None:
    rig = Rig()
    rig.now_ms = 1_000
    spec = ev.VersionSpec(v(1), 1)
    adapters = ((A, spec, "/a", False), (B, ev.VersionSpec(v(2), 1), "/b", False))
    rig.answer_all(rig.tell(ev.Restored(adapters, {A: IDLE_MS})))
    assert rig.wait(IDLE_MS - 1) == ()
    retired(rig, rig.wait(1))
    assert list(rig.world.adapters) == [B]


def test_it_retires_also_while_the_engine_is_down() -> None:
    rig = rig_with_idle()
    rig.lose()
    done = rig.answer_all(rig.wait(IDLE_MS))
    assert of(cm.Unload, done) == []
    assert only(cm.Commit, done).action == "retire"


def test_thousands_of_idle_adapters_cost_an_event_nothing() -> None:
    rig = Rig()
    many = tuple(
        (AdapterName(f"n{i}"), ev.VersionSpec(v(16 + i % 200), 1), "/x", False) for i in range(3000)
    )
    rig.lose()
    rig.tell(ev.Restored(many, {name: IDLE_MS for name, *_ in many}))
    looked = []
    rig.world.idle.take_due = looked.append  # type: ignore[method-assign,assignment,func-returns-value]
    rig.wait(1)
    assert len(looked) <= 2
    assert check(rig.world) == []


def test_watched_names_come_in_the_order_of_their_times() -> None:
    times = IdleTimes()
    times.watch(A, 30)
    times.watch(B, 20)
    times.watch(A, 10)
    times.watch(A, 40)
    assert (len(times), times.due_ms(A), times.first_ms()) == (2, 10, 10)
    assert times.take_due(9) is None
    assert [times.take_due(25), times.take_due(25), times.take_due(25)] == [A, B, None]
    times.watch(A, 50)
    times.forget(A)
    assert (len(times), times.first_ms()) == (0, None)
