"""Whether what happens to one adapter stays with it: loads beside a drain, the base model beside
adapters that come and go, a cold adapter beside hot ones, many clients on the same names.

Each measure has a bound, and the bench ends with 1 when one does not hold. What is compared is
measured in one run on one server, by turns."""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import isolation_parts as parts
from bench.calls import calls
from bench.measures import Measure, median_of, table
from bench.report import keep
from lorry.cli.demo import ADAPTERS, DemoMissing, adapter_folder, model_file
from tests.fixtures.common_ground import common_ground
from tests.fixtures.server_process import ServerProcess, free_port, lorry_command

BASE = "base"
HOT = [f"hot{index}" for index in range(8)]
PARTS = ("drain", "churn", "cold", "rounds", "random")
LEASE_S = 10.0
SHORT_LEASE_S = 3.0


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and adapters for it."""

    label: str
    model: Path
    folders: tuple[Path, ...]
    """Of three adapters or more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The bench's exit status."""
    options = _options(arguments)
    measures: list[Measure] = []
    for part in options.parts.split(","):
        for measure in _run(part, options):
            measures.append(measure)
            _say(f"{'holds' if measure.holds else 'FAILS'}  {measure.what}: {measure.value:.2f}")
    report = table(measures)
    _say(f"\n{report}\n")
    found = {"measures": [{**asdict(one), "holds": one.holds} for one in measures]}
    _say(f"kept in {keep('isolation', vars(options), found, report)}")
    return 0 if all(one.holds for one in measures) else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.isolation", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="all of them by default")
    parser.add_argument("--models", default="tiny,real", help="for drain and churn (tiny,real)")
    parser.add_argument("--repeats", type=int, default=3, help="of drain and churn (3)")
    parser.add_argument("--operations", type=int, default=200, help="loads on each side (200)")
    parser.add_argument("--requests", type=int, default=200, help="to the base, each side (200)")
    parser.add_argument("--cold", type=int, default=30, help="requests to the cold adapter (30)")
    parser.add_argument("--turns", type=int, default=1, help="times that four wait at once (1)")
    parser.add_argument("--seconds", type=float, default=15, help="of the random clients (15)")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts.split(",")) - set(PARTS):
        parser.error(f"no such parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return options


def _run(part: str, options: argparse.Namespace) -> Iterator[Measure]:
    """One part, on each model that it is for."""
    if part in ("drain", "churn"):
        for subject in _subjects(options.models.split(",")):
            repeats = [_compare(part, subject, options) for _ in range(options.repeats)]
            for found in zip(*repeats, strict=True):
                yield median_of(f"{subject.label}: {found[0].what}", found)
    elif part == "random":
        yield from asyncio.run(_at_random(options.seconds))
    else:
        yield from asyncio.run(_crowd(part, options))


def _subjects(labels: Sequence[str]) -> Iterator[Subject]:
    if "tiny" in labels:
        ground = common_ground()
        yield Subject("tiny", ground.model, tuple(ground.adapter(name) for name in "ABC"))
    if "real" in labels:
        try:
            folder = adapter_folder()
            yield Subject("real", model_file(), tuple(folder / name for name in ADAPTERS))
        except DemoMissing as missing:
            _say(f"without the real model: {missing}")


def _compare(part: str, subject: Subject, options: argparse.Namespace) -> list[Measure]:
    async def drive(url: str) -> list[Measure]:
        async with calls(url) as server:
            await server.load("warm", subject.folders[0])
            await server.unload("warm")
            if part == "drain":
                return await parts.drain(server, subject.folders, options.operations, 1900)
            return await parts.churn(server, subject.folders, BASE, options.requests)

    with _serve(subject.model, "--max-loras", "4", "--max-cpu-loras", "8") as server:
        return asyncio.run(drive(server.url))


async def _crowd(part: str, options: argparse.Namespace) -> list[Measure]:
    """Eight hot adapters on a server that has room for eight."""
    ground = common_ground()
    lease_s = LEASE_S if part == "cold" else SHORT_LEASE_S
    flags = ("--max-loras", "8", "--max-cpu-loras", "8", "--request-timeout", f"{lease_s:g}")
    with _serve(ground.model, *flags) as process:
        async with calls(process.url) as server:
            if part == "cold":
                await server.load("cold", ground.adapter("A"))
            for index, name in enumerate(HOT):
                await server.load(name, ground.adapter(f"T{index}"))
            if part == "cold":
                return await parts.cold(server, HOT, "cold", options.cold, lease_s)
            cold_ones = [(f"cold-{name}", ground.adapter(name)) for name in "ABCD"]
            return await parts.rounds(server, HOT, cold_ones, lease_s, options.turns)


async def _at_random(seconds: float) -> list[Measure]:
    ground = common_ground()
    with _serve(ground.model, "--max-loras", "4", "--max-cpu-loras", "4") as process:
        async with calls(process.url) as server:
            return await parts.at_random(server, ground, seconds)


@contextmanager
def _serve(model: Path, *flags: str) -> Iterator[ServerProcess]:
    """A server of its own for each part, on an empty state."""
    port = free_port()
    common = ("--served-model-name", BASE, "--max-lora-rank", "16", "--dtype", "float32")
    sizes = ("--kv-cache-bytes", "512MiB", "--max-model-len", "2048")
    with tempfile.TemporaryDirectory() as state:
        command = lorry_command(model, port, Path(state), *common, *sizes, *flags)
        with ServerProcess(command, port, environment={}, own_session=False) as server:
            yield server


def _say(line: str) -> None:
    """To the terminal, at once."""
    print(line, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
