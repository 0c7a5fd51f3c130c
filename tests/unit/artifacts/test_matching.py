"""PEFT's pattern rules, held to PEFT itself, and patterns that would hang a server."""

import time
from typing import Any

import pytest

from lorry.artifacts.adapter_config import parse_config
from lorry.artifacts.matching import PATTERN_CHARACTERS_MAX, PatternFailed, Patterns, layer_modules
from lorry.artifacts.resolving import Resolver, rank_for, scale_for
from tests.fixtures.adapters import TINY_BASE

MODULES = (*layer_modules(TINY_BASE), "lm_head", "model.embed_tokens")

KEYS = [
    "q_proj",
    "self_attn.q_proj",
    "attn.q_proj",
    "model.layers.1.mlp.up_proj",
    "layers.0.self_attn.q_proj",
    ".*up_proj",
    "q_proj|k_proj",
    "(q|k)_proj",
    "layers.[01].mlp.*",
    "^model.layers.0.self_attn.v_proj",
    r"model\.layers\.\d+\.self_attn\.o_proj",
    "proj",
    "model.layers.1.self_attn.q_proj.base_layer",
]


@pytest.mark.parametrize("key", KEYS)
def test_keys_of_patterns_match_as_in_peft(key: str) -> None:
    from peft.utils.other import get_pattern_key

    matches = Patterns().tail(key)
    expected = [module for module in MODULES if get_pattern_key([key], module) == key]
    assert [module for module in MODULES if matches(module) or module == key] == expected


TARGETS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": ["self_attn.q_proj"]},
    {"target_modules": ["proj"]},
    {"target_modules": ["model.layers.1.mlp.up_proj", "k_proj"]},
    {"target_modules": r".*layers\.0.*(q|v)_proj"},
    {"target_modules": r"model\.layers\.1\.mlp\..*"},
    {"target_modules": "q_proj"},
    {"target_modules": ["q_proj"], "layers_to_transform": 1},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 5]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "blocks"},
    {"target_modules": ["q_proj"], "layers_to_transform": []},
    {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["k_proj"]},
    {"target_modules": ["q_proj"], "exclude_modules": ["model.layers.0.self_attn.q_proj"]},
    {"target_modules": ["q_proj"], "exclude_modules": r".*layers\.1\..*"},
]


@pytest.mark.parametrize("fields", TARGETS, ids=lambda fields: str(list(fields.values())))
def test_target_modules_mean_what_they_mean_in_peft(fields: dict[str, Any]) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    peft_config = LoraConfig(**fields)
    expected = {
        module
        for module in layer_modules(TINY_BASE)
        if bool(check_target_module_exists(peft_config, module))
    }
    assert _meant(fields) == expected


def _meant(fields: dict[str, Any]) -> set[str]:
    config, _ = parse_config({"peft_type": "LORA", **fields})
    resolver = Resolver(config, TINY_BASE)
    assert resolver.problems == []
    return set(resolver.targets or ())


def test_all_linear_means_every_projection_of_every_layer() -> None:
    assert _meant({"target_modules": "All-Linear"}) == set(layer_modules(TINY_BASE))


def test_ranks_and_scales_follow_the_first_entry_that_matches() -> None:
    raw = {
        "peft_type": "LORA",
        "target_modules": ["q_proj"],
        "r": 8,
        "lora_alpha": 16,
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "q_proj": 4},
        "alpha_pattern": {"q_proj": 32, "layers.1.self_attn.q_proj": 1},
    }
    config, _ = parse_config(raw)
    assert rank_for(config, "model.layers.1.self_attn.q_proj") == 2
    assert rank_for(config, "model.layers.0.self_attn.q_proj") == 4
    assert rank_for(config, "model.layers.0.mlp.up_proj") == 8
    assert scale_for(config, "model.layers.1.self_attn.q_proj") == 16
    assert scale_for(config, "model.layers.0.mlp.up_proj") == 2
    rooted, _ = parse_config({**raw, "use_rslora": True})
    assert scale_for(rooted, "model.layers.0.self_attn.q_proj") == 16


@pytest.mark.parametrize("pattern", ["(", "a)(b", "*", "[", "(?P<x>a)(?P<x", "a{99999999999999}"])
def test_what_is_no_regular_expression_fails_by_name(pattern: str) -> None:
    with pytest.raises(PatternFailed, match="not a regular expression"):
        Patterns().tail(pattern)


def test_a_pattern_of_absurd_length_fails() -> None:
    with pytest.raises(PatternFailed, match="longer"):
        Patterns().full("a" * (PATTERN_CHARACTERS_MAX + 1))


@pytest.mark.parametrize("pattern", [r"(.*.*)*(.*.*)*x", r"(\w+\s?)*!", r"((a|.)+)+$b"])
def test_promise_9_a_pattern_made_to_hang_is_given_up_in_time(pattern: str) -> None:
    began_s = time.monotonic()
    matches = Patterns(seconds_max=0.2).full(pattern)
    try:
        for _ in range(50):
            assert not matches("model.layers.0.self_attn.q_proj" * 3)
    except PatternFailed as error:
        assert "takes longer" in str(error)
    assert time.monotonic() - began_s < 20
