"""`lorry top`: how busy a server is, from its own metrics, again and again."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lorry.cli.screen import console, place_text, size_text, state_cell, write_json
from lorry.cli.server import DEFAULT_URL, PANEL, ApiKey, AsJson, Interval, Url, connect
from lorry.cli.watch import repeat
from lorry.client import Adapter, Client, Replica

BAR_CELLS = 20
Samples = Mapping[tuple[str, str], float]
"""(metric, value of its only label or "") -> value, summed over other labels."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel=PANEL)(top)


def top(
    interval: Interval = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One picture, and end.")] = False,
    json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Show slots, host cache, queue, rates and hit ratio, live, until Ctrl-C.

    With --json, one look as JSON; rates are those of one interval.
    """
    with suppress(KeyboardInterrupt), connect(url, api_key) as client:
        watcher = Watcher(client)
        watcher.look()
        if once or json:
            time.sleep(interval)
            picture, value = watcher.look()
            if json:
                write_json(value)
            else:
                console().print(picture)
        else:
            repeat(watcher.look, interval)


@dataclass(frozen=True, slots=True)
class Look:
    """A server at one moment."""

    at_s: float
    replicas: tuple[Replica, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    samples: Samples = field(default_factory=dict)

    def sum(self, name: str, label: str | None = None) -> float:
        """Of all samples of a metric, or of those with that label."""
        found = self.samples.items()
        return sum(v for (n, value), v in found if n == name and label in (None, value))


class Watcher:
    """Looks at a server, and at what has changed since the last look."""

    def __init__(self, client: Client) -> None:
        """Nothing has been seen."""
        self._client = client
        self._before: Look | None = None

    def look(self) -> tuple[RenderableType, dict[str, Any]]:
        """What is to be seen, for people and for scripts."""
        now = Look(
            time.monotonic(),
            self._client.replicas(),
            self._client.adapters.list(),
            read_samples(self._client.metrics()),
        )
        facts = facts_of(now, self._before)
        self._before = now
        return picture(self._client.url, facts), facts


def read_samples(text: str) -> Samples:
    """The numbers in a Prometheus text."""
    from prometheus_client.parser import text_string_to_metric_families  # slow to import

    samples: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            key = sample.name, next(iter(labels.values()), "")
            samples[key] = samples.get(key, 0.0) + sample.value
    return samples


def facts_of(now: Look, before: Look | None) -> dict[str, Any]:
    """The numbers of one look. Rates are per second since the look before, and null at the
    first."""
    hits, misses = now.sum("lorry_hits_total", "host"), now.sum("lorry_misses_total", "host")
    return {
        "object": "top",
        "running": int(now.sum("lorry_leases")),
        "waiting": int(now.sum("lorry_tickets")),
        "waiting_in_engine": sum(one.waiting for one in now.replicas),
        "operations": int(now.sum("lorry_operations")),
        "registered": len(now.adapters),
        "slots": [_slots(one) for one in now.replicas],
        "host_cache": {
            "versions": int(now.sum("lorry_versions_resident", "host")),
            "versions_max": int(now.sum("lorry_host_cache_versions_max")),
            "bytes": int(now.sum("lorry_host_cache_bytes")),
            "bytes_max": int(now.sum("lorry_host_cache_bytes_max")),
        },
        "kv_cache_use": now.sum("vllm:kv_cache_usage_perc"),
        "hit_ratio": hits / (hits + misses) if hits + misses else None,
        "loads": int(now.sum("lorry_loads_total")),
        "evictions": int(now.sum("lorry_evictions_total")),
        "tokens_per_s": _rate("vllm:generation_tokens_total", None, now, before),
        "adapters": _rows(now, before),
    }


def _slots(one: Replica) -> dict[str, Any]:
    return {
        "replica": one.replica,
        "ready": one.ready,
        "reason": one.reason,
        "names": [slot and slot.get("name") for slot in one.slots],
        "engine_ids": [slot and slot.get("engine_id") for slot in one.slots],
    }


def _rows(now: Look, before: Look | None) -> list[dict[str, Any]]:
    """One for each adapter, the busiest first."""
    rows = [
        {
            "name": each.name,
            "state": each.state,
            "tier": each.tier,
            "slot": each.slot,
            "pinned": each.pinned,
            "running": each.leases,
            "waiting": each.waiting,
            "tokens_per_s": _rate("lorry_adapter_generation_tokens_total", each.name, now, before),
        }
        for each in now.adapters
    ]
    return sorted(rows, key=_busy)


def _busy(row: Mapping[str, Any]) -> tuple[float, int, int, str]:
    return -(row["tokens_per_s"] or 0.0), -row["running"], -row["waiting"], row["name"]


def _rate(name: str, label: str | None, now: Look, before: Look | None) -> float | None:
    """Per second. A counter that has fallen began anew with the server."""
    if before is None or now.at_s <= before.at_s:
        return None
    grown = now.sum(name, label) - before.sum(name, label)
    return max(0.0, grown) / (now.at_s - before.at_s)


def picture(url: str, facts: Mapping[str, Any]) -> RenderableType:
    """The facts for people."""
    host = facts["host_cache"]
    ratio = facts["hit_ratio"]
    lines = [
        Text.assemble(("lorry top ", "bold"), url),
        Text(
            f"requests   {facts['running']} running, {facts['waiting']} waiting for an adapter, "
            f"{facts['waiting_in_engine']} for the engine; "
            f"{_rate_text(facts['tokens_per_s'])} tokens/s"
        ),
        *(_slot_line(each) for each in facts["slots"]),
        Text(
            f"host cache {_bar(host['versions'], host['versions_max'])} "
            f"{host['versions']} of {host['versions_max']} versions, "
            f"{size_text(host['bytes'])} of {size_text(host['bytes_max'])}"
        ),
        Text(f"kv cache   {_bar(facts['kv_cache_use'], 1.0)} {facts['kv_cache_use']:.0%}"),
        Text(
            f"hits       {'-' if ratio is None else f'{ratio:.1%}'} of requests found their "
            f"adapter in memory; {facts['loads']} loads, {facts['evictions']} evictions"
        ),
        Text(),
    ]
    return Group(*lines, _table(facts["adapters"]))


def _slot_line(slots: Mapping[str, Any]) -> Text:
    if not slots["ready"]:
        return Text(f"slots      {slots['replica']} is not ready: {slots['reason']}", "red")
    names = [
        "-" if taken is None else name or "(on its way out)"
        for name, taken in zip(slots["names"], slots["engine_ids"], strict=True)
    ]
    used = sum(taken is not None for taken in slots["engine_ids"])
    bar = _bar(used, len(names))
    return Text(f"slots      {bar} {used} of {len(names)}: {'  '.join(names)}")


def _bar(used: float, total: float) -> str:
    filled = round(BAR_CELLS * min(1.0, used / total)) if total else 0
    return "#" * filled + "." * (BAR_CELLS - filled)


def _rate_text(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f}"


def _table(rows: list[dict[str, Any]]) -> RenderableType:
    if not rows:
        return Text("No adapters. Load one: lorry load NAME PATH")
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("ADAPTER", overflow="fold")
    for title in ("STATE", "WHERE", "PINNED"):
        table.add_column(title, no_wrap=True)
    for title in ("RUNNING", "WAITING", "TOKENS/S"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(row["name"]),
            state_cell(row),
            place_text(row),
            "yes" if row["pinned"] else "",
            str(row["running"]),
            str(row["waiting"]),
            _rate_text(row["tokens_per_s"]),
        )
    return table
