"""Folders that PEFT or safetensors cannot read are not accepted either: found by `tests/fuzz`."""

import json
from pathlib import Path

import numpy as np
import pytest

from lorry.artifacts.cache import DiskCache
from lorry.artifacts.snapshot import Snapshot
from lorry.errors import AdapterInvalid
from tests.fixtures.adapters import TINY_BASE, good_adapter, safetensors_bytes, tensor


def take(folder: Path) -> Snapshot:
    """Judge it."""
    return DiskCache(folder.parent / "cache", None).snapshot("x", folder, TINY_BASE, 16)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task_type", "POETRY"),
        ("task_type", False),
        ("lora_dropout", None),
        ("lora_dropout", 1.5),
        ("lora_dropout", "much"),
        ("eva_config", []),
        ("loftq_config", 0),
        ("rank_pattern", None),
        ("alpha_pattern", None),
        ("target_parameters", ""),
        ("trainable_token_indices", []),
        ("use_bdlora", False),
        ("kasa_config", {}),
    ],
)
def test_promise_9_a_field_that_peft_cannot_read_is_named(
    tmp_path: Path, field: str, value: object
) -> None:
    files = good_adapter()
    files.config[field] = value
    with pytest.raises(AdapterInvalid, match=field):
        take(files.write(tmp_path / "x"))


@pytest.mark.parametrize("metadata", ["x", [], 1, {"n": 1}, {"a": None}])
def test_promise_9_metadata_that_safetensors_cannot_read_is_refused(
    tmp_path: Path, metadata: object
) -> None:
    files = good_adapter()
    folder = files.write(tmp_path / "x")
    weights = safetensors_bytes(files.tensors, {})
    length = int.from_bytes(weights[:8], "little")
    spoilt = weights[8 : 8 + length].replace(b": {}", b": " + json.dumps(metadata).encode(), 1)
    (folder / "adapter_model.safetensors").write_bytes(
        len(spoilt).to_bytes(8, "little") + spoilt + weights[8 + length :]
    )
    with pytest.raises(AdapterInvalid, match="__metadata__"):
        take(folder)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_promise_9_a_config_in_another_encoding_is_refused(tmp_path: Path, encoding: str) -> None:
    folder = good_adapter().write(tmp_path / "x")
    config = folder / "adapter_config.json"
    config.write_bytes(config.read_text().encode(encoding))
    with pytest.raises(AdapterInvalid, match="is not JSON"):
        take(folder)


@pytest.mark.parametrize(("kind", "number"), [("F32", 2e38), ("BF16", 2e38), ("F32", 3.4e38)])
def test_promise_9_numbers_that_the_scale_makes_infinite_are_refused(
    tmp_path: Path, kind: str, number: float
) -> None:
    files = good_adapter(rank=4, alpha=8)
    name = next(name for name in files.tensors if "lora_B" in name)
    shape = files.tensors[name].shape
    files.tensors[name] = tensor(np.full(shape, number), kind)
    with pytest.raises(AdapterInvalid, match="makes infinite"):
        take(files.write(tmp_path / "x"))
    files.tensors[name] = tensor(np.full(shape, 1e38), kind)
    assert take(files.write(tmp_path / "y")).manifest.rank == 4
