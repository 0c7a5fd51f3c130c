"""`python -m tests.soak --minutes 20`: hours of field use in minutes, every answer checked.

Zipf traffic over 300 adapters with room for 8 in slots and 64 in memory, while they are loaded,
replaced, rolled back, pinned and unloaded, clients hang up and send nonsense, and the engine's
process is killed. Ends with one line of figures; the exit status is 1 when anything was wrong.
"""

import argparse
import sys

from tests.soak.soak import Options, lines, soak


def main() -> int:
    """0 when nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of what the clients do (default: 0)")
    parser.add_argument("--adapters", type=int, default=300, help="names (default: 300)")
    parser.add_argument("--clients", type=int, default=16, help="calls at a time (default: 16)")
    parser.add_argument("--kills", type=int, default=2, help="of the engine (default: 2)")
    given = parser.parse_args()
    options = Options(given.minutes * 60, given.seed, given.adapters, given.clients, given.kills)
    print(f"soak of {given.minutes:g} minutes, seed {given.seed}; Ctrl-C ends it early", flush=True)
    report = soak(options)
    for line in lines(report):
        print(line)
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
