"""What users of vLLM and of SGLang do with adapters over HTTP, in each dialect, against a process
that was started with that dialect's flags: room for two, one adapter there from the start."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError, OpenAI

from tests.e2e.conftest import DIALECTS, start
from tests.fixtures.api import Api, at_once, tokenizer
from tests.fixtures.bad_adapters import BAD, CONFIG, copy_of
from tests.fixtures.common_ground import PROMPTS, SHORT_STEPS, CommonGround
from tests.fixtures.many import small_adapters
from tests.fixtures.server_process import ServerProcess

BASE = "tiny"
GIVEN = "given"
"""Adapter A, named on the command line."""
ROOM = 2
BAD_LOADS = 25
"""Of each sort."""
ALREADY: Mapping[str, str] = {"vllm": "already been loaded", "sglang": "already loaded"}
"""What the clients of each look for."""


def _flags(dialect: str, given: Path) -> tuple[str, ...]:
    if dialect == "sglang":
        room = ("--max-loras-per-batch", str(ROOM), "--max-loaded-loras", str(ROOM))
        return (*room, "--lora-eviction-policy", "lru", "--lora-paths", f"{GIVEN}={given}")
    module = {"name": GIVEN, "path": str(given), "base_model_name": BASE}
    room = ("--max-loras", str(ROOM), "--max-cpu-loras", str(ROOM))
    return (*room, "--lora-modules", json.dumps(module))


@pytest.fixture(scope="module")
def servers(
    ground: CommonGround, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], ServerProcess]]:
    """One for each dialect, started when it is first asked for."""
    with ExitStack() as stack:

        @cache
        def started(dialect: str) -> ServerProcess:
            flags = ("--served-model-name", BASE, *_flags(dialect, ground.adapter("A")))
            return stack.enter_context(start(ground, tmp_path_factory.mktemp(dialect), *flags))

        yield started


@pytest.fixture(params=sorted(DIALECTS))
def dialect(request: pytest.FixtureRequest) -> str:
    """Every flow runs in each."""
    chosen: str = request.param
    return chosen


@pytest.fixture
def api(
    dialect: str, servers: Callable[[str], ServerProcess], ground: CommonGround
) -> Iterator[Api]:
    """Begins and ends with the adapter of the start alone."""
    server = servers(dialect)
    with server.client() as client:
        api = DIALECTS[dialect](client, ground, BASE)
        _agree(api, {GIVEN: "A"})
        try:
            yield api
            api.assert_alive()
            api.unload_all()
            api.must_load(GIVEN, ground.adapter("A"))
        finally:
            print(server.tail())


def _agree(api: Api, oracles: Mapping[str, str]) -> None:
    """These adapters are listed, each gives its own answers, the base its own, and no more are in
    memory than may be."""
    roots = {name: str(api.ground.adapter(oracle)) for name, oracle in oracles.items()}
    assert api.listed() == roots
    assert api.native().keys() == roots.keys()
    assert len(_in_memory(api)) <= ROOM
    api.check_all([(name, oracle, "S") for name, oracle in {**oracles, BASE: "base"}.items()])
    assert len(_in_memory(api)) <= ROOM


def _in_memory(api: Api) -> set[str]:
    return {name for name, entry in api.native().items() if entry["tier"] in {"host", "slot"}}


def test_the_list_of_models_shows_where_each_comes_from(api: Api, ground: CommonGround) -> None:
    def shown() -> dict[str, tuple[str, str | None]]:
        base, *adapters = api.models()
        assert (base["id"], base["root"], base["parent"]) == (BASE, str(ground.model), None)
        return {card["id"]: (card["root"], card["parent"]) for card in adapters}

    a, b, c = (str(ground.adapter(name)) for name in "ABC")
    assert shown() == {GIVEN: (a, BASE)}
    api.must_load("second", ground.adapter("B"))
    assert shown() == {GIVEN: (a, BASE), "second": (b, BASE)}
    api.must_load("third", ground.adapter("C"))
    api.must_unload(GIVEN)
    assert shown() == {"second": (b, BASE), "third": (c, BASE)}
    assert api.client.get("/v1/models/third").json()["root"] == c
    assert api.client.get(f"/v1/models/{GIVEN}").status_code == 404


def test_the_official_client_finds_adapters_by_each_dialects_name(
    api: Api, dialect: str, servers: Callable[[str], ServerProcess], ground: CommonGround
) -> None:
    api.must_load("b", ground.adapter("B"))
    prompt: Any = list(PROMPTS["S"])
    ways: dict[str, list[tuple[str, dict[str, str | None]]]] = {
        "vllm": [("b", {})],
        "sglang": [(f"{BASE}:b", {"lora_path": GIVEN}), (BASE, {"lora_path": "b"})],
    }
    plain: list[tuple[str, dict[str, str | None]]] = [(BASE, {}), (BASE, {"lora_path": None})]
    url = f"{servers(dialect).url}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as client:

        def text(model: str, more: dict[str, str | None]) -> str:
            chunks = client.completions.create(
                model=model,
                prompt=prompt,
                max_tokens=SHORT_STEPS,
                temperature=0,
                extra_body=more,
                stream=True,
            )
            return "".join(choice.text for chunk in chunks for choice in chunk.choices)

        for oracle, asked in (("B", ways[dialect]), ("base", plain)):
            right = tokenizer(ground.model).decode(list(ground.answer(oracle, "S").tokens))
            assert {text(*one) for one in asked} == {right}
        for unknown in ("nobody", f"{BASE}:nobody"):
            with pytest.raises(NotFoundError, match="nobody"):
                text(unknown, {})


def test_a_name_is_loaded_refused_unloaded_and_loaded_again(
    api: Api, dialect: str, ground: CommonGround
) -> None:
    api.must_load("x", ground.adapter("B"))
    for other in ("B", "C"):
        again = api.load("x", ground.adapter(other))
        assert again.status_code == 400
        assert ALREADY[dialect] in api.message(again)
    _agree(api, {GIVEN: "A", "x": "B"})
    api.must_unload("x")
    api.assert_unknown("x")
    api.assert_not_loaded(api.unload("x"), "x")
    api.must_load("x", ground.adapter("C"))
    _agree(api, {GIVEN: "A", "x": "C"})


def test_names_come_and_go_in_any_order(api: Api, ground: CommonGround) -> None:
    present = {GIVEN: "A"}
    steps = ("+x=B", "+y=C", f"-{GIVEN}", "-x", "+z=D", f"+{GIVEN}=A", "-y", "+x=E", "-z", "+y=F")
    for step in steps:
        name, _, oracle = step[1:].partition("=")
        if step[0] == "+":
            api.must_load(name, ground.adapter(oracle))
            present[name] = oracle
        else:
            api.must_unload(name)
            del present[name]
            api.assert_unknown(name)
        _agree(api, present)


def test_a_replaced_adapter_answers_as_the_new_one_and_disturbs_no_other(
    api: Api, ground: CommonGround
) -> None:
    api.must_load("x", ground.adapter("B"))
    before = api.native()
    for oracle in ("C", "B", "D"):
        api.must_load("x", ground.adapter(oracle), inplace=True)
        _agree(api, {GIVEN: "A", "x": oracle})
    after = api.native()
    assert after["x"]["version"] != before["x"]["version"]
    assert after[GIVEN]["version"] == before[GIVEN]["version"]


def test_a_load_over_the_room_evicts_the_oldest_and_a_request_brings_it_back(
    api: Api, ground: CommonGround
) -> None:
    api.must_load("b", ground.adapter("B"))
    assert _in_memory(api) == {GIVEN, "b"}
    api.must_load("c", ground.adapter("C"))
    assert _in_memory(api) == {"b", "c"}
    api.check(GIVEN, "A", "S")
    assert _in_memory(api) == {"c", GIVEN}
    api.must_unload("c")
    assert _in_memory(api) == {GIVEN}
    api.must_load("c", ground.adapter("C"))
    assert api.batch([(GIVEN, "P"), ("b", "P"), (GIVEN, "S"), ("b", "S")]) == [
        ground.answer(oracle, prompt).tokens for prompt in "PS" for oracle in "AB"
    ]
    assert _in_memory(api) == {GIVEN, "b"}
    _agree(api, {GIVEN: "A", "b": "B", "c": "C"})


def test_promise_6_a_pinned_adapter_outlives_evictions_and_a_pin_too_many_is_refused(
    api: Api, ground: CommonGround
) -> None:
    pinned = api.load_pinned("p", ground.adapter("B"))
    assert pinned.status_code == 200, pinned.text
    refused = api.load_pinned("q", ground.adapter("C"))
    api.assert_refused(refused, "q", ("pin",))
    api.assert_unknown("q")
    for name, oracle in (("d", "D"), ("e", "E")):
        api.must_load(name, ground.adapter(oracle))
        api.check(GIVEN, "A", "S")
        assert "p" in _in_memory(api)
    _agree(api, {GIVEN: "A", "p": "B", "d": "D", "e": "E"})
    assert {name for name, entry in api.native().items() if entry["pinned"]} == {"p"}
    api.must_unload("p")
    assert api.load_pinned("q", ground.adapter("C")).status_code == 200
    _agree(api, {GIVEN: "A", "q": "C", "d": "D", "e": "E"})


@pytest.mark.parametrize(
    "sort",
    [
        *("g r above the limit", "keys that match nothing", "i hidden size of another model"),
        *("j layer beyond the model", "l DoRA", "m modules_to_save with a full head"),
    ],
)
def test_promise_9_a_wrong_rank_or_wrong_modules_are_refused_and_the_rest_goes_on(
    sort: str, api: Api, ground: CommonGround, tmp_path: Path
) -> None:
    wrong = BAD[sort].spoil(copy_of(ground.adapter("B"), tmp_path / "wrong"))
    api.assert_unknown("wrong")
    api.assert_refused(api.load("wrong", wrong), "wrong", BAD[sort].says)
    api.assert_unknown("wrong")
    _agree(api, {GIVEN: "A"})


def test_promise_12_other_ranks_and_fewer_modules_mix_with_the_rest(
    api: Api, ground: CommonGround
) -> None:
    api.must_load("narrow", ground.adapter("D_r4"))
    api.must_load("few", ground.adapter("C_q"))
    _agree(api, {GIVEN: "A", "narrow": "D_r4", "few": "C_q"})


def test_promise_12_a_batch_mixes_adapters_and_the_base(api: Api, ground: CommonGround) -> None:
    api.must_load("b", ground.adapter("B"))
    oracles = {GIVEN: "A", "b": "B", None: "base"}
    for names in ([None], [None, GIVEN, "b", None], [GIVEN, "b", None, "b", None, GIVEN]):
        members = [(name, prompt) for name in names for prompt in ("P", "S")]
        right = [ground.answer(oracles[name], prompt).tokens for name, prompt in members]
        assert api.batch(members) == right
    assert api.batch([("b", "S"), ("nobody", "S")]) == api.unknown


@pytest.mark.parametrize("weights", ["of one", "of ten"])
def test_ten_adapters_at_once_share_room_for_two(
    weights: str, api: Api, ground: CommonGround, tmp_path: Path
) -> None:
    if weights == "of ten":
        adapters = small_adapters(ground, tmp_path, 10)
    else:
        adapters = {f"n{number}": (ground.adapter("B"), "B") for number in range(10)}

    def load_and_ask(name: str, path: Path, oracle: str) -> None:
        api.must_load(name, path)
        for prompt in "PSS":
            api.check(name, oracle, prompt)

    calls = [partial(load_and_ask, name, *adapter) for name, adapter in adapters.items()]
    at_once(calls)
    roots = {name: str(path) for name, (path, _) in adapters.items()}
    assert api.listed() == {GIVEN: str(ground.adapter("A"))} | roots
    held = {api.native()[name]["version"] for name in _in_memory(api)}
    assert len(held) <= ROOM


def test_promise_4_invalid_loads_beside_good_traffic_disturb_nothing(
    api: Api, ground: CommonGround, tmp_path: Path
) -> None:
    broken = copy_of(ground.adapter("B"), tmp_path / "broken")
    (broken / CONFIG).write_text("no JSON at all")
    stop = threading.Event()
    asked: list[str] = []

    def traffic(name: str, oracle: str) -> None:
        while not stop.is_set():
            api.check(name, oracle, "S")
            asked.append(name)

    def failing() -> None:
        try:
            for path in (tmp_path / "nowhere", broken):
                for _ in range(BAD_LOADS):
                    api.assert_refused(api.load("bad", path), "bad")
        finally:
            stop.set()

    at_once([partial(traffic, GIVEN, "A"), partial(traffic, BASE, "base"), failing])
    assert set(asked) == {GIVEN, BASE}
    api.must_load("good", ground.adapter("C"))
    _agree(api, {GIVEN: "A", "good": "C"})
