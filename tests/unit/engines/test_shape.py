"""What a config says about a model, and what is refused by name before any weight is read."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lorry.engines.embedded.shape import base_shape, find_gguf, max_context, read_config
from lorry.errors import ModelInvalid, ModelUnsupported
from tests.fixtures.tiny_weights import CONFIG, write_gguf, write_model


def test_shape_lists_the_seven_projections_with_their_sizes() -> None:
    shape = base_shape(CONFIG)
    assert (shape.architecture, shape.layers) == ("LlamaForCausalLM", 2)
    assert (shape.hidden_size, shape.vocab_size) == (32, 64)
    assert shape.targets == {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (32, 16),
        "self_attn.v_proj": (32, 16),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (32, 48),
        "mlp.up_proj": (32, 48),
        "mlp.down_proj": (48, 32),
    }


def test_explicit_head_dim_wins_over_hidden_size_by_heads() -> None:
    targets = base_shape({**CONFIG, "head_dim": 16}).targets
    assert targets["self_attn.q_proj"] == (32, 64)
    assert targets["self_attn.o_proj"] == (64, 32)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ["Gemma3ForCausalLM"]}, "Gemma3ForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelUnsupported, match=named) as caught:
        base_shape({**CONFIG, **changes})
    assert (caught.value.status, caught.value.code) == (400, "model_unsupported")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim 7"),
    ],
)
def test_a_config_that_contradicts_itself_names_the_field(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelInvalid, match=named):
        base_shape({**CONFIG, **changes})


def test_a_sliding_window_limits_the_context() -> None:
    mistral = {**CONFIG, "architectures": ["MistralForCausalLM"]}
    assert max_context({**mistral, "sliding_window": 100}) == 100
    assert max_context({**mistral, "sliding_window": None}) == 128
    assert max_context(CONFIG) == 128


def test_read_config_finds_the_one_gguf_of_a_folder(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    assert find_gguf(tmp_path) == path
    config = read_config(tmp_path)
    assert base_shape(config).targets == base_shape(CONFIG).targets
    assert base_shape(read_config(path)) == base_shape(config)


def test_read_config_prefers_config_json(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    write_model(tmp_path)
    assert find_gguf(tmp_path) is None
    assert read_config(tmp_path) == CONFIG


def test_read_config_says_what_a_folder_lacks(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match="no such file"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ModelInvalid, match="no GGUF file"):
        read_config(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelInvalid, match="2 GGUF files"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelInvalid, match=r"config\.json: not readable as JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelInvalid, match="JSON object"):
        read_config(tmp_path)


def test_asking_for_the_shape_does_not_import_torch() -> None:
    code = "import sys, lorry.engines.embedded.shape; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
