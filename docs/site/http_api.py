"""The pages of the HTTP API: its routes, with requests that a server has answered while the pages were made.

Routes, parameters, types and statuses come from the handlers and from ``/openapi.json``, meanings of fields from
`docs.site.meanings`, requests from `docs.site.http_examples`, and answers from `docs.site.http_run`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from http import HTTPStatus
from inspect import getdoc
from pathlib import Path
from typing import Any, TypeAlias

from aiohttp import hdrs, web
from pydantic import BaseModel

from docs.site.gather import anchor
from docs.site.http_examples import GROUPS, Group
from docs.site.http_run import LONGEST, Ran, example_server, indented, run_examples
from docs.site.meanings import is_refused, is_unused, meanings, own_first
from penstock.api.http.openapi import Operation, refusals_of
from penstock.pipeline.errors import StageError

Schema: TypeAlias = dict[str, Any]

ROUTES = "HTTP_API.md"
OBJECTS = "OBJECTS.md"
MIRRORED = "/openresponses"
"""The base of routes that are those of the Responses API once more."""

_EVENTS = "text/event-stream"
MOST_LINES = 60
"""Lines of an answer on a page."""
MOST_KINDS = 3
"""Objects that the type of a field names."""
FIRST, LAST = 3, 2
"""Events of a stream on a page, from its beginning and from its end."""
MOST_CHARACTERS = 1_200
"""Characters of a line on a page."""

NAMED = {"model": "The name of the model.", "name": "The name of the recording."}
"""The meanings of parameters of paths that are no ids."""


@dataclass(frozen=True)
class Api:
    """The content of the pages: the handlers of routes, ``/openapi.json``, and the examples that have run."""

    handlers: Mapping[str, Any]
    """The handlers by routes, such as ``GET /v1/files``."""
    document: Schema
    ran: Sequence[Ran]
    tables: dict[type[BaseModel], str] = field(default_factory=dict)
    """Links to the tables of bodies that pages have by now."""

    def operation(self, route: str) -> Operation | None:
        """Return the description of a route, if it has one."""
        described: Operation | None = getattr(self.handlers[route], "operation", None)
        return described

    def schema(self, route: str) -> Schema:
        """Return what ``/openapi.json`` says of a route; nothing if it leaves it out."""
        method, _, path = route.partition(" ")
        found: Schema = self.document["paths"].get(path, {}).get(method.lower(), {})
        return found

    @cached_property
    def echoed(self) -> Schema:
        """The parameters that a response has if its request leaves them out."""
        first = next(ran for ran in self.ran if ran.example.route == "POST /v1/responses")
        answer = json.loads(first.answer)
        return {name: value for name, value in answer.items() if name not in first.example.body and value is not None}


async def described(folder: Path) -> Api:
    """Run the examples on a server that keeps its files in a folder, and return what the pages say."""
    async with example_server(folder) as server:
        examples = [example for group in GROUPS for example in group.examples]
        ran = [each async for each in run_examples(server, examples)]
        return Api(handlers_of(server.app), await server.document(), ran)


def handlers_of(app: web.Application) -> dict[str, Any]:
    """Return the handlers of an application by their routes, without those that are there twice."""
    found = (
        (f"{each.method} {each.resource.canonical}", each.handler) for each in app.router.routes() if each.resource
    )
    return {
        route: handler
        for route, handler in found
        if not route.startswith(f"{hdrs.METH_HEAD} ") and f" {MIRRORED}/" not in route
    }


def pages(api: Api) -> Iterator[tuple[str, str]]:
    """Yield the pages by their names."""
    api = replace(api, tables={})
    yield ROUTES, _overview(api)
    for group in GROUPS:
        yield group.file, _page(group, api)
    yield OBJECTS, objects_page(api.document)


# The overview


def _overview(api: Api) -> str:
    rows = "".join(f"| [{group.title}]({group.file}) | {_links(group)} |\n" for group in GROUPS)
    mirrored = {path.removeprefix(MIRRORED) for path in api.document["paths"] if path.startswith(MIRRORED)}
    names = ", ".join(f"`{path}`" for path in sorted(mirrored))
    every = Operation(None, body=BaseModel)
    return f"""# HTTP API

Each route of penstock {api.document["info"]["version"]} has its parameters, a request to copy with the answer of a
server, and its statuses. Generated from the code and from `/openapi.json`, by which each server describes itself for
generators of clients. Ids and times are made short. [Objects]({OBJECTS}) have a page of their own.

| page | routes |
|---|---|
{rows}
## Keys

The requests have a key where a server with keys wants one. A server without keys ignores it. `PENSTOCK_API_KEY` is the
key of a client; `PENSTOCK_OPERATOR_KEY` and `PENSTOCK_METRICS_KEY` are [the operator's](KEYS.md).

## Statuses of every route

{_statuses_table(_rows(refusals_of("", every)))}
The first is for routes that want a key, and 408, 413, 429 and 503 are for those with a body.
[Errors](ERRORS.md) has their texts, causes and cures.

## Open Responses

Below `{MIRRORED}` these paths exist once more, with the events of the Open Responses specification: {names}.
"""


def _links(group: Group) -> str:
    return "<br>".join(f"[`{route}`]({group.file}#{anchor(route)})" for route in _routes(group))


def _routes(group: Group) -> list[str]:
    """Return the routes of a group in the order of their examples; one that another group has stays there."""
    before = {each.route for other in GROUPS[: GROUPS.index(group)] for each in other.examples}
    return [route for route in dict.fromkeys(each.route for each in group.examples) if route not in before]


# A page


def _page(group: Group, api: Api) -> str:
    routes = _routes(group)
    streams = [stream for route in routes if (stream := _stream(api.schema(route)))]
    events = f"## Events\n\n{''.join(f'* {kind}{chr(10)}' for kind in _kinds(streams[0]))}" if streams else ""
    return f"""# HTTP API: {group.title}

[The guide]({group.guide}) says what to know. [All routes]({ROUTES}) · [objects]({OBJECTS}) · [errors](ERRORS.md)

{"".join(_section(route, group, api) for route in routes)}{events}"""


def _section(route: str, group: Group, api: Api) -> str:
    handler, operation, schema = api.handlers[route], api.operation(route), api.schema(route)
    summary = _prose((getdoc(handler) or "").partition("\n")[0])
    examples = [_example(ran) for ran in _examples(group, api)[route]]
    parts = [f"## {_breakable(route)}\n\n{summary}\n\n", *examples, _parameters(route, schema)]
    if operation:
        parts += [_body(kind, model, route, group, api) for kind, model in operation.bodies.items()]
        parts += [_statuses(route, operation, schema)]
    return "".join(parts)


def _breakable(route: str) -> str:
    """Return a route as a heading whose lines end after a slash, and in no word."""
    return re.sub(r"(?<=\w)/(?=[\w{])|(?<=})/", "/<wbr>", route)


def _examples(group: Group, api: Api) -> dict[str, list[Ran]]:
    """Return the examples of a group by the route under which they stand: their own, or the one that needs them."""
    own, found, waiting = set(_routes(group)), dict[str, list[Ran]](), list[Ran]()
    for ran in api.ran:
        if not any(ran.example is each for each in group.examples):
            continue
        waiting.append(ran)
        if ran.example.route in own:
            found.setdefault(ran.example.route, []).extend(waiting)
            waiting = []
    return found


def _parameters(route: str, schema: Schema) -> str:
    path = [f"| `{name}` | path | {_meaning_in_path(name)} | string |\n" for name in re.findall(r"{(\w+)}", route)]
    query = [
        f"| `{each['name']}` | query | {_prose(each['description'])} "
        f"| {_kind(each['schema'])}{_by_default(each['schema'].get('default'))} |\n"
        for each in schema.get("parameters", ())
        if each["in"] == "query"
    ]
    rows = "".join([*path, *query])
    return f"| parameter | in | meaning | type |\n|---|---|---|---|\n{rows}\n" if rows else ""


def _meaning_in_path(name: str) -> str:
    return NAMED.get(name) or f"The id of the {name.removesuffix('_id').replace('_', ' ')}."


def _by_default(value: Any) -> str:
    return "" if value is None else f", by default `{json.dumps(value)}`"


def _body(kind: str, model: type[BaseModel], route: str, group: Group, api: Api) -> str:
    """Return the table of a body, with a link in place of the fields that an earlier table has."""
    known = next((base for base in model.__mro__ if base in api.tables), None)
    fields = own_first(model)
    if known:
        fields = {name: each for name, each in fields.items() if name not in known.model_fields}
    head = f"**Body** (`{kind}`)"
    if known:
        head += f": that of {api.tables[known]}" + (", and:" if fields else ".")
    elif not fields:
        return f"{head}: {_prose(getdoc(model) or '')}\n\n"
    if model not in api.tables:
        api.tables[model] = f"[{route}]({group.file}#{anchor(route)})"
    content = api.schema(route).get("requestBody", {}).get("content", {}).get(kind, {})
    properties = _resolved(content.get("schema", {}), api.document).get("properties", {})
    meant = meanings(model)
    rows = "".join(
        f"| `{name}`{' *required*' if each.is_required() else ''} | {_prose(meant[name])} "
        f"| {_kind(properties.get(name, {}), MOST_KINDS)}{_by_default(_default_of(name, each.default, group, api))} |\n"
        for name, each in fields.items()
        if not is_refused(each) and not is_unused(each)
    )
    table = f"| field | meaning | type |\n|---|---|---|\n{rows}\n" if rows else ""
    refused = _named("Refused unless null", fields, is_refused)
    unused = _named("Accepted without an effect", fields, is_unused)
    return f"{head}\n\n{table}{refused}{unused}"


def _resolved(schema: Schema, described: Schema) -> Schema:
    name = schema.get("$ref", "").rpartition("/")[2]
    found: Schema = described["components"]["schemas"][name] if name else schema
    return found


def _default_of(name: str, declared: Any, group: Group, api: Api) -> Any:
    """Return the default of a field: that of its declaration, or what a response has without it."""
    if isinstance(declared, bool | int | float | str):
        return declared
    return api.echoed.get(name) if group is GROUPS[0] else None


def _named(what: str, fields: Mapping[str, Any], holds: Any) -> str:
    names = [f"`{name}`" for name, each in fields.items() if holds(each)]
    return f"{what}: {', '.join(names)}.\n\n" if names else ""


def _example(ran: Ran) -> str:
    title = f"*{ran.example.title}*\n\n" if ran.example.title else ""
    status = f"{ran.status} {HTTPStatus(ran.status).phrase}"
    kind = f", `{ran.kind}`" if ran.kind else ""
    language, text = shown(ran)
    return f"{title}```sh\n{ran.request.command}\n```\n\n{status}{kind}:\n\n````{language}\n{text}\n````\n\n"


def shown(ran: Ran) -> tuple[str, str]:
    """Return an answer as a page has it, after the name of its language: long ones lack their middle."""
    if ran.kind == "application/json":
        return "json", _shortened(json.loads(ran.answer))
    if ran.kind == _EVENTS or ran.status == HTTPStatus.SWITCHING_PROTOCOLS:
        between = "\n\n" if ran.kind else "\n"
        events = ran.answer.strip().split(between)
        cut = len(events) - FIRST - LAST
        if cut > 0:
            events[FIRST:-LAST] = [f"... {cut} more events"]
        return "text", "\n".join(_cut(line) for line in between.join(events).splitlines())
    lines = [line for line in ran.answer.strip().splitlines() if ran.example.shows in line]
    most = MOST_LINES if ran.kind == "text/plain" and not ran.example.shows else 5
    return "html" if ran.kind == "text/html" else "text", "\n".join(
        [*map(_cut, lines[:most]), *["..."] * (len(lines) > most)]
    )


def _cut(line: str) -> str:
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}..."


def _shortened(value: Any) -> str:
    """Return JSON; if it has too many lines, its innermost values are left out."""
    texts = (indented(_as_deep(value, depth)) for depth in range(12, 0, -1))
    return next((text for text in texts if text.count("\n") < MOST_LINES), indented(_as_deep(value, 1)))


def _as_deep(value: Any, depth: int) -> Any:
    if not isinstance(value, dict | list) or not value:
        return value
    if depth == 0 and len(json.dumps(value)) > LONGEST:
        return {"...": "..."} if isinstance(value, dict) else ["..."]
    if isinstance(value, list):
        inner = [_as_deep(each, depth - 1) for each in value]
        return inner if len(inner) <= 3 else [*inner[:2], "..."]
    kept = list(value.items())
    most = 100 if depth > 1 else 8
    return {name: _as_deep(each, depth - 1) for name, each in kept[:most]} | ({"...": "..."} if kept[most:] else {})


# Statuses


def _statuses(route: str, operation: Operation, schema: Schema) -> str:
    answers = {HTTPStatus(status): _answer(schema["responses"].get(str(status), {})) for status in operation.statuses}
    own = _rows(operation.refusals)
    every = {error.status for error in {*refusals_of(route.partition(" ")[2], operation)} - {*operation.refusals}}
    also = ", ".join(str(int(status)) for status in sorted(every))
    link = f"[those of every route]({ROUTES}#{anchor('Statuses of every route')})"
    return f"{_statuses_table(answers | own)}\nAlso {link}: {also}.\n\n"


def _statuses_table(rows: Mapping[int, str]) -> str:
    lines = "".join(f"| {int(status)} | {cause} |\n" for status, cause in sorted(rows.items()))
    return f"| status | |\n|---|---|\n{lines}"


def _rows(refusals: Iterable[type[StageError]]) -> dict[int, str]:
    """Return what causes each status: the errors that have it."""
    causes: dict[int, list[str]] = {}
    for error in dict.fromkeys(refusals):
        name = (
            f"`{error.__name__}`"
            if error is StageError
            else f"[`{error.__name__}`](ERRORS.md#{anchor(error.__name__)})"
        )
        cause = _prose((getdoc(error) or "").partition("\n")[0])
        causes.setdefault(error.status, []).append(f"{cause} {name}")
    return {status: "<br>".join(each) for status, each in causes.items()}


def _answer(answer: Schema) -> str:
    forms = [
        "the events of the stream"
        if form == _EVENTS
        else _kind(each.get("schema", {}))
        if form == "application/json"
        else f"`{form}`"
        for form, each in answer.get("content", {}).items()
    ]
    return "; ".join(forms)


def _stream(schema: Schema) -> Schema | None:
    """Return the schema of the events that an operation streams, if they have types."""
    contents = (answer.get("content", {}) for answer in schema.get("responses", {}).values())
    streams = (content.get(_EVENTS, {}).get("schema", {}) for content in contents)
    return next((stream for stream in streams if stream and "type" not in stream), None)


# Objects


def objects_page(described: Schema) -> str:
    """Return the page of the objects in bodies and answers."""
    schemas: dict[str, Schema] = described["components"]["schemas"]
    given = {name: schema for name, schema in schemas.items() if name.endswith("Param")}
    answered = {name: schema for name, schema in schemas.items() if name not in given}
    return f"""# Objects of the HTTP API

Objects of [the routes]({ROUTES}), in alphabetical order. An object that a client sends has a name that ends in `Param`:
it may differ from the one that an answer has.

## Objects in answers

{"".join(_object(name, schema) for name, schema in _in_order(answered))}
## Objects in requests

{"".join(_object(name, schema) for name, schema in _in_order(given))}"""


def _in_order(schemas: dict[str, Schema]) -> Iterable[tuple[str, Schema]]:
    return sorted(schemas.items(), key=lambda pair: _short(pair[0]))


def _object(name: str, schema: Schema) -> str:
    required = schema.get("required", ())
    rows = [
        f"| `{field}`{'' if field in required else ' ?'} | {_kind(each)} | {_prose(each.get('description', ''))} |\n"
        for field, each in schema.get("properties", {}).items()
    ]
    table = f"| field | type | |\n|---|---|---|\n{''.join(rows)}\n" if rows else f"{_kind(schema)}\n\n"
    return f"### {_short(name)}\n\n{_prose(schema.get('description', ''))}\n\n{table}"


def _short(name: str) -> str:
    """Return a name without the module that makes it unique, but for the folder of the module."""
    parts = re.split(r"\.|__", name)
    return name if len(parts) == 1 else f"{parts[-1]} of {parts[-3]}"


def _kind(schema: Schema, most: int = 0) -> str:
    """Return the type of a schema as a cell of a table; with ``most``, without null and with that many objects."""
    kinds = list(dict.fromkeys(_kinds(schema, most)))
    if not most:
        return " or ".join(kinds)
    objects = [kind for kind in kinds if kind.startswith("[")]
    others = objects[most:] if len(objects) > most + 1 else []
    shown = [kind for kind in kinds if kind not in others and kind != "null"]
    return " or ".join([*shown, *([f"{len(others)} others"] if others else [])])


def _kinds(schema: Schema, most: int = 0) -> Iterator[str]:
    match schema:
        case {"$ref": ref}:
            name = _short(ref.rpartition("/")[2])
            yield f"[{name}]({OBJECTS}#{anchor(name)})"
        case {"anyOf": kinds} | {"oneOf": kinds} | {"allOf": kinds}:
            for kind in kinds:
                yield from _kinds(kind, most)
        case {"const": value}:
            yield _value(value)
        case {"enum": values}:
            yield from map(_value, values)
        case {"type": "array", "items": dict(items)}:
            yield f"list of {_kind(items, most)}"
        case {"type": "object", "additionalProperties": dict(values)} if values:
            yield f"object of {_kind(values, most)}"
        case {"type": list(names)}:
            yield from map(str, names)
        case {"type": name}:
            yield str(name)
        case _:
            yield "any"


def _value(value: Any) -> str:
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def _prose(text: str) -> str:
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")
