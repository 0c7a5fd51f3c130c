"""What must be so when nothing runs any more: everybody agrees, and nothing is held by nobody."""

import asyncio
import time
from collections import Counter, defaultdict
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.server_process import ServerProcess
from tests.soak.ledger import Findings, Ledger
from tests.soak.traffic import Asked, Traffic
from tests.soak.weights import WeightSets

QUIET_S = 40.0
"""More than the pauses and short deadlines by which the server itself comes to rest."""
RECONCILE_S = 12.0
"""A little more than the server's own interval between two questions to the engine."""
AT_REST = ("lorry_leases", "lorry_tickets", "lorry_operations")
ENGINE_AT_REST = ("running", "waiting", "kv_blocks_used")
MOVING = ("fetching", "loading", "draining", "unloading")
"""States that a version does not stay in."""
SLOTS, IN_MEMORY = 8, 64
LOG_LINES = 30
WRONG_IN_LOG = ("broken invariant", "Traceback", "ERROR", "CRITICAL")


class Ending:
    """The checks at the end of a run."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        weights: WeightSets,
        ledger: Ledger,
        findings: Findings,
        server: ServerProcess,
    ) -> None:
        """Used while it runs too, for the metrics."""
        self._client = client
        self._ledger = ledger
        self._findings = findings
        self._server = server
        self._traffic = Traffic(client, weights, ledger, findings)

    @property
    def counts(self) -> Counter[str]:
        """Of the requests that it made itself."""
        return self._traffic.counts

    async def check(self, settle_s: float) -> None:
        """At rest, in agreement, answering right, and empty at last."""
        await self._wait_until_quiet()
        await self._check_agreement("at the end")
        await asyncio.sleep(settle_s)
        await self._check_agreement("after the engine was asked")
        await self._ask_everybody()
        await self._check_agreement("after everybody was asked")
        await self._unload_all()
        self._check_log()

    async def engine_losses(self) -> float:
        """As the server counts them."""
        return (await self._metrics()).get("lorry_engine_losses_total", 0.0)

    async def _metrics(self) -> dict[str, float]:
        """Samples by name; those of several labels are added up, but for tiers."""
        found: dict[str, float] = defaultdict(float)
        text = (await self._client.get("/metrics")).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                tier = sample.labels.get("tier")
                found[f"{sample.name} {tier}" if tier else sample.name] += sample.value
        return dict(found)

    async def _wait_until_quiet(self) -> None:
        deadline_s = time.monotonic() + QUIET_S
        while busy := await self._busy():
            if time.monotonic() > deadline_s:
                self._findings.add(f"{QUIET_S:g} s after the last client left: {busy}")
                return
            await asyncio.sleep(0.1)

    async def _busy(self) -> dict[str, Any]:
        """What is still under way: requests, admin calls, and moves between the tiers, for what an
        engine lost with its process comes back by itself."""
        metrics, replica, native = (
            await self._metrics(),
            await self._replica(),
            await self._native(),
        )
        counts: dict[str, Any] = {name: metrics[name] for name in AT_REST}
        counts |= {f"engine {name}": replica[name] for name in ENGINE_AT_REST}
        states = Counter(one["state"] for entry in native for one in entry["residency"])
        counts |= {state: states[state] for state in MOVING}
        held = sum(entry["tier"] in ("slot", "host") for entry in native)
        counts["versions on their way out"] = metrics["lorry_versions_resident host"] - held
        return {name: count for name, count in counts.items() if count}

    async def _native(self) -> list[dict[str, Any]]:
        data = (await self._client.get("/v1/adapters?limit=10000")).json()["data"]
        assert isinstance(data, list)
        return data

    async def _replica(self) -> dict[str, Any]:
        (replica,) = (await self._client.get("/v1/replicas")).json()["data"]
        assert isinstance(replica, dict)
        return replica

    async def _check_agreement(self, when: str) -> None:
        """Ledger, native list, models, metrics, engine."""
        native = await self._native()
        listed = {e["name"]: (e["source"], e["pinned"], e["version"]) for e in native}
        expected = {
            e.name: (str(e.source), e.pinned, e.version)
            for e in self._ledger.entries.values()
            if e.weights is not None
        }
        self._compare(when, "GET /v1/adapters", listed, expected)
        cards = (await self._client.get("/v1/models")).json()["data"]
        models = {card["id"]: card["root"] for card in cards if card.get("parent")}
        self._compare(when, "GET /v1/models", models, {n: e[0] for n, e in expected.items()})
        await self._check_tiers(when, native)

    async def _check_tiers(self, when: str, native: list[dict[str, Any]]) -> None:
        metrics, replica = await self._metrics(), await self._replica()
        held = [entry for entry in native if entry["tier"] in ("slot", "host")]
        ids = {one["engine_id"]: e["name"] for e in held for one in e["residency"]}
        slots = {slot["engine_id"]: slot["name"] for slot in replica["slots"] if slot}
        in_memory = metrics["lorry_versions_resident host"]
        self._compare(when, "versions in memory", in_memory, float(len(held)))
        reserved, taken = metrics["lorry_host_cache_bytes"], sum(e["host_bytes"] for e in held)
        self._compare(when, "reserved bytes", reserved, float(taken))
        stray = {key: name for key, name in slots.items() if ids.get(key) != name}
        self._compare(when, "slots of versions that are not resident", stray, {})
        self._compare(when, "registered", metrics["lorry_adapters_registered"], float(len(native)))
        over = len(held) > IN_MEMORY or len(slots) > SLOTS
        self._compare(when, "over the limits", (over, len(held), len(slots))[0], False)
        disk, most = metrics["lorry_disk_cache_bytes"], 32 << 20
        if disk > most:
            self._findings.add(f"{when}: the disk cache has {disk:.0f} bytes; {most} may be")

    def _compare(self, when: str, what: str, found: object, expected: object) -> None:
        if isinstance(found, dict) and isinstance(expected, dict):
            keys = found.keys() | expected.keys()
            apart = {k: (found.get(k), expected.get(k)) for k in keys}
            found = {k: pair for k, pair in apart.items() if pair[0] != pair[1]}
            expected = {}
        if found != expected:
            text = str(found)[:600]
            self._findings.add(f"{when}: {what}: {text}, and should be {expected}")

    async def _ask_everybody(self) -> None:
        """Each name answers right, or is unknown."""
        for name in (None, *self._ledger.entries):
            await self._traffic.ask(Asked(name, "S", 8, "vllm", stream=False))
        await self._wait_until_quiet()

    async def _unload_all(self) -> None:
        for entry in self._ledger.entries.values():
            if entry.weights is None:
                continue
            span = entry.begin(None)
            gone = await self._client.delete(f"/v1/adapters/{entry.name}?drain_timeout=0")
            entry.end(span, gone.status_code == 200)
            if gone.status_code != 200:
                self._findings.add(f"last unload of {entry.name}: {gone.status_code} {gone.text}")
        await self._wait_until_quiet()
        await self._check_agreement("after all were unloaded")
        metrics, replica = await self._metrics(), await self._replica()
        for name in ("lorry_host_cache_bytes", "lorry_versions_resident host"):
            self._compare("after all were unloaded", name, metrics[name], 0.0)
        slots = [slot for slot in replica["slots"] if slot]
        self._compare("after all were unloaded", "slots", slots, [])
        await self._traffic.ask(Asked(None, "P", 8, "vllm", stream=True))

    def _check_log(self) -> None:
        """Its errors, each with the traceback that may follow."""
        lines = self._server.log.read_text(errors="replace").splitlines()
        skip_to = 0
        for number, line in enumerate(lines):
            if number >= skip_to and any(word in line for word in WRONG_IN_LOG):
                skip_to = number + LOG_LINES
                shown = "\n    ".join(lines[number:skip_to])
                self._findings.add(f"the server's log: {shown}")
