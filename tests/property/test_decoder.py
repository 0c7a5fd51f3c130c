"""Any schedule of chunks, decode rows, adapters and shared prefixes gives the same logits."""

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorry.engines.embedded.shape import base_shape
from tests.fixtures.tiny_weights import CONFIG, adapter_tensors, write_adapter, write_model
from tests.golden.driver import (
    BLOCK_SIZE,
    BY_SEGMENT,
    MIXED,
    NATIVE,
    Driver,
    Running,
    relative_error,
)

TARGETS = tuple(base_shape(CONFIG).targets)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Driver, ...]:
    """One to compute alone, each adapter by itself; the others to compute mixes."""
    folder = tmp_path_factory.mktemp("decoder")
    model = write_model(folder / "model")
    adapters: dict[str, Path] = {}
    for seed in range(6):
        names = random.Random(seed).sample(TARGETS, 1 + seed)
        ranks = dict.fromkeys(names, 2 + 3 * seed)
        layers = [seed % 2] if seed > 3 else None
        tensors = adapter_tensors(base_shape(CONFIG), ranks, layers, seed)
        rank = 2 + 3 * seed
        adapters[f"a{seed}"] = write_adapter(folder / f"a{seed}", tensors, r=rank, lora_alpha=1)
    return tuple(Driver(model, adapters, form=form) for form in (BY_SEGMENT, MIXED, *NATIVE[:1]))


def alone(driver: Driver, run: Running) -> Running:
    """The same tokens in one chunk of their own."""
    driver.reset()
    fresh = Running(list(run.tokens[: run.done]), run.slot, [])
    driver.step([(fresh, len(fresh.tokens))])
    return fresh


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 10**9))
def test_promise_12_any_schedule_gives_the_same_logits(
    drivers: tuple[Driver, ...], seed: int
) -> None:
    for mixed in drivers[1:]:
        check_a_schedule(drivers[0], mixed, seed)


def check_a_schedule(single: Driver, mixed: Driver, seed: int) -> None:
    """Any mix of chunks, prefixes and adapters gives what each sequence gives alone."""
    mixed.reset()
    rng = random.Random(seed)
    names = [None, *(f"a{i}" for i in range(6))]
    runs: list[Running] = []
    for _ in range(rng.randint(3, 10)):
        if runs and rng.random() < 0.3:
            other = rng.choice(runs)
            same = rng.randint(0, other.done)
            run = mixed.begin([*other.tokens[:same], *_tokens(rng)], None)
            run.slot = other.slot
            run.table = other.table[: same // BLOCK_SIZE]
            run.done = len(run.table) * BLOCK_SIZE
        else:
            run = mixed.begin(_tokens(rng), rng.choice(names))
        runs.append(run)
        for _ in range(rng.randint(1, 3)):
            _any_step(rng, mixed, runs)
    for run in (one for one in runs if one.logits):
        expected = alone(single, run).logits
        for at, row in run.logits.items():
            assert relative_error(row, expected[at]) < TOLERANCE, (seed, run.slot, at)


def _tokens(rng: random.Random) -> list[int]:
    return [rng.randrange(64) for _ in range(rng.randint(1, 30))]


def _any_step(rng: random.Random, driver: Driver, runs: list[Running]) -> None:
    """Some of the sequences go on, by a chunk or by a new token."""
    plan = []
    for run in rng.sample(runs, rng.randint(1, len(runs))):
        if run.done == len(run.tokens) < 100:
            run.tokens.append(rng.randrange(64))
        left = len(run.tokens) - run.done
        if left:
            plan.append((run, rng.choice((1, left, rng.randint(1, left)))))
    if plan:
        driver.step(plan)
