"""A dialect of the operator is served as those of penstock are."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import ClientPayloadError, web
from aiohttp.test_utils import TestClient, TestServer

from penstock.api.dialect import Dialect, Edge
from penstock.api.dialects.named import spoken
from penstock.api.http.wire import Wire
from penstock.api.limits.admission import Admission
from penstock.api.limits.table import KeyLimits
from penstock.api.settings import Settings
from penstock.api.start.parts import preloaded
from penstock.pipeline.core import Pipeline
from penstock.pipeline.plugins import WrongPlugin
from penstock.pipeline.protocol.events import DONE, ResponseEvent
from penstock.pipeline.recordings.recorder import Recorder
from penstock.server import application, running
from penstock.services.engines.scripted import ScriptedEngine
from tests.examples.a_dialect_of_your_own import TOY, WIRE, Said, pieces
from tests.support.api_clients import USER_MESSAGE
from tests.support.paths import HARMONY
from tests.support.server import HELLO, ScriptedServer, running_server, script
from tests.support.toy_dialect import NAME

SAY = "/toy/v1/say"


async def failing(source: AsyncIterator[ResponseEvent]) -> AsyncGenerator[Said, None]:
    async for piece in pieces(source):
        yield piece
        raise LookupError("a bug of the dialect")


def toy(wire: Wire) -> tuple[Dialect, ...]:
    return (*spoken(), replace(TOY, wire=wire, read=lambda body: replace(TOY.read(body), wire=wire)))


async def test_a_fault_in_mid_stream_has_a_last_frame(tmp_path: Path) -> None:
    wire = replace(WIRE, outgoing=Pipeline.start("failing", failing), end=b"data: bye\n\n")
    async with running_server(ScriptedEngine(script=script(HELLO)), tmp_path, dialects=toy(wire)) as served:
        stream = await served.stream({"say": "Hi"}, SAY)
        assert json.loads(stream.split(b"\n\n")[-2].removeprefix(b"data: ")) == {
            "wrong": "Internal error. The server's log has more."
        }
        status, answer = await served.post({"say": "Hi"}, SAY)
        assert (status, list(answer)) == (500, ["wrong"])
    async with running_server(
        ScriptedEngine(script=script(HELLO)), tmp_path, dialects=toy(replace(wire, fault=None))
    ) as served:
        with pytest.raises(ClientPayloadError):
            await served.stream({"say": "Hi"}, SAY)


async def test_the_end_and_the_content_type_are_its_own(tmp_path: Path) -> None:
    lines = replace(
        WIRE,
        encode=lambda said: said.text.encode() + b"\n",
        end=b"bye\n",
        keep_alive=b"\n",
        content_type="application/x-ndjson",
    )
    async with (
        running_server(ScriptedEngine(script=script(HELLO)), tmp_path, dialects=toy(lines)) as served,
        served.client.post(served.url + SAY, json={"say": "Hi", "stream": True}) as answer,
    ):
        assert answer.headers["Content-Type"] == "application/x-ndjson"
        assert (await answer.read()).replace(b"\n", b"").decode() == "Hello!bye"


async def test_its_responses_are_recorded_as_requests_of_the_responses_api(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "recordings", pause=0.01)
    async with AsyncExitStack() as closing:
        closing.push_async_callback(recorder.close)
        served: ScriptedServer = await closing.enter_async_context(
            running_server(ScriptedEngine(script=script(HELLO)), tmp_path, edit=recorder.tapped, dialects=toy(WIRE))
        )
        assert (await served.post({"say": "Hi"}, SAY))[0] == 200
    [folder] = (tmp_path / "recordings").iterdir()
    assert json.loads((folder / "request.json").read_bytes()) == {"input": "Hi", "store": False}


async def test_the_limits_of_a_key_hold(tmp_path: Path) -> None:
    admission = Admission()
    admission.tables = {"default": KeyLimits(requests_per_minute=1)}
    async with running_server(
        ScriptedEngine(script=script(HELLO)), tmp_path, dialects=toy(WIRE), admission=admission
    ) as served:
        assert (await served.post({"say": "Hi"}, SAY))[0] == 200
        status, answer = await served.post({"say": "Hi"}, SAY)
        assert (status, list(answer)) == (429, ["wrong"])


async def test_the_option_adds_it_also_under_a_prefix(tmp_path: Path) -> None:
    parent = web.Application()
    store, replay = str(tmp_path / "store.sqlite3"), [f"replay:{HARMONY}"]
    settings = Settings.model_validate({"engine": replay, "store": store, "sandbox": False, "dialect": [NAME]})
    parent.add_subapp("/llm", await application(settings))
    async with TestClient(TestServer(parent)) as client:
        for path, status in ((f"/llm{SAY}", 400), (f"/llm{SAY}/louder", 404)):
            async with client.post(path, json={"say": "Was this recorded?"}) as answer:
                assert (answer.status, list(await answer.json())) == (status, ["wrong"])
        async with client.post("/llm/v1/say", json={"say": "Hi"}) as answer:
            assert (answer.status, list(await answer.json())) == (404, ["error"])


def breaking(dialect: Dialect, after: int) -> Dialect:
    """Return a dialect with one more stage, which raises after that many events."""

    async def broken(source: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        for _ in range(after):
            yield await anext(source)
        raise LookupError("a bug of the dialect")

    outgoing = dialect.wire.outgoing
    wire = replace(
        dialect.wire, outgoing=outgoing.then("broken", broken) if outgoing else Pipeline.start("broken", broken)
    )
    return replace(dialect, wire=wire, read=lambda body: replace(dialect.read(body), wire=wire))


ASKING: dict[str, tuple[str, Any]] = {
    "toy": (SAY, {"say": "Hi"}),
    "chat": ("/v1/chat/completions", {"messages": [USER_MESSAGE]}),
    "completions": ("/v1/completions", {"prompt": "Hi"}),
    "messages": ("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": [USER_MESSAGE]}),
}
"""The URL and the body of a request in the dialects that are unlike that of the Responses API."""

TERMINAL = {"response.completed", "response.incomplete", "response.failed", "error"}


STREAMING = [dialect for dialect in toy(WIRE) if dialect.name != "decisions"]


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("dialect", STREAMING, ids=lambda dialect: dialect.name)
async def test_a_bug_of_its_stage_is_told_once_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dialect: Dialect, after: int
) -> None:
    path, body = ASKING.get(dialect.name) or (f"{dialect.base}/responses", {"input": "Hi"})
    broken = tuple(breaking(each, after) if each.name == dialect.name else each for each in toy(WIRE))
    async with running_server(ScriptedEngine(script=script(HELLO)), tmp_path, dialects=broken) as served:
        with caplog.at_level(logging.INFO):
            stream = await served.stream(body, path)
            status, answer = await served.post(body, path)
    frames = [json.loads(frame.partition(b"data: ")[2]) for frame in stream.removesuffix(DONE).split(b"\n\n")[:-1]]
    assert len(frames) == after + 1
    ends = [frame.get("type") in TERMINAL or not {"wrong", "error"}.isdisjoint(frame) for frame in frames]
    assert ends == [False] * after + [True]
    assert [frame["sequence_number"] for frame in frames if "sequence_number" in frame] in ([], [*range(after + 1)])
    assert status == 500
    msgspec.convert(answer, dialect.conventions.error_body)
    bugs = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [bug and bug.__notes__ for bug in bugs] == [["in stage broken"]] * 2
    logged = [record.getMessage() for record in caplog.records if record.name == "penstock.api.http.access_log"]
    assert [line.partition(" in ")[0] for line in logged] == [f"POST {path}: 200, failed", f"POST {path}: 500"]


async def test_a_bug_of_its_last_frame_closes_the_connection(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wire = replace(WIRE, outgoing=Pipeline.start("failing", failing), fault=lambda error: error.last.nothing)
    async with running_server(ScriptedEngine(script=script(HELLO)), tmp_path, dialects=toy(wire)) as served:
        with caplog.at_level(logging.INFO), pytest.raises(ClientPayloadError):
            await served.stream({"say": "Hi"}, SAY)
    assert f"POST {SAY}: 200, failed in " in caplog.text


def texts(value: Any) -> list[str]:
    """Return all texts in a JSON value."""
    if isinstance(value, dict):
        return [text for each in value.values() for text in texts(each)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("dialect", toy(WIRE), ids=lambda dialect: dialect.name)
async def test_unknown_urls_below_a_base_are_told_the_routes_there(tmp_path: Path, dialect: Dialect) -> None:
    error_type = msgspec.json.Decoder(dialect.conventions.error_body).decode
    async with running_server(ScriptedEngine(script=script(HELLO)), tmp_path, dialects=toy(WIRE)) as served:
        [routes] = [routes for each, routes in served.api.dialect_routes.items() if each.name == dialect.name]
        async with served.client.get(f"{served.url}{routes[0].path}/unknown/url") as answer:
            body = await answer.read()
        assert answer.status == 404
        error_type(body)
        told = " ".join(texts(json.loads(body)))
        assert set(re.findall(r"(?:POST|DELETE) (/[a-z0-9]+(?:/v1)?)", told)) == {dialect.base}
        for path in {route.path for route in routes if "{" not in route.path}:
            async with served.client.patch(served.url + path) as answer:
                body = await answer.read()
            assert answer.status == 405
            error_type(body)
            allowed = sorted(answer.headers["Allow"].split(","))
            assert {route.method for route in routes if route.path == path} <= {*allowed}
            told = f"Not allowed: PATCH {path}. This URL takes {', '.join(allowed)}."
            assert told in texts(json.loads(body))


@pytest.mark.parametrize("dialect", spoken(), ids=lambda dialect: dialect.name)
async def test_base_url_with_a_doubled_version_is_explained(tmp_path: Path, dialect: Dialect) -> None:
    error_type = msgspec.json.Decoder(dialect.conventions.error_body).decode
    async with running_server(ScriptedEngine(script=script(HELLO)), tmp_path) as served:
        [routes] = [routes for each, routes in served.api.dialect_routes.items() if each.name == dialect.name]
        path = routes[0].path
        async with served.client.post(served.url + path.replace("/v1/", "/v1/v1/"), json={}) as answer:
            body = await answer.read()
        assert answer.status == 404
    error_type(body)
    advice = f"The path has v1 twice: leave one out of the client's base URL, so that the request goes to {path}."
    assert advice in " ".join(texts(json.loads(body)))


async def test_its_routes_are_rehearsed_once_by_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counting(edge: Edge) -> Sequence[web.RouteDef]:
        made.append(edge.scheduler.engine.models[0])
        return TOY.routes(edge)

    own = SimpleNamespace(TOY=replace(TOY, routes=counting))
    monkeypatch.setitem(sys.modules, "counting_dialect", own)
    settings = Settings.model_validate(
        {"engine": [f"replay:{HARMONY}"], "store": str(tmp_path / "store.sqlite3"), "dialect": ["counting_dialect:TOY"]}
    )
    async with running(settings) as started:
        started.api.app(100_000)
    assert made == ["recorded", *started.scheduler.engine.models[:1]]


def test_a_wrong_one_ends_the_start_before_the_model_is_loaded() -> None:
    settings = Settings.model_validate({"engine_arguments": [], "dialect": [f"{NAME}S"]})
    with pytest.raises(WrongPlugin, match=r"^--dialect .*has no Dialect TOYS \(did you mean TOY\?\)"):
        preloaded(settings)
