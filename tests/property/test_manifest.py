"""Mangled adapter folders: whatever is in them, the answer is a snapshot that can be used or one of
our own errors, and the cache holds complete snapshots only."""

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from lorry.artifacts import folder as folder_module
from lorry.artifacts.cache import DiskCache
from lorry.artifacts.names import check_adapter_name
from lorry.artifacts.sources import resolve_local
from lorry.artifacts.tensors import HeaderInvalid, header_length, parse_header
from lorry.errors import LorryError
from tests.fixtures.adapters import TINY_BASE, AdapterFiles, Tensor, good_adapter

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

FIELDS = [
    *good_adapter().config,
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "trainable_token_indices",
    "layer_replication",
    "loftq_config",
    "use_qalora",
    "new_config",
]

PATTERNS = st.sampled_from(
    ["q_proj", ".*", "(", "layers.0", "all-linear", "(a|b)*c", "\ud800", "lm_head", "", "[^x]+"]
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 20)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | PATTERNS
)

VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | PATTERNS, inner),
    max_leaves=6,
)

SHAPES = st.lists(st.sampled_from([0, 1, 4, 8, 16, 24, 1 << 40]), max_size=3)

KEYS = st.sampled_from(
    [
        *list(good_adapter().tensors)[:4],
        "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight",
        "base_model.model.lm_head.weight",
        "model.layers.0.mlp.up_proj.lora_B.other.weight",
        "__metadata__",
        "",
        "\ud800",
    ]
)

MODEST = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def answer(write: Any) -> None:
    """Write a folder, load it twice, and hold the cache to its promise."""
    with tempfile.TemporaryDirectory() as place, patch.object(folder_module, "SETTLE_S", 0.0):
        folder = Path(place) / "adapter"
        folder.mkdir()
        write(folder)
        cache = DiskCache(Path(place) / "cache", 1 << 20)
        outcomes = [outcome(cache, folder) for _ in range(2)]
        assert outcomes[0] == outcomes[1]
        only_complete(cache)


def outcome(cache: DiskCache, folder: Path) -> tuple[str, Any]:
    """The version, or the error and what it says."""
    try:
        snapshot = cache.snapshot("mangled", folder, TINY_BASE, 8)
    except LorryError as error:
        assert error.message
        assert all(detail.endswith(".") for detail in error.details)
        json.dumps([error.message, *error.details]).encode()
        return error.code, error.details
    assert cache.get(snapshot.manifest.version, snapshot.manifest) == snapshot
    return "kept", snapshot


def only_complete(cache: DiskCache) -> None:
    """Every folder in the cache is a usable snapshot that says its own name."""
    for path in cache.root.iterdir():
        tensors = deserialize((path / WEIGHTS).read_bytes())
        assert tensors
        assert all(finite(spec["dtype"], bytes(spec["data"])) for _, spec in tensors)
        again = cache.snapshot("again", path, TINY_BASE, 8)
        assert again.manifest.version == path.name


def finite(dtype: str, data: bytes) -> bool:
    """No NaN and no infinity among the numbers of a tensor."""
    if dtype == "BF16":
        wide = np.frombuffer(data, "<u2").astype("<u4") << 16
        return bool(np.isfinite(wide.view("<f4")).all())
    return bool(np.isfinite(np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[dtype])).all())


@MODEST
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3))
def test_promise_9_mangled_configs_are_answered_by_our_own_errors(changes: dict[str, Any]) -> None:
    files = good_adapter()
    files.config.update(changes)
    answer(files.write)


@MODEST
@given(st.sampled_from(FIELDS), st.integers(0, 400), st.binary(max_size=6))
def test_promise_9_mangled_config_bytes_are_answered(key: str, at: int, junk: bytes) -> None:
    files = good_adapter()
    files.config.pop(key, None)

    def write(folder: Path) -> None:
        files.write(folder)
        content = (folder / CONFIG).read_bytes()
        (folder / CONFIG).write_bytes(content[:at] + junk + content[at + len(junk) :])

    answer(write)


@MODEST
@given(
    st.dictionaries(
        KEYS,
        st.fixed_dictionaries(
            {},
            optional={
                "dtype": st.sampled_from(["F32", "F16", "BF16", "I8", "F64", "X"]) | VALUES,
                "shape": SHAPES | VALUES,
                "data_offsets": st.lists(st.integers(-4, 4000), max_size=3) | VALUES,
            },
        )
        | VALUES,
        min_size=1,
        max_size=3,
    ),
    st.integers(-64, 64),
)
def test_promise_9_mangled_headers_are_answered_by_our_own_errors(
    entries: dict[str, Any], shift: int
) -> None:
    def write(folder: Path) -> None:
        good_adapter().write(folder)
        content = (folder / WEIGHTS).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        for key, changes in entries.items():
            old = header.get(key)
            merged = (
                {**old, **changes}
                if isinstance(old, dict) and isinstance(changes, dict)
                else changes
            )
            header[key] = merged
        new = json.dumps(header).encode()
        (folder / WEIGHTS).write_bytes(
            max(0, len(new) + shift).to_bytes(8, "little") + new + content[8 + length :]
        )

    answer(write)


@MODEST
@given(st.integers(0, 11_000), st.binary(min_size=1, max_size=12), st.booleans())
def test_promise_9_mangled_weight_bytes_are_answered(at: int, junk: bytes, cut: bool) -> None:
    def write(folder: Path) -> None:
        good_adapter().write(folder)
        content = (folder / WEIGHTS).read_bytes()
        rest = b"" if cut else content[at + len(junk) :]
        (folder / WEIGHTS).write_bytes(content[:at] + junk + rest)

    answer(write)


@MODEST
@given(
    KEYS,
    st.sampled_from(["F32", "F16", "BF16", "I8", "F64"]),
    st.lists(st.sampled_from([0, 1, 4, 8, 16]), max_size=3),
    st.sampled_from([b"\x00", b"\xff", b"\x7f", b"\x3f"]),
)
def test_promise_9_mangled_tensors_are_answered(
    key: str, dtype: str, shape: list[int], filling: bytes
) -> None:
    files: AdapterFiles = good_adapter()
    size = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "F64": 8}[dtype]
    data = filling * int(np.prod(shape, dtype=int)) * size
    files.tensors[key] = Tensor(dtype, tuple(shape), data)
    answer(files.write)


@given(st.binary(max_size=64), st.integers(0, 200))
def test_a_header_of_any_bytes_is_parsed_or_refused(content: bytes, file_bytes: int) -> None:
    try:
        header_length("x.safetensors", content[:8], file_bytes)
        parse_header("x.safetensors", content, file_bytes)
    except HeaderInvalid as error:
        assert str(error).startswith("x.safetensors")


@given(st.text(max_size=300))
def test_a_name_of_any_text_is_accepted_or_refused(name: str) -> None:
    try:
        check_adapter_name(name, {"base"})
    except LorryError:
        return
    assert name.strip() and name.isprintable()


@given(st.text(max_size=40))
def test_a_source_of_any_text_stays_inside_or_is_refused(source: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place).resolve()
        try:
            found = resolve_local(source, [root])
        except LorryError:
            return
        assert found.is_relative_to(root)
