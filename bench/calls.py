"""A client for benches of isolation: timed admin calls, and streams whose every token is timed."""

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

DEADLINE_S = 60.0
"""Of any call; one that takes longer fails the bench."""
TOKENS = range(100, 500)
"""Prompt tokens are drawn from these, which every model of the bench has."""


@dataclass(slots=True)
class Streamed:
    """When a stream's tokens came, in seconds after it was asked for."""

    at_s: list[float] = field(default_factory=list)
    error: str = ""
    """The code of what refused it or ended it early."""

    @property
    def first_s(self) -> float:
        """Time to first token."""
        return self.at_s[0]

    @property
    def gaps_s(self) -> list[float]:
        """Times from one token to the next."""
        return [b - a for a, b in zip(self.at_s, self.at_s[1:], strict=False)]


class Calls:
    """One server, seen by one client; for one event loop."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        """See `calls`."""
        self.http = http

    async def load(self, name: str, folder: Path, *, inplace: bool = False) -> float:
        """Seconds it took. Raises `SystemExit` unless it is done."""
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": inplace}
        return await self._timed("POST", "/v1/load_lora_adapter", json=body)

    async def unload(self, name: str, drain_s: float = 30) -> float:
        """Seconds it took. Raises `SystemExit` unless it is done."""
        return await self._timed(
            "DELETE", f"/v1/adapters/{name}", params={"drain_timeout": drain_s}
        )

    async def stream(self, model: str, prompt: list[int], tokens: int, into: Streamed) -> None:
        """Read a completion to its end, or to the error that it ends with."""
        began = time.perf_counter()
        body = _streamed(model, prompt, tokens)
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                into.error = json.loads(await response.aread())["error"]["code"]
            async for line in _lines(response):
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    into.error = event["error"]["code"]
                elif any(choice.get("token_ids") for choice in event["choices"]):
                    into.at_s.append(time.perf_counter() - began)

    async def keep_busy(
        self, model: str, prompt: list[int], tokens: int, begun: asyncio.Event
    ) -> None:
        """Have a completion streamed and look at none of it, so that this process takes no time
        from what is measured beside it. Raises `SystemExit` if it is refused."""
        body = _streamed(model, prompt, tokens)
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise SystemExit(f"{model}: {await response.aread()!r}")
            async for _ in response.aiter_raw():
                begun.set()

    async def state(self, name: str) -> dict[str, Any] | None:
        """The native entry, if the name is registered."""
        response = await self.http.get(f"/v1/adapters/{name}")
        found: dict[str, Any] | None = response.json() if response.status_code == 200 else None
        return found

    async def _timed(self, method: str, path: str, **more: Any) -> float:
        began = time.perf_counter()
        response = await self.http.request(method, path, **more)
        took_s = time.perf_counter() - began
        if response.status_code >= 300:
            raise SystemExit(f"{method} {path}: {response.status_code} {response.text}")
        return took_s


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Split at line feeds only; httpx's own also splits at what a token's text may hold."""
    rest = b""
    async for piece in response.aiter_raw():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line


def _streamed(model: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    """A request that runs to its full length, with every token's number in the answer."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


@asynccontextmanager
async def calls(url: str) -> AsyncIterator[Calls]:
    """A client with as many connections as it needs. It keeps Python from looking through all
    modules for garbage, which takes a tenth of a second, while something is measured."""
    gc.collect()
    gc.freeze()
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=256)
    try:
        async with httpx.AsyncClient(
            base_url=url, timeout=DEADLINE_S, limits=limits, trust_env=False
        ) as http:
            yield Calls(http)
    finally:
        gc.unfreeze()
