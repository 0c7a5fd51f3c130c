"""Promise 12: every row of a mixed batch equals transformers + PEFT, for every family."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.fixtures.tiny_models import ADAPTERS, FAMILIES, VOCAB, Oracle
from tests.golden.driver import FORMS, MERGED, NATIVE, Driver, Form, Running, relative_error

TOLERANCE = 1e-4
NAMES = [None, *(one.name for one in ADAPTERS)]
LENGTHS = [23, 9, 40, 17, 5]
STEPS = 6


@dataclass
class Case:
    """One family on disk, its adapters and its oracle."""

    model: Path
    adapters: dict[str, Path]
    oracle: Oracle

    def prompt(self, index: int) -> list[int]:
        numbers = torch.Generator().manual_seed(100 + index)
        return torch.randint(3, VOCAB, (LENGTHS[index],), generator=numbers).tolist()

    def check(self, run: Running, adapter: str | None) -> None:
        """Every logit row that was computed is right."""
        expected = self.oracle.logits(run.tokens[: run.done], adapter)
        for at, row in run.logits.items():
            assert relative_error(row, expected[at]) < TOLERANCE, (adapter, at)
            assert int(row.argmax()) == int(expected[at].argmax()), (adapter, at)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda one: one.name)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp(request.param.name)
    model = request.param.save(folder / "model")
    adapters = {one.name: one.save(model, folder / one.name) for one in ADAPTERS}
    yield Case(model, adapters, Oracle(model, adapters))


@pytest.mark.parametrize("form", FORMS, ids=lambda one: one.name)
def test_promise_12_mixed_batch_equals_peft_with_whole_prefill(case: Case, form: Form) -> None:
    driver = Driver(case.model, case.adapters, form=form)
    runs = [driver.begin(case.prompt(i), name) for i, name in enumerate(NAMES)]
    tokens = driver.greedy(runs, STEPS)
    for run, name in zip(runs, NAMES, strict=True):
        case.check(run, name)
    expected = [case.oracle.greedy(case.prompt(i), name, STEPS) for i, name in enumerate(NAMES)]
    assert tokens == expected
    assert len({tuple(one) for one in tokens}) == len(tokens)


@pytest.mark.parametrize("form", FORMS, ids=lambda one: one.name)
def test_promise_12_chunked_prefill_mixed_with_decode_equals_peft(case: Case, form: Form) -> None:
    driver = Driver(case.model, case.adapters, form=form)
    runs = [driver.begin(case.prompt(i), name) for i, name in enumerate(NAMES)]
    chunks = [7, 3, 1, 10, 2]
    while any(run.done < len(run.tokens) for run in runs):
        left = [(run, len(run.tokens) - run.done) for run in runs]
        plan = [(run, min(n, c)) for (run, n), c in zip(left, chunks, strict=True) if n]
        driver.step(plan)
        for run, _ in plan:
            if run.done == len(run.tokens) < 48:
                run.tokens.append(int(run.logits[run.done - 1].argmax()))
    for run, name in zip(runs, NAMES, strict=True):
        case.check(run, name)


@pytest.mark.parametrize("form", (MERGED, *NATIVE[:1]), ids=lambda one: one.name)
def test_promise_2_reused_prefix_gives_the_same_logits(case: Case, form: Form) -> None:
    driver = Driver(case.model, case.adapters, form=form)
    prompt = case.prompt(2)
    for name in NAMES:
        first = driver.begin(prompt, name)
        driver.step([(first, len(prompt))])
        again = driver.begin(prompt[:30] + prompt[:6], name, prefix=first)
        assert again.done == 28
        apart = driver.begin(again.tokens, name)
        driver.step([(again, len(again.tokens) - again.done), (apart, len(apart.tokens))])
        case.check(again, name)
        case.check(apart, name)


@pytest.mark.parametrize("form", (MERGED, *NATIVE[:1]), ids=lambda one: one.name)
def test_promise_12_one_by_one_equals_the_batch(case: Case, form: Form) -> None:
    driver = Driver(case.model, case.adapters, form=form)
    together = driver.greedy(
        [driver.begin(case.prompt(i), name) for i, name in enumerate(NAMES)], STEPS
    )
    alone = [
        driver.greedy([driver.begin(case.prompt(i), name)], STEPS)[0]
        for i, name in enumerate(NAMES)
    ]
    assert alone == together


@pytest.mark.parametrize("form", NATIVE, ids=lambda one: one.name)
def test_promise_12_with_kernels_a_row_is_the_same_bit_by_bit_in_any_batch(
    case: Case, form: Form
) -> None:
    driver = Driver(case.model, case.adapters, form=form)
    together = [driver.begin(case.prompt(i), name) for i, name in enumerate(NAMES)]
    driver.greedy(together, STEPS)
    for run, name in zip(together, NAMES, strict=True):
        alone = driver.begin(run.tokens[: run.done], name)
        while alone.done < len(alone.tokens):
            driver.step([(alone, min(3, len(alone.tokens) - alone.done))])
        for at, row in run.logits.items():
            assert torch.equal(row, alone.logits[at]), (name, at)
