"""`python -m tests.simulation.shell --seeds 3000`, `--seeds 100..200`, or `--seed 7 --trace`."""

import argparse
import sys
import time

from tests.simulation.shell.life import run
from tests.simulation.world import Violation


def main() -> int:
    """1 when a seed found something."""
    parser = argparse.ArgumentParser(description="the server under virtual time, seed by seed")
    parser.add_argument("--seeds", default="200", help="how many, or FIRST..END")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    asked = parser.parse_args()
    began, steps, found = time.monotonic(), 0, 0
    seeds = [asked.seed] if asked.seed is not None else _range(asked.seeds)
    for done, seed in enumerate(seeds, 1):
        try:
            steps += run(seed, print if asked.trace else None).steps
        except Violation as violation:
            found += 1
            print(violation, flush=True)
        if done % 100 == 0:
            print(f"{done} seeds, {steps} steps, {found} found", flush=True)
    took_s = time.monotonic() - began
    print(f"level 2: {len(seeds)} seeds, {steps} steps, {found} violations, {took_s:.0f} s")
    return bool(found)


def _range(text: str) -> range:
    first, dots, end = text.partition("..")
    return range(int(first), int(end)) if dots else range(int(first))


if __name__ == "__main__":
    sys.exit(main())
