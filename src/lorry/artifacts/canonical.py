"""The one form in which a version is kept, and its name.

Two adapters that compute the same from the same numbers get the same version: patterns are resolved
to modules, tensor names take PEFT's spelling, shards are joined, metadata and what only steers
training are dropped. The form is a valid PEFT folder, so any engine and PEFT itself can load it.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from lorry.artifacts.keys import canonical_name
from lorry.artifacts.manifest import ModulePlan
from lorry.artifacts.matching import ends_with, layer_modules
from lorry.artifacts.reading import Examined
from lorry.artifacts.tensors import DTYPES, LENGTH_BYTES, TensorInfo
from lorry.engine import BaseShape
from lorry.ids import VersionId

ALIGNMENT_BYTES = 64
"""A cache line: the data section begins on one, so that a mapped file can be used as it is. Within
the section the format allows no gaps."""


def canonical_config(examined: Examined, base: BaseShape) -> bytes:
    """`adapter_config.json` of the snapshot: sorted keys, patterns resolved to full module
    names."""
    config, modules = examined.judgement.config, examined.judgement.modules
    ranks = {module.name: module.rank for module in modules}
    alphas = {module.name: _number(module.alpha) for module in modules}
    r = config.r if config.r in ranks.values() else max(ranks.values())
    alpha = _number(config.lora_alpha)
    alpha = alpha if alpha in alphas.values() else max(alphas.values())
    fields: dict[str, Any] = {
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": r,
        "rank_pattern": {name: value for name, value in ranks.items() if value != r},
        "target_modules": _targets(modules, base),
        "task_type": "CAUSAL_LM",
        "use_rslora": config.use_rslora,
    }
    return json.dumps(fields, indent=1, sort_keys=True).encode()


def _targets(modules: Sequence[ModulePlan], base: BaseShape) -> list[str]:
    """Last parts of the names when they mean exactly these modules, else full names."""
    names = {module.name for module in modules}
    short = tuple(sorted({name.rpartition(".")[2] for name in names}))
    meant = {name for name in layer_modules(base) if ends_with(name, short)}
    return list(short) if meant == names else sorted(names)


def _number(value: float) -> float | int:
    """16 and 16.0 are one alpha."""
    return int(value) if value == int(value) and abs(value) < 1 << 53 else value


def sorted_tensors(modules: Sequence[ModulePlan]) -> list[tuple[str, TensorInfo]]:
    """Canonical name and place of each tensor, by name."""
    return sorted(
        (canonical_name(module.name, side), info)
        for module in modules
        for side, info in (("A", module.a), ("B", module.b))
    )


def stored_order(modules: Sequence[ModulePlan]) -> list[tuple[str, TensorInfo]]:
    """As they lie in the snapshot: wide dtypes first, so that each is aligned to its size, then by
    name."""
    return sorted(sorted_tensors(modules), key=lambda pair: -DTYPES[pair[1].dtype][1])


def weights_header(tensors: Sequence[tuple[str, TensorInfo]]) -> bytes:
    """The first bytes of the snapshot's safetensors file, length included."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in tensors:
        header[name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [end, end + info.bytes],
        }
        end += info.bytes
    content = json.dumps(header, separators=(",", ":")).encode()
    padding = -(LENGTH_BYTES + len(content)) % ALIGNMENT_BYTES
    return (len(content) + padding).to_bytes(LENGTH_BYTES, "little") + content + b" " * padding


def version_of(examined: Examined, config: bytes) -> VersionId:
    """SHA-256 over the canonical config, the chat template, and each tensor's name, dtype, shape
    and digest."""
    digest = hashlib.sha256(b"lorry adapter 1\n")
    for part in (config, (examined.chat_template or "").encode()):
        digest.update(f"{len(part)}\n".encode() + part)
    for name, info in sorted_tensors(examined.judgement.modules):
        line = json.dumps([name, info.dtype, list(info.shape), examined.digests[info.name]])
        digest.update(line.encode() + b"\n")
    return VersionId(digest.hexdigest())
