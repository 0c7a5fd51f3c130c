"""How long a trainer's replacement of an adapter takes, by weights that come with the request.

The tiny model of the tests serves; while clients stream from the adapter, its weights are replaced
again and again. Every stream must be wholly one version's, by the oracle (transformers + PEFT), and
memory must stay flat; else the bench ends with 1. The median is stated beside what nobody can do
without: one `load_file` of the same bytes and one copy of each tensor."""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.fixtures.common_ground import CommonGround, common_ground
from tests.fixtures.server_process import ServerProcess, free_port, lorry_command
from tests.fixtures.trainer import FLAGS, Report, run, weights_of

GROWTH_MAX = 0.05
QUIET_ROUNDS = 100
COPIES = 200


def main(arguments: Sequence[str] | None = None) -> int:
    """The bench's exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.replacements", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="replacements (300)")
    parser.add_argument("--streams", type=int, default=16, help="streams that run meanwhile (16)")
    options = parser.parse_args(arguments)
    if options.rounds < QUIET_ROUNDS or options.streams < 1:
        parser.error(f"--rounds must be {QUIET_ROUNDS} or more, --streams 1 or more")
    ground = common_ground()
    size = weights_of(ground).stat().st_size
    out(f"{size} bytes of weights; load average {os.getloadavg()[0]:.2f}")
    out(f"load_file + copy of them          {floor_ms(weights_of(ground)):8.2f} ms")
    sound = True
    for durable in ("true", "false"):
        with tempfile.TemporaryDirectory() as folder, serve(ground, Path(folder)) as server:
            quiet = run(server, ground, QUIET_ROUNDS, 0, durable=durable)
            tell(f"durable={durable}, no streams", quiet)
            busy = run(server, ground, options.rounds, options.streams, durable=durable)
            tell(f"durable={durable}, {options.streams} streams", busy)
            sound = judge(busy) and sound
    return 0 if sound else 1


def floor_ms(weights: Path) -> float:
    """Median of one `load_file` and one copy of each tensor, in this process."""
    from safetensors.torch import load_file

    found = []
    for _ in range(COPIES):
        began = time.perf_counter()
        copies = [tensor.clone() for tensor in load_file(weights).values()]
        found.append((time.perf_counter() - began) * 1000)
        del copies
    return statistics.median(found)


def serve(ground: CommonGround, state: Path) -> ServerProcess:
    """A server of the tiny model; a context manager."""
    port = free_port()
    flags = ("--max-lora-rank", "16", "--dtype", "float32", "--kv-cache-bytes", "128MiB", *FLAGS)
    return ServerProcess(lorry_command(ground.model, port, state, *flags), port)


def tell(label: str, report: Report) -> None:
    """The figures of one loop."""
    times = sorted(one * 1000 for one in report.publish_s)
    out(
        f"{label:32}  {report.median_ms:8.2f} ms median, p95 "
        f"{times[int(len(times) * 0.95)]:.1f}, most {times[-1]:.1f} ({len(times)} replacements)"
    )


def judge(report: Report) -> bool:
    """Whether streams and memory are as they must be."""
    growth = report.growth()
    mib = report.resident_bytes[-1] / (1 << 20)
    out(
        f"    {report.streams} streams, {len(report.wrong)} of them not wholly one version's; "
        f"memory {mib:.0f} MiB, {growth:+.1%} after the warm-up"
    )
    return not report.wrong and growth < GROWTH_MAX


def out(line: str) -> None:
    """To the terminal, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
