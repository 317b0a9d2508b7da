from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, Generator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest
from aiohttp import ClientError, ClientSession, web
from aiohttp.test_utils import TestServer
from prometheus_client import REGISTRY

from penstock.api.http.access_log import log_requests, note_status
from penstock.api.http.auth import Keys
from penstock.api.http.conventions import SPOKEN, SpokenByRoute
from penstock.api.http.errors import REFUSALS, Handler, errors_as_json
from penstock.api.http.prefix import DESCRIPTION, DESCRIPTION_NAME
from penstock.api.http.proxied import ProxiedRequests
from penstock.api.http.proxies import Proxies
from penstock.api.http.sse import send
from penstock.api.http.wire import Wire
from penstock.pipeline.errors import EngineFailed, ServerStopping
from penstock.pipeline.logs import JsonLines, Seldom, json_line, name_response
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.runs.run import RunReleased
from penstock.stages.models.harmony.vocabulary import encoding_on_demand
from penstock.stages.optional.log import LogOutputs, LogPrompts
from tests.support.api_clients import Json, wait_until
from tests.support.server import ENDLESS, ScriptedServer, running_server, script
from tests.support.socket_client import connected

SECRET = "canary-9f2c71d0"

WIRE = Wire(encode=bytes, fold=anext)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Generator[pytest.LogCaptureFixture, None, None]:
    """Capture the log; each record has the id of its response."""
    caplog.handler.addFilter(name_response)
    with caplog.at_level(logging.INFO):
        yield caplog
    caplog.handler.removeFilter(name_response)


def lines(log: pytest.LogCaptureFixture, logger: str) -> list[tuple[str, str]]:
    return [(getattr(each, "response", ""), each.getMessage()) for each in log.records if each.name == logger]


async def test_request_is_logged_in_one_line(served: ScriptedServer, log: pytest.LogCaptureFixture) -> None:
    _, answer = await served.post({"input": "A secret"})
    await served.stream({"input": "A secret", "previous_response_id": answer["id"]})
    (first, one), (second, two) = lines(log, "penstock.api.http.access_log")
    assert (first, len(second)) == (answer["id"], len(first))
    assert second not in ("-", first)
    outcome = r"POST /v1/responses: 200, completed, [0-9]+ tokens in, [0-9]+ out in [0-9.]+ s"
    for line in (one, two):
        assert re.fullmatch(outcome + r" \(127\.0\.0\.1, model tiny, req_[0-9a-f]{32}\)", line)
    assert "secret" not in log.text
    assert "greeting" not in log.text


async def test_requests_of_one_connection_have_their_own_ids(
    served: ScriptedServer, log: pytest.LogCaptureFixture
) -> None:
    _, answer = await served.post({"input": "Hi"})
    await served.get("/v1/models")
    await served.get(f"/v1/responses/{answer['id']}")
    await served.get("/v1/responses/resp_0%0Aforged")
    assert [named for named, _ in lines(log, "penstock.api.http.access_log")] == [answer["id"], "-", answer["id"], "-"]
    assert lines(log, "penstock.api.http.access_log")[-1][1].startswith("GET /v1/responses/resp_0%0Aforged: 404 in ")


async def test_abandoned_request_is_logged(served: ScriptedServer, log: pytest.LogCaptureFixture) -> None:
    served.engine.script = script(ENDLESS, endless=True, latency=0.001)
    answer = await served.client.post(f"{served.url}/v1/responses", json={"input": "Hi", "stream": True})
    await answer.content.readuntil(b"output_text.delta")
    answer.close()
    await wait_until(lambda: lines(log, "penstock.api.http.access_log"))
    ((_, line),) = lines(log, "penstock.api.http.access_log")
    outcome = "200, cancelled, [0-9]+ tokens in, [1-9][0-9]* out, the client left after [0-9.]+ s"
    assert re.match(rf"POST /v1/responses: {outcome} \(127", line)
    (fields,) = [as_json(each) for each in log.records if each.name == "penstock.api.http.access_log"]
    assert (fields["status"], fields["ended"], fields["response_status"]) == (200, "client_left", "cancelled")


async def test_request_that_was_left_before_its_answer_is_logged(
    served: ScriptedServer, log: pytest.LogCaptureFixture
) -> None:
    served.engine.script = script(ENDLESS, endless=True, latency=0.001)
    asking = asyncio.create_task(served.post({"input": "Hi"}))
    await wait_until(lambda: any(run.event_count > 4 for run in served.scheduler.runs))
    asking.cancel()
    await wait_until(lambda: lines(log, "penstock.api.http.access_log"))
    ((_, line),) = lines(log, "penstock.api.http.access_log")
    assert re.match(r"POST /v1/responses: 499, cancelled, .*, the client left after [0-9.]+ s \(127", line)
    (fields,) = [as_json(each) for each in log.records if each.name == "penstock.api.http.access_log"]
    assert (fields["status"], fields["ended"], fields["response_status"]) == (499, "client_left", "cancelled")


BROKEN_OFF: dict[type[BaseException], tuple[str, str, str]] = {
    asyncio.CancelledError: ("client_left", "200, the client left after ", "499"),
    ConnectionResetError: ("client_left", "200, the client left after ", "499"),
    ServerStopping: ("interrupted", "200, the server stopped after ", "200"),
    KeyError: ("raised", "200, failed in ", "200"),
}
"""What ends a stream early: its cause and words in the log, and its status in the metrics."""


@pytest.mark.parametrize("comes", ["from its events", "after them"])
@pytest.mark.parametrize("error", BROKEN_OFF)
async def test_line_of_a_stream_that_was_broken_off_says_why(
    log: pytest.LogCaptureFixture, error: type[BaseException], comes: str
) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        if comes == "from its events":
            raise error

    async def breaks(request: web.Request) -> web.StreamResponse:
        await send(request, events(), WIRE, keep_alive=60)
        raise error

    cause, words, status = BROKEN_OFF[error]
    labels = {"api": "none", "method": "GET", "route": "/stream", "status": status}
    before = REGISTRY.get_sample_value("penstock_http_requests_total", labels) or 0
    fields = await broken_off(breaks, log)
    assert fields["message"].startswith(f"GET /stream: {words}")
    assert (fields["status"], fields["ended"]) == (200, cause)
    assert REGISTRY.get_sample_value("penstock_http_requests_total", labels) == before + 1


async def test_line_of_a_stream_that_goes_on_at_another_server_says_so(log: pytest.LogCaptureFixture) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        raise RunReleased

    async def moves(request: web.Request) -> web.StreamResponse:
        return await send(request, events(), WIRE, keep_alive=60)

    fields = await broken_off(moves, log)
    assert fields["message"].startswith("GET /stream: 200, another server took the response over after ")
    assert (fields["status"], fields["ended"]) == (200, "released")


async def broken_off(handler: Handler, log: pytest.LogCaptureFixture) -> Json:
    """Return the fields of the line about a request whose stream ends early, with its connection."""

    @web.middleware
    async def closes(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        finally:
            if request.transport:
                request.transport.close()

    app = web.Application(middlewares=[closes, ProxiedRequests(Proxies()).identify, log_requests, errors_as_json])
    app[REFUSALS], app[SPOKEN] = Seldom(), SpokenByRoute()
    app.on_response_prepare.append(note_status)
    app.router.add_get("/stream", handler)
    app.router.add_get(DESCRIPTION, handler, name=DESCRIPTION_NAME)
    async with TestServer(app) as server, ClientSession() as client:
        with suppress(ClientError):
            async with client.get(server.make_url("/stream")) as answer:
                await answer.read()
        await wait_until(lambda: lines(log, "penstock.api.http.access_log"))
    (fields,) = [as_json(each) for each in log.records if each.name == "penstock.api.http.access_log"]
    return fields


async def test_background_response_is_logged_in_two_lines(
    served: ScriptedServer, log: pytest.LogCaptureFixture
) -> None:
    response_id = await served.start_background()
    await served.wait_for_end(response_id)
    await wait_until(lambda: lines(log, "penstock.api.runs.background"))
    (request_line,) = [
        line for named, line in lines(log, "penstock.api.http.access_log") if named == response_id and "POST" in line
    ]
    assert request_line.startswith("POST /v1/responses: 200, queued in ")
    ((named, line),) = lines(log, "penstock.api.runs.background")
    assert named == response_id
    assert re.fullmatch("In the background: completed, [0-9]+ tokens in, [0-9]+ out", line)


@pytest.mark.defect("B22")
@pytest.mark.parametrize("background", [False, True])
async def test_cancel_logs_no_warning(served: ScriptedServer, log: pytest.LogCaptureFixture, background: bool) -> None:
    served.engine.script = script(ENDLESS, endless=True, latency=0.001)
    served.scheduler.background.slots.limit = 1
    async with served.open_stream({"background": background}) as stream:
        running, waiting = await stream.response_id(), await served.start_background()
        await stream.upto(b"output_text.delta")
        for response_id in (waiting, running):
            assert (await served.cancel(response_id))[0] == 200
        await stream.rest()
    await wait_until(lambda: len(served.scheduler.runs) == 0)
    assert [each.getMessage() for each in log.records if each.levelno > logging.INFO] == []


async def test_tokens_are_logged_once(served: ScriptedServer, log: pytest.LogCaptureFixture) -> None:
    """Only the request that made a response has them, so sums over lines are right."""
    response_id = (await served.post({"input": "Hi"}))[1]["id"]
    await served.replay(response_id)
    assert [" tokens in, " in line for _, line in lines(log, "penstock.api.http.access_log")] == [True, False]


async def test_failure_is_logged_with_its_response(served: ScriptedServer, log: pytest.LogCaptureFixture) -> None:
    served.engine.script = script(error=EngineFailed("It failed."))
    _, answer = await served.post({"input": "Hi"})
    assert {named for named, _ in lines(log, "penstock.stages.emit.emit")} == {answer["id"]}
    assert ": 200, failed in " in lines(log, "penstock.api.http.access_log")[0][1]


async def test_outputs_are_logged_with_their_response(
    tmp_path_factory: pytest.TempPathFactory, log: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path_factory.mktemp("store")
    logged = lambda pipeline: pipeline.insert_after("emit", "log", LogOutputs())  # noqa: E731
    async with running_server(ScriptedEngine(script(latency=0.001)), folder, edit=logged) as served:
        answers = await asyncio.gather(*(served.post({"input": "Hi"}) for _ in range(3)))
    written = lines(log, "penstock.stages.optional.log")
    for _, answer in answers:
        mine = [line for response_id, line in written if response_id == answer["id"]]
        assert mine == ["reasoning: 'A greeting.'", "message: 'Hello!'"]


@pytest.mark.parametrize(("longest", "end"), [(None, "<|start|>assistant'"), (40, "'")])
async def test_prompt_is_logged_with_its_response(
    longest: int | None, end: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    stage = LogPrompts(lambda _: encoding_on_demand().decode, longest)
    logged = lambda pipeline: pipeline.insert_after("render", "log", stage)  # noqa: E731
    async with running_server(ScriptedEngine(script()), tmp_path, edit=logged) as served:
        _, answer = await served.post({"input": "Hi", "temperature": 0.5})
    ((named, line),) = lines(log, "penstock.stages.optional.log")
    assert named == answer["id"]
    text = line.partition(" '<|start|>system<|message|>")[2]
    assert "temperature=0.5" in line
    assert line.endswith(end)
    assert "Hi" in text if longest is None else len(text) == 41 - len("<|start|>system<|message|>")


async def test_long_path_is_cut_in_the_log(served: ScriptedServer, log: pytest.LogCaptureFixture) -> None:
    await served.get(f"/v1/responses/{'x' * 2000}")
    ((_, line),) = lines(log, "penstock.api.http.access_log")
    assert len(line) < 500


@pytest.mark.parametrize(
    ("body", "model", "reason"),
    [
        (
            {"input": "A secret", "temperature": 9, "model": "tiny"},
            "tiny",
            r".*temperature.* \(param temperature, code .*\)",
        ),
        (
            {"input": "A secret", "model": "a\n2026 ERROR\x1b[2J"},
            r"a\\n2026 ERROR\\x1b\[2J",
            r".*\(param model, code .*\)",
        ),
        (b"{", None, ".*"),
        ({"input": "A secret", "metadata": {"k" * 2000: "v"}}, None, ".{10,450}"),
    ],
)
async def test_refusal_is_logged_with_its_reason_and_model(
    served: ScriptedServer, log: pytest.LogCaptureFixture, body: Json | bytes, model: str | None, reason: str
) -> None:
    """An operator cannot see the answer, and the client that got it may be a program of another team."""
    status, _ = await served.post(body)
    ((_, line),) = lines(log, "penstock.api.http.access_log")
    named = f"model {model}, " if model else ""
    assert re.fullmatch(rf"POST /v1/responses: {status} in [0-9.]+ s \(127\.0\.0\.1, {named}req_\w+\): {reason}", line)
    assert "secret" not in line


@pytest.mark.parametrize(
    "wrong",
    [
        {"authorization": [SECRET]},
        {"authorization": f"{SECRET}\n"},
        {"headers": SECRET},
        {"headers": {"Authorization": f"{SECRET}\n"}},
        {"server_url": f"https://user:{SECRET}@maps.example/mcp"},
        {"authorization": SECRET, "require_approval": 1},
    ],
)
async def test_secret_of_a_refused_request_is_not_logged(
    served: ScriptedServer, log: pytest.LogCaptureFixture, wrong: Json
) -> None:
    tool = {"type": "mcp", "server_label": "maps", "server_url": "https://maps.example/mcp", **wrong}
    assert (await served.post({"input": "Hi", "tools": [tool]}))[0] == 400
    assert "param tools[0]." in log.text
    assert SECRET not in log.text


@pytest.mark.parametrize(
    ("words", "title"), [("name=alice", "alice"), ("limits=none", sha256(b"a-key-of-sixteen-or-more").hexdigest()[:8])]
)
async def test_key_has_one_name_in_the_log_and_in_the_frames(
    log: pytest.LogCaptureFixture, tmp_path: Path, words: str, title: str
) -> None:
    key, engine = "a-key-of-sixteen-or-more", ScriptedEngine(script())
    (file := tmp_path / "keys").write_text(f"{key} {words}")
    async with running_server(engine, tmp_path / "store", keys=Keys(file)) as server:
        server.client.headers["Authorization"] = f"Bearer {key}"
        assert (await server.post({"input": "Hi"}))[0] == 200
        (prompt,) = server.engine.prompts
    assert prompt.facts.origin.key_name == title
    ((_, line),) = lines(log, "penstock.api.http.access_log")
    assert f"(127.0.0.1, key {title}, " in line
    assert key not in log.text


@pytest.mark.parametrize(
    ("key", "title"),
    [
        ("sk-alice-0123456789", "alice"),
        ("sk-nobody-0123456789", sha256(b"sk-nobody-0123456789").hexdigest()[:8]),
        ("EMPTY", None),
        ("", None),
    ],
    ids=["expired", "unknown", "short", "none"],
)
@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
async def test_refused_key_is_named_without_being_shown(
    log: pytest.LogCaptureFixture, tmp_path: Path, key: str, title: str | None, header: str
) -> None:
    (file := tmp_path / "keys").write_text("sk-alice-0123456789 name=alice expires=2020-01-31\n")
    async with running_server(ScriptedEngine(), tmp_path / "store", keys=Keys(file)) as server:
        server.client.headers[header] = f"Bearer {key}" if header == "Authorization" else key
        assert (await server.post({"input": "Hi"}))[0] == 401
    ((_, line),) = lines(log, "penstock.api.http.access_log")
    assert line.startswith("POST /v1/responses: 401 in ")
    assert (f"(127.0.0.1, refused key {title}, req_" if title else "(127.0.0.1, req_") in line
    (record,) = [each for each in log.records if each.name == "penstock.api.http.access_log"]
    assert (vars(record)["refused_key"], vars(record)["key"]) == (title, None)
    assert not key or key not in log.text


@pytest.mark.parametrize("path", ["/responses/none", "/messages", "/nowhere"])
@pytest.mark.parametrize(("sent", "kept"), [("trace-1", True), ("two words", False), ("x" * 129, False), ("é", False)])
async def test_request_id_of_the_client_is_logged_and_answered(
    served: ScriptedServer, log: pytest.LogCaptureFixture, path: str, sent: str, kept: bool
) -> None:
    async with served.client.get(f"{served.url}/v1{path}", headers={"X-Request-Id": sent}) as answer:
        request_id = answer.headers["X-Request-Id"]
    assert (request_id == sent) is kept
    assert kept or re.fullmatch("req_[0-9a-f]{32}", request_id)
    assert request_id in lines(log, "penstock.api.http.access_log")[0][1]


REQUEST_IDS: list[tuple[dict[str, str], str | None, str]] = [
    ({}, "trace-1", "trace-1"),
    ({"X-Request-Id": "trace-2"}, "trace-1", "trace-2"),
    ({"X-Request-Id": "trace-2"}, None, "trace-2"),
    ({"X-Request-Id": "two words"}, "trace-1", ""),
    ({}, None, ""),
]
"""Headers, the id in the body, and the client's own id of the request."""


@pytest.mark.parametrize(("headers", "in_body", "expected"), REQUEST_IDS)
async def test_request_id_of_the_client_reaches_answer_log_and_engine(
    served: ScriptedServer,
    log: pytest.LogCaptureFixture,
    headers: dict[str, str],
    in_body: str | None,
    expected: str,
) -> None:
    """It is neither the id of the response nor the whole name in the engine, as two requests may have the same."""
    body = {"input": "Hi", "request_id": in_body}
    async with served.client.post(f"{served.url}/v1/responses", json=body, headers=headers) as answer:
        request_id, response_id = answer.headers["X-Request-Id"], (await answer.json())["id"]
    assert request_id == expected or (not expected and request_id.startswith("req_"))
    ((_, line),) = lines(log, "penstock.api.http.access_log")
    assert line.endswith(f", {request_id})")
    (prompt,) = served.engine.prompts
    assert response_id.startswith("resp_")
    assert prompt.facts.engine_id == (f"{expected}-{response_id}" if expected else response_id)


@pytest.mark.parametrize(("headers", "in_body", "expected"), REQUEST_IDS)
async def test_request_id_of_the_client_reaches_the_engine_over_a_websocket(
    served: ScriptedServer, headers: dict[str, str], in_body: str | None, expected: str
) -> None:
    async with connected(served, headers=headers) as client:
        response = await client.create(input="Hi", request_id=in_body)
    (prompt,) = served.engine.prompts
    assert prompt.facts.engine_id == (f"{expected}-{response.id}" if expected else response.id)


def as_json(record: logging.LogRecord) -> Json:
    line = JsonLines().format(record)
    assert "\n" not in line
    fields: Json = json.loads(line)
    return fields


async def test_line_of_a_request_has_its_fields(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    key = "a-key-of-many-characters"
    async with running_server(ScriptedEngine(script()), tmp_path, keys=Keys(given=key)) as served:
        sent = {"Authorization": f"Bearer {key}", "X-Request-Id": "mine"}
        async with served.client.post(f"{served.url}/v1/responses", json={"input": SECRET}, headers=sent) as answer:
            response = await answer.json()
        async with served.client.post(
            f"{served.url}/v1/responses", json={"input": SECRET, "model": "a\nb"}, headers=sent
        ) as answer:
            assert answer.status == 404
    done, refused = [as_json(each) for each in log.records if each.name == "penstock.api.http.access_log"]
    assert done.pop("seconds") > 0
    assert done.pop("time").endswith("+00:00")
    assert SECRET not in done.pop("message")
    assert done == {
        "level": "INFO",
        "logger": "penstock.api.http.access_log",
        "request_id": "mine",
        "response_id": response["id"],
        "response_status": "completed",
        "client": "127.0.0.1",
        "key": sha256(key.encode()).hexdigest()[:8],
        "owner": sha256(key.encode()).hexdigest()[:8],
        "method": "POST",
        "path": "/v1/responses",
        "route": "/v1/responses",
        "api": "responses",
        "status": 200,
        "model": response["model"],
        "input_tokens": response["usage"]["input_tokens"],
        "cached_tokens": response["usage"]["input_tokens_details"]["cached_tokens"],
        "output_tokens": response["usage"]["output_tokens"],
    }
    assert (refused["status"], refused["code"], refused["param"]) == (404, "model_not_found", "model")


async def test_failure_is_a_line_with_its_cause(served: ScriptedServer, log: pytest.LogCaptureFixture) -> None:
    served.engine.script = script(ENDLESS, error=EngineFailed("It failed."))
    _, answer = await served.post({"input": "Hi"})
    (failed,) = [as_json(each) for each in log.records if each.levelno > logging.INFO]
    assert (failed["level"], failed["response_id"]) == ("WARNING", answer["id"])
    assert (failed["stage"], failed["code"]) == ("generate", "server_error")


def test_error_is_a_field_with_its_traceback() -> None:
    with pytest.raises(ValueError, match="invalid literal") as raised:
        int("no number")
    error = (raised.type, raised.value, raised.tb)
    record = logging.makeLogRecord({"msg": "It met a bug", "exc_info": error, "levelname": "ERROR"})
    line = as_json(record)
    assert (line["error"], line["message"]) == ("ValueError", "It met a bug")
    assert line["traceback"].endswith("invalid literal for int() with base 10: 'no number'")


def test_line_of_another_program_becomes_json() -> None:
    line = json.loads(json_line("WARNING", "vllm", 'It said "no"'))
    assert (line["level"], line["logger"], line["message"]) == ("WARNING", "vllm", 'It said "no"')


def test_bytes_that_are_not_utf_8_lose_no_line() -> None:
    name = b"/\xff".decode(errors="surrogateescape")
    assert json.loads(json_line("INFO", "vllm", f"There is no {name}"))["message"] == f"There is no {name}"
