"""What a caller may demand of an adapter's content: `expected_digest`.

Two forms, because two things are known to people. The version covers everything that the adapter
computes from, config and tensors, and `lorry check` prints it; `sha256:` is what `sha256sum` says
of the weights file, and what a hub shows beside it."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lorry.artifacts.folder import Folder
from lorry.artifacts.reading import WEIGHTS_FILE
from lorry.errors import DigestMismatch, RequestInvalid
from lorry.ids import VersionId

_DIGEST = re.compile(r"(?:(?P<kind>version|sha256):)?(?P<digits>[0-9a-fA-F]{64})")
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Digest:
    """A demand on an adapter's content."""

    digits: str
    of_weights: bool
    """True: the SHA-256 of the weights file; False: the version."""

    @classmethod
    def parse(cls, text: str) -> "Digest":
        """From `HEX`, `version:HEX` or `sha256:HEX`. Raises `RequestInvalid`."""
        found = _DIGEST.fullmatch(text.strip())
        if found is None:
            raise RequestInvalid(
                f"expected_digest is {text[:80]!r}; write the version's 64 hex digits, or "
                f"'sha256:' and the 64 hex digits of {WEIGHTS_FILE}.",
                param="expected_digest",
            )
        return cls(found["digits"].lower(), found["kind"] == "sha256")

    def check_folder(self, source: str, folder: Path, roots: Sequence[Path] = ()) -> None:
        """Read the weights if it is about them. Blocks. Raises `DigestMismatch`."""
        if not self.of_weights:
            return
        digest = hashlib.sha256()
        with Folder(folder, roots, label=source) as opened:
            file = opened.open(WEIGHTS_FILE)
            if file is None:
                raise DigestMismatch(
                    f"'{source}' has no {WEIGHTS_FILE}, whose SHA-256 was to be {self.digits}.",
                    param="expected_digest",
                )
            for begin in range(0, file.size, _PIECE_BYTES):
                digest.update(file.read(begin, _PIECE_BYTES))
        if digest.hexdigest() != self.digits:
            raise DigestMismatch(
                f"{WEIGHTS_FILE} of '{source}' has the SHA-256 {digest.hexdigest()}, expected "
                f"{self.digits}.",
                param="expected_digest",
            )

    def check_version(self, source: str, version: VersionId) -> None:
        """Raises `DigestMismatch` when it is about the version, and this is another."""
        if not self.of_weights and version != self.digits:
            raise DigestMismatch(
                f"'{source}' holds version {version}, expected {self.digits}.",
                param="expected_digest",
            )
