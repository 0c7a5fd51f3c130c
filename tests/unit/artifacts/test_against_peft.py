"""Adapters that PEFT wrote: the snapshot, read by PEFT, computes what the original computes."""

import copy
from pathlib import Path
from typing import Any

import pytest

from lorry.artifacts.cache import DiskCache
from lorry.engine import BaseShape
from tests.fixtures.adapters import TARGETS

VOCABULARY = 64

SORTS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"target_modules": "all-linear", "r": 4},
    "rslora": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "lora_alpha": 7},
    "rank_pattern": {
        "target_modules": ["q_proj", "up_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, ".*up_proj": 3},
        "alpha_pattern": {"up_proj": 5, "layers.0.mlp.up_proj": 50},
    },
    "one layer": {"target_modules": ["k_proj", "o_proj"], "layers_to_transform": [1]},
    "layers_pattern": {
        "target_modules": ["gate_proj"],
        "layers_to_transform": 0,
        "layers_pattern": "layers",
    },
    "regular expression": {"target_modules": r".*\.(0|1)\.mlp\.(up|down)_proj"},
    "excluded": {"target_modules": "all-linear", "exclude_modules": r".*layers\.0\..*"},
}


@pytest.fixture(scope="module")
def model() -> Any:
    """A Llama of the shape of TINY_BASE, with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


BASE = BaseShape("LlamaForCausalLM", 2, 16, VOCABULARY, TARGETS)


@pytest.mark.parametrize("sort", SORTS)
def test_promise_12_a_snapshot_computes_what_the_original_computes(
    sort: str, model: Any, tmp_path: Path
) -> None:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(**{"init_lora_weights": False, **SORTS[sort]})
    get_peft_model(copy.deepcopy(model), config).save_pretrained(str(tmp_path / "original"))
    # Read back from disk: PEFT sorts the patterns when it saves, which changes the first match.
    adapted = PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path / "original")).eval()
    snapshot = DiskCache(tmp_path / "cache", None).snapshot("x", tmp_path / "original", BASE, 64)
    again = PeftModel.from_pretrained(copy.deepcopy(model), str(snapshot.path)).eval()
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        expected, plain = adapted(tokens).logits, model(tokens).logits
        assert torch.equal(again(tokens).logits, expected)
    assert not torch.allclose(expected, plain)
