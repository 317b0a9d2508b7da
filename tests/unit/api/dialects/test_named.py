"""The dialects of a server, and the rules of dialects."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from penstock.api.dialect import Dialect
from penstock.api.dialects.named import spoken
from penstock.api.http.conventions import RequestError
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.wire import EVENT_STREAM, Reading
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.plugins import WrongPlugin
from penstock.pipeline.protocol.events import KEEP_ALIVE
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.testing import BrokenRule, check_dialect, check_events
from tests.examples.a_dialect_of_your_own import TOY, WIRE, Said
from tests.support.openapi import in_responses_names
from tests.support.paths import CHAT, HARMONY
from tests.support.toy_dialect import NAME, heard

DIALECTS = {dialect.name: dialect for dialect in spoken()}
RESPONSES, OPEN_RESPONSES = DIALECTS["responses"], DIALECTS["open_responses"]
RECORDINGS = [HARMONY / "greeting", HARMONY / "function_call", *sorted(CHAT.glob("*/"))[:3]]

OWN = """
from dataclasses import replace
from aiohttp import web
from penstock.api.dialects.responses.dialect import RESPONSES
from tests.examples.a_dialect_of_your_own import TOY

def fails(edge):
    raise LookupError("nothing there")

async def plain(request):
    return web.Response()

SAME_NAME = replace(TOY, name="responses", base="/own")
SAME_ROUTE = replace(RESPONSES, name="mine")
SLASH = replace(TOY, base="toy/")
ELSEWHERE = replace(TOY, routes=lambda edge: [web.get("/elsewhere", plain)])
UNDESCRIBED = replace(TOY, routes=lambda edge: [web.post("/toy/v1/say", plain)])
EMPTY = replace(TOY, routes=lambda edge: [])
FAILS = replace(TOY, routes=fails)
NUMBER = 5
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_server_speaks_the_dialects_of_penstock_and_those_of_its_operator() -> None:
    assert list(DIALECTS) == ["responses", "chat", "completions", "decisions", "messages", "open_responses"]
    assert [dialect.name for dialect in spoken([NAME])] == [*DIALECTS, "toy"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("own.py", "name its Dialect, too: own.py:SAME_NAME or own.py:SAME_ROUTE or own.py:SLASH"),
        ("absent.py:TOY", "there is no file absent.py"),
        ("own.py:NUMBERS", "own.py has no Dialect NUMBERS"),
        ("own.py:NUMBER", "own.py has no Dialect NUMBER"),
        ("klingon", "it is neither module:Dialect nor an entry point of penstock.dialects"),
        ("own.py:SAME_NAME", "there is a dialect 'responses' already"),
        ("own.py:SAME_ROUTE", "another dialect has its route DELETE /v1/conversations/{conversation_id} already"),
        ("own.py:SLASH", "its base URL is 'toy/': begin it with a slash, and end it without one"),
        ("own.py:ELSEWHERE", "its route GET /elsewhere is not under its base URL /toy/v1"),
        ("own.py:UNDESCRIBED", "its route POST /toy/v1/say is no operation"),
        ("own.py:EMPTY", "it has no routes"),
        ("own.py:FAILS", "its routes raised LookupError: nothing there"),
    ],
)
def test_a_wrong_dialect_is_explained(here: Path, name: str, problem: str) -> None:
    with pytest.raises(WrongPlugin) as wrong:
        spoken([name])
    assert str(wrong.value).startswith(f"--dialect {name}: ")
    assert problem in str(wrong.value)


BODIES = [
    b'{"input": "Hi"}',
    b'{"input": "Hi", "stream": true, "stream_options": {"include_obfuscation": true}}',
]


async def test_dialects_of_penstock_keep_all_rules() -> None:
    await check_dialect(RESPONSES, BODIES, check_events, RECORDINGS)
    await check_dialect(OPEN_RESPONSES, BODIES, lambda stream: check_events(in_responses_names(stream)), RECORDINGS)


def _with_wire(**changes: Any) -> Dialect:
    wire = replace(WIRE, **changes)
    return replace(TOY, wire=wire, read=lambda body: replace(TOY.read(body), wire=wire))


def _in_lines(keep_alive: bytes) -> Dialect:
    return _with_wire(
        encode=lambda said: msgspec.json.encode(said) + b"\n",
        fault=lambda error: msgspec.json.encode(Said(wrong=error.problem.message)) + b"\n",
        content_type="application/x-ndjson",
        keep_alive=keep_alive,
    )


def _heard_lines(stream: bytes) -> dict[str, Any]:
    pieces = [json.loads(line) for line in stream.splitlines() if line]
    text = "".join(piece.get("text", "") for piece in pieces)
    return {"text": text} if text else {}


async def _first(source: AsyncIterator[Said]) -> Said:
    return await anext(source)


def _bare(body: bytes) -> Any:
    return TOY.read(body).request


def _lenient(body: bytes) -> Reading:
    try:
        return TOY.read(body)
    except InvalidRequest:
        return TOY.read(b'{"say": ""}')


def _hasty(body: bytes) -> Reading:
    json.loads(body)
    return TOY.read(body)


def _reading(**changes: Any) -> Dialect:
    return replace(TOY, read=lambda body: replace(TOY.read(body), **changes))


def _polite(error: RequestError) -> tuple[int, Said]:
    return 200, Said(wrong=error.problem.message)


def _other(error: RequestError) -> tuple[int, Any]:
    return error.status, {"wrong": [error.problem.message]}


def _with(**changes: Any) -> Dialect:
    return replace(TOY, conventions=replace(TOY.conventions, **changes))


async def _plain(request: web.Request) -> web.Response:
    return web.Response()


@operation(Operation(Said))
async def _undescribed(request: web.Request) -> web.Response:
    return web.Response()


def _on(*routes: web.RouteDef) -> Dialect:
    return replace(TOY, routes=lambda edge: [*TOY.routes(edge), *routes])


@pytest.mark.parametrize(
    ("dialect", "broken"),
    [
        (lambda: replace(TOY, read=_bare), "read: read returns a Reading, not CreateResponse"),
        (lambda: _reading(request={"input": "Hi"}), "read: the request of a Reading is a CreateResponse"),
        (lambda: _reading(wire="text"), "read: the wire of a Reading is a Wire"),
        (lambda: _reading(others=(CreateResponse(),)), "read: a Reading with others has a Wire that can weave"),
        (lambda: replace(TOY, read=_lenient), "wrong bodies: read raises InvalidRequest for b''"),
        (lambda: replace(TOY, read=_hasty), "wrong bodies: read raises InvalidRequest for b'', not JSONDecodeError"),
        (lambda: _with_wire(encode=lambda said: said.text), "encode: what encode returns is bytes"),
        (lambda: _with_wire(encode=lambda said: b"data: " + said.text.encode()), "encode: what encode returns ends"),
        (lambda: _with_wire(keep_alive=b":"), "encode: keep_alive ends with an empty line"),
        (lambda: _with_wire(end=b"data: [DONE]\n"), "encode: end ends with an empty line"),
        (lambda: _with_wire(fold=_first), "fold: a stream says what the body of the answer says"),
        (lambda: _with_wire(keep_alive=b""), "idle: keep_alive is not empty"),
        (lambda: _with_wire(keep_alive=b"data: idle\n\n"), "idle: a client skips keep_alive"),
        (lambda: _with_wire(keep_alive=b'data: {"text":"."}\n\n'), "idle: a client skips keep_alive"),
        (lambda: _in_lines(KEEP_ALIVE[:-1]), "idle: a client skips keep_alive"),
        (lambda: _with_wire(fault=lambda error: error.problem.message), "errors: what fault returns is bytes"),
        (lambda: _with(error=_polite), "errors: the status of an error is one of an error, not 200"),
        (lambda: _with(error=_other), "errors: it raised ValidationError: Expected `str`, got `array`"),
        (lambda: _with(key_headers=()), "errors: key_headers names a header"),
        (lambda: replace(TOY, routes=lambda edge: []), "routes: it has no routes"),
        (lambda: replace(TOY, base="toy/v1/"), "routes: its base URL is 'toy/v1/': begin it with a slash"),
        (lambda: _on(web.get("/say", _plain)), "routes: its route GET /say is not under its base URL /toy/v1"),
        (lambda: _on(web.post("/toy/v1/hear", _plain)), "routes: its route POST /toy/v1/hear is no operation"),
        (lambda: _on(web.get("/toy/v1/hear", _undescribed)), "routes: its route GET /toy/v1/hear has no docstring"),
    ],
)
async def test_a_broken_rule_is_named(dialect: Callable[[], Dialect], broken: str) -> None:
    given = dialect()
    with pytest.raises(BrokenRule) as wrong:
        await check_dialect(
            given, [b'{"say": "Hi"}'], heard if given.wire.content_type == EVENT_STREAM else _heard_lines
        )
    assert str(wrong.value).startswith(broken)
    assert wrong.value.rule == broken.partition(":")[0]


async def test_a_check_of_a_dialect_needs_bodies() -> None:
    with pytest.raises(BrokenRule, match="read: give the bodies of right requests"):
        await check_dialect(TOY, [], heard)


async def test_a_dialect_of_lines_keeps_all_rules() -> None:
    await check_dialect(_in_lines(b"\n"), [b'{"say": "Hi"}'], _heard_lines, RECORDINGS[:1])


def test_a_form_of_its_own_needs_a_sign_of_life_of_its_own() -> None:
    with pytest.raises(ValueError, match="a Wire of application/x-ndjson needs a keep_alive that its clients skip"):
        _in_lines(KEEP_ALIVE)
