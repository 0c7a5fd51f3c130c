"""The checkers of level two. Each finding names the promise of docs/lifecycle.md's design that it
breaks; `watch` lets them see every event that the core is told and every command it gives."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from lorry.engine import GenerateRequest, SamplingParams
from lorry.engines.fake_script import fake_tokens
from lorry.ids import AdapterName, EngineId, VersionId
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle.invariants import check
from lorry.lifecycle.states import State
from lorry.supervisor import Supervisor
from lorry.supervisor.requests import ABORT_S
from tests.simulation.shell.exchange import Exchange
from tests.simulation.shell.machine import CRAWL_S
from tests.simulation.shell.options import VOCABULARY, Options

SERVER_FAULTS = ("broken_invariant", "lorry_error")
"""Codes that no answer may have."""

ENGINES_WORDS = "the engine failed the "
"""How the server logs an exception of an engine that is none of ours: no fault of the server."""

LAST_LINES = 50


@dataclass(slots=True)
class Bound:
    """What a name stood for, and when."""

    since_s: float
    version: VersionId | None
    until_s: float | None = None


@dataclass(slots=True)
class Ledger:
    """Admin calls for one name."""

    loads: list[Exchange] = field(default_factory=list)
    unloads: list[Exchange] = field(default_factory=list)


class Judge(logging.Handler):
    """Collects what happens and what is wrong with it. Only the first finding counts."""

    def __init__(self, options: Options, trace: Callable[[str], None] | None) -> None:
        """As a log handler it reads what the server says."""
        super().__init__(logging.WARNING)
        self.options = options
        self.finding: str | None = None
        self.found = anyio.Event()
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self.commands: set[str] = set()
        self.codes: set[str] = set()
        """Of errors with 5xx that the server logged."""
        self.routes: set[str] = set()
        self.ends: set[str] = set()
        """Ways in which answers ended."""
        self.steps = 0
        self.bound: dict[AdapterName, list[Bound]] = {}
        self.ledger: dict[AdapterName, Ledger] = {}
        self.supervisor: Supervisor | None = None
        self.calm = False
        self.deaf = False
        """What a dead process does is nobody's finding."""
        self._resident: set[EngineId] = set()
        """Engine ids that were resident, and that nobody was told to unload since."""
        self._trace = trace

    # What happened

    def say(self, words: str) -> None:
        """One line of the trace."""
        line = f"{anyio.current_time():9.3f} {words}"
        self.last.append(line)
        if self._trace is not None:
            self._trace(line)

    def fail(self, promise: int, words: str) -> None:
        """A finding; the world ends with it."""
        if self.finding is None and not self.deaf:
            self.finding = f"promise {promise}: {words}"
            self.say(f"FOUND {self.finding}")
            self.found.set()

    def emit(self, record: logging.LogRecord) -> None:
        """A line of the server's log."""
        message = record.getMessage()
        if record.levelno >= logging.ERROR:
            if not message.startswith(ENGINES_WORDS):
                cause = repr(record.exc_info[1]) if record.exc_info else ""
                self.fail(7, f"the log has an error: {message} {cause}")
        elif record.msg == "request %s: %s: %s" and isinstance(record.args, tuple):
            code = str(record.args[1])
            self.codes.add(code)
            if code in SERVER_FAULTS:
                self.fail(7, f"an answer with {message}")

    # A life of the server

    def watch(self, supervisor: Supervisor) -> None:
        """Look at a new supervisor's core."""
        shell = supervisor._shell
        self.supervisor = supervisor
        self._resident.clear()
        feed, carry_out = shell.feed, shell._carry_out

        def fed(event: ev.Event) -> None:
            self.steps += 1
            if not isinstance(event, ev.TimerDue):
                self.say(f"  {_short(event)}")
            resident = self._resident_on(supervisor, event)
            feed(event)
            self._judge_listing(supervisor, event, resident)
            self._look(supervisor)

        def carried_out(command: cm.Command) -> None:
            self.commands.add(type(command).__name__)
            self._judge_command(supervisor, command)
            carry_out(command)

        shell.feed = fed  # type: ignore[method-assign]
        shell._carry_out = carried_out  # type: ignore[method-assign]

    def _resident_on(self, supervisor: Supervisor, event: ev.Event) -> set[EngineId | None]:
        """What serves on the replica whose listing comes."""
        if not isinstance(event, ev.EngineSeen):
            return set()
        holding = supervisor._fleet.world.replicas[event.replica].holding
        return {r.engine_id for r in holding.values() if r.state is State.RESIDENT}

    def _judge_listing(
        self, supervisor: Supervisor, event: ev.Event, before: set[EngineId | None]
    ) -> None:
        """A listing is not believed about what has come since it was made."""
        if not isinstance(event, ev.EngineSeen):
            return
        holding = supervisor._fleet.world.replicas[event.replica].holding
        gone = before - {r.engine_id for r in holding.values()}
        held: Any = getattr(supervisor._engines[event.replica], "_held", {})
        if gone & set(held):
            self.fail(1, f"{event.replica} holds {gone & set(held)}, and an old listing says no")

    def _look(self, supervisor: Supervisor) -> None:
        """After each event."""
        world = supervisor._fleet.world
        for violation in check(world):
            self.fail(4, f"broken invariant {violation}")
        self._resident.update(
            r.engine_id
            for r in world.residencies.values()
            if r.state is State.RESIDENT and r.engine_id is not None
        )
        now = {name: adapter.spec.version for name, adapter in world.adapters.items()}
        for name in sorted(now.keys() | self.bound.keys()):
            self._bind(name, now.get(name))

    def _bind(self, name: AdapterName, version: VersionId | None) -> None:
        history = self.bound.setdefault(name, [Bound(0.0, None)])
        if history[-1].version == version:
            return
        history[-1].until_s = anyio.current_time()
        history.append(Bound(anyio.current_time(), version))

    def _judge_command(self, supervisor: Supervisor, command: cm.Command) -> None:
        """No version goes while requests run on it, and no pinned one that serves."""
        if not isinstance(command, cm.Unload) or command.engine_id not in self._resident:
            return
        self._resident.discard(command.engine_id)
        world = supervisor._fleet.world
        for residency in world.residencies.values():
            if residency.engine_id != command.engine_id or residency.replica != command.replica:
                continue
            if residency.leases:
                self.fail(6, f"{command} while {residency.leases} requests run on it")
            for name in world.names_of.get(residency.version, ()):
                gives_way = any(asked.drains_first for asked in world.asked.get(name, ()))
                adapter = world.adapters[name]
                if adapter.pinned and not adapter.closing and not gives_way:
                    self.fail(6, f"{command} takes {name}, which is pinned")

    def served(self, name: AdapterName, exchange: Exchange) -> set[VersionId | None]:
        """What the name stood for at some time of the exchange."""
        return {
            one.version
            for one in self.bound.get(name, [Bound(0.0, None)])
            if (one.until_s is None or one.until_s >= exchange.began_s)
            and (exchange.ended_s is None or one.since_s <= exchange.ended_s)
        }

    # Exchanges

    def longest_s(self, exchange: Exchange) -> float:
        """The bound on an exchange, from the settings and from how slow client and disk may be."""
        limits, server = self.options.limits, self.options.server
        disk = 10 * CRAWL_S if self.options.faults.disk_crawls else 10.0
        client = exchange.read_s * (8 + 2 * self.options.tokens_max)
        if exchange.kind == "infer":
            held = (limits.ticket_wait_ms + limits.lease_ms) / 1000
            work = min(server.request_timeout_s, held) + 3 * ABORT_S
        elif exchange.route == "health generate":
            work = 20 + 2 * ABORT_S
        else:
            drain = max(self.options.supervisor.drain_timeout_s, 5)
            engine = 2 * self.options.supervisor.command_timeout_s
            work = limits.operation_ms / 1000 + drain + engine + 2 * ABORT_S
        return 5 + work + disk + client

    def begun(self, exchange: Exchange) -> None:
        """It is on its way."""
        self.steps += 1
        self.say(f"{exchange} begins")
        self.routes.add(exchange.route)
        if exchange.name is None:
            return
        ledger = self.ledger.setdefault(exchange.name, Ledger())
        if exchange.kind in ("load", "rollback"):
            ledger.loads.append(exchange)
        elif exchange.kind == "unload":
            ledger.unloads.append(exchange)

    def ended(self, exchange: Exchange, *, late: bool) -> None:
        """It is over, or has to be."""
        self.say(
            f"{exchange} ends: {exchange.status} {len(exchange.chunks)} chunks {exchange.error}"
        )
        if exchange.cut:
            self.ends.add("cut")
            return
        if late:
            self.fail(5, f"{exchange} has no end after {self.longest_s(exchange):.0f} s")
        if exchange.error:
            self.fail(7, f"{exchange} raised {exchange.error}")
        if exchange.left:
            self.ends.add("left")
        elif exchange.finished != 1 or exchange.status is None:
            self.fail(7, f"{exchange} ended without an answer: {exchange.status}")
        if exchange.status is not None:
            self._judge_status(exchange)
        if exchange.status == 200 and exchange.kind == "infer":
            self._judge_tokens(exchange)

    def _judge_status(self, exchange: Exchange) -> None:
        status = exchange.status or 0
        self.ends.add(f"{exchange.kind} {status}")
        if self.calm and status >= 500 and exchange.kind == "infer":
            self.fail(11, f"{exchange} at rest: {status} {exchange.answer!r}")
        if exchange.route.startswith("bad") and not 400 <= status < 500 and status != 503:
            self.fail(9, f"{exchange}: {status}")
        if status not in (200, 201) or not exchange.waits or exchange.name is None:
            return
        served = self.served(exchange.name, exchange)
        if exchange.kind == "load":
            if exchange.version is None:
                self.fail(9, f"{exchange}: a bad adapter was loaded: {exchange.answer!r}")
            elif exchange.version not in served:
                self.fail(1, f"{exchange} answered {status}, and the name stood for {served}")
        elif exchange.kind == "unload" and None not in served:
            self.fail(3, f"{exchange} answered {status}, and the name stood for {served}")

    def _judge_tokens(self, exchange: Exchange) -> None:
        """Each token was computed by one version that the name stood for."""
        name = exchange.name
        allowed = {None} if name is None else self.served(name, exchange) - {None}
        if exchange.version is not None:
            allowed &= {exchange.version}
        prompt, answers, error = _tokens(exchange)
        if error:
            self.ends.add(f"stream {error}")
        if any(answers):
            self.ends.add(f"tokens of {exchange.route}")
        if not allowed and any(answers):
            self.fail(10, f"{exchange} was answered, and nothing was served: {answers}")
        for tokens in answers:
            if tokens and not any(_by(version, prompt, tokens) for version in allowed):
                who = [v for v in self._versions() if _by(v, prompt, tokens)]
                self.fail(2, f"{exchange} got {tokens} of {who}; allowed was {allowed}")
        if name is not None and any(answers):
            self._judge_finality(name, exchange)

    def _versions(self) -> list[VersionId | None]:
        found = {one.version for history in self.bound.values() for one in history}
        return [None, *sorted(version for version in found if version is not None)]

    def _judge_finality(self, name: AdapterName, exchange: Exchange) -> None:
        """After an acknowledged unload, and no load since, nobody is answered."""
        ledger = self.ledger.get(name, Ledger())
        for unload in ledger.unloads:
            done = unload.status == 200 and unload.waits and unload.ended_s is not None
            if not done or (unload.ended_s or 0) >= exchange.began_s:
                continue
            again = [
                load
                for load in ledger.loads
                if not load.waits
                or load.left
                or load.cut
                or load.ended_s is None
                or load.ended_s >= unload.began_s
            ]
            if not again:
                self.fail(3, f"{exchange} was answered after {unload}")

    # At rest

    def at_rest(self, pictures: dict[str, Any], engines: Sequence[Any]) -> None:
        """Registry, pages, core and engines agree, and nothing is left."""
        assert self.supervisor is not None
        shell, world = self.supervisor._shell, self.supervisor._fleet.world
        left = {
            "requests": dict(shell.requests),
            "leases": dict(world.leases),
            "tickets": dict(world.tickets),
            "admin calls": {n: list(q) for n, q in world.asked.items() if q},
            "operations": shell.book.running(),
            "commands": dict(world.opened),
        }
        for what, one in left.items():
            if one:
                self.fail(7, f"at rest there are {what}: {one}")
        names = sorted(world.adapters)
        for place, listed in pictures.items():
            if sorted(listed) != names:
                self.fail(1, f"{place} lists {sorted(listed)}, the core {names}")
        for violation in check(world):
            self.fail(4, f"at rest: broken invariant {violation}")
        for engine in engines:
            self._judge_engine(engine)
        self._judge_store()

    def _judge_engine(self, engine: Any) -> None:
        assert self.supervisor is not None
        world = self.supervisor._fleet.world
        believed = {
            r.engine_id
            for r in world.residencies.values()
            if r.replica == engine.name and r.state is State.RESIDENT
        }
        if believed != set(engine._held):
            self.fail(1, f"{engine.name} holds {sorted(engine._held)}, the core thinks {believed}")
        if engine._streams:
            self.fail(7, f"{engine.name} still runs {len(engine._streams)} requests")

    def engine_ended(self, engine: Any) -> None:
        """Whatever happened to the server: no operation overshot a limit of an honest engine."""
        if engine.counters["overshoots"] and not engine.lied:
            self.fail(4, f"{engine.name} was asked for more than its limits")

    def _judge_store(self) -> None:
        assert self.supervisor is not None
        world = self.supervisor._fleet.world
        stored = {r.name: (r.manifest.version, r.pinned) for r in self.supervisor._store.adapters()}
        known = {n: (a.spec.version, a.pinned) for n, a in world.adapters.items()}
        if stored != known:
            self.fail(8, f"the store has {stored}, the core {known}")


def _by(version: VersionId | None, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    """Whether that version computes these tokens."""
    sampling = SamplingParams(temperature=0.0)
    made = fake_tokens(GenerateRequest("", prompt, sampling), version, VOCABULARY)
    return all(token == next(made) for token in tokens)


def _tokens(exchange: Exchange) -> tuple[tuple[int, ...], list[tuple[int, ...]], str]:
    """Prompt, tokens of each choice, and the code of an error in the stream."""
    prompt, error = exchange.prompt, ""
    answers: dict[int, tuple[int, ...]] = {}
    for document in exchange.documents():
        if not isinstance(document, dict):
            continue
        if "error" in document:
            error = str(document["error"].get("code"))
        prompt = tuple(document.get("prompt_token_ids") or prompt)
        if "output_ids" in document:  # SGLang's, which grow
            answers[0] = tuple(document["output_ids"])
        for choice in document.get("choices", ()):
            more = tuple(choice.get("token_ids") or ())
            answers[choice["index"]] = answers.get(choice["index"], ()) + more
            if not exchange.prompt:
                prompt = tuple(choice.get("prompt_token_ids") or prompt)
    return prompt, list(answers.values()), error


def _short(event: ev.Event) -> str:
    """An event in few words: object ids and long texts would differ between runs."""
    fields = ("operation", "ticket", "name", "replica", "version", "engine_id", "residents")
    parts = []
    for name in fields:
        value = getattr(event, name, None)
        if value is not None:
            shown = sorted(value) if isinstance(value, frozenset) else value
            parts.append(f"{str(shown)[:24]}")
    error = getattr(event, "error", None)
    if error is not None:
        parts.append(error.code)
    return f"{type(event).__name__} {' '.join(parts)}"
