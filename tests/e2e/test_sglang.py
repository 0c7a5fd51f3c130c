"""What SGLang's own users do beyond the common cases, against a process started with its flags:
room for two adapters, one of three pinned from the start, and a base whose name holds a colon."""

import json
import threading
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import start
from tests.fixtures.api import at_once
from tests.fixtures.common_ground import PROMPTS, SHORT_STEPS, CommonGround
from tests.fixtures.server_process import ServerProcess
from tests.fixtures.sglang_api import SglangApi

BASE = "org/tiny:v1"


@pytest.fixture(scope="module")
def sglang_server(
    ground: CommonGround, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """All three forms of --lora-paths, and the other aliases."""
    pinned = {"lora_name": "C", "lora_path": str(ground.adapter("C")), "pinned": True}
    room = ("--max-loras-per-batch", "2", "--max-loaded-loras", "2")
    lists = (f"A={ground.adapter('A')}", json.dumps(pinned))
    flags = ("--served-model-name", BASE, *room, "--lora-eviction-policy", "lru")
    lists = ("--lora-paths", str(ground.adapter("B")), "--lora-paths", *lists)
    with start(ground, tmp_path_factory.mktemp("sglang"), *flags, *lists) as server:
        yield server


@pytest.fixture
def api(sglang_server: ServerProcess, ground: CommonGround) -> Iterator[SglangApi]:
    """Leaves the adapters of the start as they were."""
    with sglang_server.client() as client:
        api = SglangApi(client, ground, BASE)
        before = api.listed()
        yield api
        for name in api.listed().keys() - before.keys():
            api.must_unload(name)
        assert api.listed() == before
        api.assert_alive()


def test_adapters_of_the_start_are_listed_and_right(api: SglangApi, ground: CommonGround) -> None:
    path = str(ground.adapter("B"))
    roots = {path: path, "A": str(ground.adapter("A")), "C": str(ground.adapter("C"))}
    assert api.listed() == roots
    assert {name for name, entry in api.native().items() if entry["pinned"]} == {"C"}
    api.check_all([(path, "B", "P"), ("A", "A", "P"), ("C", "C", "P")])


def test_promise_12_one_batch_mixes_adapters_and_the_base(
    api: SglangApi, ground: CommonGround
) -> None:
    paths = ["A", None, "C", str(ground.adapter("B")), None, "A"]
    oracles = ["A", "base", "C", "B", "base", "A"]
    body = {
        "input_ids": [list(PROMPTS["P"])] * len(paths),
        "lora_path": paths,
        "sampling_params": {"temperature": 0, "max_new_tokens": SHORT_STEPS},
    }
    response = api.client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    answers = [tuple(answer["output_ids"]) for answer in response.json()]
    assert answers == [ground.answer(oracle, "P").tokens for oracle in oracles]


def test_base_and_adapter_in_openais_body(api: SglangApi, ground: CommonGround) -> None:
    body = {
        "prompt": list(PROMPTS["P"]),
        "max_tokens": SHORT_STEPS,
        "temperature": 0,
        "logprobs": 1,
        "return_token_ids": True,
    }
    for choice in (
        {"model": f"{BASE}:A"},
        {"model": "A"},
        {"model": BASE, "lora_path": "A"},
        {"model": f"{BASE}:A", "lora_path": "C"},
    ):
        response = api.client.post("/v1/completions", json=body | choice)
        assert api.is_answer(response.json(), "A"), choice
    for wrong in ("org/tiny:A", f"{BASE}:nobody", f"{BASE}:", "org/tiny"):
        assert api.client.post("/v1/completions", json=body | {"model": wrong}).status_code == 404


def test_ten_adapters_at_once_share_room_for_two(api: SglangApi, ground: CommonGround) -> None:
    names = {f"n{at}": "ABDEF"[at % 5] for at in range(10)}
    for name, oracle in names.items():
        api.must_load(name, ground.adapter(oracle))
    at_once([lambda n=n, o=o: api.check(n, o, "S") for n, o in names.items()])
    assert api.listed().keys() >= names.keys()
    entry = api.native()["C"]
    assert entry["tier"] in {"host", "slot"}, "a pinned adapter was evicted"


def test_promise_4_failing_loads_beside_good_traffic_disturb_nothing(
    api: SglangApi, ground: CommonGround
) -> None:
    stop = threading.Event()

    def traffic() -> None:
        while not stop.is_set():
            api.check("A", "A", "S")
            api.check(BASE, "base", "S")

    def failing() -> None:
        try:
            before = api.listed()
            for _ in range(10):
                response = api.load("bad", ground.model)
                assert not response.json()["success"]
                assert "bad" in api.message(response)
                assert response.json()["loaded_adapters"] == before
        finally:
            stop.set()

    at_once([traffic, traffic, failing])


def test_promise_6_a_pin_over_the_limit_is_refused_and_nothing_is_loaded(
    api: SglangApi, ground: CommonGround
) -> None:
    body = {"lora_name": "D", "lora_path": str(ground.adapter("D")), "pinned": True}
    response = api.client.post("/load_lora_adapter", json=body)
    assert response.status_code == 400
    assert "pin" in api.message(response)
    assert "D" not in response.json()["loaded_adapters"]
    api.assert_unknown("D")


def test_the_servers_state_is_told(api: SglangApi) -> None:
    api.check("A", "A", "S")
    assert api.client.get("/health_generate").status_code == 200
    info = api.client.get("/model_info").json()
    assert info["is_generation"]
    assert info["architectures"] == ["LlamaForCausalLM"]
    (load,) = api.client.get("/v1/loads?include=lora").json()["loads"]
    assert load["lora"]["slots_total"] == 2
    assert 1 <= load["lora"]["slots_used"] <= 2
