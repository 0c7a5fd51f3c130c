"""Traces that a seed once found, shortened by hand: each says what it was. Those that show one rule
of the core stand with their kind in tests/unit/lifecycle."""

from dataclasses import replace

from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle.states import State
from tests.simulation.world import run
from tests.unit.lifecycle.rig import LIMITS, REFUSED, Rig, of, only, v, went_well


def test_seed_100_a_recalled_version_was_drained_again_before_it_admitted_anybody() -> None:
    """The plan went in a circle: recall for those who waited longer, drain for the need."""
    rig = Rig(places=1, pins=0)
    rig.register("a", 1)
    rig.register("b", 1)
    rig.register("c", 2, load=False)
    rig.run("a")
    first, _ = rig.arrive("c")
    rig.wait(LIMITS.patience_ms)
    waiting, _ = rig.arrive("b")
    rig.now_ms += 1
    rig.arrive("c")
    assert only(cm.Admit, rig.tell(ev.Cancelled(first))).ticket == waiting


def test_seed_90_a_pinned_version_that_gave_way_was_recalled_for_its_own_pin() -> None:
    """Its pin had waited longer than the replace that was to have its room."""
    rig = Rig(places=2, room=1, pins=1)
    rig.register("a", 1, pinned=True)
    ticket = rig.run("a")
    rig.now_ms += 10
    operation, commands = rig.ask_load("a", strategy=ev.Strategy.DRAIN_FIRST)
    rig.answer_all(commands, digit=2)
    assert rig.state(1) is State.DRAINING
    assert went_well(rig.answer_all(rig.finish(ticket), digit=2), operation)


def test_seed_2_a_version_that_should_come_back_was_recalled_although_it_evicts_nobody() -> None:
    """Its turn was counted from the restart, so it was always the oldest."""
    rig = Rig(places=1, pins=0, up=False)
    rig.restore("a")
    rig.now_ms += 100
    rig.answer_all(rig.see())
    rig.register("b", 2, load=False)
    rig.run("a")
    rig.arrive("b")
    rig.wait(LIMITS.patience_ms)
    assert rig.state(1) is State.DRAINING


def test_seed_17_a_version_that_nobody_asked_for_was_fetched_for_ever() -> None:
    """Its source held other bytes by then; every back-off was followed by another fetch."""
    rig = Rig(up=False)
    rig.restore("a")
    load = only(cm.Load, rig.see())
    done = rig.tell(ev.LoadFailed(load.operation, REFUSED, missing=True))
    rig.tell(ev.FetchFailed(only(cm.Fetch, done).operation, REFUSED))
    assert rig.fleet.due_ms is None


def test_seed_779_a_request_waited_for_a_replica_that_could_never_take_it() -> None:
    """It had failed wherever it fits; a third replica is full of pins."""
    rig = Rig(places=2, room=10, pins=1, replicas=2, limits=replace(LIMITS, retry_first_ms=900))
    rig.register("p", 1, size=8, pinned=True)
    pinned_on = next(r.replica for r in rig.world.residencies_of(v(1)))
    load = only(cm.Load, rig.restore_more("a", 2, size=5))
    ticket, _ = rig.arrive("a")
    assert load.replica != pinned_on
    refusal = only(cm.Refuse, rig.tell(ev.LoadFailed(load.operation, REFUSED)))
    assert refusal.ticket == ticket
    assert refusal.error.code == "adapter_unavailable"


def test_seed_613_a_snapshot_that_another_call_had_brought_back_was_still_missed() -> None:
    rig = Rig()
    rig.register("a", 1, load=False)
    load = only(cm.Load, rig.arrive("a")[1])
    fetch = only(cm.Fetch, rig.tell(ev.LoadFailed(load.operation, REFUSED, missing=True)))
    rig.tell(ev.FetchFailed(fetch.operation, REFUSED))
    rig.register("b", 1)
    assert of(cm.Fetch, rig.arrive("a")[1]) == []


def test_seed_128_a_snapshot_that_a_cancelled_call_had_brought_back_was_still_missed() -> None:
    rig = Rig()
    rig.register("a", 1, load=False)
    load = only(cm.Load, rig.arrive("a")[1])
    fetch = only(cm.Fetch, rig.tell(ev.LoadFailed(load.operation, REFUSED, missing=True)))
    rig.tell(ev.FetchFailed(fetch.operation, REFUSED))
    operation, asked = rig.ask_load("b")
    late = only(cm.Fetch, asked)
    rig.tell(ev.CancelAsked(operation))
    rig.tell(ev.Fetched(late.operation, ev.VersionSpec(v(1), 1)))
    only(cm.Load, rig.arrive("a")[1])


def test_seed_742_a_drain_first_took_a_version_that_another_call_was_publishing() -> None:
    """It asked whether another name had the version, not whether one was about to get it."""
    rig = Rig(places=2, room=4)
    rig.register("a2", 3, size=3)
    _, asked = rig.ask_load("a1")
    fetch = only(cm.Fetch, asked)
    only(cm.Commit, rig.tell(ev.Fetched(fetch.operation, ev.VersionSpec(v(3), 3))))
    _, asked = rig.ask_load("a2", strategy=ev.Strategy.DRAIN_FIRST)
    fetch = only(cm.Fetch, asked)
    done = rig.tell(ev.Fetched(fetch.operation, ev.VersionSpec(v(9), 4)))
    assert of(cm.Unload, done) == []
    assert rig.state(3) is State.RESIDENT


SEEDS = (
    *(2, 67, 90, 100, 128, 163, 192, 220, 612, 613, 742, 779, 1015, 1171, 1241, 1873),
    *(6260, 29051, 59451, 60596, 80698),
)


def test_seeds_that_once_failed_still_pass() -> None:
    for seed in SEEDS:
        run(seed)
