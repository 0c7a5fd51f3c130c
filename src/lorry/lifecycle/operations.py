"""Admin calls: load, unload, pin, settings, prefetch. One at a time for each name, in the order
asked; names never wait for each other (promise 5).

Each call walks through phases (`records.Phase`). A call that fails, is cancelled or runs out of
time ends with an error and leaves the name as it was: only `Committed` changes what a name stands
for, and only an unload under way (`closing`) stops requests before that, until it ends either way.
"""

from collections import deque

from lorry.adapter_settings import SettingsChange
from lorry.errors import (
    AdapterNotFound,
    AdapterUnloading,
    CapacityExhausted,
    EngineTimeout,
    EngineUnreachable,
    LorryError,
    OperationCancelled,
    QueueFull,
    RequestAborted,
    SourceUnreachable,
)
from lorry.ids import AdapterName, OperationId, VersionId, short
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle import objections
from lorry.lifecycle.records import Adapter, Asked, Opened, Phase, Request
from lorry.lifecycle.states import HOLDING, State
from lorry.lifecycle.world import World


def ask(world: World, request: Request) -> None:
    """Take an admin call: begin it, or queue it behind the others of its name."""
    queue = world.asked.setdefault(request.name, deque())
    if len(queue) >= world.limits.operations_per_adapter_max:
        error = QueueFull(f"{len(queue)} operations on '{request.name}' are waiting already.")
        world.emit(cm.EndOperation(request.operation, error))
        world.touch(request.name)
        return
    due = world.now_ms + world.limits.operation_ms
    if isinstance(request, ev.UnloadAsked):
        due += request.drain_ms
    asked = Asked(request, world.now_ms, due)
    queue.append(asked)
    if queue[0] is asked:
        begin(world, asked)


def end(world: World, asked: Asked, error: LorryError | None = None) -> None:
    """Answer an admin call and begin the next one of its name."""
    queue = world.asked[asked.name]
    was_first = queue[0] is asked
    queue.remove(asked)
    if asked.open is not None:
        world.opened.pop(asked.open, None)
    world.loose.update(asked.versions)
    if was_first and error is not None:
        restore(world, asked)
    if not isinstance(asked.request, ev.UnloadAsked) or asked.request.idle_ms is None:
        world.touch(asked.name)
    world.emit(cm.EndOperation(asked.id, error))
    if error is not None and was_first:
        version = asked.spec.version if asked.spec else None
        world.note("failed", f"{verb(asked)} '{asked.name}': {error}", asked.name, version)
    if not queue:
        del world.asked[asked.name]
    elif was_first:
        begin(world, queue[0])


def restore(world: World, asked: Asked) -> None:
    """A call that failed leaves the name as it was: open, and resident again if that was given
    up."""
    adapter = world.adapters.get(asked.name)
    if adapter is None:
        return
    left = asked.versions - {adapter.spec.version}
    adapter.former = world.remembered(adapter.former | left)
    if adapter.closing:
        adapter.closing = False
        world.chill(adapter.spec.version)
        if world.idle_due_ms(adapter) is not None:  # not at once again, if its time is up
            world.idle.watch(adapter.name, world.now_ms + world.limits.retry_last_ms)
    elif asked.drains_first:
        world.chill(adapter.spec.version)


def verb(asked: Asked) -> str:
    """What the call does, for people."""
    return type(asked.request).__name__.removesuffix("Asked").lower()


# Begin


def begin(world: World, asked: Asked) -> None:
    """Judge a call by what is registered now, and take its first step."""
    adapter = world.adapters.get(asked.name)
    error = objections.objection(world, asked, adapter)
    if error is not None:
        end(world, asked, error)
        return
    match asked.request:
        case ev.LoadAsked() as request:
            begin_load(world, asked, request, adapter)
        case ev.UnloadAsked() as request:
            assert adapter is not None
            begin_unload(world, asked, request, adapter)
        case ev.PinAsked(pinned=pinned):
            assert adapter is not None
            asked.spec, asked.pinned = adapter.spec, pinned
            pin_or_commit(world, asked)
        case ev.SettingsAsked():
            commit(world, asked)
        case ev.PrefetchAsked():
            assert adapter is not None
            asked.spec = adapter.spec
            find_room(world, asked)


def begin_load(world: World, asked: Asked, request: ev.LoadAsked, adapter: Adapter | None) -> None:
    """Fetch first: only then is the version known."""
    was_pinned = adapter is not None and adapter.pinned
    asked.pinned = was_pinned if request.pinned is None else request.pinned
    if request.known is not None:
        take_spec(world, asked, request.known)
        return
    asked.phase = Phase.FETCHING
    asked.open = world.open(Opened("fetch", asked=asked.id))
    world.emit(cm.Fetch(asked.open, asked.name, request.source, digest=request.digest))


def begin_unload(world: World, asked: Asked, request: ev.UnloadAsked, adapter: Adapter) -> None:
    """From here on the name takes no requests; those that wait are answered at once."""
    asked.spec = adapter.spec
    asked.phase = Phase.DRAINING
    asked.drain_due_ms = world.now_ms + request.drain_ms
    adapter.closing = True
    asked.former = adapter.former
    for version in asked.versions:
        world.loose.add(version)
        for residency in world.residencies_of(version):
            residency.retry_ms = world.now_ms  # an admin's word ends any back-off
    world.refuse_all(asked.name, unloading(asked.name))
    running = len(world.leases_of.get(asked.name, ()))
    text = f"unload of '{asked.name}': {running} running requests"
    if request.idle_ms is not None:
        text = f"unload of '{asked.name}': {disuse(request.idle_ms)}"
    world.note("draining", text, asked.name, asked.spec.version)


def disuse(idle_ms: int) -> str:
    """Why an adapter has retired, for people."""
    return f"nobody used it for {idle_ms / 1000:g} s, its idle time-to-live"


def unloading(name: str) -> AdapterUnloading:
    """The answer to requests for a name that is being unloaded."""
    return AdapterUnloading(f"The adapter '{name}' is being unloaded.", param="model")


# Middle


def take_spec(world: World, asked: Asked, spec: ev.VersionSpec) -> None:
    """The version is known and on disk: see whether it can ever fit, then go for the engine."""
    asked.spec = spec
    request = asked.request
    error = objections.room_objection(world, asked, spec)
    if error is not None:
        end(world, asked, error)
    elif isinstance(request, ev.LoadAsked) and not request.load and not asked.pinned:
        commit(world, asked)
    else:
        find_room(world, asked)


def giving_way(world: World) -> set[AdapterName]:
    """Names whose requests wait for a successor that was asked for with drain-first: the version
    that they stand for is not loaded again meanwhile."""
    return {name for name, queue in world.asked.items() if queue[0].holds and queue[0].drains_first}


def find_room(world: World, asked: Asked) -> None:
    """Want the version resident; the planner does the rest. An admin's word ends any back-off."""
    assert asked.spec is not None
    asked.phase = Phase.ROOM
    for residency in world.residencies_of(asked.spec.version):
        residency.retry_ms = world.now_ms


def pin_or_commit(world: World, asked: Asked) -> None:
    """A pin needs the version resident first; an unpin only the registry."""
    if asked.pinned:
        find_room(world, asked)
    else:
        commit(world, asked)


def commit(world: World, asked: Asked) -> None:
    """Write the change; only the report makes it true."""
    asked.phase = Phase.COMMITTING
    asked.open = world.open(Opened("commit", asked=asked.id))
    adapter = world.adapters.get(asked.name)
    world.emit(_change(asked, asked.open, adapter))


def _change(asked: Asked, operation: OperationId, adapter: Adapter | None) -> cm.Commit:
    request = asked.request
    version = asked.spec.version if asked.spec is not None else None
    source = adapter.source if adapter is not None else ""
    pinned = adapter.pinned if adapter is not None else False
    match request:
        case ev.LoadAsked():
            action = "rollback" if request.known else "replace" if adapter else "register"
            source, pinned = asked.source, asked.pinned
            labels, change = request.labels, request.settings
            return cm.Commit(operation, action, asked.name, version, source, pinned, labels, change)
        case ev.UnloadAsked(purge=purge, idle_ms=idle_ms):
            action = "unload" if idle_ms is None else "retire"
            detail = "" if idle_ms is None else disuse(idle_ms)
            return cm.Commit(
                *(operation, action, asked.name, None, source, pinned, None),
                detail=detail,
                purge=purge,
            )
        case ev.PinAsked(labels=labels, settings=change):
            action, pinned = "pin" if asked.pinned else "unpin", asked.pinned
            return cm.Commit(operation, action, asked.name, version, source, pinned, labels, change)
        case ev.SettingsAsked(labels=labels, settings=change):
            assert adapter is not None
            action, version = "label" if change is None else "settings", adapter.spec.version
            return cm.Commit(operation, action, asked.name, version, source, pinned, labels, change)
        case ev.PrefetchAsked():  # pragma: no cover - a prefetch changes no registry
            raise AssertionError("a prefetch commits nothing")


# Settle: called by the planner until nothing moves


def settle(world: World) -> None:
    """Take every call as far as it can go now."""
    for queue in tuple(world.asked.values()):
        asked = queue[0]
        if asked.wants_resident:
            _settle_wanting(world, asked)
        elif asked.phase is Phase.PINNING:
            _settle_pinning(world, asked)
        elif asked.phase in (Phase.DRAINING, Phase.REMOVING):
            _settle_unload(world, asked)


def _settle_wanting(world: World, asked: Asked) -> None:
    assert asked.spec is not None
    found = world.residencies_of(asked.spec.version)
    loading = any(r.state is State.LOADING for r in found)
    asked.phase = Phase.LOADING if loading else Phase.ROOM
    if not any(r.state is State.RESIDENT for r in found):
        return
    if isinstance(asked.request, ev.PrefetchAsked):
        end(world, asked)
    elif asked.pinned:
        asked.phase = Phase.PINNING
        _settle_pinning(world, asked)
    else:
        commit(world, asked)


def _settle_pinning(world: World, asked: Asked) -> None:
    assert asked.spec is not None
    resident = [r for r in world.residencies_of(asked.spec.version) if r.state is State.RESIDENT]
    if not resident:
        asked.phase = Phase.ROOM  # the engine was lost meanwhile
    elif any(r.engine_pinned for r in resident):
        commit(world, asked)


def _settle_unload(world: World, asked: Asked) -> None:
    """Drained, then out of every engine, then out of the registry: in this order, each seen before
    the next."""
    assert asked.spec is not None
    running = world.leases_of.get(asked.name, set())
    if running:
        if world.now_ms < asked.drain_due_ms:
            world.remind(asked.drain_due_ms)
        else:
            error = RequestAborted(
                f"The adapter '{asked.name}' was unloaded before this request ended."
            )
            for ticket in sorted(running):
                world.abort(world.leases[ticket], error)
        return
    asked.phase = Phase.REMOVING
    for version in sorted(asked.versions):
        held = any(r.state in HOLDING for r in world.residencies_of(version))
        if held and not world.referenced(version):
            return
    commit(world, asked)


def expire(world: World) -> None:
    """End calls whose time is up. What they began is undone by the planner, since nothing refers to
    it any more."""
    for queue in tuple(world.asked.values()):
        for asked in tuple(queue):
            if asked.phase is Phase.COMMITTING:
                continue  # the store answers within its own deadline, and what it says must stand
            if asked not in queue:
                continue  # its turn came and it was answered, when the one before it ended
            if world.now_ms >= asked.deadline_ms:
                end(world, asked, _out_of_time(world, asked))
            else:
                world.remind(asked.deadline_ms)


def _out_of_time(world: World, asked: Asked) -> LorryError:
    seconds = (asked.deadline_ms - asked.began_ms) / 1000
    message = (
        f"{verb(asked).capitalize()} of '{asked.name}' did not end within {seconds:g} s; "
        f"it was {asked.phase}."
    )
    if asked.wants_resident and not any(replica.up for replica in world.replicas.values()):
        return EngineUnreachable(f"{message} The engine is down.")
    if asked.phase in (Phase.ROOM, Phase.QUEUED):
        return CapacityExhausted(message)
    if asked.phase is Phase.FETCHING:
        return SourceUnreachable(message, param="source")
    return EngineTimeout(message)


def cancel(world: World, operation: OperationId) -> None:
    """Give a call up unless it is writing the registry or emptying an engine already."""
    for queue in tuple(world.asked.values()):
        for asked in tuple(queue):
            if asked.id == operation and asked.phase not in (Phase.COMMITTING, Phase.REMOVING):
                end(
                    world,
                    asked,
                    OperationCancelled(f"{verb(asked)} of '{asked.name}' was cancelled."),
                )
                return


# Reports


def find(world: World, operation: OperationId | None) -> Asked | None:
    """The call under way with that id."""
    for queue in world.asked.values():
        if queue[0].id == operation:
            return queue[0]
    return None


def load_failed(world: World, spec_version: VersionId, error: LorryError) -> None:
    """End the calls that waited for a version which could not be loaded or pinned."""
    for asked in tuple(world.holders()):
        waits = asked.wants_resident or asked.phase is Phase.PINNING
        if waits and asked.spec is not None and asked.spec.version == spec_version:
            end(world, asked, error)


def unload_failed(world: World, spec_version: VersionId, error: LorryError) -> None:
    """End the unloads of a version that an engine would not give up: it is still registered and
    still served."""
    for queue in tuple(world.asked.values()):
        asked = queue[0]
        if asked.phase in (Phase.DRAINING, Phase.REMOVING) and spec_version in asked.versions:
            end(world, asked, error)


def refuse_rollbacks(world: World, name: AdapterName) -> None:
    """Those that wait behind an unload: with the name its earlier versions are forgotten."""
    for asked in tuple(world.asked.get(name, ())):
        request = asked.request
        if not isinstance(request, ev.LoadAsked) or request.known is None:
            continue
        if request.mode is ev.Mode.REPLACE:
            message = f"No earlier version of '{name}' is kept: it was unloaded."
            end(world, asked, AdapterNotFound(message, param="version"))


def committed(world: World, asked: Asked) -> None:
    """The store has it: now it is so."""
    asked.open = None
    request = asked.request
    if isinstance(request, ev.UnloadAsked):
        adapter = world.unbind(asked.name)
        assert adapter is not None
        text = f"'{asked.name}' is gone from every tier"
        if request.idle_ms is not None:
            text += f": {disuse(request.idle_ms)}"
        world.note("unloaded", text, asked.name, adapter.spec.version)
        end(world, asked)
        refuse_rollbacks(world, asked.name)
        served = adapter.spec.version in world.names_of
        if request.purge and not served and not world.held(adapter.spec.version):
            world.emit(cm.Purge(adapter.spec.version))
        return
    if isinstance(request, ev.LoadAsked):
        _publish(world, asked, request)
    elif isinstance(request, ev.PinAsked):
        adapter = world.adapters[asked.name]
        world.set_pinned(adapter, asked.pinned)
        kind = "pinned" if asked.pinned else "unpinned"
        world.note(kind, f"'{asked.name}' is {kind}", asked.name, adapter.spec.version)
    if isinstance(request, ev.PinAsked | ev.SettingsAsked) and request.settings is not None:
        _take_settings(world, world.adapters[asked.name], request.settings)
    end(world, asked)


def _take_settings(world: World, adapter: Adapter, change: SettingsChange) -> None:
    """Of all of them the core needs to know one."""
    adapter.idle_ms = change.idle_ms(adapter.idle_ms)
    adapter.used_ms = world.now_ms
    world.watch_idle(adapter)
    # As callers name them: they give an idle_ttl, without our unit.
    names = ", ".join(sorted(name.removesuffix("_s") for name in change.values)) or "none"
    text = f"settings of '{adapter.name}' were set: {names}"
    world.note("settings", text, adapter.name, adapter.spec.version)


def _publish(world: World, asked: Asked, request: ev.LoadAsked) -> None:
    assert asked.spec is not None
    old = world.adapters.get(asked.name)
    before = old.former | {old.spec.version} if old is not None else frozenset()
    former = world.remembered(before - {asked.spec.version})
    idle_ms = old.idle_ms if old is not None else None
    if request.settings is not None:
        idle_ms = request.settings.idle_ms(idle_ms)
    world.bind(
        Adapter(
            asked.name,
            asked.spec,
            asked.source,
            asked.pinned,
            former=former,
            idle_ms=idle_ms,
        )
    )
    world.refuse_mismatched(asked.name)
    now = short(asked.spec.version)
    if old is None:
        world.note("registered", f"'{asked.name}' serves {now}", asked.name, asked.spec.version)
    elif old.spec.version != asked.spec.version:
        text = f"'{asked.name}' serves {now} instead of {short(old.spec.version)}"
        world.note("replaced", text, asked.name, asked.spec.version)
