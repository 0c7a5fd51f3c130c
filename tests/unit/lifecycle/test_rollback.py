"""Rollbacks that find their version still in an engine; and what people are told of waits."""

from lorry.errors import AdapterNotFound
from lorry.ids import AdapterName, OperationId
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle.reasons import why_waiting
from lorry.lifecycle.states import State
from tests.unit.lifecycle.rig import LIMITS, REFUSED, Rig, of, only, v, went_well

A = AdapterName("a")
FIRST = ev.VersionSpec(v(1), 1)


def replaced_while_running(places: int = 2, **options: object) -> tuple[Rig, int]:
    """`a` stands for v(2), and a request still runs on v(1)."""
    rig = Rig(places=places, **options)  # type: ignore[arg-type]
    rig.register("a", 1)
    ticket = rig.run("a")
    rig.register("a", 2)
    assert rig.state(1) is State.DRAINING
    return rig, ticket


def roll_back(rig: Rig) -> tuple[OperationId, list[cm.Command]]:
    """To v(1), with every command answered well."""
    operation, commands = rig.ask_load("a", mode=ev.Mode.REPLACE, known=FIRST)
    return operation, rig.answer_all(commands)


def test_a_rollback_takes_a_version_back_that_still_drains() -> None:
    rig, ticket = replaced_while_running()
    operation, done = roll_back(rig)
    assert went_well(done, operation)
    assert of(cm.Load, done) == []
    assert only(cm.Commit, done).action == "rollback"
    assert rig.state(1) is State.RESIDENT
    assert only(cm.Admit, rig.arrive("a")[1]).version == v(1)
    rig.finish(ticket)
    assert rig.state(1) is State.RESIDENT


def test_a_rollback_that_waits_behind_an_unload_finds_nothing_to_go_back_to() -> None:
    """Level two of the simulation, seed 652: the name came back before the rollback's turn."""
    rig, ticket = replaced_while_running()
    rig.answer_all(rig.finish(ticket))
    _, unload = rig.ask_unload("a")
    again, _ = rig.ask_load("a", mode=ev.Mode.UPSERT)
    rollback, _ = rig.ask_load("a", mode=ev.Mode.REPLACE, known=FIRST)
    done = rig.answer_all(unload)
    ends = {end.operation: end.error for end in of(cm.EndOperation, done)}
    assert isinstance(ends[rollback], AdapterNotFound)
    assert again not in ends or ends[again] is None


def test_a_rollback_needs_no_room_beside_what_is_there_already() -> None:
    rig, _ = replaced_while_running(room=2)
    rig.run("a")
    operation, done = roll_back(rig)
    assert went_well(done, operation)
    assert only(cm.Unload, rig.finish(2)).engine_id == rig.engine_id(2)


def test_a_rollback_is_not_counted_on_by_somebody_who_waits_for_room() -> None:
    rig, _ = replaced_while_running()
    rig.run("a")
    rig.register("c", 3, load=False)
    waiting, _ = rig.arrive("c")
    rig.now_ms += 10
    operation, done = roll_back(rig)
    assert went_well(done, operation)
    assert of(cm.Load, done) == []
    assert rig.state(1) is State.RESIDENT
    load = only(cm.Load, rig.answer_all(rig.finish(2)))
    assert load.version == v(3)
    assert waiting not in rig.world.tickets


def test_a_rollback_after_the_last_request_loads_again() -> None:
    rig, ticket = replaced_while_running()
    rig.answer_all(rig.finish(ticket))
    operation, done = roll_back(rig)
    assert went_well(done, operation)
    assert only(cm.Load, done).version == v(1)


def test_a_version_of_which_nobody_knows_is_not_taken_back() -> None:
    rig, ticket = replaced_while_running()
    unload = only(cm.Unload, rig.finish(ticket))
    rig.tell(ev.UnloadFailed(unload.operation, REFUSED, unsure=True))
    assert rig.state(1) is State.DRAINING
    operation, commands = rig.ask_load("a", mode=ev.Mode.REPLACE, known=FIRST)
    assert rig.state(1) is not State.RESIDENT
    done = rig.answer_all(commands)
    assert (of(cm.Unload, done) != [], of(cm.Load, done) != []) == (True, True)
    assert went_well(done, operation)


# What people are told


def notes(rig: Rig, event: ev.Event, after_ms: int = 0) -> list[tuple[str, str]]:
    """Kinds and texts of what one event brings."""
    rig.now_ms += after_ms
    commands = rig.fleet.handle(event, rig.now_ms)
    return [(c.kind, c.text) for c in commands if isinstance(c, cm.Note)]


def full_of_leases() -> Rig:
    """Two places: `a` with a running request, `p` pinned; `c` is registered and not loaded."""
    rig = Rig(places=2, pins=1)
    rig.register("a", 1)
    rig.register("p", 2, pinned=True)
    rig.run("a")
    rig.register("c", 3, load=False)
    return rig


def arrival(name: str, ticket: int) -> ev.Arrived:
    return ev.Arrived(ticket, AdapterName(name))  # type: ignore[arg-type]


def test_who_waits_for_room_is_told_once_who_has_it() -> None:
    rig = full_of_leases()
    (told,) = notes(rig, arrival("c", 50))
    assert told == (
        "waiting",
        "'c' waits for room: 2 of 2 places and 2 of 100 bytes on r0 are taken: "
        "'a' (1 running), 'p' (pinned)",
    )
    assert notes(rig, arrival("c", 51), after_ms=10) == []
    assert why_waiting(rig.world, AdapterName("c")).startswith("2 of 2 places")
    assert why_waiting(rig.world, A) == ""


def test_an_eviction_says_for_whom_and_why_this_one() -> None:
    rig = Rig(places=1)
    rig.register("a", 1)
    rig.register("c", 3, load=False)
    told = notes(rig, arrival("c", 50), after_ms=2_500)
    assert told == [("evicted", "'a' on r0 makes room for 'c'; it was not used for 2.5 s")]
    assert why_waiting(rig.world, AdapterName("c")).startswith("1 of 1 places")


def test_a_drain_for_fairness_says_how_long_somebody_has_waited() -> None:
    rig = full_of_leases()
    notes(rig, arrival("c", 50))
    (told,) = notes(rig, ev.TimerDue(), after_ms=LIMITS.patience_ms)
    assert told == (
        "evicted",
        "'a' on r0 drains for 'c', which has waited longest (1.0 s); running on it: 1",
    )


def test_other_reasons_to_wait_have_their_words() -> None:
    rig = Rig()
    rig.register("a", 1, load=False)
    load = only(cm.Load, rig.arrive("a")[1])
    assert why_waiting(rig.world, A) == "it is being loaded on r0"
    rig.tell(ev.LoadFailed(load.operation, REFUSED))
    assert why_waiting(rig.world, A) == (
        "its load failed and is tried again in 0.5 s: the engine would not"
    )
    rig.lose()
    assert why_waiting(rig.world, A) == "the engine is down or starting"
