"""GGUF files: the same model as the safetensors folder, and clear words when a file is damaged."""

from pathlib import Path

import pytest
import torch

from lorry.engines.embedded.batch import StepBatch
from lorry.engines.embedded.gguf import gguf_config, hf_name
from lorry.engines.embedded.model import Decoder
from lorry.errors import ModelInvalid, ModelUnsupported
from tests.fixtures.tiny_weights import CONFIG, write_gguf, write_model

QWEN2 = {**CONFIG, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def logits(model: Path) -> torch.Tensor:
    decoder = Decoder.load(model, "float32", "cpu")
    decoder.allocate_kv(4, 8)
    return decoder.forward(StepBatch([5, 6, 7], [0, 1, 2], [3], [3], [[0]], [-1], [0, 1, 2]))


@pytest.mark.parametrize(("name", "config"), [("llama", CONFIG), ("qwen2", QWEN2)])
def test_a_gguf_computes_what_its_safetensors_compute(
    tmp_path: Path, name: str, config: dict[str, object]
) -> None:
    plain = logits(write_model(tmp_path / "folder", config))
    assert torch.allclose(logits(write_gguf(tmp_path / "m.gguf", name, config)), plain, atol=1e-5)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q4_0"])
def test_quantised_tensors_are_dequantised(tmp_path: Path, kind: str) -> None:
    plain = logits(write_model(tmp_path / "folder", {**CONFIG, "intermediate_size": 64}))
    wide = {**CONFIG, "intermediate_size": 64}
    found = logits(write_gguf(tmp_path / "m.gguf", "llama", wide, kind=kind))
    assert (found - plain).norm() / plain.norm() < (0.3 if kind.startswith("Q4") else 0.02)


def test_a_file_cut_in_its_header_is_said_to_be_cut(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ModelInvalid, match="cut short"):
        gguf_config(path)


def test_a_file_cut_in_its_weights_names_the_tensor(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ModelInvalid, match=r"m\.gguf: the file ends inside "):
        Decoder.load(path, "float32", "cpu")


def test_other_files_and_architectures_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ModelInvalid, match="not a GGUF file"):
        gguf_config(path)
    with pytest.raises(ModelUnsupported, match="gemma3"):
        gguf_config(write_gguf(tmp_path / "g.gguf", "gemma3"))
    with pytest.raises(ModelUnsupported, match="yarn"):
        scaled = {"llama.rope.scaling.type": "yarn"}
        gguf_config(write_gguf(tmp_path / "y.gguf", fields=scaled))
    with pytest.raises(ModelUnsupported, match="partial rotary"):
        gguf_config(write_gguf(tmp_path / "p.gguf", numbers={"llama.rope.dimension_count": 4}))
    with pytest.raises(ModelUnsupported, match="mixture of experts"):
        gguf_config(write_gguf(tmp_path / "e.gguf", numbers={"llama.expert_count": 8}))


def test_linear_rope_scaling_is_kept(tmp_path: Path) -> None:
    scaled = {"llama.rope.scaling.type": "linear"}
    path = write_gguf(tmp_path / "l.gguf", fields=scaled, numbers={"llama.rope.scaling.factor": 2})
    assert gguf_config(path)["rope_parameters"] == {
        "rope_type": "linear",
        "rope_theta": 10000.0,
        "factor": 2.0,
    }


def test_an_exchanged_file_is_read_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    assert gguf_config(path)["num_hidden_layers"] == 2
    write_gguf(path, config={**CONFIG, "num_hidden_layers": 1})
    assert gguf_config(path)["num_hidden_layers"] == 1


def test_names_turn_into_hugging_face_names() -> None:
    assert hf_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert hf_name("output_norm.weight") == "model.norm.weight"
    assert hf_name("something.else") == "something.else"
