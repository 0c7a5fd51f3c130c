"""Carries out the core's commands and feeds back what came of them.

Each command that waits for somebody (disk, store, engine) runs in a task of its own with a
deadline, so no adapter waits for another's (promise 5). Whatever goes wrong in one becomes its
report; only a bug of ours ends the server.
"""

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType

import anyio
import anyio.abc
import anyio.lowlevel
from anyio import to_thread

from lorry.artifacts.cache import DiskCache
from lorry.artifacts.parcels import Parcel, came_with_a_request
from lorry.artifacts.remote.fetcher import Fetcher
from lorry.artifacts.remote.uri import redact
from lorry.clock import Clock
from lorry.engine import Engine, EngineDown, LoraVersion
from lorry.errors import (
    AdapterInvalid,
    EngineTimeout,
    LorryError,
    SourceNotFound,
    StorageFailed,
)
from lorry.ids import AdapterName, OperationId, ReplicaId, TicketId, VersionId, short
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle.fleet import Fleet
from lorry.lifecycle.invariants import check
from lorry.lifecycle.records import Phase
from lorry.supervisor.book import Book
from lorry.supervisor.changes import Changes
from lorry.supervisor.foreign import engine_error, engine_timeout
from lorry.supervisor.registry import Registry
from lorry.supervisor.requests import ABORT_S, Request
from lorry.supervisor.settings import SupervisorSettings
from lorry.supervisor.sources import Fetched, Fetching, Sources, stopping
from lorry.supervisor.uploads import Uploads

log = logging.getLogger(__name__)

TIMES_KEPT = 1000


class Shell:
    """The core and everything it commands."""

    def __init__(
        self,
        fleet: Fleet,
        engines: Mapping[ReplicaId, Engine],
        registry: Registry,
        cache: DiskCache,
        fetcher: Fetcher,
        settings: SupervisorSettings,
        clock: Clock,
    ) -> None:
        """Nothing runs before `run_in`."""
        self.fleet = fleet
        self.engines = engines
        self.registry = registry
        self.cache = cache
        self.fetcher = fetcher
        self.sources = Sources(fetcher, cache)
        self.settings = settings
        self.clock = clock
        self.book = Book(settings.operations_kept, self._progress)
        self.changes = Changes(settings.changes_kept)
        self.uploads = Uploads(cache, fleet.world.referenced, self._tell_of_copy)
        self.requests: dict[TicketId, Request] = {}
        self.load_seconds: list[float] = []
        self.down_reasons: dict[ReplicaId, str] = dict.fromkeys(engines, "starting")
        self.up_changed = anyio.Event()
        self._ended = anyio.Event()
        self._losses: dict[ReplicaId, int] = dict.fromkeys(engines, 0)
        self._fetching: dict[AdapterName, Fetching] = {}
        self._store_thread = anyio.CapacityLimiter(1)
        self._tasks: anyio.abc.TaskGroup | None = None
        self._timer_set: int | None = None
        self._timer_moved = anyio.Event()

    def run_in(self, tasks: anyio.abc.TaskGroup) -> None:
        """Begin to watch the engines and the clock."""
        self._tasks = tasks
        tasks.start_soon(self._keep_time)
        for replica, engine in self.engines.items():
            tasks.start_soon(self._watch, replica, engine)
            tasks.start_soon(self._reconcile, replica, engine)

    # Events in, commands out

    def feed(self, event: ev.Event) -> None:
        """Tell the core, and begin what it commands. Never waits."""
        for command in self.fleet.handle(event, self.clock.now_ms()):
            self._carry_out(command)
        if self.fleet.due_ms != self._timer_set:
            self._timer_set = self.fleet.due_ms
            self._timer_moved.set()

    def _carry_out(self, command: cm.Command) -> None:
        match command:
            case cm.Admit(ticket):
                self.requests[ticket].admit(command)
            case cm.Refuse(ticket, error):
                self.requests[ticket].refuse(error)
            case cm.Abort(ticket, error):
                self._spawn(self._abort, ticket, error)
            case cm.BeginOperation(operation, kind, name):
                self.book.begin(operation, kind, name, self.clock.wall_s())
            case cm.EndOperation(operation, error):
                self._end_operation(operation, error)
            case cm.Note(kind, name, version, text):
                self.changes.add(self.clock.wall_s(), kind, name, version, text)
            case cm.Fetch():
                self._spawn(self._fetch, command)
            case cm.Load():
                self._spawn(self._load, command)
            case cm.Unload():
                self._spawn(self._unload, command)
            case cm.SetPin():
                self._spawn(self._set_pin, command)
            case cm.Commit():
                self._spawn(self._commit, command)
            case cm.Purge(version):
                self._spawn(self.uploads.drop, version)

    def spawn(self, task: Callable[..., object], *arguments: object) -> None:
        """Begin a task that lives as long as the supervisor at most."""
        self._spawn(task, *arguments)

    def _spawn(self, task: Callable[..., object], *arguments: object) -> None:
        assert self._tasks is not None, "the supervisor has not been entered"
        self._tasks.start_soon(task, *arguments)  # type: ignore[arg-type]

    def _progress(self, name: AdapterName) -> tuple[str, VersionId | None]:
        queue = self.fleet.world.asked.get(name)
        if not queue:
            return "", None
        fetching = self._fetching.get(name)
        if queue[0].phase is Phase.FETCHING and fetching is not None and fetching.total:
            return f"{queue[0].phase} {fetching}", None
        return queue[0].phase, queue[0].spec.version if queue[0].spec is not None else None

    def _end_operation(self, operation: OperationId, error: LorryError | None) -> None:
        view = self.book.view(operation)
        self.book.end(operation, error, self.clock.wall_s())
        self._stop_unwanted_fetch(view.name)
        for version in self.uploads.end(operation):
            self._spawn(self.uploads.copy, version)
        if view.version is not None:
            self._forget(view.version)
        self._tell_ended()

    def _stop_unwanted_fetch(self, name: AdapterName) -> None:
        """End a fetch whose call has ended; another call's end, of the same name, is none of its
        business."""
        fetching = self._fetching.get(name)
        queue = self.fleet.world.asked.get(name)
        if fetching is None or (queue and queue[0].open == fetching.operation):
            return
        del self._fetching[name]
        fetching.cancel()

    def leave(self, ticket: TicketId) -> None:
        """A request's context is over."""
        del self.requests[ticket]
        self._tell_ended()

    async def until_idle(self) -> None:
        """Return once no request and no admin call is under way."""
        while self.requests or self.book.running():
            await self._ended.wait()

    def _tell_ended(self) -> None:
        self._ended.set()
        self._ended = anyio.Event()

    def _forget(self, version: VersionId) -> None:
        """Drop what is known of a version that nobody needs any more."""
        if not self.fleet.world.referenced(version):
            self.registry.forget_unused(version)
            self.cache.release(version)
            if version not in self.registry.manifests and self.uploads.forget(version):
                self._spawn(self._purge, version)

    def _tell_of_copy(self, name: AdapterName, version: VersionId, text: str) -> None:
        self.changes.add(self.clock.wall_s(), "failed", name, version, text)

    # Commands

    async def _abort(self, ticket: TicketId, error: LorryError) -> None:
        request = self.requests.get(ticket)
        if request is None:
            return
        request.abort(error)
        engine = self.engines[request.admitted.replica] if request.admitted else None
        if engine is not None:
            with anyio.move_on_after(ABORT_S):
                try:
                    await engine.abort(request.engine_request)
                except Exception as problem:  # noqa: BLE001 - down or not: the request is over
                    log.debug("abort of %s: %r", request.engine_request, problem)
        request.release()

    async def _fetch(self, command: cm.Fetch) -> None:
        fetching = Fetching(command.operation)
        if command.expected is None:
            self._fetching[command.name] = fetching
        parcel = self.uploads.find(command.source)
        try:
            fetched = await self._snapshot(command, fetching, parcel)
        except LorryError as error:
            self.feed(ev.FetchFailed(command.operation, error))
            return
        except Exception as error:
            source = redact(command.source)
            log.error("snapshot of %s: %s", source, type(error).__name__, exc_info=_frames(error))
            failure = AdapterInvalid(f"'{command.name}' cannot be read: {type(error).__name__}.")
            self.feed(ev.FetchFailed(command.operation, failure))
            return
        version = fetched.snapshot.manifest.version
        if command.expected is not None and version != command.expected:
            message = (
                f"The snapshot of '{command.name}' is gone, and {fetched.source} holds another "
                f"version now ({short(version)}, not {short(command.expected)}); load it again."
            )
            self.feed(ev.FetchFailed(command.operation, AdapterInvalid(message)))
            return
        self.registry.manifests[version] = fetched.snapshot.manifest
        if parcel is not None and self.uploads.fetched(command.name, parcel, version):
            self._spawn(self.uploads.copy, version)
        spec = ev.VersionSpec(version, fetched.snapshot.manifest.host_bytes)
        self.feed(ev.Fetched(command.operation, spec, fetched.source))
        for asked in tuple(self.fleet.world.asked.get(command.name, ()))[:1]:
            self.book.view(asked.id)  # takes note of the version while the call is under way

    async def _snapshot(
        self, command: cm.Fetch, fetching: Fetching, parcel: Parcel | None
    ) -> Fetched:
        """Of what came with the request, or of what the source names."""
        can = next(iter(self.engines.values())).capabilities()
        if parcel is not None:
            limits = can.base, can.max_lora_rank
            work = partial(parcel.snapshot, command.name, self.cache, *limits, fetching.stop.is_set)
            threads = self.uploads.judging if parcel.in_memory else self.sources.disk_threads
            async with stopping(fetching):
                snapshot = await to_thread.run_sync(work, limiter=threads)
            return Fetched(snapshot, command.source)
        if came_with_a_request(command.source):
            raise SourceNotFound(
                f"The files of '{command.name}' came with a request ({command.source}) and are not "
                "kept on the disk any more; send them again."
            )
        return await self.sources.snapshot(command, can, fetching)

    async def _load(self, command: cm.Load) -> None:
        began_ms = self.clock.now_ms()
        try:
            with self.uploads.reading(command.version) as memory:
                path = memory or await to_thread.run_sync(
                    self.cache.open, command.version, limiter=self.sources.disk_threads
                )
                if path is None:
                    error: LorryError = StorageFailed(f"The snapshot of '{command.name}' is gone.")
                    self.feed(ev.LoadFailed(command.operation, error, missing=True))
                    return
                if command.operation not in self.fleet.world.opened:
                    return  # the engine was lost meanwhile; the one that came after knows nothing
                with anyio.fail_after(self.settings.load_timeout_s):
                    await self.engines[command.replica].add_lora(_version(command, path))
        except (TimeoutError, EngineTimeout) as problem:
            error = engine_timeout(f"load of '{command.name}'", problem)
            self.feed(ev.LoadFailed(command.operation, error, unsure=True))
        except Exception as problem:  # noqa: BLE001 - whatever it was, the load is answered
            error = engine_error(f"load of '{command.name}'", problem)
            self.feed(ev.LoadFailed(command.operation, error))
        else:
            self.load_seconds.append((self.clock.now_ms() - began_ms) / 1000)
            del self.load_seconds[:-TIMES_KEPT]
            self.feed(ev.Loaded(command.operation))

    async def _unload(self, command: cm.Unload) -> None:
        """False is an answer like True: the engine does not hold it (the field report on
        unload)."""
        engine = self.engines[command.replica]
        try:
            with anyio.fail_after(self.settings.command_timeout_s):
                existed = await engine.remove_lora(command.engine_id)
        except (TimeoutError, EngineTimeout) as problem:
            # Nobody knows whether it is still there, so it must not serve until the engine says.
            error = engine_timeout("unload", problem)
            self.feed(ev.UnloadFailed(command.operation, error, unsure=True))
        except Exception as problem:  # noqa: BLE001 - whatever it was, the unload is answered
            self.feed(ev.UnloadFailed(command.operation, engine_error("unload", problem)))
        else:
            if not existed:
                log.debug("%s had given engine id %d up", command.replica, command.engine_id)
            self.feed(ev.Unloaded(command.operation, existed))

    async def _set_pin(self, command: cm.SetPin) -> None:
        engine = self.engines[command.replica]
        try:
            with anyio.fail_after(self.settings.command_timeout_s):
                await engine.pin_lora(command.engine_id, command.pinned)
        except TimeoutError as problem:
            self.feed(ev.PinFailed(command.operation, engine_timeout("pin", problem)))
        except Exception as problem:  # noqa: BLE001 - whatever it was, the pin is answered
            self.feed(ev.PinFailed(command.operation, engine_error("pin", problem)))
        else:
            self.feed(ev.PinSet(command.operation))

    async def _commit(self, command: cm.Commit) -> None:
        """The thread is not given up on cancellation: a write that was begun is told to the
        core."""
        try:
            if command.version is not None:
                await self.uploads.durable(command.version, self.settings.load_timeout_s)
            at_s = self.clock.wall_s()
            record = self.registry.change(command, at_s)
            write = partial(self.registry.write, command, record, at_s)
            await to_thread.run_sync(write, limiter=self._store_thread)
        except LorryError as error:
            self.feed(ev.CommitFailed(command.operation, error))
            return
        except Exception as problem:
            log.exception("commit of %s", command.name)
            failure = StorageFailed(f"The registry could not be written: {problem!r}")
            self.feed(ev.CommitFailed(command.operation, failure))
            return
        before = self.registry.apply(command, record)
        self.cache.protect(self.registry.served())
        self.feed(ev.Committed(command.operation))
        for version in before:
            self._forget(version)
            if command.purge and version not in self.registry.manifests:
                self._spawn(self.uploads.drop, version)

    async def _purge(self, version: VersionId) -> None:
        try:
            await to_thread.run_sync(self.cache.remove, version, limiter=self.sources.disk_threads)
        except LorryError as error:
            log.warning("purge of %s: %s", short(version), error)

    # Engines and time

    async def _watch(self, replica: ReplicaId, engine: Engine) -> None:
        """Ups and downs of one engine."""
        events = engine.events()
        try:
            async for event in events:
                if isinstance(event, EngineDown):
                    self._losses[replica] += 1
                    self.down_reasons[replica] = event.reason
                    self.feed(ev.EngineLost(replica, event.reason))
                else:
                    self.down_reasons[replica] = ""
                    await self._see(replica, engine)
                self.up_changed.set()
                self.up_changed = anyio.Event()
        finally:
            if isinstance(events, AsyncGenerator):
                await events.aclose()  # not left to the garbage collector

    async def _reconcile(self, replica: ReplicaId, engine: Engine) -> None:
        """Look again now and then: residency is observed, never remembered (promise 1)."""
        while True:
            await anyio.sleep(self.settings.reconcile_s)
            if not self.down_reasons[replica]:
                await self._see(replica, engine)
            for violation in check(self.fleet.world):
                log.error("broken invariant %s", violation)

    async def _see(self, replica: ReplicaId, engine: Engine) -> None:
        """Ask, and tell the core unless the engine was lost meanwhile."""
        as_of, losses = self.fleet.revision, self._losses[replica]
        try:
            with anyio.fail_after(self.settings.command_timeout_s):
                residents = await engine.list_loras()
        except Exception as error:  # noqa: BLE001 - whatever it was, it is asked again later
            log.warning("%s did not say what it holds: %r", replica, error)
            return
        if losses == self._losses[replica]:
            self.feed(ev.EngineSeen(replica, residents, as_of))

    async def _keep_time(self) -> None:
        """Feed `TimerDue` when the core's next deadline comes."""
        while True:
            moved = self._timer_moved
            if moved.is_set():
                self._timer_moved = moved = anyio.Event()
            due = self.fleet.due_ms
            if due is None:
                await moved.wait()
                continue
            late = due + 1  # so that rounding to milliseconds never wakes it too early
            with anyio.move_on_after(max(0, late - self.clock.now_ms()) / 1000):
                await moved.wait()
            if self.clock.now_ms() >= due:
                self.feed(ev.TimerDue())
                await anyio.lowlevel.checkpoint()


def _frames(error: Exception) -> tuple[type[Exception], Exception, TracebackType | None]:
    """A bug's place without its words, which may hold what a stranger or a credential said."""
    return RuntimeError, RuntimeError(type(error).__name__), error.__traceback__


def _version(command: cm.Load, path: Path) -> LoraVersion:
    return LoraVersion(command.engine_id, command.version, command.name, path, command.bytes)
