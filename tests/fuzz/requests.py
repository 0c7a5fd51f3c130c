"""Strange requests to a real server with the embedded engine: each is answered or refused in time,
never with a 500, what it asks for is kept, and the engine computes right afterwards."""

import copy
import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.fixtures.api import Api
from tests.fixtures.common_ground import EOS, VOCAB, CommonGround, common_ground
from tests.fixtures.server_process import ServerProcess, free_port, lorry_command
from tests.fuzz.recipes import value

FLAGS = ("--served-model-name", "tiny", "--max-loras", "8", "--max-cpu-loras", "16")
LIMITS = ("--max-lora-rank", "16", "--dtype", "float32", "--kv-cache-bytes", "64MiB")
ADAPTERS = ("A", "B")
CLIENTS = 4
ALIVE_EVERY = 100
"""Requests between two looks whether the known prompts still have their known answers."""
LIMIT_S = 30.0
"""Far more than the longest request takes on a busy machine."""
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
JSON = {"Content-Type": "application/json"}
"""Bodies are made by `json`, which writes NaN and half surrogates as some clients do and httpx does
not."""
FINISHED = ("stop", "length", "tool_calls")


@dataclass(slots=True)
class Figures:
    """What some requests came to."""

    requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    compared: int = 0
    """Asked for a second time, as a stream or as a whole, with the same text."""
    left: int = 0
    """Streams that the client left."""
    looks: int = 0
    findings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        statuses = ", ".join(f"{n} x {status}" for status, n in sorted(self.statuses.items()))
        return (
            f"{self.requests} requests ({statuses}), {self.compared} both streamed and whole, "
            f"{self.left} left, {self.looks} looks at the known answers, "
            f"{len(self.findings)} findings"
        )


# What is asked


def request(rng: random.Random) -> tuple[str, Any]:
    """Path and body."""
    path = rng.choice((COMPLETIONS, COMPLETIONS, CHAT, GENERATE))
    body = {COMPLETIONS: _completion, CHAT: _chat, GENERATE: _generate}[path](rng)
    body = copy.deepcopy(body)  # what is spoilt now may be a list that others use at this moment
    if rng.random() < 0.4:
        for _ in range(rng.randint(1, 2)):
            _spoil(rng, body)
    return path, body


def _completion(rng: random.Random) -> dict[str, Any]:
    return {
        "model": rng.choice(("tiny", *ADAPTERS, *ADAPTERS)),
        "prompt": _prompt(rng),
        **_options(rng),
        **_some(rng, {"echo": [True, False], "best_of": [1], "logprobs": [0, 3]}),
    }


def _chat(rng: random.Random) -> dict[str, Any]:
    roles = ("user", "assistant", "system", "tool", "developer")
    messages = [
        {"role": rng.choice(roles), "content": _content(rng)} for _ in range(rng.randint(1, 4))
    ]
    more = {"logprobs": [True, False], "top_logprobs": [0, 3], "tools": [[]]}
    return {
        "model": rng.choice(("tiny", *ADAPTERS)),
        "messages": [{"role": "user", "content": "hi"}, *messages][rng.randint(0, 1) :],
        **_options(rng),
        **_some(rng, more),
    }


def _generate(rng: random.Random) -> dict[str, Any]:
    options = {"max_new_tokens": rng.randint(1, 8), "temperature": 0.0}
    options |= _some(rng, {"stop": STOPS, "top_k": [1, 5, -1], "n": [1, 2], "ignore_eos": [True]})
    return {
        **rng.choice(({"text": _text(rng)}, {"input_ids": _ids(rng)})),
        "sampling_params": options,
        **_some(rng, {"lora_path": ["A", "B", None], "return_logprob": [True]}),
    }


STOPS: list[Any] = ["a", ["e", " t"], [], ["ü", "東"], "\n", ["the", "th", "t"], ["x" * 300], None]


def _options(rng: random.Random) -> dict[str, Any]:
    """Sampling values that are right; always with a short end."""
    most = {
        "temperature": [0.7, 1, 2],
        "top_p": [1, 0.5, 0.01],
        "top_k": [1, 5, 0],
        "min_p": [0, 0.3],
        "seed": [0, 7, 2**31],
        "n": [1, 2, 3],
        "stop": STOPS,
        "stop_token_ids": [[], [EOS], [5, 6, 7]],
        "presence_penalty": [0, 1, -2],
        "frequency_penalty": [0, 0.5, 2],
        "repetition_penalty": [1, 1.3],
        "logit_bias": [{}, {"5": 50}, {"68": -100}],
        "ignore_eos": [True, False],
        "include_stop_str_in_output": [False],
        "min_tokens": [0, 1],
        "stream_options": [{"include_usage": True}],
        "user": ["x"],
    }
    return {"max_tokens": rng.randint(1, 8), "temperature": 0, **_some(rng, most)}


def _some(rng: random.Random, choices: dict[str, Any]) -> dict[str, Any]:
    return {key: rng.choice(values) for key, values in choices.items() if rng.random() < 0.25}


def _prompt(rng: random.Random) -> Any:
    kind = rng.randrange(5)
    if kind == 0:
        return [_text(rng) for _ in range(rng.randint(1, 3))]
    if kind == 1:
        return [_ids(rng) for _ in range(rng.randint(1, 2))]
    return _ids(rng) if kind == 2 else _text(rng)


def _ids(rng: random.Random) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.choice((1, 5, 40)))]


def _text(rng: random.Random) -> str:
    words = ("the lorry", "東京 ü", "🚚", "\n\n", "</s>", "<s>", " ", "{{ x }}", "\x00", "a\u0301")
    return " ".join(rng.choice(words) for _ in range(rng.choice((1, 2, 9))))


def _content(rng: random.Random) -> Any:
    return rng.choice((_text(rng), [{"type": "text", "text": _text(rng)}], None, "", []))


def _spoil(rng: random.Random, body: dict[str, Any]) -> None:
    """Set some field, at some depth, to anything."""
    place: Any = body
    while True:
        keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.5:
            place = place[key]
            continue
        if isinstance(place, dict) and rng.random() < 0.2:
            del place[key]
        else:
            place[key] = value(rng)
        return


# What comes back


@contextmanager
def served() -> Iterator[tuple[ServerProcess, CommonGround]]:
    """A server with the adapters loaded."""
    ground, port = common_ground(), free_port()
    with tempfile.TemporaryDirectory(prefix="lorry-fuzz-") as state:
        command = lorry_command(ground.model, port, Path(state), *FLAGS, *LIMITS)
        with ServerProcess(command, port) as server, server.client() as client:
            for name in ADAPTERS:
                Api(client, ground, "tiny").must_load(name, ground.adapter(name))
            yield server, ground


def judge(url: str, figures: Figures, seed: int) -> None:
    """One request, and perhaps the same in the other form."""
    rng = random.Random(seed)
    path, body = request(rng)
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        try:
            found = _judge(client, path, body, rng, figures)
        except httpx.HTTPError as error:
            found = f"{type(error).__name__}: {error}"
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            found = f"the answer has another shape: {error!r}"
    figures.requests += 1
    if found is not None:
        text = json.dumps(body)[:600]
        figures.findings.append(f"request {seed}: POST {path} {text}: {found}")


def _judge(
    client: httpx.Client, path: str, body: dict[str, Any], rng: random.Random, figures: Figures
) -> str | None:
    content = json.dumps(body)
    if rng.random() < 0.02:
        content = content[: rng.randrange(len(content))]
    if rng.random() < 0.1:
        _leave(client, path, {**body, "stream": True})
        figures.left += 1
        return None
    whole = client.post(path, content=content, headers=JSON)
    figures.statuses[whole.status_code] += 1
    if whole.status_code != 200 or body.get("stream"):
        return _refusal(whole)
    answer = whole.json()
    return _kept(path, body, answer) or _streamed(client, path, body, answer, figures)


def _refusal(answer: httpx.Response) -> str | None:
    if answer.status_code == 200:
        return None
    if answer.status_code >= 500 and "retry-after" not in answer.headers:
        return f"{answer.status_code}: {answer.text[:400]}"
    message = answer.json()["error"]["message"]
    return None if isinstance(message, str) and message else "a refusal without words"


def _leave(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Read the first piece, and go."""
    with client.stream("POST", path, content=json.dumps(body), headers=JSON) as stream:
        next(stream.iter_raw(), None)


def texts(path: str, answer: Any) -> list[str]:
    """Of the choices, in order."""
    if path == GENERATE:
        return [one["text"] for one in (answer if isinstance(answer, list) else [answer])]
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [
        choice["text"] if path == COMPLETIONS else choice["message"]["content"] or ""
        for choice in choices
    ]


def _kept(path: str, body: dict[str, Any], answer: Any) -> str | None:
    """What was asked for holds."""
    found = texts(path, answer)
    options = body.get("sampling_params") if path == GENERATE else body
    if not isinstance(options, dict):
        return None
    stops = options.get("stop") or []
    if not options.get("include_stop_str_in_output") and not body.get("echo"):
        for stop in [stops] if isinstance(stops, str) else stops:
            if any(stop in text for text in found):
                return f"the stop string {stop!r} is in {found}"
    if path == GENERATE:
        return None
    prompts = body["prompt"] if path == COMPLETIONS and _is_batch(body["prompt"]) else [0]
    wanted = (options.get("n") or 1) * len(prompts)
    if len(found) != wanted:
        return f"{len(found)} choices, asked for {wanted}"
    if any(choice["finish_reason"] not in FINISHED for choice in answer["choices"]):
        return f"finish reasons of {answer['choices']}"
    most, used = options.get("max_tokens"), answer["usage"]["completion_tokens"]
    if isinstance(most, int) and used > most * wanted:
        return f"{used} tokens, asked for {most} at most in each of {wanted}"
    return None


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, list) and not all(isinstance(one, int) for one in prompt)


def _streamed(
    client: httpx.Client, path: str, body: dict[str, Any], answer: Any, figures: Figures
) -> str | None:
    """The same text comes as a stream, where nothing is left to chance."""
    if path == GENERATE or body.get("temperature") != 0 or body.get("best_of", 1) != 1:
        return None
    whole = texts(path, answer)
    pieces = [""] * len(whole)
    content = json.dumps({**body, "stream": True})
    with client.stream("POST", path, content=content, headers=JSON) as stream:
        if stream.status_code != 200:
            return f"as a stream it is refused: {stream.read()[:300]!r}"
        for line in stream.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            for choice in json.loads(line[6:]).get("choices", ()):
                delta = choice.get("delta", {}).get("content") if path == CHAT else choice["text"]
                pieces[choice["index"]] += delta or ""
    figures.compared += 1
    return None if pieces == whole else f"whole {whole}, as a stream {pieces}"


def run(seeds: range) -> Figures:
    """Send them to one server, several at a time."""
    figures = Figures()
    with served() as (server, ground), ThreadPoolExecutor(CLIENTS) as pool:
        for first in range(0, len(seeds), ALIVE_EVERY):
            part = seeds[first : first + ALIVE_EVERY]
            list(pool.map(partial(judge, server.url, figures), part))
            figures.findings += _look(server, ground)
            figures.looks += 1
        figures.findings += _at_rest(server)
    return figures


def _look(server: ServerProcess, ground: CommonGround) -> list[str]:
    """Whether known prompts have their known answers."""
    wrong = []
    with server.client() as client:
        api = Api(client, ground, "tiny")
        for name in ("base", *ADAPTERS):
            for prompt in ("S", "P"):
                try:
                    api.check("tiny" if name == "base" else name, name, prompt)
                except AssertionError as error:
                    wrong.append(f"afterwards {name} is wrong on {prompt}: {str(error)[:300]}")
    return wrong


def _at_rest(server: ServerProcess) -> list[str]:
    """No request is counted any more."""
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    busy = [line for line in lines if line.startswith(("lorry_leases", "lorry_tickets"))]
    return [f"at rest: {line}" for line in busy if not line.endswith(" 0.0")]
