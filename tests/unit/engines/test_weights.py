"""Loading a model folder: everything is checked first, and what is wrong is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lorry.engines.embedded.model import Decoder
from lorry.engines.embedded.weights import pick_device, pick_dtype
from lorry.errors import ModelInvalid
from tests.fixtures.tiny_weights import CONFIG, model_tensors, write_model

KEY = "model.layers.1.mlp.up_proj.weight"


def load(folder: Path) -> Decoder:
    return Decoder.load(folder, "float32", "cpu")


def test_progress_rises_to_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_model(tmp_path)
    Decoder.load(tmp_path, "bfloat16", "cpu", lambda done, total: seen.append((done, total)))
    done = [one for one, _ in seen]
    assert done == sorted(done)
    total = sum(tensor.numel() * 2 for tensor in model_tensors().values())
    assert seen[-1] == (total, total)
    assert {one for _, one in seen} == {total}


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = model_tensors()
    del tensors[KEY]
    with pytest.raises(ModelInvalid, match=rf"{KEY} is missing"):
        load(write_model(tmp_path, tensors=tensors))


def test_a_wrong_shape_names_file_key_found_and_expected(tmp_path: Path) -> None:
    tensors = model_tensors()
    tensors[KEY] = torch.zeros(48, 31)
    with pytest.raises(ModelInvalid) as caught:
        load(write_model(tmp_path, tensors=tensors))
    for part in ("model.safetensors", KEY, "[48, 31]", "[48, 32]"):
        assert part in str(caught.value)


def test_another_model_lists_some_of_what_is_wrong(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 64}))
    with pytest.raises(ModelInvalid, match="more like it") as caught:
        load(tmp_path)
    assert len(caught.value.details) == 8


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelInvalid, match=r"model\.safetensors: cut short"):
        load(tmp_path)


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelInvalid, match=r"pytorch_model\.bin is a pickle"):
        load(tmp_path)


def test_an_index_without_its_shard_names_the_shard(tmp_path: Path) -> None:
    write_model(tmp_path)
    tensors = model_tensors()
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelInvalid, match="model-00001-of-00001"):
        load(tmp_path)
    save_file(tensors, tmp_path / "model-00001-of-00001.safetensors")
    load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelInvalid, match="not a usable index"):
        load(tmp_path)


def test_a_tied_head_needs_no_tensor_of_its_own(tmp_path: Path) -> None:
    tensors = model_tensors()
    del tensors["lm_head.weight"]
    load(write_model(tmp_path, {**CONFIG, "tie_word_embeddings": True}, tensors))
    with pytest.raises(ModelInvalid, match=r"lm_head\.weight is missing"):
        load(write_model(tmp_path, CONFIG, tensors))


def test_kv_bytes_are_what_allocation_takes(tmp_path: Path) -> None:
    decoder = load(write_model(tmp_path))
    # 2 layers, 8 positions, keys and values of 2 heads of 8, four bytes each.
    assert decoder.kv_bytes_per_block(8) == 2 * 8 * 2 * 2 * 8 * 4


def test_dtype_and_device_can_be_left_to_the_machine() -> None:
    device = pick_device("auto")
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert pick_dtype("auto", device) in (torch.float32, torch.bfloat16)
    assert pick_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
