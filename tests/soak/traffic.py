"""Requests for tokens, in vLLM's and SGLang's dialect, streamed and whole; each answer is judged.

A request may be refused, but only with what fits what was known then: 404 while the name was, or
may have been, unloaded, and a 503 around an engine's loss only.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.soak.ledger import Findings, Ledger
from tests.soak.weights import BASE, PROMPTS, STEPS, WeightSets

MODEL = "tiny"
AGAIN = frozenset({"engine_unreachable", "adapter_unavailable"})
"""Codes of a 503 that say: come again, with Retry-After."""
SHORT_VERSION = 12
PAUSE_S = 0.3
"""Before a client that was told to come again does so with something else."""


@dataclass(slots=True)
class Asked:
    """One request, and what came of it."""

    name: str | None
    """None: the base."""
    prompt: str
    steps: int
    dialect: str
    stream: bool
    version: str = ""
    """Asked for as `name@version`, if it is set."""
    leave_after: int | None = None
    """Hang up after so many events of the stream."""
    began_s: float = field(default_factory=time.monotonic)
    tokens: tuple[int, ...] = ()
    ended: bool = False
    left: bool = False
    status: int = 200
    error: dict[str, Any] | None = None
    retry_after: bool = True

    def __str__(self) -> str:
        model = MODEL if self.name is None else self.name
        model += f"@{self.version[:SHORT_VERSION]}" if self.version else ""
        how = "streamed" if self.stream else "whole"
        return f"{self.dialect} {how} {model} on {self.prompt}"

    def path_and_body(self) -> tuple[str, dict[str, Any]]:
        """As its dialect says it."""
        name = self.name
        if name is not None and self.version:
            name = f"{name}@{self.version[:SHORT_VERSION]}"
        ids = list(PROMPTS[self.prompt])
        if self.dialect == "sglang":
            sampling = {"temperature": 0, "max_new_tokens": self.steps, "ignore_eos": True}
            body = {"input_ids": ids, "sampling_params": sampling, "stream": self.stream}
            return "/generate", body | {"lora_path": name}
        body = {"model": name or MODEL, "prompt": ids, "max_tokens": self.steps, "temperature": 0}
        more = {"ignore_eos": True, "return_token_ids": True, "stream": self.stream}
        return "/v1/completions", body | more

    def take(self, event: dict[str, Any]) -> None:
        """One event of a stream, or a whole answer."""
        if "error" in event:
            self.error = event["error"]
        elif self.dialect == "sglang":
            self.tokens = tuple(event["output_ids"])
            self.ended |= event["meta_info"]["finish_reason"] is not None
        else:
            for choice in event["choices"]:
                self.tokens += tuple(choice["token_ids"])
                self.ended |= choice["finish_reason"] is not None


class Traffic:
    """Asks and judges."""

    def __init__(
        self, client: httpx.AsyncClient, weights: WeightSets, ledger: Ledger, findings: Findings
    ) -> None:
        """Counts what it does in `counts`."""
        self._client = client
        self._weights = weights
        self._ledger = ledger
        self._findings = findings
        self.counts: Counter[str] = Counter()

    def draw(self, drawn: random.Random, name: str | None) -> Asked:
        """Some request for that name."""
        asked = Asked(
            name=name,
            prompt=drawn.choice(list(PROMPTS)),
            steps=drawn.choice((1, 4, 8, 16, STEPS)),
            dialect=drawn.choice(("vllm", "sglang")),
            stream=drawn.random() < 0.5,
        )
        if name is not None and drawn.random() < 0.1:
            asked.version = self._ledger.entries[name].version
        if asked.stream and drawn.random() < 0.1:
            asked.leave_after = drawn.randrange(asked.steps)
        return asked

    async def ask(self, asked: Asked) -> None:
        """Send it, read it as far as it is wanted, and judge it."""
        path, body = asked.path_and_body()
        try:
            if asked.stream:
                await self._read_stream(asked, path, body)
            else:
                response = await self._client.post(path, json=body)
                self._take_whole(asked, response)
        except httpx.HTTPError as problem:
            self._findings.add(f"{asked}: no answer: {problem!r}")
            return
        self.counts["requests"] += 1
        self.judge(asked, time.monotonic())
        if asked.error is not None and asked.error.get("code") in (*AGAIN, 503):
            await asyncio.sleep(PAUSE_S)

    async def _read_stream(self, asked: Asked, path: str, body: dict[str, Any]) -> None:
        async with self._client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                self._take_whole(asked, response)
                return
            async for event in _events(response):
                if asked.leave_after == 0:
                    asked.left = True
                    self.counts["hung up"] += 1
                    return
                if asked.leave_after is not None:
                    asked.leave_after -= 1
                asked.take(event)

    def _take_whole(self, asked: Asked, response: httpx.Response) -> None:
        asked.status = response.status_code
        asked.retry_after = "Retry-After" in response.headers
        asked.take(response.json())

    def judge(self, asked: Asked, now_s: float) -> None:
        """Find what is wrong with what came of it."""
        possible = self._possible(asked, now_s)
        if asked.tokens:
            self._judge_tokens(asked, possible)
        if asked.error is not None:
            self.counts["refused"] += 1
            self._judge_error(asked, possible, now_s)
        elif asked.status != 200:
            self._findings.add(f"{asked}: {asked.status} without an error")
        elif not asked.left and not (asked.ended and len(asked.tokens) == asked.steps):
            self._findings.add(f"{asked}: {len(asked.tokens)} of {asked.steps} tokens, no error")

    def _possible(self, asked: Asked, now_s: float) -> set[str | None]:
        """Whose answer it may be; None stands for a refusal."""
        if asked.name is None:
            return {BASE}
        entry = self._ledger.entries[asked.name]
        possible = entry.possible(asked.began_s, now_s)
        if not asked.version:
            return possible
        wanted = self._ledger.versions[asked.version]
        of_version = {one if one == wanted else None for one in possible}
        if entry.version != asked.version or len(possible) > 1:
            of_version.add(None)  # another version may have the same weights
        return of_version

    def _judge_tokens(self, asked: Asked, possible: set[str | None]) -> None:
        self.counts["checked"] += 1
        owners = self._weights.whose(asked.prompt, asked.tokens)
        if not possible.intersection(owners):
            allowed = sorted(map(str, possible))
            whose = f"the answer is of {owners or 'nobody'}, and may be of {allowed}"
            self._findings.add(f"{asked}: {whose}: {asked.tokens}")

    def _judge_error(self, asked: Asked, possible: set[str | None], now_s: float) -> None:
        assert asked.error is not None
        code, lost = asked.error.get("code"), self._ledger.engine_was_lost(asked.began_s, now_s)
        if _is_unknown(asked) and None in possible:
            self.counts["refused as unknown"] += 1
        elif _ended_by_unload(asked) and None in possible:
            self.counts["ended by an unload"] += 1
        elif lost and (code in AGAIN or code == 503):
            self.counts["told to come again"] += 1
            if asked.status != 200 and not asked.retry_after:
                self._findings.add(f"{asked}: 503 without Retry-After: {asked.error}")
        else:
            self._findings.add(f"{asked}: {asked.status} {asked.error}, engine lost: {lost}")


def _is_unknown(asked: Asked) -> bool:
    assert asked.error is not None
    if asked.dialect == "sglang":
        message = asked.error["message"]
        return asked.error["code"] == 400 and any(
            words in message for words in ("never been loaded", "unload", "not loaded")
        )
    return asked.error["code"] in ("adapter_not_found", "adapter_unloading")


def _ended_by_unload(asked: Asked) -> bool:
    assert asked.error is not None
    return "was unloaded before this request ended" in asked.error["message"]


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
