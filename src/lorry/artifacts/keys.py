"""From a tensor's name to the module it adapts, or to the reason why it cannot be served."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lorry.artifacts.adapter_config import shown
from lorry.artifacts.matching import LAYER_PREFIX
from lorry.artifacts.tensors import TensorInfo
from lorry.engine import BaseShape

PEFT_PREFIX = "base_model.model."

_LORA_KEY = re.compile(
    r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.(?P<adapter>[^.]+))?\.weight", re.DOTALL
)
"""PEFT saves without the adapter's name; a plain state dict of the model still has it
(`lora_A.default.weight`)."""

_LAYER_MODULE = re.compile(
    rf"{re.escape(LAYER_PREFIX)}(?P<layer>0|[1-9][0-9]{{0,5}})\.(?P<target>.+)", re.DOTALL
)

_REASONS: tuple[tuple[str, str], ...] = (
    (
        "lora_magnitude_vector",
        "it is a DoRA magnitude and DoRA is not supported; train without use_dora",
    ),
    (
        "lora_embedding_",
        "LoRA on embeddings is not supported; train without embed_tokens and lm_head",
    ),
    ("trainable_tokens", "trained tokens are not supported; train without trainable_token_indices"),
    ("modules_to_save", "fully trained modules are not supported; train without modules_to_save"),
    (
        "embed_tokens",
        "trained or enlarged embeddings are not supported; train without added tokens",
    ),
    (
        "lm_head",
        "a trained or enlarged output head is not supported; train without modules_to_save or "
        "added tokens",
    ),
    (".bias", "trained biases are not supported; train with bias='none'"),
)
"""What a name that is no plain LoRA matrix of a layer tells about the adapter; the first that
fits."""


@dataclass(slots=True)
class Sorted:
    """The tensors of an adapter, joined to modules."""

    modules: dict[str, dict[str, TensorInfo]] = field(default_factory=dict)
    """`model.layers.0.self_attn.q_proj` -> {"A": ..., "B": ...}."""
    problems: list[str] = field(default_factory=list)


def sort_tensors(tensors: Sequence[TensorInfo], base: BaseShape) -> Sorted:
    """Join every tensor to a module of the base; each that has none is a problem."""
    result = Sorted()
    for info in tensors:
        bare = info.name.removeprefix(PEFT_PREFIX)
        found = _LORA_KEY.fullmatch(bare)
        fault = _foreign(bare) if found is None else _misplaced(found["module"], base)
        if found is None or fault is not None:
            result.problems.append(f"{info.file}: tensor {shown(info.name)}: {fault}.")
            continue
        sides = result.modules.setdefault(found["module"], {})
        if found["side"] in sides:
            result.problems.append(
                f"{info.file}: tensor {shown(info.name)} and {shown(sides[found['side']].name)} "
                "are the same matrix, expected one; save a single adapter to the folder."
            )
        sides.setdefault(found["side"], info)
    return result


def canonical_name(module: str, side: str) -> str:
    """The name that PEFT's save_pretrained gives."""
    return f"{PEFT_PREFIX}{module}.lora_{side}.weight"


def lora_parts(name: str) -> tuple[str, str] | None:
    """Module and side (A or B) of a tensor, whatever the base; None for what is no LoRA matrix."""
    found = _LORA_KEY.fullmatch(name.removeprefix(PEFT_PREFIX))
    return (found["module"], found["side"]) if found is not None else None


def split_module(module: str) -> tuple[int, str]:
    """`model.layers.3.mlp.up_proj` -> (3, "mlp.up_proj"); the module must be one of the base's
    layers."""
    layer, _, target = module.removeprefix(LAYER_PREFIX).partition(".")
    return int(layer), target


def _foreign(key: str) -> str:
    for part, reason in _REASONS:
        if part in key:
            return reason
    return (
        f"it matches nothing, expected {PEFT_PREFIX}{LAYER_PREFIX}N.MODULE.lora_A.weight or "
        "lora_B.weight; save the adapter with PEFT's save_pretrained"
    )


def _misplaced(module: str, base: BaseShape) -> str | None:
    """Why a LoRA matrix of this module has no place in the base."""
    found = _LAYER_MODULE.fullmatch(module)
    if found is None:
        return _foreign(module)
    if found["target"] not in base.targets:
        return (
            f"{base.architecture} has no projection {shown(found['target'])} in its layers, "
            f"expected one of {', '.join(sorted(base.targets))}; the adapter belongs to another "
            "base model"
        )
    if int(found["layer"]) >= base.layers:
        return (
            f"it is for layer {found['layer']}, expected 0 to {base.layers - 1}; the adapter "
            "belongs to a base model with more layers"
        )
    return None


def module_labels(modules: Mapping[str, object]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Last parts of the modules' names and the layers they are in, each sorted."""
    pairs = [split_module(module) for module in modules]
    targets = {target.rpartition(".")[2] for _, target in pairs}
    return tuple(sorted(targets)), tuple(sorted({layer for layer, _ in pairs}))
