"""`python -m tests.simulation --seeds 2000`, `--seeds 100..200`, or `--seed 7 --trace`."""

import argparse
import sys
import time

from tests.simulation.world import Violation, run


def main() -> int:
    """0 when no seed finds anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="one world")
    parser.add_argument("--seeds", default="200", help="N, or FIRST..LAST")
    parser.add_argument("--trace", action="store_true", help="print every event and command")
    parser.add_argument("--steps", type=int, help="stop after so many events")
    parser.add_argument(
        "--keep-going", action="store_true", help="do not stop at the first finding"
    )
    arguments = parser.parse_args()
    seeds = [arguments.seed] if arguments.seed is not None else seeds_of(arguments.seeds)
    began_s, steps, findings = time.process_time(), 0, 0
    for seed in seeds:
        try:
            steps += run(seed, print if arguments.trace else None, arguments.steps).steps
        except Violation as finding:
            findings += 1
            print(str(finding).splitlines()[0] if arguments.keep_going else finding)
            if not arguments.keep_going:
                break
    seconds = time.process_time() - began_s
    print(
        f"{len(seeds)} seeds, {steps} events, {findings} findings, {seconds:.1f} s of CPU, "
        f"{steps / seconds:.0f} events/s"
    )
    return 1 if findings else 0


def seeds_of(text: str) -> range:
    """`200` is 0 to 199; `5..9` is 5 to 9."""
    first, dots, last = text.partition("..")
    return range(int(first), int(last) + 1) if dots else range(int(first))


if __name__ == "__main__":
    sys.exit(main())
