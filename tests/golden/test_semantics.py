"""Where we read a config ourselves, we read it as transformers and PEFT do."""

import random
from typing import Any

import pytest
from peft.utils.other import get_pattern_key
from transformers import AutoConfig

from lorry.engines.embedded.family import FAMILIES, read_family
from lorry.engines.embedded.scaling import matching_pattern

SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "vocab_size": 64,
}


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True},
    ],
    ids=["bare", "old-theta", "old-scaling", "new-rope", "sizes"],
)
def test_a_silent_config_means_what_transformers_makes_of_it(
    architecture: str, extra: dict[str, Any]
) -> None:
    family = read_family({"architectures": [architecture], **SIZES, **extra})
    model_type = architecture.removesuffix("ForCausalLM").lower()
    theirs = AutoConfig.for_model(model_type, **SIZES, **extra)
    assert family.kv_heads == theirs.num_key_value_heads
    assert family.head_dim == (getattr(theirs, "head_dim", None) or 4096 // 32)
    assert family.norm_eps == theirs.rms_norm_eps
    assert family.tied == theirs.tie_word_embeddings
    assert family.max_positions == theirs.max_position_embeddings
    assert family.rope_type == theirs.rope_parameters["rope_type"]
    assert family.rope_theta == theirs.rope_parameters["rope_theta"]
    windowed = architecture == "MistralForCausalLM"
    assert family.sliding_window == (theirs.sliding_window if windowed else None)


def test_promise_12_patterns_match_as_peft_matches_them() -> None:
    pieces = ["model", "layers", r"\d+", "0", "1", "self_attn", "mlp", "q_proj", ".*", "^q_proj"]
    keys = [
        f"model.layers.{layer}.{module}"
        for layer in (0, 1, 10)
        for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
    ]
    rng = random.Random(3)
    for _ in range(500):
        patterns = [
            rng.choice((".", r"\.")).join(rng.sample(pieces, rng.randint(1, 3)))
            for _ in range(rng.randint(0, 3))
        ]
        for key in keys:
            assert matching_pattern(patterns, key) == get_pattern_key(patterns, key)
