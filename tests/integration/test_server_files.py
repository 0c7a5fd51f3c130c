"""Folders of files that come with the request, over the real app with the fake engine."""

import json
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fixtures.adapters import good_adapter
from tests.fixtures.http_server import HttpServer, http_server
from tests.fixtures.uploads import (
    error_of,
    folder_files,
    left_over,
    parts,
    tar,
    tar_of,
    until_nothing_is_left,
)

pytestmark = pytest.mark.anyio

GZIP = {"content-type": "application/gzip"}
TAR = {"content-type": "application/x-tar"}
FILES = "/v1/adapters/policy/files"


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[HttpServer]:
    """Two slots, room for three."""
    async with http_server(tmp_path) as running:
        yield running
        await until_nothing_is_left(running)


@pytest.mark.parametrize("mode", ["w:gz", "w"])
@pytest.mark.parametrize("inside", ["", "./", "my-adapter/", "a/b/"])
@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
async def test_a_tar_of_a_folder_is_served(
    server: HttpServer, mode: str, inside: str, form: int
) -> None:
    content = folder_files(good_adapter(1), inside) | {
        f"{inside}README.md": b"# mine",
        f"{inside}runs/{'long-name-' * 12}/events": b"1",
    }
    if form == tarfile.USTAR_FORMAT:
        content = folder_files(good_adapter(1), inside)
    headers = GZIP if mode == "w:gz" else TAR
    answer = await server.client.put(FILES, content=tar(content, mode, form), headers=headers)
    assert answer.status_code == 201, answer.text
    assert answer.json()["published"] == (await server.load("other", 1)).json()["version"]


async def test_files_of_a_form_are_served_and_may_be_registered_without_a_load(
    server: HttpServer,
) -> None:
    more = [*parts(good_adapter(1)), ("files", ("README.md", b"# mine"))]
    answer = await server.client.put(f"{FILES}?load=false", files=more)
    assert answer.status_code == 201, answer.text
    assert answer.json()["tier"] == "disk"
    assert (await server.complete(model="policy")).status_code == 200


async def test_an_uploaded_folder_is_judged_like_any_other(server: HttpServer) -> None:
    pickled = {"adapter_config.json": b"{}", "adapter_model.bin": b"\x80\x02."}
    answer = await server.client.put(FILES, content=tar(pickled), headers=GZIP)
    error = error_of(answer, 422, "adapter_invalid")
    assert "is a pickle" in json.dumps(error)


def link(kind: bytes, target: str) -> bytes:
    member = tarfile.TarInfo("adapter_config.json")
    member.type, member.linkname = kind, target
    return tar_of(member)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (link(tarfile.SYMTYPE, "/etc/passwd"), "a symbolic link"),
        (link(tarfile.LNKTYPE, "/etc/passwd"), "a hard link"),
        (link(tarfile.FIFOTYPE, ""), "a FIFO"),
        (link(tarfile.CHRTYPE, ""), "a device"),
        (tar({"../adapter_config.json": b"{}"}, "w"), "leads out of its folder"),
        (tar({"a/../../b.json": b"{}"}, "w"), "leads out of its folder"),
        (tar({"/etc/adapter_config.json": b"{}"}, "w"), "is an absolute"),
        (tar({"C:\\adapter_config.json": b"{}"}, "w"), "is an absolute or foreign"),
        (tar({"a\nb": b"{}"}, "w"), "control character"),
        (tar({"a": b"1", "a/b": b"2"}, "w"), "both a file and a folder"),
        (tar({f"{n}.json": b"" for n in range(300)}, "w"), "more than 256 files"),
        (tar({f"{n}/adapter_config.json": b"{}" for n in range(3)}, "w"), "has 3 adapters"),
        (tar({}, "w"), "has no files"),
        (tar({"adapter_config.json": b"{}"}, "w")[:700], "cut short"),
        (b"no archive at all" * 100, "not a tar archive"),
        (b"", "The body is empty"),
    ],
)
async def test_archives_that_want_more_than_files_are_refused(
    server: HttpServer, body: bytes, says: str
) -> None:
    error = error_of(
        await server.client.put(FILES, content=body, headers=TAR), 400, "request_invalid"
    )
    assert says in error["message"], error["message"]
    assert (await server.client.get("/v1/adapters")).json()["data"] == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (tar({"adapter_model.safetensors": bytes(20 << 20)}), "expands more than 100 times"),
        (tar(folder_files(good_adapter(1)))[:-2000], "cut short"),
        (b"not gzip", "not a gzip archive"),
    ],
)
async def test_bad_compression_is_refused(server: HttpServer, body: bytes, says: str) -> None:
    error = error_of(
        await server.client.put(FILES, content=body, headers=GZIP), 400, "request_invalid"
    )
    assert says in error["message"], error["message"]


async def test_files_respect_the_limit_of_the_disk_cache(tmp_path: Path) -> None:
    async with http_server(tmp_path) as server:
        server.service.supervisor.cache._shelf.limit_bytes = 1000
        answer = await server.client.put(
            FILES, content=tar(folder_files(good_adapter(1))), headers=GZIP
        )
        error_of(answer, 503, "capacity_exhausted")
        assert left_over(server) == []
