"""Every point of every operation: where the seeds of this level draw what goes wrong and when, here
each call of an engine and each chunk of an answer has its turn.

A script prepares the server, then does one operation. It is run once to count the engine's calls in
that operation, and then once for each of them and for each way to go wrong there.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import trio

from lorry.engines.fake_script import FakeSettings
from lorry.errors import EngineRejected, EngineTimeout
from lorry.ids import AdapterName
from lorry.lifecycle.settings import FleetLimits
from lorry.server.settings import ServerSettings
from lorry.supervisor.settings import SupervisorSettings
from tests.simulation.shell.engine import FOREIGN, Deed
from tests.simulation.shell.exchange import Exchange
from tests.simulation.shell.life import Life, World, play
from tests.simulation.shell.machine import adapters_folder, version_of
from tests.simulation.shell.options import BASE, VOCABULARY, Faults, Options
from tests.simulation.world import Violation

TOKENS = 5
STORM_S = 60.0
SLOW_S = 1.0
"""A call that takes its time, so that a client can leave in the middle of it."""

WAYS: Mapping[str, Callable[[], Deed]] = {
    "refuses": lambda: Deed(error=EngineRejected("The engine refuses.")),
    "raises what is none of ours": lambda: Deed(error=FOREIGN[0]()),
    "does not know, and did not": lambda: Deed(error=EngineTimeout("It does not know.")),
    "does not know, and did": lambda: Deed(error=EngineTimeout("Unknown."), after_effect=True),
    "never answers, and did not": lambda: Deed(delay_s=float("inf")),
    "never answers, and did": lambda: Deed(delay_s=float("inf"), after_effect=True),
    "dies before": lambda: Deed(dies=True),
    "dies after": lambda: Deed(dies=True, after_effect=True),
    "is left before": lambda: Deed(delay_s=SLOW_S),
    "is left after": lambda: Deed(delay_s=SLOW_S, after_effect=True),
}
"""What may go wrong at a call. In the last two the client leaves while it takes its time."""

CHUNK_WAYS = (
    *("refuses", "raises what is none of ours", "never answers, and did not"),
    *("dies before", "is left before"),
)
"""What may go wrong before a chunk."""


@dataclass(frozen=True, slots=True)
class Point:
    """Where and how an operation goes wrong."""

    call: int
    """Of the engine, counted from the operation's begin; chunks of an answer count as calls."""
    way: str


def options() -> Options:
    """A small honest world."""
    return Options(
        seed=0,
        replicas=1,
        engine=FakeSettings(
            max_loras=2,
            max_cpu_loras=2,
            vocab_size=VOCABULARY,
            layers=1,
            hidden_size=16,
            max_model_len=256,
            token_delay_s=0.05,
            check_paths=True,
        ),
        limits=FleetLimits(
            ticket_wait_ms=8_000, operation_ms=8_000, lease_ms=8_000, patience_ms=100
        ),
        supervisor=SupervisorSettings(
            drain_timeout_s=1.0, load_timeout_s=3.0, command_timeout_s=1.0, shutdown_s=0.5
        ),
        server=ServerSettings(
            served_model_names=(BASE,), request_timeout_s=8.0, drain_timeout_s=1.0
        ),
        faults=Faults(),
        names=3,
        folders=3,
        storms=(STORM_S,),
        ends=("calm",),
        calls_s=1.0,
        requests_s=1.0,
        tokens_max=TOKENS,
    )


class Script:
    """The calls of one operation, made by hand."""

    def __init__(self, world: World) -> None:
        """Numbers come from the world's workload."""
        self._new = world.workload._new

    def put(self, name: str, folder: int, **body: object) -> Exchange:
        """A load, or with `load=False` a registration."""
        source = f"good-{folder}"
        content = {"source": str(adapters_folder() / source), **body}
        made = self._new("put", "PUT", f"/v1/adapters/{name}", content)
        made.kind, made.name, made.version = "load", AdapterName(name), version_of(source)
        return made

    def call(self, route: str, method: str, name: str, tail: str = "", **body: object) -> Exchange:
        """A change of an adapter."""
        made = self._new(route, method, f"/v1/adapters/{name}{tail}", body or None)
        made.kind = {"delete": "unload", "rollback": "rollback"}.get(route, "change")
        made.name = AdapterName(name)
        return made

    def ask(self, route: str, name: str | None, tokens: int = TOKENS) -> Exchange:
        """A request for tokens."""
        prompt, stream = (5, 6, 7), "stream" in route
        sampling = {"temperature": 0, "ignore_eos": True}
        body = {"stream": stream, "return_token_ids": True, "max_tokens": tokens, **sampling}
        body["model"] = name or BASE
        if route.startswith("chat"):
            content = {"messages": [{"role": "user", "content": "why"}], **body}
            made = self._new(route, "POST", "/v1/chat/completions", content)
        elif route.startswith("generate"):
            sampled = {"max_new_tokens": tokens, **sampling}
            content = {"input_ids": prompt, "stream": stream, "sampling_params": sampled}
            content |= {"lora_path": name} if name else {}
            made = self._new(route, "POST", "/generate", content)
        else:
            made = self._new(route, "POST", "/v1/completions", {"prompt": prompt, **body})
        made.kind, made.name = "infer", AdapterName(name) if name else None
        made.prompt = () if route.startswith("chat") else prompt
        return made


@dataclass(frozen=True, slots=True)
class Scene:
    """What is done before, what runs on beside, and the operation."""

    before: tuple[Exchange, ...]
    beside: Exchange | None
    operation: Exchange


def _loaded(script: Script, operation: Exchange, *, stream: bool = False) -> Scene:
    """`operation` on n0, which serves; with a stream on it that takes longer."""
    beside = script.ask("completion stream", "n0", 12) if stream else None
    return Scene((script.put("n0", 0),), beside, operation)


SCENES: Mapping[str, Callable[[Script], Scene]] = {
    "load": lambda s: Scene((), None, s.put("n0", 0)),
    "load over a full engine": lambda s: Scene(
        (s.put("n1", 1), s.put("n2", 2)), None, s.put("n0", 0)
    ),
    "load of what is refused": lambda s: Scene((), None, _bad(s)),
    "replace": lambda s: _loaded(s, s.put("n0", 1), stream=True),
    "replace, drain first": lambda s: Scene(
        (s.put("n0", 0), s.put("n1", 2, pinned=True)),
        s.ask("completion stream", "n0", 12),
        s.put("n0", 1, strategy="drain-first"),
    ),
    "unload": lambda s: _loaded(s, s.call("delete", "DELETE", "n0")),
    "unload beside a stream": lambda s: _loaded(s, s.call("delete", "DELETE", "n0"), stream=True),
    "rollback": lambda s: Scene(
        (s.put("n0", 0), s.put("n0", 1)), None, s.call("rollback", "POST", "n0", "/rollback")
    ),
    "pin": lambda s: _loaded(s, s.call("patch", "PATCH", "n0", pinned=True)),
    "unpin": lambda s: Scene(
        (s.put("n0", 0, pinned=True),), None, s.call("patch", "PATCH", "n0", pinned=False)
    ),
    "prefetch": lambda s: Scene(
        (s.put("n0", 0, load=False),), None, s.call("prefetch", "POST", "n0", "/prefetch")
    ),
    "request that loads": lambda s: Scene(
        (s.put("n0", 0, load=False),), None, s.ask("completion stream", "n0")
    ),
    "request to the base": lambda s: Scene((), None, s.ask("completion stream", None)),
    "completion": lambda s: _loaded(s, s.ask("completion", "n0")),
    "chat stream": lambda s: _loaded(s, s.ask("chat stream", "n0")),
    "generate stream": lambda s: _loaded(s, s.ask("generate stream", "n0")),
}
"""Each operation, in a small world."""


def _bad(script: Script) -> Exchange:
    made = script._new("put", "PUT", "/v1/adapters/n0", {"source": str(adapters_folder() / "no")})
    made.kind, made.name = "load", AdapterName("n0")
    return made


class Plan:
    """Counts the engine's calls during the operation, and lets one of them go wrong."""

    def __init__(self, point: Point | None) -> None:
        """None: count only."""
        self.calls: list[str] = []
        self._point = point
        self.leave = anyio.Event()

    def next(self, call: str) -> Deed | None:
        """What goes wrong with the call that begins now."""
        self.calls.append(call)
        if self._point is None or len(self.calls) - 1 != self._point.call:
            return None
        deed = WAYS[self._point.way]()
        return replace(deed, waiting=self.leave.set) if "is left" in self._point.way else deed


class ScriptedLife(Life):
    """A life in which clients follow the scene, and nothing else."""

    world: "ScriptedWorld"

    async def _traffic(self, scope: anyio.CancelScope, nursery: trio.Nursery) -> None:
        world = self.world
        scene = world.scene(Script(world))
        with scope:
            for exchange in scene.before:
                await self.exchange(exchange)
            if scene.beside is not None:
                nursery.start_soon(self.exchange, scene.beside)
                await anyio.sleep(0.2)
            scene.operation.leaves_at_chunk = world.leaves_at_chunk
            scene.operation.leaves_when = world.plan.leave
            self.machine.plan = world.plan.next
            world.operation = await self.exchange(scene.operation)
            self.machine.plan = None
            # At once, while nobody can know yet how it ended: there may be no room for it.
            await self.exchange(Script(world).put("n2", 2))


class ScriptedWorld(World):
    """One life: the scene, then calm."""

    operation: Exchange

    def __init__(self, scene: str, point: Point | None, leaves_at_chunk: float, at: Path) -> None:
        """`at` is the machine's disk."""
        super().__init__(options(), at, None)
        self.scene = SCENES[scene]
        self.plan = Plan(point)
        self.leaves_at_chunk = leaves_at_chunk

    def new_life(self) -> ScriptedLife:
        """Its only one."""
        return ScriptedLife(self)


def act(scene: str, point: Point | None = None, leaves_at_chunk: float = math.inf) -> ScriptedWorld:
    """Play it; raises `Violation`."""
    world = play(0, lambda folder: ScriptedWorld(scene, point, leaves_at_chunk, folder))
    judge = world.judge
    if judge.finding is not None:
        where = f"{scene}, {point}, leaving at chunk {leaves_at_chunk}"
        raise Violation(f"{where}: {judge.finding}\n" + "\n".join(judge.last))
    return world


def points_of(scene: str) -> Iterator[Point]:
    """Every call of the engine in the operation, and every way to go wrong there."""
    for number, call in enumerate(act(scene).plan.calls):
        for way in CHUNK_WAYS if call == "chunk" else WAYS:
            yield Point(number, way)
