"""One server as the crash tests run it: real app, supervisor, registry and disk cache around a fake
engine whose answers come from the bytes of the files that it was given, so that weights which are
stale, torn or another adapter's show."""

import hashlib
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorry.artifacts.cache import DiskCache
from lorry.artifacts.reading import WEIGHTS_FILE
from lorry.clock import Clock
from lorry.engine import GenerateRequest, LoadReport, LoraVersion, SamplingParams, TokenChunk
from lorry.engines.fake_script import FakeSettings, fake_chunks
from lorry.ids import EngineId, VersionId
from lorry.supervisor import SupervisorSettings
from lorry.supervisor.shell import Shell
from tests.crash.steps import Steps
from tests.fixtures.adapters import good_adapter
from tests.fixtures.http_server import BASE, HttpServer, TinyFake, http_server
from tests.fixtures.waiting import until

PROMPT = (5, 6, 7)
SEEDS = range(1, 9)
PASSING = {
    *("state", "tier", "slot", "leases", "waiting", "reason", "waits_for", "residency"),
    *("updated", "object", "short_version"),
}
"""What GET says of an adapter that no restart has to keep."""

Facts = dict[str, dict[str, Any]]
"""What is registered, by name."""


class ReadingFake(TinyFake):
    """The fake, made to compute from what it reads, and to tell of each command."""

    def __init__(self, settings: FakeSettings, steps: Steps | None) -> None:
        """`steps` are told of commands and answers."""
        super().__init__(settings)
        self._steps = steps
        self._read: dict[EngineId, VersionId] = {}

    async def add_lora(self, version: LoraVersion) -> LoadReport:
        """Reads the weights, as an engine does."""
        self._tell("add_lora, before it is sent")
        self._read[version.engine_id] = digest_of(version.path)
        report = await super().add_lora(version)
        self._tell("add_lora, done and not answered")
        return report

    async def remove_lora(self, engine_id: EngineId) -> bool:
        """As the fake does."""
        self._tell("remove_lora, before it is sent")
        there = await super().remove_lora(engine_id)
        self._tell("remove_lora, done and not answered")
        return there

    async def pin_lora(self, engine_id: EngineId, pinned: bool) -> None:
        """As the fake does."""
        self._tell("pin_lora, before it is sent")
        await super().pin_lora(engine_id, pinned)
        self._tell("pin_lora, done and not answered")

    def _script(self, request: GenerateRequest) -> Iterator[TokenChunk]:
        read = None if request.engine_id is None else self._read[request.engine_id]
        return fake_chunks(request, read, self.settings, self.seed)

    def _tell(self, what: str) -> None:
        if self._steps is not None:
            self._steps.take(f"engine: {what}")


def digest_of(folder: Path) -> VersionId:
    """What the fake's answers depend on: every byte of the weights."""
    return VersionId(hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest())


@dataclass(frozen=True, slots=True)
class Oracle:
    """The adapters of the crash tests, and what each of them answers."""

    folder: Path
    versions: Mapping[int, VersionId]
    digests: Mapping[VersionId, VersionId]

    def source(self, seed: int) -> str:
        """A folder that nobody changes."""
        return str(self.folder / f"adapter-{seed}")

    def tokens(self, version: VersionId | None) -> list[int]:
        """The right answer."""
        digest = None if version is None else self.digests[version]
        request = GenerateRequest("r", PROMPT, SamplingParams(max_tokens=4, temperature=0.0))
        chunks = fake_chunks(request, digest, FakeSettings())
        return [token for chunk in chunks for token in chunk.token_ids]


def oracle_in(folder: Path) -> Oracle:
    """Writes the adapters, and judges each in a disk cache of its own."""
    base = TinyFake().capabilities().base
    cache = DiskCache(folder / "judged", None)
    versions, digests = {}, {}
    for seed in SEEDS:
        source = good_adapter(seed).write(folder / f"adapter-{seed}")
        snapshot = cache.snapshot("oracle", source, base, 64)
        versions[seed] = snapshot.manifest.version
        digests[snapshot.manifest.version] = digest_of(snapshot.path)
    return Oracle(folder, versions, digests)


ROOMY = FakeSettings(max_loras=3, max_cpu_loras=4)


@dataclass(slots=True)
class Options:
    """How an operation wants its server."""

    fake: FakeSettings = ROOMY
    cache_bytes: int | None = None
    follow: bool = False
    """Whether the folder `followed` beside the state is followed."""
    learn: bool = False
    """Whether unknown names are looked up among the oracle's sources."""


@dataclass(slots=True)
class World:
    """A running server."""

    http: HttpServer
    oracle: Oracle
    place: Path
    pending: "Pending"

    async def settled(self) -> None:
        """Return once nothing that was begun goes on."""
        supervisor = self.http.service.supervisor
        running = supervisor._shell.book.running
        await until(lambda: all(following._met for following in supervisor._following))
        await until(lambda: self.pending.count == 0 and running() == 0)

    async def answer(self, model: str) -> list[int] | str:
        """The tokens of an answer, or the code of its error."""
        answer = await self.http.complete(
            model=model, prompt=list(PROMPT), ignore_eos=True, return_token_ids=True
        )
        body = answer.json()
        if answer.status_code != 200:
            return str(body["error"]["code"])
        tokens: list[int] = body["choices"][0]["token_ids"]
        return tokens

    async def facts(self) -> Facts:
        """What is registered."""
        listed = (await self.http.client.get("/v1/adapters")).json()["data"]
        return {one["name"]: lasting(one) for one in listed}


def lasting(shape: Mapping[str, Any]) -> dict[str, Any]:
    """What a restart has to keep of an adapter."""
    kept = {key: value for key, value in shape.items() if key not in PASSING}
    kept["source"] = re.sub(r"^(upload|memory):[0-9a-f]+", r"\1:", kept["source"])
    return kept


@dataclass(slots=True)
class Pending:
    """How many tasks of the shell are under way."""

    count: int = 0

    @classmethod
    def watching(cls) -> "Pending":
        """One that counts already."""
        pending = cls()
        pending.watch()
        return pending

    def watch(self) -> None:
        """Count the tasks of every shell of this process from now on."""
        spawn = Shell._spawn

        def counted(shell: Shell, task: Any, *arguments: object) -> None:
            self.count += 1

            async def run() -> None:
                try:
                    await task(*arguments)
                finally:
                    self.count -= 1

            spawn(shell, run)

        Shell._spawn = counted  # type: ignore[method-assign]


@asynccontextmanager
async def world(
    place: Path,
    oracle: Oracle,
    options: Options,
    pending: Pending,
    steps: Steps | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[World]:
    """Start a server on the state in `place`."""
    patterns = (str(oracle.folder / "adapter-{name}"),) if options.learn else ()
    supervision = SupervisorSettings(
        reconcile_s=0.05,
        shutdown_s=1.0,
        adapter_dirs=(place / "followed",) if options.follow else (),
        adapter_dir_interval_s=0.01,
        resolvers=patterns,
    )
    async with http_server(
        place / "state",
        engine=ReadingFake(options.fake, steps),
        supervision=supervision,
        cache_bytes=options.cache_bytes,
        clock=clock,
        served_model_names=(BASE,),
        eos_token_ids=(),
    ) as http:
        yield World(http, oracle, place, pending)
