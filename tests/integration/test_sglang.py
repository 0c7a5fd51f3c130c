"""SGLang's admin and state routes, and its names for adapters in OpenAI's bodies."""

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from lorry.engines.fake_script import Fault
from lorry.errors import EngineRejected, EngineUnreachable
from lorry.server.dialects import sglang
from tests.fixtures.http_server import BASE, HttpServer, http_server
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

pytestmark = pytest.mark.anyio

TOKENIZER = tiny_tokenizer()
COLON = "org/tiny:v1"


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[HttpServer]:
    """Two slots, room for three."""
    async with http_server(tmp_path, tokenizer=TOKENIZER) as running:
        yield running
        await running.idle()


async def load(server: HttpServer, name: str, seed: int = 1, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": server.adapter(seed)} | more
    return await server.client.post("/load_lora_adapter", json=body)


async def unload(server: HttpServer, name: str) -> httpx.Response:
    return await server.client.post("/unload_lora_adapter", json={"lora_name": name})


def told(success: bool, message: str | None, loaded: dict[str, str]) -> dict[str, Any]:
    return {
        "rid": None,
        "http_worker_ipc": None,
        "success": success,
        "error_message": message,
        "loaded_adapters": loaded,
    }


# Loads and unloads


async def test_loads_and_unloads_answer_with_the_registry_after_the_call(
    server: HttpServer,
) -> None:
    one, two = server.adapter(1), server.adapter(2)
    first = await load(server, "a", 1, lora_id=None)
    assert (first.status_code, first.json()) == (200, told(True, None, {"a": one}))
    second = await load(server, "b", 2)
    assert second.json() == told(True, None, {"a": one, "b": two})
    gone = await unload(server, "a")
    assert (gone.status_code, gone.json()) == (200, told(True, None, {"b": two}))
    back = await load(server, "a", 2)
    assert back.json() == told(True, None, {"a": two, "b": two})


async def test_a_loaded_name_is_refused_and_stays_as_it_was(server: HttpServer) -> None:
    await load(server, "a", 1)
    again = await load(server, "a", 2)
    assert again.status_code == 400
    assert again.json() == told(
        False,
        "Failed to load LoRA adapter a because it is already loaded.",
        {"a": server.adapter(1)},
    )


async def test_a_second_unload_fails(server: HttpServer) -> None:
    await load(server, "a")
    await load(server, "b", 2)
    await unload(server, "a")
    again = await unload(server, "a")
    assert again.status_code == 400
    message = "LoRA with name a does not exist. Loaded LoRAs: b."
    assert again.json() == told(False, message, {"b": server.adapter(2)})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"lora_name": "a", "lora_path": "/nowhere"}, ("'a'", "/nowhere")),
        ({"lora_name": "a"}, ("lora_path",)),
        ({"lora_path": "x"}, ("lora_name",)),
        ({"lora_name": "", "lora_path": "x"}, ("lora_name",)),
        ({"lora_name": 5, "lora_path": "x"}, ("lora_name",)),
        ({"lora_name": BASE, "lora_path": "x"}, (BASE, "base model")),
        ({"lora_name": "a/../b", "lora_path": "x"}, ("a/../b",)),
        ({"lora_name": "a", "lora_path": "WIDE"}, ("'a'", "rank")),
        ({"lora_name": "a", "lora_path": "x", "pinned": "perhaps"}, ("pinned",)),
    ],
)
async def test_a_failed_load_names_its_cause_and_leaves_nothing(
    server: HttpServer, body: dict[str, Any], words: tuple[str, ...]
) -> None:
    if body.get("lora_path") == "WIDE":
        body = body | {"lora_path": server.adapter(3, rank=100)}
    answer = await server.client.post("/load_lora_adapter", json=body)
    assert answer.status_code == 400
    message = answer.json()["error_message"]
    assert answer.json() == told(False, message, {})
    assert all(word in message for word in words), message
    assert await server.engine.list_loras() == frozenset()


async def test_a_body_that_is_no_json_is_a_failure_in_the_same_shape(server: HttpServer) -> None:
    headers = {"content-type": "application/json"}
    answer = await server.client.post("/unload_lora_adapter", content="{", headers=headers)
    assert answer.status_code == 400
    assert answer.json()["success"] is False
    assert "not JSON" in answer.json()["error_message"]


async def test_promise_6_a_pin_that_cannot_be_is_refused_before_the_load(
    server: HttpServer,
) -> None:
    assert (await load(server, "a", 1, pinned=True)).json()["success"]
    assert (await server.client.get("/v1/adapters/a")).json()["pinned"] is True
    refused = await load(server, "b", 2, pinned=True)
    assert refused.status_code == 400
    assert "pin" in refused.json()["error_message"]
    assert refused.json()["loaded_adapters"] == {"a": server.adapter(1)}
    assert len(await server.engine.list_loras()) == 1
    assert (await load(server, "b", 2)).json()["success"]


async def test_promise_4_a_failed_unload_says_so_and_keeps_the_adapter(server: HttpServer) -> None:
    await load(server, "a")
    server.engine.inject("remove_lora", Fault(error=EngineRejected("It sticks.")))
    failed = await unload(server, "a")
    assert failed.status_code == 400
    assert "'a'" in failed.json()["error_message"]
    assert "It sticks." in failed.json()["error_message"]
    assert failed.json()["loaded_adapters"] == {"a": server.adapter(1)}
    assert (await server.complete(model="a")).status_code == 200
    assert (await unload(server, "a")).json()["success"]


async def test_many_loads_of_one_name_have_one_winner(server: HttpServer) -> None:
    outcomes: list[bool] = []

    async def one() -> None:
        outcomes.append((await load(server, "a")).json()["success"])

    async with anyio.create_task_group() as group:
        for _ in range(16):
            group.start_soon(one)
    assert sorted(outcomes) == [False] * 15 + [True]


# Names in OpenAI's bodies


async def text(server: HttpServer, **body: Any) -> str:
    answer = await server.complete(**body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.parametrize("base", [BASE, COLON])
async def test_base_and_adapter_go_by_one_name_or_two_fields(tmp_path: Path, base: str) -> None:
    names = {"served_model_names": (base, "alias")}
    async with http_server(tmp_path, tokenizer=TOKENIZER, **names) as server:
        for seed, name in enumerate(("a", "team/a:b", f"{base}-a"), 1):
            await load(server, name, seed)
            own = await text(server, model=name)
            assert own != await text(server, model=base)
            assert own == await text(server, model=f"{base}:{name}")
            assert own == await text(server, model=f"alias:{name}")
            assert own == await text(server, model=base, lora_path=name)
            assert own == await text(server, model=f"{base}:{name}", lora_path="nobody")
        assert await text(server, model=base, lora_path=None) == await text(server, model=base)
        empty = await server.complete(model=base, lora_path="")
        assert empty.json()["error"]["param"] == "lora_path"


async def test_an_adapters_own_name_wins_over_a_base_and_a_name(server: HttpServer) -> None:
    await load(server, f"{BASE}:a", 1)
    await load(server, "a", 2)
    whole, short = await text(server, model=f"{BASE}:a"), await text(server, model="a")
    assert whole != short
    assert whole == await text(server, model=f"{BASE}:{BASE}:a")


async def test_a_base_whose_name_begins_like_another_hides_no_adapter(tmp_path: Path) -> None:
    names = {"served_model_names": ("a", "a:b")}
    async with http_server(tmp_path, tokenizer=TOKENIZER, **names) as server:
        await load(server, "b:c", 1)
        own = await text(server, model="b:c")
        assert own == await text(server, model="a:b:c") == await text(server, model="a:b:b:c")
        await load(server, "c", 2)
        assert await text(server, model="a:b:c") == own
        assert await text(server, model="a:c") == await text(server, model="c") != own


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"model": f"{BASE}:x"}, f"{BASE}:x"),
        ({"model": f"{BASE}:"}, f"{BASE}:"),
        ({"model": f"{BASE}:{BASE}"}, f"{BASE}:{BASE}"),
        ({"model": "x:a"}, "x:a"),
        ({"model": "default", "lora_path": "a"}, "default"),
        ({"model": BASE, "lora_path": "x"}, "x"),
        ({"model": BASE, "lora_path": BASE}, BASE),
        ({"model": BASE, "lora_path": ["x"]}, "x"),
    ],
)
async def test_promise_10_an_unknown_name_is_never_the_bases_answer(
    server: HttpServer, body: dict[str, Any], named: str
) -> None:
    await load(server, "a")
    answers = [await server.complete(**body)]
    if not isinstance(body.get("lora_path"), list):
        chat = body | {"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 1}
        answers.append(await server.client.post("/v1/chat/completions", json=chat))
    for answer in answers:
        assert answer.status_code == 404
        assert f"`{named}`" in answer.json()["error"]["message"]


async def test_a_chat_takes_both_forms(server: HttpServer) -> None:
    await load(server, "a")
    said = []
    for choice in ({"model": "a"}, {"model": f"{BASE}:a"}, {"model": BASE, "lora_path": "a"}):
        chat = {"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 5}
        answer = await server.client.post(
            "/v1/chat/completions", json=chat | choice | {"temperature": 0}
        )
        assert answer.json()["model"] == choice["model"]
        said.append(answer.json()["choices"][0]["message"]["content"])
    assert len(set(said)) == 1


async def test_a_completion_may_name_an_adapter_for_each_prompt(server: HttpServer) -> None:
    await load(server, "a")
    answer = await server.complete(prompt=[[5, 6, 7]] * 2, lora_path=["a", None])
    first, second = (choice["text"] for choice in answer.json()["choices"])
    assert first == await text(server, model="a")
    assert second == await text(server)
    short = await server.complete(prompt=[[5], [6]], lora_path=["a"])
    assert short.json()["error"]["param"] == "lora_path"


async def test_models_show_lineage_and_unknown_ones_are_404(server: HttpServer) -> None:
    await load(server, "a")
    cards = (await server.client.get("/v1/models")).json()["data"]
    (card,) = [card for card in cards if card["id"] == "a"]
    assert (card["root"], card["parent"], card["max_model_len"]) == (server.adapter(1), BASE, None)
    missing = await server.client.get("/v1/models/nobody")
    assert missing.status_code == 404
    assert missing.json()["error"]["param"] == "model"


# The server's state


async def test_slots_in_use_are_shown_to_routers_and_dashboards(server: HttpServer) -> None:
    for seed, used in enumerate((0, 1, 2, 2), 1):
        (one,) = (await server.client.get("/v1/loads?include=lora")).json()["loads"]
        assert one["dp_rank"] == 0
        pool = {"slots_used": used, "slots_total": 2, "utilization": used / 2}
        assert one["lora"] == pool
        lines = (await server.client.get("/metrics")).text.splitlines()
        for name, value in pool.items():
            assert f'sglang:lora_pool_{name}{{model_name="{BASE}"}} {value:.1f}' in lines
        await load(server, f"a{seed}", seed)
        await server.complete(model=f"a{seed}")
    core = (await server.client.get("/v1/loads?include=core")).json()["loads"][0]
    assert core.keys() == {"dp_rank", "num_running_reqs", "num_waiting_reqs"}
    assert "lora" in (await server.client.get("/v1/loads")).json()["loads"][0]
    bad = await server.client.get("/v1/loads?include=lora,shoes")
    assert bad.status_code == 400
    assert "shoes" in bad.json()["error"]["message"]


async def test_the_base_model_is_described_under_both_paths(server: HttpServer) -> None:
    info = (await server.client.get("/model_info")).json()
    assert info == (await server.client.get("/get_model_info")).json()
    assert (info["model_path"], info["tokenizer_path"], info["is_generation"]) == (BASE, BASE, True)
    assert info["architectures"] == ["LlamaForCausalLM"]


async def test_a_healthy_engine_makes_a_token(server: HttpServer) -> None:
    answer = await server.client.get("/health_generate")
    assert (answer.status_code, answer.text) == (200, "")
    assert server.engine.counters["generation_tokens"] == 1


async def test_an_engine_that_makes_no_token_is_not_healthy(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.engine.inject("generate", Fault(error=EngineUnreachable("The engine is down.")))
    assert (await server.client.get("/health_generate")).status_code == 503
    monkeypatch.setattr(sglang, "HEALTH_DEADLINE_S", 0.02)
    server.engine.inject("generate", Fault(delay_s=math.inf))
    late = await server.client.get("/health_generate")
    assert late.status_code == 503
    assert "0.02 s" in late.json()["error"]["message"]


async def test_every_route_is_behind_the_keys(tmp_path: Path) -> None:
    async with http_server(tmp_path, api_keys=("secret",)) as server:
        for path in ("load_lora_adapter", "unload_lora_adapter", "generate"):
            assert (await server.client.post(f"/{path}", json={})).status_code == 401
        for path in ("v1/loads", "model_info", "get_model_info", "health_generate"):
            assert (await server.client.get(f"/{path}")).status_code == 401
