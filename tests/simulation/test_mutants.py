"""Each planted bug is found within the smoke seeds."""

import pytest

from tests.simulation.keeping_mutants import KEEPING_MUTANTS
from tests.simulation.mutants import MUTANTS, Plant
from tests.simulation.smoke import SMOKE_SEEDS
from tests.simulation.world import Violation, run

pytestmark = pytest.mark.timeout(180)
"""A bug that is found late takes most of the smoke seeds."""


@pytest.mark.parametrize("plant", (*MUTANTS, *KEEPING_MUTANTS), ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation):
        for seed in SMOKE_SEEDS:
            run(seed)
