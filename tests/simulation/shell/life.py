"""A whole world of level two: some lives of one server on one store and one cache, each ended by a
stop or a kill, and at last everything calms down, must come to rest, and answers.

How it is repeatable: the world's random numbers come from the seed; time is trio's mock clock; no
thread is started; and importing hypothesis makes trio's scheduler draw from a generator that
hypothesis knows, which `deterministic_PRNG` seeds.
"""

import logging
import random
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import anyio
import trio
import trio.testing
from fastapi import FastAPI
from hypothesis.internal.entropy import deterministic_PRNG

from lorry.artifacts.cache import DiskCache
from lorry.assembly import leaves
from lorry.errors import LorryError
from lorry.ids import ReplicaId
from lorry.server.app import build_app
from lorry.server.serve import ABORT_GRACE_S
from lorry.server.service import Service
from lorry.supervisor import Supervisor
from tests.fixtures.tiny_tokenizer import tiny_tokenizer
from tests.simulation.shell.engine import WaywardEngine
from tests.simulation.shell.exchange import Exchange, perform
from tests.simulation.shell.judge import Judge
from tests.simulation.shell.machine import MEMORY, CrookedClock, Machine, ShakyStore
from tests.simulation.shell.options import Faults, Options, draw
from tests.simulation.shell.workload import Workload
from tests.simulation.world import Violation

CACHE_BYTES = 1 << 20
TRIES = 20
"""Starts of one life until somebody would mend the disk."""

SETTLE_S = 30.0
"""Beside the deadlines: virtual time within which a calm world comes to rest."""


class World:
    """One seed."""

    def __init__(self, options: Options, folder: Path, trace: Callable[[str], None] | None) -> None:
        """`folder` is the machine's disk."""
        self.options = options
        self.rng = random.Random(options.seed + 1)
        self.judge = Judge(options, trace)
        self.machine = Machine(self.rng, options.faults, folder, self.judge.say)
        self.workload = Workload(options, self.rng, self.machine)
        self.engines: list[WaywardEngine] = []
        self.exchanges: set[Exchange] = set()
        self.starts = 0

    @property
    def steps(self) -> int:
        """Exchanges, events and engine calls."""
        return self.judge.steps + sum(engine.asked for engine in self.engines)

    # Lives

    def new_life(self) -> "Life":
        """The next process of the server."""
        return Life(self)

    async def run(self) -> None:
        """All lives, or until the first finding."""
        async with trio.open_nursery() as nursery:
            with self.machine.installed(nursery):
                nursery.start_soon(self._stop_at_finding, nursery.cancel_scope)
                for storm_s, end in zip(self.options.storms, self.options.ends, strict=True):
                    self.judge.say(f"a life of {storm_s:.1f} s, until {end}")
                    for _ in range(TRIES):
                        if await self.new_life().run(storm_s, end):
                            break
                nursery.cancel_scope.cancel()

    async def _stop_at_finding(self, scope: trio.CancelScope) -> None:
        await self.judge.found.wait()
        scope.cancel()


class Life:
    """One process of the server: everything in memory is new, everything on the disk is not."""

    def __init__(self, world: World) -> None:
        """Nothing runs yet."""
        self.world = world
        self.judge = world.judge
        self.machine = world.machine
        self.app: FastAPI
        self.supervisor: Supervisor
        self.engines: list[WaywardEngine] = []
        self.under_way: dict[int, tuple[Exchange, anyio.CancelScope]] = {}
        self.started = False
        self._stop = anyio.Event()
        self._idle = anyio.Event()
        self._up = anyio.Event()

    async def run(self, storm_s: float, end: str) -> bool:
        """From start to end; False when the start failed."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve)
            await self._up.wait()
            if self.started:
                await self._live(nursery, storm_s, end)
            nursery.cancel_scope.cancel()
        self._judge_ended()
        return self.started

    async def _live(self, nursery: trio.Nursery, storm_s: float, end: str) -> None:
        traffic = anyio.CancelScope()
        nursery.start_soon(self._traffic, traffic, nursery)
        await anyio.sleep(storm_s)
        if end == "calm":
            traffic.cancel()
            await self._come_to_rest(nursery)
        if end == "kill":
            traffic.cancel()
            self._kill()
            nursery.cancel_scope.cancel()
        else:
            self._stop.set()
            await self._idle.wait()

    # The server, as `serve` runs it

    def _build(self) -> None:
        options, machine = self.world.options, self.machine
        self.world.starts += 1
        self.engines = []
        self.store = ShakyStore(machine)
        for number in range(options.replicas):
            self.engines.append(WaywardEngine(machine, f"engine-{number}", options.engine))
        self.supervisor = Supervisor(
            engines={ReplicaId(engine.name): engine for engine in self.engines},
            store=self.store,
            cache=DiskCache(machine.folder / "cache", CACHE_BYTES),
            limits=options.limits,
            settings=options.supervisor,
            clock=CrookedClock(machine),
            base_names=options.server.served_model_names,
        )
        self.judge.watch(self.supervisor)
        self.app = build_app(self.supervisor, options.server, TOKENIZER)

    async def _serve(self) -> None:
        try:
            self._build()
            async with self.app.router.lifespan_context(self.app):
                self.judge.say("the server is up")
                self.started = True
                self._up.set()
                async with trio.open_nursery() as living:
                    for engine in self.engines:
                        living.start_soon(engine.live)
                    await self._stop.wait()
                    await self._shut_down()
                    living.cancel_scope.cancel()
            self.judge.say("the server has ended")
        except Exception as error:  # noqa: BLE001 - judged
            self._ended_by(error)
        finally:
            self._up.set()
            self._idle.set()

    def _ended_by(self, error: Exception) -> None:
        """Only the start may fail, and with an error that people can read."""
        group = error if isinstance(error, ExceptionGroup) else ExceptionGroup("", [error])
        found = leaves(group)
        self.judge.say(f"the server ended with {found}")
        if self.started and not self.machine.dead:
            self.judge.fail(7, f"the server ended by itself: {found}")
        elif not self.machine.dead and not all(isinstance(e, LorryError) for e in found):
            self.judge.fail(7, f"the server did not start: {found}")

    async def _shut_down(self) -> None:
        """As uvicorn and `_Server` do: first with patience, then without."""
        service: Service = self.app.state.service
        self.judge.say("the server is told to stop")
        self.judge.ends.add("stop")
        service.shutdown.begin()
        await self._until_no_exchange(service.settings.drain_timeout_s)
        service.shutdown.abort()
        await self._until_no_exchange(ABORT_GRACE_S + 1)
        for exchange, scope in self.under_way.values():
            exchange.cut = True
            scope.cancel()
        await self._until_no_exchange(60)
        if self.under_way:
            self.judge.fail(7, f"{len(self.under_way)} exchanges outlive the server's end")

    async def _until_no_exchange(self, most_s: float) -> None:
        with anyio.move_on_after(most_s):
            while self.under_way:
                await anyio.sleep(0.05)

    def _kill(self) -> None:
        """As SIGKILL: nothing that goes on has an effect. The kernel closes the files."""
        self.judge.say("the server is killed")
        self.judge.ends.add("kill")
        self.machine.dead = self.judge.deaf = True
        self.store.close()
        for exchange, scope in self.under_way.values():
            exchange.cut = True
            scope.cancel()

    def _judge_ended(self) -> None:
        """What an end must leave: engines and store closed, each once."""
        killed, self.machine.dead, self.judge.deaf = self.machine.dead, False, False
        for engine in self.engines:
            self.judge.engine_ended(engine)
            if engine.closed != 1 and not killed:
                self.judge.fail(7, f"{engine.name} was closed {engine.closed} times")

    # Traffic

    async def _traffic(self, scope: anyio.CancelScope, nursery: trio.Nursery) -> None:
        options, rng = self.world.options, self.world.rng
        workload = self.world.workload
        with scope:
            async with trio.open_nursery() as sending:
                for make, mean_s in (
                    (workload.call, options.calls_s),
                    (workload.request, options.requests_s),
                ):
                    sending.start_soon(self._send_all, make, mean_s, nursery)
                while True:
                    await anyio.sleep(rng.uniform(0.5, 1.5))
                    if self.machine.happens("snapshot_vanishes"):
                        self.machine.lose_snapshot()

    async def _send_all(
        self, make: Callable[[], Exchange], mean_s: float, nursery: trio.Nursery
    ) -> None:
        while not self._stop.is_set():
            await anyio.sleep(self.world.rng.expovariate(1 / mean_s))
            for _ in range(self.world.rng.choice((1, 1, 1, 3))):
                nursery.start_soon(self.exchange, make())

    async def exchange(self, exchange: Exchange) -> Exchange:
        """One, judged."""
        judge = self.judge
        found = partial(judge.fail, 7)
        judge.begun(exchange)
        scope = anyio.CancelScope(deadline=anyio.current_time() + judge.longest_s(exchange))
        self.under_way[exchange.number] = exchange, scope
        try:
            with scope:
                await perform(self.app, exchange, found)
        except Exception as error:  # noqa: BLE001 - uvicorn logs it and cuts the connection
            exchange.error = repr(error)
        finally:
            del self.under_way[exchange.number]
        if self.machine.dead:
            exchange.cut = True
        judge.ended(exchange, late=scope.cancelled_caught and not exchange.cut)
        self._learn(exchange)
        return exchange

    def _learn(self, exchange: Exchange) -> None:
        """What clients remember."""
        workload = self.world.workload
        for document in exchange.documents():
            if isinstance(document, dict) and document.get("object") == "operation":
                workload.operation = int(document["id"])
            if isinstance(document, dict) and document.get("object") == "adapter":
                known = workload.known.setdefault(document["name"], [])
                known.append(document["version"])
                del known[:-3]

    # Rest

    async def _come_to_rest(self, nursery: trio.Nursery) -> None:
        """Faults and traffic off; everything under way must end, and every name answer."""
        self.judge.say("calm")
        self.machine.faults = Faults()
        for engine in self.engines:
            engine.revive_at = None
            engine.revive()
        limits, settings = self.world.options.limits, self.world.options.supervisor
        await self._until_no_exchange(10_000)
        await anyio.sleep(
            SETTLE_S
            + (limits.operation_ms + limits.lease_ms + limits.ticket_wait_ms) / 1000
            + 3 * settings.reconcile_s
            + settings.drain_timeout_s
        )
        pictures = await self._pictures()
        self.judge.at_rest(pictures, self.engines)
        self.judge.calm = True
        for name in sorted(self.supervisor._fleet.world.adapters):
            await self.exchange(self.world.workload.ask(name))
        await self.exchange(self.world.workload.ask(None))
        await anyio.sleep(settings.reconcile_s + 1)
        self.judge.at_rest(await self._pictures(), self.engines)

    async def _pictures(self) -> dict[str, Any]:
        """The adapters, as each page has them."""
        make = self.world.workload._new
        native = await self.exchange(make("adapters", "GET", "/v1/adapters"))
        models = await self.exchange(make("models", "GET", "/v1/models"))
        return {
            "/v1/adapters": [one["name"] for one in native.documents()[0]["data"]],
            "/v1/models": [c["id"] for c in models.documents()[0]["data"] if c.get("parent")],
        }


TOKENIZER = tiny_tokenizer()
LOGGER = logging.getLogger("lorry")


def run(
    seed: int,
    trace: Callable[[str], None] | None = None,
    steps_most: int | None = None,
    options: Options | None = None,
) -> World:
    """A whole world; raises `Violation` with everything that is needed to look into it."""
    options = options or draw(seed)
    world = play(seed, lambda folder: World(options, folder, trace))
    if world.judge.finding is not None:
        raise Violation(
            f"level 2, seed {seed}: {world.judge.finding}\n{options}\nlast lines:\n"
            + "\n".join(world.judge.last)
        )
    return world


AnyWorld = TypeVar("AnyWorld", bound=World)


def play(seed: int, make: Callable[[Path], AnyWorld]) -> AnyWorld:
    """The world that `make` builds on an empty folder, run to its end or to its first finding."""
    place = str(MEMORY) if MEMORY.is_dir() else None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(dir=place, prefix="lorry-world-")))
        stack.enter_context(deterministic_PRNG(seed % 2**32))
        made: list[AnyWorld] = []

        async def main() -> None:
            world = make(folder)  # within the run: it makes events
            made.append(world)
            LOGGER.addHandler(world.judge)
            try:
                await world.run()
            finally:
                LOGGER.removeHandler(world.judge)

        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
        return made[0]
