"""What a bench of isolation found: each measure with its bound, and whether it holds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the table."""

    what: str
    value: float
    bound: float
    """The most that the value may be."""
    detail: str
    """The figures it comes from, with how many there were."""

    @property
    def holds(self) -> bool:
        """False also for a value that is no number."""
        return self.value <= self.bound


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def compared(
    what: str, share: float, plain: Sequence[float], beside: Sequence[float], bound: float
) -> Measure:
    """How many times the plain percentile the other one is."""
    a, b = percentile(plain, share), percentile(beside, share)
    label = f"p{share * 100:g}"
    detail = f"{b * 1000:.1f} ms of {len(beside)} against {a * 1000:.1f} ms of {len(plain)}"
    return Measure(f"{what}, {label}, times", b / a if a else math.nan, bound, detail)


def median_of(what: str, repeats: Sequence[Measure]) -> Measure:
    """The middle one of several repeats of one measure, with the values of all."""
    middle = sorted(repeats, key=lambda one: one.value)[(len(repeats) - 1) // 2]
    values = ", ".join(f"{one.value:.2f}" for one in repeats)
    detail = middle.detail if len(repeats) == 1 else f"{middle.detail}; repeats: {values}"
    return Measure(what, middle.value, middle.bound, detail)


def table(measures: Sequence[Measure]) -> str:
    """In Markdown."""
    lines = ["| measure | found | bound | holds | from |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {m.what} | {m.value:.2f} | {m.bound:g} | {'yes' if m.holds else 'NO'} | {m.detail} |"
        for m in measures
    ]
    return "\n".join(lines)
