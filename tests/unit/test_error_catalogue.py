"""The catalogue is complete and true of the code: every error has an entry, every `raise` an entry
to belong to, and every message a pattern."""

import ast
import functools
import importlib
import inspect
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorry import errors as er
from lorry.cli import main
from lorry.error_catalogue import RetryPattern, entries, entry, find, near
from lorry.error_catalogue.entries import TYPES, WORDS, kinds
from lorry.error_catalogue.page import errors_page

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "lorry"

FIELDS = [
    *("code", "message_pattern", "type", "class", "http_status", "severity", "fault"),
    *("retryable", "retry_after_s", "trigger_scenarios", "common_situations", "solutions"),
    *("handling_strategy", "retry_pattern", "prevention_tips", "tags"),
]

INTERNAL = {
    "artifacts/matching.py": ("PatternFailed", "TimeoutError"),
    "artifacts/tensors.py": ("HeaderInvalid",),
    "artifacts/weights.py": ("SourceChanged",),
    "artifacts/cache.py": ("SourceChanged",),
    "artifacts/pickled.py": ("ValueError",),
    "artifacts/remote/buckets.py": ("Interrupted", "self._translated"),
    "artifacts/remote/guarded.py": ("Interrupted", "httpcore.ConnectError"),
    "artifacts/remote/hub.py": ("Interrupted", "self._translated"),
    "artifacts/remote/policy.py": ("ValueError",),
    "artifacts/remote/staging.py": ("BlockingIOError",),
    "artifacts/remote/web.py": ("Interrupted", "self.failed"),
    "artifacts/remote/fetcher.py": ("_first", "first"),
    "artifacts/remote/download.py": ("Interrupted",),
    "chat_template.py": ("jinja2.TemplateError",),
    "__init__.py": ("AttributeError",),
    "client/flows.py": ("TimeoutError",),
    "client/openai_client.py": ("ModuleNotFoundError",),
    "cli/demo.py": ("DemoMissing",),
    "cli/demo_server.py": ("RuntimeError",),
    "config/load.py": ("ConfigError",),
    "config/parse.py": ("ValueError",),
    "engines/embedded/engine.py": ("output.failure.error",),
    "engines/embedded/model.py": ("RuntimeError",),
    "engines/embedded/packing.py": ("ValueError",),
    "engines/embedded/settings.py": ("ValueError",),
    "lifecycle/diagram.py": ("ValueError",),
    "server/schema.py": ("ValueError",),
    "server/serve.py": ("OSError",),
    "store/sql.py": ("OSError", "ValueError"),
}
"""Exceptions without a code, and where. They are caught in the same package (judges of files and
patterns, parsers of settings, makers of docs, pydantic's validators, the store's rows), become
`EngineRejected` at the engine's border or `lorry_error` as a bug of ours, or end in the command
line's report, which has exit codes instead. (`output.failure.error` makes one of ours again, of the
class that the engine's process named.) Or Python itself gives them a meaning that programs know: a
name or a package that is not there, a wait that took too long."""

EXITS = ("typer.Exit", "typer.BadParameter")
"""How a command line ends."""

UNREACHABLE = ("AssertionError",)
"""Cases that the type checker sees cannot be."""

ANSWERED = ("RequestValidationError", "HTTPException")
"""Those of the web framework, to which server/errors.py gives a code."""


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def raises() -> Iterator[tuple[Path, ast.expr]]:
    """What each `raise` raises, and of `a or b` both: a class, a function that makes the error, or
    a variable. `raise` alone passes on what came."""
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Raise) and node.exc is not None:
                whole = node.exc
                parts = whole.values if isinstance(whole, ast.BoolOp) else [whole]
                yield from ((file, part) for part in parts)


def name_of(raised: ast.expr) -> str:
    return ast.unparse(raised.func if isinstance(raised, ast.Call) else raised)


def passes_on(raised: ast.expr) -> bool:
    """A variable: the error was made, and is judged here, elsewhere."""
    return not isinstance(raised, ast.Call) and name_of(raised).split(".")[-1].islower()


def meaning(file: Path, raised: ast.expr) -> object:
    """What is called or named, looked up in its module; None for what only a function knows."""
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    found: object = importlib.import_module(".".join(parts))
    owner, _, method = name_of(raised).rpartition(".")
    if owner == "self":
        classes = (each for each in vars(found).values() if isinstance(each, type))
        return next((vars(each)[method] for each in classes if method in vars(each)), None)
    for part in name_of(raised).split("."):
        found = getattr(found, part, None)
    return found


def gives_a_code(found: object) -> bool:
    """A class of ours, or a function that makes one."""
    if isinstance(found, type):
        return issubclass(found, er.LorryError)
    made = typing.get_type_hints(found).get("return") if inspect.isfunction(found) else None
    return isinstance(made, type) and issubclass(made, er.LorryError)


def test_every_raise_has_a_code_or_a_reason() -> None:
    allowed = {(place, name) for place, names in INTERNAL.items() for name in names}
    found = set()
    without = []
    for file, raised in raises():
        here = file.relative_to(SOURCE).as_posix(), name_of(raised)
        if here in allowed:
            found.add(here)
        elif here[1] in (*EXITS, *UNREACHABLE, *ANSWERED) or passes_on(raised):
            continue
        elif not gives_a_code(meaning(file, raised)):
            without.append(f"{here[0]}:{raised.lineno} raises {here[1]}")
    assert without == []
    unused = {each for each in allowed - found if (SOURCE / each[0]).exists()}
    assert unused == set(), "allowed, and raised no more"


def test_every_error_has_its_own_code_and_a_complete_entry() -> None:
    public = list(kinds())
    assert set(WORDS) == set(public)
    assert all("code" in vars(kind) for kind in public)
    codes = [kind.code for kind in public]
    assert sorted(set(codes)) == sorted(codes)
    for each in entries():
        record = each.record()
        assert list(record) == FIELDS
        empty = [name for name, value in record.items() if value in ("", [], None)]
        assert empty in ([], ["retry_after_s"]), each.code
        assert each.meaning.endswith("."), each.code
        for text in (*each.words.triggers, *each.words.solutions, each.words.handling):
            assert text.endswith("."), text


def test_every_entry_agrees_with_its_class() -> None:
    for kind in kinds():
        record = entry(kind).record()
        assert record["http_status"] == kind.status
        assert record["type"] == TYPES[kind.status]
        assert record["retryable"] is kind.retryable
        assert (record["retry_pattern"] == RetryPattern.BACKOFF) is kind.retryable, kind
        assert (record["retry_after_s"] is not None) is kind.retryable, kind


def test_a_class_of_another_module_has_the_code_and_entry_of_a_public_one() -> None:
    for file, raised in raises():
        kind = meaning(file, raised)
        if isinstance(kind, type) and issubclass(kind, er.LorryError):
            assert entry(kind).code == kind.code

    class Private(er.RequestInvalid):
        """A dialect's own shape of it."""

    assert entry(Private).code == "request_invalid"
    assert Private not in list(kinds())


def messages() -> Iterator[tuple[type[er.LorryError], str, str]]:
    """Class, place and text of every error that is made with its words in place; "\0" stands for
    what varies."""
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(tree(file)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            kind = vars(er).get(node.func.id)
            if not isinstance(kind, type) or not issubclass(kind, er.LorryError) or not node.args:
                continue
            text = rendered(node.args[-1])
            if text is not None:
                place = f"{file.relative_to(SOURCE)}:{node.lineno}"
                promise = "Promise \0: " if kind is er.BrokenInvariant else ""
                yield kind, place, promise + text


def rendered(words: ast.expr) -> str | None:
    if isinstance(words, ast.Constant) and isinstance(words.value, str):
        return words.value
    if isinstance(words, ast.JoinedStr):
        parts = (one.value if isinstance(one, ast.Constant) else "\0" for one in words.values)
        return "".join(map(str, parts))
    return None


def matches(pattern: str, text: str) -> bool:
    return (
        re.fullmatch(".+?".join(map(re.escape, pattern.split("{}"))), text, re.DOTALL) is not None
    )


def test_every_message_in_the_code_has_a_pattern() -> None:
    """But the first of several problems, which is made elsewhere and looks as the pattern says;
    and but the words of dialects, which are those of the servers that they stand in for."""
    found = [each for each in messages() if "dialects" not in each[1]]
    assert len(found) > 150
    strange = [
        f"{place} {kind.code}: {text!r}"
        for kind, place, text in found
        if not any(matches(pattern, text) for pattern in entry(kind).words.patterns)
    ]
    assert [each for each in strange if "model_invalid: '\\x00\\x00.'" not in each] == []


def texts() -> Iterator[str]:
    """Every text in the code but the catalogue's."""
    for file in sorted(SOURCE.rglob("*.py")):
        if "error_catalogue" not in file.parts:
            found = (n for n in ast.walk(tree(file)) if isinstance(n, ast.expr))
            yield from filter(None, map(rendered, found))


def test_every_pattern_is_of_a_message_in_the_code() -> None:
    said = list(texts())
    unused = [
        f"{each.code}: {pattern}"
        for each in entries()
        for pattern in each.words.patterns
        if not any(matches(pattern, text) for text in said)
    ]
    assert unused == []


def test_the_page_is_fresh() -> None:
    assert (ROOT / "docs" / "errors.md").read_text() == errors_page(), (
        "run python -m lorry.error_catalogue"
    )


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


@pytest.mark.parametrize("name", ["queue_full", "QUEUE_FULL", "QueueFull", "queue-full"])
def test_explain_knows_codes_and_classes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", name) == 0
    said = capsys.readouterr().out
    assert "queue_full" in said
    assert "HTTP 429" in said
    for text in entry(er.QueueFull).words.solutions:
        assert text in said


def test_explain_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain") == 0
    said = capsys.readouterr().out
    assert all(f"{each.code} " in said for each in entries())


def test_explain_exports_one_record_per_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "--json") == 0
    records = json.loads(capsys.readouterr().out)
    assert [record["code"] for record in records] == [each.code for each in entries()]
    assert all(list(record) == FIELDS for record in records)
    assert run("explain", "--json", "all_pinned") == 0
    assert json.loads(capsys.readouterr().out) == find("all_pinned").record()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("adapter_notfound", "adapter_not_found"),
        ("que_full", "queue_full"),
        ("pinned", "all_pinned"),
        ("EngineTimeOuts", "engine_timeout"),
    ],
)
def test_explain_suggests_near_codes(
    wrong: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("explain", wrong) == 2
    assert meant in capsys.readouterr().err
    assert meant in near(wrong)


def test_explain_of_nonsense_says_where_all_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "zzz") == 2
    assert "lorry explain lists all" in capsys.readouterr().err
