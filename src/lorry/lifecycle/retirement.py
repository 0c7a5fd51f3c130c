"""Adapters that retire by themselves when nobody uses them.

A use is a request that comes, begins or ends, or an admin call other than this retirement. A pinned
adapter is kept, and its time begins when it is unpinned.
"""

from lorry.ids import AdapterName
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle import operations
from lorry.lifecycle.records import Adapter
from lorry.lifecycle.world import World

KIND = "retire"
"""What the operation is called, beside load, unload and others."""


def retire_idle(world: World) -> None:
    """Ask for the unload of every adapter whose time is up; a planner's step."""
    while (name := world.idle.take_due(world.now_ms)) is not None:
        adapter = world.adapters.get(name)
        due_ms = None if adapter is None or adapter.closing else world.idle_due_ms(adapter)
        if adapter is None or due_ms is None:
            continue
        if _in_use(world, name):
            world.idle.watch(name, world.now_ms + (adapter.idle_ms or 0))
        elif due_ms > world.now_ms:
            world.idle.watch(name, due_ms)
        else:
            _retire(world, adapter)
    first_ms = world.idle.first_ms()
    if first_ms is not None:
        world.remind(first_ms)


def _in_use(world: World, name: AdapterName) -> bool:
    """What is under way counts as a use when it ends, which is later than now."""
    return name in world.leases_of or name in world.queues or name in world.asked


def _retire(world: World, adapter: Adapter) -> None:
    """An unload like any other, but that the core itself asks for it."""
    operation = world.next_operation()
    world.emit(cm.BeginOperation(operation, KIND, adapter.name))
    operations.ask(world, ev.UnloadAsked(operation, adapter.name, 0, idle_ms=adapter.idle_ms))
