"""The embedded engine as the server sees it: the contract on one side, a process on the other.

The process may die or hang at any moment. Then every running request and every waiting command ends
with `EngineUnreachable`, once; `events` says Down; and it is started again, at first after a tenth
of a second, then after twice as long each time, up to ten. It comes back empty.

A hang is believed after `hang_timeout_s` only: a process that was stopped for a while, and goes on,
has lost nothing. Until then `health` says that it is quiet, and its callers' own deadlines hold.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import anyio

from lorry.engine import (
    EngineCapabilities,
    EngineDown,
    EngineEvent,
    EngineHealth,
    EngineUp,
    GenerateRequest,
    LoadReport,
    LoraVersion,
    TokenChunk,
)
from lorry.engines.admission import check_request
from lorry.engines.embedded import wire
from lorry.engines.embedded.child import Child
from lorry.engines.embedded.settings import EmbeddedSettings
from lorry.engines.feed import EventFeed
from lorry.errors import EngineRejected, EngineTimeout, EngineUnreachable, LorryError
from lorry.ids import EngineId

logger = logging.getLogger(__name__)

BACK_OFF_MIN_S, BACK_OFF_MAX_S = 0.1, 10.0
"""Waited before a restart, doubling from the first to the second."""

HEALTHY_LIFE_S = 60.0
"""A life that lasted so long was a good one: the next restart is quick again."""

PING_S = 1.0
"""Between two pings at most."""

PINGS_PER_TIMEOUT = 4
"""How many pings go unanswered at least before a hang is believed; one could be our own loop's
fault."""

QUIET_S = 3.0
"""A process that neither answers nor computes for so long is said to be not ready. One that
computes is left in peace: a step of a large model on a CPU takes longer than that."""


@dataclass(slots=True, eq=False)
class _Stream:
    """One running request, this side of the socket."""

    key: int
    outputs: asyncio.Queue[wire.Output | LorryError] = field(default_factory=asyncio.Queue)
    """Bounded by the model's length: there is one output per token at most."""


class EmbeddedEngine:
    """Implements `lorry.engine.Engine`; lives on the asyncio loop that `start` was called on."""

    def __init__(
        self, settings: EmbeddedSettings, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """`progress` is called with (done, total) in bytes while the model is read."""
        self.settings = settings
        self._progress = progress
        self._feed = EventFeed()
        self._capabilities: EngineCapabilities | None = None
        self._child: Child | None = None
        self._down = "it has not been started"
        self._closed = False
        self._life: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[EngineCapabilities]
        self._told: asyncio.Event
        self._last_words = ""
        self._quiet = ""
        self._numbers = count(1)
        self._commands: dict[int, asyncio.Future[object]] = {}
        self._streams: dict[str, _Stream] = {}
        self._by_key: dict[int, _Stream] = {}
        self._health = EngineHealth(ready=False, reason=self._down)
        self._earlier: Counter[str] = Counter(dict.fromkeys(wire.COUNTERS, 0))
        self._restarts = 0

    async def start(self) -> EngineCapabilities:
        """Return once the model is loaded. Raises `ModelUnsupported`, `ModelInvalid`,
        `EngineTimeout`, or `EngineUnreachable` when the process died."""
        if self._life is not None:
            raise EngineRejected("The engine has been started before; make another one.")
        self._ready = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(), name="embedded engine")
        try:
            return await asyncio.shield(self._ready)
        except BaseException:
            await self.aclose()
            raise

    def capabilities(self) -> EngineCapabilities:
        """As of the first start. Raises `EngineUnreachable` before that."""
        if self._capabilities is None:
            raise EngineUnreachable(f"The engine is down: {self._down}.")
        return self._capabilities

    def events(self) -> AsyncIterator[EngineEvent]:
        """Ups and downs, the present state first."""
        up = self._child is not None
        return self._feed.read(EngineUp(frozenset()) if up else EngineDown(self._down))

    async def add_lora(self, version: LoraVersion) -> LoadReport:
        """Load it. Nothing is held because of a call that timed out or was cancelled."""
        number, child = next(self._numbers), self._up()
        try:
            added = await self._call(wire.AddLora(number, version))
        except (asyncio.CancelledError, EngineTimeout):
            child.send(wire.CancelAdd(number))
            raise
        assert isinstance(added, wire.Added)
        return LoadReport(version.engine_id, added.bytes, added.seconds)

    async def remove_lora(self, engine_id: EngineId) -> bool:
        """Give it up in slot, host memory and KV cache."""
        return await self._call(wire.RemoveLora(next(self._numbers), engine_id)) is True

    async def list_loras(self) -> frozenset[EngineId]:
        """Asked of the process."""
        held = await self._call(wire.ListLoras(next(self._numbers)))
        assert isinstance(held, frozenset)
        return held

    async def pin_lora(self, engine_id: EngineId, pinned: bool) -> None:
        """Keep it in a slot, or stop."""
        await self._call(wire.PinLora(next(self._numbers), engine_id, pinned))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """One chunk per step that made a token."""
        child = self._up()
        check_request(request, self.capabilities())
        if request.request_id in self._streams:
            raise EngineRejected(f"Request id {request.request_id} is already running.")
        stream = _Stream(next(self._numbers))
        self._streams[request.request_id] = self._by_key[stream.key] = stream
        over = False
        try:
            child.send(wire.Generate(stream.key, request))
            while not over:
                output = await stream.outputs.get()
                over = isinstance(output, LorryError) or _is_last(output)
                yield _chunk(output)
        finally:
            del self._streams[request.request_id], self._by_key[stream.key]
            if not over:
                child.send(wire.Abort(stream.key))

    async def abort(self, request_id: str) -> None:
        """Its iterator ends with "abort"."""
        child, stream = self._up(), self._streams.get(request_id)
        if stream is not None:
            child.send(wire.Abort(stream.key))

    def health(self) -> EngineHealth:
        """The latest word of the process, some tenths of a second old at most while it works; not
        ready when it has none."""
        counters = Counter(self._earlier)
        counters.update(self._health.counters)
        told = replace(self._health, counters={**counters, "restarts": self._restarts})
        return replace(told, ready=False, reason=self._quiet) if self._quiet else told

    async def aclose(self) -> None:
        """Stop taking, end what runs, then end the process; a cancelled caller waits for it."""
        self._closed = True
        self._go_down("it is closed")
        if self._life is not None:
            self._life.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([self._life])
        self._feed.close()

    # The process's lives.

    async def _live(self) -> None:
        loop, delay = asyncio.get_running_loop(), BACK_OFF_MIN_S
        while True:
            began = loop.time()
            reason = await self._live_once()
            self._go_down(reason)
            if not self._ready.done():
                self._ready.set_exception(EngineUnreachable(f"The engine did not start: {reason}."))
            if self._ready.exception() is not None:
                return
            if loop.time() - began > HEALTHY_LIFE_S:
                delay = BACK_OFF_MIN_S
            logger.warning("the engine was lost: %s; it is started again in %.1f s", reason, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, BACK_OFF_MAX_S)
            self._restarts += 1

    async def _live_once(self) -> str:
        """One life, from launch to end; returns the reason of its end."""
        self._told, self._last_words = asyncio.Event(), ""
        child = Child(lambda message: self._hear(child, message))
        reason = ""
        try:
            await child.launch(self.settings)
            reason = await self._watch_start(child) or await self._watch(child)
        except OSError as error:
            return f"its process could not be started: {error}"
        finally:
            if reason:
                child.kill()
            ended = await asyncio.shield(child.stop())
        return reason or self._last_words or ended

    async def _watch_start(self, child: Child) -> str:
        """Wait for the model; "" when it is ready or the process has ended."""
        while self._child is not child and not child.lost.done():
            self._told.clear()
            told = asyncio.ensure_future(self._told.wait())
            limit = self.settings.start_timeout_s
            waiting: set[asyncio.Future[Any]] = {told, child.lost}
            done, _ = await asyncio.wait(
                waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )
            told.cancel()
            if not done:
                return f"it made no progress in loading the model for {limit:g} s"
        return ""

    async def _watch(self, child: Child) -> str:
        """Wait for its end, pinging; a reason only if it has to be killed."""
        hang_s = self.settings.hang_timeout_s
        interval = min(PING_S, hang_s / PINGS_PER_TIMEOUT)
        silent_s, quiet_s, heard = 0.0, 0.0, child.heard
        while not child.lost.done():
            child.send(wire.Ping())
            await asyncio.wait({child.lost}, timeout=interval)
            silent_s = silent_s + interval if child.heard == heard else 0.0
            quiet_s = 0.0 if child.has_computed() else quiet_s + interval
            heard = child.heard
            if silent_s > hang_s - interval / 2 and not child.lost.done():
                return f"it said nothing for {hang_s:g} s"
            self._quiet = _quiet_reason(child, min(silent_s, quiet_s))
        return ""

    def _go_down(self, reason: str) -> None:
        """The one place where a life ends for those who use it: each of them hears of it once."""
        was_up, self._child, self._down = self._child is not None, None, reason
        self._quiet = ""
        for stream in self._by_key.values():
            stream.outputs.put_nowait(EngineUnreachable(f"The engine is down: {reason}."))
        for command in self._commands.values():
            if not command.done():
                command.set_exception(EngineUnreachable(f"The engine is down: {reason}."))
        self._earlier.update(self._health.counters)
        self._health = EngineHealth(ready=False, reason=reason)
        if was_up:
            self._feed.publish(EngineDown(reason))

    def _go_up(self, child: Child, capabilities: EngineCapabilities) -> None:
        self._child, self._down = child, ""
        if self._capabilities is None:
            self._capabilities = capabilities
        if not self._ready.done():
            self._ready.set_result(capabilities)
        logger.info("the model is loaded; computing with %s", capabilities.computing)
        self._feed.publish(EngineUp(frozenset()))

    # What the process says.

    def _hear(self, child: Child, message: object) -> None:
        match message:
            case wire.Outputs(outputs):
                for output in outputs:
                    if (stream := self._by_key.get(output.key)) is not None:
                        stream.outputs.put_nowait(output)
            case wire.Status(health):
                self._health = health
            case wire.Reply(number, result, failure):
                self._answer(number, result, failure)
            case wire.Progress(done, total):
                self._told.set()
                if self._progress is not None:
                    self._progress(done, total)
            case wire.Ready(capabilities, health):
                if not self._closed:
                    self._health = health
                    self._go_up(child, capabilities)
                self._told.set()
            case wire.Failed(failure):
                self._last_words = failure.message
                if not self._ready.done():
                    self._ready.set_exception(failure.error())
                logger.error("the engine could not load its model: %s", failure.message)

    def _answer(self, number: int, result: object, failure: wire.Failure | None) -> None:
        command = self._commands.get(number)
        if command is None or command.done():
            return
        if failure is not None:
            command.set_exception(failure.error())
        else:
            command.set_result(result)

    async def _call(self, message: wire.Command) -> object:
        """Send a command and wait for its answer, with a limit."""
        child, limit = self._up(), self.settings.command_timeout_s
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._commands[message.command] = answer
        try:
            child.send(message)
            async with asyncio.timeout(limit):
                return await answer
        except TimeoutError:
            name = type(message).__name__
            raise EngineTimeout(f"The engine did not answer {name} within {limit:g} s.") from None
        finally:
            del self._commands[message.command]

    def _up(self) -> Child:
        if self._child is None:
            raise EngineUnreachable(f"The engine is down: {self._down}.")
        return self._child


def _quiet_reason(child: Child, seconds: float) -> str:
    """Why it is not ready, or "" while it may be at work."""
    if seconds < QUIET_S:
        return ""
    what = "its process is stopped" if child.is_stopped() else "its process does not compute"
    return f"it has said nothing for {seconds:.0f} s: {what}"


def _is_last(output: wire.Output) -> bool:
    return output.finish_reason is not None or output.failure is not None


def _chunk(output: wire.Output | LorryError) -> TokenChunk:
    """Raises what ended the request, if an error did."""
    if isinstance(output, LorryError):
        raise output
    if output.failure is not None:
        raise output.failure.error()
    return TokenChunk(
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
        finish_reason=output.finish_reason,
        stop_token_id=output.stop_token_id,
        cached_tokens=output.cached_tokens,
    )
