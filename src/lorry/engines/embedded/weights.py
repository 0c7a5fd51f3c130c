"""Model files to parameters: every name and shape is checked before the first weight is read.

Two sources, safetensors folders and GGUF files, answer to the names of Hugging Face. Projections
that share an input are fused into one matrix at load, since a decode step pays for each call: q, k
and v in one, gate and up in one.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lorry.engines.embedded.compute import Compute
from lorry.engines.embedded.family import Family
from lorry.engines.embedded.gguf import GgufFile, hf_name, open_gguf
from lorry.engines.embedded.parameters import LayerWeights, Matrix, ModelWeights
from lorry.engines.embedded.shape import find_gguf
from lorry.errors import ModelInvalid

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), in the model's dtype, as weights arrive."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PROBLEMS_SHOWN_MAX = 8
"""A wrong model misses every tensor; the first few tell the story."""


class WeightSource(Protocol):
    """A model's tensors by their Hugging Face names."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None: there is no such tensor."""

    def read(self, name: str) -> Tensor:
        """The tensor, in any float dtype. Raises `ModelInvalid`."""

    def place(self, name: str) -> str:
        """The file that holds, or should hold, the tensor; for messages."""


class SafetensorsSource:
    """A folder with one `model.safetensors`, or shards and their index."""

    def __init__(self, folder: Path) -> None:
        """Opens every file and reads the headers. Raises `ModelInvalid`."""
        self._folder = folder
        self._files: dict[Path, Any] = {
            path: _open_safetensors(path) for path in _weight_files(folder)
        }
        self._owner: dict[str, Path] = {}
        for path, file in self._files.items():
            self._owner |= dict.fromkeys(file.keys(), path)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """From the header."""
        path = self._owner.get(name)
        return None if path is None else tuple(self._files[path].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """Mapped from the file where the platform allows."""
        path = self._owner[name]
        try:
            tensor: Tensor = self._files[path].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelInvalid(f"{path}: {name} cannot be read ({error}).") from error
        return tensor

    def place(self, name: str) -> str:
        """The shard, or the folder when no shard has it."""
        return str(self._owner.get(name, self._folder))


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        return _indexed_files(index)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickles = sorted(folder.glob("*.bin"))
    hint = f" ({pickles[0].name} is a pickle; it is never read)" if pickles else ""
    raise ModelInvalid(f"{folder}: neither {SINGLE} nor {INDEX} is there{hint}.")


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelInvalid(f"{index}: not a usable index ({error!r}).") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelInvalid(f"{index}: it names {missing[0]}, which is not in the folder.")
    return [index.parent / name for name in names]


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelInvalid(f"{path}: cut short or not safetensors ({error}).") from error


class GgufSource:
    """A GGUF file under Hugging Face names, dequantised as it is read."""

    def __init__(self, path: Path, family: Family) -> None:
        """Reads the file's head only. Raises `ModelInvalid`."""
        self._file: GgufFile = open_gguf(path)
        self._names = {hf_name(name): name for name in self._file.tensors}
        # llama.cpp stores q and k of this architecture with the halves of each head interleaved.
        interleaved = self._file.fields.get("general.architecture") == "llama"
        self._heads = {"q_proj": family.heads, "k_proj": family.kv_heads} if interleaved else {}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """From the file's head."""
        own = self._names.get(name)
        return None if own is None else self._file.tensors[own].shape

    def read(self, name: str) -> Tensor:
        """float32 [out, in]."""
        values = torch.from_numpy(self._file.tensor(self._names[name]))
        heads = self._heads.get(name.split(".")[-2])
        if heads is None:
            return values
        pairs = values.view(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
        return pairs.transpose(1, 2).reshape(values.shape)

    def place(self, name: str) -> str:
        """The one file."""
        return f"{self._file.path} ({self._names.get(name, 'no such tensor')})"


def open_weights(model: Path, family: Family) -> WeightSource:
    """The source that fits what `model` is. Raises `ModelInvalid`."""
    gguf = find_gguf(model)
    return SafetensorsSource(model) if gguf is None else GgufSource(gguf, family)


Piece = tuple[str, tuple[int, ...]]
"""Tensor name and expected shape."""


def _layer_pieces(family: Family, layer: int) -> dict[str, list[Piece]]:
    """Parameter -> the file's tensors that make it, one below another."""
    at = f"model.layers.{layer}."
    hidden: tuple[int, ...] = (family.hidden_size,)
    sizes = family.targets()

    def of(suffix: str, names: tuple[str, ...]) -> list[Piece]:
        bias = suffix == "bias"
        return [
            (f"{at}{name}.{suffix}", sizes[name][1:] if bias else sizes[name][::-1])
            for name in names
        ]

    attention = tuple(f"self_attn.{part}_proj" for part in "qkv")
    mlp = ("mlp.gate_proj", "mlp.up_proj")
    pieces: dict[str, list[Piece]] = {
        "input_norm": [(f"{at}input_layernorm.weight", hidden)],
        "qkv": of("weight", attention),
        "o": of("weight", ("self_attn.o_proj",)),
        "post_norm": [(f"{at}post_attention_layernorm.weight", hidden)],
        "gate_up": of("weight", mlp),
        "down": of("weight", ("mlp.down_proj",)),
    }
    if family.qkv_bias:
        pieces["qkv_bias"] = of("bias", attention)
    if family.o_bias:
        pieces["o_bias"] = of("bias", ("self_attn.o_proj",))
    if family.mlp_bias:
        pieces |= {"gate_up_bias": of("bias", mlp), "down_bias": of("bias", ("mlp.down_proj",))}
    if family.qk_norm:
        norms = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
        pieces["qk_norm"] = [(at + name, (family.head_dim,)) for name in norms]
    return pieces


def _top_pieces(family: Family) -> dict[str, list[Piece]]:
    table = (family.vocab_size, family.hidden_size)
    pieces: dict[str, list[Piece]] = {
        "embedding": [("model.embed_tokens.weight", table)],
        "norm": [("model.norm.weight", (family.hidden_size,))],
    }
    if not family.tied:
        pieces["head"] = [("lm_head.weight", table)]
    return pieces


def _check(source: WeightSource, pieces: Iterator[Piece]) -> int:
    """Number of elements, once every tensor is there in its shape; else `ModelInvalid` with what is
    wrong."""
    problems, elements = [], 0
    for name, expected in pieces:
        found = source.shape(name)
        if found is None:
            problems.append(f"{source.place(name)}: {name} is missing")
        elif found != expected:
            problems.append(
                f"{source.place(name)}: {name} has shape {list(found)}; "
                f"config.json makes it {list(expected)}"
            )
        elements += torch.Size(expected).numel()
    if problems:
        more = f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else ""
        raise ModelInvalid(f"{problems[0]}{more}.", details=problems[:PROBLEMS_SHOWN_MAX])
    return elements


class _Loader(Generic[Matrix]):
    """Reads pieces into parameters and tells how far it is."""

    def __init__(
        self,
        source: WeightSource,
        compute: Compute[Matrix],
        dtype: torch.dtype,
        device: torch.device,
        elements: int,
        progress: Progress | None,
    ) -> None:
        self._source = source
        self._compute = compute
        self._dtype = dtype
        self._device = device
        self._total = elements * dtype.itemsize
        self._done = 0
        self._progress = progress

    def read(self, pieces: list[Piece]) -> Tensor:
        """[sum of rows, ...] in the model's dtype, on its device."""
        rows = sum(shape[0] for _, shape in pieces)
        out = torch.empty((rows, *pieces[0][1][1:]), dtype=self._dtype)
        start = 0
        for name, shape in pieces:
            out[start : start + shape[0]].copy_(self._source.read(name))
            start += shape[0]
        self._done += out.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        return out.to(self._device)

    def layer(self, family: Family, index: int) -> LayerWeights[Matrix]:
        read = {key: self.read(pieces) for key, pieces in _layer_pieces(family, index).items()}
        norms = read.get("qk_norm")
        if norms is not None:
            read["qk_norm"] = _norm_per_head(norms, family)
        return LayerWeights(
            input_norm=read["input_norm"],
            qkv=self._compute.matrix(read["qkv"]),
            qkv_bias=read.get("qkv_bias"),
            qk_norm=read.get("qk_norm"),
            o=self._compute.matrix(read["o"]),
            o_bias=read.get("o_bias"),
            post_norm=read["post_norm"],
            gate_up=self._compute.matrix(read["gate_up"]),
            gate_up_bias=read.get("gate_up_bias"),
            down=self._compute.matrix(read["down"]),
            down_bias=read.get("down_bias"),
        )


def _norm_per_head(norms: Tensor, family: Family) -> Tensor:
    """[2 * head_dim], q's and k's -> [heads + kv_heads, head_dim]."""
    q, k = norms.chunk(2)
    return torch.cat((q.expand(family.heads, -1), k.expand(family.kv_heads, -1)))


def load_weights(
    model: Path,
    family: Family,
    compute: Compute[Matrix],
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> ModelWeights[Matrix]:
    """All parameters of a folder or GGUF, matrices as `compute` wants them.

    Raises `ModelInvalid`, naming file and tensor.
    """
    source = open_weights(model, family)
    top = _top_pieces(family)

    def pieces() -> Iterator[Piece]:
        for parts in (top, *(_layer_pieces(family, i) for i in range(family.layers))):
            for group in parts.values():
                yield from group

    loader = _Loader(source, compute, dtype, device, _check(source, pieces()), progress)
    read = {key: loader.read(parts) for key, parts in top.items()}
    return ModelWeights(
        embedding=read["embedding"],
        layers=tuple(loader.layer(family, i) for i in range(family.layers)),
        norm=read["norm"],
        head=compute.head(read.get("head", read["embedding"])),
    )


def pick_device(name: str) -> torch.device:
    """ "auto": CUDA when it is there, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto": bfloat16 where the hardware multiplies it, else float32.

    A CPU without bfloat16 instructions takes three to five times longer in bfloat16 than in
    float32.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or _cpu_multiplies_bf16() else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def _cpu_multiplies_bf16() -> bool:
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, bool)()) for name in names)
