"""The contents of the tensors: every bit is looked at once, in pieces, before anything is kept.

What is looked for: NaN and infinities (one makes every answer NaN), numbers that become infinite
when they are scaled, and adapters that would change nothing. Rank component i of a module
contributes only where row i of A and column i of B are both not zero."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lorry.artifacts.adapter_config import shown
from lorry.artifacts.folder import SourceFile
from lorry.artifacts.manifest import ModulePlan
from lorry.artifacts.tensors import TensorInfo

PIECE_BYTES = 4 << 20
"""Read at a time: big enough that hashing and scanning run without the interpreter lock, small
enough to be nothing."""

_BITS: dict[str, tuple[str, int, int]] = {
    "F32": ("<u4", 0x7F80_0000, 0x7FFF_FFFF),
    "F16": ("<u2", 0x7C00, 0x7FFF),
    "BF16": ("<u2", 0x7F80, 0x7FFF),
}
"""dtype -> (integer view, exponent bits, all bits but the sign). Not finite: every exponent bit is
set."""

LARGEST = 3.3895e38
"""What bfloat16 holds at most, and float32 about as much; float16 is the engine's own to judge."""

Files = Mapping[str, SourceFile]
Step = Callable[[int], None]
"""Told after each piece how many bytes it had; raises to stop."""


class SourceChanged(Exception):
    """The source is not what it was a moment ago; the text names the file."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What one tensor holds."""

    digest: str
    """SHA-256 of its raw bytes."""
    not_finite: int
    largest: float
    """Of the finite numbers, without the sign."""
    used: npt.NDArray[np.bool_]
    """[rank]: the component has at least one number that is not zero."""


def scan(files: Files, info: TensorInfo, rank_axis: int, step: Step) -> Scan:
    """Read one matrix once. `rank_axis` is 0 for A and 1 for B."""
    view, exponent, magnitude = _BITS[info.dtype]
    digest = hashlib.sha256()
    not_finite = largest = 0
    used = np.zeros(info.shape[rank_axis], dtype=np.bool_)
    row = 0
    for piece in pieces(files, info):
        digest.update(piece)
        bits = np.frombuffer(piece, dtype=view).reshape(-1, info.shape[1])
        sizes = bits & magnitude
        infinite = sizes >= exponent
        not_finite += int(np.count_nonzero(infinite))
        # As whole numbers, floats without a sign are in the order of their values.
        largest = max(largest, int(sizes.max(initial=0, where=~infinite)))
        any_used = (sizes != 0).any(axis=1 - rank_axis)
        if rank_axis == 0:
            used[row : row + len(bits)] = any_used
        else:
            used |= any_used
        row += len(bits)
        step(len(piece))
    return Scan(digest.hexdigest(), not_finite, _number(largest, info.dtype), used)


def _number(bits: int, dtype: str) -> float:
    """The value of one number's bits."""
    if dtype == "F16":
        return float(np.array(bits, "<u2").view("<f2"))
    return float(np.array(bits << 16 if dtype == "BF16" else bits, "<u4").view("<f4"))


def pieces(files: Files, info: TensorInfo) -> Iterator[bytes]:
    """The raw bytes of a matrix, whole rows at a time."""
    row_bytes = max(1, info.bytes // max(1, info.shape[0]))
    piece_bytes = max(row_bytes, PIECE_BYTES // row_bytes * row_bytes)
    for offset in range(0, info.bytes, piece_bytes):
        length = min(piece_bytes, info.bytes - offset)
        piece = files[info.file].read(info.begin + offset, length)
        if len(piece) != length:
            raise SourceChanged(info.file)
        yield piece


def scan_modules(
    files: Files, modules: tuple[ModulePlan, ...], step: Step
) -> tuple[dict[str, str], list[str]]:
    """Digest of each tensor by its own name, and every problem with their contents."""
    digests: dict[str, str] = {}
    problems: list[str] = []
    effective = False
    for module in modules:
        scans = [scan(files, module.a, 0, step), scan(files, module.b, 1, step)]
        scales = 1.0, abs(module.scale)
        for info, found, scale in zip((module.a, module.b), scans, scales, strict=True):
            digests[info.name] = found.digest
            problems += _number_problems(info, found, scale)
        effective |= module.scale != 0 and bool((scans[0].used & scans[1].used).any())
    if modules and not effective:
        problems.append(
            f"{modules[0].a.file}: in every module lora_A, lora_B or the scale is zero, expected "
            "at least one product that is not; the adapter would change nothing, train it first."
        )
    return digests, problems


def _number_problems(info: TensorInfo, found: Scan, scale: float) -> Iterator[str]:
    """Of one matrix, which is multiplied by `scale` when it is loaded."""
    advice = "the training diverged or the file is corrupt, use an earlier checkpoint"
    if found.not_finite:
        yield (
            f"{info.file}: tensor {shown(info.name)} has {found.not_finite} numbers that are NaN "
            f"or infinite, expected none; {advice}."
        )
    if found.largest * scale > LARGEST:
        yield (
            f"{info.file}: tensor {shown(info.name)} has numbers up to {found.largest:.3g}, which "
            f"the scale {scale:g} makes infinite, expected at most {LARGEST:g}; {advice}."
        )
