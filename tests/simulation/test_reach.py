"""A simulation that never gets somewhere says nothing about it: what the smoke seeds must reach."""

import typing

import pytest

from lorry import errors
from lorry.lifecycle import events as ev
from lorry.lifecycle.states import TRANSITIONS
from tests.simulation.smoke import CHUNK, SMOKE_SEEDS, Reached, smoke

pytestmark = pytest.mark.timeout(180)
"""The first test of the file may run all smoke seeds."""

CORE_ERRORS = {
    errors.AdapterConflict, errors.AdapterNotFound, errors.AdapterUnavailable,
    errors.AdapterUnloading, errors.AllPinned, errors.CapacityExhausted, errors.EngineTimeout,
    errors.EngineUnreachable, errors.OperationCancelled, errors.QueueFull, errors.RequestAborted,
    errors.SourceUnreachable, errors.VersionMismatch,
}  # fmt: skip
"""Every error that the core makes itself."""

PASSED_ON = {
    errors.AdapterInvalid, errors.EngineRejected, errors.SourceNotFound, errors.StorageFailed,
}  # fmt: skip
"""Errors of disk, engine and store that it passes on."""


def reached() -> list[Reached]:
    """All chunks, run now or before."""
    return [smoke(first) for first in range(SMOKE_SEEDS.start, SMOKE_SEEDS.stop, CHUNK)]


def test_every_row_of_the_table_fires() -> None:
    missing = TRANSITIONS.keys() - set().union(*(part.moves for part in reached()))
    assert not missing


def test_every_error_of_the_core_occurs() -> None:
    found = set().union(*(part.errors for part in reached()))
    wanted = {error.__name__ for error in CORE_ERRORS | PASSED_ON}
    assert found == wanted


def test_every_kind_of_event_is_fed() -> None:
    found = set().union(*(part.events for part in reached()))
    assert found == {kind.__name__ for kind in typing.get_args(ev.Event)}


def test_adapters_retire_and_rollbacks_find_their_version_still_there() -> None:
    assert sum(part.retirements for part in reached()) > 40
    assert sum(part.switches for part in reached()) > 10


def test_versions_are_drained_for_every_reason() -> None:
    found = set().union(*(part.evictions for part in reached()))
    assert found == {"room", "fairness", "replace"}
