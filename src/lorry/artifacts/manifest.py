"""The judge: an adapter's config and tensor headers against the base model, before any engine sees
it.

Pure: no file is opened here. `judge` finds every problem, not only the first, because people mend
adapters by hand. The contents of the tensors are judged in `weights.py`, which reads them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lorry.artifacts.adapter_config import (
    CONFIG_FILE,
    AdapterConfig,
    parse_config,
    read_config,
    shown,
)
from lorry.artifacts.keys import module_labels, sort_tensors, split_module
from lorry.artifacts.resolving import Resolver, scale
from lorry.artifacts.snapshot import Manifest
from lorry.artifacts.tensors import DTYPES, TensorInfo
from lorry.engine import BaseShape
from lorry.errors import AdapterInvalid
from lorry.ids import VersionId

PROBLEMS_MAX = 100
"""Each is a sentence; the rest is counted."""

MORE = "... and "
"""How the count of the rest begins."""

PACKED_OVERHEAD_BYTES = 64 << 10
"""Allowed for what an engine keeps beside the matrices."""

PACKED_ELEMENT_BYTES = 4
"""The widest an engine packs: float32."""

SCALE_MIN = 1e-30
SCALE_MAX = 1e6
"""Real scales are 0.1 to 64; beyond these bounds products vanish or overflow in bfloat16 and
float16."""


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """One adapted projection, all checks passed."""

    name: str
    rank: int
    alpha: float
    scale: float
    """The factor on B·A."""
    a: TensorInfo
    """[rank, in_features]"""
    b: TensorInfo
    """[out_features, rank]"""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the judge found."""

    problems: tuple[str, ...]
    config: AdapterConfig
    modules: tuple[ModulePlan, ...]
    """Every module whose two matrices fit, by name; all of them when there is no problem."""


def judge(
    config: bytes | Mapping[str, Any], tensors: Sequence[TensorInfo], base: BaseShape, max_rank: int
) -> Judgement:
    """Every problem that config and headers show, and the modules that are sound."""
    raw, problems = read_config(config) if isinstance(config, bytes) else (config, [])
    parsed, more = parse_config(raw) if raw is not None else (AdapterConfig(), [])
    problems += more
    tensors_by_module = sort_tensors(tensors, base)
    problems += tensors_by_module.problems
    if not tensors:
        problems.append(
            "The adapter has no tensors, so it would change nothing; save it again with its "
            "weights."
        )
    if raw is None:
        return Judgement(tuple(problems), parsed, ())
    resolver = Resolver(parsed, base)
    problems += resolver.problems
    problems += _target_problems(resolver.targets, tensors_by_module.modules)
    ranks = {name: resolver.rank(name) for name in tensors_by_module.modules}
    problems += _rank_problems(ranks, max_rank)
    modules = []
    for name, sides in sorted(tensors_by_module.modules.items()):
        rank, alpha = ranks[name], resolver.alpha(name)
        faults = list(_side_problems(name, sides, rank, base))
        problems += faults
        if not faults:
            factor = scale(parsed, rank, alpha)
            modules.append(ModulePlan(name, rank, alpha, factor, sides["A"], sides["B"]))
    problems += _scale_problems(modules)
    return Judgement(tuple(dict.fromkeys(problems)), parsed, tuple(modules))


def refuse(adapter: str, problems: Sequence[str]) -> AdapterInvalid:
    """The error for an adapter with at least one problem."""
    shown_problems = tuple(problems[:PROBLEMS_MAX])
    rest = len(problems) - len(shown_problems)
    details = (*shown_problems, f"{MORE}{rest} more problems.") if rest else shown_problems
    more = f" ({len(problems) - 1} more in details)" if len(problems) > 1 else ""
    return AdapterInvalid(
        f"Adapter {shown(adapter)} cannot be served: {problems[0]}{more}", details=details
    )


def manifest_of(
    judgement: Judgement, version: VersionId, stored_bytes: int, chat_template: str | None
) -> Manifest:
    """The facts of a version that was judged sound and has `stored_bytes` on disk."""
    modules = judgement.modules
    targets, layers = module_labels({module.name: module for module in modules})
    infos = [info for module in modules for info in (module.a, module.b)]
    dtypes = {DTYPES[info.dtype][0] for info in infos}
    parameters = sum(info.elements for info in infos)
    return Manifest(
        version=version,
        rank=max(module.rank for module in modules),
        alpha=judgement.config.lora_alpha,
        scale_rule="alpha/sqrt(r)" if judgement.config.use_rslora else "alpha/r",
        target_modules=targets,
        layers=layers,
        parameters=parameters,
        dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
        bytes=stored_bytes,
        host_bytes=parameters * PACKED_ELEMENT_BYTES + PACKED_OVERHEAD_BYTES,
        base_model=judgement.config.base_model,
        chat_template=chat_template,
    )


def _target_problems(
    targets: frozenset[str] | None, present: Mapping[str, object]
) -> Iterable[str]:
    """Where the config's targets and the tensors contradict each other."""
    if targets is None:
        return
    for name in sorted(set(present) - targets):
        yield (
            f"{CONFIG_FILE}: target_modules does not mean {name}, but the weights have tensors for "
            "it; PEFT would ignore them, so mend target_modules, exclude_modules or "
            "layers_to_transform."
        )
    missing = sorted(targets - set(present), key=split_module)
    if missing and present:
        yield (
            f"{CONFIG_FILE}: target_modules means {len(missing)} modules without tensors, "
            f"{missing[0]} first; the weights are incomplete, copy them again or narrow "
            "target_modules or layers_to_transform."
        )


def _scale_problems(modules: Sequence[ModulePlan]) -> Iterable[str]:
    """Scales that make every product nothing, or too big for half precision."""
    if modules and all(abs(module.scale) < SCALE_MIN for module in modules):
        yield (
            f"{CONFIG_FILE}: lora_alpha is 0, expected another number; the adapter would change "
            "nothing."
        )
    for module in modules:
        if abs(module.scale) > SCALE_MAX:
            yield (
                f"{CONFIG_FILE}: alpha {module.alpha:g} and rank {module.rank} scale {module.name} "
                f"by {module.scale:g}, expected at most {SCALE_MAX:g}; set the alpha it was "
                "trained with."
            )


def _rank_problems(ranks: Mapping[str, int], max_rank: int) -> Iterable[str]:
    """One sentence for each rank over the limit, however many modules have it."""
    for rank in sorted({rank for rank in ranks.values() if rank > max_rank}):
        modules = sorted((name for name in ranks if ranks[name] == rank), key=split_module)
        others = f" and of {len(modules) - 1} other modules" if len(modules) > 1 else ""
        yield (
            f"{CONFIG_FILE}: the rank of {modules[0]}{others} is {shown(rank)}, expected at most "
            f"{max_rank}; start the server with a higher --max-lora-rank or train with a lower "
            "rank."
        )


def _side_problems(
    module: str, sides: Mapping[str, TensorInfo], rank: int, base: BaseShape
) -> Iterable[str]:
    inputs, outputs = base.targets[split_module(module)[1]]
    for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
        if side not in sides:
            other = next(iter(sides.values()))
            yield (
                f"{other.file}: {module} has no lora_{side} matrix, expected lora_A and lora_B; "
                "the weights are incomplete, copy or save them again."
            )
            continue
        yield from _matrix_problems(sides[side], side, shape, base)


def _matrix_problems(
    info: TensorInfo, side: str, shape: tuple[int, int], base: BaseShape
) -> Iterable[str]:
    """`shape` is [rank, in_features] for A and [out_features, rank] for B."""
    where = f"{info.file}: tensor {shown(info.name)}"
    if info.dtype not in DTYPES:
        yield (
            f"{where} has dtype {shown(info.dtype)}, expected one of {', '.join(DTYPES)}; save it "
            "as bfloat16."
        )
    if len(info.shape) != 2:
        yield (
            f"{where} has shape {list(info.shape)}, expected {list(shape)}; save the adapter again."
        )
        return
    rank_axis, width_axis = (0, 1) if side == "A" else (1, 0)
    if info.shape[rank_axis] != shape[rank_axis]:
        yield (
            f"{where} has rank {info.shape[rank_axis]}, expected {shown(shape[rank_axis])} by "
            f"{CONFIG_FILE} (r and rank_pattern); config and weights are of different adapters, "
            "mend one of them."
        )
    if info.shape[width_axis] != shape[width_axis]:
        features = "in_features" if side == "A" else "out_features"
        yield (
            f"{where} has {info.shape[width_axis]} {features}, expected {shape[width_axis]} by the "
            f"base model (hidden size {base.hidden_size}); the adapter belongs to another base "
            "model."
        )
