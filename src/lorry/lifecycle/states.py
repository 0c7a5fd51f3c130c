"""Every legal move of a version on a replica, in one table.

Three rules:

1. Nothing but `advance` assigns a state, and `advance` knows only this table.
2. A move that the table lacks raises `BrokenInvariant`, names state and trigger, and changes
   nothing.
3. A state says what the *engine* was last seen to hold. What should be served is desired data,
   kept elsewhere.

The theory. A version's weights travel one road: absent, on disk, in the engine; and the same road
back. The states that end in -ING have a command open at somebody who will report: the disk for
FETCHING, the engine for LOADING and UNLOADING. So LOADING, RESIDENT, DRAINING and UNLOADING are the
states in which the engine may hold bytes, and exactly in these the budget is reserved (promise 4).
DRAINING takes no new lease but keeps those it has; it can be recalled, since nothing has been given
up yet. UNLOADING cannot: its command is on the way, and only the report says how it went.

A refused unload leads back to RESIDENT, since the engine said that it still holds the version. When
nobody knows how a load ended (a timeout), asking the engine to remove the version is the one way to
be sure, so that leads to UNLOADING; and when nobody knows how an unload ended, to DRAINING, where
it admits nobody until it is asked for again. An engine that is lost holds nothing, whatever was
asked of it.
"""

from enum import StrEnum
from typing import Final

from lorry.errors import BrokenInvariant


class State(StrEnum):
    """Where a version is on one replica."""

    ABSENT = "absent"
    FETCHING = "fetching"
    ON_DISK = "on_disk"
    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"
    UNLOADING = "unloading"
    FAILED = "failed"
    RETIRED = "retired"


class Trigger(StrEnum):
    """What moves it."""

    FETCH = "fetch"
    FETCHED = "fetched"
    LOAD = "load"
    LOADED = "loaded"
    MISSING = "missing"
    UNSURE = "unsure"
    DRAIN = "drain"
    RECALL = "recall"
    EMPTY = "empty"
    UNLOADED = "unloaded"
    FAIL = "fail"
    LOST = "lost"
    RETIRE = "retire"


TRANSITIONS: Final[dict[tuple[State, Trigger], State]] = {
    (State.ABSENT, Trigger.FETCH): State.FETCHING,
    (State.FETCHING, Trigger.FETCHED): State.ON_DISK,
    (State.FETCHING, Trigger.FAIL): State.FAILED,
    (State.ON_DISK, Trigger.LOAD): State.LOADING,
    (State.LOADING, Trigger.LOADED): State.RESIDENT,
    (State.LOADING, Trigger.FAIL): State.FAILED,
    (State.LOADING, Trigger.MISSING): State.ABSENT,  # the snapshot was not on disk after all
    (State.LOADING, Trigger.UNSURE): State.UNLOADING,  # nobody knows how the load ended
    (State.LOADING, Trigger.LOST): State.ON_DISK,
    (State.RESIDENT, Trigger.DRAIN): State.DRAINING,
    (State.RESIDENT, Trigger.LOST): State.ON_DISK,
    (State.DRAINING, Trigger.RECALL): State.RESIDENT,
    (State.DRAINING, Trigger.EMPTY): State.UNLOADING,
    (State.DRAINING, Trigger.LOST): State.ON_DISK,
    (State.UNLOADING, Trigger.UNLOADED): State.ON_DISK,
    (State.UNLOADING, Trigger.FAIL): State.RESIDENT,  # refused by the engine: it still holds it
    (State.UNLOADING, Trigger.UNSURE): State.DRAINING,  # nobody knows: ask again, admit nobody
    (State.UNLOADING, Trigger.LOST): State.ON_DISK,
    (State.FAILED, Trigger.FETCH): State.FETCHING,
    (State.FAILED, Trigger.LOAD): State.LOADING,
    (State.ABSENT, Trigger.RETIRE): State.RETIRED,
    (State.ON_DISK, Trigger.RETIRE): State.RETIRED,
    (State.FAILED, Trigger.RETIRE): State.RETIRED,
}
"""From a state, by a trigger, to a state."""

HOLDING: Final = frozenset({State.LOADING, State.RESIDENT, State.DRAINING, State.UNLOADING})
"""The engine may hold bytes of it: budget is reserved in these states and in no other."""

LEASABLE: Final = frozenset({State.RESIDENT, State.DRAINING})
"""The states in which leases may exist; new ones are given in RESIDENT alone."""


def advance(state: State, trigger: Trigger) -> State:
    """The state after `trigger`; raises `BrokenInvariant` when there is no such move."""
    try:
        return TRANSITIONS[state, trigger]
    except KeyError:
        raise BrokenInvariant(1, f"no move from {state} by {trigger}") from None
