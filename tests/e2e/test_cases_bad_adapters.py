"""The case "a table of bad adapters": each is refused in time, with its cause, and nothing else is
disturbed."""

from pathlib import Path

import pytest

from tests.fixtures.api import BAD_LOAD_S, Api, in_both_dialects, in_time
from tests.fixtures.bad_adapters import BAD, copy_of, pickled
from tests.fixtures.common_ground import CommonGround


@in_both_dialects("roomy")
@pytest.mark.parametrize("sort", BAD)
def test_promise_9_a_bad_adapter_is_refused_at_load(
    sort: str, roomy: Api, ground: CommonGround, tmp_path: Path
) -> None:
    path = BAD[sort].spoil(copy_of(ground.adapter("A"), tmp_path / "folder"))
    response = in_time(BAD_LOAD_S, lambda: roomy.load("spoilt", path))
    roomy.assert_refused(response, "spoilt", BAD[sort].says)
    roomy.assert_unknown("spoilt")
    roomy.must_load("A", ground.adapter("A"))
    roomy.check("A", "A")


@pytest.mark.parametrize("sort", ["e safetensors cut in half", "o NaN in B", "l DoRA"])
def test_promise_4_a_bad_replacement_changes_nothing(
    sort: str, roomy: Api, ground: CommonGround, tmp_path: Path
) -> None:
    path = BAD[sort].spoil(copy_of(ground.adapter("B"), tmp_path / "folder"))
    url = roomy.adapter_url("x")
    assert roomy.client.put(url, json={"source": str(ground.adapter("A"))}).status_code < 300
    version = roomy.native()["x"]["version"]
    response = roomy.client.put(url, json={"source": str(path)})
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    assert error["code"] == "adapter_invalid"
    assert "x" in error["message"]
    assert roomy.native()["x"]["version"] == version
    roomy.check("x", "A")


def test_promise_9_an_empty_name_is_refused(roomy: Api, ground: CommonGround) -> None:
    for load in (roomy.load("", ground.adapter("A")), roomy.load("x", "")):
        assert load.status_code == 400, load.text
        error = load.json()["error"]
        assert error["message"] == "Both 'lora_name' and 'lora_path' must be provided."
        assert error["type"] == "InvalidUserInput"
    empty = roomy.unload("")
    assert empty.status_code == 400
    assert "'lora_name' needs to be provided" in empty.json()["error"]["message"]
    assert roomy.listed() == {}


def test_promise_9_the_base_models_name_is_refused(roomy: Api, ground: CommonGround) -> None:
    response = roomy.load("tiny", ground.adapter("A"))
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message == "The lora adapter 'tiny' conflicts with a served base model."
    assert roomy.listed() == {}
    roomy.check("tiny", "base")


in_sglang = pytest.mark.parametrize("roomy", ["sglang"], indirect=True)


@in_sglang
def test_promise_9_sglang_refuses_an_empty_name_or_path_and_the_bases_name(
    roomy: Api, ground: CommonGround
) -> None:
    for name, path, says in (
        ("", ground.adapter("A"), "lora_name"),
        ("x", "", "lora_path"),
        ("tiny", ground.adapter("A"), "base model"),
    ):
        response = roomy.load(name, path)
        assert says in roomy.message(response)
        assert response.json()["loaded_adapters"] == {}
    assert "lora_name" in roomy.message(roomy.unload(""))
    roomy.check("tiny", "base")


@in_both_dialects("roomy")
@pytest.mark.parametrize("name", ["a\0b", "a\nb", " ", "a\rb", "\x1b[31m", "n" * 5000])
def test_promise_9_a_name_with_control_characters_is_refused(
    name: str, roomy: Api, ground: CommonGround
) -> None:
    response = roomy.load(name, ground.adapter("A"))
    assert 400 <= response.status_code < 500, response.text
    assert roomy.message(response)
    assert roomy.listed() == {}


@pytest.mark.parametrize("body", ["{", "[]", "null", '{"lora_name": "x"}', '{"lora_name": 3}', ""])
def test_promise_9_a_body_without_its_fields_is_refused(body: str, roomy: Api) -> None:
    for route in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        if route.endswith("unload_lora_adapter") and body == '{"lora_name": "x"}':
            continue
        headers = {"Content-Type": "application/json"}
        response = roomy.client.post(route, content=body, headers=headers)
        assert response.status_code in {400, 422}, response.text
        assert response.json()["error"]["message"]


@in_sglang
@pytest.mark.parametrize("body", ["{", "[]", "null", '{"lora_name": 3}', ""])
def test_promise_9_sglang_tells_a_bad_body_in_its_own_shape(body: str, roomy: Api) -> None:
    for route in ("/load_lora_adapter", "/unload_lora_adapter"):
        headers = {"Content-Type": "application/json"}
        response = roomy.client.post(route, content=body, headers=headers)
        assert response.status_code == 400, response.text
        assert response.json()["success"] is False
        assert roomy.message(response)


@in_both_dialects("roomy")
def test_promise_9_a_pickle_is_never_opened(
    roomy: Api, ground: CommonGround, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    folder = pickled(copy_of(ground.adapter("A"), tmp_path / "folder"), marker)
    roomy.assert_refused(roomy.load("pickle", folder), "pickle", ("safetensors", "pickle", ".bin"))
    assert not marker.exists()


@in_both_dialects("roomy")
def test_promise_10_an_unknown_adapter_is_never_the_base(roomy: Api) -> None:
    for name in ("nobody", "tiny:nobody", "tiny@000000000000", "TINY", "tiny/", "", "tiny:"):
        response = roomy.gen(name, "S")
        assert response.status_code in {400, 404}, f"{name}: {response.text}"
        assert response.json()["error"]["message"]
