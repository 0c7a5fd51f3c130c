"""The parts of docs/lifecycle.md that are made from the code, so that they cannot be out of date:
the diagram from the table of moves, the invariants from their own sentences.

Texts in, texts out; `python -m lorry.lifecycle` reads and writes the file.
"""

from lorry.lifecycle.invariants import RULES
from lorry.lifecycle.states import HOLDING, LEASABLE, TRANSITIONS, State


def diagram() -> str:
    """The table of moves, for mermaid."""
    moves = [
        f"    {before.name} --> {after.name}: {trigger}"
        for (before, trigger), after in TRANSITIONS.items()
    ]
    first = f"    [*] --> {State.ON_DISK.name}: first seen"
    last = f"    {State.RETIRED.name} --> [*]"
    return "\n".join(["```mermaid", "stateDiagram-v2", first, *moves, last, "```"])


def states() -> str:
    """One row for each state: what is reserved and who may run."""
    rows = ["| state | budget is reserved | requests |", "|---|---|---|"]
    for state in State:
        running = "those that run go on" if state in LEASABLE else "none"
        requests = "admitted" if state is State.RESIDENT else running
        rows.append(f"| {state.name} | {'yes' if state in HOLDING else 'no'} | {requests} |")
    return "\n".join(rows)


def invariants() -> str:
    """The numbered rules, each with its sentence."""
    sentences = [" ".join((rule.__doc__ or "").split()) for rule in RULES]
    return "\n".join(f"{number}. {text}" for number, text in enumerate(sentences, start=1))


PARTS = {"diagram": diagram, "states": states, "invariants": invariants}
"""What stands between `<!-- NAME -->` and `<!-- end of NAME -->` in the page."""


def refreshed(page: str) -> str:
    """The page with every made part made anew; raises `ValueError` when a mark is missing."""
    for name, make in PARTS.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        head, found, rest = page.partition(begin)
        _, closed, tail = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"the page has no part between {begin.strip()} and {end.strip()}")
        page = head + begin + make() + "\n" + end + tail
    return page
