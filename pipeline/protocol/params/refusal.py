"""The refusal of a body: what pydantic found wrong in it, in the words, the codes and the paths of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.protocol.params.json_body import shortened

UNSUPPORTED = "unsupported_parameter"
"""The type of the error, and OpenAI's code, for a field that this server refuses."""


def refusal_of(error: ValidationError, body: Any) -> InvalidRequest:
    """Return the error for a body of which pydantic has refused a value: the first one, by its path."""
    first = error.errors(include_url=False)[0]
    context, missing = first.get("ctx", {}), ""
    message = _JSON_WORDS.get(
        first["type"], first["msg"].replace(" after validation", "").replace("List should", "This should")
    )
    if first["type"] == "union_tag_invalid":
        tag = shortened(context["tag"])
        name = context["discriminator"].strip("'")
        missing = name if name.isidentifier() else "type"
        message = f"{missing.title()} {tag!r} is none of {context['expected_tags']}"
    elif first["type"] == "union_tag_not_found":
        message, missing = "Field required", "type"
    elif first["type"] == "missing":
        missing = str(first["loc"][-1])
    elif "missing" in context:  # of an object that needs one of several
        missing = context["missing"]
    path = _path(first["loc"], body, first["input"])
    param = (f"{path}.{missing}" if missing else path).removeprefix(".") or None
    refused = UnsupportedParameter if first["type"] == UNSUPPORTED else InvalidRequest
    return refused(f"{message} (at {param})" if param else message, param=param, code=_code(first))


def _code(error: ErrorDetails) -> str:
    """Return OpenAI's code for one of pydantic's errors."""
    kind, context = error["type"], error.get("ctx", {})
    if "code" in context:  # of a struct
        return str(context["code"])
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
    reached: dict[str, Any] = {"": body}
    for step in location:
        if isinstance(step, int):
            listed = {path: value for path, value in reached.items() if isinstance(value, list) and step < len(value)}
            reached = {f"{path}[{step}]": listed[path][step] if listed else None for path in listed or reached}
        else:
            within = {path: value for path, value in reached.items() if isinstance(value, dict) and step in value}
            reached |= {f"{path}.{shortened(step)}": value[step] for path, value in within.items()}
    found = [path for path, value in reached.items() if value is wrong]
    return max(found or reached, key=len)


_JSON_WORDS = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "Input should be a valid object"),
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
