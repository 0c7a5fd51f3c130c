"""The supervisor: what the server talks to. Owns the core, its tasks and timers; is handed engines,
imports none."""

import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import anyio
from anyio import to_thread

from lorry.adapter_settings import (
    NO_SETTINGS,
    AdapterSettings,
    SettingsChange,
    milliseconds,
)
from lorry.artifacts.cache import DiskCache
from lorry.artifacts.digests import Digest
from lorry.artifacts.memory import remove_abandoned
from lorry.artifacts.names import check_adapter_name
from lorry.artifacts.parcels import Parcel, came_with_a_request
from lorry.artifacts.remote.fetcher import DOWNLOADS, Fetcher
from lorry.artifacts.remote.policy import SourcePolicy
from lorry.artifacts.snapshot import Manifest
from lorry.clock import Clock, SystemClock
from lorry.engine import (
    Engine,
    EngineCapabilities,
    EngineHealth,
    GenerateRequest,
    SamplingParams,
    TokenChunk,
)
from lorry.errors import AdapterNotFound, EngineUnreachable, ShuttingDown
from lorry.ids import AdapterName, OperationId, ReplicaId, TicketId, VersionId, short
from lorry.lifecycle import events as ev
from lorry.lifecycle.fleet import Fleet
from lorry.lifecycle.learning import Learner
from lorry.lifecycle.operations import unloading
from lorry.lifecycle.records import Request as AdminCall
from lorry.lifecycle.settings import FleetLimits, ReplicaLimits
from lorry.lifecycle.states import State
from lorry.store.store import Store
from lorry.supervisor import comparing, picture
from lorry.supervisor.checking import Checker, CheckView
from lorry.supervisor.demand import AdminCalls
from lorry.supervisor.following import Following
from lorry.supervisor.learning import Learning
from lorry.supervisor.registry import Registry
from lorry.supervisor.requests import Request
from lorry.supervisor.settings import SupervisorSettings
from lorry.supervisor.shell import Shell
from lorry.views import AdapterView, ChangeEvent, OperationView, ResidentView, Statistics

log = logging.getLogger(__name__)

CLOSE_S = 60.0
"""For an engine to end. The embedded one kills its process when that does not end by itself, which
takes seconds; a file system that hangs may take any time."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Serve the adapter at `source` as `name`."""

    name: AdapterName
    source: str
    mode: Literal["create", "replace", "upsert"] = "upsert"
    if_match: VersionId | None = None
    """The version that must be served now, or a prefix of it."""
    pinned: bool | None = None
    labels: Mapping[str, str] | None = None
    settings: SettingsChange | None = None
    """None: as they are, or none when new."""
    load: bool = True
    """False: register only; the first request loads it."""
    strategy: Literal["beside", "drain-first"] = "beside"
    expected_digest: str | None = None
    """As `Digest.parse` reads it."""


class Supervisor:
    """An async context manager: entered, the engines run and the registry is back; left, all is
    closed."""

    def __init__(
        self,
        *,
        engines: Mapping[ReplicaId, Engine],
        store: Store,
        cache: DiskCache,
        limits: FleetLimits,
        settings: SupervisorSettings,
        fetcher: Fetcher | None = None,
        clock: Clock | None = None,
        at_start: Sequence[LoadRequest] = (),
        base_names: Collection[str] = (),
    ) -> None:
        """`at_start` is loaded before anybody is served; `base_names` no adapter may have. Takes
        over the engines and the store: both are closed at the end."""
        self._engines = engines
        self._store = store
        self._settings = settings
        self._at_start = tuple(at_start)
        self._base_names = frozenset(base_names)
        self._clock = clock or SystemClock()
        self._fleet = Fleet(limits)
        self._registry = Registry(store)
        fetcher = fetcher or Fetcher(SourcePolicy(), cache.root / DOWNLOADS, settings.adapter_roots)
        self._shell = Shell(
            self._fleet, engines, self._registry, cache, fetcher, settings, self._clock
        )
        self._checker = Checker(self._fleet, fetcher, self._base_names)
        self._calls = AdminCalls(self, lambda **fields: self.load(LoadRequest(**fields)))
        self._learning = Learning(
            Learner(settings.resolvers, settings.learning),
            self._calls,
            self._registry.records,
            self._calls.is_idle,
            self._clock.now_ms,
            self._shell.spawn,
        )
        self._following = tuple(
            Following(folder, settings.adapter_dir_interval_s, self._calls, self._registry.records)
            for folder in settings.adapter_dirs
        )
        self._last_ticket = 0
        self._closing = False
        self._stack = AsyncExitStack()
        self._comparer = comparing.Comparer(self._registry, cache, settings)

    # Life

    async def __aenter__(self) -> Self:
        """Start the engines, read the registry, and wait until the engines are up."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._close_parts)
            await to_thread.run_sync(self._read)
            async with anyio.create_task_group() as starting:
                for engine in self._engines.values():
                    starting.start_soon(engine.start)
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            self._restore()
            self._learning.restore()
            self._shell.run_in(tasks)
            await self._wait_until_up()
            for request in self._at_start:
                await self.wait(self.load(request).id)
            for following in self._following:
                tasks.start_soon(following.run)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop taking, wait with a limit for what runs, then close; also when the wait is
        cancelled."""
        self._closing = True
        try:
            with anyio.move_on_after(self._settings.shutdown_s):
                await self._shell.until_idle()
                await self._shell.uploads.flush()
        finally:
            for request in tuple(self._shell.requests.values()):
                request.abort(ShuttingDown("The server is stopping."))
            await self._stack.aclose()

    async def _close_parts(self) -> None:
        """All of them, whatever one of them does."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as closing:
                for replica, engine in self._engines.items():
                    closing.start_soon(self._close_engine, replica, engine)
            self._shell.uploads.close()
            await to_thread.run_sync(self._store.close)

    async def _close_engine(self, replica: ReplicaId, engine: Engine) -> None:
        with anyio.move_on_after(CLOSE_S) as scope:
            try:
                await engine.aclose()
            except Exception as problem:  # noqa: BLE001 - the others are closed all the same
                log.warning("%s did not close well: %r", replica, problem)
        if scope.cancelled_caught:
            log.warning("%s did not close within %g s", replica, CLOSE_S)

    def _read(self) -> None:
        """In a worker thread: what is registered, and on the disk."""
        remove_abandoned()
        self._shell.fetcher.remove_abandoned()
        self._registry.read()
        self._registry.mend(self._shell.cache, self._clock.wall_s())

    def _restore(self) -> None:
        """The core's first events: which replicas there are, and what the registry holds."""
        for replica, engine in self._engines.items():
            can = engine.capabilities()
            pins = min(can.max_loras, can.max_cpu_loras) - 1
            limits = ReplicaLimits(can.max_cpu_loras, can.host_cache_bytes, pins)
            self._fleet.handle(ev.ReplicaAdded(replica, limits), self._clock.now_ms())
        newest_first = sorted(self._registry.records.values(), key=lambda r: -r.updated_s)
        adapters = tuple(
            (
                r.name,
                ev.VersionSpec(r.manifest.version, r.manifest.host_bytes),
                r.source,
                r.pinned,
            )
            for r in newest_first
        )
        self._shell.cache.protect(self._registry.served())
        self._shell.uploads.restore(self._registry.sent())
        idle_ms = {
            r.name: milliseconds(r.settings.idle_ttl_s)
            for r in newest_first
            if r.settings.idle_ttl_s is not None
        }
        self._shell.feed(ev.Restored(adapters, {n: ms for n, ms in idle_ms.items() if ms}))

    async def _wait_until_up(self) -> None:
        with anyio.move_on_after(self._settings.start_timeout_s):
            while any(self._shell.down_reasons.values()):
                await self._shell.up_changed.wait()
        if all(self._shell.down_reasons.values()):
            raise EngineUnreachable(
                f"No engine came up within {self._settings.start_timeout_s:g} s: "
                f"{'; '.join(self._shell.down_reasons.values())}"
            )

    @property
    def capabilities(self) -> EngineCapabilities:
        """Of the engines, which all serve one base."""
        return next(iter(self._engines.values())).capabilities()

    @property
    def cache(self) -> DiskCache:
        """The disk cache, for files on their way to a load."""
        return self._shell.cache

    # Pictures

    def adapters(self) -> tuple[AdapterView, ...]:
        """All registered adapters, by name."""
        return tuple(self.adapter(name) for name in sorted(self._fleet.world.adapters))

    def adapter(self, name: AdapterName) -> AdapterView:
        """One of them. Raises `AdapterNotFound`."""
        if name not in self._fleet.world.adapters:
            raise AdapterNotFound(f"The adapter '{name}' cannot be found.", param="name")
        return picture.adapter(self._shell, name)

    def residents(self) -> tuple[ResidentView, ...]:
        """Every version that an engine holds, those on their way out included."""
        return picture.residents(self._shell)

    def statistics(self) -> Statistics:
        """Everything that counts, from the core and the engines' last word."""
        return picture.statistics(self._shell)

    def health(self) -> dict[ReplicaId, EngineHealth]:
        """Each engine's last word about itself."""
        return {replica: engine.health() for replica, engine in self._engines.items()}

    def events(self, after: int = 0) -> AsyncGenerator[ChangeEvent]:
        """Changes with a sequence above `after`, as they happen, without end. Close it."""
        changes = self._shell.changes
        return changes.follow(changes.place(after))

    def events_so_far(self, after: int = 0) -> tuple[ChangeEvent, ...]:
        """Those of them that have happened and are still remembered."""
        return self._shell.changes.so_far(after)

    # Admin calls: begun now, refused now when hopeless; their end is waited for separately

    def load(self, request: LoadRequest, parcel: Parcel | None = None) -> OperationView:
        """Serve an adapter: fetch, judge, load, publish. Raises at once for a name that no adapter
        may have, and for a source or digest that is none. The files may come with the call, in a
        parcel whose source the request names; it is taken over and closed, whatever happens."""
        try:
            check_adapter_name(request.name, self._base_names)
            if not came_with_a_request(request.source):
                self._shell.fetcher.require(request.source, request.name)
            if request.expected_digest is not None:
                Digest.parse(request.expected_digest)
            return self._load(request, parcel)
        except BaseException:
            if parcel is not None:
                parcel.close()
            raise

    def _load(self, request: LoadRequest, parcel: Parcel | None) -> OperationView:
        event = ev.LoadAsked(
            self._fleet.next_operation(),
            request.name,
            request.source,
            mode=ev.Mode(request.mode),
            if_match=request.if_match,
            pinned=request.pinned,
            labels=request.labels,
            settings=request.settings,
            load=request.load,
            strategy=ev.Strategy(request.strategy),
            digest=request.expected_digest,
        )
        return self._ask("load", event, parcel)

    async def check(self, source: str, name: str | None = None) -> CheckView:
        """What `load` would find and do; changes nothing. Raises `Forbidden`, `RequestInvalid`."""
        return await self._checker.check(source, name, self.capabilities)

    async def diff(self, a: str, b: str) -> comparing.Difference:
        """What tells two adapters apart, each a name, `name@version` or a folder; changes nothing.
        Raises `AdapterNotFound`, `SourceNotFound`, `Forbidden`, `AdapterInvalid`."""
        return await self._comparer.diff(a, b)

    def unload(
        self,
        name: AdapterName,
        *,
        drain_timeout_s: float | None = None,
        purge: bool = False,
        if_match: VersionId | None = None,
    ) -> OperationView:
        """Stop serving an adapter: drain, remove from every engine, forget."""
        drain_s = self._settings.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        operation = self._fleet.next_operation()
        event = ev.UnloadAsked(operation, name, int(drain_s * 1000), purge, if_match)
        return self._ask("unload", event)

    def pin(self, name: AdapterName, pinned: bool) -> OperationView:
        """Keep an adapter resident and in a slot, or stop."""
        return self.change(name, pinned=pinned)

    def change(
        self,
        name: AdapterName,
        *,
        pinned: bool | None = None,
        labels: Mapping[str, str] | None = None,
        settings: SettingsChange | None = None,
        if_match: VersionId | None = None,
    ) -> OperationView:
        """Change what is kept beside the weights, all of it or nothing; None leaves a thing as it
        is."""
        operation = self._fleet.next_operation()
        if pinned is None:
            event = ev.SettingsAsked(operation, name, labels, settings, if_match)
            return self._ask("label" if settings is None else "settings", event)
        pin = ev.PinAsked(operation, name, pinned, labels, settings, if_match)
        return self._ask("pin" if pinned else "unpin", pin)

    def settings_of(self, name: AdapterName) -> AdapterSettings:
        """What was set for an adapter; nothing for one that is not registered."""
        record = self._registry.records.get(name)
        return NO_SETTINGS if record is None else record.settings

    def prefetch(self, name: AdapterName) -> OperationView:
        """Make an adapter resident before anybody asks for it."""
        return self._ask("prefetch", ev.PrefetchAsked(self._fleet.next_operation(), name))

    def rollback(
        self,
        name: AdapterName,
        version: VersionId | None = None,
        *,
        strategy: Literal["beside", "drain-first"] = "beside",
        if_match: VersionId | None = None,
    ) -> OperationView:
        """Serve the version before the present one, or the one named: without a load when an engine
        still holds it. Raises `AdapterNotFound` when no such version is kept."""
        record = self._registry.records.get(name)
        if record is None:
            raise AdapterNotFound(f"The adapter '{name}' cannot be found.", param="name")
        for previous in record.previous:
            if version is not None and not previous.startswith(version):
                continue
            manifest = self._registry.manifests.get(previous)
            source = record.previous_sources.get(previous, record.source)
            if manifest is not None and self._is_kept(previous, manifest, source):
                event = ev.LoadAsked(
                    self._fleet.next_operation(),
                    name,
                    source,
                    ev.Mode.REPLACE,
                    if_match=if_match,
                    strategy=ev.Strategy(strategy),
                    known=ev.VersionSpec(previous, manifest.host_bytes),
                )
                return self._ask("rollback", event)
        wanted = short(version) if version is not None else "earlier version"
        raise AdapterNotFound(f"No {wanted} of '{name}' is kept on disk.", param="version")

    def _is_kept(self, version: VersionId, manifest: Manifest, source: str) -> bool:
        """On the disk, or in an engine, which needs no disk to go on with it; but what came with a
        request could not be fetched again once the engine gives it up."""
        held = not came_with_a_request(source) and any(
            residency.state in (State.RESIDENT, State.DRAINING)
            for residency in self._fleet.world.residencies_of(version)
        )
        return held or self._shell.cache.get(version, manifest) is not None

    def _ask(self, kind: str, event: AdminCall, parcel: Parcel | None = None) -> OperationView:
        """Feed it; raise at once what refuses it at once."""
        if self._closing:
            raise ShuttingDown("The server is stopping and takes no new operations.")
        self._shell.book.begin(event.operation, kind, event.name, self._clock.wall_s())
        if parcel is not None:
            self._shell.uploads.begin(event.operation, parcel)
        self._shell.feed(event)
        view = self._shell.book.view(event.operation)
        if view.error is not None:
            raise view.error
        return view

    async def wait(self, operation: OperationId) -> OperationView:
        """The end of an admin call; raises its error. Giving the wait up does not cancel the
        call."""
        return await self._shell.book.wait(operation)

    def operation(self, operation: OperationId) -> OperationView:
        """How far it is. Raises `OperationNotFound`."""
        return self._shell.book.view(operation)

    def operations(self) -> tuple[OperationView, ...]:
        """Those under way and the last ones that ended, oldest first."""
        return self._shell.book.views()

    def cancel(self, operation: OperationId) -> OperationView:
        """Give it up, unless it is past the point where it can be undone."""
        self._shell.book.view(operation)
        self._shell.feed(ev.CancelAsked(operation))
        return self._shell.book.view(operation)

    # Requests

    def resolve(self, model: str) -> tuple[AdapterName, VersionId | None]:
        """What `name` or `name@version` means now. Raises `AdapterNotFound` or
        `AdapterUnloading`."""
        adapters = self._fleet.world.adapters
        name, version = AdapterName(model), None
        if name not in adapters and "@" in model:
            stem, _, wanted = model.rpartition("@")
            adapter = adapters.get(AdapterName(stem))
            served = adapter.spec.version if adapter is not None else None
            if served is not None and len(wanted) >= 12 and served.startswith(wanted):
                name, version = AdapterName(stem), served
        if name not in adapters:
            raise AdapterNotFound(f"The adapter '{model}' cannot be found.", param="model")
        if adapters[name].closing:
            raise unloading(name)
        return name, version

    def learnable(self, name: str) -> bool:
        """Whether a resolver may know such a name."""
        return self._learning.learnable(name)

    async def learn(self, name: str) -> None:
        """Look for an adapter that nobody registered, and return once it is. Raises
        `AdapterNotFound`, or why it cannot be served."""
        if self._closing:
            raise ShuttingDown("The server is stopping and takes no new requests.")
        await self._learning.learn(AdapterName(name))

    def used(self, name: AdapterName) -> None:
        """A request names this adapter: of those learnt, the one unused for longest goes first."""
        self._learning.used(name)

    @asynccontextmanager
    async def generate(
        self,
        *,
        name: AdapterName | None,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        version: VersionId | None = None,
        cache_salt: str = "",
        request_id: str = "",
    ) -> AsyncIterator[AsyncIterator[TokenChunk]]:
        """Wait for admission, then give the chunks. Leaving, however that happens, releases the
        lease once."""
        if self._closing:
            raise ShuttingDown("The server is stopping and takes no new requests.")
        self._last_ticket += 1
        ticket = TicketId(self._last_ticket)
        engine_request = f"{request_id or uuid.uuid4().hex}-{ticket}"
        request = Request(ticket, engine_request, lambda t: self._shell.feed(ev.Finished(t)))
        self._shell.requests[ticket] = request
        stream: AsyncGenerator[TokenChunk] | None = None
        try:
            self._shell.feed(ev.Arrived(ticket, name, version))
            await request.answered.wait()
            admitted = request.admitted
            if request.error is not None or admitted is None:
                raise request.error or ShuttingDown("The server is stopping.")
            stream = request.stream(
                self._engines[admitted.replica],
                GenerateRequest(
                    request_id=engine_request,
                    prompt=prompt,
                    sampling=sampling,
                    engine_id=admitted.engine_id,
                    version=admitted.version,
                    cache_salt=cache_salt,
                ),
            )
            yield stream
        finally:
            if stream is not None:
                await stream.aclose()
            request.release()
            self._shell.leave(ticket)
