"""Parse and validate request bodies, or refuse them with the path of the first wrong value."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, TypeVar, get_args

from pydantic import Tag, ValidationError
from pydantic_core import ErrorDetails

from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.protocol.params.common import UNSUPPORTED, Body
from penstock.pipeline.protocol.params.json_body import read_json, shortened
from penstock.pipeline.protocol.params.request import CreateResponse, Envelope
from penstock.pipeline.protocol.params.tools import ToolParam

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
        raise _refusal(error) from error


def _check_names(parsed: Any, shape: type[Body]) -> None:
    """Raise `InvalidRequest` for a parameter of another API, and for the required one under a misspelt name.

    Other unknown names are logged and ignored.
    """
    if not isinstance(parsed, dict):
        return
    if foreign := shape.foreign.mistaken(parsed):
        raise _unknown(*foreign)
    known, required = shape.model_fields.keys(), shape.required
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


def _refusal(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    location, context = first["loc"], first.get("ctx", {})
    message = _JSON_WORDS.get(first["type"], first["msg"])
    if first["type"] == "union_tag_invalid":
        tag = shortened(context["tag"])
        name = context["discriminator"].strip("'")
        name = name if name.isidentifier() else "type"
        message, location = f"{name.title()} {tag!r} is none of {context['expected_tags']}", (*location, name)
    elif first["type"] == "union_tag_not_found":
        message, location = "Field required", (*location, "type")
    param = _path(location)
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


def _path(location: Sequence[int | str]) -> str | None:
    """Format a location as a client would write it, ``input[0].content``, without pydantic's union tags."""
    path = owner = ""
    for before, step in pairwise(("", *location)):
        if isinstance(step, int):
            path += f"[{step}]"
        elif not _is_tag(step, before, owner):
            path += f".{shortened(step)}" if path else step
            owner = step
    return path or None


def _is_tag(step: str, before: int | str, owner: str) -> bool:
    """Return True if a step is the branch of a union, not a key of the body, which may have the same name.

    ``owner`` is the key of the list or object that the step is in.
    """
    if step == "[key]":
        return before != "metadata"
    if isinstance(before, int):
        return owner == "tools" and step in _TOOL_TAGS
    return step in _TAGS.get(before, ())


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

_TEXT_OR_OTHER = frozenset({"as_text", "as_other"})
_TAGS = {
    **dict.fromkeys(("input", "stop", "conversation", "container", "system", "keep"), _TEXT_OR_OTHER),
    **dict.fromkeys(("require_approval", "json", "structural_tag"), _TEXT_OR_OTHER),
    "prompt": frozenset({"as_text", "as_texts", "as_tokens", "as_token_lists"}),
    "allowed_tools": frozenset({"as_list", "as_object"}),
    "tool_choice": frozenset({"as_text", "as_other", "function", "custom", "mcp", "allowed_tools", "other"}),
    "as_other": frozenset({"function", "custom", "allowed_tools"}),
    "response_format": frozenset({"text", "json_schema", "json_object"}),
    "format": frozenset({"text", "grammar", "json_schema", "json_object"}),
    "environment": frozenset({"local", "container_auto", "container_reference"}),
}
"""Pydantic's tags for the branches of open types, by the key before them in a location."""


_TOOL_TAGS = frozenset(
    tag.tag for branch in get_args(get_args(ToolParam)[0]) for tag in branch.__metadata__ if isinstance(tag, Tag)
)
"""Pydantic's tags for the elements of a list of tools, which follow an index."""
