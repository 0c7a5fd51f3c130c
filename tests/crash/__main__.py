"""`python -m tests.crash`: kill a server at every durable step of every operation, start it again
and check. `--only load --stride 5` for some of them."""

import argparse
import gc
import logging
import sys
import tempfile
import time
from pathlib import Path

from tests.crash.operations import OPERATIONS
from tests.crash.planted import PLANTS
from tests.crash.runs import Crashes, Tally
from tests.crash.steps import words
from tests.crash.world import Oracle, oracle_in


def main() -> int:
    """0 when every crash point survives, or with `--planted` when every planted bug is found."""
    arguments = _arguments()
    logging.disable(logging.WARNING)  # a restart warns of what was lost, as it should
    with tempfile.TemporaryDirectory(prefix="lorry-crash-") as folder:
        oracle = oracle_in(Path(folder) / "oracle")
        gc.freeze()  # so that children neither look at nor copy what the parent imported
        place = Path(folder) / "place"
        return _planted(oracle, place) if arguments.planted else _all(arguments, oracle, place)


def _all(arguments: argparse.Namespace, oracle: Oracle, place: Path) -> int:
    began_s, whole = time.monotonic(), Tally()
    for name in arguments.only or OPERATIONS:
        crashes = Crashes(name, place, oracle)
        _run(crashes, arguments)
        tally = crashes.tally
        print(
            f"{name}: {tally.steps} steps, {tally.points} crash points "
            f"({tally.seconds} of them during a restart), {len(tally.findings)} findings, "
            f"{time.monotonic() - began_s:.0f} s",
            flush=True,
        )
        whole.add(tally)
    print(
        f"{whole.points} crash points of {whole.steps} steps, {whole.seconds} of them during a "
        f"restart: {len(whole.findings)} findings, {time.monotonic() - began_s:.0f} s"
    )
    return 1 if whole.findings else 0


def _run(crashes: Crashes, arguments: argparse.Namespace) -> None:
    for place, point in enumerate(crashes.points()):
        if arguments.list:
            print(f"  {words(point)}")
        if (place + arguments.first_step) % arguments.stride:
            continue
        for finding in crashes.kill_at(point, twice=arguments.twice):
            print(finding, flush=True)
            crashes.tally.findings.append(finding)


def _planted(oracle: Oracle, place: Path) -> int:
    missed = 0
    for name, plant in PLANTS.items():
        crashes = Crashes(plant.operation, place, oracle, plant.put_in)
        points = [point for point in crashes.points() if plant.step in words(point)]
        found = (finding for point in points for finding in crashes.kill_at(point, twice=False))
        first = next(found, None)
        missed += first is None
        print(f"{name}: {'missed' if first is None else f'found: {first}'}", flush=True)
    print(f"{len(PLANTS) - missed} of {len(PLANTS)} planted bugs found")
    return 1 if missed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=sorted(OPERATIONS), help="this one; may be repeated"
    )
    parser.add_argument("--stride", type=int, default=1, help="every so many steps")
    parser.add_argument("--first-step", type=int, default=0, help="where the stride begins")
    parser.add_argument(
        "--twice", action="store_true", help="kill the restart at each of its steps, too"
    )
    parser.add_argument("--list", action="store_true", help="print every step")
    parser.add_argument(
        "--planted", action="store_true", help="see that bugs are found which are put in"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
