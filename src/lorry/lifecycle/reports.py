"""Answers to commands: each is believed once, and only while its command is open."""

from lorry.errors import LorryError
from lorry.ids import OperationId, VersionId, short
from lorry.lifecycle import events as ev
from lorry.lifecycle import operations, planner
from lorry.lifecycle.records import Opened, Residency
from lorry.lifecycle.retry import retry_at
from lorry.lifecycle.states import State, Trigger
from lorry.lifecycle.world import World


def report(world: World, event: ev.Event) -> None:
    """An answer to a command: believed once, and only while the command is open."""
    match event:
        case ev.Fetched(operation, spec, source):
            fetched(world, operation, spec, source)
        case ev.FetchFailed(operation, error):
            fetch_failed(world, operation, error)
        case ev.Loaded(operation):
            loaded(world, operation)
        case ev.LoadFailed():
            load_failed(world, event)
        case ev.Unloaded(operation):
            unloaded(world, operation)
        case ev.UnloadFailed():
            unload_failed(world, event)
        case ev.PinSet(operation):
            pin_set(world, operation)
        case ev.PinFailed(operation, error):
            pin_failed(world, operation, error)
        case ev.Committed(operation):
            commit_ended(world, operation, None)
        case ev.CommitFailed(operation, error):
            commit_ended(world, operation, error)
        case _:  # pragma: no cover - the type checker sees that nothing is left
            raise AssertionError(event)


def residency_of(world: World, opened: Opened | None) -> Residency | None:
    """The residency that a command was about."""
    if opened is None or opened.residency is None:
        return None
    return world.residencies[opened.residency]


def fetched(
    world: World, operation: OperationId, spec: ev.VersionSpec, source: str | None = None
) -> None:
    """A snapshot is on disk: a fact for every name of the version, even when the call that it was
    made for is over."""
    opened = world.take_opened(operation, "fetch")
    residency = residency_of(world, opened)
    if residency is not None:
        residency.open = None
        world.move(residency, Trigger.FETCHED)
    on_disk(world, spec.version)
    if residency is None and opened is not None:
        asked = operations.find(world, opened.asked)
        if asked is not None:
            asked.open, asked.fetched_from = None, source
            operations.take_spec(world, asked, spec)


def on_disk(world: World, version: VersionId) -> None:
    """The replicas share one disk: what was missing for any of them is there now."""
    for residency in world.residencies_of(version):
        if residency.state is State.LOADING:
            residency.brought = True
        elif residency.missing:
            found_again(world, residency)


def found_again(world: World, residency: Residency) -> None:
    """Nobody waits any more for a fetch of it that is under way: it would fail when its source has
    changed, though nothing is missing."""
    residency.missing, residency.error, residency.retry_ms = False, None, 0
    residency.tried.clear()
    if residency.state in (State.ABSENT, State.FAILED):
        world.move(residency, Trigger.FETCH)
    if residency.state is State.FETCHING:
        if residency.open is not None:
            del world.opened[residency.open]
            residency.open = None
        world.move(residency, Trigger.FETCHED)


def fetch_failed(world: World, operation: OperationId, error: LorryError) -> None:
    """It is not."""
    opened = world.take_opened(operation, "fetch")
    residency = residency_of(world, opened)
    if residency is not None and opened is not None:
        residency.open = None
        world.move(residency, Trigger.FAIL)
        residency.tried[opened.source] = error
        if residency.tried.keys() >= world.sources_of(residency.version).keys():
            error = next(iter(residency.tried.values()))  # that of who asked first
            residency.tried.clear()
            set_back(world, residency, error)
            operations.load_failed(world, residency.version, error)
    elif opened is not None:
        asked = operations.find(world, opened.asked)
        if asked is not None:
            asked.open = None
            operations.end(world, asked, error)


def set_back(world: World, residency: Residency, error: LorryError) -> None:
    """Remember a failure and when to try again."""
    residency.error = error
    residency.failures += 1
    residency.retry_ms = retry_at(residency.failures, world.now_ms, world.limits)


def loaded(world: World, operation: OperationId) -> None:
    """The engine holds it."""
    residency = residency_of(world, world.take_opened(operation, "load"))
    if residency is None:
        return
    residency.open = None
    forget_failures(residency)
    residency.last_used_ms = world.now_ms
    world.move(residency, Trigger.LOADED)
    on_disk(world, residency.version)
    world.loose.add(residency.version)
    world.counters.loads += 1
    world.note(
        "loaded", f"{short(residency.version)} on {residency.replica}", version=residency.version
    )


def load_failed(world: World, event: ev.LoadFailed) -> None:
    """The engine does not hold it; its reservation goes back, or stays until that is certain."""
    residency = residency_of(world, world.take_opened(event.operation, "load"))
    if residency is None:
        return
    residency.open = None
    world.counters.load_failures += 1
    if event.missing:
        residency.missing = True
        world.move(residency, Trigger.MISSING)
        if residency.brought:
            found_again(world, residency)
            return
        if fetched_at_once(world, residency):
            return
        set_back(world, residency, event.error)
    elif event.unsure:
        residency.refetched_ms = None
        set_back(world, residency, event.error)
        residency.unsure = True
        world.move(residency, Trigger.UNSURE)
        planner.unload(world, residency)
    else:
        residency.refetched_ms = None
        set_back(world, residency, event.error)
        world.move(residency, Trigger.FAIL)
    name = world.name_of(residency.version)
    world.note(
        "failed", f"load of {short(residency.version)}: {event.error}", name, residency.version
    )
    operations.load_failed(world, residency.version, event.error)


def fetched_at_once(world: World, residency: Residency) -> bool:
    """What is missing is fetched at once, unless that was done a moment ago and it is gone again:
    something takes it away, and there is no use in hurrying."""
    last_ms = residency.refetched_ms
    if last_ms is not None and world.now_ms - last_ms <= world.limits.retry_last_ms:
        return False
    residency.refetched_ms = world.now_ms
    return True


def unloaded(world: World, operation: OperationId) -> None:
    """The engine does not hold it, whether or not it did when asked: an id that is gone already is
    no error."""
    opened = world.take_opened(operation, "unload", "stranger")
    if opened is not None and opened.stranger is not None:
        replica, stranger = opened.stranger
        del world.replicas[replica].strangers[stranger]
    residency = residency_of(world, opened)
    if residency is None:
        return
    residency.open = None
    world.counters.unloads += 1
    world.move(residency, Trigger.UNLOADED)


def unload_failed(world: World, event: ev.UnloadFailed) -> None:
    """The engine still holds it, so it is still served; whoever wanted its room looks for another
    victim. When nobody knows, it is asked again, and admits nobody until then."""
    opened = world.take_opened(event.operation, "unload", "stranger")
    if opened is not None and opened.stranger is not None:
        replica, stranger = opened.stranger
        world.replicas[replica].strangers[stranger] = None
    residency = residency_of(world, opened)
    if residency is None:
        return
    error = event.error
    residency.open = None
    residency.unsure = residency.unsure or event.unsure
    world.counters.unload_failures += 1
    world.move(residency, Trigger.UNSURE if residency.unsure else Trigger.FAIL)
    set_back(world, residency, error)
    world.note(
        "failed", f"unload of {short(residency.version)}: {error}", version=residency.version
    )
    operations.unload_failed(world, residency.version, error)


def pin_set(world: World, operation: OperationId) -> None:
    """The engine pins as it was told."""
    opened = world.take_opened(operation, "pin")
    residency = residency_of(world, opened)
    if residency is None or opened is None:
        return
    residency.pin_open = None
    residency.engine_pinned = opened.pinned
    if not opened.pinned:
        world.replicas[residency.replica].pins.discard(residency.version)
    forget_failures(residency)


def pin_failed(world: World, operation: OperationId, error: LorryError) -> None:
    """It does not: a pin that was asked for fails, others are tried again."""
    residency = residency_of(world, world.take_opened(operation, "pin"))
    if residency is not None:
        residency.pin_open = None
        set_back(world, residency, error)
        operations.load_failed(world, residency.version, error)


def commit_ended(world: World, operation: OperationId, error: LorryError | None) -> None:
    """The store has spoken."""
    opened = world.take_opened(operation, "commit")
    asked = operations.find(world, opened.asked) if opened is not None else None
    if asked is None:
        return
    if error is None:
        operations.committed(world, asked)
    else:
        asked.open = None
        operations.end(world, asked, error)


def forget_failures(residency: Residency) -> None:
    """All is well with it now."""
    residency.error, residency.failures, residency.retry_ms = None, 0, 0
    residency.refetched_ms = None
