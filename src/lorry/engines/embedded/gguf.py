"""GGUF files: their fields and tensors, read here without the `gguf` package's slow reader.

That package takes seconds to turn a tokenizer of 50,000 entries into arrays that we do not need;
walking over them takes a twentieth. Its `dequantize` is used for the numbers. Layout of a file, all
little-endian:

    magic  version  tensor count  field count
    fields: name, type, value
    tensors: name, dims, type, offset
    data
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lorry.errors import ModelInvalid, ModelUnsupported

STRING, ARRAY = 8, 9
SCALARS: Mapping[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
TEXT_MAX_BYTES = 1 << 20
"""No name or template is longer; a larger length means that the file is damaged."""
KEPT_ITEMS_MAX = 64
"""Longer arrays are the tokenizer's, which we leave alone."""

ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}

LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]
    """As PyTorch has it: rows first (the file has it the other way round)."""
    kind: int
    """ggml type number."""
    start: int
    """Byte offset in the file."""
    length: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file's fields and tensors; no weight has been read."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def tensor(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """One tensor as float32, dequantised. Raises `ModelInvalid` when its bytes are not all
        there."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        found = self.tensors[name]
        if found.start + found.length > self.path.stat().st_size:
            raise ModelInvalid(
                f"{self.path}: the file ends inside {name}; it needs "
                f"{found.start + found.length} bytes and has {self.path.stat().st_size}."
            )
        raw = np.fromfile(self.path, np.uint8, found.length, offset=found.start)
        kind = GGMLQuantizationType(found.kind)
        rows = raw.reshape(*found.shape[:-1], -1)
        if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            plain = np.float32 if kind == GGMLQuantizationType.F32 else np.float16
            rows = rows.view(plain)
        try:
            flat: np.ndarray[Any, np.dtype[np.float32]] = dequantize(rows, kind)
        except NotImplementedError:
            raise ModelUnsupported(
                f"{self.path}: {name} is stored as {kind.name}, which cannot be dequantised here."
            ) from None
        return flat.reshape(found.shape)


class _Reader:
    """Walks over the head of a file; every read is bounded by the file's size."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file = file
        self.path = path
        self.size = path.stat().st_size

    def take(self, count: int) -> bytes:
        data = self.file.read(count) if count <= self.size else b""
        if len(data) != count:
            raise ModelInvalid(f"{self.path}: the file ends inside its header; it is cut short.")
        return data

    def scalar(self, kind: int) -> Any:
        form = SCALARS.get(kind)
        if form is None:
            raise ModelInvalid(f"{self.path}: unknown GGUF field type {kind}; it is damaged.")
        return form.unpack(self.take(form.size))[0]

    def text(self) -> str:
        length = self.scalar(10)
        if length > TEXT_MAX_BYTES:
            raise ModelInvalid(
                f"{self.path}: a text of {length} bytes in its header; it is damaged."
            )
        return self.take(length).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A scalar, a text, a short list, or the length of a long list."""
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.scalar(kind)
        item, count = self.scalar(4), self.scalar(10)
        if count <= KEPT_ITEMS_MAX:
            return [self.value(item) for _ in range(count)]
        self.skip(item, count)
        return count

    def skip(self, kind: int, count: int) -> None:
        if kind == STRING:
            for _ in range(count):
                self.take(self.scalar(10))
        elif kind in SCALARS:
            self.take(SCALARS[kind].size * count)
        else:
            raise ModelInvalid(f"{self.path}: a list of type {kind} in its header; it is damaged.")


@lru_cache(maxsize=2)
def _open(path: Path, size: int, changed_ns: int) -> GgufFile:
    """`size` and `changed_ns` are part of the key, so an exchanged file is read again."""
    with path.open("rb") as file:
        reader = _Reader(file, path)
        if reader.take(4) != b"GGUF":
            raise ModelInvalid(f"{path}: not a GGUF file (it does not begin with 'GGUF').")
        version = reader.scalar(4)
        if version not in (2, 3):
            raise ModelUnsupported(f"{path}: GGUF version {version}; 2 and 3 are read.")
        tensors, fields = reader.scalar(10), reader.scalar(10)
        read = {reader.text(): reader.value(reader.scalar(4)) for _ in range(fields)}
        found = [_tensor_info(reader) for _ in range(tensors)]
        align = int(read.get("general.alignment", 32))
        start = -(-file.tell() // align) * align
    return GgufFile(path, read, {t.name: _moved(t, start) for t in found})


def open_gguf(path: Path) -> GgufFile:
    """Fields and tensor places of a file. Raises `ModelInvalid`."""
    try:
        stat = path.stat()
        return _open(path, stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise ModelInvalid(f"{path}: {error.strerror or error}.") from error


def _tensor_info(reader: _Reader) -> GgufTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name = reader.text()
    dims = [reader.scalar(10) for _ in range(reader.scalar(4))]
    kind, offset = reader.scalar(4), reader.scalar(10)
    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise ModelUnsupported(f"{reader.path}: {name} has the unknown ggml type {kind}.") from None
    count = int(np.prod(dims, dtype=object))
    return GgufTensor(name, tuple(reversed(dims)), kind, offset, count // block * size)


def _moved(tensor: GgufTensor, start: int) -> GgufTensor:
    return GgufTensor(tensor.name, tensor.shape, tensor.kind, tensor.start + start, tensor.length)


def gguf_config(path: Path) -> dict[str, Any]:
    """The `config.json` that this file's model would have. Raises `ModelInvalid`,
    `ModelUnsupported`."""
    file = open_gguf(path)
    name = str(file.fields.get("general.architecture", "(none given)"))
    if name not in ARCHITECTURES:
        raise ModelUnsupported(
            f"{path}: the GGUF architecture is {name}; the embedded engine computes "
            f"{', '.join(ARCHITECTURES)}."
        )
    architecture, model_type = ARCHITECTURES[name]
    if file.fields.get(f"{name}.expert_count"):
        raise ModelUnsupported(f"{path}: {name} with a mixture of experts is not computed.")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
    }
    config |= _sizes(file, name) | {"rope_parameters": _rope(file, name)}
    for token in ("bos", "eos"):
        config[f"{token}_token_id"] = file.fields.get(f"tokenizer.ggml.{token}_token_id")
    return config


def _sizes(file: GgufFile, name: str) -> dict[str, Any]:
    def field(key: str, default: Any = None) -> Any:
        value = file.fields.get(f"{name}.{key}", default)
        if value is None:
            raise ModelInvalid(f"{file.path}: the field {name}.{key} is missing.")
        if isinstance(value, list):
            raise ModelUnsupported(f"{file.path}: {name}.{key} differs by layer: not computed.")
        return value

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelInvalid(f"{file.path}: the tensor token_embd.weight is missing.")
    heads, hidden = field("attention.head_count"), field("embedding_length")
    head_dim = field("attention.key_length", hidden // heads)
    if field("rope.dimension_count", head_dim) != head_dim:
        raise ModelUnsupported(f"{file.path}: {name} with partial rotary positions: not computed.")
    return {
        "hidden_size": hidden,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def _rope(file: GgufFile, name: str) -> dict[str, Any]:
    kind = file.fields.get(f"{name}.rope.scaling.type", "none")
    rope: dict[str, Any] = {
        "rope_theta": float(file.fields.get(f"{name}.rope.freq_base", 10000.0)),
        "rope_type": "default",
    }
    factor = file.fields.get(f"{name}.rope.scaling.factor")
    if kind == "linear" and factor is not None:
        rope |= {"rope_type": kind, "factor": float(factor)}
    elif kind != "none" or "rope_freqs.weight" in file.tensors:
        raise ModelUnsupported(
            f"{file.path}: rope scaling of a GGUF ({kind}, rope_freqs) is not computed; "
            "use the model's safetensors files."
        )
    return rope


def hf_name(name: str) -> str:
    """Name of a GGUF tensor in a Hugging Face file: `blk.3.attn_q.weight` ->
    `model.layers.3.self_attn.q_proj.weight`."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in LAYER_NAMES:
        return name
    return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
