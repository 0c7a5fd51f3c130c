"""One run: a real server, traffic and changes on it from a seed, two kills of its engine, and the
books at the end.

The seed decides what each of the clients does; how their calls fall together is up to the machine.
"""

import asyncio
import contextlib
import itertools
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from tests.fixtures.server_process import ServerProcess, free_port, lorry_command
from tests.soak.changes import Changes
from tests.soak.ending import RECONCILE_S, Ending
from tests.soak.ledger import AFTER_LOSS_S, Findings, Ledger, Loss
from tests.soak.odd import Odd
from tests.soak.traffic import MODEL, Traffic
from tests.soak.watch import Watch
from tests.soak.weights import WeightSets, weight_sets

FLAGS = (
    *("--served-model-name", MODEL, "--dtype", "float32", "--max-lora-rank", "16"),
    *("--max-loras", "8", "--max-cpu-loras", "64"),
    *("--kv-cache-bytes", "16MiB", "--disk-cache-bytes", "32MiB"),
)
"""Tiers of 8 and 64. KV and disk are small enough to be full after a while, so that what they hold
is evicted all the time."""
CLIENT_TIMEOUT_S = 90.0
"""More than any of the server's own deadlines for a request: a call that is not answered by then
hangs."""
REGISTERED = 0.9
"""Share of the names that are registered at first."""
BACK_S = 60.0
PROGRESS_S = 30.0


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is asked for."""

    seconds: float
    seed: int = 0
    adapters: int = 300
    clients: int = 16
    kills: int = 2
    settle_s: float = RECONCILE_S
    """Between two looks at the end: by then the server has asked the engine what it holds, and
    believed what it said."""


@dataclass(slots=True)
class Report:
    """What a run did and found."""

    options: Options
    requests: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    took_s: float = 0.0
    lives: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    """The first of them, in words."""
    found: int = 0
    ended_early: bool = False

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.changes.items()))
        asked = ", ".join(f"{count} {kind}" for kind, count in sorted(self.requests.items()))
        early = " (ended early)" if self.ended_early else ""
        return (
            f"{self.took_s / 60:.1f} minutes{early}, seed {self.options.seed}, "
            f"{self.options.adapters} adapters: {asked}; changes: {kinds}; {self.kills} kills; "
            f"{self.found} findings"
        )


def soak(options: Options) -> Report:
    """Run it. Ctrl-C ends it early, with the checks of the end."""
    weights = weight_sets()
    with tempfile.TemporaryDirectory(prefix="lorry-soak-") as folder:
        port = free_port()
        command = lorry_command(weights.ground.model, port, Path(folder) / "state", *FLAGS)
        with ServerProcess(command, port) as server:
            return asyncio.run(Soak(options, weights, server, Path(folder)).run())


class Soak:
    """The run's parts and its order."""

    def __init__(
        self, options: Options, weights: WeightSets, server: ServerProcess, folder: Path
    ) -> None:
        """The server runs already."""
        self._options = options
        self._server = server
        names = [f"adapter-{number:03}" for number in range(options.adapters)]
        random.Random(options.seed).shuffle(names)
        self._ledger = Ledger(names)
        self._findings = Findings()
        self._client = httpx.AsyncClient(
            base_url=server.url,
            timeout=CLIENT_TIMEOUT_S,
            trust_env=False,
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=64),
        )
        shared = self._client, weights, self._ledger, self._findings
        self._traffic = Traffic(*shared)
        self._changes = Changes(*shared, folder / "adapters")
        self._odd = Odd(self._client, self._ledger, self._findings)
        self._watch = Watch(server)
        self._ending = Ending(*shared, server)
        self._report = Report(options)
        self._zipf = list(itertools.accumulate(1 / rank for rank in range(1, len(names) + 1)))
        self._stop = asyncio.Event()

    async def run(self) -> Report:
        """Register, run, then see whether all is as it should be."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._end_early)
        began_s = time.monotonic()
        async with self._client:
            await self._register()
            sides = [asyncio.create_task(task) for task in (self._watch.run(), self._tell())]
            await self._work()
            for side in sides:
                side.cancel()
            self._watch.sample()
            await self._ending.check(self._options.settle_s)
        grown, self._report.lives = self._watch.judge()
        for text in grown:
            self._findings.add(text)
        self._report.took_s = time.monotonic() - began_s
        return self._finish()

    def _end_early(self) -> None:
        self._report.ended_early = True
        self._stop.set()

    def _finish(self) -> Report:
        self._count()
        self._report.findings, self._report.found = self._findings.texts, self._findings.count
        return self._report

    def _count(self) -> None:
        self._report.requests = self._traffic.counts + self._odd.counts + self._ending.counts
        self._report.changes = self._changes.counts

    async def _register(self) -> None:
        """Most names, before anything else happens."""
        drawn = random.Random(f"{self._options.seed} register")
        entries = list(self._ledger.entries.values())
        chosen = iter(drawn.sample(entries, int(REGISTERED * len(entries))))

        async def some() -> None:
            for entry in chosen:
                await self._changes.register(drawn, entry)

        await asyncio.gather(*(some() for _ in range(4)))

    async def _work(self) -> None:
        """Clients until the time is up, and the kills between."""
        kills = asyncio.create_task(self._kill_now_and_then())
        clients = [asyncio.create_task(self._act(n)) for n in range(self._options.clients)]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), self._options.seconds)
        self._stop.set()
        await asyncio.gather(*clients, kills)

    async def _act(self, number: int) -> None:
        drawn = random.Random(f"{self._options.seed} client {number}")
        while not self._stop.is_set():
            draw = drawn.random()
            if draw < 0.90:
                name = None if drawn.random() < 0.08 else self._popular(drawn)
                await self._traffic.ask(self._traffic.draw(drawn, name))
            elif draw < 0.92:
                await self._odd.leave(drawn, self._popular(drawn))
            elif draw < 0.94:
                await self._odd.bad(drawn)
            elif draw < 0.945:
                await self._changes.unpin(drawn)
            else:
                entries = self._ledger.entries
                name = self._popular(drawn) if drawn.random() < 0.5 else drawn.choice([*entries])
                await self._changes.any(drawn, entries[name])

    def _popular(self, drawn: random.Random) -> str:
        return drawn.choices([*self._ledger.entries], cum_weights=self._zipf)[0]

    async def _kill_now_and_then(self) -> None:
        """Engine kills at even distances."""
        for _ in range(self._options.kills):
            pause_s = self._options.seconds / (self._options.kills + 1)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause_s)
            if self._stop.is_set():
                return
            await self._kill()

    async def _kill(self) -> None:
        loss = Loss(time.monotonic())
        self._ledger.losses.append(loss)
        pid = self._server.engine_pid()
        psutil.Process(pid).kill()
        self._report.kills += 1
        deadline_s = loss.began_s + BACK_S
        while time.monotonic() < deadline_s:
            await asyncio.sleep(0.1)
            if self._report.kills == await self._ending.engine_losses() and await self._is_ready():
                break
        else:
            self._findings.add(f"the engine was not back {BACK_S:g} s after its kill")
        loss.over_s = time.monotonic() + AFTER_LOSS_S

    async def _is_ready(self) -> bool:
        return (await self._client.get("/ready")).status_code == 200

    async def _tell(self) -> None:
        began_s = time.monotonic()
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._count()
            counts, changes = self._report.requests, sum(self._report.changes.values())
            print(
                f"{time.monotonic() - began_s:6.0f} s: {counts['requests']} requests, "
                f"{counts['checked']} answers checked, {changes} changes, "
                f"{self._report.kills} kills, {self._findings.count} findings",
                flush=True,
            )


def lines(report: Report) -> Sequence[str]:
    """The end of the output: processes, then the figures."""
    return [*report.lives, str(report)]
