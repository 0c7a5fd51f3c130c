"""Simulated worlds, each drawn from a seed: level 1 is the lifecycle core alone, level 2 the server
around it under virtual time.

`python -m tests.simulation --seeds 2000`, `--level 1 --seeds 100..200`, or
`--level 1 --seed 7 --trace`.
"""

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import closing

from tests.simulation.runner import (
    LEVELS,
    Figures,
    Progress,
    level,
    report,
    run_in_processes,
)
from tests.simulation.world import Violation

SEEDS_PER_SEED_TWO = 33
"""A world of level two costs that much more, roughly."""


def main() -> int:
    """0 when no seed finds anything, 1 when one does, 130 when it was interrupted."""
    arguments = parse()
    levels = LEVELS if arguments.level == "both" else (int(arguments.level),)
    if arguments.seed is not None:
        return max(run_one(number, arguments) for number in levels)
    code = 0
    for number in levels:
        code = code or run_many(number, seeds_for(number, arguments), arguments)
    return code


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--level", default="both", choices=("1", "2", "both"))
    parser.add_argument("--seed", type=int, help="one world")
    parser.add_argument("--seeds", type=seeds_of, default="200", help="N, or FIRST..LAST")
    parser.add_argument(
        "--seeds-two",
        type=seeds_of,
        help=f"the same for level 2; one for each {SEEDS_PER_SEED_TWO} of the others if not given",
    )
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens")
    parser.add_argument("--steps", type=int, help="with --seed: stop after so many events")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument(
        "--keep-going", action="store_true", help="do not stop at the first finding"
    )
    return parser.parse_args()


def seeds_of(text: str) -> range:
    """`200` is 0 to 199; `5..9` is 5 to 9."""
    first, dots, last = text.partition("..")
    return range(int(first), int(last) + 1) if dots else range(int(first))


def seeds_for(number: int, arguments: argparse.Namespace) -> range:
    """Of one level."""
    seeds: range = arguments.seeds
    if number == 2 and arguments.seeds_two is not None:
        two: range = arguments.seeds_two
        return two
    if number == 1 or arguments.level == "2":
        return seeds
    return range(seeds.start, seeds.start + max(1, len(seeds) // SEEDS_PER_SEED_TWO))


def run_one(number: int, arguments: argparse.Namespace) -> int:
    """One world, perhaps aloud."""
    trace: Callable[[str], None] | None = print if arguments.trace else None
    try:
        steps = level(number)(arguments.seed, trace, arguments.steps).steps
    except Violation as finding:
        print(report(number, arguments.seed, str(finding)))
        return 1
    print(f"level {number}: seed {arguments.seed}, {steps} events, no finding")
    return 0


def run_many(number: int, seeds: range, arguments: argparse.Namespace) -> int:
    """All of them, with progress; the figures come last, whatever happens."""
    total, progress, end = Figures(), Progress(number, len(seeds)), ""
    runs = run_in_processes(number, seeds, arguments.jobs, keep_going=arguments.keep_going)
    with closing(runs):
        try:
            for figures in runs:
                total.add(figures)
                print(*figures.findings, sep="\n", end="\n" if figures.findings else "")
                progress.tell(total)
                if total.findings and not arguments.keep_going:
                    break
        except KeyboardInterrupt:
            end = ", interrupted"
    print(f"level {number}: {total}, {total.cpu_s:.1f} s of CPU{end}")
    return 130 if end else min(1, len(total.findings))


if __name__ == "__main__":
    sys.exit(main())
