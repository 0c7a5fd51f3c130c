"""Who gets room, who has to go for it, and in which order."""

from dataclasses import replace

from lorry.ids import AdapterName, ReplicaId, TicketId
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle.room import NEEDS_AHEAD
from lorry.lifecycle.settings import ReplicaLimits
from lorry.lifecycle.states import State
from tests.unit.lifecycle.rig import LIMITS, REFUSED, Rig, error_of, of, only, v, went_well


def full(**rest: object) -> Rig:
    """Two places, taken by `a` and then `b`; `c` is registered and not resident."""
    rig = Rig(places=2, pins=1, **rest)  # type: ignore[arg-type]
    rig.register("a", 1)
    rig.now_ms += 1
    rig.register("b", 2)
    rig.now_ms += 1
    rig.register("c", 3, load=False)
    return rig


def test_the_least_recently_used_version_goes() -> None:
    rig = full()
    rig.now_ms += 1
    rig.finish(rig.run("a"))
    ticket, commands = rig.arrive("c")
    unload = only(cm.Unload, commands)
    assert unload.engine_id == rig.engine_id(2)
    assert rig.reserved() == 2
    load = only(cm.Load, rig.answer(unload))
    assert only(cm.Admit, rig.answer(load)).ticket == ticket
    assert rig.world.counters.evictions == {"room": 1}


def test_promise_6_a_leased_version_waits_for_its_requests() -> None:
    rig = full()
    first, second = rig.run("a"), rig.run("b")
    assert rig.arrive("c")[1] == ()
    assert rig.state(1) is rig.state(2) is State.RESIDENT
    assert only(cm.Unload, rig.finish(second)).engine_id == rig.engine_id(2)
    rig.finish(first)


def test_field_report_two_a_victim_that_stays_is_passed_over_for_the_next() -> None:
    rig = full()
    operation, commands = rig.ask_load("d")
    unload = only(cm.Unload, rig.answer(only(cm.Fetch, commands), digit=4))
    assert unload.engine_id == rig.engine_id(1)
    other = only(cm.Unload, rig.tell(ev.UnloadFailed(unload.operation, REFUSED)))
    assert other.engine_id == rig.engine_id(2)
    assert went_well(rig.answer_all(rig.answer(other)), operation)
    assert rig.state(1) is State.RESIDENT
    rig.run("a")


def test_field_report_two_when_every_victim_stays_they_are_asked_again_later() -> None:
    rig = full()
    ticket, commands = rig.arrive("c")
    for _ in range(2):
        commands = rig.tell(ev.UnloadFailed(only(cm.Unload, commands).operation, REFUSED))
    assert commands == ()
    rig.run("a"), rig.run("b")
    due = rig.fleet.due_ms
    assert due is not None
    assert due <= rig.now_ms + LIMITS.retry_first_ms
    assert ticket in rig.world.tickets


def test_field_report_two_a_load_fails_only_when_its_own_time_is_up() -> None:
    rig = full(limits=replace(LIMITS, patience_ms=100_000))
    rig.run("a"), rig.run("b")
    operation, commands = rig.ask_load("d")
    rig.answer(only(cm.Fetch, commands), digit=4)
    end = only(cm.EndOperation, rig.wait(LIMITS.operation_ms))
    assert end.operation == operation
    assert "No room" not in str(end.error)
    assert "it was waiting for room" in str(end.error)
    assert rig.reserved() == 2
    rig.run("a"), rig.run("b")


def test_promise_11_after_its_patience_the_oldest_need_has_a_busy_version_drained() -> None:
    rig = full()
    mine = rig.run("a")
    rig.run("b"), rig.run("b")
    waiting, _ = rig.arrive("c")
    assert rig.fleet.due_ms == rig.now_ms + LIMITS.patience_ms
    rig.wait(LIMITS.patience_ms)
    assert rig.state(1) is State.DRAINING
    assert rig.state(2) is State.RESIDENT
    later, none = rig.arrive("a")
    assert none == ()
    load = only(cm.Load, rig.answer(only(cm.Unload, rig.finish(mine))))
    assert [admit.ticket for admit in of(cm.Admit, rig.answer(load))] == [waiting]
    assert later in rig.world.tickets


def test_a_drain_for_somebody_who_is_gone_is_recalled() -> None:
    rig = full()
    rig.run("a"), rig.run("b"), rig.run("b")
    waiting, _ = rig.arrive("c")
    rig.wait(LIMITS.patience_ms)
    assert rig.state(1) is State.DRAINING
    later, _ = rig.arrive("a")
    assert only(cm.Admit, rig.tell(ev.Cancelled(waiting))).ticket == later
    assert rig.state(1) is State.RESIDENT


def test_a_drain_is_recalled_when_an_idle_version_comes_along() -> None:
    rig = full()
    rig.run("a")
    other = rig.run("b")
    rig.run("b")
    rig.arrive("c")
    rig.wait(LIMITS.patience_ms)
    rig.finish(other)
    assert rig.state(1) is State.DRAINING
    unload = only(cm.Unload, rig.finish(next(t for t in rig.world.leases_of["b"])))
    assert unload.engine_id == rig.engine_id(2)
    assert rig.state(1) is State.RESIDENT


def test_those_who_waited_longer_for_a_draining_version_get_it_back() -> None:
    """It went for somebody older who is served by now; whoever came later has to wait his turn,
    and the version is not drained again before its own requests were admitted."""
    rig = full()
    rig.register("d", 4, load=False)
    rig.run("a"), rig.run("b"), rig.run("b")
    first, _ = rig.arrive("c")
    rig.wait(LIMITS.patience_ms)
    second, _ = rig.arrive("a")
    rig.now_ms += 1
    rig.arrive("d")
    done = rig.tell(ev.Cancelled(first))
    assert only(cm.Admit, done).ticket == second
    assert rig.state(1) is State.RESIDENT


def test_a_small_need_does_not_overtake_a_large_older_one_for_ever() -> None:
    rig = Rig(places=4, room=10)
    rig.register("a", 1, size=6)
    rig.run("a")
    rig.register("large", 2, size=8, load=False)
    rig.register("small", 3, size=2, load=False)
    rig.arrive("large")
    rig.now_ms += 1
    assert rig.arrive("small")[1] == ()


def test_a_need_that_is_refused_claims_nothing() -> None:
    rig = Rig(places=2, room=10, pins=1)
    rig.register("p", 1, size=8, pinned=True)
    rig.restore_more("large", 2, size=5)
    rig.refused("large")
    assert only(cm.Load, rig.restore_more("small", 3, size=2)).version == v(3)


def test_no_more_loads_at_once_than_may_be_and_the_rest_follow() -> None:
    rig = Rig(places=4, limits=replace(LIMITS, loads_per_replica_max=2))
    for digit, name in enumerate("abc", start=1):
        rig.register(name, digit, load=False)
    loads = [only(cm.Load, rig.arrive(name)[1]) for name in "ab"]
    assert rig.arrive("c")[1] == ()
    assert only(cm.Load, rig.answer(loads[0])).version == v(3)


def test_two_replaces_beside_do_not_wait_for_each_other_for_ever() -> None:
    """Each spares the version that it replaces, and the other one's may go."""
    rig = Rig(places=2, pins=0)
    rig.register("a", 1)
    rig.register("b", 2)
    first, one = rig.ask_load("a")
    second, two = rig.ask_load("b")
    done = rig.answer_all(one, digit=3) + rig.answer_all(two, digit=4)
    done += rig.answer_all(rig.wait(LIMITS.patience_ms), digit=4)
    done += rig.answer_all(rig.wait(LIMITS.patience_ms), digit=4)
    assert went_well(done, first)
    assert went_well(done, second)


def test_a_version_that_is_about_to_be_published_is_not_evicted() -> None:
    rig = Rig(places=1, pins=0)
    rig.register("b", 2, load=False)
    _, commands = rig.ask_load("a")
    load = only(cm.Load, rig.answer(only(cm.Fetch, commands)))
    commit = only(cm.Commit, rig.answer(load))
    assert rig.arrive("b")[1] == ()
    assert only(cm.Unload, rig.answer(commit)).engine_id == load.engine_id


def test_of_two_replicas_the_one_with_room_loads() -> None:
    rig = Rig(places=1, pins=0, replicas=2)
    rig.register("a", 1)
    rig.register("b", 2)
    assert {rig.residency(1, 0).state, rig.residency(2, 1).state} == {State.RESIDENT}


def test_many_needs_are_spread_over_the_replicas_that_have_room() -> None:
    rig = Rig(places=1, pins=0, replicas=3)
    for digit, name in enumerate("abc", start=1):
        rig.register(name, digit, load=False)
    loads = [only(cm.Load, rig.arrive(name)[1]) for name in "abc"]
    assert [load.replica for load in loads] == rig.replicas


def test_a_version_goes_where_it_can_fit_and_not_where_most_places_are_free() -> None:
    rig = Rig(places=4, room=5)
    replica = ReplicaId("big")
    rig.tell(ev.ReplicaAdded(replica, ReplicaLimits(versions_max=1, bytes_max=50, pins_max=0)))
    rig.see(replica=replica)
    rig.register("a", 1, size=20, load=False)
    assert only(cm.Load, rig.arrive("a")[1]).replica == replica


def test_a_version_that_failed_on_one_replica_is_tried_on_another() -> None:
    rig = Rig(replicas=2)
    rig.register("a", 1, load=False)
    ticket, commands = rig.arrive("a")
    first = only(cm.Load, commands)
    second = only(cm.Load, rig.tell(ev.LoadFailed(first.operation, REFUSED)))
    assert second.replica != first.replica
    assert only(cm.Admit, rig.answer(second)).ticket == ticket


def test_room_is_made_for_a_few_needs_at_a_time() -> None:
    """More would evict what is still in use, only to wait."""
    rig = Rig(places=12)
    for digit in range(1, 13):
        rig.register(f"n{digit}", digit)
    busy = [rig.run(f"n{digit}") for digit in range(1, 13)]
    for digit in range(205, 220):
        rig.restore_more(f"w{digit}", digit, size=1)
        rig.arrive(f"w{digit}")
    for ticket in busy:
        rig.finish(ticket)
    assert rig.world.counters.evictions == {"room": NEEDS_AHEAD}


def _replace_behind_its_old_version() -> tuple[Rig, TicketId, list[cm.Command]]:
    """One place. A request for `a` waits for it when `a` is replaced, so the old version, which was
    not there to be beside, gets the place; and what was commanded from then on."""
    rig = Rig(places=1, pins=0)
    rig.register("a", 1, load=False)
    rig.register("b", 2)
    running = rig.run("b")
    waiting, _ = rig.arrive("a")
    rig.now_ms += 1
    _, commands = rig.ask_load("a")
    assert rig.answer(only(cm.Fetch, commands), digit=3) == ()
    done = rig.answer_all(rig.finish(running))
    assert only(cm.Admit, done).ticket == waiting
    return rig, waiting, done


def test_a_replace_that_can_have_no_room_any_more_says_so_at_once() -> None:
    rig, _, done = _replace_behind_its_old_version()
    assert "room for the old version and the new one at once" in str(error_of(done))
    assert rig.world.adapters[AdapterName("a")].spec.version == v(1)
    assert not rig.world.asked


def test_promise_5_a_replace_without_room_keeps_no_other_adapter_out() -> None:
    rig, running, _ = _replace_behind_its_old_version()
    load_c, commands = rig.ask_load("c")
    assert rig.answer(only(cm.Fetch, commands), digit=4) == ()
    assert went_well(rig.answer_all(rig.finish(running)), load_c)


def test_a_replace_without_room_takes_what_another_name_has_loaded() -> None:
    """Whoever else waits for its new version spares nothing."""
    rig = Rig(places=1, pins=0)
    rig.register("a", 1, load=False)
    rig.register("b", 2)
    running = rig.run("b")
    waiting, _ = rig.arrive("a")
    rig.now_ms += 1
    replace_a, commands = rig.ask_load("a")
    rig.answer(only(cm.Fetch, commands), digit=3)
    load_c, commands = rig.ask_load("c")
    rig.answer(only(cm.Fetch, commands), digit=3)
    done = rig.answer_all(rig.finish(running)) + rig.answer_all(rig.finish(waiting))
    assert went_well(done, replace_a)
    assert went_well(done, load_c)


def test_a_replace_without_room_here_waits_for_a_replica_that_is_down() -> None:
    rig = Rig(places=1, pins=0, replicas=2)
    rig.register("a", 1)
    (here,) = rig.world.residencies_of(v(1))
    (other,) = set(rig.replicas) - {here.replica}
    rig.lose(other)
    replace_a, commands = rig.ask_load("a")
    assert rig.answer(only(cm.Fetch, commands), digit=3) == ()
    assert went_well(rig.answer_all(rig.see(replica=other)), replace_a)


def test_promise_7_a_replace_without_room_answers_no_requests_of_another_name() -> None:
    """They wait for the successor of their own version, and not for that version."""
    rig = Rig(places=1, pins=0)
    rig.register("a", 1, load=False)
    rig.register("c", 3, load=False)
    rig.register("b", 2)
    running = rig.run("b")
    rig.arrive("a")
    rig.now_ms += 1
    replace_a, commands = rig.ask_load("a")
    rig.answer(only(cm.Fetch, commands), digit=3)
    waiting, _ = rig.arrive("c")
    _, commands = rig.ask_load("c", strategy=ev.Strategy.DRAIN_FIRST)
    rig.answer(only(cm.Fetch, commands), digit=4)
    done = rig.answer_all(rig.finish(running))
    assert only(cm.EndOperation, done).operation == replace_a
    assert of(cm.Refuse, done) == []
    assert waiting in rig.world.tickets
