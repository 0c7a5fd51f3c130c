"""The cases from the field in vLLM's dialect, and in SGLang's where it has the words: right
answers, names, updates, unloads, room."""

import random
import threading
import time
from pathlib import Path

import pytest

from tests.fixtures.api import TRIES, Api, Stream, at_once, in_both_dialects, in_time
from tests.fixtures.bad_adapters import copy_of, cut_in_half, rank_above_limit, replace_files
from tests.fixtures.common_ground import CommonGround
from tests.fixtures.server_process import ServerProcess

MEBIBYTE = 1 << 20
GONE_S = 2.0
REVIVAL_S = 5.0
"""A server that brings an unloaded adapter back on its own has done so by then."""
SLOW_DISK_TIMEOUT_S = 600
"""For hundreds of loads."""


@in_both_dialects("roomy")
def test_promise_12_parity_alone_and_mixed(roomy: Api, ground: CommonGround) -> None:
    names = {"tiny": "base", "a": "A", "b": "B"}
    roomy.must_load("a", ground.adapter("A"))
    roomy.must_load("b", ground.adapter("B"))
    for name, oracle in names.items():
        roomy.check(name, oracle)
    mixed = [(n, o, prompt) for n, o in names.items() for prompt in ("P", "S") for _ in range(4)]
    random.Random(1).shuffle(mixed)
    roomy.check_all(mixed)


SALTED: set[str] = set()
"""Salts that the base was asked with before: the server is the same in both dialects, and finds the
base's own KV again."""


@in_both_dialects("roomy")
def test_promise_2_no_kv_crosses_adapters(roomy: Api, ground: CommonGround) -> None:
    roomy.must_load("A", ground.adapter("A"))
    roomy.must_load("B", ground.adapter("B"))
    for name in ("A", "B", "base", "A", "base", "B"):
        roomy.check("tiny" if name == "base" else name, name)
    for salt in ("A", *_ids_shown(roomy, "A")):
        body = roomy.check("tiny", "base", cache_salt=salt)
        assert _cached_tokens(body) == 0 or salt in SALTED, salt
        SALTED.add(salt)
    assert _cached_tokens(roomy.check("A", "A")) > 300, "a version must find its own KV again"


def _ids_shown(api: Api, name: str) -> list[str]:
    """Every number and word that the server tells of an adapter, as a caller might try them as a
    salt."""
    entry = api.native()[name]
    words = {str(entry["version"]), str(entry["version"])[:12], "1", "2", "3"}
    words |= {str(value) for value in entry.values() if isinstance(value, int | str) and value}
    return sorted(words - {"A"})


def _cached_tokens(body: dict[str, object]) -> int:
    usage = body["usage"]
    assert isinstance(usage, dict)
    count: int = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return count


@in_both_dialects("roomy")
def test_promise_2_same_name_other_directory(roomy: Api, ground: CommonGround) -> None:
    for inplace in (False, True):
        roomy.must_load("x", ground.adapter("A"))
        for _ in range(3):
            roomy.check("x", "A")
        if not inplace:
            roomy.must_unload("x")
        roomy.must_load("x", ground.adapter("B"), inplace=inplace)
        for prompt in ("P", "S", "P"):
            roomy.check("x", "B", prompt)
        assert Path(roomy.listed()["x"]) == ground.adapter("B")
        roomy.must_unload("x")


@in_both_dialects("roomy")
def test_promise_2_same_path_new_bytes(roomy: Api, ground: CommonGround, tmp_path: Path) -> None:
    folder = copy_of(ground.adapter("A"), tmp_path / "adapter")
    roomy.must_load("x", folder)
    roomy.check("x", "A")
    for turn in range(10):
        oracle = "BA"[turn % 2]
        replace_files(folder, ground.adapter(oracle))
        roomy.must_load("x", folder, inplace=True)
        roomy.check("x", oracle)
        roomy.check("x", oracle, "S")


@in_both_dialects("roomy")
def test_promise_2_the_source_may_change_or_go_after_the_load(
    roomy: Api, ground: CommonGround, tmp_path: Path
) -> None:
    folder = copy_of(ground.adapter("A"), tmp_path / "adapter")
    roomy.must_load("x", folder)
    replace_files(folder, ground.adapter("B"))
    roomy.check("x", "A")
    for path in folder.iterdir():
        path.unlink()
    for name in "BCDEF":  # whatever tier it is in
        roomy.must_load(name, ground.adapter(name))
    roomy.check("x", "A", "S")


@in_both_dialects("roomy")
def test_promise_2_replace_under_traffic_never_mixes_versions(
    roomy: Api, ground: CommonGround
) -> None:
    roomy.must_load("x", ground.adapter("A"))
    stop = threading.Event()

    def traffic() -> list[str]:
        seen = []
        while not stop.is_set():
            response = roomy.gen("x")
            assert response.status_code in roomy.amid_replacement, response.text
            if response.status_code == 200:
                seen.append(roomy.whose(response.json()))
        return seen

    def replacing() -> list[str]:
        for turn in range(12):
            roomy.must_load("x", ground.adapter("BA"[turn % 2]), inplace=True)
        stop.set()
        return []

    seen = [name for names in at_once([traffic] * 4 + [replacing]) for name in names]
    assert set(seen) <= {"A", "B"}
    roomy.check("x", "A")


def test_promise_4_a_failed_update_keeps_the_old_version(
    roomy: Api, ground: CommonGround, tmp_path: Path
) -> None:
    root = str(ground.adapter("A"))
    roomy.must_load("x", ground.adapter("A"))
    spoilt = [
        cut_in_half(copy_of(ground.adapter("B"), tmp_path / "cut")),
        rank_above_limit(copy_of(ground.adapter("B"), tmp_path / "rank")),
    ]
    for path in spoilt:
        roomy.assert_refused(roomy.load("x", path, inplace=True), "x", was=root)
        roomy.check("x", "A")
    assert roomy.listed() == {"x": root}


@pytest.mark.parametrize("roomy", ["sglang"], indirect=True)
def test_promise_4_where_a_replacement_takes_two_calls_a_failed_one_touches_nothing_else(
    roomy: Api, ground: CommonGround, tmp_path: Path
) -> None:
    root = str(ground.adapter("A"))
    spoilt = [
        cut_in_half(copy_of(ground.adapter("B"), tmp_path / "cut")),
        rank_above_limit(copy_of(ground.adapter("B"), tmp_path / "rank")),
    ]
    roomy.must_load("y", ground.adapter("C"))
    for path in spoilt:
        roomy.must_load("x", ground.adapter("A"))
        roomy.assert_refused(roomy.load("x", path), "x", was=root)
        roomy.check("x", "A")
        roomy.must_unload("x")
        roomy.assert_refused(roomy.load("x", path), "x")
        roomy.assert_unknown("x")
        assert roomy.listed() == {"y": str(ground.adapter("C"))}
    roomy.check("y", "C")


def test_promise_4_a_second_load_needs_load_inplace(roomy: Api, ground: CommonGround) -> None:
    roomy.must_load("x", ground.adapter("A"))
    for other in ("A", "B"):
        response = roomy.load("x", ground.adapter(other))
        assert response.status_code == 400
        error = response.json()["error"]
        assert "has already been loaded" in error["message"]
        assert "load_inplace" in error["message"]
        assert (error["type"], error["param"], error["code"]) == ("InvalidUserInput", None, 400)
    roomy.check("x", "A")


@in_both_dialects("tight")
def test_promise_3_unload_is_true(tight: Api, ground: CommonGround) -> None:
    for name in "ABC":
        tight.must_load(name, ground.adapter(name))
    tight.check_all([(name, name, "P") for name in "ABC"])
    tight.must_unload("B")
    unloaded_s = time.monotonic()
    _assert_gone(tight, "B")
    tight.check_all([(name, name, "S") for name in "AC"] * 10, clients=4)
    _assert_gone(tight, "B")
    time.sleep(max(0.0, unloaded_s + REVIVAL_S - time.monotonic()))
    _assert_gone(tight, "B")
    again = tight.unload("B")
    tight.assert_not_loaded(again, "B")
    before = _places(tight)
    tight.must_load("B", ground.adapter("B"))
    tight.check("B", "B")
    assert _places(tight) == before + 1
    tight.check_all([(name, name, "P") for name in "ABC"])


def _places(api: Api) -> int:
    """Versions in host memory, by the engine's report."""
    return sum(entry["tier"] in {"host", "slot"} for entry in api.native().values())


def _assert_gone(api: Api, name: str) -> None:
    in_time(GONE_S, lambda: api.assert_unknown(name))
    assert name not in api.listed()
    assert name not in api.native()
    assert api.client.get(api.adapter_url(name)).status_code == 404
    for labels, _ in api.samples("vllm:lora_requests_info"):
        assert name not in labels["running_lora_adapters"].split(",")


@in_both_dialects("roomy")
@pytest.mark.timeout(SLOW_DISK_TIMEOUT_S)
def test_churn_does_not_leak(roomy: Api, roomy_server: ServerProcess, ground: CommonGround) -> None:
    memory_bytes = 0
    load_s = []
    for turn in range(1, 301):
        name = f"n{turn}"
        began = time.monotonic()
        roomy.must_load(name, ground.adapter("A"))
        load_s.append(time.monotonic() - began)
        roomy.check(name, "A", "S")
        roomy.must_unload(name)
        if turn == 50:
            memory_bytes = roomy_server.resident_bytes()
    assert roomy.listed() == {}
    growth = roomy_server.resident_bytes() - memory_bytes
    assert growth < max(memory_bytes // 10, 50 * MEBIBYTE), f"{growth / MEBIBYTE:.0f} MiB"
    # The fastest of each: what accumulates slows every load, what else the machine does only some.
    early, late = min(load_s[29:50]), min(load_s[-20:])
    assert late < 2 * early, f"a load took {early:.4f} s early and {late:.4f} s late"


@in_both_dialects("tight")
def test_more_adapters_than_room(tight: Api, ground: CommonGround) -> None:
    oracles = {"A": "A", "B": "B", "C": "C_q", "D": "D_r4", "E": "E", "F": "F"}
    for name, oracle in oracles.items():
        tight.must_load(name, ground.adapter(oracle))
    shuffled = random.Random(2)
    for _ in range(3):
        for name in shuffled.sample(sorted(oracles), k=len(oracles)):
            tight.check(name, oracles[name])
    drawn = [shuffled.choice(sorted(oracles)) for _ in range(60)]
    tight.check_all([(name, oracles[name], "PS"[i % 2]) for i, name in enumerate(drawn)])
    assert tight.listed().keys() == oracles.keys()
    assert _places(tight) <= 3
    tight.check_all([(name, oracle, "P") for name, oracle in oracles.items()])


@in_both_dialects("pinned")
def test_promise_6_everything_pinned(pinned: Api, ground: CommonGround) -> None:
    for name in "AB":
        pinned.must_load(name, ground.adapter(name))
    answers = {name: pinned.pin(name) for name in "AB"}
    granted = {name for name, answer in answers.items() if answer.status_code == 200}
    assert granted, "no pin at all was granted"
    for name in {"A", "B"} - granted:  # not all slots can be pinned; then the server says so
        assert answers[name].status_code == 409, answers[name].text
        assert "pin" in answers[name].json()["error"]["message"].lower()
    assert {name for name, entry in pinned.native().items() if entry["pinned"]} == granted

    response = pinned.load("C", ground.adapter("C"))
    if granted == {"A", "B"}:
        assert response.status_code in {400, 409}, response.text
        assert "C" in pinned.message(response)
        assert pinned.listed().keys() == {"A", "B"}
        pinned.assert_unknown("C")
    else:
        assert response.status_code == 200, response.text
        pinned.check("C", "C")
    pinned.check_all([(name, name, "P") for name in "ABAB"])
    pinned.must_unload("A")
    if response.status_code != 200:
        pinned.must_load("C", ground.adapter("C"))
    pinned.check_all([(name, name, "P") for name in "BC"])
    assert pinned.listed().keys() == {"B", "C"}


@in_both_dialects("pinned")
def test_promise_6_a_pinned_adapter_stays_while_others_come_and_go(
    pinned: Api, ground: CommonGround
) -> None:
    url = pinned.adapter_url("A")
    put = pinned.client.put(url, json={"source": str(ground.adapter("A")), "pinned": True})
    assert put.status_code in {200, 201}, put.text
    for name in "BCD":
        pinned.must_load(name, ground.adapter(name))
        pinned.check_all([(other, other, "S") for other in ("A", name)])
        assert pinned.native()["A"]["tier"] in {"host", "slot"}
    pinned.check_all([(name, name, "P") for name in "ABCD"])


@in_both_dialects("roomy")
def test_promise_3_unload_under_a_running_stream(roomy: Api, ground: CommonGround) -> None:
    roomy.must_load("A", ground.adapter("A"))
    fifth = threading.Barrier(5)

    def streaming() -> Stream:
        waited = False

        def after_the_fifth(state: Stream) -> None:
            nonlocal waited
            if not waited and len(state.logprobs) >= 5:
                waited = True
                fifth.wait(30)

        return roomy.stream_to_end("A", on_event=after_the_fifth, max_tokens=200)

    def unloading() -> Stream:
        fifth.wait(30)
        began = time.monotonic()
        roomy.must_unload("A")
        assert time.monotonic() - began < 30
        roomy.assert_unknown("A")
        return Stream(done=True)

    streams = at_once([streaming] * 4 + [unloading])[:4]
    for stream in streams:
        _assert_ended_clearly(roomy, stream, "A", 200)
    roomy.must_load("A", ground.adapter("B"))
    roomy.check("A", "B")


def _assert_ended_clearly(api: Api, stream: Stream, oracle: str, tokens: int) -> None:
    """All its tokens, or one clear error; never another's tokens."""
    assert api.is_prefix(stream, oracle)
    if stream.errors:
        assert len(stream.errors) == 1
        assert stream.errors[0]["message"]
    else:
        assert stream.finish_reasons == ["length"]
        assert len(stream.logprobs) == tokens


@in_both_dialects("roomy")
def test_promise_3_requests_during_a_drain_are_refused(roomy: Api, ground: CommonGround) -> None:
    roomy.must_load("B", ground.adapter("B"))
    stream = _cut_off_by_an_unload(roomy, ground)
    for _ in range(TRIES):
        if not stream.finish_reasons:  # else it had ended before the unload came to it
            break
        stream = _cut_off_by_an_unload(roomy, ground)
    assert len(stream.errors) == 1, "what an unload cuts off is told so, once"
    assert "A" in stream.errors[0]["message"]
    assert roomy.is_prefix(stream, "A")
    assert roomy.listed().keys() == {"B"}


def _cut_off_by_an_unload(roomy: Api, ground: CommonGround) -> Stream:
    """What came of a long stream of A, which is loaded and unloaded for it."""
    roomy.must_load("A", ground.adapter("A"))
    draining = threading.Event()

    def long_stream() -> Stream:
        with roomy.streaming("A", max_tokens=1500) as states:
            last = next(states)
            draining.set()
            for state in states:
                last = state
        return last

    def unloading() -> Stream:
        draining.wait(30)
        response = roomy.client.delete(roomy.adapter_url("A"), params={"drain_timeout": 0})
        assert response.status_code == 200, response.text
        roomy.assert_unknown("A")
        roomy.check("B", "B")
        return Stream()

    return at_once([long_stream, unloading])[0]


@in_both_dialects("roomy")
def test_promise_5_a_stuck_drain_delays_nobody(roomy: Api, ground: CommonGround) -> None:
    roomy.must_load("A", ground.adapter("A"))
    roomy.must_load("B", ground.adapter("B"))
    with roomy.streaming("A", max_tokens=1600) as states:
        next(states)
        drain = threading.Thread(target=roomy.unload, args=("A",))
        drain.start()
        began = time.monotonic()
        roomy.must_load("C", ground.adapter("C"))
        roomy.must_unload("B")
        roomy.check("C", "C", "S")
        took = time.monotonic() - began
        for _ in states:
            pass
    drain.join(40)
    assert not drain.is_alive()
    assert took < 10
    assert roomy.listed().keys() == {"C"}


@in_both_dialects("roomy")
def test_promise_7_a_client_that_leaves_frees_its_lease(roomy: Api, ground: CommonGround) -> None:
    roomy.must_load("A", ground.adapter("A"))
    made = _generated(roomy)
    for _ in range(4):
        with roomy.streaming("A", max_tokens=1500) as states:
            next(states)
    roomy.must_unload("A")
    assert _generated(roomy) - made < 4 * 1500, "the drain waited for clients that had left"


def _generated(api: Api) -> float:
    """Tokens that the engine has made so far."""
    return sum(api.metric("vllm:generation_tokens_total"))


@in_both_dialects("tight")
def test_promise_11_no_hot_adapter_starves_a_cold_one(tight: Api, ground: CommonGround) -> None:
    for name in "ABC":
        tight.must_load(name, ground.adapter(name))
    stop = threading.Event()

    def hot(name: str) -> None:
        while not stop.is_set():
            tight.check(name, name, "S")

    def cold() -> None:
        try:
            for name, oracle in (("C", "C"), ("org/tiny:v1", "base")) * 3:
                began = time.monotonic()
                tight.check(name, oracle, "S")
                assert time.monotonic() - began < 10
        finally:
            stop.set()

    at_once([lambda: hot("A"), lambda: hot("A"), lambda: hot("B"), lambda: hot("B"), cold])


@in_both_dialects("tight")
def test_names_with_slash_and_colon_are_served(tight: Api, ground: CommonGround) -> None:
    for name in ("team/pirate", "a:b", "org/tiny:v1-a", "ünï-cödé"):
        response = tight.load(name, ground.adapter("A"))
        if response.status_code != 200:
            tight.assert_refused(response, name)
            continue
        tight.check(name, "A", "S")
        assert name in tight.native()
        described = tight.client.get(tight.adapter_url(name))
        assert described.status_code == 200, described.text
        tight.must_unload(name)
        tight.assert_unknown(name)
