"""Parse and validate request bodies, or refuse them with the path of the first wrong value."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.protocol.params.common import UNSUPPORTED, Body
from penstock.pipeline.protocol.params.json_body import read_json, shortened
from penstock.pipeline.protocol.params.request import CreateResponse, Envelope

logger = logging.getLogger(__name__)

AnyBody = TypeVar("AnyBody", bound=Body)

MOST_NAMES = 500
"""The most names in a body among which a misspelt one is searched for: a few milliseconds' work."""


def read_request(body: bytes, envelope: Envelope | None = None) -> CreateResponse:
    """Read the body of a request for a response, as `read_body` does."""
    request = read_body(body, CreateResponse)
    return request.inside(envelope) if envelope else request


def read_body(body: bytes, shape: type[AnyBody]) -> AnyBody:
    """Read a body as an object of the class ``shape``; raises `InvalidRequest` with the path of the first wrong value.

    This takes time in proportion to the body: a long one is read in a thread.
    """
    parsed = read_json(body)
    _check_names(parsed, shape)
    try:
        return shape.model_validate(parsed)
    except ValidationError as error:
        raise _refusal(error, parsed) from error


def _check_names(parsed: Any, shape: type[Body]) -> None:
    """Raise `InvalidRequest` for a parameter of another API, and for the required one under a misspelt name.

    Other unknown names are logged and ignored.
    """
    if not isinstance(parsed, dict):
        return
    if foreign := shape.foreign.mistaken(parsed):
        raise _unknown(*foreign)
    known, required = shape.model_fields.keys() | shape.framing, shape.required
    unknown = [name for name in parsed if name not in known]
    if required and required not in parsed and len(parsed) <= MOST_NAMES:
        for name in get_close_matches(required, unknown, n=1, cutoff=0.7):
            raise _unknown(name, required)
    if unknown and shape.model_config.get("extra") != "forbid":
        logger.info("Ignored unknown parameters: %s", shortened(", ".join(unknown)))


def _unknown(name: str, meant: str | None) -> InvalidRequest:
    has = f"this API has {meant!r}" if meant else "this API has nothing like it"
    message = f"There is no parameter {shortened(name)!r}: {has}."
    return InvalidRequest(message, param=shortened(name), code="unknown_parameter")


def _refusal(error: ValidationError, body: Any) -> InvalidRequest:
    first = error.errors(include_url=False)[0]
    context, missing = first.get("ctx", {}), ""
    message = _JSON_WORDS.get(first["type"], first["msg"])
    if first["type"] == "union_tag_invalid":
        tag = shortened(context["tag"])
        name = context["discriminator"].strip("'")
        missing = name if name.isidentifier() else "type"
        message = f"{missing.title()} {tag!r} is none of {context['expected_tags']}"
    elif first["type"] == "union_tag_not_found":
        message, missing = "Field required", "type"
    elif first["type"] == "missing":
        missing = str(first["loc"][-1])
    path = _path(first["loc"], body, first["input"])
    param = (f"{path}.{missing}" if missing else path).removeprefix(".") or None
    refused = UnsupportedParameter if first["type"] == UNSUPPORTED else InvalidRequest
    return refused(f"{message} (at {param})" if param else message, param=param, code=_code(first))


def _code(error: ErrorDetails) -> str:
    """Return OpenAI's code for one of pydantic's errors."""
    kind, context = error["type"], error.get("ctx", {})
    if kind.startswith(("greater_than", "less_than")):
        is_integer = all(isinstance(bound, int) for bound in context.values())
        bound = "below_min_value" if kind.startswith("greater_than") else "above_max_value"
        return f"{'integer' if is_integer else 'decimal'}_{bound}"
    return "invalid_type" if kind.endswith("_type") else _CODES.get(kind, "invalid_value")


def _path(location: Sequence[int | str], body: Any, wrong: Any) -> str:
    """Format the location of a ``wrong`` value as a client would write it, ``input[0].content``.

    A step may be the branch of a union instead of a key of the body, and have the name of a key.  So each step is read
    as both, and the path that leads to the wrong value is right.
    """
    places: dict[str, Any] = {"": body}
    for step in location:
        if isinstance(step, int):
            listed = {path: value for path, value in places.items() if isinstance(value, list) and step < len(value)}
            places = {f"{path}[{step}]": listed[path][step] if listed else None for path in listed or places}
        else:
            within = {path: value for path, value in places.items() if isinstance(value, dict) and step in value}
            places |= {f"{path}.{shortened(step)}": value[step] for path, value in within.items()}
    found = [path for path, value in places.items() if value is wrong]
    return max(found or places, key=len)


_JSON_WORDS = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "Input should be an object"),
    "list_type": "Input should be a valid array",
}
"""Pydantic's messages for JSON input, in place of its messages for Python values, which are validated here."""

_CODES = {
    "missing": "missing_required_parameter",
    "union_tag_not_found": "missing_required_parameter",
    "string_too_short": "empty_string",
    "string_too_long": "string_above_max_length",
    "too_short": "empty_array",
    "too_long": "array_above_max_length",
    "too_many_keys": "object_above_max_properties",
    "extra_forbidden": "unknown_parameter",
    UNSUPPORTED: UNSUPPORTED,
}
"""OpenAI's codes for wrong values, by pydantic's type of the error."""
