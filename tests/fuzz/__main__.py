"""Mangled adapter folders, strange requests, and schemathesis over all routes.

`python -m tests.fuzz`, `--only folders --folders 100000`, or `--only folders --seed 94 --folders 1`
to see one again.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable

from tests.fuzz import folders, requests, routes
from tests.simulation.runner import leave_interrupts_alone

AT_ONCE = 250
"""Folders that a process takes at a time."""
SHOWN = 20
"""Findings that are printed."""


def main() -> int:
    """0 when nothing was found, 1 when something was, 130 when it was interrupted."""
    arguments = parse()
    parts: dict[str, Callable[[argparse.Namespace], bool]] = {
        "folders": fuzz_folders,
        "requests": fuzz_requests,
        "routes": fuzz_routes,
    }
    chosen = parts if arguments.only is None else {arguments.only: parts[arguments.only]}
    try:
        results = [part(arguments) for part in chosen.values()]
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    return 0 if all(results) else 1


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=("folders", "requests", "routes"))
    parser.add_argument("--folders", type=int, default=20_000, help="mangled adapter folders")
    parser.add_argument("--requests", type=int, default=3_000, help="strange requests")
    parser.add_argument("--seconds", type=int, default=120, help="for the routes")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    return parser.parse_args()


def fuzz_folders(arguments: argparse.Namespace) -> bool:
    """In several processes, with a line now and then."""
    seeds = range(arguments.seed, arguments.seed + arguments.folders)
    parts = [seeds[first : first + AT_ONCE] for first in range(0, len(seeds), AT_ONCE)]
    os.environ["OMP_NUM_THREADS"] = "1"  # the processes are as many as the cores
    total, told_s = folders.Figures(), time.monotonic()
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(arguments.jobs, len(parts)), leave_interrupts_alone) as pool:
        for figures in pool.imap_unordered(folders.run, parts):
            total.add(figures)
            if time.monotonic() - told_s > 10:
                told_s = time.monotonic()
                print(f"folders: {total.folders} of {len(seeds)}", file=sys.stderr)
    return told("folders", str(total), total.findings)


def fuzz_requests(arguments: argparse.Namespace) -> bool:
    """Against one server."""
    seeds = range(arguments.seed, arguments.seed + arguments.requests)
    figures = requests.run(seeds)
    return told("requests", str(figures), figures.findings)


def fuzz_routes(arguments: argparse.Namespace) -> bool:
    """By schemathesis, whose report is printed when it finds something."""
    code, text = routes.run(arguments.seconds, arguments.seed)
    bad = code != 0 or "at rest: " in text
    return told("routes", routes.figures(text), [text] if bad else [])


def told(part: str, figures: str, findings: list[str]) -> bool:
    """Print the end of a part; whether it is a good one."""
    for finding in findings[:SHOWN]:
        print(finding)
    print(f"{part}: {figures}", flush=True)
    return not findings


if __name__ == "__main__":
    sys.exit(main())
