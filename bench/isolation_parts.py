"""The parts of `bench.isolation`: each drives a server and gives its measures."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from bench.calls import DEADLINE_S, TOKENS, Calls, Streamed
from bench.measures import Measure, compared, percentile
from tests.fixtures.common_ground import PROMPTS, CommonGround

DRAIN_BOUND = 1.5
CHURN_P50_BOUND, CHURN_P99_BOUND = 1.25, 2.0
BLOCKS = 20
"""Of each side; they alternate, so that a slower minute of the machine hits both."""
PATIENCE_S = 1.0
"""`FleetLimits.patience_ms`."""
ALLOWANCE_S = 1.0
"""For abort, unload and load of one round together: some tens of milliseconds each on two cores."""
CHURN_PAUSE_S = 0.1


@dataclass(slots=True)
class Sides:
    """Samples without and with a disturbance."""

    plain: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)


def prompt(drawn: random.Random, length: int = 32) -> list[int]:
    """Fresh tokens, so that no prefix cache helps."""
    return [drawn.choice(TOKENS) for _ in range(length)]


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for it. Raises `SystemExit` after the deadline."""
    end = perf_counter() + DEADLINE_S
    while not await holds():
        if perf_counter() > end:
            raise SystemExit(f"{what} did not come within {DEADLINE_S:g} s")
        await asyncio.sleep(0.01)


# A drain of A beside load(B) and unload(C).


async def drain(
    calls: Calls, folders: Sequence[Path], operations: int, tokens: int
) -> list[Measure]:
    """`operations` loads and as many unloads on each side. The one loaded is the next unloaded."""
    loads, unloads = Sides(), Sides()
    blocks = min(BLOCKS, operations)
    await calls.load("C", folders[2])
    for block in range(blocks):
        count = operations * (block + 1) // blocks - operations * block // blocks
        await _swap(calls, folders, count, loads.plain, unloads.plain)
        async with draining(calls, folders[0], tokens):
            await _swap(calls, folders, count, loads.beside, unloads.beside)
    await calls.unload("C")
    return [
        compared(f"{what} while A drains", share, sides.plain, sides.beside, DRAIN_BOUND)
        for what, sides in (("load(B)", loads), ("unload(C)", unloads))
        for share in (0.5, 0.99)
    ]


async def _swap(
    calls: Calls, folders: Sequence[Path], count: int, loads: list[float], unloads: list[float]
) -> None:
    """Load B and unload C; then untimed back again."""
    for _ in range(count):
        loads.append(await calls.load("B", folders[1]))
        unloads.append(await calls.unload("C"))
        await calls.load("C", folders[2])
        await calls.unload("B")


@asynccontextmanager
async def draining(calls: Calls, folder: Path, tokens: int) -> AsyncIterator[None]:
    """A stream runs on A, which is unloaded and waits for it, all the while. Raises `SystemExit`
    if the stream ended before: then nothing was measured."""
    await calls.load("A", folder)
    begun = asyncio.Event()
    stream = asyncio.create_task(calls.keep_busy("A", prompt(random.Random(7)), tokens, begun))

    async def streams() -> bool:
        return begun.is_set() or stream.done()

    async def drains() -> bool:
        entry = await calls.state("A")
        return entry is not None and entry["state"] == "unloading"

    await until(streams, "the first token of A")
    unload = asyncio.create_task(calls.unload("A", drain_s=10 * DEADLINE_S))
    await until(drains, "the drain of A")
    yield
    if stream.done() or unload.done():
        raise SystemExit("A's stream ended while it was to be drained; ask for more tokens")
    stream.cancel()
    await asyncio.wait([stream])
    await unload


# The base model beside adapters that come and go.


async def churn(
    calls: Calls, folders: Sequence[Path], base: str, requests: int, clients: int = 4
) -> list[Measure]:
    """`requests` on each side, from `clients` at a time; one adapter is loaded, replaced and
    unloaded all the while on the other side."""
    firsts, gaps = Sides(), Sides()
    blocks = min(BLOCKS, max(1, requests // (2 * clients)))
    drawn, rounds = random.Random(1), 0
    for block in range(2 * blocks):
        with_churn = block % 2 == 1
        task = asyncio.create_task(_come_and_go(calls, folders)) if with_churn else None
        each = max(1, requests // blocks // clients)
        seen = await _streams(calls, base, each, clients, drawn)
        if task is not None:
            task.cancel()
            rounds += await task
        for one in seen:
            (firsts.beside if with_churn else firsts.plain).append(one.first_s)
            (gaps.beside if with_churn else gaps.plain).extend(one.gaps_s)
    if not rounds:
        raise SystemExit("no adapter came or went while the base was measured")
    return [
        compared(f"base {what} while adapters churn", share, sides.plain, sides.beside, bound)
        for what, sides in (("TTFT", firsts), ("TPOT", gaps))
        for share, bound in ((0.5, CHURN_P50_BOUND), (0.99, CHURN_P99_BOUND))
    ]


async def _come_and_go(calls: Calls, folders: Sequence[Path]) -> int:
    """Load, replace, unload; again and again until cancelled, then tidy; how many rounds."""
    rounds = 0
    while True:
        one = asyncio.create_task(_one_round(calls, folders))
        rounds += 1
        try:
            await asyncio.shield(one)
        except asyncio.CancelledError:
            await one
            return rounds


async def _one_round(calls: Calls, folders: Sequence[Path]) -> None:
    await calls.load("B", folders[1])
    await asyncio.sleep(CHURN_PAUSE_S)
    await calls.load("B", folders[2], inplace=True)
    await asyncio.sleep(CHURN_PAUSE_S)
    await calls.unload("B")
    await asyncio.sleep(CHURN_PAUSE_S)


async def _streams(
    calls: Calls, model: str, each: int, clients: int, drawn: random.Random
) -> list[Streamed]:
    """All streams of clients that each send theirs one after the other."""
    seen = [Streamed() for _ in range(each * clients)]

    async def client(index: int) -> None:
        for one in seen[index::clients]:
            await calls.stream(model, prompt(drawn), 16, one)
            if one.error:
                raise SystemExit(f"{model}: {one.error}")

    await asyncio.gather(*map(client, range(clients)))
    return seen


# Hot adapters that fill the server, and cold ones.


@asynccontextmanager
async def hot_traffic(
    calls: Calls, names: Sequence[str], tokens: int
) -> AsyncIterator[dict[str, list[Streamed]]]:
    """Two clients on each name, whose streams follow each other without a pause; what they saw."""
    seen: dict[str, list[Streamed]] = {name: [] for name in names}
    drawn = random.Random(2)

    async def client(name: str) -> None:
        while True:
            one = Streamed()
            await calls.stream(name, prompt(drawn), tokens, one)
            seen[name].append(one)

    tasks = [asyncio.create_task(client(name)) for name in names for _ in range(2)]

    async def all_run() -> bool:
        return all(seen.values())

    try:
        await until(all_run, "an answer from each hot adapter")
        yield seen
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    broken = [one for one in ended if not isinstance(one, asyncio.CancelledError)]
    if broken:
        raise SystemExit(f"a hot client failed: {broken[0]!r}")


async def cold(
    calls: Calls, hot: Sequence[str], name: str, requests: int, lease_s: float
) -> list[Measure]:
    """One cold adapter asked for now and then; the hot ones' streams end by themselves."""
    waits: list[float] = []
    async with hot_traffic(calls, hot, 32) as seen:
        for _ in range(requests):
            one = Streamed()
            await calls.stream(name, prompt(random.Random(3)), 4, one)
            if one.error:
                raise SystemExit(f"the cold adapter was refused: {one.error}")
            waits.append(one.first_s)
            await asyncio.sleep(0.2)
    round_s = PATIENCE_S + lease_s + ALLOWANCE_S
    streams = [one for found in seen.values() for one in found]
    firsts = [one.first_s for one in streams if not one.error]
    answered = [sum(not one.error for one in found) for found in seen.values()]
    median = percentile(answered, 0.5)
    return [
        _waited("a cold adapter beside 8 hot ones", waits, round_s),
        _waited("a hot one beside it", firsts, 2 * round_s),
        Measure(
            "hot requests refused", sum(bool(one.error) for one in streams), 0, f"{len(streams)}"
        ),
        Measure(
            "the median hot adapter's answers, times the least's",
            median / min(answered) if min(answered) else float("inf"),
            2.0,
            f"{min(answered)} to {max(answered)} answers",
        ),
    ]


def _waited(who: str, waits: Sequence[float], bound_s: float) -> Measure:
    detail = f"TTFT of {len(waits)}: p50 {percentile(waits, 0.5):.3f} s, p99 "
    detail += f"{percentile(waits, 0.99):.3f} s"
    return Measure(f"longest wait of {who}, s", max(waits), bound_s, detail)


async def rounds(
    calls: Calls,
    hot: Sequence[str],
    cold_ones: Sequence[tuple[str, Path]],
    lease_s: float,
    turns: int,
) -> list[Measure]:
    """Promise 11's bound: hot streams never end before their lease does, and several adapters are
    to be loaded at once; the k-th load that ends may take k rounds."""
    round_s = PATIENCE_S + lease_s + ALLOWANCE_S
    parts: list[float] = []
    taken: list[float] = []
    async with hot_traffic(calls, hot, 1900):
        for _ in range(turns):
            waits = await asyncio.gather(*[calls.load(name, at) for name, at in cold_ones])
            parts += [wait / (k * round_s) for k, wait in enumerate(sorted(waits), 1)]
            taken += waits
            for name, _folder in cold_ones:
                await calls.unload(name)
    detail = f"{len(taken)} loads, {len(cold_ones)} at a time, round {round_s:g} s, waits "
    detail += f"{min(taken):.2f} to {max(taken):.2f} s"
    return [Measure("the k-th need's wait, in parts of k rounds", max(parts), 1.0, detail)]


# Clients that load and unload two names at random.


async def at_random(
    calls: Calls, ground: CommonGround, seconds: float, clients: int = 16
) -> list[Measure]:
    """Each call ends in time and well; the end agrees with what the server lists and answers."""
    names = {"X": "A", "Y": "B"}
    end = perf_counter() + seconds
    statuses: Counter[int] = Counter()
    took_s: list[float] = []

    async def client(seed: int) -> None:
        drawn = random.Random(seed)
        while perf_counter() < end:
            name, began = drawn.choice(list(names)), perf_counter()
            if drawn.random() < 0.5:
                body = {"lora_name": name, "lora_path": str(ground.adapter(names[name]))}
                answer = await calls.http.post("/v1/load_lora_adapter", json=body)
            else:
                answer = await calls.http.post("/v1/unload_lora_adapter", json={"lora_name": name})
            statuses[answer.status_code] += 1
            took_s.append(perf_counter() - began)

    await asyncio.gather(*map(client, range(clients)))
    wrong = [
        name for name, oracle in names.items() if not await _agrees(calls, ground, name, oracle)
    ]
    told = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
    failed = sum(count for status, count in statuses.items() if status >= 500)
    detail = f"{len(took_s) / seconds:.0f} operations per s, p50 {percentile(took_s, 0.5):.3f} s, "
    detail += f"p99 {percentile(took_s, 0.99):.3f} s"
    return [
        Measure("longest call of 16 random clients, s", max(took_s), DEADLINE_S / 2, detail),
        Measure("their 5xx answers", failed, 0, told),
        Measure("names that disagree at the end", len(wrong), 0, ", ".join(wrong) or "of 2"),
    ]


async def _agrees(calls: Calls, ground: CommonGround, name: str, oracle: str) -> bool:
    """Listed, registered and answering rightly; or none of the three."""
    models = (await calls.http.get("/v1/models")).json()["data"]
    listed = any(card["id"] == name for card in models)
    registered = await calls.state(name) is not None
    body = {
        "model": name,
        "prompt": list(PROMPTS["P"]),
        "max_tokens": 16,
        "temperature": 0,
        "return_token_ids": True,
    }
    answer = await calls.http.post("/v1/completions", json=body)
    if answer.status_code != 200:
        return answer.status_code == 404 and not listed and not registered
    tokens = tuple(answer.json()["choices"][0]["token_ids"])
    return listed and registered and tokens == ground.answer(oracle).tokens
