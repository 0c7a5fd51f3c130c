"""What is accepted, what the manifest says of it, and which folders are one version."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from lorry.artifacts.cache import DiskCache
from lorry.artifacts.manifest import PACKED_OVERHEAD_BYTES
from lorry.artifacts.snapshot import Snapshot
from tests.fixtures.adapters import (
    TINY_BASE,
    AdapterFiles,
    good_adapter,
    key,
    module_names,
    safetensors_bytes,
    tensor,
)

WEIGHTS = "adapter_model.safetensors"
Q0 = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def take(tmp_path: Path) -> Callable[..., Snapshot]:
    """Write an adapter (and change the folder) and snapshot it."""
    cache = DiskCache(tmp_path / "cache", None)
    numbers = iter(range(1000))

    def take(
        files: AdapterFiles, change: Callable[[Path], object] = lambda folder: None
    ) -> Snapshot:
        folder = files.write(tmp_path / str(next(numbers)))
        change(folder)
        return cache.snapshot("pirate", folder, TINY_BASE, 16)

    return take


Take = Callable[..., Snapshot]


def stored_config(snapshot: Snapshot) -> dict[str, Any]:
    """The snapshot's `adapter_config.json`."""
    content: dict[str, Any] = json.loads((snapshot.path / "adapter_config.json").read_bytes())
    return content


def test_the_manifest_says_what_the_adapter_is(take: Take) -> None:
    manifest = take(good_adapter(rank=4, alpha=8)).manifest
    assert (manifest.rank, manifest.alpha, manifest.scale_rule) == (4, 8.0, "alpha/r")
    assert manifest.target_modules == tuple(
        sorted(name.rpartition(".")[2] for name in TINY_BASE.targets)
    )
    assert manifest.layers == (0, 1)
    assert manifest.parameters == sum(4 * (i + o) for i, o in TINY_BASE.targets.values()) * 2
    assert manifest.host_bytes == manifest.parameters * 4 + PACKED_OVERHEAD_BYTES
    assert (manifest.dtype, manifest.base_model) == ("float32", "tiny")


def test_the_manifest_counts_what_lies_on_the_disk(take: Take) -> None:
    snapshot = take(good_adapter(), lambda f: (f / "chat_template.jinja").write_text("{{ x }}"))
    assert sum(path.stat().st_size for path in snapshot.path.iterdir()) == snapshot.manifest.bytes
    assert snapshot.manifest.chat_template == "{{ x }}"
    assert (snapshot.path / "chat_template.jinja").read_text() == "{{ x }}"


@pytest.mark.parametrize(
    ("dtype", "name"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")]
)
def test_each_dtype_is_kept_as_it_is(take: Take, dtype: str, name: str) -> None:
    files = good_adapter(dtype=dtype)
    snapshot = take(files)
    assert snapshot.manifest.dtype == name
    with safe_open(snapshot.path / WEIGHTS, "numpy") as stored:
        assert sorted(stored.keys()) == sorted(files.tensors)
        assert stored.metadata() == {"format": "pt"}
    assert (
        (snapshot.path / WEIGHTS)
        .read_bytes()
        .endswith(b"".join(files.tensors[each].data for each in sorted(files.tensors)))
    )


def test_dtypes_may_be_mixed_and_lie_aligned(take: Take) -> None:
    files = good_adapter(rank=3)
    name = key("model.layers.0.mlp.down_proj", "A")
    files.tensors[name] = tensor(np.ones((3, 24)), "BF16")
    snapshot = take(files)
    assert snapshot.manifest.dtype == "mixed"
    content = (snapshot.path / WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert (8 + length) % 64 == 0
    begins = [
        (entry["dtype"], entry["data_offsets"][0])
        for entry_name, entry in header.items()
        if entry_name != "__metadata__"
    ]
    assert all(begin % 4 == 0 for dtype, begin in begins if dtype == "F32")


def test_the_numbers_are_kept_exactly(take: Take) -> None:
    files = good_adapter()
    stored = load_file(take(files).path / WEIGHTS)
    assert all(stored[name].tobytes() == each.data for name, each in files.tensors.items())


def test_the_snapshot_is_a_folder_that_peft_reads(take: Take) -> None:
    from peft import LoraConfig

    snapshot = take(good_adapter(rank=4, alpha=8, use_rslora=True))
    config = LoraConfig.from_pretrained(str(snapshot.path))
    assert isinstance(config, LoraConfig)
    assert (config.r, config.lora_alpha, config.use_rslora) == (4, 8, True)


def same(change: Callable[[AdapterFiles], object]) -> Any:
    """A way to write the same adapter differently."""
    return pytest.param(change, lambda folder: None)


def renamed(change: Callable[[str], str]) -> Callable[[AdapterFiles], object]:
    def rename(files: AdapterFiles) -> None:
        files.tensors = {change(name): each for name, each in files.tensors.items()}

    return rename


def sharded(folder: Path) -> None:
    files = good_adapter()
    (folder / WEIGHTS).unlink()
    weight_map: dict[str, str] = {}
    for number in range(3):
        name = f"model-{number + 1:05}-of-00003.safetensors"
        part = dict(list(files.tensors.items())[number::3])
        (folder / name).write_bytes(safetensors_bytes(part))
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def unindexed(folder: Path) -> None:
    sharded(folder)
    (folder / "model.safetensors.index.json").unlink()


@pytest.mark.parametrize(
    ("change", "folder_change"),
    [
        same(lambda files: files.config.update(lora_alpha=8.0)),
        same(lambda files: files.config.update(base_model_name_or_path="/elsewhere", revision="x")),
        same(lambda files: files.config.update(lora_dropout=0.5, task_type=None)),
        same(lambda files: files.config.update(init_lora_weights="gaussian")),
        same(lambda files: files.config["target_modules"].reverse()),
        same(lambda files: files.config.update(target_modules="all-linear")),
        same(lambda files: files.config.update(target_modules=r".*layers\.\d+\..*_proj")),
        same(lambda files: files.config.update(target_modules=module_names())),
        same(lambda files: files.config.update(layers_to_transform=[1, 0])),
        same(lambda files: files.config.update(rank_pattern={".*proj": 4}, r=2)),
        same(lambda files: files.config.update(alpha_pattern={"q_proj": 8})),
        same(lambda files: files.config.update(use_newer_field=None, unknown="x")),
        same(renamed(lambda name: name.removeprefix("base_model.model."))),
        same(renamed(lambda name: name.replace(".weight", ".default.weight"))),
        same(lambda files: files.config["target_modules"].append("not_in_this_base")),
        same(lambda files: setattr(files, "tensors", dict(reversed(files.tensors.items())))),
        pytest.param(lambda files: None, sharded),
        pytest.param(lambda files: None, unindexed),
        pytest.param(
            lambda files: None,
            lambda folder: (folder / WEIGHTS).write_bytes(
                safetensors_bytes(good_adapter().tensors, {"format": "pt", "note": "x"})
            ),
        ),
        pytest.param(lambda files: None, lambda f: (f / "adapter_model.bin").write_text("x")),
    ],
)
def test_spelling_does_not_change_the_version(
    change: Callable[[AdapterFiles], object], folder_change: Callable[[Path], object], take: Take
) -> None:
    files = good_adapter()
    change(files)
    assert take(files, folder_change).manifest.version == take(good_adapter()).manifest.version


@pytest.mark.parametrize(
    "change",
    [
        lambda files: files.config.update(lora_alpha=9),
        lambda files: files.config.update(lora_alpha=-8),
        lambda files: files.config.update(use_rslora=True),
        lambda files: files.config.update(alpha_pattern={"q_proj": 9}),
        lambda files: files.tensors.update({key(Q0, "A"): tensor(np.ones((4, 16)))}),
        lambda files: files.tensors.update({key(Q0, "A"): tensor(np.ones((4, 16)), "F16")}),
    ],
)
def test_what_changes_the_answer_changes_the_version(
    change: Callable[[AdapterFiles], object], take: Take
) -> None:
    files = good_adapter()
    change(files)
    assert take(files).manifest.version != take(good_adapter()).manifest.version


def test_the_chat_template_is_part_of_the_version(take: Take) -> None:
    template = take(good_adapter(), lambda f: (f / "chat_template.jinja").write_text("{{ x }}"))
    older = take(
        good_adapter(),
        lambda f: (f / "tokenizer_config.json").write_text('{"chat_template": "{{ x }}"}'),
    )
    assert template.manifest.version == older.manifest.version
    assert template.manifest.version != take(good_adapter()).manifest.version


def test_some_modules_of_some_layers_are_enough(take: Take) -> None:
    files = good_adapter(targets=["self_attn.q_proj", "mlp.up_proj"])
    files.config["layers_to_transform"] = 1
    files.tensors = {name: each for name, each in files.tensors.items() if ".layers.1." in name}
    snapshot = take(files)
    assert snapshot.manifest.layers == (1,)
    assert snapshot.manifest.target_modules == ("q_proj", "up_proj")
    assert stored_config(snapshot)["target_modules"] == [
        "model.layers.1.mlp.up_proj",
        "model.layers.1.self_attn.q_proj",
    ]


def test_patterns_are_stored_resolved_because_their_order_matters(take: Take) -> None:
    files = good_adapter(rank=4)
    files.config["alpha_pattern"] = {"layers.0.self_attn.q_proj": 3, "q_proj": 5}
    assert stored_config(take(files))["alpha_pattern"] == {
        "model.layers.0.self_attn.q_proj": 3,
        "model.layers.1.self_attn.q_proj": 5,
    }
    files.config["alpha_pattern"] = {"q_proj": 5, "layers.0.self_attn.q_proj": 3}
    assert set(stored_config(take(files))["alpha_pattern"].values()) == {5}


def test_ranks_may_differ_per_module(take: Take) -> None:
    files = good_adapter(rank=4)
    files.tensors[key(Q0, "A")] = tensor(np.ones((16, 16)))
    files.tensors[key(Q0, "B")] = tensor(np.ones((16, 16)))
    files.config["rank_pattern"] = {Q0: 16}
    snapshot = take(files)
    assert snapshot.manifest.rank == 16
    assert stored_config(snapshot)["rank_pattern"] == {Q0: 16}


def test_a_module_may_be_zero_when_another_is_not(take: Take) -> None:
    files = good_adapter()
    files.tensors[key(Q0, "B")] = tensor(np.zeros((16, 4)))
    assert take(files).manifest.rank == 4


def test_missing_fields_mean_what_they_mean_in_peft(take: Take) -> None:
    files = good_adapter(rank=8)
    files.config = {"peft_type": "LORA", "target_modules": "all-linear"}
    manifest = take(files).manifest
    assert (manifest.rank, manifest.alpha, manifest.base_model) == (8, 8.0, None)
