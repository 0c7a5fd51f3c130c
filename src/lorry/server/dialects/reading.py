"""What the dialects share: routes that answer every error in their own shape, and reading what
FastAPI does not read for them: SageMaker's two headers, which the
container standard and DJL Serving share, and fields that arrive in one of several places."""

from abc import abstractmethod
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from lorry.errors import LorryError
from lorry.server.errors import translated

Model = TypeVar("Model", bound=BaseModel)


def _utf8(value: str | None) -> str | None:
    """Headers come decoded as Latin-1, but adapters have names in any script."""
    try:
        return None if value is None else value.encode("latin-1").decode()
    except UnicodeError:
        return value


Alias = Annotated[
    str | None,
    Header(alias="X-Amzn-SageMaker-Adapter-Alias", description="the name to show in messages"),
    AfterValidator(_utf8),
]
Identifier = Annotated[
    str | None,
    Header(alias="X-Amzn-SageMaker-Adapter-Identifier", description="the adapter to answer with"),
    AfterValidator(_utf8),
]


def parsed(model: type[Model], value: Any, place: str) -> Model:
    """`value` as `model`. Raises `RequestValidationError`, as FastAPI does for fields that it reads
    itself; `place` is where they were: "body" or "query"."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = [{**one, "loc": (place, *one["loc"])} for one in error.errors()]
        raise RequestValidationError(problems) from error


ANSWERED = (LorryError, RequestValidationError, HTTPException)
"""What a route raises that is an answer: ours, a body with wrong fields, a body that is no JSON."""


class ForeignRoute(APIRoute):
    """A route whose errors have the shape of another server."""

    @staticmethod
    @abstractmethod
    async def refusal(request: Request, error: LorryError, raised: Exception) -> Response:
        """The answer for an error; `raised` is what it was before it became ours."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler, with errors translated."""
        handle = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                return await handle(request)
            except ANSWERED as error:
                return await self.refusal(request, translated(error, request), error)

        return answered
