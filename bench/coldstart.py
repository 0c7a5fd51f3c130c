"""What the first request to an adapter that is only on the disk waits for, beyond what one to a
resident adapter waits for.

Each adapter is asked twice in a row, with fresh prompts of the same length: the first answer needs
its load, the second does not, and the difference is the load's price. More adapters than there is
room for take turns, so each is cold again when its turn comes; its files are dropped from the page
cache before. With `--beside` others stream from the base model meanwhile."""

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from bench.calls import Calls, Streamed, calls
from bench.isolation_parts import prompt
from bench.measures import Measure, percentile, table
from bench.models import bench_models
from bench.report import keep
from bench.systems import BASE_NAME
from tests.fixtures.common_ground import ADAPTERS, common_ground
from tests.fixtures.server_process import ServerProcess, free_port, lorry_command

ROOM = 8
"""Adapters that fit at a time; fewer than take turns."""
P50_BOUND_MS, P99_BOUND_MS = 5.0, 15.0
STREAM_TOKENS = 1500


def main(arguments: Sequence[str] | None = None) -> int:
    """The bench's exit status: 1 when a bound does not hold."""
    options = _options(arguments)
    model, folders = _subject(options)
    with tempfile.TemporaryDirectory() as state, _serve(model, Path(state)) as server:
        measures = asyncio.run(_drive(server.url, folders, Path(state), options))
    report = table(measures)
    print(report)
    found = {"measures": [{**asdict(one), "holds": one.holds} for one in measures]}
    print(f"kept in {keep('coldstart', vars(options), found, report)}")
    return 0 if all(one.holds for one in measures) else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.coldstart", description=__doc__)
    cache = Path.home() / ".cache" / "lorry-bench"
    parser.add_argument("--cache", type=Path, default=cache, help="folder of the bench's model")
    parser.add_argument("--adapters", type=int, default=30, help="that take turns (30)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (5)")
    parser.add_argument("--prompt-tokens", type=int, default=16, help="of each request (16)")
    parser.add_argument("--beside", type=int, default=0, help="streams from the base meanwhile (0)")
    parser.add_argument("--tiny", action="store_true", help="the tests' tiny model, for a glance")
    options = parser.parse_args(arguments)
    if options.adapters <= ROOM:
        parser.error(f"--adapters has to be more than {ROOM}, or none is ever cold")
    return options


def _subject(options: argparse.Namespace) -> tuple[Path, dict[str, Path]]:
    """A model, and adapters by name."""
    if options.tiny:
        ground = common_ground()
        return ground.model, {n: ground.adapter(n) for n in list(ADAPTERS)[: options.adapters]}
    models = bench_models(options.cache)
    return models.model, models.adapters(options.adapters)


@contextmanager
def _serve(model: Path, state: Path) -> Iterator[ServerProcess]:
    port = free_port()
    flags = ("--served-model-name", BASE_NAME, "--max-lora-rank", "16", "--max-model-len", "2048")
    room = ("--max-loras", str(ROOM), "--max-cpu-loras", str(ROOM), "--kv-cache-bytes", "512MiB")
    command = lorry_command(model, port, state, *flags, *room)
    with ServerProcess(command, port, environment={}, own_session=False) as server:
        yield server


async def _drive(
    url: str, folders: dict[str, Path], state: Path, options: argparse.Namespace
) -> list[Measure]:
    async with calls(url) as server:
        for name, folder in folders.items():
            await server.load(name, folder)
        drawn = random.Random(1)
        begun = asyncio.Event()
        tasks = [
            asyncio.create_task(server.keep_busy(BASE_NAME, prompt(drawn), STREAM_TOKENS, begun))
            for _ in range(options.beside)
        ]
        extra, warm = await _pairs(server, list(folders), state, options, drawn)
        if any(task.done() for task in tasks):
            raise SystemExit("a stream ended before the cold starts did; ask for fewer --rounds")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    beside = f" beside {options.beside} streams" if options.beside else ""
    detail = f"{len(extra)} pairs; warm p50 {percentile(warm, 0.5) * 1000:.1f} ms"
    what = f"cold minus warm TTFT{beside}"
    return [
        Measure(f"{what}, p50, ms", percentile(extra, 0.5) * 1000, P50_BOUND_MS, detail),
        Measure(f"{what}, p99, ms", percentile(extra, 0.99) * 1000, P99_BOUND_MS, detail),
    ]


async def _pairs(
    server: Calls, names: list[str], state: Path, options: argparse.Namespace, drawn: random.Random
) -> tuple[list[float], list[float]]:
    """Cold minus warm, and warm, of each pair in seconds."""
    extra: list[float] = []
    warm_s: list[float] = []
    for _ in range(options.rounds):
        for name in names:
            drop_from_page_cache(state)
            cold = await _first_token(server, name, drawn, options.prompt_tokens)
            warm = await _first_token(server, name, drawn, options.prompt_tokens)
            extra.append(cold - warm)
            warm_s.append(warm)
    return extra, warm_s


async def _first_token(server: Calls, name: str, drawn: random.Random, length: int) -> float:
    one = Streamed()
    await server.stream(name, prompt(drawn, length), 2, one)
    if one.error:
        raise SystemExit(f"{name}: {one.error}")
    return one.first_s


def drop_from_page_cache(folder: Path) -> None:
    """Every file below it, so that the next read comes from the disk."""
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
