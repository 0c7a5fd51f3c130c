"""The load: clients that each send their requests one after the other, all clients at once."""

import asyncio
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

FEW_SLOTS = 4
FIRST_TOKEN, LAST_TOKEN = 100, 49_000
"""Prompt tokens are drawn between these, which leaves out special tokens."""
TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Scenario:
    """One cell of the table."""

    adapters: int
    """Distinct adapters in the mix; 0 is the base model."""
    concurrent: int

    @property
    def slots(self) -> int:
        """Device slots of the server that serves it, set as its owner would."""
        return max(FEW_SLOTS, self.adapters)


@dataclass(frozen=True, slots=True)
class Load:
    """What each request is."""

    prompt_tokens: tuple[int, int]
    """Least and most, drawn evenly."""
    output_tokens: int
    waves: int
    """Requests that each client sends, one after the other."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement."""

    system: str
    scenario: Scenario
    round: int
    tokens_per_s: float
    wall_s: float
    output_tokens: int
    latency_p50_s: float
    latency_max_s: float
    load_average: float
    """Of the last minute, just before."""
    stolen_s: float
    """CPU time that other guests of the machine took meanwhile."""


def measure(
    url: str,
    system: str,
    scenario: Scenario,
    load: Load,
    names: Sequence[str],
    turn: int,
    seed: str,
) -> Sample:
    """Drive one scenario. Raises `SystemExit` if a request fails or ends early."""
    drawn = random.Random(seed)
    clients = [
        [_request(names[(client + wave) % len(names)], load, drawn) for wave in range(load.waves)]
        for client in range(scenario.concurrent)
    ]
    load_average, stolen_s = os.getloadavg()[0], _stolen_s()
    began = time.perf_counter()
    bodies, latencies_s = asyncio.run(post_all(url, clients))
    wall_s = time.perf_counter() - began
    tokens = sum(body["usage"]["completion_tokens"] for body in bodies)
    wanted = scenario.concurrent * load.waves * load.output_tokens
    if tokens != wanted:
        raise SystemExit(f"{system} gave {tokens} tokens of {wanted}")
    return Sample(
        system=system,
        scenario=scenario,
        round=turn,
        tokens_per_s=tokens / wall_s,
        wall_s=wall_s,
        output_tokens=tokens,
        latency_p50_s=statistics.median(latencies_s),
        latency_max_s=max(latencies_s),
        load_average=load_average,
        stolen_s=_stolen_s() - stolen_s,
    )


def _request(name: str, load: Load, drawn: random.Random) -> dict[str, Any]:
    length = drawn.randint(*load.prompt_tokens)
    return {
        "model": name,
        "prompt": [drawn.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)],
        "max_tokens": load.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


async def post_all(
    url: str, clients: Sequence[Sequence[dict[str, Any]]]
) -> tuple[list[dict[str, Any]], list[float]]:
    """Bodies in order of client and wave, and the seconds each took."""
    limits = httpx.Limits(max_connections=len(clients), max_keepalive_connections=len(clients))
    async with httpx.AsyncClient(
        base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False
    ) as http:
        found = await asyncio.gather(*[_client(http, requests) for requests in clients])
    flat = [pair for pairs in found for pair in pairs]
    return [body for body, _ in flat], [took_s for _, took_s in flat]


async def _client(
    http: httpx.AsyncClient, requests: Sequence[dict[str, Any]]
) -> list[tuple[dict[str, Any], float]]:
    answers = []
    for request in requests:
        began = time.perf_counter()
        response = await http.post("/v1/completions", json=request)
        if response.status_code != 200:
            raise SystemExit(f"{request['model']}: {response.status_code} {response.text}")
        answers.append((response.json(), time.perf_counter() - began))
    return answers


def _stolen_s() -> float:
    """Steal of all cores since the machine's start; 0 where the kernel does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    words = stat.read_text().split("\n", 1)[0].split()
    return int(words[8]) / os.sysconf("SC_CLK_TCK")
