"""From an open folder to everything that is known of the adapter in it, or to the list of what is
wrong with it."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from lorry.artifacts.adapter_config import CONFIG_FILE, shown
from lorry.artifacts.folder import OpenFolder, SourceFile
from lorry.artifacts.manifest import Judgement, judge, refuse
from lorry.artifacts.tensors import (
    LENGTH_BYTES,
    HeaderInvalid,
    TensorInfo,
    header_length,
    parse_header,
)
from lorry.artifacts.weights import Files, scan_modules
from lorry.engine import BaseShape
from lorry.errors import AdapterInvalid, RequestAborted

WEIGHTS_FILE = "adapter_model.safetensors"
TEMPLATE_FILE = "chat_template.jinja"

_INDEX_FILES = (f"{WEIGHTS_FILE}.index.json", "model.safetensors.index.json")
_SHARD = re.compile(
    r"(?P<stem>adapter_model|model)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors"
)
_PICKLES = re.compile(r".*\.(bin|pt|pth|pkl|pickle|ckpt)")
_TOKENIZER_FILE = "tokenizer_config.json"
_TOKENS_FILE = "added_tokens.json"

INDEX_BYTES_MAX = 16 << 20
TEMPLATE_BYTES_MAX = 1 << 20
TOKENIZER_BYTES_MAX = 16 << 20
"""Limits on what is read whole; real files are far smaller."""

FAULTY_SCAN_BYTES_MAX = 256 << 20
"""An adapter that is refused anyway is scanned for bad numbers only up to this size, to answer
within seconds."""


class Progress:
    """Counts bytes for a watcher and stops the work when asked to."""

    def __init__(
        self,
        adapter: str,
        report: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        """`report` gets (bytes done, bytes in all)."""
        self._adapter = adapter
        self._report = report
        self._cancelled = cancelled
        self.total = 0
        self.done = 0

    def step(self, count: int) -> None:
        """`count` more bytes are done. Raises `RequestAborted` once cancelled."""
        if self._cancelled is not None and self._cancelled():
            raise RequestAborted(
                f"The load of adapter {shown(self._adapter)} was cancelled; nothing has changed."
            )
        self.done = min(self.total, self.done + count)
        if self._report is not None:
            self._report(self.done, self.total)


@dataclass(frozen=True, slots=True)
class Examined:
    """A sound adapter in an open folder."""

    judgement: Judgement
    files: Files
    digests: dict[str, str]
    """SHA-256 of each tensor's raw bytes, by the tensor's name in its file."""
    chat_template: str | None


def examine(
    adapter: str, folder: OpenFolder, base: BaseShape, max_rank: int, progress: Progress
) -> Examined:
    """Read and judge everything. Raises `AdapterInvalid` with every problem in its details."""
    names = folder.names()
    files, problems = _weight_files(folder, names)
    folder.settle(
        [CONFIG_FILE, TEMPLATE_FILE, _TOKENIZER_FILE, _TOKENS_FILE, *_INDEX_FILES, *files]
    )
    template, more = _chat_template(folder)
    problems += [*more, *_extra_tokens(folder, names, base)]
    opened, tensors, more = _headers(folder, files)
    problems += more
    config = _config(folder)
    if isinstance(config, str):
        raise refuse(adapter, [config, *problems])
    if not tensors:
        raise refuse(
            adapter, problems or [f"{WEIGHTS_FILE} holds no tensors; save the adapter again."]
        )
    judgement = judge(config, tensors, base, max_rank)
    problems += judgement.problems
    return _scanned(adapter, Examined(judgement, opened, {}, template), problems, progress)


def contents(folder: OpenFolder) -> tuple[bytes, Files, list[TensorInfo]]:
    """Config, weight files and tensors of a folder, not judged: for tools that need no base. Raises
    `AdapterInvalid` with what keeps them from being read."""
    names, problems = _weight_files(folder, folder.names())
    files, tensors, more = _headers(folder, names)
    config = _config(folder)
    problems = [*([config] if isinstance(config, str) else []), *problems, *more]
    if problems or isinstance(config, str):
        raise refuse(PurePath(folder.label).name, problems)
    return config, files, tensors


def _scanned(adapter: str, examined: Examined, problems: list[str], progress: Progress) -> Examined:
    """Add the digests, or raise for the problems of headers and contents together."""
    modules = examined.judgement.modules
    data_bytes = sum(module.a.bytes + module.b.bytes for module in modules)
    digests: dict[str, str] = {}
    if not problems or data_bytes <= FAULTY_SCAN_BYTES_MAX:
        progress.total = 2 * data_bytes
        digests, more = scan_modules(examined.files, modules, progress.step)
        problems += more
    if problems:
        raise refuse(adapter, problems)
    return Examined(examined.judgement, examined.files, digests, examined.chat_template)


def _config(folder: OpenFolder) -> bytes | str:
    """The config's bytes, or the problem that there is none."""
    file = _open(folder, CONFIG_FILE)
    if isinstance(file, str):
        return file
    if file is None:
        return (
            f"{CONFIG_FILE} is missing in {shown(folder.label)}; give the folder that "
            "save_pretrained wrote."
        )
    return file.read(0, min(file.size, 2 << 20))


def _open(folder: OpenFolder, name: str) -> SourceFile | str | None:
    """The file, None when it is absent, or the problem with it."""
    try:
        return folder.open(name)
    except AdapterInvalid as error:
        return error.message
    except OSError as error:
        return f"{name} cannot be read ({error.strerror}); mend its permissions."


def _weight_files(folder: OpenFolder, names: frozenset[str]) -> tuple[list[str], list[str]]:
    """Which files hold the weights. PEFT's single file wins over shards, as it does in PEFT."""
    if WEIGHTS_FILE in names:
        return [WEIGHTS_FILE], []
    for index in _INDEX_FILES:
        if index in names:
            return _from_index(folder, index, names)
    shards = _from_names(names)
    if shards is not None:
        return shards
    pickles = sorted(name for name in names if _PICKLES.fullmatch(name))
    if pickles:
        return [], [
            f"{pickles[0]} is a pickle, which can run code when it is read, so it is never opened, "
            f"expected {WEIGHTS_FILE}; save the adapter again with safe_serialization=True."
        ]
    return [], [
        f"{WEIGHTS_FILE} is missing in {shown(folder.label)}; copy the adapter again with its "
        "weights."
    ]


def _from_index(
    folder: OpenFolder, index: str, names: frozenset[str]
) -> tuple[list[str], list[str]]:
    file = _open(folder, index)
    if not isinstance(file, SourceFile):
        return [], [file or f"{index} is missing; copy the adapter again."]
    raw, fault = _read_object(file, INDEX_BYTES_MAX)
    shards = raw.get("weight_map") if fault is None else None
    if (
        not isinstance(shards, dict)
        or not shards
        or not all(isinstance(name, str) for name in shards.values())
    ):
        return [], [
            f"{index} has no weight_map from tensor names to files; save the adapter again."
        ]
    wanted = sorted(set(shards.values()))
    problems = []
    for name in wanted:
        if "/" in name or not name.endswith(".safetensors"):
            problems.append(
                f"{index} names the file {shown(name)}, expected a .safetensors file in the same "
                "folder."
            )
        elif name not in names:
            problems.append(
                f"{shown(name)} is missing, expected by {index}; copy the adapter again with all "
                "shards."
            )
    return ([], problems) if problems else (wanted, [])


def _from_names(names: frozenset[str]) -> tuple[list[str], list[str]] | None:
    """Shards without an index, told by `-00001-of-00003`."""
    found = [match for name in sorted(names) if (match := _SHARD.fullmatch(name))]
    if not found:
        return None
    stem, count = found[0]["stem"], int(found[0]["count"])
    have = {match[0] for match in found}
    if count > 9999:
        return [], [
            f"{found[0][0]} says there are {count} shards, expected at most 9999; save the adapter "
            "again."
        ]
    wanted = [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    missing = [name for name in wanted if name not in have]
    if missing or not wanted:
        return [], [
            f"{(missing or found[0])[0]} is missing, expected by {found[0][0]}; copy the adapter "
            "again with all shards."
        ]
    return wanted, []


def _headers(
    folder: OpenFolder, names: Sequence[str]
) -> tuple[dict[str, SourceFile], list[TensorInfo], list[str]]:
    """Open every weight file and read what tensors it has."""
    files: dict[str, SourceFile] = {}
    tensors: list[TensorInfo] = []
    problems: list[str] = []
    for name in names:
        file = _open(folder, name)
        if not isinstance(file, SourceFile):
            problems.append(file or f"{name} is missing; copy the adapter again.")
            continue
        files[name] = file
        try:
            length = header_length(name, file.read(0, LENGTH_BYTES), file.size)
            tensors += parse_header(name, file.read(LENGTH_BYTES, length), file.size)
        except HeaderInvalid as error:
            problems.append(str(error))
    return files, tensors, problems


def _chat_template(folder: OpenFolder) -> tuple[str | None, list[str]]:
    """The adapter's own template: a file of its own, or in the tokenizer's config as older trainers
    write it."""
    file = _open(folder, TEMPLATE_FILE)
    if isinstance(file, str):
        return None, [file]
    if file is not None:
        if file.size > TEMPLATE_BYTES_MAX:
            return None, [
                f"{TEMPLATE_FILE} has {file.size} bytes, expected at most {TEMPLATE_BYTES_MAX}; "
                "shorten it."
            ]
        try:
            return file.read(0, file.size).decode("utf-8"), []
        except UnicodeDecodeError:
            return None, [f"{TEMPLATE_FILE} is not UTF-8 text; save it as UTF-8."]
    template = _tokenizer(folder).get("chat_template")
    if not isinstance(template, str) or len(template) > TEMPLATE_BYTES_MAX:
        return None, []
    return template.encode("utf-8", "replace").decode("utf-8"), []


def _tokenizer(folder: OpenFolder) -> dict[str, Any]:
    file = _open(folder, _TOKENIZER_FILE)
    return _read_object(file, TOKENIZER_BYTES_MAX)[0] if isinstance(file, SourceFile) else {}


def _extra_tokens(folder: OpenFolder, names: frozenset[str], base: BaseShape) -> list[str]:
    """Tokens beyond the base's vocabulary need embeddings, which are not served."""
    problems = [
        f"{name} holds trained embeddings, which are not supported; train without added tokens."
        for name in sorted(names)
        if name.startswith("new_embeddings.")
    ]
    file = _open(folder, _TOKENS_FILE)
    added = _read_object(file, TOKENIZER_BYTES_MAX)[0] if isinstance(file, SourceFile) else {}
    decoder = _tokenizer(folder).get("added_tokens_decoder")
    ids = {
        _TOKENS_FILE: list(added.values()),
        _TOKENIZER_FILE: list(decoder) if isinstance(decoder, dict) else [],
    }
    for name, values in ids.items():
        beyond = [number for value in values if (number := _token_id(value)) >= base.vocab_size]
        if beyond:
            problems.append(
                f"{name} adds {len(beyond)} tokens beyond the base's vocabulary ({max(beyond)} is "
                f"the highest id), expected ids below {base.vocab_size}; added tokens are not "
                "supported, train without them."
            )
    return problems


def _token_id(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return (
        int(value)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19
        else -1
    )


def _read_object(file: SourceFile, bytes_max: int) -> tuple[dict[str, Any], str | None]:
    """A small JSON object, or an empty one and the reason."""
    if file.size > bytes_max:
        return {}, "too long"
    try:
        raw = json.loads(file.read(0, file.size))
    except (ValueError, RecursionError):
        return {}, "not JSON"
    return (raw, None) if isinstance(raw, dict) else ({}, "not an object")
