"""Text to tokens and back: equal to transformers, and the same text however a stream is cut."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from lorry.errors import StorageFailed
from lorry.tokens import Tokenizer, config_eos_token_ids, load_tokenizer
from tests.fixtures.tiny_tokenizer import (
    SPECIAL,
    TEMPLATE,
    byte_level,
    sentencepiece_like,
    tiny_tokenizer,
)

BYTES = tiny_tokenizer()
PIECES = Tokenizer(sentencepiece_like(), special_tokens=SPECIAL)
TEXT = "Ünïcödé: 東京, 🚚 and 👩‍🚀!"


def streamed(tokenizer: Tokenizer, ids: list[int], cuts: list[int], prompt: list[int]) -> str:
    """The text of a stream whose tokens come in groups of these sizes, then one by one."""
    stream = tokenizer.stream(prompt)
    text, at = "", 0
    for size in [*cuts, *[1] * len(ids)]:
        text += stream.feed(ids[at : at + size])
        at += size
    return text + stream.flush()


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 5), max_size=10))
def test_a_stream_cut_anywhere_gives_the_whole_text(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    assert streamed(tokenizer, ids, cuts, []) == tokenizer.decode(ids)


@given(
    ids=st.lists(st.integers(0, 511), max_size=40), cuts=st.lists(st.integers(1, 5), max_size=10)
)
def test_any_bytes_give_the_text_of_all_tokens_at_once(ids: list[int], cuts: list[int]) -> None:
    assert streamed(BYTES, ids, cuts, []) == BYTES.decode(ids)


def test_text_after_a_prompt_keeps_its_leading_blank() -> None:
    prompt, rest = (list(PIECES.encode(t, add_special_tokens=False)) for t in ("the", "lorry"))
    assert PIECES.decode(rest) == "lorry"
    assert streamed(PIECES, rest, [], prompt) == " lorry"


def test_a_character_is_sent_when_its_last_byte_has_come() -> None:
    ids = [BYTES.encode("a", add_special_tokens=False)[0]]
    ids += [token for token in range(4, 260) if BYTES.token_text(token) == "\ufffd"][:1]
    stream = BYTES.stream([])
    assert stream.feed(ids) == "a"
    assert stream.flush() == "\ufffd"
    truck = [byte + 3 for byte in "🚚".encode()]
    stream = PIECES.stream([])
    assert [stream.feed([token]) for token in truck] == ["", "", "", "🚚"]


def test_a_character_that_begins_in_the_prompt_is_not_lost() -> None:
    truck = [byte + 3 for byte in "🚚".encode()]
    assert streamed(PIECES, truck[2:], [], truck[:2]).endswith("🚚")


def test_endless_broken_bytes_are_not_held_back_for_ever() -> None:
    stream = PIECES.stream([])
    sent = "".join(stream.feed([0xFF + 3]) for _ in range(1000))
    assert len(sent) >= 990
    assert len(stream._ids) < 20


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [1, *BYTES.encode("a", add_special_tokens=False), 2]
    assert BYTES.decode(ids) == "a"
    assert BYTES.decode(ids, skip_special_tokens=False) == "<s>a</s>"
    stream = BYTES.stream([], skip_special_tokens=False)
    assert stream.feed(ids) + stream.flush() == "<s>a</s>"
    assert BYTES.token_text(1) == "<s>"


def write(folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> Path:
    """A model folder with a tokenizer."""
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    known = SPECIAL | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(known | config))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    return folder


CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"add_bos_token": True},
    {"add_bos_token": True, "add_eos_token": True},
    {"add_bos_token": False},
    {
        "bos_token": {"content": "<s>", "special": True, "__type": "AddedToken"},
        "add_bos_token": True,
    },
)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_ids_and_chats_equal_those_of_transformers(
    tmp_path: Path, config: dict[str, Any], begins: bool
) -> None:
    from transformers import AutoTokenizer

    backend = byte_level()
    if begins:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair=None, special_tokens=[("<s>", 1)]
        )
    folder = write(tmp_path / "model", backend, config | {"chat_template": TEMPLATE})
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    assert ours is not None
    for text in ("", "The lorry", TEXT, "<s>x</s>", "  two  blanks\n"):
        assert list(ours.encode(text)) == theirs(text)["input_ids"]
        ids = list(ours.encode(text, add_special_tokens=False))
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    for more in ({"add_generation_prompt": True}, {"continue_final_message": True}):
        rendered = theirs.apply_chat_template(chat, tokenize=False, **more)
        options = {"add_generation_prompt": False} | more
        assert ours.render_chat(chat, **options) == rendered  # type: ignore[arg-type]


@pytest.mark.timeout(180)
def test_other_forms_are_converted_once(tmp_path: Path) -> None:
    vocab = {piece: at for at, piece in enumerate(["<s>", "</s>", "<unk>", "a", "b", "ab"])}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    first = load_tokenizer(folder, tmp_path / "cache")
    assert first is not None
    assert first.encode("ab", add_special_tokens=False) == (5,)
    kept = list((tmp_path / "cache").rglob("tokenizer.json"))
    assert len(kept) == 1
    written = kept[0].stat().st_mtime_ns
    assert load_tokenizer(folder, tmp_path / "cache") is not None
    assert kept[0].stat().st_mtime_ns == written


def test_torch_is_not_imported(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", byte_level(), {})
    code = (
        "import sys, pathlib; from lorry.tokens import load_tokenizer;"
        f"load_tokenizer(pathlib.Path({str(folder)!r})).encode('a');"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_broken_files_are_named(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "model", byte_level(), {})
    (folder / name).write_text("{")
    with pytest.raises(StorageFailed, match=name):
        load_tokenizer(folder)


def test_all_ends_of_an_answer_are_known(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_special_tokens(["<|im_end|>", "<|eot_id|>"])
    folder = write(tmp_path / "model", backend, {"eos_token": "</s>"})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7]}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    turns = [backend.token_to_id(name) for name in ("<|im_end|>", "<|eot_id|>")]
    assert tokenizer.eos_token_ids == tuple(sorted([2, 3, 7, *turns]))
    assert config_eos_token_ids(folder) == (2, 3, 7)
    assert config_eos_token_ids(tmp_path) == ()


def test_templates_are_found_in_all_their_places(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", byte_level(), {"chat_template": "in config"})

    def found(template: str | None = None) -> str:
        tokenizer = load_tokenizer(folder, chat_template=template)
        assert tokenizer is not None
        assert tokenizer.chat_template is not None
        return tokenizer.chat_template.source

    assert found() == "in config"
    named = [{"name": "default", "template": "named"}, {"name": "rag", "template": "no"}]
    write(folder, byte_level(), {"chat_template": named})
    assert found() == "named"
    (folder / "chat_template.jinja").write_text("in a file")
    assert found() == "in a file"
    assert found("given") == "given"


def test_bytes_of_tokens_are_exact() -> None:
    for tokenizer in (BYTES, PIECES):
        ids = tokenizer.encode(TEXT, add_special_tokens=False)
        raw = b"".join(tokenizer.token_bytes(token) for token in ids)
        assert raw.decode().replace(" ", "") == TEXT.replace(" ", "")
