"""The contract of a remote place: what lies in one folder there, and the bytes of each file.

A site lives in one event loop and is closed there. Its methods raise `Interrupted` for what may
work the next time, and a `LorryError` for what will not."""

import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Protocol

from lorry.artifacts.adapter_config import CONFIG_FILE
from lorry.artifacts.reading import TEMPLATE_FILE, WEIGHTS_FILE

LISTED_FILES_MAX = 10_000
"""More in one folder is no adapter; a listing stops there."""

SINGLE_FILES = (CONFIG_FILE, WEIGHTS_FILE, TEMPLATE_FILE)
SIDE_FILES = ("tokenizer_config.json", "added_tokens.json")
INDEX_FILES = (f"{WEIGHTS_FILE}.index.json", "model.safetensors.index.json")

_SHARD = re.compile(r"(adapter_model|model)-\d{5}-of-\d{5}\.safetensors")
_TELLING = re.compile(r"adapter_model\.(bin|pt|pth|pkl|pickle|ckpt)|new_embeddings\..*")
"""Files whose presence alone says something to the judge; they are never fetched."""


class Interrupted(Exception):
    """The network or the other side failed in a way that may pass; the text says how, without
    credentials."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of the folder."""

    name: str
    size: int | None
    """None: the other side does not say."""
    tag: str = ""
    """Another one means another content; "" when the other side has none."""
    ranges: bool = True
    """Whether parts of it can be asked for."""
    sha256: str | None = None
    """When the other side vouches for it."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies in the folder."""

    source: str
    """The URI by which the same can be fetched again, without any credential."""
    files: tuple[RemoteFile, ...]
    fixed: bool = False
    """The source names these files for ever: a commit."""
    telling: tuple[str, ...] = ()
    """Names of files that are not fetched, but that the judge should see."""

    @property
    def bytes(self) -> int | None:
        """Of all files; None when not all sizes are known."""
        sizes = [file.size for file in self.files]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @property
    def resumable(self) -> bool:
        """Whether parts of it can be told from parts of another content later."""
        return all(file.tag and file.ranges and file.size is not None for file in self.files)


class Site(Protocol):
    """One remote folder."""

    async def listing(self) -> Listing:
        """What is there. Raises `SourceNotFound` when nothing is."""

    async def read(self, file: RemoteFile, begin: int, end: int) -> bytes:
        """The bytes from `begin` up to but not `end`: exactly so many."""

    def stream(self, file: RemoteFile) -> AsyncIterator[bytes]:
        """The whole file in pieces, for one whose `ranges` is False."""

    async def aclose(self) -> None:
        """Give connections back. Never raises."""


def is_wanted(name: str) -> bool:
    """Whether a file of the folder is part of an adapter."""
    known = (*SINGLE_FILES, *SIDE_FILES, *INDEX_FILES)
    return name in known or _SHARD.fullmatch(name) is not None


def telling(names: Iterable[str]) -> tuple[str, ...]:
    """The names that say something although their files are not fetched."""
    return tuple(sorted(name for name in names if _TELLING.fullmatch(name)))


def without_spares(files: Iterable[RemoteFile]) -> tuple[RemoteFile, ...]:
    """Only the weights that count: PEFT's single file wins over shards, which are then not
    fetched."""
    found = sorted(files, key=lambda file: file.name)
    if any(file.name == WEIGHTS_FILE for file in found):
        kept = (*SINGLE_FILES, *SIDE_FILES)
        return tuple(file for file in found if file.name in kept)
    return tuple(found)
