"""docs/lifecycle.md is what the code says."""

from pathlib import Path

import pytest

from lorry.lifecycle.diagram import PARTS, diagram, invariants, refreshed
from lorry.lifecycle.invariants import RULES
from lorry.lifecycle.states import TRANSITIONS

PAGE = Path(__file__).parents[3] / "docs" / "lifecycle.md"


def test_the_made_parts_of_the_page_are_fresh() -> None:
    page = PAGE.read_text()
    assert refreshed(page) == page, "run: python -m lorry.lifecycle"


def test_the_diagram_has_every_move_of_the_table() -> None:
    drawn = diagram().splitlines()
    for (before, trigger), after in TRANSITIONS.items():
        assert f"    {before.name} --> {after.name}: {trigger}" in drawn


def test_every_invariant_has_its_number_and_sentence() -> None:
    lines = invariants().splitlines()
    assert len(lines) == len(RULES)
    for number, line in enumerate(lines, start=1):
        assert line.startswith(f"{number}. ")
        assert line.endswith(".")


@pytest.mark.parametrize("part", PARTS)
def test_a_page_without_the_marks_of_a_part_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match=f"<!-- {part} -->"):
        refreshed(PAGE.read_text().replace(f"<!-- {part} -->", ""))
