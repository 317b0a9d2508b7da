"""The answer to a line of a batch is the one that HTTP gives to the same body."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from penstock.extensions.batches.answering import ENDPOINTS, Answering, whole_use
from penstock.extensions.batches.batch import LineAnswer
from penstock.extensions.batches.line_runs import LineRequest
from penstock.extensions.batches.places import Rule
from penstock.extensions.batches.yielding import Yielding
from penstock.pipeline.errors import EngineDead, EngineFailed, LimitReached, ServerStopping
from penstock.services.use import Use
from tests.support.api_clients import USER_MESSAGE, wait_until
from tests.support.deciding_engine import DecidingEngine
from tests.support.passing import EMBEDDED, passing, settings_of
from tests.support.server import CALL, DEFAULTS, HELLO, WEATHER, PacedEngine, Server, running_server, script

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, DECISIONS, EMBEDDINGS = "/v1/responses", "/v1/decisions", "/v1/embeddings"
TALK = [USER_MESSAGE]
LONG = "long " * 3000

BODIES: dict[str, list[Any]] = {
    RESPONSES: [
        {"input": "Hi"},
        {"input": "Hi", "store": False, "temperature": 0, "metadata": {"a": "b"}},
        {"input": "Hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
        {"input": TALK, "tools": [WEATHER], "instructions": "Be brief."},
        {"input": "Hi", "max_output_tokens": 1},
        {"input": "Hi", "previous_response_id": "resp_none"},
        {"input": "Hi", "conversation": "conv_none"},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_file", "file_id": "file-none"}]}]},
        {"input": "Hi", "tools": [{"type": "file_search", "vector_store_ids": ["vs_none"]}]},
        {"input": LONG},
        {"input": 5},
        {"inptu": "Hi"},
        {"model": "other", "input": "Hi"},
        {"input": "Hi", "reasoning": {"effort": "enormous"}},
        {"input": "Hi", "request_id": "mine"},
    ],
    CHAT: [
        {"messages": TALK},
        {"messages": TALK, "n": 3},
        {"messages": TALK, "return_token_ids": True, "logprobs": True},
        {"messages": TALK, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {"messages": TALK, "store": True},
        {"messages": []},
        {"messages": [{"role": "nobody", "content": "Hi"}]},
        {"messages": [{"role": "user", "content": LONG}]},
        {"messages": TALK, "temperature": 9},
        {"model": "other", "messages": TALK},
        {},
    ],
    COMPLETIONS: [
        {"prompt": "Hi"},
        {"prompt": ["Hi", "Ho"], "n": 2, "echo": True},
        {"prompt": LONG},
        {"prompt": []},
        {"prompt": "Hi", "best_of": 2},
        {"prompt": "Hi", "max_tokens": -1},
    ],
    MESSAGES: [
        {"model": "tiny", "max_tokens": 99, "messages": TALK},
        {"model": "tiny", "max_tokens": 99, "messages": TALK, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"model": "tiny", "max_tokens": 99, "messages": [{"role": "user", "content": LONG}]},
        {"model": "tiny", "max_tokens": 0, "messages": TALK},
        {"model": "tiny", "messages": TALK},
        {"model": "other", "max_tokens": 9, "messages": TALK},
        {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "what"}]}]},
    ],
    DECISIONS: [
        {"input": "Hi", "questions": [{"type": "predicate", "instructions": "It is a greeting."}] * 3},
        {"input": "Hi", "questions": []},
        {"input": LONG, "questions": [{"type": "predicate", "instructions": "It is long."}]},
    ],
}
"""Bodies, good and bad, of each dialect."""

RAW = [b"", b"{", b"[]", b"null", b'{"input": "\xff"}', b'{"a": ' * 2000, b'"' + b"x" * 60_000, b"x" * 100_001]
"""Bytes that are no body of any dialect; the last ones are more than the server takes."""

SETTINGS = DEFAULTS.model_copy(update={"max_body_bytes": 100_000})

CHANGING = {"id", "created", "created_at", "completed_at", "request_id", "call_id", "encrypted_content", "signature"}


def lasting(value: Any) -> Any:
    """Return what is the same in two answers to one request."""
    if isinstance(value, Mapping):
        return {
            name: type(each).__name__ if name in CHANGING and each is not None else lasting(each)
            for name, each in value.items()
        }
    if isinstance(value, str):
        return re.sub(r"\b[a-z]+_[0-9a-f]{32}\b", "id", value)
    return [lasting(each) for each in value] if isinstance(value, list) else value


def line(path: str, body: Any, **fields: str) -> LineRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given: dict[str, Any] = {"id": "batch_a:1", "owner": "", "key_name": "", "team": ""} | fields
    return LineRequest(path=path, body=data, **given)


def answering(served: Server[Any]) -> Answering:
    parts = replace(served.parts, settings=SETTINGS)
    return Answering(parts, Yielding(served.scheduler, Rule()))


async def sent(served: Server[Any], asked: LineRequest) -> tuple[int, Any]:
    """Return the status and the body that HTTP answers."""
    headers = {"Content-Type": "application/json"}
    async with served.client.post(served.url + asked.path, data=asked.body, headers=headers) as answer:
        return answer.status, json.loads(await answer.read())


async def assert_equal(served: Server[Any], asked: LineRequest) -> LineAnswer:
    answer = await answering(served).answer(asked)
    status, body = await sent(served, asked)
    assert (answer.status, lasting(json.loads(answer.body))) == (status, lasting(body))
    assert answer.request_id
    return answer


@pytest.mark.parametrize("path", BODIES)
async def test_answers_are_those_of_http(tmp_path: Path, path: str) -> None:
    engine = DecidingEngine(context_length=2000) if path == DECISIONS else PacedEngine(script(), context_length=2000)
    async with running_server(engine, tmp_path) as served:
        for body in BODIES[path]:
            answer = await assert_equal(served, line(path, body))
            assert (answer.use is not None) == (answer.status == 200), body
        for raw in RAW:
            assert (await assert_equal(served, line(path, raw))).use is None


@pytest.mark.parametrize("text", [HELLO, CALL, "<|channel|>final<|message|>" + "é" * 40_000 + "<|return|>"])
async def test_answers_have_calls_and_may_be_long(tmp_path: Path, text: str) -> None:
    async with running_server(PacedEngine(script(text)), tmp_path) as served:
        await assert_equal(served, line(RESPONSES, {"input": "Hi", "tools": [WEATHER]}))
        function = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER["parameters"]}}
        await assert_equal(served, line(CHAT, {"messages": TALK, "tools": [function], "logprobs": True}))


@pytest.mark.parametrize(
    "error", [EngineFailed("It broke."), EngineDead("It is dead."), LimitReached("Too many.", 1.0), ValueError("bug")]
)
@pytest.mark.parametrize("path", [RESPONSES, CHAT, MESSAGES])
async def test_failures_are_those_of_http(tmp_path: Path, path: str, error: Exception) -> None:
    async with running_server(PacedEngine(script(error=lambda: error)), tmp_path) as served:
        assert (await assert_equal(served, line(path, BODIES[path][0]))).has_failed
    if isinstance(error, EngineDead):
        async with running_server(PacedEngine(script(error=error, dies=True)), tmp_path) as served:
            assert (await answering(served).answer(line(path, BODIES[path][0]))).may_pass
        async with running_server(PacedEngine(script(), is_alive=False), tmp_path) as served:
            assert (await assert_equal(served, line(path, BODIES[path][0]))).may_pass


@pytest.mark.parametrize("path", [path for path in BODIES if path != DECISIONS])
async def test_lines_have_no_stream(tmp_path: Path, path: str) -> None:
    async with running_server(PacedEngine(script()), tmp_path) as served:
        answer = await answering(served).answer(line(path, {**BODIES[path][0], "stream": True}))
        error = json.loads(answer.body)["error"]
        assert (answer.status, answer.use) == (400, None)
        assert error["message"].startswith("A line of a batch has one answer")
        assert error.get("param", "stream") == "stream"
        assert not served.engine.prompts


@pytest.mark.parametrize("path", BODIES)
async def test_lines_do_not_run_in_the_background(tmp_path: Path, path: str) -> None:
    async with running_server(PacedEngine(script()), tmp_path) as served:
        asked = line(path, {**BODIES[path][0], "background": True})
        if path != RESPONSES:  # the other APIs have no such parameter
            await assert_equal(served, asked)
            return
        answer = await answering(served).answer(asked)
        error = json.loads(answer.body)["error"]
        assert (answer.status, error["param"]) == (400, "background")
        assert error["message"].startswith("A line of a batch runs when its turn comes")


async def test_line_is_stored_and_counted_with_its_id(tmp_path: Path) -> None:
    async with running_server(PacedEngine(script()), tmp_path) as served:
        asked = line(RESPONSES, {"input": "Hi"}, owner="o", key_name="night", team="red")
        answer = await answering(served).answer(asked)
        body = json.loads(answer.body)
        stored = await served.store.get(body["id"], "o")
        assert stored is not None
        assert stored.response.status == "completed"
        usage, use = body["usage"], answer.use
        assert use is not None
        assert (use.id, use.owner, use.key_name, use.team) == ("batch_a:1", "o", "night", "red")
        assert (use.api, use.model, use.is_line) == ("responses", "tiny", True)
        assert (use.input_tokens, use.output_tokens) == (usage["input_tokens"], usage["output_tokens"])


async def test_use_of_several_choices_is_their_sum(tmp_path: Path) -> None:
    async with running_server(PacedEngine(script()), tmp_path) as served:
        answer = await answering(served).answer(line(CHAT, {"messages": TALK, "n": 3}))
        usage, use = json.loads(answer.body)["usage"], answer.use
        assert use is not None
        assert use.output_tokens == usage["completion_tokens"]
        one, two = Use(id="a", model="m", api="chat", searches=1), Use(id="b", model="m", api="chat", tool_seconds=0.5)
        assert whole_use([one, two]) == Use(id="a", model="m", api="chat", at=one.at, searches=1, tool_seconds=0.5)


async def test_cancelled_line_ends_its_generation(tmp_path: Path) -> None:
    engine = PacedEngine(script())
    engine.hold(1)
    async with running_server(engine, tmp_path) as served:
        yielding = Yielding(served.scheduler, Rule())
        task = asyncio.create_task(Answering(served.parts, yielding).answer(line(RESPONSES, {"input": "Hi"})))
        await wait_until(lambda: engine.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (engine.running, engine.aborted) == (0, 1)
        assert yielding.room() == Yielding(served.scheduler, Rule()).room()


async def test_large_lines_wait_together(tmp_path: Path) -> None:
    engine = PacedEngine(script())
    engine.hold(1)
    async with running_server(engine, tmp_path) as served:
        parts = replace(served.parts, settings=DEFAULTS.model_copy(update={"max_body_bytes": 3 * 2**20}))
        asking = Answering(parts, Yielding(served.scheduler, Rule(), at_once=1))
        padded = json.dumps({"input": "Hi", "store": False}).encode() + b" " * (2 * 2**20)
        tasks = [asyncio.create_task(asking.answer(line(RESPONSES, padded, owner="o"))) for _ in range(9)]
        await wait_until(lambda: engine.running == 1)
        engine.say_all()
        assert {(await task).status for task in tasks} == {200}


async def test_stopping_server_gives_a_line_no_answer(tmp_path: Path) -> None:
    engine = PacedEngine(script())
    engine.hold(1)
    async with running_server(engine, tmp_path) as served:
        task = asyncio.create_task(answering(served).answer(line(RESPONSES, {"input": "Hi", "store": False})))
        await wait_until(lambda: engine.running == 1)
        await served.scheduler.drain(0)
        with pytest.raises(ServerStopping):
            await task
        with pytest.raises(ServerStopping):
            await answering(served).answer(line(CHAT, {"messages": TALK}))


async def test_embeddings_are_passed_on(tmp_path: Path) -> None:
    async with passing(tmp_path, "embed") as (served, [other]):
        asked = line(EMBEDDINGS, {"model": "embed", "input": "Hi"}, owner="o", key_name="night")
        other.answer = embedded
        answer = await assert_equal(served, asked)
        use = answer.use
        assert use is not None
        assert (use.id, use.api, use.model, use.input_tokens) == ("batch_a:1", "embeddings", "embed", 7)
        assert (use.owner, use.key_name, use.is_line) == ("o", "night", True)
        wrong: list[Any] = [{"model": "other", "input": "Hi"}, {"model": "tiny", "input": "Hi"}, [], {"model": 5}]
        for body in wrong:
            await assert_equal(served, line(EMBEDDINGS, body))
        other.answer = refused
        assert (await assert_equal(served, asked)).use is None
        other.answer = full
        assert (await assert_equal(served, asked)).may_pass
        other.answer = broken
        answer = await answering(served).answer(asked)
        assert (answer.status, answer.may_pass) == (502, False)
    nowhere = settings_of({"embed": {"kind": "embed", "engine": ["http://127.0.0.1:1"]}})
    engine = PacedEngine(script())
    async with running_server(engine, tmp_path, resources=["passing"], settings=nowhere) as served:
        answer = await answering(served).answer(asked)
        assert (answer.status, answer.may_pass) == (502, True)


async def embedded(_: web.Request) -> web.StreamResponse:
    return web.json_response({**EMBEDDED, "usage": {"prompt_tokens": 7, "total_tokens": 7}})


async def refused(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "No."}}, status=400)


async def full(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "Later."}}, status=429)


async def broken(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Length": "100"})
    await answer.prepare(request)
    await answer.write(b"{")
    assert request.transport
    request.transport.close()
    return answer


async def test_paths_are_those_that_are_served(tmp_path: Path) -> None:
    async with running_server(PacedEngine(script()), tmp_path) as served:
        assert answering(served).paths == {RESPONSES, CHAT, COMPLETIONS, MESSAGES, DECISIONS}
    async with passing(tmp_path, "any") as (embedding, _):
        assert answering(embedding).paths == ENDPOINTS
