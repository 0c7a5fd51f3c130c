"""Text to tokens and back, and chat templates, without torch in the process.

Three rules:

1. `tokenizer.json` is read by the `tokenizers` library itself; `transformers` would import torch
   (300 MB and seconds) into the HTTP server. Other forms are converted once, by
   `lorry.tokenizer_export` in a process of its own.
2. Token ids equal those of transformers' AutoTokenizer on the same files; tests compare them.
3. A stream of tokens, cut anywhere, gives the same text as all tokens at once: text is held back
   only while its last character is incomplete.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from lorry.chat_template import ChatTemplate
from lorry.errors import RequestInvalid, StorageFailed

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""The names under which a chat template finds the special tokens, as transformers passes them."""

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
"""Special tokens that end an answer in the chat formats of the supported families. Some models list
only the end of the text as EOS, and would talk on in the user's place."""

EXPORT_TIMEOUT_S = 300.0
"""Converting takes seconds; on a busy machine the import of transformers alone was seen to take
thirteen."""

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6
"""How much of the prompt a stream decodes along with the first new token: enough for every prefix
rule of the supported decoders (they look one token back) and for a character of four byte
tokens."""
INCOMPLETE_TOKENS_MAX = 3
"""An incomplete UTF-8 character has at most three bytes, so at most three tokens can belong to
it."""


BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
"""How sentencepiece writes a token of one byte."""


def _byte_letters() -> dict[str, int]:
    """How byte-level BPE writes bytes: printable ones as themselves, the others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(0x100 + at): byte for at, byte in enumerate(hidden)
    }


_BYTE_LETTERS = _byte_letters()


class Tokenizer:
    """One base model's tokenizer and its chat template. Safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """`special_tokens` maps names of SPECIAL_NAMES to the tokens' text."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_template = ChatTemplate(chat_template) if chat_template else None
        self.eos_token_ids = tuple(sorted(set(eos_token_ids) | set(self._end_of_turn_ids())))
        self.max_token_chars = max((len(text) for text in backend.get_vocab()), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text. Special tokens in the text are recognised."""
        return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids that the tokenizer does not know give nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token on its own, special tokens included: what log probabilities are labelled
        with."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The same as bytes: exact also for a token that holds only a part of a character."""
        text = self.token_text(token_id)
        if REPLACEMENT not in text:
            return text.encode()
        piece = self._backend.id_to_token(token_id) or ""
        if (byte := BYTE_PIECE.fullmatch(piece)) is not None:
            return bytes((int(byte[1], 16),))
        if all(letter in _BYTE_LETTERS for letter in piece):
            return bytes(_BYTE_LETTERS[letter] for letter in piece)
        return text.encode()

    def stream(self, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> "TextStream":
        """A decoder for the tokens that follow `prompt`."""
        return TextStream(self._backend, prompt, skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: "ChatTemplate | None" = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat, by `template` or else the model's own. Raises `RequestInvalid`."""
        chosen = template or self.chat_template
        if chosen is None:
            raise RequestInvalid(
                "This model has no chat template, so chat completions cannot be made. "
                "Use /v1/completions, or give the adapter a chat template.",
                param="messages",
            )
        return chosen.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens, **(extra or {})},
        )

    def _end_of_turn_ids(self) -> tuple[int, ...]:
        special = {
            token.content
            for token in self._backend.get_added_tokens_decoder().values()
            if token.special
        }
        names = [name for name in END_OF_TURN if name in special]
        ids = [self._backend.token_to_id(name) for name in names]
        return tuple(token_id for token_id in ids if token_id is not None)


class TextStream:
    """Decodes one answer token by token; each `feed` returns the text that has become certain."""

    __slots__ = ("_backend", "_ids", "_known", "_prefix", "_skip_special")

    def __init__(
        self, backend: tokenizers.Tokenizer, prompt: Sequence[int], skip_special: bool
    ) -> None:
        """The prompt's end is context: "▁world" after a prompt is " world", at the start of a text
        "world"."""
        self._backend = backend
        self._skip_special = skip_special
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        self._known = len(self._ids)
        self._prefix = self._text(self._known)

    def feed(self, token_ids: Iterable[int]) -> str:
        """Certain text of these and earlier held-back tokens."""
        return "".join([self._feed_one(token_id) for token_id in token_ids])

    def _feed_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._text(len(self._ids))
        if not text.endswith(REPLACEMENT):
            return self._advance(len(self._ids), text)
        # Every token since `known` left the text open, so all but the last few are broken for good.
        certain = len(self._ids) - INCOMPLETE_TOKENS_MAX
        if certain > self._known:
            return self._advance(certain, self._text(certain))
        return ""

    def flush(self) -> str:
        """What was held back, at the end of the answer: bytes of no character become U+FFFD."""
        if self._known == len(self._ids):
            return ""
        return self._advance(len(self._ids), self._text(len(self._ids)))

    def _advance(self, known: int, text: str) -> str:
        new = text[_common(self._prefix, text) :]
        start = self._known
        prefix = self._text_between(start, known)
        # A context that shows no text cannot carry the decoder's rules about what follows what.
        while start > max(0, known - CONTEXT_TOKENS) and not prefix.strip(REPLACEMENT):
            start -= 1
            prefix = self._text_between(start, known)
        self._ids = self._ids[start:]
        self._known = known - start
        self._prefix = prefix
        return new

    def _text(self, end: int) -> str:
        return self._text_between(0, end)

    def _text_between(self, start: int, end: int) -> str:
        return self._backend.decode(self._ids[start:end], skip_special_tokens=self._skip_special)


def _common(prefix: str, text: str) -> int:
    """Length of what both begin with: all of `prefix`, but where its last character was
    incomplete."""
    if text.startswith(prefix):
        return len(prefix)
    return next(
        at for at, (a, b) in enumerate(zip(prefix + "\0", text + "\1", strict=False)) if a != b
    )


def load_tokenizer(
    model: Path, cache: Path | None = None, chat_template: str | None = None
) -> Tokenizer | None:
    """The tokenizer of a model folder or GGUF file, or None when it has none.

    `chat_template` replaces the model's own. `cache` is where converted tokenizers are kept, by
    default below the user's cache folder. Raises `StorageFailed` when there are tokenizer files
    that cannot be read.
    """
    if model.is_file() or not (model / "tokenizer.json").exists():
        source = _convertible(model)
        if source is None:
            return None
        folder = _exported(model, source, cache or _default_cache())
    else:
        folder = model
    eos_token_ids = config_eos_token_ids(model if model.is_dir() else folder)
    return _read(folder, eos_token_ids, chat_template)


def config_eos_token_ids(model: Path) -> tuple[int, ...]:
    """EOS ids that a model folder's `generation_config.json` and `config.json` name; none for other
    paths."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(model / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else () if value is None else (value,))
    return tuple(sorted(found))


def _read(folder: Path, eos_token_ids: Iterable[int], chat_template: str | None) -> Tokenizer:
    config = _read_json(folder / "tokenizer_config.json")
    special = {name: text for name in SPECIAL_NAMES if (text := _token_text(config.get(name)))}
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise StorageFailed(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    own_eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_template=chat_template or _chat_template(folder, config),
        eos_token_ids={*eos_token_ids, *(() if own_eos is None else (own_eos,))},
    )


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    value = config.get(
        "chat_template", _read_json(folder / "chat_template.json").get("chat_template")
    )
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StorageFailed(f"{path} cannot be read as JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _convertible(model: Path) -> Path | None:
    """The file from which transformers can make a tokenizer."""
    if model.is_file():
        return model if model.suffix == ".gguf" else None
    for pattern in ("tokenizer.model", "spiece.model", "vocab.json", "*.gguf"):
        found = sorted(model.glob(pattern))
        if found:
            return found[0]
    return None


def _exported(model: Path, source: Path, cache: Path) -> Path:
    """Folder with the converted tokenizer, made now unless an earlier start has made it."""
    destination = cache / "tokenizers" / _fingerprint(source)
    if (destination / "tokenizer.json").exists():
        return destination
    folder = model if model.is_dir() else model.parent
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent) as scratch:
        arguments = [str(folder), scratch, *([source.name] if source.suffix == ".gguf" else [])]
        _run_export(source, arguments)
        # A second server may have been quicker; then its folder is as good as ours.
        if not (destination / "tokenizer.json").exists():
            shutil.copytree(scratch, destination, dirs_exist_ok=True)
    return destination


def _run_export(source: Path, arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "lorry.tokenizer_export", *arguments]
    try:
        subprocess.run(
            command, check=True, capture_output=True, timeout=EXPORT_TIMEOUT_S, text=True
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:] or ["no message"]
        raise StorageFailed(f"The tokenizer in {source} cannot be read: {last[0]}") from error
    except subprocess.TimeoutExpired as error:
        raise StorageFailed(
            f"Converting the tokenizer in {source} took over {EXPORT_TIMEOUT_S:.0f} s."
        ) from error


def _fingerprint(source: Path) -> str:
    """Names a conversion: by path, size and time, since hashing gigabytes of GGUF at each start
    would take seconds."""
    status = source.stat()
    facts = f"{source.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lorry"
