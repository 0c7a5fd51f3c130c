"""Requests that are refused by their form, and clients that leave before they have an answer."""

import asyncio
import random
import time
from collections import Counter
from typing import Any

import httpx

from tests.soak.ledger import Findings, Ledger
from tests.soak.traffic import MODEL
from tests.soak.weights import PROMPTS

IDS = list(PROMPTS["S"])
REFUSED = frozenset({400, 404, 409, 422})
BAD: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/v1/completions", {"model": "nobody", "prompt": IDS}),
    ("POST", "/v1/completions", {"model": f"{MODEL}:nobody", "prompt": IDS}),
    ("POST", "/generate", {"input_ids": IDS, "lora_path": "nobody"}),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": IDS, "max_tokens": -1}),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": IDS, "temperature": "hot"}),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": [99_999]}),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": IDS * 400}),
    ("POST", "/v1/completions", {"model": MODEL}),
    ("POST", "/v1/completions", b'{"model": '),
    ("POST", "/generate", {"input_ids": IDS, "text": "both"}),
    ("POST", "/generate", {"input_ids": IDS, "sampling_params": [{}, {}]}),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "nobody"}),
    ("POST", "/v1/load_lora_adapter", {"lora_name": MODEL, "lora_path": "/nowhere"}),
    ("POST", "/load_lora_adapter", {"lora_path": "/nowhere"}),
    ("POST", "/unload_lora_adapter", {"lora_name": "nobody"}),
    ("PUT", "/v1/adapters/nobody", {"source": "/nowhere", "colour": "red"}),
    ("PATCH", "/v1/adapters/nobody", {"pinned": True}),
    ("DELETE", "/v1/adapters/nobody", None),
    ("POST", "/v1/adapters/nobody/rollback", {}),
)
"""Each is the caller's mistake, whatever is loaded."""


class Odd:
    """Sends what must be refused, and hangs up."""

    def __init__(self, client: httpx.AsyncClient, ledger: Ledger, findings: Findings) -> None:
        """Counts what it does in `counts`."""
        self._client = client
        self._ledger = ledger
        self._findings = findings
        self.counts: Counter[str] = Counter()

    async def bad(self, drawn: random.Random) -> None:
        """One of `BAD`: a 4xx with a reason."""
        method, path, body = drawn.choice(BAD)
        began_s = time.monotonic()
        try:
            if isinstance(body, bytes):
                kind = {"Content-Type": "application/json"}
                response = await self._client.request(method, path, content=body, headers=kind)
            else:
                response = await self._client.request(method, path, json=body)
        except httpx.HTTPError as problem:
            self._findings.add(f"{method} {path} {body}: no answer: {problem!r}")
            return
        self.counts["bad requests"] += 1
        lost = self._ledger.engine_was_lost(began_s, time.monotonic())
        if response.status_code not in REFUSED and not (lost and response.status_code == 503):
            what = f"{method} {path} {str(body)[:100]}"
            self._findings.add(f"{what}: {response.status_code} {response.text[:300]}")

    async def leave(self, drawn: random.Random, name: str | None) -> None:
        """Ask for a long answer and hang up before it comes."""
        body = {"model": name or MODEL, "prompt": IDS, "max_tokens": 500, "ignore_eos": True}
        self.counts["hung up"] += 1
        try:
            async with asyncio.timeout(drawn.random() * 0.3):
                await self._client.post("/v1/completions", json=body)
        except (TimeoutError, httpx.HTTPError):
            return
