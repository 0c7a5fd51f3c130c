"""SGLang's load from tensors, in every form that PyTorch's users send, and in those that must not
be run."""

import base64
import hashlib
import io
import json
import os
import pickle
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorry.artifacts.pickled import OPCODES_MAX, read_tensors
from lorry.errors import RequestInvalid
from tests.fixtures.adapters import AdapterFiles, good_adapter, safetensors_bytes
from tests.fixtures.http_server import HttpServer, http_server
from tests.fixtures.pickles import FORMS, torch_forms

URL = "/load_lora_adapter_from_tensors"


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[HttpServer]:
    """Two slots, room for three."""
    async with http_server(tmp_path) as running:
        yield running


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Every form of one adapter, from a process with torch."""
    folder = good_adapter(1).write(tmp_path_factory.mktemp("adapter"))
    weights = folder / "adapter_model.safetensors"
    with torch_forms(weights, (*FORMS, "descriptors")) as made:
        yield made


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def body(files: AdapterFiles, serialized: str | None = None, **more: Any) -> dict[str, Any]:
    sent = serialized or text(safetensors_bytes(files.tensors))
    return {
        "lora_name": "policy",
        "config_dict": files.config,
        "serialized_named_tensors": [sent],
        **more,
    }


async def refused(server: HttpServer, sent: dict[str, Any]) -> str:
    answer = await server.client.post(URL, json=sent)
    told = answer.json()
    assert (answer.status_code, told["success"]) == (400, False), answer.text
    assert told["loaded_adapters"] == {}
    assert server.service.uploads.used == 0
    message: str = told["error_message"]
    return message


@pytest.mark.anyio
@pytest.mark.parametrize("form", FORMS)
async def test_every_form_of_the_same_tensors_is_the_same_version(
    server: HttpServer, forms: dict[str, str], form: str
) -> None:
    bucket = "flattened_bucket" if form.startswith("bucket") else None
    sent = body(good_adapter(1), forms[form], load_format=bucket)
    answer = await server.client.post(URL, json=sent)
    told = answer.json()
    assert (answer.status_code, told["success"], told["error_message"]) == (200, True, None), told
    assert list(told["loaded_adapters"]) == ["policy"]
    entry = (await server.client.get("/v1/adapters/policy")).json()
    assert entry["version"] == (await server.load("other", 1)).json()["version"]
    generate = {"input_ids": [5, 6], "lora_path": "policy", "sampling_params": {}}
    assert (await server.client.post("/generate", json=generate)).status_code == 200


@pytest.mark.anyio
async def test_older_clients_and_several_ranks_are_understood(server: HttpServer) -> None:
    sent = body(good_adapter(1))
    older = {**sent, "serialized_tensors": sent.pop("serialized_named_tensors")[0]}
    assert (await server.client.post(URL, json=older)).json()["success"]
    again = await server.client.post(URL, json=body(good_adapter(2)))
    assert again.json()["error_message"] == (
        "Failed to load LoRA adapter policy because it is already loaded."
    )
    ranks = body(good_adapter(2), lora_name="ranks", pinned=True)
    ranks["serialized_named_tensors"] *= 4
    assert (await server.client.post(URL, json=ranks)).json()["success"]
    assert (await server.client.get("/v1/adapters/ranks")).json()["pinned"]


@pytest.mark.anyio
async def test_checksums_are_checked(server: HttpServer) -> None:
    files = good_adapter(1)
    name, one = next(iter(files.tensors.items()))
    right = hashlib.sha256(one.data).hexdigest()
    wrong = await refused(server, body(files, expected_checksums={name: "0" * 64}))
    assert "SHA-256" in wrong
    assert name in wrong
    absent = await refused(server, body(files, expected_checksums={"nobody": right}))
    assert "did not come" in absent
    good = await server.client.post(URL, json=body(files, expected_checksums={name: right}))
    assert good.json()["success"], good.text


class Evil:
    """Runs when unpickled by Python."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
async def test_nothing_of_a_pickle_is_run(
    server: HttpServer, tmp_path: Path, protocol: int
) -> None:
    marker = tmp_path / "marker"
    for value in (Evil(marker), {"a.lora_A.weight": Evil(marker)}, [("a", Evil(marker))]):
        sent = body(good_adapter(1), text(pickle.dumps(value, protocol)))
        message = await refused(server, sent)
        assert "safetensors" in message
    assert not marker.exists()


@pytest.mark.anyio
async def test_handles_to_another_process_are_refused_with_what_to_send(
    server: HttpServer, forms: dict[str, str]
) -> None:
    message = await refused(server, body(good_adapter(1), forms["descriptors"]))
    assert "rebuild_storage_fd" in message
    assert "send safetensors instead" in message


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"serialized_named_tensors": ["%%%"]}, "is not base64"),
        ({"serialized_named_tensors": ["AAAA", "BBBB"]}, "one rank"),
        ({"serialized_named_tensors": []}, "serialized_named_tensors"),
        ({"serialized_named_tensors": [text(b"")]}, "damaged"),
        ({"serialized_named_tensors": [text(pickle.dumps(7))]}, "neither a dict nor a list"),
        ({"load_format": "sharded"}, "load_format is 'sharded'"),
        ({"load_format": "flattened_bucket"}, "damaged"),
        ({"added_tokens_config": {"x": 1}}, "added_tokens_config"),
        ({"config_dict": {}}, "cannot be served"),
        ({"lora_name": ""}, "lora_name"),
    ],
)
async def test_what_cannot_be_read_is_refused(
    server: HttpServer, change: dict[str, Any], says: str
) -> None:
    sent = body(good_adapter(1))
    if "load_format" in change and change["load_format"] == "flattened_bucket":
        sent["serialized_named_tensors"] = [text(pickle.dumps({"a": 1})[:-2])]
    assert says in await refused(server, sent | change)


@pytest.mark.anyio
async def test_tensors_over_the_limit_are_refused(tmp_path: Path) -> None:
    async with http_server(tmp_path, max_upload_bytes=4000) as server:
        answer: httpx.Response = await server.client.post(URL, json=body(good_adapter(1)))
        assert answer.status_code == 400
        assert "--max-upload-bytes" in answer.json()["error_message"]
        assert server.service.uploads.used == 0


# The reader alone


def test_a_pickle_of_too_many_steps_is_given_up() -> None:
    with pytest.raises(RequestInvalid, match="more than"):
        read_tensors(b"\x80\x04" + b"N" * (OPCODES_MAX + 1), None, ignore)


def test_a_pickle_that_repeats_itself_does_not_grow() -> None:
    """A list of lists of lists ... that Python would print for ever."""
    layers = b"\x80\x04]q\x00" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(200))
    with pytest.raises(RequestInvalid):
        read_tensors(layers + b".", None, ignore)


def test_a_view_outside_its_storage_is_refused(forms: dict[str, str]) -> None:
    data = base64.b64decode(forms["zip"])
    old = io.BytesIO(data)
    with zipfile.ZipFile(old) as archive:
        members = {one.filename: archive.read(one) for one in archive.infolist()}
    name = next(name for name in members if name.endswith("/data/0"))
    members[name] = members[name][:-4]
    new = io.BytesIO()
    with zipfile.ZipFile(new, "w") as archive:
        for each, content in members.items():
            archive.writestr(each, content)
    with pytest.raises(RequestInvalid, match="outside its storage"):
        read_tensors(new.getvalue(), None, ignore)


def test_a_view_of_many_times_its_storage_counts_what_it_lays_out(forms: dict[str, str]) -> None:
    counted: list[int] = []
    read_tensors(base64.b64decode(forms["pickle"]), None, counted.append)
    assert sum(counted) == sum(len(one.data) for one in good_adapter(1).tensors.values())


def test_a_compressed_zip_is_refused() -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 20))
    with pytest.raises(RequestInvalid, match="compressed"):
        read_tensors(packed.getvalue(), None, ignore)


@pytest.mark.parametrize("name", ["/torch_1_2_3/../../etc/passwd", "/etc/passwd", "/torch_1_2_4"])
def test_only_shared_memory_of_torch_is_opened(name: str) -> None:
    storage = named("torch.multiprocessing.reductions", "rebuild_storage_filename")
    handle = b"(NNC" + bytes([len(name)]) + name.encode() + b"K\x04t"
    typed = named("torch.multiprocessing.reductions", "rebuild_typed_storage")
    dtype = named("torch", "float32")
    tensor = named("torch.multiprocessing.reductions", "rebuild_tensor")
    view = b"K\x00K\x01\x85K\x01\x85\x87"
    made = tensor + b"N" + typed + storage + handle + b"R" + dtype + b"\x86R" + view + b"\x87R"
    with pytest.raises(RequestInvalid, match=r"shared memory|handle"):
        read_tensors(b"\x80\x04}\x8c\x01a" + made + b"s.", None, ignore)


def named(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")
def test_any_cut_or_flipped_pickle_is_an_answer_and_never_a_fault(forms: dict[str, str]) -> None:
    for form in ("zip", "older", "pickle", "shared", "bucket_pickle"):
        data = base64.b64decode(forms[form])
        load_format = "flattened_bucket" if form.startswith("bucket") else None
        for place in range(0, min(len(data), 3000), 7):
            for wrong in (
                data[:place],
                data[:place] + bytes([data[place] ^ 0x15]) + data[place + 1 :],
            ):
                try:
                    read_tensors(wrong, load_format, ignore)
                except RequestInvalid as error:
                    assert json.dumps(error.message)


def ignore(_: int) -> None:
    """No limit."""
