"""`python -m tests.crash`: kill a server at every durable step of every operation, start it again
and check. `--only load --stride 5` for some of them."""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.crash.operations import OPERATIONS
from tests.crash.planted import PLANTS
from tests.crash.runs import Crashes, Tally
from tests.crash.world import oracle_in



def main() -> int:
    """0 when every crash point survives."""
    arguments = _arguments()
    began_s, whole = time.monotonic(), Tally()
    with tempfile.TemporaryDirectory(prefix="lorry-crash-") as folder:
        oracle = oracle_in(Path(folder) / "oracle")
        for name in arguments.only or OPERATIONS:
            crashes = Crashes(
                name, Path(folder) / "place", oracle, PLANTS.get(arguments.plant, lambda: None)
            )
            _run(crashes, arguments)
            tally = crashes.tally
            print(
                f"{name}: {tally.steps} steps, {tally.points} crash points "
                f"({tally.seconds} of them during a restart), {len(tally.findings)} findings, "
                f"{time.monotonic() - began_s:.0f} s",
                flush=True,
            )
            whole.steps += tally.steps
            whole.points += tally.points
            whole.seconds += tally.seconds
            whole.findings += tally.findings
            if arguments.first and whole.findings:
                break
    print(
        f"{whole.points} crash points of {whole.steps} steps, {whole.seconds} of them during a "
        f"restart: {len(whole.findings)} findings, {time.monotonic() - began_s:.0f} s"
    )
    return 1 if whole.findings else 0


def _run(crashes: Crashes, arguments: argparse.Namespace) -> None:
    for place, point in enumerate(crashes.points()):
        if arguments.list:
            print("  {0} #{1}".format(*point))
        if (place + arguments.first_step) % arguments.stride:
            continue
        for finding in crashes.kill_at(point, twice=arguments.twice):
            print(finding, flush=True)
            crashes.tally.findings.append(finding)
        if arguments.first and crashes.tally.findings:
            return


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
    parser.add_argument("--first", action="store_true", help="stop at the first finding")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="a bug that has to be found")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
