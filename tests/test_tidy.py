"""Habits of the code that a review would otherwise have to ask for: lengths, docstrings, words.

The limits only ever go down: where a number here is larger than what the code needs, lower it.
"""

import ast
import functools
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "lorry"

FUNCTION_LINES_MAX = 60
FUNCTION_LINES_MEDIAN_MAX = 10
FILE_LINES_MAX = 600

BANNED_WORDS = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
PLACES_OF_ONE_MACHINE = ("/wo" + "rk/", "/ro" + "ot/", "/opt/" + "wheels", "/home" + "/")
"""Paths that exist on somebody's machine only."""

TEXT_ENDINGS = {".py", ".md", ".toml", ".txt", ".json", ".log", ".cfg", ""}
FOLDERS = ("src", "tests", "demo", "bench", "docs", ".ci")

SHIPPED_FOR_TESTS = {"lorry.store.memory"}
"""Fakes that users of the library test against, and nothing of ours runs."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files() -> list[Path]:
    """All of ours."""
    folders = ("src", "tests", "demo", "bench")
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def source_files() -> list[Path]:
    """What is shipped."""
    return sorted(SOURCE.rglob("*.py"))


@functools.cache
def tree(file: Path) -> ast.Module:
    """The file, parsed."""
    return ast.parse(file.read_text())


def functions(file: Path) -> Iterator[Function]:
    """Every function and method of a file."""
    for node in ast.walk(tree(file)):
        if isinstance(node, Function):
            yield node


def length(function: Function) -> int:
    """Lines from `def` to the last one."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def at(file: Path, line: int = 0) -> str:
    """`src/lorry/errors.py:12`, for messages."""
    return f"{file.relative_to(ROOT)}:{line}" if line else str(file.relative_to(ROOT))


def test_no_function_is_long() -> None:
    long = [
        f"{at(file, function.lineno)} {function.name}: {length(function)} lines"
        for file in python_files()
        for function in functions(file)
        if length(function) > FUNCTION_LINES_MAX
    ]
    assert long == []


def test_most_functions_are_short() -> None:
    lengths = [length(function) for file in source_files() for function in functions(file)]
    assert statistics.median(lengths) <= FUNCTION_LINES_MEDIAN_MAX


def test_no_file_is_long() -> None:
    long = {at(file): len(file.read_text().splitlines()) for file in python_files()}
    assert {name: lines for name, lines in long.items() if lines > FILE_LINES_MAX} == {}


def test_every_module_says_why_it_is_there() -> None:
    silent = [at(file) for file in source_files() if not ast.get_docstring(tree(file))]
    assert silent == []


def public_without_docstring(file: Path) -> Iterator[str]:
    """Public functions, classes and methods of a module; names in functions are private."""
    scopes: list[ast.Module | ast.ClassDef] = [tree(file)]
    while scopes:
        for node in scopes.pop().body:
            if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node) and not is_overload(node):
                yield f"{at(file, node.lineno)} {node.name}"
            if isinstance(node, ast.ClassDef):
                scopes.append(node)


def is_overload(node: Function | ast.ClassDef) -> bool:
    """Signatures for the type checker alone."""
    return any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list)


def test_every_public_name_has_a_docstring() -> None:
    assert [name for file in source_files() for name in public_without_docstring(file)] == []


def test_nothing_prints_but_the_command_line() -> None:
    prints = [
        at(file, node.lineno)
        for file in source_files()
        if "cli" not in file.relative_to(SOURCE).parts
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id == "print"
    ]
    assert prints == []


def test_no_except_catches_what_it_does_not_name() -> None:
    bare = [
        at(file, node.lineno)
        for file in python_files()
        for node in ast.walk(tree(file))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert bare == []


def test_no_module_is_named_after_nothing() -> None:
    vague = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
    assert [at(file) for file in source_files() if file.name in vague] == []


def text_files() -> Iterator[Path]:
    """All texts of the project, the lists of pinned releases and the licence aside."""
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))
    yield from (ROOT / name for name in ("Makefile", "pyproject.toml", ".importlinter"))
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*")):
            hidden = any(part == "__pycache__" for part in file.parts)
            if file.is_file() and file.suffix in TEXT_ENDINGS and not hidden:
                yield file


@pytest.mark.parametrize("words", [BANNED_WORDS, PLACES_OF_ONE_MACHINE], ids=["notes", "paths"])
def test_no_text_holds_unfinished_notes_or_places_of_one_machine(words: tuple[str, ...]) -> None:
    pattern = re.compile("|".join(re.escape(word) for word in words))
    found = [
        f"{at(file, number)}: {line.strip()[:80]}"
        for file in text_files()
        if "results" not in file.parts
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == []


def module_name(file: Path) -> str:
    """`lorry.store.sql`; a package is its `__init__`."""
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def named_modules(file: Path) -> Iterator[str]:
    """What a file imports, and what it names as a text to be run as a process."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_module_is_used_by_another() -> None:
    named = {file: set(named_modules(file)) for file in source_files()}
    entrances = {"__init__.py", "__main__.py"}
    lonely = [
        at(file)
        for file in named
        if file.name not in entrances and "migrations" not in file.parts
        if module_name(file) not in SHIPPED_FOR_TESTS
        if not any(module_name(file) in names for other, names in named.items() if other != file)
    ]
    assert lonely == []
