"""Each bug planted in the shell is found within the smoke seeds of level two."""

import pytest

from tests.simulation.shell.life import run
from tests.simulation.shell.mutants import MUTANTS, Plant
from tests.simulation.shell.smoke import SMOKE_SEEDS
from tests.simulation.world import Violation

pytestmark = pytest.mark.timeout(180)
"""A bug that is found late takes most of the smoke seeds."""


@pytest.mark.parametrize("plant", MUTANTS, ids=lambda plant: plant.__name__)
def test_a_bug_planted_in_the_shell_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation):
        for seed in (MUTANTS[plant], *SMOKE_SEEDS):
            run(seed)
