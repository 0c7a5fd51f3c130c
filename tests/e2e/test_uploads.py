"""Adapters that come with the request, on a real server: right answers, and what a killed server
keeps."""

import http.client
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.e2e.conftest import ROOMY_FLAGS, start
from tests.fixtures.api import Api
from tests.fixtures.bad_adapters import BAD, copy_of
from tests.fixtures.common_ground import CommonGround
from tests.fixtures.pickles import torch_forms
from tests.fixtures.server_process import HOST
from tests.fixtures.uploads import folder_parts, tar

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def contents(folder: Path, inside: str = "") -> dict[str, bytes]:
    return {f"{inside}{path.name}": path.read_bytes() for path in sorted(folder.iterdir())}


def put_weights(api: Api, name: str, folder: Path, **query: str) -> httpx.Response:
    url = f"{api.adapter_url(name)}/weights"
    return api.client.put(url, files=folder_parts(folder), params=query)


def test_promise_12_weights_and_files_give_the_right_answers(
    roomy: Api, ground: CommonGround
) -> None:
    assert put_weights(roomy, "w", ground.adapter("A")).status_code == 201
    packed = tar(contents(ground.adapter("B"), "checkpoint-7/"))
    headers = {"content-type": "application/gzip"}
    files = roomy.client.put("/v1/adapters/f/files", content=packed, headers=headers)
    assert files.status_code == 201, files.text
    form = roomy.client.put("/v1/adapters/g/files", files=folder_parts(ground.adapter("C")))
    assert form.status_code == 201, form.text
    for name, oracle in (("w", "A"), ("f", "B"), ("g", "C")):
        roomy.check(name, oracle)
        roomy.check(name, oracle, "S")
    assert put_weights(roomy, "w", ground.adapter("B")).status_code == 200
    roomy.check("w", "B")
    assert roomy.native()["w"]["version"] == roomy.native()["f"]["version"]
    assert roomy.client.post("/v1/adapters/w/rollback").status_code == 200
    roomy.check("w", "A")


def test_promise_12_sglangs_tensors_give_the_right_answers(
    roomy: Api, ground: CommonGround
) -> None:
    folder = ground.adapter("A")
    forms = ("safetensors", "zip", "shared", "bucket_shared")
    config = json.loads((folder / CONFIG).read_text())
    with torch_forms(folder / WEIGHTS, forms) as made:
        for form, serialized in made.items():
            bucket = "flattened_bucket" if form.startswith("bucket") else None
            body = {"lora_name": form, "config_dict": config, "load_format": bucket}
            body["serialized_named_tensors"] = [serialized]
            answer = roomy.client.post("/load_lora_adapter_from_tensors", json=body)
            assert answer.json()["success"], answer.text
    for form in forms:
        roomy.check(form, "A", "S")


def test_promise_9_each_bad_adapter_is_refused_with_its_cause_however_it_comes(
    roomy: Api, ground: CommonGround, tmp_path: Path
) -> None:
    assert put_weights(roomy, "x", ground.adapter("A")).status_code == 201
    before = roomy.native()["x"]["version"]
    headers = {"content-type": "application/gzip"}
    answers: dict[str, httpx.Response] = {}
    for number, (sort, bad) in enumerate(BAD.items()):
        folder = bad.spoil(copy_of(ground.adapter("A"), tmp_path / f"{number}"))
        if not folder.is_dir():
            continue  # no folder at all cannot be sent
        sent = contents(folder)
        url = roomy.adapter_url("x")
        answers[sort] = roomy.client.put(f"{url}/files", content=tar(sent), headers=headers)
        if sent.keys() == {CONFIG, WEIGHTS}:
            answers[f"{sort}, as weights"] = put_weights(roomy, "x", folder)
    assert len(answers) > 20
    for sort, answer in answers.items():
        assert answer.status_code in (400, 422), f"{sort}: {answer.status_code} {answer.text}"
        said = answer.text.lower()
        assert any(word in said for word in BAD[sort.partition(",")[0]].says), f"{sort}: {said}"
    assert roomy.native()["x"]["version"] == before
    roomy.check("x", "A", "S")


def test_promise_8_a_killed_server_loses_no_weights_that_it_acknowledged(
    ground: CommonGround, tmp_path: Path
) -> None:
    with start(ground, tmp_path / "state", *ROOMY_FLAGS) as server, server.client() as client:
        api = Api(client, ground, "tiny")
        assert put_weights(api, "x", ground.adapter("A")).status_code == 201
        version = put_weights(api, "x", ground.adapter("B")).json()["published"]
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_until(lambda: api.gen("x", "S").status_code == 200)
        api.check("x", "B")
        server.kill()
        server.start()
        assert api.native()["x"]["version"] == version
        api.check("x", "B")
        assert api.client.post("/v1/adapters/x/rollback").status_code == 200
        api.check("x", "A")


def test_an_upload_that_is_cut_leaves_nothing_on_the_disk(
    ground: CommonGround, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    with start(ground, state, *ROOMY_FLAGS) as server, server.client() as client:
        packed = tar(contents(ground.adapter("A")), "w")
        for path, kind in (("files", "application/x-tar"), ("weights", "application/octet-stream")):
            connection = http.client.HTTPConnection(HOST, server.port, timeout=30)
            connection.putrequest("PUT", f"/v1/adapters/x/{path}")
            connection.putheader("Content-Type", kind)
            connection.putheader("Content-Length", str(len(packed)))
            connection.endheaders(packed[: len(packed) // 2])
            connection.close()
        api = Api(client, ground, "tiny")
        wait_until(lambda: not list((state / "cache").iterdir()))
        assert api.listed() == {}
        assert put_weights(api, "x", ground.adapter("A")).status_code == 201


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
