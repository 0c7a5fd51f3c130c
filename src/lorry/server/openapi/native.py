"""Descriptions of the native routes and of OpenAI's."""

from typing import Any

from lorry.server.openapi import shapes as sh
from lorry.server.openapi.doc import STREAM, TEXT, Answer, Doc, Table

V1 = "1a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f708192a3b4c5d6e7f809"
V2 = "99aa88bb77cc66dd55ee44ff33aa22bb11cc00dd99aa88bb77cc66dd55ee44ff"
AT = 1_764_547_200.5

RESIDENCY: dict[str, Any] = {
    "replica": "engine-0",
    "state": "resident",
    "tier": "slot",
    "slot": 0,
    "engine_id": 7,
    "leases": 1,
    "reason": "",
}
ADAPTER: dict[str, Any] = {
    "object": "adapter",
    "name": "pirate",
    "version": V1,
    "short_version": V1[:12],
    "source": "/adapters/pirate",
    "pinned": False,
    "labels": {"stage": "trial"},
    "owner": "sea team",
    "system_prompt": "You are a pirate.",
    "chat_template": None,
    "defaults": {"temperature": 0.7, "max_tokens": 128},
    "maxima": {"max_tokens": 512, "n": 2},
    "stop": ["Captain:"],
    "idle_ttl": 86_400.0,
    "state": "resident",
    "tier": "slot",
    "slot": 0,
    "rank": 16,
    "alpha": 32.0,
    "scale_rule": "alpha/r",
    "target_modules": ["k_proj", "q_proj"],
    "layers": [0, 1],
    "parameters": 65_536,
    "bytes": 262_400,
    "host_bytes": 266_240,
    "leases": 1,
    "waiting": 0,
    "created": AT,
    "updated": AT,
    "previous": [V2],
    "reason": "",
    "waits_for": "",
    "residency": [RESIDENCY],
}
OPERATION: dict[str, Any] = {
    "object": "operation",
    "id": 17,
    "kind": "load",
    "name": "pirate",
    "version": V1,
    "status": "running",
    "phase": "loading",
    "error": None,
    "began": AT,
    "ended": None,
}
DONE: dict[str, Any] = {**OPERATION, "status": "done", "phase": "done", "ended": AT + 1}
EVENT: dict[str, Any] = {
    "sequence": 41,
    "at": AT,
    "kind": "waiting",
    "name": "legal",
    "version": V2,
    "short_version": V2[:12],
    "text": "'legal' waits for room: 2 of 2 places and 532480 of 1073741824 bytes on engine-0 are "
    "taken: 'pirate' (1 running), 'poet' (pinned)",
}
STREAMED_EVENT = (
    'id: 40\nevent: evicted\ndata: {"sequence":40,"at":1764547200.5,"kind":"evicted","name":"poet",'
    f'"version":"{V2}","short_version":"{V2[:12]}",'
    "\"text\":\"'poet' on engine-0 makes room for 'legal'; it was not used for 12.3 s\"}\n\n"
)
BASE_MODEL: dict[str, Any] = {
    "id": "base",
    "object": "model",
    "created": int(AT),
    "owned_by": "lorry",
    "root": "/models/base",
    "parent": None,
    "max_model_len": 4096,
    "permission": [],
}
MODEL: dict[str, Any] = {
    **BASE_MODEL,
    "id": "pirate",
    "root": "/adapters/pirate",
    "parent": "base",
    "max_model_len": None,
}
USAGE: dict[str, Any] = {
    "prompt_tokens": 12,
    "completion_tokens": 5,
    "total_tokens": 17,
    "prompt_tokens_details": {"cached_tokens": 0},
}
COMPLETION: dict[str, Any] = {
    "id": "cmpl-5f0c",
    "object": "text_completion",
    "created": int(AT),
    "model": "pirate",
    "choices": [
        {
            "index": 0,
            "text": " Arr, the treasure lies north.",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "prompt_logprobs": None,
        }
    ],
    "usage": USAGE,
}
CHAT: dict[str, Any] = {
    "id": "chatcmpl-5f0c",
    "object": "chat.completion",
    "created": int(AT),
    "model": "pirate",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Arr!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ],
    "usage": USAGE,
}
STREAMED_COMPLETION = (
    'data: {"id":"cmpl-5f0c","object":"text_completion","created":1764547200,"model":"pirate",'
    '"choices":[{"index":0,"text":" Arr","logprobs":null,"finish_reason":null,"stop_reason":null}]}'
    "\n\ndata: [DONE]\n\n"
)
STREAMED_CHAT = (
    'data: {"id":"chatcmpl-5f0c","object":"chat.completion.chunk","created":1764547200,'
    '"model":"pirate","choices":[{"index":0,"delta":{"content":"Arr"},"logprobs":null,'
    '"finish_reason":null}]}\n\ndata: [DONE]\n\n'
)
COMPLETION_BODY = {"model": "pirate", "prompt": "Where is the treasure?", "max_tokens": 32}
CHAT_BODY = {"model": "pirate", "messages": [{"role": "user", "content": "Where to?"}]}
ERROR: dict[str, Any] = {
    "message": "The adapter 'pirate' cannot be found.",
    "type": "NotFoundError",
    "param": "name",
    "code": "adapter_not_found",
    "action": "See GET /v1/models for the names there are, or load the adapter first.",
    "details": [],
}
ANY_ERROR = Answer(
    {"error": ERROR},
    sh.ErrorAnswer,
    "Whatever went wrong: `code` is one of GET /v1/errors, which says what to do.",
    "default",
)
CATALOGUE_ENTRY: dict[str, Any] = {
    "code": "all_pinned",
    "message_pattern": "No room for '{}': the pinned adapters {} fill it.",
    "type": "ConflictError",
    "class": "AllPinned",
    "http_status": 409,
    "severity": "warning",
    "fault": "capacity",
    "retryable": False,
    "retry_after_s": None,
    "trigger_scenarios": ["A pin would leave no slot free for the others."],
    "common_situations": ["Pins were added over time and never taken back."],
    "solutions": ["Unpin or unload one of the adapters that the message names."],
    "handling_strategy": "Do not wait: nothing changes until a person unpins something.",
    "retry_pattern": "after_change",
    "prevention_tips": ["Pin only what must never wait."],
    "tags": ["capacity", "pin"],
    "status": 409,
    "meaning": "Pinned adapters leave no room, so nothing was begun.",
    "action": "Unpin or unload an adapter first.",
}
REPLICA: dict[str, Any] = {
    "replica": "engine-0",
    "ready": True,
    "reason": "",
    "slots": [{"engine_id": 7, "name": "pirate"}, None],
    "running": 1,
    "waiting": 0,
    "kv_blocks_used": 3,
    "kv_blocks_total": 512,
    "counters": {"slot_loads": 4.0},
}
CHECKED: dict[str, Any] = {
    "object": "adapter.check",
    "ok": False,
    "source": "/adapters/legal",
    "name": "legal",
    "problems": [
        {
            "code": "adapter_invalid",
            "problem": "The rank is 128; this server takes 64 at most.",
            "fix": "Start it with --max-lora-rank 128.",
        }
    ],
}
STARTED = Answer(
    OPERATION, sh.Operation, "It runs; `Location` is where to look. Asked with ?wait=false.", 202
)
SHOWN = Answer(ADAPTER, sh.Adapter, "The adapter as it is now; `ETag` is its version.")
CREATED = Answer(ADAPTER, sh.Adapter, "The name is new, and served.", 201)


def _listed(*data: Any) -> dict[str, Any]:
    return {"object": "list", "data": list(data)}


def _adapters() -> dict[tuple[str, str], Doc]:
    path = "/v1/adapters/{name}"
    page = {**_listed(ADAPTER), "has_more": True, "next": "pirate"}
    gone = {"name": "pirate", "version": V1, "object": "adapter.deleted"}
    return {
        ("GET", "/v1/adapters"): Doc(
            "List adapters", (Answer(page, sh.AdapterPage, "A page of them."),)
        ),
        ("POST", "/v1/adapters:check"): Doc(
            "Try an adapter without loading it",
            (Answer(CHECKED, sh.AdapterCheck, "What a load would find and do."),),
            {"A folder": {"source": "/adapters/legal", "name": "legal"}},
        ),
        ("GET", path): Doc("Show an adapter", (SHOWN,)),
        ("PUT", path): Doc(
            "Register or replace an adapter",
            (Answer(ADAPTER, sh.Adapter, "The name serves this version now."), CREATED, STARTED),
            {
                "The least": {"source": "/adapters/pirate"},
                "With settings": {
                    "source": "/adapters/pirate",
                    "pinned": True,
                    "labels": {"stage": "trial"},
                    "owner": "sea team",
                    "system_prompt": "You are a pirate.",
                    "defaults": {"temperature": 0.7},
                    "maxima": {"max_tokens": 512},
                    "stop": ["Captain:"],
                    "idle_ttl": 86_400.0,
                },
            },
        ),
        ("PATCH", path): Doc(
            "Change pin, labels and settings",
            (SHOWN,),
            {
                "Pin it": {"pinned": True},
                "Change settings": {"defaults": {"temperature": None, "top_p": 0.9}, "stop": None},
            },
        ),
        ("DELETE", path): Doc(
            "Unload an adapter",
            (Answer(gone, sh.AdapterDeleted, "It is gone from every tier."), STARTED),
        ),
        ("POST", f"{path}/rollback"): Doc(
            "Serve an earlier version again",
            (SHOWN, STARTED),
            {"The one before": {}, "A certain one": {"version": V2, "strategy": "drain-first"}},
        ),
        ("POST", f"{path}/prefetch"): Doc("Make an adapter resident", (SHOWN, STARTED)),
    }


def _uploads() -> dict[tuple[str, str], Doc]:
    sent = {**ADAPTER, "source": "upload:0123456789abcdef", "published": V1}
    known = Answer(sent, sh.Published, "`published`, and `ETag`, name the version of this call.")
    new = Answer(sent, sh.Published, "The same, for a name that was new.", 201)
    answers = (known, new, STARTED)
    return {
        ("PUT", "/v1/adapters/{name}/weights"): Doc("Publish weights sent along", answers),
        ("PUT", "/v1/adapters/{name}/files"): Doc("Publish an adapter's files", answers),
    }


def _differences() -> dict[tuple[str, str], Doc]:
    side: dict[str, Any] = {
        "title": "legal",
        "rank": 8,
        "alpha": 16.0,
        "scale_rule": "alpha/r",
        "target_modules": ["q_proj"],
        "modules": 1,
        "parameters": 9_216,
        "dtype": "BF16",
        "norm": 5.76,
    }
    module = {
        "module": "model.layers.0.self_attn.q_proj",
        "rank_a": 8,
        "rank_b": 8,
        "norm_a": 5.76,
        "norm_b": 5.81,
        "difference": 0.42,
    }
    found = {
        "object": "adapter.diff",
        "same": False,
        "a": side,
        "b": {**side, "title": "/adapters/legal-v2", "norm": 5.81},
        "config": [{"key": "lora_dropout", "a": 0.05, "b": 0.1}],
        "modules": [module],
    }
    told = "Norms are null for a module that an adapter does not touch, `difference` for two bases."
    return {
        ("POST", "/v1/adapters:diff"): Doc(
            "Compare two adapters",
            (Answer(found, sh.AdapterDiff, told),),
            {"A name and a folder": {"a": "legal", "b": "/adapters/legal-v2"}},
        )
    }


def _operations() -> dict[tuple[str, str], Doc]:
    one = Answer(DONE, sh.Operation, "How far it is.")
    listed = Answer(_listed(DONE, OPERATION), sh.OperationList, "Oldest first.")
    return {
        ("GET", "/v1/operations"): Doc("List operations", (listed,)),
        ("GET", "/v1/operations/{operation}"): Doc("Show an operation", (one,)),
        ("DELETE", "/v1/operations/{operation}"): Doc("Cancel an operation", (one,)),
        ("GET", "/v1/events"): Doc(
            "Follow what happens, and why",
            (
                Answer(STREAMED_EVENT, None, "Events as they happen.", 200, STREAM),
                Answer(_listed(EVENT), sh.EventList, "What is remembered: ?follow=false."),
            ),
        ),
    }


def _server() -> dict[tuple[str, str], Doc]:
    ok = Answer({"status": "ok"}, sh.Status, "It can take requests.")
    metrics = "# TYPE lorry_adapters_registered gauge\nlorry_adapters_registered 1.0\n"
    return {
        ("GET", "/health"): Doc("Whether an engine is up", (ok,)),
        ("GET", "/ready"): Doc("Whether requests are taken", (ok,)),
        ("GET", "/version"): Doc(
            "Lorry's version", (Answer({"version": "0.1.0"}, sh.Version, "The version."),)
        ),
        ("GET", "/metrics"): Doc(
            "Metrics", (Answer(metrics, None, "Prometheus text.", media=TEXT),)
        ),
        ("GET", "/v1/replicas"): Doc(
            "Engines and their slots", (Answer(_listed(REPLICA), sh.ReplicaList, "All of them."),)
        ),
        ("GET", "/v1/errors"): Doc(
            "List all errors", (Answer(_listed(CATALOGUE_ENTRY), sh.Catalogue, "The catalogue."),)
        ),
        ("GET", "/v1/errors/{code}"): Doc(
            "Explain an error", (Answer(CATALOGUE_ENTRY, sh.CatalogueEntry, "All about it."),)
        ),
    }


def _inference() -> dict[tuple[str, str], Doc]:
    tokens = {"count": 3, "max_model_len": 4096, "tokens": [791, 87975, 13]}
    models = Answer(_listed(BASE_MODEL, MODEL), sh.ModelList, "The base, then the adapters.")
    return {
        ("GET", "/v1/models"): Doc("List what can be asked for", (models,)),
        ("GET", "/v1/models/{model}"): Doc(
            "Show one model", (Answer(MODEL, sh.Model, "The base or an adapter."),)
        ),
        ("POST", "/v1/completions"): Doc(
            "Continue a text",
            (
                Answer(COMPLETION, sh.Completion, "The whole answer."),
                Answer(STREAMED_COMPLETION, None, "With stream: true.", 200, STREAM),
            ),
            {
                "An adapter by its name": COMPLETION_BODY,
                "Two prompts, the second for the base": {
                    "model": "base",
                    "lora_path": ["pirate", None],
                    "prompt": ["Ahoy", "Hello"],
                },
            },
        ),
        ("POST", "/v1/chat/completions"): Doc(
            "Answer a chat",
            (
                Answer(CHAT, sh.ChatCompletion, "The whole answer."),
                Answer(STREAMED_CHAT, None, "With stream: true.", 200, STREAM),
            ),
            {"A question": CHAT_BODY},
        ),
        ("POST", "/tokenize"): Doc(
            "Text to token ids",
            (Answer(tokens, sh.Tokens, "The ids."),),
            {"A text": {"model": "pirate", "prompt": "The lorry."}, "A chat": CHAT_BODY},
        ),
        ("POST", "/detokenize"): Doc(
            "Token ids to text",
            (Answer({"prompt": "The lorry."}, sh.Detokenized, "The text."),),
            {"Three tokens": {"model": "pirate", "tokens": [791, 87975, 13]}},
        ),
    }


NATIVE: Table = {
    **_adapters(),
    **_uploads(),
    **_differences(),
    **_operations(),
    **_server(),
    **_inference(),
}
