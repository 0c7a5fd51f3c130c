"""GET /v1/errors over the real app: the catalogue as clients read it."""

from pathlib import Path

import pytest

from lorry.error_catalogue import entries
from tests.fixtures.http_server import http_server

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


async def test_the_catalogue_is_the_one_of_lorry_explain(tmp_path: Path) -> None:
    async with http_server(tmp_path) as server:
        listed = (await server.client.get("/v1/errors")).json()["data"]
        assert [each["code"] for each in listed] == [each.code for each in entries()]
        for each, shown in zip(entries(), listed, strict=True):
            assert shown.items() >= each.record().items()
            one = (await server.client.get(f"/v1/errors/{each.code}")).json()
            assert one == shown
            assert one["action"] == each.kind.action


async def test_an_unknown_code_is_answered_with_near_ones(tmp_path: Path) -> None:
    async with http_server(tmp_path) as server:
        answer = await server.client.get("/v1/errors/queue_fool")
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "route_not_found"
        assert "queue_full" in error["message"]


async def test_what_an_error_answers_is_what_its_entry_says(tmp_path: Path) -> None:
    async with http_server(tmp_path, api_keys=("k",)) as server:
        for headers, code in (({}, "unauthorized"), ({"Authorization": "Bearer k"}, None)):
            answer = await server.client.get("/v1/adapters/nobody", headers=headers)
            error = answer.json()["error"]
            expected = next(e for e in entries() if e.code == (code or "adapter_not_found"))
            assert answer.status_code == expected.record()["http_status"]
            assert error["type"] == expected.record()["type"]
            assert error["code"] == expected.code
