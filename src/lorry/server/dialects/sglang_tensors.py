"""SGLang's load from tensors. The tensors come in its base64 form and are read without running
anything of it; from there on it is the native upload of weights."""

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends
from pydantic import AliasChoices, BeforeValidator, Field
from starlette.responses import Response

from lorry.artifacts.adapter_config import CONFIG_FILE, shown
from lorry.artifacts.memory import MemoryFolder
from lorry.artifacts.parcels import WeightsParcel
from lorry.artifacts.pickled import Tensor, read_tensors
from lorry.artifacts.reading import WEIGHTS_FILE
from lorry.artifacts.tensors import LENGTH_BYTES
from lorry.errors import RequestInvalid
from lorry.ids import AdapterName
from lorry.server.dialects.sglang import SglangAdminRoute, load_and_tell
from lorry.server.receiving import Held
from lorry.server.schema import Body
from lorry.server.service import Service, service_of
from lorry.supervisor import LoadRequest

Caller = Annotated[Service, Depends(service_of)]

FORMATS = (None, "flattened_bucket")

router = APIRouter(route_class=SglangAdminRoute, tags=["SGLang dialect"])


def _listed(value: Any) -> Any:
    """Older clients send one string."""
    return [value] if isinstance(value, str) else value


class LoadLoraFromTensorsRequest(Body):
    """POST /load_lora_adapter_from_tensors."""

    lora_name: str = Field(min_length=1)
    config_dict: dict[str, Any]
    """The PEFT config."""
    serialized_named_tensors: Annotated[list[str], BeforeValidator(_listed)] = Field(
        min_length=1,
        validation_alias=AliasChoices("serialized_named_tensors", "serialized_tensors"),
        description="base64 of the tensors, the same for each rank: of safetensors, or of pickles "
        "of PyTorch, of which nothing is run",
    )
    pinned: bool = False
    added_tokens_config: dict[str, Any] | None = None
    """Not supported: must be empty."""
    load_format: str | None = None
    """null, or "flattened_bucket"."""
    expected_checksums: dict[str, str] | None = None
    """Tensor name -> SHA-256 of its bytes."""
    lora_id: str | None = Field(default=None, description="ignored: the server gives the ids")


@router.post("/load_lora_adapter_from_tensors", response_model=None)
async def load_lora_adapter_from_tensors(
    request: LoadLoraFromTensorsRequest, service: Caller
) -> Response:
    """Load an adapter under a new name, from tensors that come with the request and reach the
    engine without touching a disk."""
    _check(request)
    held = Held(service.uploads, service.settings.max_upload_bytes)
    folder = MemoryFolder("the request")
    try:
        await to_thread.run_sync(_unpack, request, folder, held)
    except BaseException:
        folder.close()
        held.release()
        raise
    parcel = WeightsParcel(folder, durable=True, on_close=held.release)
    name = AdapterName(request.lora_name)
    wanted = LoadRequest(name, parcel.source, mode="create", pinned=request.pinned)
    return await load_and_tell(service, wanted, parcel)


def _check(request: LoadLoraFromTensorsRequest) -> None:
    """What is wrong without a look at the tensors."""
    if request.added_tokens_config:
        raise RequestInvalid("added_tokens_config is not supported: train without added tokens.")
    if request.load_format not in FORMATS:
        raise RequestInvalid(
            f"load_format is {shown(request.load_format)}; it may be null or 'flattened_bucket'."
        )
    if len(set(request.serialized_named_tensors)) > 1:
        raise RequestInvalid(
            "serialized_named_tensors holds different tensors for different ranks; this server "
            "has one rank, so send one copy of the whole tensors."
        )


def _unpack(request: LoadLoraFromTensorsRequest, folder: MemoryFolder, held: Held) -> None:
    """In a worker thread: the tensors as a safetensors file in memory, the config beside it."""
    total = 0

    def room(more: int) -> None:
        nonlocal total
        total += more
        held.grow_to(total)

    text = request.serialized_named_tensors[0]
    room(len(text) * 3 // 4)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestInvalid(f"serialized_named_tensors is not base64 ({error}).") from None
    tensors = read_tensors(data, request.load_format, room)
    _check_sums(tensors, request.expected_checksums or {})
    folder.create(CONFIG_FILE).write(json.dumps(request.config_dict).encode())
    weights = folder.create(WEIGHTS_FILE)
    weights.write(_header(tensors))
    for tensor in tensors:
        weights.write(tensor.data)


def _header(tensors: Sequence[Tensor]) -> bytes:
    """The first bytes of a safetensors file with these tensors, in their order."""
    header: dict[str, Any] = {}
    end = 0
    for tensor in tensors:
        if tensor.name in header:
            raise RequestInvalid(f"The tensor {shown(tensor.name)} is there twice; send it once.")
        begin, end = end, end + len(tensor.data)
        place = {"shape": tensor.shape, "data_offsets": (begin, end)}
        header[tensor.name] = {"dtype": tensor.dtype, **place}
    content = json.dumps(header).encode()
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


def _check_sums(tensors: Sequence[Tensor], expected: Mapping[str, str]) -> None:
    found = {tensor.name: tensor for tensor in tensors}
    for name, wanted in expected.items():
        tensor = found.get(name)
        if tensor is None:
            raise RequestInvalid(f"expected_checksums names {shown(name)}, which did not come.")
        digest = hashlib.sha256(tensor.data).hexdigest()
        if digest != wanted.lower():
            raise RequestInvalid(
                f"The SHA-256 of {shown(name)} is {digest}, but expected_checksums has "
                f"{shown(wanted)}; send the tensors again."
            )
