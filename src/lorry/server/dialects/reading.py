"""How dialects read what FastAPI does not read for them: SageMaker's two headers, which the
container standard and DJL Serving share, and fields that arrive in one of several places."""

from typing import Annotated, Any, TypeVar

from fastapi import Header
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, ValidationError

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
