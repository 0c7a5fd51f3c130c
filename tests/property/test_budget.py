"""Budgets: never beyond the limits, never below nothing, and back to nothing in the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorry.errors import BrokenInvariant
from lorry.ids import VersionId
from lorry.lifecycle.budget import Budget

STEPS = st.lists(
    st.tuples(st.booleans(), st.sampled_from([VersionId(d) for d in "12345"]), st.integers(0, 9))
)


@given(steps=STEPS, versions_max=st.integers(1, 4), bytes_max=st.integers(1, 20))
def test_promise_4_a_budget_is_kept_whatever_is_asked(
    steps: list[tuple[bool, VersionId, int]], versions_max: int, bytes_max: int
) -> None:
    budget = Budget(versions_max, bytes_max)
    held: dict[VersionId, int] = {}
    for reserves, version, size in steps:
        fits = version not in held and budget.fits(size)
        if reserves and fits:
            budget.reserve(version, size)
            held[version] = size
        elif not reserves and version in held:
            budget.release(version)
            del held[version]
        else:
            with pytest.raises(BrokenInvariant):
                (budget.reserve(version, size) if reserves else budget.release(version))
        assert (budget.count, budget.bytes) == (len(held), sum(held.values()))
        assert budget.count <= versions_max and budget.bytes <= bytes_max
        assert all(budget.holds(version) for version in held)
    for version in held:
        budget.release(version)
    assert (budget.count, budget.bytes) == (0, 0)


@given(size=st.integers(0, 30), taken=st.integers(0, 20))
def test_it_fits_exactly_when_the_sum_is_within_the_limit(size: int, taken: int) -> None:
    budget = Budget(2, 20)
    budget.reserve(VersionId("1"), taken)
    assert budget.fits(size) == (taken + size <= 20)
