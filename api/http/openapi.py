"""``/openapi.json``: OpenAPI 3.1, generated from the routes and from the types that the code itself reads and writes.

Pydantic describes the bodies of requests, msgspec the items in them, the answers and events.  The names of schemas in
requests end in ``Param``, because an object may have one form in a request and another in an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from inspect import getdoc
from operator import or_
from typing import Any, TypeAlias, TypeVar

import msgspec
from aiohttp import hdrs, web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from penstock.api.http import request_body
from penstock.api.http.auth import OPEN
from penstock.api.http.bodies import OpenApi
from penstock.api.http.conventions import OPENAI, Conventions
from penstock.api.http.query import Parameter
from penstock.api.http.wire import Wire
from penstock.pipeline.distribution import own_version
from penstock.pipeline.errors import ForeignOrigin, LimitReached, StageError, Unauthorized, UnsupportedMediaType
from penstock.pipeline.protocol.params.items import MODELS, item_schemas
from penstock.pipeline.protocol.params.structs import ListOf, schemas

Schema: TypeAlias = dict[str, Any]
AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])

JSON = "application/json"
FORM = "multipart/form-data"

_REF = "#/components/schemas/"

_OF_A_BETA = "beta"
"""The parameter that Anthropic's SDK adds to the paths of its betas."""


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    ``answer`` is the type of its JSON answer, or None if it only answers with errors, and ``statuses`` are the
    statuses of that answer.  ``body`` is the model that validates the body of a request.  ``refusals`` are the errors
    that it may answer with, besides an internal one and those of the body.  With ``streams``, it answers with events on
    request.  ``body_type`` and ``answer_type`` are the media types.  ``form`` is the model of a form that may come in
    the place of the body.
    """

    answer: Any
    body: Any = None
    query: tuple[Parameter, ...] = ()
    refusals: tuple[type[StageError], ...] = ()
    streams: bool = False
    statuses: tuple[int, ...] = (200,)
    body_type: str = JSON
    answer_type: str = JSON
    form: Any = None

    @property
    def bodies(self) -> dict[str, Any]:
        """The models of the bodies that it takes, by their media types."""
        given = {self.body_type: self.body} if self.body else {}
        return given | ({FORM: self.form} if self.form else {})


def operation(described: Operation) -> Callable[[AnyHandler], AnyHandler]:
    """Attach the description of an operation to its handler."""

    def describe(handler: AnyHandler) -> AnyHandler:
        handler.__dict__["operation"] = described
        return handler

    return describe


def _called(request: web.Request) -> Operation | None:
    """Return the operation that a request calls, if its handler has one."""
    return getattr(request.match_info.handler, "operation", None)


def takes_body(request: web.Request) -> bool:
    """Return True if a request calls an operation that reads a body."""
    described = _called(request)
    return described is not None and described.body is not None


def unknown_parameters(request: web.Request) -> list[str]:
    """Return the names in the query of a request that its operation does not have."""
    described = _called(request)
    if described is None or not request.query_string:
        return []
    known = {_OF_A_BETA, *(parameter.name for parameter in described.query)}
    return [name for name in request.query if name.partition("[")[0] not in known]


def body_types(request: web.Request) -> Sequence[str]:
    """Return the media types that the body of a request may have, the usual one first."""
    described = _called(request)
    return (described.body_type, *described.bodies) if described else (JSON,)


Spoken: TypeAlias = Mapping[str, tuple[Wire, Conventions]]
"""The form of the answers at each path that belongs to a dialect, and its conventions."""


def describe(routes: Iterable[web.RouteDef], spoken: Spoken) -> OpenApi:
    """Describe the routes."""
    described: list[tuple[web.RouteDef, Operation]] = [
        (route, operation) for route in routes if (operation := getattr(route.handler, "operation", None))
    ]
    schemas = _Schemas([operation for _, operation in described], spoken)
    paths: dict[str, Schema] = {}
    for route, operation in described:
        path = re.sub(r":[^}]+", "", route.path)  # OpenAPI knows no patterns for path parameters
        wire, conventions = spoken.get(route.path, (None, OPENAI))
        operation_object = _described(route, path, operation, schemas, conventions)
        if operation.streams and wire:
            stream = {"schema": schemas.streams[wire.events]}
            operation_object["responses"]["200"]["content"][wire.content_type] = stream
        paths.setdefault(path, {})[route.method.lower()] = operation_object
    info = {
        "title": "penstock",
        "version": own_version(),
        "summary": "Responses, Chat Completions, Completions and Messages over vLLM",
    }
    headers = [name for _, conventions in spoken.values() for name in conventions.key_headers]
    keys = {_key_name(name): _key_scheme(name) for name in (*OPENAI.key_headers, *headers)}
    return OpenApi(
        "3.1.0",
        info=info,
        servers=({"url": "/"},),
        paths=paths,
        components={"schemas": schemas.components, "securitySchemes": keys},
    )


def _key_name(header: str) -> str:
    return "key" if header == hdrs.AUTHORIZATION else header


def _key_scheme(header: str) -> Schema:
    if header == hdrs.AUTHORIZATION:
        return {"type": "http", "scheme": "bearer"}
    return {"type": "apiKey", "in": "header", "name": header}


class _Schemas:
    """The schemas of all types that the operations refer to."""

    def __init__(self, operations: Iterable[Operation], spoken: Spoken) -> None:
        errors = (OPENAI.error_body, *(conventions.error_body for _, conventions in spoken.values()))
        given = (operation.answer for operation in operations if operation.answer)
        answers = list(dict.fromkeys((*given, *errors)))
        events = list(dict.fromkeys(wire.events for wire, _ in spoken.values()))
        unions = [_union(kinds) for kinds in events]
        answered, outgoing = msgspec.json.schema_components([*answers, *unions], ref_template=f"{_REF}{{name}}")
        self.answers: dict[Any, Schema] = dict(zip(answers, answered, strict=False))
        self.streams: dict[frozenset[Any], Schema] = dict(zip(events, answered[len(answers) :], strict=True))
        bodies = dict.fromkeys(body for operation in operations for body in operation.bodies.values())
        named, incoming = models_json_schema(
            [(model, "validation") for model in (*bodies, *MODELS)], ref_template=f"{_REF}{{model}}Param"
        )
        self.bodies: dict[Any, Schema] = {body: schema for (body, _), schema in named.items()}
        described = incoming["$defs"] | _structs(bodies) | item_schemas()
        params = {_loosened(f"{name}Param"): _loosened(schema) for name, schema in described.items()}
        self.components: Schema = {name: _all_there(schema) for name, schema in outgoing.items()} | params


def _structs(bodies: Iterable[type[BaseModel]]) -> dict[str, Schema]:
    """Return the schemas of the structs in the lists of bodies, by name; all bodies share the names."""
    fields = [field for body in bodies for field in body.model_fields.values()]
    kinds = dict.fromkeys(mark.kind for field in fields for mark in field.metadata if isinstance(mark, ListOf))
    described: dict[str, Schema] = {}
    for kind in kinds:
        for name, schema in schemas(kind)[1].items():
            if described.setdefault(name, schema) != schema:
                raise ValueError(f"two objects in bodies have the name {name}")
    return described


def _union(kinds: frozenset[Any]) -> Any:
    """Return the union of the types of events; any value for several types that no tag tells apart."""
    has_tags = all(issubclass(kind, msgspec.Struct) and kind.__struct_config__.tag for kind in kinds)
    return reduce(or_, sorted(kinds, key=lambda kind: kind.__name__)) if has_tags or len(kinds) == 1 else Any


def _all_there(schema: Schema) -> Schema:
    """Mark fields with defaults as required: msgspec always writes them, and only leaves out unset fields."""
    if "properties" not in schema:
        return schema
    required = {name for name, value in schema["properties"].items() if "default" in value}
    return schema | {"required": sorted(required.union(schema.get("required", ())))}


def _loosened(schema: Any) -> Any:
    """Replace ``oneOf`` by ``anyOf`` in a union without a discriminating field, and let names end in one ``Param``.

    Pydantic writes ``oneOf`` for a union that a function discriminates, but its alternatives need not exclude each
    other.
    """
    match schema:
        case str():
            return schema.removesuffix("Param") if schema.endswith("ParamParam") else schema
        case dict():
            loosened = {key: _loosened(value) for key, value in schema.items()}
            if "oneOf" in loosened and "discriminator" not in loosened:
                loosened["anyOf"] = loosened.pop("oneOf")
            return loosened
        case list():
            return [_loosened(value) for value in schema]
        case _:
            return schema


def _described(
    route: web.RouteDef, path: str, operation: Operation, schemas: _Schemas, conventions: Conventions
) -> Schema:
    operation_object: Schema = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{path}").strip("_"),
        "summary": (getdoc(route.handler) or "").partition("\n")[0],
        "parameters": list(_parameters(path, operation)),
        "responses": {},
    }
    if operation.body:
        operation_object["requestBody"] = {
            "required": True,
            "content": {kind: {"schema": schemas.bodies[body]} for kind, body in operation.bodies.items()},
        }
    if operation.answer:
        operation_object["responses"] = {
            str(status): {
                "description": "OK" if status == 200 else "Not OK",
                "content": {operation.answer_type: {"schema": schemas.answers[operation.answer]}},
            }
            for status in operation.statuses
        }
    if path not in OPEN:
        operation_object["security"] = [
            {},
            *({_key_name(name): []} for name in conventions.key_headers),
        ]  # the empty entry: a server without keys needs none
    for status, reasons in sorted(_meanings(refusals_of(path, operation)).items()):
        operation_object["responses"][str(status)] = {
            "description": reasons,
            "content": {JSON: {"schema": schemas.answers[conventions.error_body]}},
        }
    return operation_object


def refusals_of(path: str, operation: Operation) -> tuple[type[StageError], ...]:
    """Return the errors that an operation at a path may answer with."""
    refusals: tuple[type[StageError], ...] = (*operation.refusals, ForeignOrigin, UnsupportedMediaType, StageError)
    if operation.body:
        refusals = (*request_body.REFUSALS, LimitReached, *refusals)
    return refusals if path in OPEN else (Unauthorized, *refusals)


def _parameters(path: str, operation: Operation) -> Iterator[Schema]:
    for name in re.findall(r"{(\w+)}", path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    for parameter in operation.query:
        yield {
            "name": parameter.name,
            "in": "query",
            "description": parameter.meaning,
            "schema": parameter.schema,
        }


def _meanings(refusals: Iterable[type[StageError]]) -> dict[int, str]:
    """Describe each error status by the docstrings of the errors that have it."""
    meanings: dict[int, list[str]] = {}
    for error in refusals:
        meanings.setdefault(error.status, []).append((getdoc(error) or "").partition("\n")[0])
    return {status: " ".join(reasons) for status, reasons in meanings.items()}
