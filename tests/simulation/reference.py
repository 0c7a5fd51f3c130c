"""The oracle: which errors a request or an admin call may be answered with, given what an observer
knows. It does not say what the answer must be, since much depends on chance; it says what would be
a lie."""

from lorry import errors
from lorry.ids import AdapterName, VersionId
from lorry.lifecycle import events as ev
from lorry.lifecycle.settings import FleetLimits, ReplicaLimits
from tests.simulation.observer import Call, Observer


def refusal_objection(
    seen: Observer,
    arrived: ev.Arrived,
    waited_ms: int,
    error: errors.LorryError,
    limits: FleetLimits,
    replicas: tuple[ReplicaLimits, ...],
    sizes: dict[VersionId, int],
) -> str | None:
    """Why this refusal would be a lie; None when it may be true."""
    name = arrived.name
    registered = name is not None and name in seen.names
    version = seen.names[name][0] if name is not None and registered else None
    match error:
        case errors.AdapterUnloading():
            return None if registered and _unload_asked(seen, name) else "no unload is under way"
        case errors.AdapterNotFound():
            other = arrived.version is not None and arrived.version != version
            return None if not registered or other else "the name is registered"
        case errors.AdapterUnavailable():
            return None if seen.has_failed(version) else "the version has not failed"
        case errors.EngineUnreachable():
            return None if not seen.up else "an engine is up"
        case errors.AllPinned():
            pinned = any(p for _, p in seen.names.values()) or _pins_asked(seen)
            return None if pinned else "nothing is pinned"
        case errors.CapacityExhausted() if version is not None and all(
            sizes[version] > replica.bytes_max for replica in replicas
        ):
            return None
        case errors.CapacityExhausted() | errors.EngineTimeout():
            return None if waited_ms >= limits.ticket_wait_ms else f"it waited {waited_ms} ms only"
        case errors.QueueFull():
            return None if _full(seen, name, limits) else "no queue is full"
    return "a request is never refused so"


def _unload_asked(seen: Observer, name: AdapterName | None) -> bool:
    return any(
        isinstance(call.request, ev.UnloadAsked) and call.request.name == name
        for call in seen.calls.values()
    )


def _pins_asked(seen: Observer) -> bool:
    return any(
        isinstance(call.request, ev.PinAsked | ev.LoadAsked) and call.request.pinned
        for call in seen.calls.values()
    )


def _full(seen: Observer, name: AdapterName | None, limits: FleetLimits) -> bool:
    others = len(seen.waiting) - 1
    mine = sum(arrived.name == name for arrived, _ in seen.waiting.values()) - 1
    return (
        others >= limits.tickets_max
        or mine >= limits.tickets_per_adapter_max
        or others + len(seen.running) >= limits.leases_max
    )


def ending_objection(
    seen: Observer, call: Call, error: errors.LorryError | None, took_ms: int, due_ms: int
) -> str | None:
    """Why an admin call may not end so."""
    request = call.request
    served = seen.names.get(request.name)
    match request, error:
        case ev.UnloadAsked(), None:
            return "the name is still registered" if served is not None else None
        case (ev.LoadAsked(), None):
            good = served is not None and served[0] in call.brings
            return None if good else f"the name serves {served}, not one of {call.brings}"
        case (ev.PinAsked(pinned=pinned), None):
            return None if served is not None and served[1] == pinned else f"it is {served}"
        case (_, errors.AdapterNotFound()):
            creates = isinstance(request, ev.LoadAsked) and request.mode is not ev.Mode.REPLACE
            return "the name is registered" if served is not None or creates else None
        case (ev.SettingsAsked(), errors.EngineError() | errors.AllPinned()) if took_ms < due_ms:
            return "no engine and no room is needed for that"
    return None
