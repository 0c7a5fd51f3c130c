"""What tells two adapters apart: their facts, and for each module how far its change of the base
is from the other's. No base model and no engine is needed.

A module changes its projection by D = scale * B @ A. Norms are Frobenius norms of D, which is never
made: with QR of the tall factors, |B @ A| is the norm of a product of two small triangles. For the
difference of two adapters the factors are put side by side, so that nothing cancels.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lorry.artifacts.adapter_config import parse_config, read_config
from lorry.artifacts.folder import Folder
from lorry.artifacts.keys import lora_parts
from lorry.artifacts.manifest import refuse
from lorry.artifacts.matching import PatternFailed
from lorry.artifacts.reading import contents
from lorry.artifacts.resolving import scale_for
from lorry.artifacts.tensors import DTYPES, TensorInfo
from lorry.artifacts.weights import Files

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Side:
    """One adapter to compare."""

    title: str
    """As people call it."""
    folder: Path
    roots: tuple[Path, ...] = ()
    """Folders that links of it may lead into; none allow all."""
    is_snapshot: bool = False
    """Its config is the canonical one, without what only steers training."""


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """One module of either adapter."""

    name: str
    ranks: tuple[int | None, int | None]
    """None: that adapter does not touch it."""
    norms: tuple[float | None, float | None]
    """None too for numbers that are not finite."""
    difference: float | None
    """|D_a - D_b|, an adapter that does not touch the module counting as zero; None when the shapes
    are of two base models."""


@dataclass(frozen=True, slots=True)
class Difference:
    """All that tells two adapters apart."""

    titles: tuple[str, str]
    facts: tuple[Mapping[str, Any], Mapping[str, Any]]
    config: tuple[tuple[str, Any, Any], ...]
    """Key and both values of each entry of the configs that differs; None: not there."""
    modules: tuple[ModuleDifference, ...]

    @property
    def same(self) -> bool:
        """Whether both compute the same."""
        return all(module.difference == 0 for module in self.modules)

    def as_json(self) -> dict[str, Any]:
        """For scripts, and over HTTP."""
        names = ("a", "b")
        return {
            "object": "adapter.diff",
            "same": self.same,
            **{
                side: {"title": title, **facts}
                for side, title, facts in zip(names, self.titles, self.facts, strict=True)
            },
            "config": [{"key": key, "a": a, "b": b} for key, a, b in self.config],
            "modules": [
                {
                    "module": each.name,
                    "rank_a": each.ranks[0],
                    "rank_b": each.ranks[1],
                    "norm_a": each.norms[0],
                    "norm_b": each.norms[1],
                    "difference": each.difference,
                }
                for each in self.modules
            ],
        }


def compare(a: Side, b: Side) -> Difference:
    """Read both and compare them. Blocks. Raises `SourceNotFound`, `Forbidden` or `AdapterInvalid`
    for what cannot be read."""
    try:
        with Folder(a.folder, a.roots) as folder_a, Folder(b.folder, b.roots) as folder_b:
            return _compared(_Opened(a, folder_a), _Opened(b, folder_b))
    except OSError as error:
        reason = f"its files cannot be read ({error.strerror}); mend their permissions."
        raise refuse(f"{a.title} or {b.title}", [reason]) from error


def _compared(one: "_Opened", other: "_Opened") -> Difference:
    names = sorted(one.modules.keys() | other.modules.keys(), key=_natural)
    modules = tuple(_module(name, one, other) for name in names)
    as_written = not (one.side.is_snapshot or other.side.is_snapshot)
    return Difference(
        (one.side.title, other.side.title),
        (one.facts(modules, 0), other.facts(modules, 1)),
        _config_difference(one.raw, other.raw) if as_written else (),
        modules,
    )


class _Opened:
    """An open adapter."""

    def __init__(self, side: Side, folder: Folder) -> None:
        content, self._files, tensors = contents(folder)
        self.side = side
        raw, problems = read_config(content)
        self.raw: Mapping[str, Any] = raw or {}
        self.config, more = parse_config(self.raw)
        if problems or more:
            raise refuse(side.title, problems or more)
        self.dtypes = {info.dtype for info in tensors}
        self.modules: dict[str, dict[str, TensorInfo]] = {}
        for info in tensors:
            parts = lora_parts(info.name)
            if parts is not None and len(info.shape) == 2 and info.dtype in DTYPES:
                self.modules.setdefault(parts[0], {})[parts[1]] = info
        self.modules = {name: sides for name, sides in self.modules.items() if len(sides) == 2}
        if not self.modules:
            raise refuse(
                side.title,
                ["The weights hold no pair of lora_A and lora_B; save them with save_pretrained."],
            )

    def facts(self, modules: tuple[ModuleDifference, ...], at: int) -> dict[str, Any]:
        """What can be said without a base model."""
        norms = [module.norms[at] for module in modules if module.ranks[at] is not None]
        total = None if None in norms else math.sqrt(sum((norm or 0.0) ** 2 for norm in norms))
        pairs = self.modules.values()
        return {
            "rank": max(sides["A"].shape[0] for sides in pairs),
            "alpha": self.config.lora_alpha,
            "scale_rule": "alpha/sqrt(r)" if self.config.use_rslora else "alpha/r",
            "target_modules": sorted({name.rpartition(".")[2] for name in self.modules}),
            "modules": len(self.modules),
            "parameters": sum(sides[s].elements for sides in pairs for s in ("A", "B")),
            "dtype": ", ".join(sorted(DTYPES[d][0] for d in self.dtypes if d in DTYPES)),
            "norm": total,
        }

    def factors(self, name: str) -> tuple[Matrix, Matrix] | None:
        """A [rank, in] and scale * B [out, rank]; None when it does not touch the module."""
        sides = self.modules.get(name)
        if sides is None:
            return None
        try:
            scale = scale_for(self.config, name)
        except (PatternFailed, TimeoutError) as error:
            raise refuse(
                self.side.title, [f"A pattern of its config cannot be read: {error}"]
            ) from None
        return _numbers(self._files, sides["A"]), scale * _numbers(self._files, sides["B"])


def _module(name: str, one: _Opened, other: _Opened) -> ModuleDifference:
    a, b = one.factors(name), other.factors(name)
    with np.errstate(all="ignore"):
        return ModuleDifference(
            name,
            (a and a[0].shape[0], b and b[0].shape[0]),
            (a and _norm(*a), b and _norm(*b)),
            _difference(a, b),
        )


def _difference(a: tuple[Matrix, Matrix] | None, b: tuple[Matrix, Matrix] | None) -> float | None:
    if a is None or b is None:
        present = a or b
        return _norm(*present) if present is not None else 0.0
    if a[0].shape[1] != b[0].shape[1] or a[1].shape[0] != b[1].shape[0]:
        return None
    if np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1]):
        return 0.0
    return _norm(np.vstack((a[0], b[0])), np.hstack((a[1], -b[1])))


def _norm(a: Matrix, b: Matrix) -> float | None:
    """|b @ a| without the product; None when it is not finite."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    value = float(np.linalg.norm(_triangle(b) @ _triangle(a.T).T))
    return value if math.isfinite(value) else None


def _triangle(tall: Matrix) -> Matrix:
    """R of QR: as long as the matrix, whatever vector it is applied to."""
    return np.asarray(np.linalg.qr(tall, mode="r"), dtype=np.float64)


def _numbers(files: Files, info: TensorInfo) -> Matrix:
    """A matrix as float64; bfloat16 is the upper half of float32."""
    content = files[info.file].read(info.begin, info.bytes)
    if info.dtype == "BF16":
        wide = np.frombuffer(content, "<u2").astype(np.uint32) << 16
        numbers = wide.view(np.float32)
    else:
        numbers = np.frombuffer(content, "<f2" if info.dtype == "F16" else "<f4")
    return numbers.reshape(info.shape).astype(np.float64)


def _config_difference(
    a: Mapping[str, Any], b: Mapping[str, Any]
) -> tuple[tuple[str, Any, Any], ...]:
    keys = sorted(a.keys() | b.keys())
    return tuple((key, a.get(key), b.get(key)) for key in keys if _plain(a, key) != _plain(b, key))


def _plain(config: Mapping[str, Any], key: str) -> Any:
    """Lists of names are sets in PEFT, and are written in any order."""
    value = config.get(key)
    names = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return sorted(value) if names and isinstance(value, list) else value


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Layer 10 comes after layer 9."""
    return tuple((int(p), "") if p.isdigit() else (-1, p) for p in name.split("."))
