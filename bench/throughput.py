"""Throughput of servers side by side: tokens per second by concurrency and by the number of
adapters in the mix.

Each system is started by this program, alone on the machine, drives the same requests, and is
stopped before the next begins; rounds alternate their order (A B, B A). A system's speed counts
only if its answers are right: the gate compares a mixed batch of base and every adapter with
transformers + PEFT. Our own failing the gate ends the bench; a peer's faults are printed beside its
figures."""

import argparse
import asyncio
import random
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.load import TIMEOUT_S, Load, Sample, Scenario, measure, post_all
from bench.models import GATE_LOGPROB_TOLERANCE, BenchModels, bench_models
from bench.report import GateReport, gate_line, sample_line, save, table
from bench.systems import BASE_NAME, OURS, System, built_in_systems
from tests.fixtures.server_process import ServerProcess, free_port


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if our own answers are wrong."""
    options = _parser().parse_args(arguments)
    models = bench_models(options.cache)
    systems = _chosen_systems(options, models)
    scenarios = [Scenario(a, c) for a in options.adapters for c in options.concurrent]
    samples: list[Sample] = []
    gates: list[GateReport] = []
    for turn in range(options.rounds):
        for system in systems if turn % 2 == 0 else reversed(systems):
            for slots in sorted({scenario.slots for scenario in scenarios}):
                mine = [scenario for scenario in scenarios if scenario.slots == slots]
                with _served(system, slots, options.threads) as url:
                    gates.append(_load_and_check(url, system.name, models, mine))
                    if gates[-1].wrong and system.name.startswith(OURS):
                        return 1
                    samples += _measure_all(url, system.name, models, mine, turn, options)
    report = table([system.name for system in systems], scenarios, samples, gates)
    print(report)
    print(f"results: {save(vars(options), samples, gates, report)}")
    return 0


def _measure_all(
    url: str,
    system: str,
    models: BenchModels,
    scenarios: Sequence[Scenario],
    turn: int,
    options: argparse.Namespace,
) -> Iterator[Sample]:
    """Every scenario, `repeats` times, after one unmeasured run that warms the system up."""
    load = Load(_range(options.prompt_tokens), options.output_tokens, options.waves)
    for scenario in scenarios:
        names = list(models.adapters(scenario.adapters)) or [BASE_NAME]
        warm_up = Load((8, 8), 4, 1)
        measure(url, system, scenario, warm_up, names, turn, seed=f"warm-up {turn} {scenario}")
        for repeat in range(options.repeats):
            seed = f"{turn} {repeat} {scenario}"  # the same for every system, new each time
            sample = measure(url, system, scenario, load, names, turn, seed)
            print(sample_line(sample), flush=True)
            yield sample


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    cache = Path.home() / ".cache" / "lorry-bench"
    parser.add_argument("--cache", type=Path, default=cache, help="folder of the bench's model")
    parser.add_argument(
        "--systems",
        default=f"{OURS},vllm-bf16,vllm-fp32",
        help=f"any of {', '.join(built_in_systems())}",
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="one more system; {model}, {port} and {slots} in the command are filled in",
    )
    parser.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a server that runs already, base served as 'smol', with enough slots",
    )
    parser.add_argument("--adapters", type=_numbers, default=(0, 1, 4, 32), metavar="N,N")
    parser.add_argument("--concurrent", type=_numbers, default=(1, 8, 32), metavar="N,N")
    parser.add_argument("--prompt-tokens", default="8-128", metavar="LEAST-MOST")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--waves", type=int, default=1, help="requests per client")
    parser.add_argument("--repeats", type=int, default=3, help="per scenario and round")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each system")
    parser.add_argument("--threads", type=int, default=None, help="OMP_NUM_THREADS of the servers")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    return int(least), int(most or least)


def _chosen_systems(options: argparse.Namespace, models: BenchModels) -> list[System]:
    known = built_in_systems()
    names = [name for name in options.systems.split(",") if name]
    unknown = set(names) - known.keys()
    if unknown:
        raise SystemExit(f"unknown systems {sorted(unknown)}; there are {sorted(known)}")
    chosen = [known[name].at(models.model) for name in names]
    for each in options.server:
        name, _, command = each.partition("=")
        chosen.append(System(name, tuple(shlex.split(command)), ready="/health").at(models.model))
    for each in options.url:
        name, _, url = each.partition("=")
        chosen.append(System(name, (), url=url))
    return chosen


@contextmanager
def _served(system: System, slots: int, threads: int | None) -> Iterator[str]:
    """The address of the system, started unless it runs already."""
    if system.url:
        yield system.url
        return
    port = free_port()
    environment = dict(system.environment)
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory(prefix="lorry-bench-") as state:
        command = system.command_for(port, slots, Path(state))
        print(f"starting {system.name}: {shlex.join(command)}", flush=True)
        began = time.monotonic()
        with ServerProcess(
            command, port, ready=system.ready, environment=environment, start_deadline_s=300
        ) as server:
            print(f"{system.name} is ready after {time.monotonic() - began:.1f} s", flush=True)
            yield server.url


def _load_and_check(
    url: str, system: str, models: BenchModels, scenarios: Sequence[Scenario]
) -> GateReport:
    _load_adapters(url, models, max(scenario.adapters for scenario in scenarios))
    report = _gate(url, system, models, scenarios[0].slots)
    print(gate_line(report), flush=True)
    return report


def _load_adapters(url: str, models: BenchModels, count: int) -> None:
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        for name, path in models.adapters(count).items():
            body = {"lora_name": name, "lora_path": str(path)}
            response = client.post("/v1/load_lora_adapter", json=body)
            if response.status_code != 200 and "already been loaded" not in response.text:
                raise SystemExit(f"{name} could not be loaded: {response.text}")


def _gate(url: str, system: str, models: BenchModels, slots: int) -> GateReport:
    """Base and every loaded adapter in one batch, the base several times."""
    answers = models.gate()
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        loaded = {card["id"] for card in client.get("/v1/models").json()["data"]}
    names = [name for name in answers if name in loaded]
    mixed = ["base"] * max(4, len(names) // 4) + names
    random.Random(0).shuffle(mixed)
    bodies = [
        {
            "model": BASE_NAME if name == "base" else name,
            "prompt": list(answers[name].prompt),
            "max_tokens": len(answers[name].tokens),
            "temperature": 0,
            "logprobs": 1,
            "return_token_ids": True,
        }
        for name in mixed
    ]
    found, _ = asyncio.run(post_all(url, [[body] for body in bodies]))
    wrong = [
        name
        for name, body in zip(mixed, found, strict=True)
        if not _is_right(body["choices"][0], answers[name].tokens, answers[name].logprobs)
    ]
    return GateReport(system, slots, len(mixed), tuple(wrong))


def _is_right(choice: dict[str, Any], tokens: Sequence[int], logprobs: Sequence[float]) -> bool:
    given = choice["logprobs"]["token_logprobs"]
    near = all(abs(a - b) < GATE_LOGPROB_TOLERANCE for a, b in zip(given, logprobs, strict=True))
    return near and tuple(choice.get("token_ids", tokens)) == tuple(tokens)
