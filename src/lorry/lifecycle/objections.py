"""Why an admin call cannot be done, found before any side effect (promises 4 and 6)."""

from lorry.errors import (
    AdapterConflict,
    AdapterNotFound,
    AllPinned,
    EngineUnreachable,
    LorryError,
    VersionMismatch,
)
from lorry.ids import short
from lorry.lifecycle import events as ev
from lorry.lifecycle import fitting
from lorry.lifecycle.records import Adapter, Asked, Replica, Request
from lorry.lifecycle.world import World


def objection(world: World, asked: Asked, adapter: Adapter | None) -> LorryError | None:
    """What stands against it as things are now, when its turn has come."""
    request = asked.request
    creates = isinstance(request, ev.LoadAsked) and request.mode is not ev.Mode.REPLACE
    if adapter is None and not creates:
        return AdapterNotFound(f"The adapter '{asked.name}' cannot be found.", param="name")
    if isinstance(request, ev.LoadAsked) and adapter is not None and request.mode is ev.Mode.CREATE:
        return AdapterConflict(f"The adapter '{asked.name}' has already been loaded.", param="name")
    if not isinstance(request, ev.PrefetchAsked) and request.if_match is not None:
        found = adapter.spec.version if adapter is not None else None
        if found is None or not found.startswith(request.if_match):
            served = short(found) if found else "no version"
            return VersionMismatch(
                f"'{asked.name}' serves {served}, not {short(request.if_match)}.", param="If-Match"
            )
    if isinstance(request, ev.LoadAsked | ev.PinAsked) and request.pinned:
        error = pin_objection(world, asked)
        if error is not None:
            return error
    if _needs_engine(request) and not any(replica.up for replica in world.replicas.values()):
        return EngineUnreachable("The engine is down or starting; nothing can be loaded now.")
    return None


def _needs_engine(request: Request) -> bool:
    match request:
        case ev.LoadAsked(load=load, pinned=pinned):
            return load or bool(pinned)
        case ev.PinAsked(pinned=pinned):
            return pinned
        case ev.PrefetchAsked():
            return True
    return False


def pin_objection(world: World, asked: Asked) -> LorryError | None:
    """Pins leave at least one place free, counting the pins that other calls are about to set."""
    names = world.pinned | {queue[0].name for queue in world.asked.values() if queue[0].pinned}
    names.discard(asked.name)
    limit = min((replica.pins_max for replica in world.replicas.values()), default=0)
    if len(names) < limit:
        return None
    return AllPinned(
        f"Pinning '{asked.name}' would pin {len(names) + 1} adapters; at most {limit} may be "
        f"pinned, so that one slot stays free. Pinned now: {', '.join(sorted(names)) or 'none'}."
    )


def room_objection(world: World, asked: Asked, spec: ev.VersionSpec) -> LorryError | None:
    """Why no eviction could ever make room, or None when some replica can."""
    errors = [_room_on(world, asked, spec, replica) for replica in world.replicas.values()]
    return None if None in errors else next(iter(errors), None)


def _room_on(
    world: World, asked: Asked, spec: ev.VersionSpec, replica: Replica
) -> LorryError | None:
    old = world.adapters.get(asked.name)
    first = asked.drains_first and old is not None
    gives_up = old.spec.version if old is not None and first else None
    pinned = fitting.pinned_on(world, replica)
    error = fitting.objection(world, replica, pinned, asked.name, spec, gives_up)
    if error is not None or first:
        return error
    return fitting.beside_objection(world, replica, asked.name, spec)
