"""Promise 9, one sort of fault at a time: refused before anything is kept, with a sentence that
names the file, the key, what was found and what was expected."""

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorry.artifacts.cache import DiskCache
from lorry.errors import AdapterInvalid, LorryError, SourceNotFound
from tests.fixtures.adapters import (
    TINY_BASE,
    AdapterFiles,
    Tensor,
    good_adapter,
    key,
    safetensors_bytes,
    tensor,
)

MAX_RANK = 8
Q0 = "model.layers.0.self_attn.q_proj"
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"

Change = Callable[[AdapterFiles], None]
FolderChange = Callable[[Path], None]


def refused(cache: DiskCache, folder: Path) -> AdapterInvalid:
    """The error for the folder; nothing may be left in the cache."""
    with pytest.raises(AdapterInvalid) as caught:
        cache.snapshot("pirate", folder, TINY_BASE, MAX_RANK)
    assert "'pirate'" in caught.value.message
    assert list(cache.root.iterdir()) == []
    assert cache.statistics().reserved_bytes == 0
    return caught.value


def has(error: LorryError, *words: str) -> bool:
    """One single sentence holds all the words."""
    return any(all(word in detail for word in words) for detail in error.details)


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    """An empty cache without a limit."""
    return DiskCache(tmp_path / "cache", None)


def config(**fields: Any) -> Change:
    """Set fields of the config."""
    return lambda files: files.config.update(fields)


def without(*fields: str) -> Change:
    """Remove fields of the config."""
    return lambda files: [files.config.pop(each) for each in fields] and None


def add(name: str, value: Tensor) -> Change:
    """Add a tensor."""
    return lambda files: files.tensors.update({name: value})


def drop(name: str) -> Change:
    """Remove a tensor."""
    return lambda files: files.tensors.pop(name) and None


def edit(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Replace a tensor."""
    return lambda files: files.tensors.update({name: change(files.tensors[name])})


def poisoned(value: float, dtype: str = "F32") -> Callable[[Tensor], Tensor]:
    """The tensor with one bad number in it."""

    def change(old: Tensor) -> Tensor:
        values = np.ones(old.shape, dtype=np.float32)
        values.flat[-1] = value
        return tensor(values, dtype)

    return change


def zeros(files: AdapterFiles, side: str) -> None:
    """Make every A or every B zero."""
    for name, old in files.tensors.items():
        if f"lora_{side}" in name:
            files.tensors[name] = replace(old, data=bytes(len(old.data)))


FULL_HEAD = tensor(np.ones((64, 16)))
VECTOR = tensor(np.ones(16))

CONFIG_FAULTS: list[tuple[Change, tuple[str, ...]]] = [
    (config(r=9), (CONFIG, "rank", "9", "at most 8", "--max-lora-rank")),
    (config(r=2), (WEIGHTS, "rank 4", "expected 2")),
    (config(r=0), (CONFIG, "r is 0", "whole number from 1")),
    (config(r=-1), (CONFIG, "r is -1")),
    (config(r=4.5), (CONFIG, "r is 4.5")),
    (config(r="4"), (CONFIG, "r is '4'")),
    (config(r=True), (CONFIG, "r is True")),
    (config(r=None), (CONFIG, "r is None")),
    (config(r=10**400), (CONFIG, "at most 8")),
    (config(lora_alpha="8"), (CONFIG, "lora_alpha is '8'", "finite number")),
    (config(lora_alpha=float("nan")), (CONFIG, "lora_alpha is nan")),
    (config(lora_alpha=float("inf")), (CONFIG, "lora_alpha is inf")),
    (config(lora_alpha=10**400), (CONFIG, "lora_alpha")),
    (config(lora_alpha=0), (CONFIG, "lora_alpha is 0", "change nothing")),
    (config(lora_alpha=1e9), (CONFIG, "alpha 1e+09", "expected at most")),
    (config(use_rslora="yes"), (CONFIG, "use_rslora is 'yes'")),
    (config(use_dora=True), (CONFIG, "use_dora is True", "DoRA")),
    (config(modules_to_save=["lm_head"]), (CONFIG, "modules_to_save", "lm_head")),
    (config(bias="all"), (CONFIG, "bias is 'all'", "'none'")),
    (config(bias="lora_only"), (CONFIG, "bias is 'lora_only'")),
    (config(lora_bias=True), (CONFIG, "lora_bias")),
    (config(fan_in_fan_out=True), (CONFIG, "fan_in_fan_out", "Conv1D")),
    (config(alora_invocation_tokens=[1, 2]), (CONFIG, "alora_invocation_tokens", "aLoRA")),
    (config(trainable_token_indices=[70]), (CONFIG, "trainable_token_indices")),
    (config(layer_replication=[[0, 2]]), (CONFIG, "layer_replication")),
    (config(target_parameters=["experts.w1"]), (CONFIG, "target_parameters")),
    (config(use_qalora=True), (CONFIG, "use_qalora")),
    (config(use_bdlora={"nblocks": 2}), (CONFIG, "use_bdlora")),
    (config(arrow_config={"top_k": 1}), (CONFIG, "arrow_config")),
    (config(megatron_config={"a": 1}), (CONFIG, "megatron_config")),
    (config(use_magic=True), (CONFIG, "use_magic", "not known here")),
    (config(magic_config={"a": 1}), (CONFIG, "magic_config", "not known here")),
    (config(init_lora_weights="pissa"), (CONFIG, "'pissa'", "changed base")),
    (config(init_lora_weights="pissa_niter_4"), (CONFIG, "'pissa_niter_4'")),
    (config(init_lora_weights="olora"), (CONFIG, "'olora'")),
    (config(init_lora_weights="corda"), (CONFIG, "'corda'")),
    (config(init_lora_weights="lora_ga"), (CONFIG, "'lora_ga'")),
    (config(init_lora_weights="loftq"), (CONFIG, "'loftq'")),
    (config(init_lora_weights="magic"), (CONFIG, "'magic'")),
    (config(peft_type="LOHA"), (CONFIG, "peft_type is 'LOHA'", "'LORA'")),
    (without("peft_type"), (CONFIG, "peft_type is None")),
    (without("target_modules"), (CONFIG, "target_modules is None")),
    (config(target_modules=[]), (CONFIG, "target_modules is []")),
    (config(target_modules=[1]), (CONFIG, "target_modules is [1]")),
    (config(target_modules="(("), (CONFIG, "target_modules", "not a regular expression")),
    (config(target_modules=["q_proj"]), (CONFIG, "target_modules does not mean", "k_proj")),
    (config(target_modules="all-linear", exclude_modules=["q_proj"]), (CONFIG, Q0)),
    (config(layers_to_transform=[0]), (CONFIG, "does not mean model.layers.1.")),
    (config(layers_to_transform="0"), (CONFIG, "layers_to_transform is '0'")),
    (config(layers_pattern="layers"), (CONFIG, "without layers_to_transform")),
    (
        config(target_modules="all-linear", layers_to_transform=[0, 1]),
        (CONFIG, "layers_to_transform", "regular expression"),
    ),
    (config(rank_pattern={"q_proj": 2}), (WEIGHTS, Q0, "rank 4", "expected 2")),
    (config(rank_pattern={"q_proj": 0}), (CONFIG, "rank_pattern['q_proj'] is 0")),
    (config(rank_pattern={"q_porj": 4}), (CONFIG, "rank_pattern", "'q_porj'", "no projection")),
    (config(rank_pattern=[1]), (CONFIG, "rank_pattern is [1]")),
    (config(rank_pattern={"(": 4}), (CONFIG, "rank_pattern", "not a regular expression")),
    (config(alpha_pattern={"q_proj": None}), (CONFIG, "alpha_pattern['q_proj'] is None")),
    (config(alpha_pattern={"experts": 4}), (CONFIG, "alpha_pattern", "'experts'")),
    (
        lambda files: files.config["target_modules"].append("lm_head"),
        (CONFIG, "lm_head", "not supported"),
    ),
    (
        lambda files: files.config["target_modules"].append("embed_tokens"),
        (CONFIG, "model.embed_tokens", "not supported"),
    ),
    (config(target_modules=".*"), (CONFIG, "lm_head", "not supported")),
]

TENSOR_FAULTS: list[tuple[Change, tuple[str, ...]]] = [
    (drop(key(Q0, "B")), (WEIGHTS, Q0, "no lora_B")),
    (drop(key(Q0, "A")), (WEIGHTS, Q0, "no lora_A")),
    (
        lambda files: [files.tensors.pop(key(Q0, side)) for side in "AB"] and None,
        (CONFIG, "1 modules without tensors", Q0),
    ),
    (lambda files: files.tensors.clear(), (WEIGHTS, "no tensors")),
    (
        edit(key(Q0, "A"), lambda old: tensor(np.ones((4, 32)))),
        (WEIGHTS, key(Q0, "A"), "32 in_features", "expected 16", "another base"),
    ),
    (
        edit(key(Q0, "B"), lambda old: tensor(np.ones((17, 4)))),
        (WEIGHTS, key(Q0, "B"), "17 out_features", "expected 16"),
    ),
    (
        edit(key(Q0, "B"), lambda old: tensor(np.ones((16, 3)))),
        (WEIGHTS, key(Q0, "B"), "rank 3", "expected 4"),
    ),
    (edit(key(Q0, "A"), lambda old: tensor(np.ones(64))), (WEIGHTS, "[64]", "expected [4, 16]")),
    (edit(key(Q0, "A"), lambda old: tensor(np.ones((0, 16)))), (WEIGHTS, "rank 0", "expected 4")),
    (
        edit(key(Q0, "A"), lambda old: tensor(np.ones((4, 16)), "F64")),
        (WEIGHTS, key(Q0, "A"), "'F64'", "BF16"),
    ),
    (
        edit(key(Q0, "A"), lambda old: Tensor("I8", old.shape, bytes(64))),
        (WEIGHTS, "'I8'", "BF16"),
    ),
    (
        edit(key(Q0, "A"), lambda old: Tensor("F8_E4M3", old.shape, bytes(64))),
        (WEIGHTS, "'F8_E4M3'"),
    ),
    (edit(key(Q0, "B"), poisoned(float("nan"))), (WEIGHTS, key(Q0, "B"), "1 numbers", "NaN")),
    (edit(key(Q0, "A"), poisoned(float("inf"))), (WEIGHTS, key(Q0, "A"), "infinite")),
    (edit(key(Q0, "A"), poisoned(float("-inf"), "F16")), (WEIGHTS, key(Q0, "A"), "infinite")),
    (edit(key(Q0, "A"), poisoned(float("nan"), "BF16")), (WEIGHTS, key(Q0, "A"), "NaN")),
    (lambda files: zeros(files, "A"), (WEIGHTS, "change nothing")),
    (lambda files: zeros(files, "B"), (WEIGHTS, "change nothing")),
    (
        add("base_model.model.model.layers.2.mlp.up_proj.lora_A.weight", VECTOR),
        (WEIGHTS, "layer 2", "0 to 1"),
    ),
    (
        add("base_model.model.model.layers.0.mlp.gate_up_proj.lora_A.weight", VECTOR),
        (WEIGHTS, "'mlp.gate_up_proj'", "LlamaForCausalLM"),
    ),
    (
        add("base_model.model.model.layers.00.mlp.up_proj.lora_A.weight", VECTOR),
        (WEIGHTS, "matches nothing"),
    ),
    (add("transformer.h.0.attn.lora_A.weight", VECTOR), (WEIGHTS, "matches nothing")),
    (add("strange", VECTOR), (WEIGHTS, "'strange'", "matches nothing")),
    (add(f"base_model.model.{Q0}.lora_magnitude_vector", VECTOR), (WEIGHTS, "DoRA")),
    (add("base_model.model.lm_head.weight", FULL_HEAD), (WEIGHTS, "lm_head", "head")),
    (
        add("base_model.model.lm_head.modules_to_save.weight", FULL_HEAD),
        (WEIGHTS, "modules_to_save"),
    ),
    (add("base_model.model.lm_head.lora_A.weight", VECTOR), (WEIGHTS, "output head")),
    (
        add("base_model.model.model.embed_tokens.weight", tensor(np.ones((70, 16)))),
        (WEIGHTS, "embed_tokens", "embeddings"),
    ),
    (
        add("base_model.model.model.embed_tokens.lora_embedding_A", VECTOR),
        (WEIGHTS, "LoRA on embeddings"),
    ),
    (add(f"base_model.model.{Q0}.base_layer.bias", VECTOR), (WEIGHTS, "biases")),
    (add(f"base_model.model.{Q0}.lora_B.bias", VECTOR), (WEIGHTS, "biases")),
    (add(f"{Q0}.lora_A.default.weight", tensor(np.ones((4, 16)))), (WEIGHTS, "same matrix")),
]


@pytest.mark.parametrize(("change", "words"), CONFIG_FAULTS + TENSOR_FAULTS)
def test_promise_9_a_bad_adapter_is_refused_by_name(
    change: Change, words: tuple[str, ...], cache: DiskCache, tmp_path: Path
) -> None:
    files = good_adapter()
    change(files)
    error = refused(cache, files.write(tmp_path / "bad"))
    assert has(error, *words), error.details
    assert error.details[0] in error.message


def cut(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def long_header(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes((1 << 60).to_bytes(8, "little") + path.read_bytes()[8:])


def replaced(name: str, content: bytes) -> FolderChange:
    return lambda folder: (folder / name).write_bytes(content) and None


def header(text: str, data: bytes = b"") -> FolderChange:
    content = text.encode()
    return replaced(WEIGHTS, len(content).to_bytes(8, "little") + content + data)


def entry(**fields: Any) -> str:
    return json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **fields}})


def pickle_only(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Marker(folder / "marker")))


class Marker:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


FOLDER_FAULTS: list[tuple[FolderChange, tuple[str, ...]]] = [
    (lambda folder: (folder / CONFIG).unlink(), (CONFIG, "missing")),
    (replaced(CONFIG, b"{"), (CONFIG, "not JSON")),
    (replaced(CONFIG, b"\xff\xfe\x00"), (CONFIG, "not JSON")),
    (replaced(CONFIG, b"[" * 100_000), (CONFIG, "not JSON")),
    (replaced(CONFIG, b"[]"), (CONFIG, "list", "JSON object")),
    (replaced(CONFIG, b'{"r": ' + b"9" * 5000 + b"}"), (CONFIG, "not JSON")),
    (replaced(CONFIG, b" " * (1 << 20) + b"{}"), (CONFIG, "at most 1048576")),
    (lambda folder: (folder / WEIGHTS).unlink(), (WEIGHTS, "missing")),
    (cut, (WEIGHTS, "cut")),
    (long_header, (WEIGHTS, f"{1 << 60}", "at most")),
    (replaced(WEIGHTS, b""), (WEIGHTS, "0 bytes", "cut")),
    (replaced(WEIGHTS, b"\x10"), (WEIGHTS, "1 bytes", "cut")),
    (replaced(WEIGHTS, b"\x10" + bytes(7) + b"{}"), (WEIGHTS, "10 bytes", "24")),
    (header("{"), (WEIGHTS, "not JSON")),
    (header("[" * 100_000), (WEIGHTS, "not JSON")),
    (header("[]"), (WEIGHTS, "not a JSON object")),
    (header('{"x": 1}'), (WEIGHTS, "'x'", "lacks")),
    (header(entry(shape=[-1])), (WEIGHTS, "'x'", "lacks")),
    (header(entry(shape=[True])), (WEIGHTS, "'x'", "lacks")),
    (header(entry(shape=[1] * 40)), (WEIGHTS, "'x'", "lacks")),
    (header(entry(data_offsets=[4, 0])), (WEIGHTS, "'x'", "-4 bytes")),
    (header(entry(shape=[1 << 61]), bytes(4)), (WEIGHTS, "4 bytes", "expected")),
    (header(entry(data_offsets=[4, 8]), bytes(8)), (WEIGHTS, "begins at byte")),
    (header(entry()), (WEIGHTS, "cut")),
    (header(entry(), bytes(5)), (WEIGHTS, "stray bytes")),
    (header('{"x": {}, "x": {}}'), (WEIGHTS, "twice")),
    (header("{}"), (WEIGHTS, "no tensors")),
    (pickle_only, ("adapter_model.bin", "pickle", "safe_serialization")),
    (replaced("chat_template.jinja", b"\xff"), ("chat_template.jinja", "UTF-8")),
    (replaced("chat_template.jinja", bytes(2 << 20)), ("chat_template.jinja", "at most")),
    (replaced("added_tokens.json", b'{"<x>": 64}'), ("added_tokens.json", "64")),
    (
        replaced("tokenizer_config.json", b'{"added_tokens_decoder": {"70": {}}}'),
        ("tokenizer_config.json", "70"),
    ),
    (replaced("new_embeddings.safetensors", b""), ("new_embeddings.safetensors",)),
]


@pytest.mark.parametrize(("change", "words"), FOLDER_FAULTS)
def test_promise_9_a_bad_folder_is_refused_by_name(
    change: FolderChange, words: tuple[str, ...], cache: DiskCache, tmp_path: Path
) -> None:
    folder = good_adapter().write(tmp_path / "bad")
    change(folder)
    error = refused(cache, folder)
    assert has(error, *words), error.details
    assert not (folder / "marker").exists()


def test_promise_9_a_special_file_is_refused_without_waiting_for_it(
    cache: DiskCache, tmp_path: Path
) -> None:
    for name in (CONFIG, WEIGHTS):
        folder = good_adapter().write(tmp_path / f"fifo-{name}")
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert has(refused(cache, folder), name, "not a regular file")


def test_promise_9_a_folder_in_place_of_a_file_is_refused(cache: DiskCache, tmp_path: Path) -> None:
    folder = good_adapter().write(tmp_path / "bad")
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    assert has(refused(cache, folder), WEIGHTS, "not a regular file")


def test_promise_9_a_missing_folder_is_not_found(cache: DiskCache, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound):
        cache.snapshot("pirate", tmp_path / "nowhere", TINY_BASE, MAX_RANK)


def shards(folder: Path, index: str, count: int = 2) -> dict[str, str]:
    """Split a good adapter over files; answers the weight map."""
    files = good_adapter()
    files.write(folder)
    (folder / WEIGHTS).unlink()
    weight_map: dict[str, str] = {}
    for number in range(count):
        name = f"adapter_model-{number + 1:05}-of-{count:05}.safetensors"
        part = dict(list(files.tensors.items())[number::count])
        (folder / name).write_bytes(safetensors_bytes(part))
        weight_map |= dict.fromkeys(part, name)
    if index:
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


@pytest.mark.parametrize("index", [f"{WEIGHTS}.index.json", "model.safetensors.index.json", ""])
def test_promise_9_a_missing_shard_is_named(index: str, cache: DiskCache, tmp_path: Path) -> None:
    shards(tmp_path / "bad", index)
    (tmp_path / "bad" / "adapter_model-00002-of-00002.safetensors").unlink()
    assert has(refused(cache, tmp_path / "bad"), "adapter_model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}']
)
def test_promise_9_an_index_without_a_map_is_refused(
    content: str, cache: DiskCache, tmp_path: Path
) -> None:
    shards(tmp_path / "bad", f"{WEIGHTS}.index.json")
    (tmp_path / "bad" / f"{WEIGHTS}.index.json").write_text(content)
    assert has(refused(cache, tmp_path / "bad"), f"{WEIGHTS}.index.json", "weight_map")


def test_promise_9_an_index_cannot_lead_out_of_the_folder(cache: DiskCache, tmp_path: Path) -> None:
    shards(tmp_path / "bad", "")
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (tmp_path / "bad" / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    assert has(refused(cache, tmp_path / "bad"), "'../secret.safetensors'", "same folder")


def test_every_problem_is_listed_once(cache: DiskCache, tmp_path: Path) -> None:
    files = good_adapter()
    files.config.update(use_dora=True, bias="all", r=2)
    files.tensors["strange"] = tensor(np.ones(1))
    error = refused(cache, files.write(tmp_path / "bad"))
    assert len(set(error.details)) == len(error.details)
    for words in (("use_dora",), ("bias",), ("strange",), ("rank 4", "expected 2")):
        assert has(error, *words)
    assert f"({len(error.details) - 1} more in details)" in error.message


def test_a_flood_of_problems_is_counted(cache: DiskCache, tmp_path: Path) -> None:
    files = good_adapter()
    files.tensors |= {f"strange{number}": tensor([1]) for number in range(300)}
    error = refused(cache, files.write(tmp_path / "bad"))
    assert len(error.details) == 101
    assert "200 more problems" in error.details[-1]
