"""Descriptions of the dialects' routes: their shapes are those of other servers."""

from dataclasses import replace
from typing import Any, Literal

from lorry.server.openapi import native as nt
from lorry.server.openapi import shapes as sh
from lorry.server.openapi.doc import STREAM, TEXT, Answer, Doc, Shape, Table

# vLLM and mistral.rs


class VllmErrorDetail(Shape):
    """vLLM's fields; `code` is the status."""

    message: str
    type: str
    param: None
    code: int


class VllmError(Shape):
    """vLLM's shape of an error."""

    error: VllmErrorDetail


class MistralrsErrorDetail(Shape):
    """mistral.rs's fields; `code` is a word."""

    message: str
    type: str
    code: str


class MistralrsError(Shape):
    """mistral.rs's shape of an error."""

    error: MistralrsErrorDetail


class LoraAdapter(Shape):
    """mistral.rs's object."""

    id: str
    object: Literal["lora_adapter"]
    source: str
    generation: str
    rank: int
    bytes: int


class Generation(Shape):
    """A version that an engine holds."""

    generation: str
    aliases: list[str]
    rank: int | None
    bytes: int
    retired: bool
    active_leases: int


class LoraAdapters(Shape):
    """mistral.rs's list."""

    object: Literal["list"]
    data: list[LoraAdapter]
    generations: list[Generation]
    resident_generations: int
    retired_generations: int
    resident_bytes: int
    max_adapters: int
    max_rank: int
    max_bytes: int


# DJL Serving


class DjlStatus(Shape):
    """What was done."""

    status: str


class DjlAdapter(Shape):
    """An adapter as DJL shows it."""

    name: str
    src: str
    pin: bool


class DjlPage(Shape):
    """Some of the adapters."""

    adapters: list[DjlAdapter]
    nextPageToken: str | None = None  # noqa: N815 - the name is DJL's


class DjlError(Shape):
    """DJL's shape of an error."""

    code: int
    type: Literal["BadRequestException"]
    message: str


class SagemakerError(Shape):
    """How the container standard refuses fields; `detail` lists them, as JSON."""

    detail: str


# SGLang


class SglangResult(Shape):
    """What a load or unload did, and the registry after it."""

    rid: None
    http_worker_ipc: None
    success: bool
    error_message: str | None
    loaded_adapters: dict[str, str]


class LoraPool(Shape):
    """Slots of one engine."""

    slots_used: int
    slots_total: int
    utilization: float


class Load(Shape):
    """One engine."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    lora: LoraPool | None = None


class Loads(Shape):
    """Every engine."""

    timestamp: str
    version: str
    loads: list[Load]


class ModelInfo(Shape):
    """The base model."""

    model_path: str
    tokenizer_path: str | None
    is_generation: bool
    preferred_sampling_params: None
    weight_version: str
    has_image_understanding: bool
    has_audio_understanding: bool
    architectures: list[str]


class Generated(Shape):
    """One answer of /generate; further fields of `meta_info` depend on what was asked."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]
    prompt_token_ids: list[int] | None = None
    index: int | None = None


class SglangErrorDetail(Shape):
    """SGLang's fields; `code` is the status."""

    message: str
    type: str
    code: int
    retryable: bool


class SglangError(Shape):
    """SGLang's shape of an error."""

    error: SglangErrorDetail


FAILED = "The message names the cause and what to do."
VLLM_ERROR = Answer(
    {
        "error": {
            "message": "The lora adapter 'pirate' cannot be found.",
            "type": "NotFoundError",
            "param": None,
            "code": 404,
        }
    },
    VllmError,
    FAILED,
    "default",
)
VLLM_OR_MISTRALRS = replace(VLLM_ERROR, shape=VllmError | MistralrsError)
MISTRALRS_ERROR = Answer(
    {
        "error": {
            "message": "The model `nobody` does not exist.",
            "type": "invalid_request_error",
            "code": "model_not_found",
        }
    },
    MistralrsError,
    FAILED,
    "default",
)
DJL_ERROR = Answer(
    {"code": 404, "type": "BadRequestException", "message": "The adapter pirate was not found"},
    DjlError,
    FAILED,
    "default",
)
REGISTRY = {"pirate": "/adapters/pirate"}
SGLANG_RESULT: dict[str, Any] = {
    "rid": None,
    "http_worker_ipc": None,
    "success": True,
    "error_message": None,
    "loaded_adapters": REGISTRY,
}
SGLANG_FAILED = Answer(
    {
        **SGLANG_RESULT,
        "success": False,
        "error_message": "Failed to load LoRA adapter pirate because it is already loaded.",
    },
    SglangResult,
    FAILED,
    400,
)
SGLANG_ERROR = Answer(
    {
        "error": {
            "message": "Got LoRA adapter that has never been loaded: nobody\n"
            "All loaded adapters: pirate.",
            "type": "invalid_request_error",
            "code": 400,
            "retryable": False,
        }
    },
    SglangError,
    FAILED,
    "default",
)
GENERATED: dict[str, Any] = {
    "text": " Arr!",
    "output_ids": [1676, 81, 0],
    "meta_info": {
        "id": "8f1e",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 4,
        "weight_version": "default",
        "completion_tokens": 3,
        "cached_tokens": 0,
        "e2e_latency": 0.21,
    },
}
STREAMED_GENERATED = (
    'data: {"text":" Arr","output_ids":[1676],"meta_info":{"id":"8f1e","finish_reason":null}}\n\n'
    "data: [DONE]\n\n"
)


def _text(words: str) -> Answer:
    return Answer(words, None, "It is done.", media=TEXT)


def _vllm() -> dict[tuple[str, str], Doc]:
    adapter = {
        "id": "pirate",
        "object": "lora_adapter",
        "source": "/adapters/pirate",
        "generation": nt.V1,
        "rank": 16,
        "bytes": 266_240,
    }
    generation = {
        "generation": nt.V1,
        "aliases": ["pirate"],
        "rank": 16,
        "bytes": 266_240,
        "retired": False,
        "active_leases": 1,
    }
    listed = {
        "object": "list",
        "data": [adapter],
        "generations": [generation],
        "resident_generations": 1,
        "retired_generations": 0,
        "resident_bytes": 266_240,
        "max_adapters": 64,
        "max_rank": 64,
        "max_bytes": 2**30,
    }
    swap = {
        "lora_name": "pirate",
        "lora_path": "/adapters/pirate-2",
        "load_inplace": True,
        "expected_generation": nt.V1,
    }
    answered = Answer(adapter, LoraAdapter, "With expected_generation: mistral.rs's answer.")
    return {
        ("POST", "/v1/load_lora_adapter"): Doc(
            "Load an adapter",
            (_text("Success: LoRA adapter 'pirate' added successfully."), answered),
            {
                "vLLM": {"lora_name": "pirate", "lora_path": "/adapters/pirate"},
                "mistral.rs": swap,
            },
            VLLM_OR_MISTRALRS,
        ),
        ("POST", "/v1/unload_lora_adapter"): Doc(
            "Unload an adapter",
            (_text("Success: LoRA adapter 'pirate' removed successfully."), answered),
            {
                "vLLM": {"lora_name": "pirate"},
                "mistral.rs": {"lora_name": "pirate", "expected_generation": nt.V1},
            },
            VLLM_OR_MISTRALRS,
        ),
        ("GET", "/v1/lora_adapters"): Doc(
            "List adapters and generations",
            (Answer(listed, LoraAdapters, "All of them."),),
            error=MISTRALRS_ERROR,
        ),
    }


def _sagemaker() -> dict[tuple[str, str], Doc]:
    done = "Adapter pirate registered"
    shown = Answer([{"name": "pirate", "src": "/adapters/pirate", "pin": False}], list[DjlAdapter])
    return {
        ("POST", "/adapters"): Doc(
            "Register an adapter",
            (_text(done), Answer({"status": done}, DjlStatus, "Asked by query alone: DJL's.")),
            {"An adapter": {"name": "pirate", "src": "/adapters/pirate", "pin": True}},
            replace(VLLM_ERROR, shape=VllmError | SagemakerError | DjlError),
        ),
        ("DELETE", "/adapters/{adapter_name}"): Doc(
            "Unload an adapter",
            (_text("Adapter pirate unregistered"),),
            error=replace(VLLM_ERROR, shape=VllmError | SagemakerError),
        ),
        ("POST", "/invocations"): Doc(
            "Answer a chat or continue a text",
            (
                Answer(nt.COMPLETION, sh.Completion, "To a body with `prompt`."),
                Answer(nt.STREAMED_CHAT, None, "With stream: true.", 200, STREAM),
            ),
            {"A text": nt.COMPLETION_BODY, "A chat": nt.CHAT_BODY},
        ),
        ("GET", "/ping"): Doc(
            "Whether an engine is up", (Answer({"status": "ok"}, sh.Status, "It is."),)
        ),
        **_djl("/adapters", shown),
        **_djl("/models/{model}/adapters", shown),
        ("POST", "/models/{model}/adapters"): Doc(
            "Register an adapter", (Answer({"status": done}, DjlStatus),), error=DJL_ERROR
        ),
        ("DELETE", "/models/{model}/adapters/{adapter_name}"): Doc(
            "Unload an adapter",
            (Answer({"status": "Adapter pirate unregistered"}, DjlStatus),),
            error=DJL_ERROR,
        ),
    }


def _djl(path: str, shown: Answer) -> dict[tuple[str, str], Doc]:
    page = Answer({"nextPageToken": "100", "adapters": shown.example}, DjlPage, "A page of them.")
    updated = Answer({"status": "Adapter pirate updated"}, DjlStatus)
    return {
        ("GET", path): Doc("List adapters", (page,), error=DJL_ERROR),
        ("GET", f"{path}/{{adapter_name}}"): Doc("Show an adapter", (shown,), error=DJL_ERROR),
        ("POST", f"{path}/{{adapter_name}}/update"): Doc(
            "Pin, preload or replace an adapter", (updated,), error=DJL_ERROR
        ),
    }


def _sglang() -> dict[tuple[str, str], Doc]:
    done = Answer(SGLANG_RESULT, SglangResult, "It is done.")
    pool = {"slots_used": 1, "slots_total": 4, "utilization": 0.25}
    load = {"dp_rank": 0, "num_running_reqs": 1, "num_waiting_reqs": 0, "lora": pool}
    loads = {"timestamp": "2025-12-01T00:00:00+00:00", "version": "0.1.0", "loads": [load]}
    info = {
        "model_path": "/models/base",
        "tokenizer_path": "/models/base",
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "architectures": ["LlamaForCausalLM"],
    }
    one = {"text": "Ahoy", "lora_path": "pirate", "sampling_params": {"max_new_tokens": 3}}
    several = {"text": ["Ahoy", "Hello"], "lora_path": ["pirate", None]}
    about = Doc("About the base model", (Answer(info, ModelInfo, "The base model."),))
    return {
        ("POST", "/load_lora_adapter"): Doc(
            "Load an adapter",
            (done, SGLANG_FAILED),
            {"An adapter": {"lora_name": "pirate", "lora_path": "/adapters/pirate"}},
            SGLANG_FAILED,
        ),
        ("POST", "/load_lora_adapter_from_tensors"): Doc(
            "Load an adapter from tensors sent along",
            (done, SGLANG_FAILED),
            {
                "Safetensors": {
                    "lora_name": "pirate",
                    "config_dict": {"peft_type": "LORA", "r": 8, "lora_alpha": 16},
                    "serialized_named_tensors": ["base64 of safetensors.torch.save(tensors)"],
                }
            },
            SGLANG_FAILED,
        ),
        ("POST", "/unload_lora_adapter"): Doc(
            "Unload an adapter",
            (done, SGLANG_FAILED),
            {"An adapter": {"lora_name": "pirate"}},
            SGLANG_FAILED,
        ),
        ("GET", "/v1/loads"): Doc("Requests and slots", (Answer(loads, Loads, "Each engine."),)),
        ("GET", "/get_model_info"): about,
        ("GET", "/model_info"): about,
        ("GET", "/health_generate"): Doc(
            "Whether the base model makes a token", (Answer(None, None, "It does; no body."),)
        ),
        ("POST", "/generate"): Doc(
            "Continue one or several texts",
            (
                Answer(GENERATED, Generated, "To one prompt; to several, a list of these."),
                Answer(STREAMED_GENERATED, None, "With stream: true.", 200, STREAM),
            ),
            {"One prompt": one, "Two, the second for the base": several},
            SGLANG_ERROR,
        ),
    }


FOREIGN: Table = {**_vllm(), **_sagemaker(), **_sglang()}
