"""Write the list of each promise's tests in docs/proof.md anew: `python -m tests.proof`.

A test of a promise has its number in its name, so the list is read from the names alone."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "proof.md"
NAMED = re.compile(r"test_promises?_(\d+(?:_\d+)*)_")


def promises_of(test: str) -> tuple[int, ...]:
    """The numbers in a test's name; `test_promise_1_3_...` is a test of two."""
    named = NAMED.match(test)
    return tuple(map(int, named[1].split("_"))) if named else ()


def tests_of(promise: int) -> dict[str, int]:
    """File, below `tests/`, to how many test functions have the promise's number."""
    found: Counter[str] = Counter()
    for path in sorted(TESTS.rglob("*.py")):
        for name in functions(path):
            found[path.relative_to(TESTS).as_posix()] += promise in promises_of(name)
    return {file: count for file, count in found.items() if count}


def functions(path: Path) -> Iterator[str]:
    """Names of all functions of a file, methods included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def listed(promise: int) -> str:
    """One line: how many tests, and where."""
    found = tests_of(promise)
    files = ", ".join(f"`{file}` ({count})" for file, count in found.items())
    return f"Tests: {sum(found.values())}. {files}."


def refreshed(page: str) -> str:
    """The page with every `<!-- tests of promise N -->` line followed by the list of now."""
    mark = re.compile(r"(<!-- tests of promise (\d+) -->\n).*\n")
    return mark.sub(lambda found: f"{found[1]}{listed(int(found[2]))}\n", page)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text()))
