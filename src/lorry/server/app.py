"""The app: all routes in one list, the supervisor's life as its lifespan, the gate in front."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from importlib.metadata import version
from typing import Any

import anyio
from fastapi import APIRouter, FastAPI
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.routing import BaseRoute

from lorry.server import (
    adapters,
    catalogue,
    chat,
    check,
    completions,
    diff,
    errors,
    health,
    models,
    operations,
    tokenization,
    uploads,
)
from lorry.server.dialects import (
    djl,
    mistralrs,
    sagemaker,
    sglang,
    sglang_generate,
    sglang_tensors,
    vllm,
)
from lorry.server.gate import Gate
from lorry.server.openapi import describe
from lorry.server.service import Service
from lorry.server.settings import ServerSettings
from lorry.supervisor import Supervisor
from lorry.telemetry import Telemetry, log_changes
from lorry.tokens import Tokenizer


class AnyPath(PathConvertor):
    """A path with line ends too: such a name is refused in words, and in its dialect's."""

    regex = "(?s:.*)"


register_url_convertor("path", AnyPath())

Route = tuple[str, str, Callable[..., Any]]

# All endpoints are coroutines: FastAPI runs plain functions in threads, where the supervisor's
# state must not be touched. `:path` because names may hold "/". Only POST has parts below a name,
# and its last part is always the verb; and PUT has those of uploads, which therefore come first.
ROUTES: tuple[Route, ...] = (
    ("GET", "/health", health.health),
    ("GET", "/ready", health.ready),
    ("GET", "/version", health.show_version),
    ("GET", "/metrics", health.metrics),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/{model:path}", models.show_model),
    ("POST", "/v1/completions", completions.create_completion),
    ("POST", "/v1/chat/completions", chat.create_chat_completion),
    ("POST", "/tokenize", tokenization.tokenize),
    ("POST", "/detokenize", tokenization.detokenize),
    ("GET", "/v1/adapters", adapters.list_adapters),
    ("POST", "/v1/adapters:diff", diff.diff_adapters),
    ("POST", "/v1/adapters:check", check.check_adapter),
    ("GET", "/v1/adapters/{name:path}", adapters.show_adapter),
    ("PUT", "/v1/adapters/{name:path}", adapters.put_adapter),
    ("PATCH", "/v1/adapters/{name:path}", adapters.patch_adapter),
    ("DELETE", "/v1/adapters/{name:path}", adapters.delete_adapter),
    ("POST", "/v1/adapters/{name:path}/rollback", adapters.roll_back),
    ("POST", "/v1/adapters/{name:path}/prefetch", adapters.prefetch),
    ("GET", "/v1/operations", operations.list_operations),
    ("GET", "/v1/operations/{operation}", operations.show_operation),
    ("DELETE", "/v1/operations/{operation}", operations.cancel_operation),
    ("GET", "/v1/events", operations.follow_events),
    ("GET", "/v1/replicas", health.replicas),
    ("GET", "/v1/errors", catalogue.list_errors),
    ("GET", "/v1/errors/{code}", catalogue.show_error),
)

DIALECTS = (
    vllm.router,
    mistralrs.router,
    sagemaker.router,
    djl.router,
    sglang.admin_router,
    sglang.state_router,
    sglang_generate.router,
    sglang_tensors.router,
)


def build_app(
    supervisor: Supervisor,
    settings: ServerSettings,
    tokenizer: Tokenizer | None,
    *,
    eos_token_ids: tuple[int, ...] | None = None,
) -> FastAPI:
    """The whole HTTP side. `eos_token_ids` are the tokenizer's unless given."""
    if eos_token_ids is None:
        eos_token_ids = tokenizer.eos_token_ids if tokenizer else ()
    telemetry = Telemetry(settings.base_name)
    service = Service(supervisor, settings, tokenizer, eos_token_ids, telemetry)
    app = FastAPI(
        title="Lorry",
        version=version("lorry"),
        lifespan=_lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.router.routes.extend(_routes())
    describe(app)
    errors.install(app)
    app.add_middleware(Gate, settings=settings, shutdown=service.shutdown)
    return app


@cache
def _routes() -> list[BaseRoute]:
    """All routes, made once: they know nothing of the app that they are in."""
    router = APIRouter()
    router.include_router(uploads.router)
    for method, path, endpoint in ROUTES:
        router.add_api_route(path, endpoint, methods=[method], response_model=None)
    for dialect in DIALECTS:
        router.include_router(dialect)
    return router.routes


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    async with service.supervisor, anyio.create_task_group() as group:
        group.start_soon(log_changes, service.supervisor.events())
        yield
        group.cancel_scope.cancel()
