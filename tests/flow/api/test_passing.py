"""What penstock does not read goes to the server of its model as it is, and the answer comes back as it is."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import FormData, web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from pydantic import SecretStr, ValidationError

from penstock.api.http.auth import Keys
from penstock.api.http.request_body import LONG
from penstock.api.limits.admission import Admission
from penstock.api.limits.allowance import OwnAllowances
from penstock.api.limits.table import KeyLimits
from penstock.api.settings import Settings
from penstock.api.start.parts import Running
from penstock.extensions.models import passing as passing_module
from penstock.extensions.models.engines import ManyEngines
from penstock.extensions.models.named_bodies import NamedBody, read_named
from penstock.extensions.models.passing import FORMS
from penstock.extensions.models.targets import ROUTES
from penstock.server import running
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import ApiClient, openai_client, wait_until
from tests.support.examples import examples
from tests.support.passing import EMBEDDED, Handler, Upstream, passing, settings_of
from tests.support.paths import HARMONY, ROOT
from tests.support.processes import free_port
from tests.support.scripted_model import MODEL
from tests.support.server import ScriptedServer, running_server

KEY, OTHER_KEY = "a-key-of-a-client", "a-key-of-this-server"
EMBEDDINGS, SPEECH = "/v1/embeddings", "/v1/audio/speech"
OF_EMBEDDINGS = sorted(path for path, kinds in ROUTES.items() if "embed" in kinds)
PAGE = (ROOT / "docs" / "ROUTES.md").read_text()
SOUND = bytes(range(256)) * 100

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def half(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Length": "100"})
    await answer.prepare(request)
    await answer.write(b"half")
    assert request.transport
    request.transport.close()
    return answer


def always(answer: Callable[[], web.Response]) -> Handler:
    async def answered(_: web.Request) -> web.StreamResponse:
        return answer()

    return answered


@asynccontextmanager
async def served_by(settings: Settings) -> AsyncGenerator[tuple[ApiClient, Running], None]:
    """Serve as `penstock serve` does for the length of a block."""
    async with AsyncExitStack() as closing:
        started = await closing.enter_async_context(running(settings))
        http = await closing.enter_async_context(TestServer(started.api.app(10_000)))
        client = await closing.enter_async_context(aiohttp.ClientSession())
        yield ApiClient(str(http.make_url("")).rstrip("/"), client), started


def form(**fields: Any) -> FormData:
    """A form with a sound, whose model comes last."""
    written = FormData(default_to_multipart=True)
    written.add_field("file", SOUND, filename="a.wav", content_type="audio/wav")
    for name, value in fields.items():
        written.add_field(name, value)
    return written


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    """Return the body of a request, as arguments of aiohttp."""
    return {"data": form(**fields)} if path in FORMS else {"json": fields}


# Clients


async def test_openai_python_gets_embeddings(tmp_path: Path) -> None:
    async with passing(tmp_path, "embed") as (served, [other]), openai_client(served.url) as client:
        answer = await client.embeddings.create(model="embed", input="Hi", encoding_format="float")
        assert answer.data[0].embedding == [0.5, 1.0]
        other.answer = always(lambda: web.json_response({"error": {"message": "No.", "param": "input"}}, status=400))
        with pytest.raises(openai.BadRequestError, match=r"No\."):
            await client.embeddings.create(model="embed", input="")


@pytest.mark.parametrize("name", ["audio", "my-audio", "my-audio-2"])
async def test_openai_python_gets_a_transcription(tmp_path: Path, name: str) -> None:
    async with passing(tmp_path, "embed", "audio") as (served, [_, other]), openai_client(served.url) as client:
        other.answer = always(lambda: web.json_response({"text": "Hello."}))
        answer = await client.audio.transcriptions.create(
            model=name, file=("a.wav", SOUND), timestamp_granularities=["word", "segment"]
        )
        assert answer.text == "Hello."
        [request] = other.seen
        assert request.path == "/v1/audio/transcriptions"
        assert SOUND in request.body
        assert b'name="model"\r\n\r\naudio\r\n' in request.body


async def test_openai_python_streams_a_transcription(tmp_path: Path) -> None:
    events = [{"type": "transcript.text.delta", "delta": "Hel"}, {"type": "transcript.text.done", "text": "Hello."}]
    going = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        streamed = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await streamed.prepare(request)
        for event in events:
            await streamed.write(f"data: {json.dumps(event)}\n\n".encode())
            await going.wait()
        await streamed.write_eof()
        return streamed

    async with passing(tmp_path, "audio") as (served, [other]), openai_client(served.url) as client:
        other.answer = answer
        stream = await client.audio.transcriptions.create(model="audio", file=("a.wav", SOUND), stream=True)
        assert (await anext(stream)).type == "transcript.text.delta"  # while the other has more to say
        assert stream.response.headers["X-Accel-Buffering"] == "no"
        going.set()
        assert [event.type async for event in stream] == ["transcript.text.done"]


async def test_openai_python_streams_speech(tmp_path: Path) -> None:
    going = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        streamed = web.StreamResponse(headers={"Content-Type": "audio/wav"})
        await streamed.prepare(request)
        await streamed.write(SOUND[:1000])
        await going.wait()
        await streamed.write_eof(SOUND[1000:])
        return streamed

    async with passing(tmp_path, "audio") as (served, [other]), openai_client(served.url) as client:
        other.answer = answer
        speaking = client.audio.speech.with_streaming_response.create(model="audio", voice="alloy", input="Hi")
        async with speaking as spoken:
            pieces: AsyncIterator[bytes] = spoken.iter_bytes(1000)
            assert spoken.headers["Content-Type"] == "audio/wav"
            assert await anext(pieces) == SOUND[:1000]  # while the other has more to say
            going.set()
            assert b"".join([piece async for piece in pieces]) == SOUND[1000:]


async def test_openai_python_gets_images(tmp_path: Path) -> None:
    async with passing(tmp_path, "image") as (served, [other]), openai_client(served.url) as client:
        other.answer = always(lambda: web.json_response({"created": 0, "data": [{"b64_json": "aQ=="}]}))
        made = await client.images.generate(model="image", prompt="A cat.")
        edited = await client.images.edit(model="image", image=[("a.png", SOUND), ("b.png", SOUND)], prompt="A dog.")
        assert made.data == edited.data
        assert [request.path for request in other.seen] == ["/v1/images/generations", "/v1/images/edits"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_ranking_as_cohere_has_it(tmp_path: Path, path: str) -> None:
    ranked = {"id": "r", "results": [{"index": 1, "relevance_score": 0.9}], "meta": {"billed_units": {}}}
    async with passing(tmp_path, "rerank") as (served, [other]):
        other.answer = always(lambda: web.json_response(ranked))
        body = {"model": "rerank", "query": "tea", "documents": ["The moon", "Green tea"], "top_n": 1}
        assert await served.post(body, path) == (200, ranked)
        assert json.loads(other.seen[0].body) == body


# The model


async def test_every_route_goes_to_the_model_whose_kind_fits(tmp_path: Path) -> None:
    kinds = sorted({kind for kinds in ROUTES.values() for kind in kinds})
    async with passing(tmp_path, *kinds) as (served, upstreams):
        for path, fitting in ROUTES.items():
            for kind, other in zip(kinds, upstreams, strict=True):
                async with served.client.post(served.url + path, **body_of(path, model=kind)) as answer:
                    body = await answer.json()
                if kind in fitting:
                    assert (answer.status, body, other.seen.pop().path) == (200, EMBEDDED, path)
                else:
                    assert (answer.status, body["error"]["param"]) == (400, "model"), path
                    assert f"of the kind {kind!r}" in body["error"]["message"]
        assert not any(other.seen for other in upstreams)


@pytest.mark.parametrize("path", ROUTES)
async def test_body_is_passed_on_byte_for_byte(tmp_path: Path, path: str) -> None:
    async with passing(tmp_path, "any") as (served, [other]):
        written = form(model="any")() if path in FORMS else None
        body = await written.as_bytes() if written else b'\n{"model" :"any",  "a": 1.0e2, "b": "\\u00e4"}'
        kind = written.headers["Content-Type"] if written else "application/json; charset=utf-8"
        async with served.client.post(served.url + path, data=body, headers={"Content-Type": kind}) as answer:
            assert (answer.status, await answer.json()) == (200, EMBEDDED)
        [request] = other.seen
        assert (request.body, request.headers["content-type"]) == (body, kind)
        assert request.headers["content-length"] == str(len(body))


@pytest.mark.parametrize(
    ("names", "named", "sent"),
    [
        (("embed",), "embed", "embed"),
        (("embed",), "my-embed", "embed"),
        (("embed", "my-embed"), "my-embed", "my-embed"),
        (("BAAI/bge-m3", "an-adapter"), "embed", "BAAI/bge-m3"),
        (("BAAI/bge-m3",), None, "BAAI/bge-m3"),
        ((), "my-embed", "embed"),
    ],
)
async def test_model_has_the_name_that_its_server_knows(
    tmp_path: Path, names: tuple[str, ...], named: str | None, sent: str
) -> None:
    async with passing(tmp_path, "embed") as (served, [other]):
        other.names = names
        body = {"input": "Hi"} | ({"model": named} if named else {})
        assert (await served.post(body, EMBEDDINGS))[0] == 200
        assert json.loads(other.seen[0].body) == body | {"model": sent}
        other.names, other.answer = ("another",), always(lambda: web.json_response({}, status=404))
        assert (await served.post(body, EMBEDDINGS))[0] == 404
        other.answer = None
        assert (await served.post(body, EMBEDDINGS))[0] == 200
        assert [request.model for request in other.seen] == [sent, sent, "another"]


async def test_unknown_model_gets_the_nearest_name_and_several_need_one(tmp_path: Path) -> None:
    async with passing(tmp_path, "embed_small", "embed", "audio") as (served, upstreams):
        status, answer = await served.post({"model": "embd"}, EMBEDDINGS)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "did you mean embed?" in answer["error"]["message"]
        status, answer = await served.post({}, EMBEDDINGS)
        assert (status, answer["error"]["param"]) == (400, "model")
        assert (await served.post({}, SPEECH))[0] == 200
        assert [len(other.seen) for other in upstreams] == [0, 0, 1]


async def test_route_without_a_model_that_could_answer_it_is_unknown(tmp_path: Path) -> None:
    async with passing(tmp_path, "embed") as (served, _):
        for path in ROUTES.keys() - {*OF_EMBEDDINGS}:
            async with served.client.post(served.url + path, **body_of(path, model="embed")) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (404, "unknown_url"), path


async def test_server_of_embeddings_takes_all_names_but_those_of_models(tmp_path: Path) -> None:
    async with passing(tmp_path, "embed", embeds=True) as (served, upstreams):
        for name in ("embed", "my-embed", "text-embedding-3-small", "any"):
            assert (await served.post({"model": name}, EMBEDDINGS))[0] == 200
        assert [[request.model for request in other.seen] for other in upstreams] == [
            ["embed", "embed"],
            ["text-embedding-3-small", "any"],
        ]


@pytest.mark.parametrize("path", OF_EMBEDDINGS)
@pytest.mark.parametrize("body", [b'{"a": 1 }', b'{"model": "x",\n"a": 1}'])
async def test_server_of_embeddings_gets_bodies_as_they_are(tmp_path: Path, path: str, body: bytes) -> None:
    async with passing(tmp_path, embeds=True) as (served, [other]):
        headers = {"Content-Type": "application/json"}
        async with served.client.post(f"{served.url}{path}?q=1", data=body, headers=headers) as answer:
            assert (answer.status, await answer.json()) == (200, EMBEDDED)
        assert [(request.path, request.body) for request in other.seen] == [(path, body)]


@pytest.mark.parametrize("path", ROUTES)
async def test_without_such_a_server_the_options_are_named(served: ScriptedServer, path: str) -> None:
    status, answer = await served.post({"input": "Hi"}, path)
    assert (status, answer["error"]["code"]) == (404, "unknown_url")
    assert "[models]" in answer["error"]["message"]
    assert ("--embeddings" in answer["error"]["message"]) is (path in OF_EMBEDDINGS)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model": 1}'])
async def test_body_that_names_no_model_in_json_is_refused(tmp_path: Path, body: bytes) -> None:
    async with passing(tmp_path, "embed") as (served, [other]):
        headers = {"Content-Type": "application/json"}
        async with served.client.post(served.url + EMBEDDINGS, data=body, headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (400, "invalid_request_error")
        assert other.seen == []


def test_page_has_the_kinds_of_each_route() -> None:
    rows = [re.findall("`(?:POST )?([^`]+)`", row) for row in re.findall(r"^\| (`POST .*) \|$", PAGE, re.MULTILINE)]
    listed = {path: {*row} - ROUTES.keys() for row in rows for path in row if path in ROUTES}
    assert listed == ROUTES


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(["model", "input", "a"]), inner)


json_values = st.recursive(
    st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner) | objects(inner)
)


@pytest.mark.parametrize("form_of", [None, b"--b\r\n", b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n'])
def test_any_body_is_refused_or_passed_on_as_it_is(tmp_path: Path, form_of: bytes | None) -> None:
    path = EMBEDDINGS if form_of is None else "/v1/audio/transcriptions"
    kind = "application/json" if form_of is None else "multipart/form-data; boundary=b"
    bodies = st.binary(max_size=60) | (
        st.one_of(json_values, objects(st.just("any"))).map(lambda value: json.dumps(value).encode())
        if form_of is None
        else st.lists(st.sampled_from([b"any", b"--b", b"--", b"\r\n", form_of, b"x"])).map(b"".join)
    )
    with asyncio.Runner() as runner:
        opened = passing(tmp_path, "any")
        served, [other] = runner.run(opened.__aenter__())

        async def exchange(body: bytes) -> int:
            async with served.client.post(served.url + path, data=body, headers={"Content-Type": kind}) as answer:
                await answer.json()
                return answer.status

        @examples(200)
        @given(bodies)
        def check(body: bytes) -> None:
            sent = (form_of or b"") + body
            status = runner.run(exchange(sent))
            assert status in (200, 400, 404)
            passed = [request.body for request in other.seen]
            other.seen.clear()
            assert len(passed) == (status == 200)
            assert all(each == sent or b"any" in each for each in passed)

        try:
            check()
        finally:
            runner.run(opened.__aexit__(None, None, None))


@pytest.mark.parametrize("path", [EMBEDDINGS, "/v1/audio/transcriptions"])
async def test_long_body_is_read_off_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    threads = list[threading.Thread]()

    def reading(body: bytes, content_type: str) -> NamedBody:
        threads.append(threading.current_thread())
        return read_named(body, content_type)

    monkeypatch.setattr(passing_module, "read_named", reading)
    async with passing(tmp_path, "any") as (served, _):
        for length in (1, LONG):
            async with served.client.post(served.url + path, **body_of(path, input="x" * length)) as answer:
                assert answer.status == 200
    assert threads[-1] is not threading.main_thread()


async def test_log_and_metrics_name_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def measured(status: str) -> float:
        sample = "penstock_passed_duration_seconds_count"
        return REGISTRY.get_sample_value(sample, {"model": "embed", "status": status}) or 0.0

    caplog.set_level("INFO")
    before = measured("200"), measured("502")
    async with passing(tmp_path, "embed") as (served, [other]):
        assert (await served.post({"model": "my-embed"}, EMBEDDINGS))[0] == 200
        other.answer = always(lambda: web.Response(status=307))
        assert (await served.post({}, EMBEDDINGS))[0] == 502
    assert (measured("200"), measured("502")) == (before[0] + 1, before[1] + 1)
    assert all(f"model {name}," in caplog.text for name in ("my-embed", "embed"))


# Keys and headers


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("key", ["", OTHER_KEY])
async def test_request_is_passed_on_without_the_key_of_its_client(tmp_path: Path, path: str, key: str) -> None:
    async with passing(tmp_path, "any", key=key, keys=Keys(given=[KEY])) as (served, [other]):
        headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "a-1", "Cookie": "a=b", "traceparent": TRACE}
        async with served.client.post(f"{served.url}{path}", headers=headers, **body_of(path, model="any")) as answer:
            assert (answer.status, await answer.json()) == (200, EMBEDDED)
            assert answer.headers["X-Request-Id"] == "a-1"
        [request] = other.seen
        assert (request.headers["x-request-id"], request.headers["traceparent"]) == ("a-1", TRACE)
        assert request.headers.get("authorization") == (f"Bearer {key}" if key else None)
        async with served.client.post(served.url + path, **body_of(path, model="any")) as answer:
            assert answer.status == 401


async def test_key_uses_its_models_alone(tmp_path: Path) -> None:
    one, two = Upstream(names=("one",)), Upstream(names=("two",))
    async with one.serving(), two.serving():
        tables = {name: {"kind": "embed", "engine": [each.url]} for name, each in (("one", one), ("two", two))}
        (tmp_path / "keys").write_text(f"{KEY} models=two\n")
        (tmp_path / "keys").chmod(0o600)
        own = {"api_key_file": tmp_path / "keys", "store": str(tmp_path / "store.sqlite3"), "sandbox": False}
        async with served_by(settings_of(tables, **own)) as (served, _):
            served.client.headers["Authorization"] = f"Bearer {KEY}"
            status, answer = await served.post({"model": "one"}, EMBEDDINGS)
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
            assert "one" not in answer["error"]["message"].replace("not 'one'", "")
            assert (await served.post({}, EMBEDDINGS))[0] == 200
    assert (len(one.seen), len(two.seen)) == (0, 1)


OF_REQUESTS = {"host", "accept", "accept-encoding", "content-type", "content-length", "x-request-id"}
OF_ANSWERS = {"content-type", "content-length", "date", "server", "x-request-id", "retry-after"}

tokens = st.text(st.characters(codec="ascii", categories=("L", "N")) | st.just("-"), min_size=1, max_size=12)
values = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=20)
KNOWN = (
    "Authorization",
    "X-Api-Key",
    "Cookie",
    "Set-Cookie",
    "Via",
    "X-Forwarded-For",
    "User-Agent",
    "Server",
    "Accept",
)
headers_sent = st.dictionaries(st.sampled_from(KNOWN) | tokens.map(lambda name: f"x-{name}"), values, max_size=8)


def test_no_header_leaks_in_either_direction(tmp_path: Path) -> None:
    secret = "secret-of-the-operator"
    with asyncio.Runner() as runner:
        opened = passing(tmp_path, "embed", key=secret)
        served, [other] = runner.run(opened.__aenter__())

        @examples(100)
        @given(headers_sent, headers_sent)
        def check(sent: dict[str, str], answered: dict[str, str]) -> None:
            other.answer = always(lambda: web.json_response(EMBEDDED, headers=answered))
            runner.run(exchange(sent))

        async def exchange(sent: dict[str, str]) -> None:
            async with served.client.post(
                served.url + EMBEDDINGS, json={"model": "embed"}, headers=sent | {"X-Request-Id": "a-1"}
            ) as answer:
                assert (answer.status, await answer.json()) == (200, EMBEDDED)
                got = {name.lower(): value for name, value in answer.headers.items()}
            assert got.keys() <= OF_ANSWERS
            assert secret not in str(got)
            passed = other.seen.pop().headers
            assert passed.keys() == OF_REQUESTS | {"authorization"}
            assert (passed["authorization"], passed["accept"]) == (f"Bearer {secret}", "*/*")

        try:
            check()
        finally:
            runner.run(opened.__aexit__(None, None, None))


async def test_status_and_content_type_come_back(tmp_path: Path) -> None:
    headers = {"Retry-After": "7", "X-Own": "1"}
    async with passing(tmp_path, "embed") as (served, [other]):
        other.answer = always(
            lambda: web.Response(body=b"\x00\x01", status=429, content_type="application/x-floats", headers=headers)
        )
        async with served.client.post(served.url + EMBEDDINGS, json={}) as answer:
            assert (answer.status, await answer.read()) == (429, b"\x00\x01")
            assert answer.headers["Content-Type"] == "application/x-floats"
            assert (answer.headers["Retry-After"], "X-Own" in answer.headers) == ("7", False)


@pytest.mark.parametrize("status", [301, 307, 401, 403])
async def test_redirect_is_not_followed_and_a_refused_key_is_no_fault_of_the_client(
    tmp_path: Path, status: int
) -> None:
    async with passing(tmp_path, "embed", key=OTHER_KEY) as (served, [other]):
        error = {"error": {"message": f"Wrong key {OTHER_KEY}"}}
        other.answer = always(
            lambda: web.json_response(error, status=status, headers={"Location": "http://192.0.2.1/"})
        )
        status, answer = await served.post({"input": "Hi"}, EMBEDDINGS)
        assert (status, answer["error"]["type"]) == (502, "server_error")
        assert OTHER_KEY not in str(answer)


# Streams


async def test_client_that_leaves_ends_the_request(tmp_path: Path) -> None:
    async with passing(tmp_path, "embed") as (served, [other]):
        other.answer = other.never
        asking = asyncio.create_task(served.post({"input": "Hi"}, EMBEDDINGS))
        await wait_until(lambda: other.waiting == 1)
        asking.cancel()
        await wait_until(lambda: other.waiting == 0)


async def test_client_that_leaves_a_stream_ends_it_and_holds_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended = asyncio.Event()
    written = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal written
        streamed = web.StreamResponse(headers={"Content-Type": "audio/wav"})
        await streamed.prepare(request)
        try:
            while True:
                await streamed.write(SOUND)
                written += len(SOUND)
        finally:
            ended.set()

    async with passing(tmp_path, "audio") as (served, [other]):
        other.answer = answer
        async with served.client.post(served.url + SPEECH, json={"input": "Hi"}) as spoken:
            await spoken.content.readexactly(10)
            before = -1
            while before != written:  # until the other server waits for the client, which reads no more
                before = written
                await asyncio.sleep(0.1)
            assert served.api.held.count == 0
            spoken.close()
        await ended.wait()
    assert written < 2**26
    assert "broke off" not in caplog.text


async def test_broken_answer_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    async with passing(tmp_path, "embed") as (served, [other]):
        other.answer = half
        with pytest.raises(aiohttp.ClientPayloadError):
            async with served.client.post(served.url + EMBEDDINGS, json={}) as answer:
                await answer.read()


# Servers


async def test_server_that_cannot_be_reached_is_a_bad_gateway(tmp_path: Path) -> None:
    settings = Settings.model_validate({"embeddings": f"http://127.0.0.1:{free_port()}"})
    async with running_server(ScriptedEngine(), tmp_path, resources=("passing",), settings=settings) as served:
        status, answer = await served.post({"input": "Hi"}, EMBEDDINGS)
    assert (status, answer["error"]["type"]) == (502, "server_error")


async def test_servers_of_a_model_take_turns_and_one_that_is_down_costs_no_request(tmp_path: Path) -> None:
    one, two = Upstream(names=("embed",)), Upstream(names=("embed",))
    async with one.serving(), two.serving():
        urls = [one.url, f"http://127.0.0.1:{free_port()}", f"{two.url}/v1/"]
        settings = settings_of({"embed": {"kind": "embed", "engine": urls}})
        async with running_server(ScriptedEngine(), tmp_path, resources=("passing",), settings=settings) as served:
            statuses = [(await served.post({"input": "Hi"}, EMBEDDINGS))[0] for _ in range(6)]
    assert statuses == [200] * 6
    assert min(len(one.seen), len(two.seen)) >= 2


async def test_another_model_answers_for_one_that_cannot(tmp_path: Path) -> None:
    other = Upstream(names=("small",))
    async with other.serving():
        down = {"kind": "embed", "engine": [f"http://127.0.0.1:{free_port()}"], "instead": "small"}
        models = {"big": down, "small": {"kind": "embed", "engine": [other.url]}}
        settings = settings_of(models)
        async with running_server(ScriptedEngine(), tmp_path, resources=("passing",), settings=settings) as served:
            assert (await served.post({"model": "big", "input": "Hi"}, EMBEDDINGS))[0] == 200
            other.answer = always(lambda: web.json_response({}, status=401))
            assert (await served.post({"model": "big", "input": "Hi"}, EMBEDDINGS))[0] == 502
    assert [request.model for request in other.seen] == ["small", "small"]


# Limits


async def test_limits_of_requests_hold(tmp_path: Path) -> None:
    admission = Admission()
    admission.tables = {"default": KeyLimits(requests_per_minute=1)}
    async with passing(tmp_path, "embed", admission=admission) as (served, [other]):
        assert [(await served.post({"input": "Hi"}, EMBEDDINGS))[0] for _ in range(2)] == [200, 429]
        assert len(other.seen) == 1


async def test_limits_of_running_responses_hold(tmp_path: Path) -> None:
    admission = Admission()
    admission.tables = {"default": KeyLimits(responses=1)}
    async with passing(tmp_path, "embed", admission=admission) as (served, [other]):
        other.answer = other.never
        asking = asyncio.create_task(served.post({"input": "Hi"}, EMBEDDINGS))
        await wait_until(lambda: other.waiting == 1)
        assert (await served.post({"input": "Hi"}, EMBEDDINGS))[0] == 429
        asking.cancel()
        await wait_until(lambda: other.waiting == 0)
        other.answer = None
        assert (await served.post({"input": "Hi"}, EMBEDDINGS))[0] == 200


USAGE = {"usage": {"prompt_tokens": 60, "prompt_tokens_details": None, "total_tokens": 60}}
LONG_ANSWER = {"data": [0.5] * 5_000}


@pytest.mark.parametrize(
    ("answer", "counts"),
    [
        (USAGE | LONG_ANSWER, True),
        (LONG_ANSWER | USAGE, True),
        ({"usage": {"input_token_details": {"text_tokens": 0}, "total_tokens": 60}}, True),
        (LONG_ANSWER | {"meta": {"billed_units": {"input_tokens": 20, "image_tokens": 40}}}, True),
        (LONG_ANSWER, False),
        ({"text": json.dumps({"billed_units": {"input_tokens": 60}})}, False),
        ({"text": json.dumps(USAGE)}, False),
    ],
)
async def test_limits_of_tokens_count_what_an_answer_says(tmp_path: Path, answer: Any, counts: bool) -> None:
    admission = Admission(None, OwnAllowances(lambda: 0.0), clock=lambda: 0.0)
    admission.tables = {"default": KeyLimits(tokens_per_minute=100)}
    async with passing(tmp_path, "embed", admission=admission) as (served, [other]):
        other.answer = always(lambda: web.json_response(answer))
        statuses = [(await served.post({"input": "Hi"}, EMBEDDINGS))[0] for _ in range(3)]
    assert statuses == [200, 200, 429 if counts else 200]


@pytest.mark.parametrize(
    ("path", "api"), [(EMBEDDINGS, "embeddings"), ("/v1/rerank", "rerank"), ("/pooling", "pooling")]
)
async def test_answers_are_noted_with_their_tokens(tmp_path: Path, path: str, api: str) -> None:
    async with passing(tmp_path, "any") as (served, [other]):
        other.answer = always(lambda: web.json_response(USAGE | LONG_ANSWER))
        for request_id in ("one", "one", "other"):  # the client's name is no name of a use
            headers = {"X-Request-Id": request_id}
            async with served.client.post(served.url + path, json={"model": "my-any"}, headers=headers) as answer:
                await answer.read()
        other.answer = always(lambda: web.json_response({"error": {"message": "No."}}, status=400))
        await served.post({"model": "any"}, path)
        await served.store.writer.flushed()
        noted = await served.store.context.read("select model, api, input_tokens, output_tokens from ledger")
    assert list(map(tuple, noted)) == [("any", api, 60, 0)] * 3


@pytest.mark.parametrize("path", [EMBEDDINGS, "/v1/audio/transcriptions"])
async def test_body_that_is_too_large_is_refused(tmp_path: Path, path: str) -> None:
    async with passing(tmp_path, "any", max_body_bytes=len(SOUND)) as (served, [other]):
        async with served.client.post(
            served.url + path, **body_of(path, model="any", input="x" * len(SOUND))
        ) as answer:
            assert answer.status == 413
        assert other.seen == []


async def test_large_bodies_are_passed_on_and_held_until_the_answer_begins(tmp_path: Path) -> None:
    async with passing(tmp_path, "audio", max_body_bytes=2**25) as (served, [other]):
        going = asyncio.Event()

        async def answer(request: web.Request) -> web.StreamResponse:
            streamed = web.StreamResponse()
            await streamed.prepare(request)
            await streamed.write(b"{")
            await going.wait()
            await streamed.write_eof(b"}")
            return streamed

        other.answer = answer
        written = form(more=BytesIO(b"\r\n" * 2**21), model="my-audio")
        async with served.client.post(f"{served.url}/v1/audio/transcriptions", data=written) as answered:
            assert await answered.content.readexactly(1) == b"{"
            assert served.api.held.count == 0
            going.set()
            assert await answered.read() == b"}"
        assert len(other.seen[0].body) > 2**22


# Settings


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
async def test_the_setting_takes_the_url_with_and_without_its_version(tmp_path: Path, end: str) -> None:
    given_settings = {"engine": [f"replay:{HARMONY}"], "store": str(tmp_path / "store.sqlite3"), "sandbox": False}
    settings = Settings.model_validate({**given_settings, "embeddings": f"http://embedder:8001{end}"})
    async with running(settings) as started:
        assert settings.embeddings == "http://embedder:8001"
        assert {route.path for route in started.api.resources} & ROUTES.keys() == {*OF_EMBEDDINGS}


@pytest.mark.parametrize("url", ["embedder:8001", "ftp://embedder", "http://", "http://a b"])
def test_the_setting_needs_a_url(url: str) -> None:
    with pytest.raises(ValidationError, match="http://"):
        Settings.model_validate({"embeddings": url})


# Models that are loaded as they are used


def commanded(folder: Path, command: str) -> AbstractAsyncContextManager[tuple[ApiClient, Running]]:
    """Serve a model that embeds by a command for the length of a block."""
    models = {"embed": {"kind": "embed", "command": command, "engine_key": SecretStr(OTHER_KEY)}}
    own = {"store": str(folder / "store.sqlite3"), "sandbox": False}
    return served_by(settings_of(models, **own))


async def test_model_is_loaded_for_a_request_and_stays_for_its_length(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with commanded(tmp_path, f"{MODEL} --log {log} --hang /pooling") as (served, started):
        assert isinstance(started.scheduler.engine, ManyEngines)
        life = started.scheduler.engine.catalogue.all["embed"].life
        assert life.state == "stopped"
        async with served.client.post(served.url + EMBEDDINGS, json={"input": "Hi"}) as answer:
            assert (await answer.json(content_type=None))["environment"]
        assert log.read_text().splitlines() == ["start", '/v1/embeddings {"input":"Hi","model":"scripted"}']
        assert (life.state, life.running) == ("ready", 0)
        asking = asyncio.create_task(served.post({"input": "Hi"}, "/pooling"))
        await wait_until(lambda: life.running == 1)
        asking.cancel()
        await wait_until(lambda: life.running == 0)


async def test_model_that_cannot_start_says_why(tmp_path: Path) -> None:
    async with commanded(tmp_path, f"{MODEL} --exit-at-start 3") as (served, _):
        status, answer = await served.post({"input": "Hi"}, EMBEDDINGS)
        assert status == 503
        assert "ended with status 3" in answer["error"]["message"]


async def test_stand_in_answers_without_a_lease_of_the_other_model(tmp_path: Path) -> None:
    other = Upstream(names=("small",))
    async with other.serving():
        models = {
            "big": {"kind": "embed", "command": f"{MODEL} --die {EMBEDDINGS}", "instead": "small"},
            "small": {"kind": "embed", "engine": [other.url]},
        }
        settings = settings_of(models, store=str(tmp_path / "store.sqlite3"), sandbox=False)
        async with served_by(settings) as (served, started):
            assert isinstance(started.scheduler.engine, ManyEngines)
            life = started.scheduler.engine.catalogue.all["big"].life
            other.answer = always(lambda: web.json_response({"leases": life.running}))
            assert await served.post({"model": "big", "input": "Hi"}, EMBEDDINGS) == (200, {"leases": 0})


async def test_models_change_while_the_server_runs(tmp_path: Path) -> None:
    other = Upstream(names=("later",))
    async with other.serving(), commanded(tmp_path, MODEL) as (served, started):
        assert (await served.post({"model": "later"}, EMBEDDINGS))[0] == 404
        assert started.take_models
        started.take_models(settings_of({"later": {"kind": "audio", "engine": [other.url]}}))
        assert (await served.post({"model": "embed"}, EMBEDDINGS))[0] == 404
        assert (await served.post({"model": "later"}, SPEECH))[0] == 200
