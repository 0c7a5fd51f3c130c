"""A dry run over an adapter's folder: what it is, or everything that is wrong with it, each with
what mends it. Nothing is kept, and no engine or server is needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorry.artifacts.cache import judged
from lorry.artifacts.manifest import MORE
from lorry.artifacts.remote.fetcher import Fetcher
from lorry.artifacts.snapshot import Manifest
from lorry.engine import BaseShape
from lorry.errors import (
    AdapterInvalid,
    LorryError,
    SourceDenied,
    SourceNotFound,
    SourceUnreachable,
)
from lorry.ids import short

Count = Callable[[int, int], None]
"""Told (bytes fetched, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and what to do about it."""

    code: str
    """Of the error that a load would give."""
    text: str
    """What is wrong, in which file, found and expected."""
    fix: str

    def as_json(self) -> dict[str, str]:
        """For scripts."""
        return {"code": self.code, "problem": self.text, "fix": self.fix}


@dataclass(frozen=True, slots=True)
class Report:
    """What a dry run found."""

    manifest: Manifest | None
    """None when the files cannot be served."""
    problems: tuple[Problem, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether a load would get past this."""
        return not self.problems


def check_folder(
    name: str,
    folder: Path,
    base: BaseShape,
    max_rank: int,
    *,
    roots: Sequence[Path] = (),
    label: str | None = None,
) -> Report:
    """Read and judge `folder` as a load would. Blocks. Raises `Forbidden` for what leads outside
    `roots`; whatever else is wrong is in the report. Messages call the folder `label`, if given."""
    try:
        return Report(judged(name, folder, base, max_rank, roots=roots, label=label))
    except (AdapterInvalid, SourceNotFound) as error:
        return Report(None, problems_of(error))


def check_source(
    name: str,
    source: str,
    fetcher: Fetcher,
    base: BaseShape,
    max_rank: int,
    *,
    report: Count = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Report:
    """Find a source of any kind, then read and judge it as a load would; what was fetched is
    deleted again. Blocks. Raises `Forbidden`, `RequestInvalid` and `SourceUnsupported` for what may
    not be read or is no source; whatever else is wrong is in the report."""
    try:
        found = fetcher.find(name, source, report=report, cancelled=cancelled)
    except (AdapterInvalid, SourceNotFound, SourceDenied, SourceUnreachable) as error:
        return Report(None, problems_of(error))
    try:
        return check_folder(
            name, found.folder, base, max_rank, roots=found.roots, label=found.label
        )
    finally:
        found.close()


def problems_of(error: LorryError) -> tuple[Problem, ...]:
    """Each problem that an error tells of. Sentences about adapters end with what mends it, behind
    the last semicolon; the others have the advice of their error."""
    return tuple(_problem(error, sentence) for sentence in error.details or (error.message,))


def _problem(error: LorryError, sentence: str) -> Problem:
    text, semicolon, fix = sentence.rpartition("; ")
    if sentence.startswith(MORE):
        return Problem(error.code, sentence, "Mend those listed first, then check again.")
    if not semicolon:
        return Problem(error.code, sentence, error.action)
    return Problem(error.code, f"{text}.", fix[0].upper() + fix[1:])


def facts(manifest: Manifest) -> dict[str, Any]:
    """What people and scripts want to know of a sound adapter."""
    return {
        "version": manifest.version,
        "short_version": short(manifest.version),
        "rank": manifest.rank,
        "alpha": manifest.alpha,
        "scale_rule": manifest.scale_rule,
        "target_modules": list(manifest.target_modules),
        "layers": list(manifest.layers),
        "parameters": manifest.parameters,
        "dtype": manifest.dtype,
        "bytes": manifest.bytes,
        "host_bytes": manifest.host_bytes,
        "base_model": manifest.base_model,
        "chat_template": manifest.chat_template is not None,
    }
