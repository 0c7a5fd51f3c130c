"""What is told to operators: metrics and one log line per adapter change.

Nothing here remembers what an adapter's state is: gauges are computed at each scrape from what the
supervisor and the engines say then, so that /metrics agrees with /v1/models. Names are vLLM's where
they mean the same. Each server has its own registry; there is no global state.
"""

import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lorry.engine import EngineHealth
from lorry.ids import AdapterName, ReplicaId, short
from lorry.views import AdapterView, ChangeEvent, Statistics

log = logging.getLogger("lorry.adapters")

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Buckets of whole requests and first tokens."""
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
"""Buckets of the time between two tokens."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a scrape looks at, taken at one moment."""

    statistics: Statistics
    health: Mapping[ReplicaId, EngineHealth]
    adapters: Sequence[AdapterView]
    max_loras: int
    """Slots of an engine."""

    @property
    def slots(self) -> tuple[int, int]:
        """Slots of all engines that hold an adapter, and all there are."""
        return sum(map(slots_used, self.health.values())), self.max_loras * len(self.health)


def slots_used(health: EngineHealth) -> int:
    """Slots of one engine that hold an adapter."""
    return sum(slot is not None for slot in health.slots)


class Telemetry:
    """Counters and histograms of requests; gauges come from a snapshot."""

    def __init__(self, model_name: str) -> None:
        """`model_name` is the base's name in answers: vLLM's label."""
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._tokens = {
            "prompt": self._token_counter("prompt", "Prompt tokens, computed or reused."),
            "generated": self._token_counter("generation", "Tokens generated."),
        }
        self._adapter_tokens = {
            "prompt": self._adapter_counter("prompt", "Prompt tokens"),
            "generated": self._adapter_counter("generation", "Generated tokens"),
        }
        self._success = Counter(
            "vllm:request_success",
            "Sequences that ended by themselves, by reason.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self.first_token = self._histogram("time_to_first_token", "To the first token.", SECONDS)
        self.between_tokens = self._histogram(
            "inter_token_latency", "Between two chunks of tokens.", TOKEN_SECONDS
        )
        self.per_token = self._histogram(
            "time_per_output_token", "Mean per token of a request, after the first.", TOKEN_SECONDS
        )
        self.whole_request = self._histogram(
            "e2e_request_latency", "From arrival to the end.", SECONDS
        )
        self._adapters_counted: set[AdapterName] = set()

    def watch(self, name: AdapterName | None, prompt_tokens: int) -> "RequestWatch":
        """Follow one sequence from now on."""
        return RequestWatch(self, name, prompt_tokens)

    def render(self, snapshot: Snapshot) -> bytes:
        """The text of /metrics. Adapters that are not registered any more are dropped."""
        self._forget_others({view.name for view in snapshot.adapters})
        now = CollectorRegistry(auto_describe=False)
        now.register(_SnapshotCollector(snapshot, self._model_name))
        return generate_latest(self._registry) + generate_latest(now)

    def token_counters(
        self, name: AdapterName | None, kind: Literal["prompt", "generated"]
    ) -> tuple[Counter, ...]:
        """What to increase for tokens of one sequence, looked up once and not per token."""
        if name is None:
            return (self._tokens[kind],)
        self._adapters_counted.add(name)
        return self._tokens[kind], self._adapter_tokens[kind].labels(name)

    def count_success(self, reason: str) -> None:
        """A sequence ended by itself."""
        self._success.labels(self._model_name, reason).inc()

    def _forget_others(self, registered: set[AdapterName]) -> None:
        for name in self._adapters_counted - registered:
            for counter in self._adapter_tokens.values():
                counter.remove(name)
        self._adapters_counted &= registered

    def _token_counter(self, kind: str, text: str) -> Counter:
        name = f"vllm:{kind}_tokens"
        counter = Counter(name, text, ("model_name",), registry=self._registry)
        return counter.labels(self._model_name)

    def _adapter_counter(self, kind: str, text: str) -> Counter:
        name, help_text = f"lorry_adapter_{kind}_tokens", f"{text} of each registered adapter."
        return Counter(name, help_text, ("adapter",), registry=self._registry)

    def _histogram(self, kind: str, text: str, buckets: Sequence[float]) -> Histogram:
        name = f"vllm:{kind}_seconds"
        histogram = Histogram(name, text, ("model_name",), buckets=buckets, registry=self._registry)
        return histogram.labels(self._model_name)


class RequestWatch:
    """The times and tokens of one sequence."""

    __slots__ = ("_began", "_first", "_generated", "_last", "_made", "_prompt", "_reason", "_to")

    def __init__(self, to: Telemetry, name: AdapterName | None, prompt_tokens: int) -> None:
        """Time runs from here."""
        self._to = to
        self._prompt = prompt_tokens, to.token_counters(name, "prompt")
        self._generated = to.token_counters(name, "generated")
        self._began = self._last = time.perf_counter()
        self._first: float | None = None
        self._made = 0
        self._reason: str | None = None

    def tokens(self, count: int) -> None:
        """A chunk has come."""
        now = time.perf_counter()
        if self._first is None:
            self._first = now
            self._to.first_token.observe(now - self._began)
            tokens, counters = self._prompt
            for counter in counters:
                counter.inc(tokens)
        elif count:
            self._to.between_tokens.observe(now - self._last)
        self._last = now
        if count:
            self._made += count
            for counter in self._generated:
                counter.inc(count)

    def finished(self, reason: str) -> None:
        """It ended by itself."""
        self._reason = reason

    def close(self) -> None:
        """It is over, however it ended; only good ends are counted as success."""
        if self._reason is None or self._first is None:
            return
        self._to.count_success(self._reason)
        self._to.whole_request.observe(self._last - self._began)
        if self._made > 1:
            self._to.per_token.observe((self._last - self._first) / (self._made - 1))


class _SnapshotCollector(Collector):
    """Gauges and the supervisor's counters of one moment."""

    def __init__(self, snapshot: Snapshot, model_name: str) -> None:
        self._snapshot = snapshot
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        """Every family once."""
        yield from self._engine_gauges()
        yield self._lora_info()
        yield from self._lora_pool()
        yield from self._lorry_gauges()
        yield from self._lorry_counters()

    def _engine_gauges(self) -> Iterator[Metric]:
        health = list(self._snapshot.health.values())
        used = sum(one.kv_blocks_used for one in health)
        total = sum(one.kv_blocks_total for one in health)
        waiting = self._snapshot.statistics.waiting + sum(one.waiting for one in health)
        for name, text, value in (
            ("num_requests_running", "Sequences in a batch.", sum(one.running for one in health)),
            ("num_requests_waiting", "Sequences waiting for adapter or batch.", waiting),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used / max(1, total)),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family
        totals: dict[str, float] = {}
        for one in health:
            for name, value in one.counters.items():
                totals[name] = totals.get(name, 0.0) + value
        yield _counters("lorry_engine_events", "The engines' own sums.", "event", totals)

    def _lora_info(self) -> Metric:
        facts = self._snapshot.statistics
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters with running and with waiting requests; the value is the time.",
            labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
        )
        waiting, running = (
            ",".join(sorted(name for name, count in by_name.items() if count))
            for by_name in (facts.waiting_by_name, facts.running_by_name)
        )
        family.add_metric([str(self._snapshot.max_loras), waiting, running], time.time())
        return family

    def _lora_pool(self) -> Iterator[Metric]:
        """SGLang's gauges; its dashboards read them."""
        used, total = self._snapshot.slots
        for name, text, value in (
            ("slots_used", "Slots that hold an adapter.", used),
            ("slots_total", "Slots of all engines.", total),
            ("utilization", "Share of slots in use, 0 to 1.", used / max(1, total)),
        ):
            family = GaugeMetricFamily(f"sglang:lora_pool_{name}", text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family

    def _lorry_gauges(self) -> Iterator[Metric]:
        facts, views = self._snapshot.statistics, self._snapshot.adapters
        in_slots, _ = self._snapshot.slots
        in_host = sum(one.resident for one in facts.replicas)
        for name, text, value in (
            ("adapters_registered", "Adapters that can be asked for.", facts.registered),
            ("adapters_pinned", "Of these, pinned.", sum(view.pinned for view in views)),
            ("leases", "Running requests, each holding a version.", facts.running),
            ("tickets", "Requests waiting for a version.", facts.waiting),
            ("operations", "Admin calls under way.", facts.operations),
            ("disk_cache_bytes", "Snapshots on disk.", facts.disk_bytes),
            ("disk_cache_versions", "Snapshots on disk.", facts.disk_versions),
        ):
            yield GaugeMetricFamily(f"lorry_{name}", text, value=value)
        yield _gauges(
            "lorry_versions_resident",
            "Versions in each tier.",
            "tier",
            {
                "host": in_host,
                "slot": in_slots,
            },
        )
        yield from self._replica_gauges()

    def _replica_gauges(self) -> Iterator[Metric]:
        replicas = self._snapshot.statistics.replicas
        for name, text, values in (
            ("engine_up", "1 while the engine is up.", {r.id: float(r.up) for r in replicas}),
            ("host_cache_versions_max", "Its limit.", {r.id: r.versions_max for r in replicas}),
            (
                "host_cache_bytes",
                "Reserved for versions.",
                {r.id: r.bytes_reserved for r in replicas},
            ),
            ("host_cache_bytes_max", "Its limit.", {r.id: r.bytes_max for r in replicas}),
        ):
            yield _gauges(f"lorry_{name}", text, "replica", values)

    def _lorry_counters(self) -> Iterator[Metric]:
        facts = self._snapshot.statistics
        slot_loads = sum(h.counters.get("slot_loads", 0) for h in self._snapshot.health.values())
        for name, text, value in (
            ("loads", "Versions loaded into an engine.", facts.loads),
            ("load_failures", "Loads that failed.", facts.load_failures),
            ("unloads", "Versions unloaded from an engine.", facts.unloads),
            ("unload_failures", "Unloads that failed.", facts.unload_failures),
            ("engine_losses", "Times an engine was lost.", facts.engine_losses),
            ("stale_reports", "Late or doubled answers, dropped.", facts.stale_reports),
            ("disk_cache_evictions", "Snapshots evicted.", facts.disk_evictions),
        ):
            yield CounterMetricFamily(f"lorry_{name}", text, value=value)
        yield _counters(
            "lorry_hits",
            "Requests that found their version.",
            "tier",
            {
                "host": facts.host_hits,
            },
        )
        yield _counters(
            "lorry_misses",
            "Requests that did not, and copies into slots.",
            "tier",
            {
                "host": facts.host_misses,
                "slot": slot_loads,
            },
        )
        yield _counters("lorry_evictions", "Versions evicted.", "reason", facts.evictions)
        yield _counters("lorry_refusals", "Requests and calls refused.", "code", facts.refusals)
        yield _load_seconds(facts.load_seconds)


def _gauges(name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([str(key)], value)
    return family


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family


def _load_seconds(recent: Sequence[float]) -> Metric:
    """Quantiles of the last loads, which a histogram since the start would blur."""
    text = "Seconds of the last loads, at most 1,000, by quantile."
    ordered = sorted(recent)
    family = GaugeMetricFamily("lorry_load_seconds", text, labels=["quantile"])
    for quantile in (0.5, 0.9, 0.99, 1.0) if ordered else ():
        at = min(len(ordered) - 1, int(quantile * len(ordered)))
        family.add_metric([f"{quantile:g}"], ordered[at])
    return family


async def log_changes(events: AsyncIterator[ChangeEvent]) -> None:
    """One readable line per change, for as long as there are events."""
    async for change in events:
        level = logging.WARNING if change.kind in ("failed", "engine_lost") else logging.INFO
        log.log(level, "%s", change_line(change))


def change_line(change: ChangeEvent) -> str:
    """Such as `replaced pirate 1a2b3c4d5e6f: old version 99aa88bb77cc drains`."""
    what = " ".join(
        filter(None, (change.kind, change.name, change.version and short(change.version)))
    )
    line = f"{what}: {change.text}" if change.text else what
    # A name cannot hold a line end, but a foreign error's text can.
    return line.replace("\n", " ").replace("\r", " ")
