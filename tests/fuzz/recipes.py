"""From a number to an adapter folder that somebody mangled: a good adapter of some sort, and up to
three changes of its config, its tensors, its bytes or its files."""

import json
import os
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.fixtures.adapters import (
    TARGETS,
    AdapterFiles,
    Tensor,
    good_adapter,
    safetensors_bytes,
    tensor,
)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
CHANGES_MOST = 3


@dataclass(slots=True)
class Draft:
    """An adapter on its way to the disk; each stage changes what the one before has made."""

    rng: random.Random
    files: AdapterFiles
    config: bytes = b""
    header: dict[str, Any] = field(default_factory=dict)
    data: bytes = b""
    weights: bytes = b""
    folder: Path = Path()

    def some_tensor(self) -> str:
        """The name of one, for a change of it; "" when none is left."""
        names = sorted(self.files.tensors)
        return self.rng.choice(names) if names else ""

    def some_entry(self) -> dict[str, Any]:
        """One entry of the header."""
        entries = [e for e in self.header.values() if isinstance(e, dict) and "shape" in e]
        return self.rng.choice(entries) if entries else {}


Change = Callable[[Draft], None]


# The good adapters


def good(rng: random.Random) -> AdapterFiles:
    """One that PEFT could have written."""
    rank = rng.choice((1, 2, 4, 8))
    targets = rng.sample(sorted(TARGETS), rng.randint(1, len(TARGETS)))
    kind = rng.choice(("F32", "F32", "F16", "BF16"))
    options: dict[str, Any] = {"use_rslora": rng.random() < 0.2}
    if rng.random() < 0.2:
        options["alpha_pattern"] = {targets[0].rpartition(".")[2]: rng.randint(1, 40)}
    alpha = rng.choice((1, 8, 16, 0.5))
    return good_adapter(
        rng.randrange(10**6), rank=rank, alpha=alpha, dtype=kind, targets=targets, **options
    )


# Changes of the config's fields, and of tensors

FIELDS = (
    *good_adapter().config,
    *("exclude_modules", "layers_to_transform", "layers_pattern", "trainable_token_indices"),
    *("layer_replication", "loftq_config", "use_qalora", "lora_bias", "target_parameters"),
    *("eva_config", "megatron_config", "runtime_config", "revision", "auto_mapping", "new_field"),
)

WORDS = (
    *("q_proj", ".*", "(", "layers.0", "all-linear", "(a|b)*c", "\ud800", "lm_head", "", "[^x]+"),
    *("none", "LORA", "IA3", "gaussian", "pissa", "0", "NaN", "../..", "x" * 5000, "\x00", "ß" * 9),
)
NUMBERS = (0, 1, -1, 2, 3, 4, 8, 16, 17, 64, 2**31, 2**63, 10**400, -(2**65))
FLOATS = (0.0, -0.0, 0.5, 4.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"))


def value(rng: random.Random, depth: int = 2) -> Any:
    """Anything that JSON can hold, and some that it should not."""
    kind = rng.randrange(8 if depth else 5)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind == 1:
        return rng.choice(NUMBERS)
    if kind == 2:
        return rng.choice(FLOATS)
    if kind in (3, 4):
        return rng.choice(WORDS)
    if kind in (5, 6):
        return [value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(WORDS): value(rng, depth - 1) for _ in range(rng.randint(0, 3))}


def set_a_field(draft: Draft) -> None:
    """To anything."""
    draft.files.config[draft.rng.choice(FIELDS)] = value(draft.rng)


def set_a_pattern(draft: Draft) -> None:
    """Ranks or alphas of some modules."""
    key = draft.rng.choice(("rank_pattern", "alpha_pattern"))
    where = draft.rng.choice(("q_proj", ".*", "layers.0.mlp.up_proj", "(", "nothing", "proj"))
    draft.files.config[key] = {where: draft.rng.choice((1, 2, 4, 8, 0, -3, 2.5, "4", None))}


def drop_a_field(draft: Draft) -> None:
    """Which then has PEFT's default."""
    draft.files.config.pop(draft.rng.choice(sorted(draft.files.config)), None)


def name_other_modules(draft: Draft) -> None:
    """More, fewer, all, by expression, by full name."""
    targets = draft.files.config.get("target_modules")
    names = targets if isinstance(targets, list) else []
    draft.files.config["target_modules"] = draft.rng.choice(
        (
            *("all-linear", r".*_proj", r".*\.(q|k)_proj", [], None, "q_proj", 7, [None]),
            *([*names, "lm_head"], [*names, "nothing"], names[:1], ["model.layers.0.mlp.up_proj"]),
        )
    )


def choose_layers(draft: Draft) -> None:
    """Some, none, too many."""
    config = draft.files.config
    config["layers_to_transform"] = draft.rng.choice((0, 1, [0], [1, 0], [], [5], -1, [0, "1"]))
    if draft.rng.random() < 0.3:
        config["layers_pattern"] = draft.rng.choice(("layers", ["layers"], "blocks", "", None))


def drop_a_tensor(draft: Draft) -> None:
    """One half of a module is left."""
    draft.files.tensors.pop(draft.some_tensor(), None)


def drop_a_module(draft: Draft) -> None:
    """Both halves."""
    stem = draft.some_tensor().rpartition(".lora_")[0]
    tensors = draft.files.tensors
    draft.files.tensors = {name: one for name, one in tensors.items() if not name.startswith(stem)}


def rename_a_tensor(draft: Draft) -> None:
    """Another layer, module, prefix or half."""
    name = draft.some_tensor()
    one = draft.files.tensors.pop(name, None)
    if one is None:
        return
    old, new = draft.rng.choice(
        (
            *((".layers.0.", ".layers.9."), (".layers.1.", ".layers.-1."), ("lora_A", "lora_B")),
            *((".weight", ".default.weight"), (".weight", ".other.weight"), (PREFIX, "")),
            *(("model.layers", "model.model.layers"), ("_proj", "_prj"), ("layers.1", "layers.01")),
            *((".weight", ""), (".weight", ".bias"), ("lora_A", "lora_magnitude_vector")),
        )
    )
    draft.files.tensors[name.replace(old, new)] = one


def rename_all(draft: Draft) -> None:
    """As other programs write them."""
    old, new = draft.rng.choice(
        ((PREFIX, ""), (".weight", ".default.weight"), (PREFIX, "model."), (PREFIX, PREFIX * 2))
    )
    tensors = draft.files.tensors
    draft.files.tensors = {name.replace(old, new, 1): one for name, one in tensors.items()}


def add_a_tensor(draft: Draft) -> None:
    """What LoRA alone does not have."""
    name, shape = draft.rng.choice(
        (
            ("base_model.model.lm_head.weight", (64, 16)),
            ("base_model.model.model.embed_tokens.weight", (70, 16)),
            ("base_model.model.model.layers.0.mlp.up_proj.bias", (24,)),
            ("base_model.model.model.layers.7.mlp.up_proj.lora_A.weight", (4, 16)),
            ("anything", (1,)),
            ("", (2, 2)),
        )
    )
    draft.files.tensors[name] = tensor(np.ones(shape))


def resize_a_tensor(draft: Draft) -> None:
    """Another rank, another width, transposed, empty."""
    name = draft.some_tensor()
    if not name:
        return
    rows, columns = (*draft.files.tensors[name].shape, 1, 1)[:2]
    shape = draft.rng.choice(
        (
            *((columns, rows), (rows + 1, columns), (rows, columns + 8), (rows, 0), (0, columns)),
            *((rows * columns,), (rows, columns, 1), (), (1, rows, columns), (rows, columns)),
        )
    )
    draft.files.tensors[name] = tensor(np.full(shape, 0.25))


def spoil_numbers(draft: Draft) -> None:
    """One number, or all of one tensor."""
    name = draft.some_tensor()
    if not name or not draft.files.tensors[name].data:
        return
    shape = draft.files.tensors[name].shape
    values = np.random.default_rng(draft.rng.randrange(99)).standard_normal(shape)
    bad = draft.rng.choice(
        (float("nan"), float("inf"), -float("inf"), 0.0, 1e-42, 3e38, 6e4, 1e6, -1.0)
    )
    if draft.rng.random() < 0.5:
        values[:] = bad
    else:
        values.reshape(-1)[draft.rng.randrange(values.size)] = bad
    kind = draft.rng.choice(("F32", "F16", "BF16", "F64"))
    with np.errstate(over="ignore"):
        draft.files.tensors[name] = tensor(values, kind)


def change_nothing_at_all(draft: Draft) -> None:
    """Every B is zero: an adapter that is none."""
    for name, one in draft.files.tensors.items():
        if "lora_B" in name:
            draft.files.tensors[name] = Tensor(one.dtype, one.shape, bytes(len(one.data)))


# Changes of the config's text and of the header


def spoil_config_text(draft: Draft) -> None:
    """No JSON, or strange JSON."""
    text = draft.config or b"{}"  # it may have been spoilt before
    half = text[: draft.rng.randrange(len(text))]
    draft.config = draft.rng.choice(
        (
            *(half, b"", b"null", b"[]", b'"x"', b"{}", b"\xff\xfe" + text, b"\xef\xbb\xbf" + text),
            *(
                text + b"x",
                text + b"\n\n",
                text.decode("utf-8", "replace").encode("utf-16"),
                b"[" * 100_000,
            ),
            *(b'{"r": 1, ' + text[1:], text[:-1] + b', "r": 4}', text.replace(b"8", b"1e2")),
            *(text.replace(b'"', b"'"), text + b" " * 3_000_000, b"\x00" * 64, b'{"r": 1e999}'),
        )
    )


def spoil_an_entry(draft: Draft) -> None:
    """Of the header: dtype, shape, offsets."""
    entry, rng = draft.some_entry(), draft.rng
    if not entry:
        return
    key = rng.choice(("dtype", "shape", "data_offsets", "more"))
    offsets = entry.get("data_offsets")
    begin, end = offsets if isinstance(offsets, list) and len(offsets) == 2 else (0, 0)
    choices: dict[str, Sequence[Any]] = {
        "dtype": ("F32", "F16", "BF16", "F64", "I8", "F8_E4M3", "X", None, 4, []),
        "shape": ([], [0], [-1, 4], [2**40, 2**40], [4.0, 4], None, "44", [[4]], [1] * 70),
        "data_offsets": (
            *([begin, end + 1], [begin + 1, end + 1], [end, begin], [-4, end], [begin], None),
            *([begin, 2**63], [0, end - begin], [begin, end, end], ["0", "4"], [0.0, 4.0]),
        ),
        "more": (1, None, "x"),
    }
    entry[key] = rng.choice(choices[key])


def spoil_metadata(draft: Draft) -> None:
    """What a program may write beside the tensors."""
    draft.header["__metadata__"] = draft.rng.choice(
        ({"format": "pt"}, {"a": "b" * 2000}, {"n": 1}, None, [], "x", {"": ""}, {"format": "tf"})
    )


def double_a_name(draft: Draft) -> None:
    """In the header's text; the weights are packed here already."""
    name = next(iter(draft.header), "")
    text = json.dumps(draft.header)[:-1] + f", {json.dumps(name)}: "
    text += json.dumps(draft.header.get(name)) + "}"
    draft.weights = packed(text.encode(), draft.data)


# Changes of bytes


def packed(header: bytes, data: bytes) -> bytes:
    """A safetensors file."""
    return len(header).to_bytes(8, "little") + header + data


def spoil_length(draft: Draft) -> None:
    """Of the header, as its first eight bytes say."""
    length = draft.rng.choice((0, 1, 7, 2**31, 2**60, 2**64 - 1, len(draft.weights)))
    draft.weights = length.to_bytes(8, "little") + draft.weights[8:]


def resize_the_file(draft: Draft) -> None:
    """Cut or longer."""
    data, rng = draft.weights, draft.rng
    draft.weights = rng.choice(
        (data[: rng.randrange(len(data) + 1)], data + b"x", data + bytes(4096), b"", data[:8])
    )


def flip_a_bit(draft: Draft) -> None:
    """Anywhere."""
    data = bytearray(draft.weights)
    if data:
        data[draft.rng.randrange(len(data))] ^= 1 << draft.rng.randrange(8)
    draft.weights = bytes(data)


def flip_header_bits(draft: Draft) -> None:
    """Where names, shapes and offsets are."""
    data = bytearray(draft.weights)
    for _ in range(draft.rng.randint(1, 3)):
        if data:
            data[draft.rng.randrange(min(len(data), 600))] = draft.rng.randrange(256)
    draft.weights = bytes(data)


# Changes of the folder


def clear(place: Path) -> None:
    """Nothing is there any more, whatever an earlier change has put there."""
    if place.is_dir() and not place.is_symlink():
        place.rmdir()
    else:
        place.unlink(missing_ok=True)


def remove_a_file(draft: Draft) -> None:
    """Config or weights."""
    clear(draft.folder / draft.rng.choice((CONFIG, WEIGHTS)))


def put_something_in_place(draft: Draft) -> None:
    """A folder, a pipe or a link where a file should be."""
    place = draft.folder / draft.rng.choice((CONFIG, WEIGHTS))
    clear(place)
    kind = draft.rng.randrange(5)
    if kind == 0:
        place.mkdir()
    elif kind == 1:
        os.mkfifo(place)
    elif kind == 2:
        place.symlink_to("/dev/zero")
    elif kind == 3:
        place.symlink_to(place.name)
    else:
        place.symlink_to(Path(__file__))


def add_files(draft: Draft) -> None:
    """That belong to nothing, or that mean something."""
    name, content = draft.rng.choice(
        (
            ("README.md", b"hello"),
            (".hidden", b"\x00"),
            ("optimizer.pt", b"x" * 1000),
            ("adapter_model.bin", pickle.dumps({"x": 1})),
            ("chat_template.jinja", b"{{ messages }}"),
            ("chat_template.jinja", b"{% for %}"),
            ("chat_template.jinja", b"\xff"),
            ("tokenizer_config.json", b'{"chat_template": 5}'),
            ("tokenizer_config.json", b"{"),
            ("added_tokens.json", b'{"<x>": 64}'),
            ("added_tokens.json", b'{"<x>": 3}'),
            ("tokenizer.json", b"{}"),
            ("adapter_model.safetensors.index.json", b"{}"),
        )
    )
    (draft.folder / name).write_bytes(content)


def pickle_alone(draft: Draft) -> None:
    """No safetensors at all."""
    clear(draft.folder / WEIGHTS)
    (draft.folder / "adapter_model.bin").write_bytes(pickle.dumps({"x": draft}.keys().__len__()))


def shard(draft: Draft) -> None:
    """The weights in several files, with an index that may lie."""
    names = sorted(draft.files.tensors)
    clear(draft.folder / WEIGHTS)
    weight_map: dict[str, Any] = {}
    for number in range(2):
        file = f"adapter_model-{number + 1:05}-of-00002.safetensors"
        part = {name: draft.files.tensors[name] for name in names[number::2]}
        (draft.folder / file).write_bytes(safetensors_bytes(part))
        weight_map |= dict.fromkeys(part, file)
    lie = draft.rng.choice((None, None, "../../etc/passwd", "missing.safetensors", 7))
    if lie is not None and weight_map:
        weight_map[names[0]] = lie
    index = {"metadata": {}, "weight_map": weight_map}
    (draft.folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


STAGES: Sequence[Sequence[Change]] = (
    (
        *(set_a_field, set_a_field, set_a_field, set_a_pattern, drop_a_field, name_other_modules),
        *(choose_layers, drop_a_tensor, drop_a_module, rename_a_tensor, rename_all, add_a_tensor),
        *(resize_a_tensor, spoil_numbers, spoil_numbers, change_nothing_at_all),
    ),
    (spoil_config_text, spoil_an_entry, spoil_an_entry, spoil_metadata),
    (double_a_name, spoil_length, resize_the_file, flip_a_bit, flip_header_bits),
    (remove_a_file, put_something_in_place, add_files, add_files, pickle_alone, shard),
)
"""In the order in which they are made; what stands twice is twice as likely."""


def write(seed: int, folder: Path) -> list[str]:
    """Write the folder of a number; the names of its changes."""
    rng = random.Random(seed)
    draft = Draft(rng, good(rng))
    chosen = [
        (stage, rng.choice(STAGES[stage]))
        for stage in sorted(rng.choices((0, 1, 2, 3), (6, 2, 1, 2), k=rng.randint(0, CHANGES_MOST)))
    ]
    apply(draft, chosen, 0)
    draft.config = json.dumps(draft.files.config).encode("utf-8", "surrogatepass")
    whole = safetensors_bytes(draft.files.tensors)
    length = int.from_bytes(whole[:8], "little")
    draft.header, draft.data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    apply(draft, chosen, 1)
    draft.weights = packed(json.dumps(draft.header).encode(), draft.data)
    apply(draft, chosen, 2)
    folder.mkdir(parents=True)
    (folder / CONFIG).write_bytes(draft.config)
    (folder / WEIGHTS).write_bytes(draft.weights)
    draft.folder = folder
    apply(draft, chosen, 3)
    return [change.__name__ for _, change in chosen]


def apply(draft: Draft, chosen: Sequence[tuple[int, Change]], stage: int) -> None:
    """The changes of one stage."""
    for at, change in chosen:
        if at == stage:
            change(draft)
