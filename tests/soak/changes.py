"""Loads, replacements, rollbacks, unloads, pins and bad calls, in three dialects; each is checked
against what the server says afterwards.

A change that fails must have a reason that fits, and must leave the name as it was (promise 4).
"""

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.fixtures.bad_adapters import cut_in_half, rank_above_limit
from tests.soak.ledger import Entry, Findings, Ledger
from tests.soak.weights import WeightSets

PINS_MAX = 7
"""One fewer than the slots: the server keeps one free."""
NOT_KEPT = frozenset({404, 409, 422})
"""Statuses of a rollback to a version that the disk cache has evicted."""
DIALECTS = ("native", "vllm", "sglang")


@dataclass(frozen=True, slots=True)
class Answer:
    """Of an admin call, whatever its dialect."""

    status: int
    text: str
    began_s: float
    ended_s: float

    @property
    def ok(self) -> bool:
        """It was done."""
        return self.status < 300


class Changes:
    """Makes changes and checks them; counts them by kind."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        weights: WeightSets,
        ledger: Ledger,
        findings: Findings,
        folder: Path,
    ) -> None:
        """Adapters are written below `folder`."""
        self._client = client
        self._weights = weights
        self._ledger = ledger
        self._findings = findings
        self._folder = folder
        self.counts: Counter[str] = Counter()

    async def any(self, drawn: random.Random, entry: Entry) -> None:
        """Some change of that name that makes sense now."""
        async with entry.lock:
            if entry.weights is None:
                await self._pick(drawn, {self.load: 9, self.bad_load: 1, self.unload_unknown: 1})(
                    drawn, entry
                )
            else:
                await self._pick(
                    drawn,
                    {
                        self.replace: 8,
                        self.rewrite: 4,
                        self.roll_back: 3,
                        self.unload: 4,
                        self.pin: 4,
                        self.bad_replace: 2,
                        self.load_taken: 1,
                    },
                )(drawn, entry)

    def _pick(
        self,
        drawn: random.Random,
        weighted: dict[Callable[[random.Random, Entry], Awaitable[None]], int],
    ) -> Callable[[random.Random, Entry], Awaitable[None]]:
        return drawn.choices(list(weighted), weights=list(weighted.values()))[0]

    # Changes that should be done

    async def register(self, drawn: random.Random, entry: Entry) -> None:
        """Under a free name, to be loaded by its first request."""
        async with entry.lock:
            await self._load(drawn, entry, self._new_folder(entry), "native", load=False)

    async def load(self, drawn: random.Random, entry: Entry) -> None:
        """Under a free name."""
        dialect = drawn.choice(DIALECTS)
        await self._load(drawn, entry, self._new_folder(entry), dialect, kind="load")

    async def replace(self, drawn: random.Random, entry: Entry) -> None:
        """By another version from another folder; now and then only if a version is served."""
        headers, stale = {}, False
        dialect = drawn.choice(DIALECTS[:2])
        if dialect == "native" and drawn.random() < 0.4:
            stale = drawn.random() < 0.5
            headers["If-Match"] = '"' + ("0" * 64 if stale else entry.version) + '"'
        if not stale:
            await self._load(drawn, entry, self._new_folder(entry), dialect, headers=headers)
            return
        folder = self._new_folder(entry)
        self._write(drawn, folder, entry)
        answer = await self._send_load(entry, folder, dialect, headers=headers)
        await self._refused("replace of a stale version", entry, answer, {409})

    async def rewrite(self, drawn: random.Random, entry: Entry) -> None:
        """By new bytes at the same path."""
        assert entry.source is not None
        await self._load(drawn, entry, entry.source, drawn.choice(DIALECTS[:2]), kind="rewrite")

    async def roll_back(self, drawn: random.Random, entry: Entry) -> None:
        """To the version before, or to one that is named."""
        shown = await self._client.get(f"/v1/adapters/{entry.name}")
        previous: list[str] = shown.json()["previous"]
        if not previous:
            answer = await self._send("POST", entry, "/rollback", {})
            await self._refused("rollback without a version", entry, answer, {404})
            return
        named = drawn.random() < 0.5
        version = drawn.choice(previous) if named else previous[0]
        span = entry.begin(self._ledger.versions[version])
        body = {"version": version} if named else {}
        answer = await self._send("POST", entry, "/rollback", body)
        entry.end(span, answer.ok)
        if answer.ok:
            entry.source = Path(json.loads(answer.text)["source"])
            entry.version = version
        await self._check("rollback", entry, answer, NOT_KEPT)

    async def unload(self, drawn: random.Random, entry: Entry) -> None:
        """With more or less time to drain."""
        span, dialect = entry.begin(None), drawn.choice(DIALECTS)
        body = {"lora_name": entry.name}
        if dialect == "native":
            drain, purge = drawn.choice((0, 1, 30)), drawn.random() < 0.3
            words = f"?drain_timeout={drain}&purge={str(purge).lower()}"
            answer = await self._send("DELETE", entry, words)
        else:
            prefix = "/v1" if dialect == "vllm" else ""
            answer = await self._call("POST", f"{prefix}/unload_lora_adapter", body)
        entry.end(span, answer.ok)
        if answer.ok:
            entry.pinned = False
            _forget_folder(entry)
        await self._check(f"unload ({dialect})", entry, answer)

    async def pin(self, drawn: random.Random, entry: Entry) -> None:
        """One more than may be is refused."""
        async with self._ledger.pinning:
            await self._pin(entry)

    async def unpin(self, drawn: random.Random) -> None:
        """One of those that are pinned."""
        pinned = [entry for entry in self._ledger.entries.values() if entry.pinned]
        if not pinned:
            return
        entry = drawn.choice(pinned)
        async with entry.lock, self._ledger.pinning:
            if entry.pinned:
                await self._pin(entry)

    async def _pin(self, entry: Entry) -> None:
        pinned = not entry.pinned
        full = pinned and self._ledger.pinned() >= PINS_MAX
        answer = await self._send("PATCH", entry, "", {"pinned": pinned})
        if answer.ok:
            entry.pinned = pinned
        await self._check("pin" if pinned else "unpin", entry, answer, {409} if full else set())
        if full and answer.ok and self._ledger.pinned() > PINS_MAX:
            self._findings.add(f"{self._ledger.pinned()} names are pinned; {PINS_MAX} may be")

    # Changes that should be refused

    async def bad_load(self, drawn: random.Random, entry: Entry) -> None:
        """Of what cannot be served."""
        await self._bad(drawn, entry, "bad load", drawn.choice(DIALECTS))

    async def bad_replace(self, drawn: random.Random, entry: Entry) -> None:
        """By what cannot be served."""
        await self._bad(drawn, entry, "bad replace", drawn.choice(DIALECTS[:2]))

    async def _bad(self, drawn: random.Random, entry: Entry, kind: str, dialect: str) -> None:
        folder = self._new_folder(entry)
        if drawn.random() < 0.8:
            self._write(drawn, folder, entry)
            drawn.choice((cut_in_half, rank_above_limit))(folder)
        answer = await self._send_load(entry, folder, dialect)
        await self._refused(kind, entry, answer, {400, 404, 422})
        shutil.rmtree(folder, ignore_errors=True)

    async def load_taken(self, drawn: random.Random, entry: Entry) -> None:
        """Of a name that is taken, where the dialect asks for a word more."""
        folder = self._new_folder(entry)
        self._write(drawn, folder, entry)
        body = {"lora_name": entry.name, "lora_path": str(folder)}
        answer = await self._call("POST", drawn.choice(_LOAD_PATHS), body)
        await self._refused("load of a taken name", entry, answer, {400})

    async def unload_unknown(self, drawn: random.Random, entry: Entry) -> None:
        """Of a name that nobody loaded."""
        answer = await self._send("DELETE", entry, "")
        await self._refused("unload of nothing", entry, answer, {404})

    # How

    def _new_folder(self, entry: Entry) -> Path:
        return self._folder / entry.name / str(next(self._ledger.numbers))

    def _write(self, drawn: random.Random, folder: Path, entry: Entry) -> str:
        """Other weights than the present ones."""
        weights = drawn.choice([name for name in self._weights.names if name != entry.weights])
        self._weights.write(weights, folder, next(self._ledger.numbers))
        return weights

    async def _load(
        self,
        drawn: random.Random,
        entry: Entry,
        folder: Path,
        dialect: str,
        *,
        kind: str = "",
        load: bool = True,
        headers: dict[str, str] | None = None,
    ) -> None:
        old, kind = entry.source, kind or ("replace" if entry.weights else "register")
        span = entry.begin(self._write(drawn, folder, entry))
        answer = await self._send_load(entry, folder, dialect, load=load, headers=headers)
        entry.end(span, answer.ok)
        if answer.ok:
            if old is not None and old != folder:
                _forget_folder(entry)
            entry.source = folder
        await self._check(f"{kind} ({dialect})", entry, answer)

    async def _send_load(
        self,
        entry: Entry,
        folder: Path,
        dialect: str,
        *,
        load: bool = True,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        if dialect == "native":
            body: dict[str, Any] = {"source": str(folder), "load": load}
            return await self._send("PUT", entry, "", body, headers)
        body = {"lora_name": entry.name, "lora_path": str(folder)}
        if dialect == "vllm" and entry.weights is not None:
            body["load_inplace"] = True
        return await self._call("POST", _LOAD_PATHS[dialect == "sglang"], body)

    async def _send(
        self,
        method: str,
        entry: Entry,
        rest: str,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        return await self._call(method, f"/v1/adapters/{entry.name}{rest}", body, headers)

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        began_s = time.monotonic()
        try:
            response = await self._client.request(method, path, json=body, headers=headers)
            status, text = response.status_code, response.text
        except httpx.HTTPError as problem:
            status, text = 599, f"no answer: {problem!r}"
        return Answer(status, text, began_s, time.monotonic())

    # Checks

    async def _refused(
        self, kind: str, entry: Entry, answer: Answer, statuses: set[int] | frozenset[int]
    ) -> None:
        if answer.ok:
            self._findings.add(f"{kind} of {entry.name} was done: {answer.text[:300]}")
        await self._check(kind, entry, answer, statuses)

    async def _check(
        self,
        kind: str,
        entry: Entry,
        answer: Answer,
        allowed: set[int] | frozenset[int] = frozenset(),
    ) -> None:
        """A failure needs a reason; and afterwards the server says what the ledger says."""
        self.counts[kind.partition(" (")[0]] += 1
        if not answer.ok:
            self.counts["of these refused"] += 1
            again = answer.status in (503, 504) or "engine" in answer.text
            lost = self._ledger.engine_was_lost(answer.began_s, answer.ended_s)
            if answer.status not in allowed and not (lost and again):
                what = f"{kind} of {entry.name}: {answer.status} {answer.text[:300]}"
                self._findings.add(f"{what}, engine lost: {lost}")
        await self.verify(entry, f"after {kind} ({answer.status})")

    async def verify(self, entry: Entry, when: str) -> None:
        """What GET says is what was acknowledged (promise 1)."""
        try:
            response = await self._client.get(f"/v1/adapters/{entry.name}")
        except httpx.HTTPError as problem:
            self._findings.add(f"GET of {entry.name} {when}: {problem!r}")
            return
        if response.status_code == 404:
            if entry.weights is not None:
                self._findings.add(f"{entry.name} is unknown {when}, and should be there")
            return
        shown = response.json()
        version = shown["version"]
        weights = self._ledger.versions.setdefault(version, entry.weights or "")
        found = weights, shown["source"], shown["pinned"]
        expected = entry.weights, str(entry.source), entry.pinned
        if found != expected:
            self._findings.add(f"{entry.name} is {found} {when}, and should be {expected}")
        entry.version = version


_LOAD_PATHS = ("/v1/load_lora_adapter", "/load_lora_adapter")


def _forget_folder(entry: Entry) -> None:
    """What happens to a source after its load is nobody's business."""
    if entry.source is not None:
        shutil.rmtree(entry.source, ignore_errors=True)
    entry.source = None
