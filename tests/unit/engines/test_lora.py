"""Adapters in host memory: packing, scaling, and refusal of what does not fit."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorry.engines.embedded.kernels import isas
from lorry.engines.embedded.lora import AdapterReader, HostAdapter
from lorry.engines.embedded.lowrank import DOWN, GATE_UP, OUT, QKV
from lorry.engines.embedded.scaling import ScaleRule, matching_pattern
from lorry.engines.embedded.shape import base_shape
from lorry.errors import EngineRejected
from tests.fixtures.tiny_weights import CONFIG, adapter_tensors, write_adapter

SHAPE = base_shape(CONFIG)
RANKS = {"self_attn.q_proj": 8, "self_attn.v_proj": 8, "mlp.down_proj": 8}
AT = "base_model.model.model.layers.0.self_attn.q_proj"


def load_adapter(folder: Path, dtype: torch.dtype) -> HostAdapter:
    """By PyTorch and, where it is built, by the kernel: they must agree bit by bit."""
    plain = AdapterReader(SHAPE, dtype, native=False).read(folder)
    if isas():
        native = AdapterReader(SHAPE, dtype).read(folder)
        assert torch.equal(native.buffer, plain.buffer)
        return native
    return plain


def test_only_what_the_file_holds_is_packed(tmp_path: Path) -> None:
    tensors = adapter_tensors(SHAPE, RANKS, layers=[1])
    adapter = load_adapter(write_adapter(tmp_path, tensors), torch.float32)
    assert adapter.layers[0] == (None, None, None, None)
    groups = adapter.layers[1]
    assert groups[OUT] is None and groups[GATE_UP] is None
    qkv, down = groups[QKV], groups[DOWN]
    assert qkv is not None and down is not None
    assert [(part.module, part.columns) for part in qkv.parts] == [
        (0, slice(0, 32)),
        (2, slice(48, 64)),
    ]
    assert adapter.rank == 8
    assert adapter.bytes == 4 * sum(tensor.numel() for tensor in tensors.values())


def test_scale_is_folded_into_b_before_the_cast(tmp_path: Path) -> None:
    tensors = {key: value.half() for key, value in adapter_tensors(SHAPE, RANKS).items()}
    folder = write_adapter(tmp_path, tensors, lora_alpha=24)
    adapter = load_adapter(folder, torch.bfloat16)
    qkv = adapter.layers[0][QKV]
    assert qkv is not None
    expected = (tensors[f"{AT}.lora_B.weight"].float() * 3).t().bfloat16()
    assert torch.equal(qkv.parts[0].b, expected)
    assert torch.equal(qkv.a[:8], tensors[f"{AT}.lora_A.weight"].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_number_of_a_file_is_packed_as_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    """Zeros of both signs, the smallest and the largest numbers of each dtype of a file."""
    limits = torch.finfo(dtype)
    edges = [0.0, -0.0, limits.tiny, -limits.tiny, limits.smallest_normal / 4, limits.max / 2, 1.5]
    values = torch.tensor(edges * 37, dtype=torch.float64)[: 8 * 32].to(dtype).view(8, 32)
    tensors = {key: value.to(dtype) for key, value in adapter_tensors(SHAPE, RANKS).items()}
    tensors |= {f"{AT}.lora_A.weight": values, f"{AT}.lora_B.weight": values.t().contiguous()}
    adapter = load_adapter(write_adapter(tmp_path, tensors, lora_alpha=8, r=8), torch.float32)
    qkv = adapter.layers[0][QKV]
    assert qkv is not None
    assert torch.equal(qkv.a[:8], values.float())
    assert torch.equal(qkv.parts[0].b, values.float())
    assert bool(torch.signbit(qkv.a[0, 1]))


def test_adapters_of_one_kind_share_a_packing_and_keep_their_own_numbers(tmp_path: Path) -> None:
    reader = AdapterReader(SHAPE, torch.float32)
    found = []
    for seed in (1, 2):
        tensors = adapter_tensors(SHAPE, RANKS, seed=seed)
        (folder := tmp_path / str(seed)).mkdir()
        found.append((reader.read(write_adapter(folder, tensors)), tensors))
    assert found[0][0].packing is found[1][0].packing
    for adapter, tensors in found:
        qkv = adapter.layers[0][QKV]
        assert qkv is not None
        assert torch.equal(qkv.a[:8], tensors[f"{AT}.lora_A.weight"])


def test_adapters_that_differ_in_alpha_alone_do_not_share_a_packing(tmp_path: Path) -> None:
    reader = AdapterReader(SHAPE, torch.float32)
    tensors, found = adapter_tensors(SHAPE, RANKS), []
    for alpha in (8, 16):
        (folder := tmp_path / str(alpha)).mkdir()
        qkv = reader.read(write_adapter(folder, tensors, lora_alpha=alpha)).layers[0][QKV]
        assert qkv is not None
        found.append(qkv.parts[0].b)
    assert torch.equal(found[1], 2 * found[0])


@pytest.mark.parametrize(
    ("config", "rank", "scale"),
    [
        ({"r": 4, "lora_alpha": 8}, 4, 2.0),
        ({"r": 4, "lora_alpha": 8, "use_rslora": True}, 4, 4.0),
        ({"r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 2}}, 2, 4.0),
        ({"r": 4, "lora_alpha": 8, "rank_pattern": {"proj": 2}}, 4, 2.0),
        ({"r": 4, "lora_alpha": 8, "rank_pattern": {r"layers\.\d\.self_attn\..*": 2}}, 2, 4.0),
        ({"r": 4, "lora_alpha": 8, "rank_pattern": {"^q_proj": 2}}, 4, 2.0),
        ({"r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 2, "self_attn.q_proj": 3}}, 2, 4.0),
        ({"r": 4, "lora_alpha": 8, "alpha_pattern": {"self_attn.q_proj": 2}}, 4, 0.5),
        (
            {"r": 4, "alpha_pattern": {"q_proj": 2}, "rank_pattern": {".*": 9}, "use_rslora": True},
            9,
            2 / 3,
        ),
    ],
)
def test_rank_and_scale_follow_the_patterns(
    config: dict[str, Any], rank: int, scale: float
) -> None:
    rule = ScaleRule(config)
    key = "model.layers.3.self_attn.q_proj"
    assert rule.rank(key) == rank
    assert math.isclose(rule.scale(key), scale)


def test_the_first_pattern_that_fits_wins() -> None:
    assert matching_pattern(["k_proj", "q_proj", ".*"], "a.q_proj") == "q_proj"
    assert matching_pattern([], "a.q_proj") == "a.q_proj"


def _without(key: str) -> dict[str, Tensor]:
    return {name: value for name, value in adapter_tensors(SHAPE, RANKS).items() if name != key}


def _with(key: str, value: Tensor) -> dict[str, Tensor]:
    return adapter_tensors(SHAPE, RANKS) | {key: value}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (_without(f"{AT}.lora_B.weight"), "only lora_A is there"),
        (_with(f"{AT}.lora_B.weight", torch.ones(32, 4)), r"shape \[32, 4\].*\[32, 8\]"),
        (_with(f"{AT}.lora_A.weight", torch.ones(8, 33)), r"shape \[8, 33\].*\[8, 32\]"),
        (_with(f"{AT}.lora_magnitude_vector", torch.ones(32)), "lora_magnitude_vector"),
        (_with("base_model.model.lm_head.lora_A.weight", torch.ones(8, 32)), "lm_head"),
        (_with(AT.replace(".0.", ".9.") + ".lora_A.weight", torch.ones(8, 32)), "2 layers"),
        (_with(f"{AT}.lora_B.weight", torch.full((32, 8), math.nan)), "layers.0.self_attn.q_proj"),
        (_with(f"{AT}.lora_A.weight", torch.full((8, 32), math.inf)), "NaN or infinity"),
        ({}, "holds no tensor"),
    ],
)
def test_promise_9_what_does_not_fit_is_refused(
    tmp_path: Path, tensors: dict[str, Tensor], words: str
) -> None:
    folder = write_adapter(tmp_path, tensors)
    with pytest.raises(EngineRejected, match=words) as caught:
        load_adapter(folder, torch.float32)
    assert "adapter_model.safetensors" in str(caught.value)


def test_promise_9_overflow_in_the_served_dtype_is_refused(tmp_path: Path) -> None:
    tensors = _with(f"{AT}.lora_B.weight", torch.full((32, 8), 3e38))
    with pytest.raises(EngineRejected, match="once scaled and cast"):
        load_adapter(write_adapter(tmp_path, tensors, lora_alpha=64), torch.float32)


def test_promise_9_cut_and_missing_files_are_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, adapter_tensors(SHAPE, RANKS))
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for length in (len(whole) - 1, 100, 8, 3, 0):
        weights.write_bytes(whole[:length])
        with pytest.raises(EngineRejected, match=r"adapter_model\.safetensors: cut short"):
            load_adapter(folder, torch.float32)
    weights.write_bytes(whole)
    for nonsense, words in (("nonsense", "as JSON"), ("[]", "JSON object")):
        (folder / "adapter_config.json").write_text(nonsense)
        with pytest.raises(EngineRejected, match=rf"adapter_config\.json.*{words}"):
            load_adapter(folder, torch.float32)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (folder / name).unlink()
        with pytest.raises(EngineRejected, match=name.replace(".", r"\.")):
            load_adapter(folder, torch.float32)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [8, 32], "data_offsets": [0, 1020]},
        {"dtype": "F32", "shape": [8, 32], "data_offsets": [-4, 1020]},
        {"dtype": "F64", "shape": [8, 16], "data_offsets": [0, 1024]},
        {"dtype": "F32", "shape": [8, 32]},
        {"dtype": "F32", "shape": 8, "data_offsets": [0, 1024]},
        7,
    ],
)
def test_promise_9_a_header_that_disagrees_with_itself_is_refused(
    tmp_path: Path, entry: object
) -> None:
    folder = write_adapter(tmp_path, adapter_tensors(SHAPE, RANKS))
    header = json.dumps({f"{AT}.lora_A.weight": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(1024)
    (folder / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(EngineRejected, match="cut short or not safetensors"):
        load_adapter(folder, torch.float32)
