"""An engine that misbehaves in every way that the core cannot see.

It is the shipped fake, strict and deterministic, with a fault drawn for each call. What it was
asked and what it did is kept apart from what it said.
"""

import math
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import anyio
import anyio.lowlevel

from lorry.engine import GenerateRequest, LoadReport, LoraVersion, TokenChunk
from lorry.engines.fake import Call, FakeEngine
from lorry.engines.fake_script import FakeSettings, Fault
from lorry.errors import EngineRejected, EngineTimeout, EngineUnreachable
from lorry.ids import EngineId, VersionId
from tests.simulation.shell.machine import Machine

FOREIGN: tuple[Callable[[], Exception], ...] = (
    lambda: ValueError("a foreign error"),
    lambda: KeyError("foreign"),
    lambda: OSError(5, "Input/output error"),
    lambda: TimeoutError("a foreign time-out"),
    lambda: ExceptionGroup("foreign", [RuntimeError("inner")]),
    lambda: AssertionError("foreign"),
)
"""Exceptions of engines that are none of ours."""

EFFECTS = ("add_lora", "remove_lora", "pin_lora", "list_loras")
DOWN_S = 3.0
"""A dead engine is back within this time."""


@dataclass(frozen=True, slots=True)
class Deed(Fault):
    """A fault, and whether the engine dies of it once the work is done."""

    dies: bool = False
    waiting: Callable[[], None] | None = None
    """Told when the delay begins."""


class WaywardEngine(FakeEngine):
    """One replica."""

    def __init__(self, machine: Machine, name: str, settings: FakeSettings) -> None:
        """Faults are those of the machine."""
        super().__init__(settings)
        self.name = name
        self.lied = False
        """It broke the contract, so that its limits may have been overshot by no fault of ours."""
        self.closed = 0
        self.asked = 0
        self.born: dict[EngineId, VersionId] = {}
        self.revive_at: float | None = None
        self._machine = machine
        self._rng: random.Random = machine.rng
        self._late: dict[EngineId, LoraVersion] = {}
        self._life = 0

    # What happens to it by itself

    async def live(self) -> None:
        """Forget things, and come back after a death."""
        while True:
            await anyio.sleep(0.25)
            looks = self._down is None and self._held and self._rng.random() < 0.25
            if looks and self._machine.happens("engine_forgets"):
                self._forget_one()
            if self.revive_at is not None and anyio.current_time() >= self.revive_at:
                self.revive()

    def revive(self) -> None:
        """Back, empty or not."""
        self.revive_at = None
        if self._down is None or self.closed:
            return
        residents: list[LoraVersion] = []
        if self._machine.happens("comes_back_strange"):
            self.lied = True
            engine_id = EngineId(self._rng.choice((1, 2, 50_000, 50_001)))
            known = self._known.get(engine_id, VersionId("0" * 64))
            place = self._machine.folder
            residents.append(LoraVersion(engine_id, known, "stranger", place, 100))
        self._machine.say(f"{self.name} is back with {[v.engine_id for v in residents]}")
        self.restart(residents)

    def die(self) -> None:
        """Now."""
        if self._down is None:
            self._machine.say(f"{self.name} dies")
            self._life += 1
            self._late.clear()
            self.crash("it died")
            self.revive_at = anyio.current_time() + self._rng.uniform(0.1, DOWN_S)

    def _forget_one(self) -> None:
        engine_id = self._rng.choice(sorted(self._held))
        self._machine.say(f"{self.name} forgets {engine_id}")
        self._drop(engine_id)

    def _drop(self, engine_id: EngineId) -> None:
        self._held.pop(engine_id, None)
        self._slots.pop(engine_id, None)
        self._pinned.discard(engine_id)
        for stream in self._streams.values():
            if stream.engine_id == engine_id:
                stream.end()

    # The contract, with faults

    async def _suffer(self, call: Call) -> Fault | None:
        """Draw what goes wrong with one call."""
        await anyio.lowlevel.checkpoint()
        self.asked += 1
        if self._machine.dead:
            raise EngineUnreachable("The process is dead.")
        deed = self._deed(call)
        if deed is not None:
            self._machine.say(f"{self.name} {call}: {_shown(deed)}")
        if deed is not None and not deed.after_effect:
            await self._delay(deed)
        return deed

    async def _delay(self, deed: Fault) -> None:
        if isinstance(deed, Deed) and deed.waiting is not None:
            deed.waiting()
        if deed.delay_s == math.inf:
            await anyio.sleep_forever()
        elif deed.delay_s:
            await anyio.sleep(deed.delay_s)

    def _deed(self, call: Call) -> Deed | None:
        happens, rng = self._machine.happens, self._rng
        after = rng.random() < 0.5
        if call in ("aclose", "start"):
            if call == "aclose" and happens("close_fails"):
                stuck = rng.random() < 0.3
                error = None if stuck else rng.choice(FOREIGN)()
                return Deed(delay_s=math.inf if stuck else 0.0, error=error, after_effect=True)
            return None
        if self._machine.plan is not None:
            return self._planned(self._machine.plan(call))
        if happens("engine_dies"):
            if not after:
                self.die()
                return None
            return Deed(dies=True, after_effect=True)
        if happens("engine_stuck"):
            return Deed(delay_s=math.inf, after_effect=after)
        if happens("engine_slow"):
            return Deed(delay_s=rng.uniform(0, 4), after_effect=after)
        if happens("engine_rejects"):
            return Deed(error=EngineRejected(f"The engine refuses to {call}."))
        if happens("engine_foreign"):
            return Deed(error=rng.choice(FOREIGN)())
        if call != "generate" and happens("engine_unsure"):
            return Deed(error=EngineTimeout("The engine does not know."), after_effect=after)
        if call in EFFECTS and happens("engine_lies"):
            self.lied = True
            return Deed(error=EngineRejected("A lie."), after_effect=True)
        if call == "remove_lora" and happens("engine_says_false"):
            return Deed(answer_false=True)
        return None

    def _planned(self, deed: Deed | None) -> Deed | None:
        if deed is not None and deed.dies and not deed.after_effect:
            self.die()
            return None
        return deed

    async def _end_late(self, fault: Fault | None) -> None:
        """What comes between the effect and its report."""
        if not isinstance(fault, Deed):
            return
        if fault.after_effect:
            await self._delay(fault)
        if fault.dies:
            self.die()
            raise EngineUnreachable("The engine is down: it died.")

    async def add_lora(self, version: LoraVersion) -> LoadReport:
        """A call that its caller gave up may still be done, a while later."""
        life = self._life
        self._machine.say(f"{self.name} add {version.engine_id} {version.version[:12]}")
        try:
            fault = await self._begin("add_lora", version.engine_id)
            try:
                self._check_add(version)
            except EngineRejected as error:
                self._machine.say(f"{self.name} has {sorted(self._held)}: {error}")
                raise
            self._held[version.engine_id] = version
            self._known[version.engine_id] = version.version
            await self._end_late(fault)
            self._end(fault)
        except anyio.get_cancelled_exc_class():
            held = version.engine_id in self._held
            if not held and life == self._life and not self.closed and self._rng.random() < 0.5:
                self._late[version.engine_id] = version
            raise
        self.born[version.engine_id] = version.version
        self._machine.say(f"{self.name} holds {sorted(self._held)}")
        return LoadReport(version.engine_id, version.bytes, 0.0)

    async def remove_lora(self, engine_id: EngineId) -> bool:
        """In order: a load that was given up is done before."""
        self._machine.say(f"{self.name} remove {engine_id}")
        fault = await self._begin("remove_lora", engine_id)
        late = self._late.pop(engine_id, None)
        held = self._held.get(engine_id) or late
        self._drop(engine_id)
        if held is not None:
            self._prefixes = {p for p in self._prefixes if p[0] != held.version}
        await self._end_late(fault)
        self._end(fault)
        return held is not None and not (fault and fault.answer_false)

    async def list_loras(self) -> frozenset[EngineId]:
        """Sometimes what it held when it was asked, told a while later."""
        for engine_id, version in tuple(self._late.items()):
            del self._late[engine_id]
            if len(self._held) < self.settings.max_cpu_loras:
                self._held[engine_id] = version
                self._known[engine_id] = version.version
        fault = await self._begin("list_loras", None)
        held = frozenset(self._held)
        await self._end_late(fault)
        self._end(fault)
        return held

    async def pin_lora(self, engine_id: EngineId, pinned: bool) -> None:
        """As the fake."""
        self._machine.say(f"{self.name} {'pin' if pinned else 'unpin'} {engine_id}")
        await super().pin_lora(engine_id, pinned)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """As the fake, with something between the chunks."""
        inner = super().generate(request)
        try:
            async for chunk in inner:
                if await self._between():
                    return
                yield chunk
        finally:
            await inner.aclose()
            if self._machine.happens("close_fails"):
                self._machine.say(f"{self.name} fails to close a stream")
                raise self._rng.choice(FOREIGN)()

    async def _between(self) -> bool:
        """True: it just ends."""
        if self._machine.plan is not None:
            await self._suffer_between(self._machine.plan("chunk"))
        if self._machine.happens("stream_stuck"):
            await anyio.sleep_forever()
        if self._machine.happens("engine_dies"):
            self.die()
            raise EngineUnreachable("The engine is down: it died.")
        if not self._machine.happens("stream_fails"):
            return False
        if self._rng.random() < 0.3:
            return True
        raise self._rng.choice((*FOREIGN, lambda: EngineRejected("It broke.")))()

    async def _suffer_between(self, deed: Deed | None) -> None:
        if deed is None:
            return
        await self._delay(deed)
        if deed.dies:
            self.die()
            raise EngineUnreachable("The engine is down: it died.")
        if deed.error is not None:
            raise deed.error

    async def aclose(self) -> None:
        """Counted."""
        self.closed += 1
        await super().aclose()


def _shown(deed: Deed) -> str:
    parts = [
        f"{name}={value!r}"
        for name in ("delay_s", "error", "after_effect", "dies")
        if (value := getattr(deed, name))
    ]
    return ", ".join(parts)
