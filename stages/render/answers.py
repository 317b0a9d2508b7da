"""The constraint on the answer: the request's ``text.format``, or its ``structured_outputs``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from penstock.pipeline.errors import InvalidRequest
from penstock.stages.render.constraint import Unenforceable, escaped, json_body, lark_body, regex_body, schema_problem

STRUCTURAL_TAG = "structural_tag"
"""The only kind of ``structured_outputs`` that constrains the whole turn."""

_ANY_OBJECT = json_body({"type": "object"})


@dataclass(frozen=True)
class Answer:
    """A constraint on the answer: the body of a grammar rule, and the request parameter that sets it."""

    body: str
    param: str

    @property
    def is_json(self) -> bool:
        """True if the answer must be JSON that matches a schema."""
        return self.body.startswith("%json")

    def refuse_wrong_schema(self) -> None:
        """Raise `InvalidRequest` if the schema by itself is wrong."""
        if self.is_json and (reason := schema_problem(self.body)):
            raise unenforceable(self.param, reason)


def answer(text_format: Mapping[str, Any], structured: Mapping[str, Any]) -> Answer | None:
    """Return the constraint on the answer; None if there is none.

    A structural tag is none, since it constrains the whole turn.  Raises `InvalidRequest` for a constraint that cannot
    be enforced.
    """
    kind = text_format.get("type")
    if kind == "json_object":
        return Answer(_ANY_OBJECT, "text.format")
    if kind == "json_schema":
        schema, strict = text_format.get("schema") or {}, text_format.get("strict") is True
        return _answer("text.format.schema", lambda: json_body(schema, lenient=not strict))
    key = next((name for name in _STRUCTURED if name in structured), None)
    return None if key is None else _answer(f"structured_outputs.{key}", lambda: _STRUCTURED[key](structured[key]))


def as_lark(definition: str) -> str:
    """Return a grammar in Lark; a definition with ``::=`` is GBNF and is converted.  Raises `Unenforceable`."""
    if "::=" not in definition:
        return definition
    try:
        return any_to_lark(definition).removeprefix("%llguidance {}")
    except Exception as error:  # llguidance raises plain `Exception` for some mistakes
        raise Unenforceable(str(error)) from error


def unenforceable(param: str, reason: str) -> InvalidRequest:
    """Return the error for a parameter that cannot be enforced."""
    what = "schema" if param == "text.format.schema" else param.rpartition(".")[2]
    return InvalidRequest(f"This {what} cannot be enforced: {reason}.", param=param)


def _answer(param: str, body: Callable[[], str]) -> Answer:
    try:
        return Answer(body(), param)
    except Unenforceable as error:
        raise unenforceable(param, str(error)) from error


def _json(schema: str | Mapping[str, Any]) -> str:
    try:
        read = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise Unenforceable("it is no JSON") from error
    if not isinstance(read, Mapping):
        raise Unenforceable("a schema is an object")
    return json_body(read)


def _choice(texts: list[str]) -> str:
    return regex_body("|".join(map(escaped, texts)))


_STRUCTURED: Mapping[str, Callable[[Any], str]] = {
    "json": _json,
    "json_object": lambda _: _ANY_OBJECT,
    "regex": regex_body,
    "choice": _choice,
    "grammar": lambda definition: lark_body(as_lark(definition)),
}
"""For each kind of ``structured_outputs``, the function that makes the body of a rule."""
