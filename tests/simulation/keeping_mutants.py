"""Bugs to plant in what keeps adapters and versions, and lets them go; see `mutants.py`."""

from collections.abc import Callable

import pytest

from lorry.ids import AdapterName
from lorry.lifecycle import events as ev
from lorry.lifecycle import operations, planner, retirement, room
from lorry.lifecycle.records import Adapter, Asked, Residency
from lorry.lifecycle.world import World

Plant = Callable[[pytest.MonkeyPatch], None]

NEVER_MS = 10**12


def rollback_does_not_take_the_version_back(patch: pytest.MonkeyPatch) -> None:
    """What drains since it was replaced goes, though a rollback has come back to it."""
    real = room.is_recallable

    def only_evicted(world: World, residency: Residency) -> bool:
        return residency.evicted and real(world, residency)

    patch.setattr(room, "is_recallable", only_evicted)


def adapter_retires_while_it_is_used(patch: pytest.MonkeyPatch) -> None:
    """A request that runs longer than the idle time began too long ago to count."""

    def never(world: World, name: AdapterName) -> bool:
        return False

    patch.setattr(retirement, "_in_use", never)


def requests_are_no_use(patch: pytest.MonkeyPatch) -> None:
    """The idle time runs from the registration, whoever asks."""

    def touch(self: World, name: AdapterName) -> None:
        """Nothing is written down."""

    patch.setattr(World, "touch", touch)


def pinned_adapters_retire(patch: pytest.MonkeyPatch) -> None:
    """The idle time counts more than the pin."""

    def due_ms(self: World, adapter: Adapter) -> int | None:
        return None if adapter.idle_ms is None else adapter.used_ms + adapter.idle_ms

    patch.setattr(World, "idle_due_ms", due_ms)


def unused_adapters_stay(patch: pytest.MonkeyPatch) -> None:
    """The idle time is kept, and nobody looks at it."""

    def nobody(world: World) -> None:
        """Nothing retires."""

    patch.setattr(planner, "retire_idle", nobody)


def failed_retirement_is_not_tried_again(patch: pytest.MonkeyPatch) -> None:
    """The engine or the store refused once, and the adapter stays for ever."""
    real = operations.restore

    def restore(world: World, asked: Asked) -> None:
        adapter = world.adapters.get(asked.name)
        asks_itself = isinstance(asked.request, ev.UnloadAsked) and asked.request.idle_ms
        real(world, asked)
        if adapter is not None and asks_itself:
            world.idle.forget(adapter.name)
            world.idle.watch(adapter.name, NEVER_MS)

    patch.setattr(operations, "restore", restore)


KEEPING_MUTANTS: tuple[Plant, ...] = (
    rollback_does_not_take_the_version_back,
    adapter_retires_while_it_is_used,
    requests_are_no_use,
    pinned_adapters_retire,
    unused_adapters_stay,
    failed_retirement_is_not_tried_again,
)
