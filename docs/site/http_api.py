"""The pages of the HTTP API, from the ``/openapi.json`` of a server that runs for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

from aiohttp import ClientSession, web

from docs.site.gather import ROOT, anchor
from penstock.api.cli.command_line import read_settings
from penstock.server import application

Schema: TypeAlias = dict[str, Any]

ROUTES = "HTTP_API.md"
OBJECTS = "OBJECTS.md"
MIRRORED = "/openresponses"
"""The base of routes that are those of the Responses API once more."""

_EVENTS = "text/event-stream"

_GROUPS = {
    "responses": "Responses",
    "conversations": "Conversations",
    "chat": "Chat Completions",
    "completions": "Completions",
    "messages": "Messages",
    "models": "Models",
    "embeddings": "Embeddings and rankings",
    "rerank": "Embeddings and rankings",
    "score": "Embeddings and rankings",
    "tokenize": "Tokens",
    "detokenize": "Tokens",
}
"""The headings of routes by the first part of their path after the version; any other has that part as its heading."""

_HOUSE = ("health", "ready", "ping", "version", "load", "openapi.json", "metrics")


async def document(store: Path) -> Schema:
    """Start a server that answers from a recording, with a new ``store``, and return its ``/openapi.json``."""
    recording = ROOT / "fixtures/harmony/greeting"
    options = [f"--engine=replay:{recording}", f"--store={store}", "--embeddings=http://127.0.0.1:9"]
    settings = read_settings([*options, "--log-level=WARNING"])
    runner = web.AppRunner(await application(settings))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        async with ClientSession() as client, client.get(f"http://{host}:{port}/openapi.json") as answer:
            described: Schema = await answer.json()
            return described
    finally:
        await runner.cleanup()


def routes_page(described: Schema) -> str:
    """Return the page of routes."""
    operations = [
        (path, method.upper(), operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]
    own = sorted((each for each in operations if not each[0].startswith(MIRRORED)), key=lambda each: _order(each[0]))
    sections = "".join(
        f"## {name}\n\n{''.join(_operation(*each) for each in group)}"
        for name, group in groupby(own, key=lambda each: _group(each[0]))
    )
    streams = {_group(path): stream for path, _, operation in own if (stream := _stream(operation))}
    events = "".join(f"## Events of {name}\n\n{_listed(stream)}\n" for name, stream in streams.items())
    mirrored = sorted({path.removeprefix(MIRRORED) for path, _, _ in operations} & {each[0] for each in own})
    names = ", ".join(f"`{path}`" for path in mirrored if f"{MIRRORED}{path}" in described["paths"])
    return f"""# HTTP API

Generated from `/openapi.json`, by which each server describes itself for generators of clients; here penstock
{described["info"]["version"]}. Objects are on [a page of their own]({OBJECTS}).

With API keys, each route marked *key* wants `Authorization: Bearer KEY`.

{sections}{events}## Open Responses

Below `{MIRRORED}` the same routes exist once more, with the events of the Open Responses specification: {names}.
"""


def _group(path: str) -> str:
    first = re.sub(r"^/v\d+", "", path).split("/")[1]
    return "The server" if first in _HOUSE else _GROUPS.get(first, first.replace("_", " ").capitalize())


def _order(path: str) -> tuple[int, str]:
    names = [*dict.fromkeys(_GROUPS.values())]
    group = _group(path)
    return (names.index(group) if group in names else len(names) + (group == "The server"), group)


def _operation(path: str, method: str, operation: Schema) -> str:
    key = " · *key*" if operation.get("security") else ""
    answers = [f"| {status} | {_answer(answer, path)} |\n" for status, answer in operation["responses"].items()]
    table = f"| status | answer |\n|---|---|\n{''.join(answers)}\n"
    return f"### {method} {path}\n\n{_prose(operation['summary'])}{key}\n\n{_given(operation)}{table}"


def _stream(operation: Schema) -> Schema | None:
    """Return the schema of the events that an operation streams."""
    contents = (answer.get("content", {}) for answer in operation["responses"].values())
    return next((content[_EVENTS]["schema"] for content in contents if _EVENTS in content), None)


def _listed(schema: Schema) -> str:
    return "".join(f"* {kind}\n" for kind in _kinds(schema))


def _given(operation: Schema) -> str:
    rows = [
        f"| `{each['name']}` | {each['in']} | {_kind(each['schema'])} | {_prose(each.get('description', ''))} |\n"
        for each in operation.get("parameters", ())
    ]
    table = f"| parameter | in | type | |\n|---|---|---|---|\n{''.join(rows)}\n" if rows else ""
    body = operation.get("requestBody", {}).get("content", {})
    bodies = [f"`{form}`: {_kind(each.get('schema', {}))}" for form, each in body.items()]
    return table + (f"**Body.** {'; '.join(bodies)}\n\n" if bodies else "")


def _answer(answer: Schema, path: str) -> str:
    events = f"Events of {_group(path)}"
    stream = f"a stream of [{events.lower()}](#{anchor(events)})"
    forms = [
        (stream if each["schema"] else "a stream") if form == _EVENTS else _kind(each.get("schema", {}))
        for form, each in answer.get("content", {}).items()
    ]
    description = answer.get("description", "")
    return " ".join(filter(None, [_prose(description) if description != "OK" else "", "; ".join(forms)]))


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


def _kind(schema: Schema) -> str:
    """Return the type of a schema as a cell of a table."""
    return " or ".join(dict.fromkeys(_kinds(schema)))


def _kinds(schema: Schema) -> Iterator[str]:
    match schema:
        case {"$ref": ref}:
            name = _short(ref.rpartition("/")[2])
            yield f"[{name}]({OBJECTS}#{anchor(name)})"
        case {"anyOf": kinds} | {"oneOf": kinds} | {"allOf": kinds}:
            for kind in kinds:
                yield from _kinds(kind)
        case {"const": value}:
            yield _value(value)
        case {"enum": values}:
            yield from map(_value, values)
        case {"type": "array", "items": dict(items)}:
            yield f"list of {_kind(items)}"
        case {"type": "object", "additionalProperties": dict(values)} if values:
            yield f"object of {_kind(values)}"
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
