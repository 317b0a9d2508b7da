"""The dialects of a server, and the rules of dialects."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.api.dialect import Dialect
from penstock.api.dialects.named import spoken
from penstock.api.http.conventions import RequestError
from penstock.api.http.wire import EVENT_STREAM, Reading
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.plugins import WrongPlugin
from penstock.pipeline.protocol.events import KEEP_ALIVE
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
    assert list(DIALECTS) == ["responses", "chat", "completions", "messages", "open_responses"]
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


def _polite(error: RequestError) -> tuple[int, Said]:
    return 200, Said(wrong=error.problem.message)


@pytest.mark.parametrize(
    ("dialect", "broken"),
    [
        (lambda: replace(TOY, read=_bare), "read"),
        (lambda: replace(TOY, read=_lenient), "wrong bodies"),
        (lambda: replace(TOY, read=_hasty), "wrong bodies"),
        (lambda: _with_wire(encode=lambda said: said.text), "encode"),
        (lambda: _with_wire(encode=lambda said: b"data: " + said.text.encode()), "encode"),
        (lambda: _with_wire(keep_alive=b":"), "encode"),
        (lambda: _with_wire(fold=_first), "fold"),
        (lambda: _with_wire(keep_alive=b""), "idle"),
        (lambda: _with_wire(keep_alive=b"data: idle\n\n"), "idle"),
        (lambda: _with_wire(keep_alive=b'data: {"text":"."}\n\n'), "idle"),
        (lambda: _in_lines(KEEP_ALIVE[:-1]), "idle"),
        (lambda: _with_wire(fault=lambda error: error.problem.message), "errors"),
        (lambda: replace(TOY, conventions=replace(TOY.conventions, error=_polite)), "errors"),
        (lambda: replace(TOY, conventions=replace(TOY.conventions, key_headers=())), "errors"),
        (lambda: replace(TOY, routes=lambda edge: []), "routes"),
    ],
)
async def test_a_broken_rule_is_named(dialect: Callable[[], Dialect], broken: str) -> None:
    given = dialect()
    with pytest.raises(BrokenRule) as wrong:
        await check_dialect(
            given, [b'{"say": "Hi"}'], heard if given.wire.content_type == EVENT_STREAM else _heard_lines
        )
    assert wrong.value.rule == broken


async def test_a_dialect_of_lines_keeps_all_rules() -> None:
    await check_dialect(_in_lines(b"\n"), [b'{"say": "Hi"}'], _heard_lines, RECORDINGS[:1])


def test_a_form_of_its_own_needs_a_sign_of_life_of_its_own() -> None:
    with pytest.raises(ValueError, match="a Wire of application/x-ndjson needs a keep_alive that its clients skip"):
        _in_lines(KEEP_ALIVE)
