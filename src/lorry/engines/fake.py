"""An engine without a model: seeded, scripted, and as strict as the real ones.

Its tokens are a pure function of the version *held under the request's engine id*, the prompt and
the sampling, so an answer by a wrong version is visible at the first token. Faults are injected
call by call. It is shipped because users of the library test against it, and it passes the
conformance suite of the real engines.
"""

import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import anyio
import anyio.lowlevel

from lorry.engine import (
    BaseShape,
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
from lorry.engines.fake_script import FakeSettings, Fault, fake_chunks
from lorry.engines.feed import EventFeed
from lorry.errors import EngineRejected, EngineUnreachable
from lorry.ids import EngineId, VersionId

Call = Literal[
    "start", "add_lora", "remove_lora", "list_loras", "pin_lora", "generate", "abort", "aclose"
]

KEPT_CALLS = 10_000
"""Calls remembered for tests to look at; a bound, so that a long run does not grow without end."""

BLOCK_TOKENS = 16
"""Prompt tokens per reusable block, as in the embedded engine."""


@dataclass(slots=True)
class _Stream:
    """One running request and how it was told to end."""

    engine_id: EngineId | None
    ended: anyio.Event = field(default_factory=anyio.Event)
    error: Exception | None = None

    def end(self, error: Exception | None = None) -> None:
        """Once only: the first reason stands."""
        if not self.ended.is_set():
            self.error = error
            self.ended.set()


class FakeEngine:
    """Implements `lorry.engine.Engine` in memory, on any anyio backend."""

    def __init__(self, settings: FakeSettings | None = None, *, seed: int = 0) -> None:
        """Fakes of different seeds are different base models: every answer differs."""
        self.settings = settings or FakeSettings()
        self.seed = seed
        self.token_delay_s = self.settings.token_delay_s
        """May be changed while it runs: slow tokens."""
        self.calls: deque[tuple[str, object]] = deque(maxlen=KEPT_CALLS)
        """(call, its argument's id), latest last."""
        self.counters: dict[str, float] = dict.fromkeys(
            (
                *("prompt_tokens", "generation_tokens", "prefix_hit_tokens", "restarts"),
                *("slot_loads", "slot_evictions", "preemptions", "overshoots"),
            ),
            0,
        )
        """Sums since the beginning; `overshoots` counts calls that asked for more than a limit."""
        self._faults: dict[Call, deque[Fault]] = {}
        self._held: dict[EngineId, LoraVersion] = {}
        self._known: dict[EngineId, VersionId] = {}
        self._slots: OrderedDict[EngineId, None] = OrderedDict()
        self._pinned: set[EngineId] = set()
        self._streams: dict[str, _Stream] = {}
        self._prefixes: set[tuple[VersionId | None, str, int]] = set()
        self._feed = EventFeed()
        self._down: str | None = "it has not been started"

    # What tests and simulations do to it.

    def inject(self, call: Call, fault: Fault, times: int = 1) -> None:
        """The next `times` of this call go wrong so; later ones are well again."""
        self._faults.setdefault(call, deque()).extend([fault] * times)

    def heal(self) -> None:
        """Forget all injected faults that have not happened yet."""
        self._faults.clear()

    def crash(self, reason: str = "it crashed") -> None:
        """Lose residents, pins, caches and running requests, each of which ends once."""
        if self._down is not None:
            return
        self._down = reason
        self._drop_all(EngineUnreachable(f"The engine is down: {reason}."))
        self._feed.publish(EngineDown(reason))

    def restart(self, residents: Iterable[LoraVersion] = ()) -> None:
        """Come back, empty or with a strange set of residents, which may break any limit."""
        self._held = {version.engine_id: version for version in residents}
        self._known.update({v.engine_id: v.version for v in self._held.values()})
        self._down = None
        self.counters["restarts"] += 1
        self._feed.publish(EngineUp(frozenset(self._held)))

    def forget_all(self) -> None:
        """Lose the residents without a word: only `list_loras` shows it. Requests are aborted."""
        self._drop_all(None)

    # The contract.

    async def start(self) -> EngineCapabilities:
        """Ready at once."""
        await self._begin("start", None)
        self._down = None
        return self.capabilities()

    def capabilities(self) -> EngineCapabilities:
        """From the settings; the pretended base has the seven projections of a Llama layer."""
        s, h = self.settings, self.settings.hidden_size
        attention = {f"self_attn.{n}_proj": (h, h) for n in "qkvo"}
        mlp = {"mlp.gate_proj": (h, 2 * h), "mlp.up_proj": (h, 2 * h), "mlp.down_proj": (2 * h, h)}
        base = BaseShape("LlamaForCausalLM", s.layers, h, s.vocab_size, {**attention, **mlp})
        return EngineCapabilities(
            base=base,
            max_model_len=s.max_model_len,
            max_loras=s.max_loras,
            max_cpu_loras=s.max_cpu_loras,
            host_cache_bytes=s.host_cache_bytes,
            max_lora_rank=s.max_lora_rank,
            max_num_seqs=s.max_num_seqs,
        )

    def events(self) -> AsyncIterator[EngineEvent]:
        """The present state, then what happens."""
        down = self._down
        present = EngineUp(frozenset(self._held)) if down is None else EngineDown(down)
        return self._feed.read(present)

    async def add_lora(self, version: LoraVersion) -> LoadReport:
        """Hold it; over a limit it is rejected and counted as an overshoot."""
        began = time.perf_counter()
        fault = await self._begin("add_lora", version.engine_id)
        self._check_add(version)
        self._held[version.engine_id] = version
        self._known[version.engine_id] = version.version
        self._end(fault)
        return LoadReport(version.engine_id, version.bytes, time.perf_counter() - began)

    async def remove_lora(self, engine_id: EngineId) -> bool:
        """Give it up and abort what runs on it."""
        fault = await self._begin("remove_lora", engine_id)
        held = self._held.pop(engine_id, None)
        if held is not None:
            self._slots.pop(engine_id, None)
            self._pinned.discard(engine_id)
            self._prefixes = {p for p in self._prefixes if p[0] != held.version}
        for stream in self._streams.values():
            if stream.engine_id == engine_id:
                stream.end()
        self._end(fault)
        return held is not None and not (fault and fault.answer_false)

    async def list_loras(self) -> frozenset[EngineId]:
        """What it holds."""
        self._end(await self._begin("list_loras", None))
        return frozenset(self._held)

    async def pin_lora(self, engine_id: EngineId, pinned: bool) -> None:
        """One slot at least stays unpinned. Unpinning what is not held does nothing."""
        fault = await self._begin("pin_lora", engine_id)
        if not pinned:
            self._pinned.discard(engine_id)
        elif engine_id not in self._pinned:
            if engine_id not in self._held:
                raise EngineRejected(f"Engine id {engine_id} is not held, so it cannot be pinned.")
            if len(self._pinned) >= self.settings.max_loras - 1:
                raise EngineRejected(
                    f"{len(self._pinned)} of {self.settings.max_loras} slots are pinned; "
                    "one must stay free, so unpin another first."
                )
            self._pinned.add(engine_id)
            self._touch_slot(engine_id)
        self._end(fault)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """One token per chunk."""
        fault = await self._begin("generate", request.request_id)
        stream = self._open(request)
        try:
            for chunk in self._script(request):
                await self._pause(stream)
                if stream.error is not None:
                    raise stream.error
                if stream.ended.is_set():
                    yield TokenChunk((), finish_reason="abort")
                    return
                self.counters["generation_tokens"] += len(chunk.token_ids)
                yield chunk
                self._end(fault)
        finally:
            stream.end()
            del self._streams[request.request_id]

    async def abort(self, request_id: str) -> None:
        """Its iterator ends with "abort"."""
        fault = await self._begin("abort", request_id)
        if request_id in self._streams:
            self._streams[request_id].end()
        self._end(fault)

    def health(self) -> EngineHealth:
        """From its own books."""
        slots = [*self._slots, *[None] * self.settings.max_loras][: self.settings.max_loras]
        running = min(len(self._streams), self.settings.max_num_seqs)
        return EngineHealth(
            ready=self._down is None,
            reason=self._down or "",
            slots=tuple(slots),
            running=running,
            waiting=len(self._streams) - running,
            counters=dict(self.counters),
        )

    async def aclose(self) -> None:
        """Running requests end with `EngineUnreachable`; a fault here still leaves it closed."""
        self._down = "it is closed"
        self._drop_all(EngineUnreachable("The engine is closed."))
        self._feed.close()
        self.calls.append(("aclose", None))
        self._end(await self._suffer("aclose"))

    def statistics(self) -> Mapping[str, float]:
        """Books for checkers: what is held now beside the counters."""
        held = self._held.values()
        now = {
            "held": len(held),
            "held_bytes": sum(v.bytes for v in held),
            "streams": len(self._streams),
        }
        return {**self.counters, **now}

    # How it is done.

    async def _begin(self, call: Call, argument: object) -> Fault | None:
        """Every call begins so: remember it, suffer its fault, refuse when down."""
        self.calls.append((call, argument))
        fault = await self._suffer(call)
        if self._down is not None and call != "start":
            raise EngineUnreachable(f"The engine is down: {self._down}.")
        if fault and fault.error and not fault.after_effect:
            raise fault.error
        return fault

    async def _suffer(self, call: Call) -> Fault | None:
        await anyio.lowlevel.checkpoint()
        faults = self._faults.get(call)
        fault = faults.popleft() if faults else None
        if fault and fault.delay_s == math.inf:
            await anyio.sleep_forever()
        if fault and fault.delay_s:
            await anyio.sleep(fault.delay_s)
        return fault

    def _end(self, fault: Fault | None) -> None:
        if fault and fault.error:
            raise fault.error

    def _check_add(self, version: LoraVersion) -> None:
        s, engine_id = self.settings, version.engine_id
        if engine_id <= 0:
            raise EngineRejected(f"Engine id {engine_id} of {version.name} is not positive.")
        if self._known.get(engine_id, version.version) != version.version:
            raise EngineRejected(
                f"Engine id {engine_id} belongs to version {self._known[engine_id][:12]} "
                f"and is never reused, so {version.name} cannot have it."
            )
        if s.check_paths and not (version.path / "adapter_config.json").is_file():
            raise EngineRejected(
                f"{version.path} has no adapter_config.json, so {version.name} cannot be loaded."
            )
        others = [v for v in self._held.values() if v.engine_id != engine_id]
        over_count = len(others) >= s.max_cpu_loras
        over_bytes = sum(v.bytes for v in others) + version.bytes > s.host_cache_bytes
        if over_count or over_bytes:
            self.counters["overshoots"] += 1
            limit = (
                f"max_cpu_loras {s.max_cpu_loras}" if over_count else f"{s.host_cache_bytes} bytes"
            )
            raise EngineRejected(
                f"No room in host memory for {version.name}: {len(others)} held, limit {limit}."
            )

    def _open(self, request: GenerateRequest) -> _Stream:
        check_request(request, self.capabilities())
        engine_id = request.engine_id
        if request.request_id in self._streams:
            raise EngineRejected(f"Request id {request.request_id} is already running.")
        if engine_id is not None:
            held = self._held.get(engine_id)
            if held is None:
                raise EngineRejected(f"Engine id {engine_id} is not held.")
            if held.version != request.version:
                raise EngineRejected(
                    f"Engine id {engine_id} holds version {held.version[:12]}, the request names "
                    f"{(request.version or '')[:12]}."
                )
            self._touch_slot(engine_id)
        stream = self._streams[request.request_id] = _Stream(engine_id)
        return stream

    def _script(self, request: GenerateRequest) -> Iterator[TokenChunk]:
        engine_id = request.engine_id
        version = None if engine_id is None else self._held[engine_id].version
        cached = self._reuse_prefix(request, version)
        self.counters["prompt_tokens"] += len(request.prompt)
        return fake_chunks(request, version, self.settings, self.seed, cached)

    async def _pause(self, stream: _Stream) -> None:
        if self.token_delay_s <= 0:
            await anyio.lowlevel.checkpoint()
            return
        with anyio.move_on_after(self.token_delay_s):
            await stream.ended.wait()

    def _reuse_prefix(self, request: GenerateRequest, version: VersionId | None) -> int:
        """Tokens of blocks seen before under this version and salt; never the whole prompt."""
        prompt, key = request.prompt, (version, request.cache_salt)
        ends = range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS)
        blocks = [(*key, hash(prompt[:end])) for end in ends]
        usable = (
            (len(prompt) - 1) // BLOCK_TOKENS if request.sampling.prompt_logprobs is None else 0
        )
        hits = 0
        while hits < usable and blocks[hits] in self._prefixes:
            hits += 1
        self._prefixes.update(blocks)
        self.counters["prefix_hit_tokens"] += hits * BLOCK_TOKENS
        return hits * BLOCK_TOKENS

    def _touch_slot(self, engine_id: EngineId) -> None:
        """Least recently used unpinned version makes room."""
        if engine_id not in self._slots:
            self.counters["slot_loads"] += 1
            if len(self._slots) >= self.settings.max_loras:
                victim = next(e for e in self._slots if e not in self._pinned)
                del self._slots[victim]
                self.counters["slot_evictions"] += 1
        self._slots[engine_id] = None
        self._slots.move_to_end(engine_id)

    def _drop_all(self, error: Exception | None) -> None:
        for stream in self._streams.values():
            stream.end(error)
        self._held.clear()
        self._slots.clear()
        self._pinned.clear()
        self._prefixes.clear()
