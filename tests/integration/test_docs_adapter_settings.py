"""The examples of docs/adapter-settings.md, run in their order: each request gives what stands
below it."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.http_server import http_server
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adapter-settings.md"
EXAMPLE = re.compile(r"```bash\n(.*?)```\s+```json\n(.*?)```", re.DOTALL)


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


@dataclass(frozen=True, slots=True)
class Call:
    """One curl command."""

    method: str
    path: str
    body: Any


def call(command: str) -> Call:
    """Read the few flags that the page uses."""
    words = shlex.split(command.replace("\\\n", " "))
    assert words.pop(0) == "curl"
    method, path, body = "", "", None
    while words:
        word = words.pop(0)
        if word == "-X":
            method = words.pop(0)
        elif word == "-H":
            assert words.pop(0) == "Content-Type: application/json"
        elif word == "-d":
            body = json.loads(words.pop(0))
        else:
            path = word.removeprefix("http://localhost:8000")
    return Call(method or ("GET" if body is None else "POST"), path, body)


def missing(wanted: Any, found: Any, place: str = "") -> Iterator[str]:
    """Where the answer is not what the page shows of it."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key, value in wanted.items():
            nested = key in ("defaults", "maxima", "labels")
            if nested and value != found.get(key):
                yield f"{place}.{key}: {found.get(key)}, not {value}"
            else:
                yield from missing(value, found.get(key), f"{place}.{key}")
    elif isinstance(wanted, list) and wanted and isinstance(wanted[0], dict):
        for one in wanted:
            if all(any(missing(one, each)) for each in found):
                yield f"{place}: no {one} in {found}"
    elif wanted != found:
        yield f"{place}: {found!r}, not {wanted!r}"


async def test_the_examples_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    examples = EXAMPLE.findall(PAGE.read_text())
    assert len(examples) == 6
    async with http_server(tmp_path, tokenizer=tiny_tokenizer()) as server:
        other = server.adapter(2)
        for command, answer in examples:
            asked = call(command)
            if asked.body and "source" in asked.body:
                asked.body["source"] = server.adapter(1)
            if asked.path.endswith("/rollback"):
                replaced = await server.client.put("/v1/adapters/pirate", json={"source": other})
                assert replaced.is_success, replaced.text
            found = await server.client.request(asked.method, asked.path, json=asked.body)
            assert list(missing(json.loads(answer), found.json())) == [], (command, found.text)


async def test_the_words_of_a_retirement_are_those_of_the_page() -> None:
    from lorry.lifecycle.operations import disuse

    assert disuse(3_600_000) in PAGE.read_text()
