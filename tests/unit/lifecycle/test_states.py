"""The table, walked by hand."""

import pytest

from lorry.errors import BrokenInvariant
from lorry.ids import ReplicaId
from lorry.lifecycle.budget import Budget
from lorry.lifecycle.records import Replica
from lorry.lifecycle.settings import FleetLimits
from lorry.lifecycle.states import HOLDING, LEASABLE, TRANSITIONS, State, Trigger, advance
from lorry.lifecycle.world import World
from tests.unit.lifecycle.rig import v

S, T = State, Trigger

ROAD = [
    (S.ABSENT, T.FETCH, S.FETCHING),
    (S.FETCHING, T.FETCHED, S.ON_DISK),
    (S.FETCHING, T.FAIL, S.FAILED),
    (S.ON_DISK, T.LOAD, S.LOADING),
    (S.LOADING, T.LOADED, S.RESIDENT),
    (S.LOADING, T.FAIL, S.FAILED),
    (S.LOADING, T.MISSING, S.ABSENT),
    (S.LOADING, T.UNSURE, S.UNLOADING),
    (S.LOADING, T.LOST, S.ON_DISK),
    (S.RESIDENT, T.DRAIN, S.DRAINING),
    (S.RESIDENT, T.LOST, S.ON_DISK),
    (S.DRAINING, T.RECALL, S.RESIDENT),
    (S.DRAINING, T.EMPTY, S.UNLOADING),
    (S.DRAINING, T.LOST, S.ON_DISK),
    (S.UNLOADING, T.UNLOADED, S.ON_DISK),
    (S.UNLOADING, T.FAIL, S.RESIDENT),
    (S.UNLOADING, T.UNSURE, S.DRAINING),
    (S.UNLOADING, T.LOST, S.ON_DISK),
    (S.FAILED, T.FETCH, S.FETCHING),
    (S.FAILED, T.LOAD, S.LOADING),
    (S.ABSENT, T.RETIRE, S.RETIRED),
    (S.ON_DISK, T.RETIRE, S.RETIRED),
    (S.FAILED, T.RETIRE, S.RETIRED),
]


@pytest.mark.parametrize(("before", "trigger", "after"), ROAD)
def test_every_legal_move(before: State, trigger: Trigger, after: State) -> None:
    assert advance(before, trigger) is after


def test_the_table_has_these_moves_and_no_others() -> None:
    assert {(before, trigger): after for before, trigger, after in ROAD} == TRANSITIONS


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("trigger", Trigger)
def test_whatever_the_table_lacks_is_refused(state: State, trigger: Trigger) -> None:
    if (state, trigger) in TRANSITIONS:
        return
    with pytest.raises(BrokenInvariant, match=f"no move from {state} by {trigger}"):
        advance(state, trigger)


def test_an_illegal_move_changes_nothing() -> None:
    world = World(FleetLimits())
    world.replicas[ReplicaId("r0")] = Replica(ReplicaId("r0"), Budget(2, 10), 1)
    residency = world.residency(v(1), ReplicaId("r0"), 4)
    world.move(residency, T.LOAD)
    before = repr(residency), repr(world.replicas), world.revision
    for trigger in (T.FETCH, T.LOAD, T.DRAIN, T.EMPTY, T.UNLOADED, T.RETIRE):
        with pytest.raises(BrokenInvariant):
            world.move(residency, trigger)
        assert (repr(residency), repr(world.replicas), world.revision) == before


def test_promise_6_a_leased_version_cannot_leave() -> None:
    world = World(FleetLimits())
    world.replicas[ReplicaId("r0")] = Replica(ReplicaId("r0"), Budget(2, 10), 1)
    residency = world.residency(v(1), ReplicaId("r0"), 4)
    for trigger in (T.LOAD, T.LOADED, T.DRAIN):
        world.move(residency, trigger)
    residency.leases = 1
    with pytest.raises(BrokenInvariant, match="leaves draining while leased"):
        world.move(residency, T.EMPTY)
    assert residency.state is State.DRAINING
    assert world.replicas[ReplicaId("r0")].budget.bytes == 4


def test_promise_4_a_move_that_would_overshoot_changes_nothing() -> None:
    world = World(FleetLimits())
    world.replicas[ReplicaId("r0")] = Replica(ReplicaId("r0"), Budget(2, 10), 1)
    residency = world.residency(v(1), ReplicaId("r0"), 11)
    with pytest.raises(BrokenInvariant, match="overshoots"):
        world.move(residency, T.LOAD)
    assert residency.state is State.ON_DISK
    assert not world.replicas[ReplicaId("r0")].holding


def test_leases_are_only_where_the_engine_holds_the_version() -> None:
    assert LEASABLE < HOLDING


def test_every_state_that_waits_for_a_report_can_lose_its_engine_or_fail() -> None:
    for state in (S.LOADING, S.UNLOADING):
        assert {T.LOST, T.FAIL, T.UNSURE} <= {t for s, t in TRANSITIONS if s is state}


def test_retired_is_the_end() -> None:
    assert not [trigger for state, trigger in TRANSITIONS if state is State.RETIRED]
