"""What clients do: admin calls in every dialect, requests for tokens on every route, mistakes."""

import json
import math
import random
from typing import Any

from lorry.ids import AdapterName, VersionId
from tests.simulation.shell.exchange import Exchange
from tests.simulation.shell.machine import Machine, adapters_folder, version_of
from tests.simulation.shell.options import BASE, VOCABULARY, Options

BAD_FOLDERS = ("bad-cut", "bad-rank", "bad-empty", "missing")


class Workload:
    """Draws exchanges; sends none."""

    def __init__(self, options: Options, rng: random.Random, machine: Machine) -> None:
        """`rng` is the world's."""
        self.options = options
        self.rng = rng
        self.machine = machine
        self.names = [AdapterName(f"n{i}") for i in range(options.names)]
        self.known: dict[AdapterName, list[VersionId]] = {}
        """Versions that a client has seen, for `If-Match` and `name@version`."""
        self.operation = 0
        """The number of an operation that a client has seen last."""
        self._number = 0

    # Admin calls

    def call(self) -> Exchange:
        """One admin call, or a look."""
        make = self.rng.choices(
            (self.load, self.unload, self.change, self.look, self.mistake), (5, 2, 4, 3, 1)
        )[0]
        return self._behave(make())

    def load(self) -> Exchange:
        """In any dialect."""
        make = self.rng.choice((self._put, self._put, self._vllm_load, self._sglang, self._sage))
        name, folder = self.rng.choice(self.names), self._folder()
        exchange = make(name, str(adapters_folder() / folder))
        exchange.kind, exchange.name = "load", name
        exchange.version = version_of(folder) if folder.startswith("good") else None
        return exchange

    def _folder(self) -> str:
        if self.rng.random() < 0.1:
            return self.rng.choice(BAD_FOLDERS)
        return f"good-{self.rng.randrange(self.options.folders)}"

    def _put(self, name: AdapterName, source: str) -> Exchange:
        rng = self.rng
        body: dict[str, Any] = {"source": source}
        if rng.random() < 0.3:
            body["pinned"] = rng.random() < 0.6
        if rng.random() < 0.2:
            body["load"] = False
        if rng.random() < 0.2:
            body["replace"] = False
        if rng.random() < 0.2:
            body["strategy"] = "drain-first"
        if rng.random() < 0.1:
            body["idle_ttl"] = rng.choice((2, 10))
        exchange = self._new("put", "PUT", f"/v1/adapters/{name}", body)
        return self._maybe_unwaited(self._maybe_matching(exchange, name))

    def _vllm_load(self, name: AdapterName, source: str) -> Exchange:
        body = {"lora_name": name, "lora_path": source}
        if self.rng.random() < 0.5:
            return self._new(
                "vllm load in place", "POST", "/v1/load_lora_adapter", body | {"load_inplace": True}
            )
        return self._new("vllm load", "POST", "/v1/load_lora_adapter", body)

    def _sglang(self, name: AdapterName, source: str) -> Exchange:
        body = {"lora_name": name, "lora_path": source, "pinned": self.rng.random() < 0.2}
        return self._new("sglang load", "POST", "/load_lora_adapter", body)

    def _sage(self, name: AdapterName, source: str) -> Exchange:
        body = {"name": name, "src": source, "load_inplace": self.rng.random() < 0.5}
        return self._new("sagemaker load", "POST", "/adapters", body)

    def unload(self) -> Exchange:
        """In any dialect."""
        name, way = self.rng.choice(self.names), self.rng.randrange(5)
        if way == 0:
            path, body = "/v1/unload_lora_adapter", {"lora_name": name}
            exchange = self._new("vllm unload", "POST", path, body)
        elif way == 1:
            path, body = "/unload_lora_adapter", {"lora_name": name}
            exchange = self._new("sglang unload", "POST", path, body)
        elif way == 2:
            exchange = self._new("sagemaker unload", "DELETE", f"/adapters/{name}")
        else:
            exchange = self._delete(name)
        exchange.kind, exchange.name = "unload", name
        return exchange

    def _delete(self, name: AdapterName) -> Exchange:
        exchange = self._new("delete", "DELETE", f"/v1/adapters/{name}")
        if self.rng.random() < 0.5:
            exchange.query = f"drain_timeout={self.rng.choice((0, 1, 5))}"
        if self.rng.random() < 0.3:
            exchange.query += "&purge=true"
        return self._maybe_unwaited(self._maybe_matching(exchange, name))

    def change(self) -> Exchange:
        """What changes an adapter that is there."""
        name, path = self.rng.choice(self.names), ""
        way = self.rng.randrange(6)
        if way < 2:
            body: dict[str, Any] = {"pinned": self.rng.random() < 0.5}
            if self.rng.random() < 0.3:
                body["labels"] = {"team": str(self.rng.randrange(3))}
            exchange = self._new("patch", "PATCH", f"/v1/adapters/{name}", body)
            exchange = self._maybe_matching(exchange, name)
        elif way < 4:
            exchange = self._new("rollback", "POST", f"/v1/adapters/{name}/rollback")
            exchange = self._maybe_unwaited(exchange)
        elif way == 4:
            exchange = self._new("prefetch", "POST", f"/v1/adapters/{name}/prefetch")
            exchange = self._maybe_unwaited(exchange)
        else:
            path = f"/v1/operations/{self.operation}"
            exchange = self._new("cancel", "DELETE", path)
        exchange.kind = "rollback" if exchange.route == "rollback" else "change"
        exchange.name = None if path else name
        return exchange

    def look(self) -> Exchange:
        """What changes nothing."""
        rng = self.rng
        name = rng.choice(self.names)
        route, method, path = rng.choice(
            (
                ("adapters", "GET", "/v1/adapters"),
                ("adapter", "GET", f"/v1/adapters/{name}"),
                ("models", "GET", "/v1/models"),
                ("operations", "GET", "/v1/operations"),
                ("operation", "GET", f"/v1/operations/{self.operation}"),
                ("events", "GET", "/v1/events"),
                ("metrics", "GET", "/metrics"),
                ("health", "GET", "/health"),
                ("ping", "GET", "/ping"),
                ("replicas", "GET", "/v1/replicas"),
                ("health generate", "GET", "/health_generate"),
                ("loads", "GET", "/v1/loads"),
                ("mistral list", "GET", "/v1/lora_adapters"),
                ("check", "POST", "/v1/adapters:check"),
                ("diff", "POST", "/v1/adapters:diff"),
            )
        )
        body = None
        if route == "check":
            body = {"source": str(adapters_folder() / self._folder())}
        elif route == "diff":
            body = {"a": name, "b": str(adapters_folder() / "good-0")}
        exchange = self._new(route, method, path, body)
        if route == "events":
            exchange.leaves_after_s = rng.uniform(0, 5)
        return exchange

    def mistake(self) -> Exchange:
        """What nobody should send."""
        rng = self.rng
        way = rng.randrange(5)
        if way == 0:
            exchange = self._new("bad json", "POST", "/v1/completions")
            exchange.body = b'{"model": "n0", "prompt": [1'
        elif way == 1:
            body = {"model": "n0", "prompt": [1], "max_tokens": -1}
            exchange = self._new("bad value", "POST", "/v1/completions", body)
        elif way == 2:
            exchange = self._new("bad method", "PATCH", "/v1/models")
        elif way == 3:
            exchange = self._new("bad route", "GET", "/v2/nothing")
        else:
            body = {"lora_name": BASE, "lora_path": "/"}
            exchange = self._new("bad name", "POST", "/v1/load_lora_adapter", body)
        return exchange

    # Requests for tokens

    def request(self) -> Exchange:
        """One request for tokens."""
        rng = self.rng
        chance = rng.random()
        name = None if chance < 0.1 else rng.choice(self.names)
        if 0.1 < chance < 0.15:
            name = AdapterName("nobody")
        return self._behave(self.ask(name))

    def ask(self, name: AdapterName | None) -> Exchange:
        """Of this adapter, or of the base."""
        rng = self.rng
        prompt = tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 20)))
        model, version = name or BASE, None
        if name in self.known and rng.random() < 0.1:
            version = rng.choice(self.known[name])
            model = f"{name}@{version[: rng.choice((12, 64))]}"
        stream = rng.random() < 0.6
        make = rng.choice((self._completion, self._completion, self._chat, self._generate))
        exchange = make(model, prompt, stream)
        exchange.kind, exchange.name, exchange.version = "infer", name, version
        exchange.prompt = () if exchange.route.startswith("chat") else prompt
        return exchange

    def _sampling(self) -> dict[str, Any]:
        return {
            "max_tokens": self.rng.randint(1, self.options.tokens_max),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def _completion(self, model: str, prompt: tuple[int, ...], stream: bool) -> Exchange:
        body = {"model": model, "prompt": list(prompt), "stream": stream, **self._sampling()}
        if self.rng.random() < 0.2:
            body["n"] = 2
        route = "completion stream" if stream else "completion"
        if self.rng.random() < 0.2:
            del body["model"]
            exchange = self._new(f"invocations {route}", "POST", "/invocations", body)
            exchange.headers = (("x-amzn-sagemaker-adapter-identifier", model),)
            if model == BASE:
                exchange.headers = ()
            return exchange
        return self._new(route, "POST", "/v1/completions", body)

    def _chat(self, model: str, prompt: tuple[int, ...], stream: bool) -> Exchange:
        messages = [{"role": "user", "content": f"question {prompt[0]}"}]
        body = {"model": model, "messages": messages, "stream": stream, **self._sampling()}
        route = "chat stream" if stream else "chat"
        return self._new(route, "POST", "/v1/chat/completions", body)

    def _generate(self, model: str, prompt: tuple[int, ...], stream: bool) -> Exchange:
        body: dict[str, Any] = {
            "input_ids": list(prompt),
            "stream": stream,
            "sampling_params": {
                "max_new_tokens": self.rng.randint(1, self.options.tokens_max),
                "temperature": 0,
                "ignore_eos": True,
            },
        }
        if model != BASE:
            body["lora_path"] = model
        return self._new("generate stream" if stream else "generate", "POST", "/generate", body)

    # How clients behave

    def _new(self, route: str, method: str, path: str, body: Any = None) -> Exchange:
        self._number += 1
        content = b"" if body is None else json.dumps(body).encode()
        return Exchange(self._number, route, method, path, content)

    def _maybe_matching(self, exchange: Exchange, name: AdapterName) -> Exchange:
        if name in self.known and self.rng.random() < 0.2:
            version = self.rng.choice(self.known[name])
            exchange.headers = (*exchange.headers, ("if-match", f'"{version}"'))
        return exchange

    def _maybe_unwaited(self, exchange: Exchange) -> Exchange:
        if self.rng.random() < 0.25:
            exchange.query += "&wait=false" if exchange.query else "wait=false"
            exchange.waits = False
        return exchange

    def _behave(self, exchange: Exchange) -> Exchange:
        rng = self.rng
        if self.machine.happens("client_leaves"):
            if rng.random() < 0.5:
                exchange.leaves_at_chunk = rng.randint(0, self.options.tokens_max)
            exchange.leaves_after_s = min(exchange.leaves_after_s, rng.uniform(0, 3))
            if rng.random() < 0.2:
                exchange.leaves_after_s = 0.0
        if self.machine.happens("client_slow"):
            exchange.read_s = rng.uniform(0, 3)
        if math.isinf(exchange.leaves_after_s) and exchange.route == "events":
            exchange.leaves_after_s = 1.0
        return exchange
