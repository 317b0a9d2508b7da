"""A stream that waits long for its first event gets signs of life; what comes after them is the same as without."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import ClientResponse
from openai.types.responses import ResponseErrorEvent

from penstock.api.dialect import REFUSALS
from penstock.api.dialects.named import spoken
from penstock.pipeline import errors
from penstock.pipeline.core import Pipeline
from penstock.pipeline.protocol.events import KEEP_ALIVE
from penstock.services.engines.scripted import ScriptedEngine
from tests.examples.a_dialect_of_your_own import TOY
from tests.support.api_clients import USER_MESSAGE, conversation_id, openai_client, wait_until
from tests.support.messages import anthropic_client
from tests.support.server import ScriptedServer, running_server, script

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

CHAT = "/v1/chat/completions"
REQUESTS: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "responses": ("/v1/responses", {"input": "Hi"}, KEEP_ALIVE),
    "open_responses": ("/openresponses/v1/responses", {"input": "Hi"}, KEEP_ALIVE),
    "chat": (CHAT, {"messages": [USER_MESSAGE]}, KEEP_ALIVE),
    "chats": (CHAT, {"messages": [USER_MESSAGE], "n": 3}, KEEP_ALIVE),
    "completions": ("/v1/completions", {"prompt": ["Hi", "Ho"]}, KEEP_ALIVE),
    "messages": ("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": [USER_MESSAGE]}, PING),
    "toy": ("/toy/v1/say", {"say": "Hi"}, KEEP_ALIVE),
}
"""The path and the body of a request, and the sign of life of its streams."""

PLACES = ["normalize", "generate"]
"""The stages before which a request waits: until its model is loaded, and until it has a place."""


@dataclass
class Gate:
    """An edit of a pipeline: a stage ``before`` another, where requests wait until it is open, or are refused."""

    before: str
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: Callable[[], Exception] | None = None
    held: int = 0

    def __call__(self, pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        return pipeline.insert_before(self.before, "gate", self.passed)

    async def passed(self, source: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        async for frame in source:
            self.held += 1
            try:
                await self.opened.wait()
            finally:
                self.held -= 1
            if self.refusal:
                raise self.refusal()
            yield frame


@dataclass
class Waiting:
    """A server whose streams get a sign of life nearly at once, if ``keep_alive`` is the default, and its gate."""

    served: ScriptedServer
    gate: Gate

    @asynccontextmanager
    async def asked(self, name: str, **headers: str) -> AsyncGenerator[ClientResponse, None]:
        """Ask for a stream, and get its headers and two signs of life; the client leaves at the end of the block."""
        path, body, sign = REQUESTS[name]
        url, data = self.served.url + path, {**body, "stream": True}
        async with self.served.client.post(url, json=data, headers=headers) as answer:
            assert answer.status == 200
            assert await answer.content.readexactly(2 * len(sign)) == 2 * sign
            yield answer

    async def rest(self, answer: ClientResponse, name: str) -> bytes:
        """Open the gate, and return what comes then."""
        self.gate.opened.set()
        return (await answer.content.read()).replace(REQUESTS[name][2], b"")


@asynccontextmanager
async def waiting(folder: Path, place: str = "generate", keep_alive: float = 0.01) -> AsyncGenerator[Waiting, None]:
    gate, store = Gate(place), str(folder / f"{keep_alive}.sqlite3")
    engine, dialects = ScriptedEngine(script()), (*spoken(), TOY)
    async with running_server(engine, store, edit=gate, keep_alive=keep_alive, dialects=dialects) as served:
        yield Waiting(served, gate)


def alike(stream: bytes) -> list[bytes]:
    """Return the frames of a stream without what differs from response to response."""
    return sorted(re.sub(rb"pst1\.[\w-]+|[0-9a-f]{24,}|\d{9,}", b"", stream).split(b"\n\n"))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", REQUESTS)
async def test_answer_after_a_silence_is_as_without(tmp_path: Path, name: str, place: str) -> None:
    path, body, _ = REQUESTS[name]
    async with waiting(tmp_path, place) as at, at.asked(name, **{"X-Request-Id": "mine"}) as answer:
        assert answer.headers["X-Request-Id"] == "mine"
        assert answer.headers["X-Accel-Buffering"] == "no"
        told = await at.rest(answer, name)
    async with waiting(tmp_path, place, keep_alive=300) as at:
        at.gate.opened.set()
        assert alike(told) == alike(await at.served.stream(body, path))


def bug() -> Exception:
    return LookupError("a bug of a stage")


REFUSED: list[Callable[[], Any]] = [
    *(partial(errors.error_named, kind.__name__, "It cannot be.") for kind in REFUSALS),
    partial(errors.InvalidRequest, "It is wrong.", param="input", code="invalid_value"),
    partial(errors.ContextTooLong, 9, 8),
    partial(errors.ModelUnavailable, "tiny", "it is starting", 7.0),
    partial(errors.LimitReached, "There are too many.", 3.0),
    errors.ConversationLocked,
    bug,
]


@pytest.mark.parametrize("name", REQUESTS)
async def test_refusal_after_a_silence_says_what_it_says_as_a_status(tmp_path: Path, name: str) -> None:
    path, body, _ = REQUESTS[name]
    request_id = {"X-Request-Id": "mine"}
    async with waiting(tmp_path) as at, waiting(tmp_path, keep_alive=300) as at_once:
        at_once.gate.opened.set()
        for refusal in REFUSED:
            at.gate.opened.clear()
            at.gate.refusal = at_once.gate.refusal = refusal
            url, data = at_once.served.url + path, {**body, "stream": True}
            async with at_once.served.client.post(url, json=data, headers=request_id) as answer:
                assert answer.status >= 400
                said = await answer.json()
            async with at.asked(name, **request_id) as answer:
                told = await at.rest(answer, name)
            [frame] = [json.loads(data) for data in re.findall(rb"^data: (\{.*\})$", told, re.MULTILINE)]
            assert frame | said == frame
            if "sequence_number" in frame:
                ResponseErrorEvent.model_validate(frame, strict=True)
                assert (frame["message"], frame["sequence_number"]) == (said["error"]["message"], 0)


async def responses(client: openai.AsyncOpenAI, go: Callable[[], None]) -> str:
    stream = await client.responses.create(model="tiny", input="Hi", stream=True)
    go()
    return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])


async def helped_responses(client: openai.AsyncOpenAI, go: Callable[[], None]) -> str:
    async with client.responses.stream(model="tiny", input="Hi") as stream:
        go()
        return str((await stream.get_final_response()).output_text)


async def chat(client: openai.AsyncOpenAI, go: Callable[[], None]) -> str:
    messages: Any = [USER_MESSAGE]
    stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
    go()
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def helped_chat(client: openai.AsyncOpenAI, go: Callable[[], None]) -> str:
    messages: Any = [USER_MESSAGE]
    async with client.chat.completions.stream(model="tiny", messages=messages) as stream:
        go()
        return (await stream.get_final_completion()).choices[0].message.content or ""


async def completions(client: openai.AsyncOpenAI, go: Callable[[], None]) -> str:
    stream = await client.completions.create(model="tiny", prompt="Hi", stream=True)
    go()
    return "".join([chunk.choices[0].text async for chunk in stream])


async def messages(client: anthropic.AsyncAnthropic, go: Callable[[], None]) -> str:
    async with client.messages.stream(
        model="tiny", max_tokens=99, messages=[{"role": "user", "content": "Hi"}]
    ) as stream:
        go()
        return await stream.get_final_text()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("heard", [responses, helped_responses, chat, helped_chat, completions, messages])
async def test_sdk_hears_the_answer_or_raises_the_error(
    tmp_path: Path, heard: Callable[[Any, Callable[[], None]], Awaitable[str]], place: str
) -> None:
    async with AsyncExitStack() as closing:
        at = await closing.enter_async_context(waiting(tmp_path, place))
        client = anthropic_client(at.served.url) if heard is messages else openai_client(at.served.url)
        await closing.enter_async_context(client)
        assert "Hello!" in await heard(client, at.gate.opened.set)
        at.gate.opened.clear()
        at.gate.refusal = lambda: errors.EngineOverloaded("The engine is full.")
        with pytest.raises((openai.APIError, anthropic.APIError), match=r"The engine is full\."):
            await heard(client, at.gate.opened.set)


@pytest.mark.parametrize("place", PLACES)
async def test_refusal_after_a_silence_is_in_the_access_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    async with waiting(tmp_path, place) as at:
        at.gate.refusal = lambda: errors.EngineOverloaded("The engine is full.")
        with caplog.at_level(logging.INFO, "penstock.api.http.access_log"):
            async with at.asked("chat") as answer:
                await at.rest(answer, "chat")
            await wait_until(lambda: caplog.records)
    [line] = [record.getMessage() for record in caplog.records if record.name == "penstock.api.http.access_log"]
    assert line.startswith(f"POST {CHAT}: 200, failed in ")
    assert line.endswith(": The engine is full. (code rate_limit_exceeded)")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", REQUESTS)
async def test_client_that_leaves_while_it_waits_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, place: str
) -> None:
    async with waiting(tmp_path, place) as at:
        scheduler = at.served.scheduler
        with caplog.at_level(logging.INFO, "penstock.api.http.access_log"):
            async with at.asked(name):
                await wait_until(lambda: at.gate.held)
            await wait_until(lambda: at.gate.held == scheduler.in_flight.count == 0)
            await wait_until(lambda: "client left" in caplog.text)
        assert at.served.engine.prompts == []
        assert not list(scheduler.runs)


async def test_client_that_leaves_while_it_waits_unlocks_its_conversation(tmp_path: Path) -> None:
    async with waiting(tmp_path) as at:
        body = {"input": "Hi", "conversation": conversation_id(await at.served.create_conversation())}
        url = f"{at.served.url}/v1/responses"
        async with at.served.client.post(url, json={**body, "stream": True}):
            await wait_until(lambda: at.gate.held)
            status, answer = await at.served.post(body)
            assert (status, answer["error"]["code"]) == (409, "conversation_locked")
        await wait_until(lambda: at.gate.held == at.served.scheduler.in_flight.count == 0)
        at.gate.opened.set()
        status, answer = await at.served.post(body)
        assert (status, answer["status"]) == (200, "completed")


@pytest.mark.parametrize("place", PLACES)
async def test_request_that_does_not_stream_gets_nothing_before_its_answer(tmp_path: Path, place: str) -> None:
    async with waiting(tmp_path, place) as at:
        for refusal, expected in ((None, 200), (lambda: errors.EngineOverloaded("It is full."), 503)):
            at.gate.refusal = refusal
            at.gate.opened.clear()
            whole = asyncio.create_task(at.served.post({"input": "Hi"}))
            await wait_until(lambda: at.gate.held == 1)
            async with at.asked("responses") as answer:  # which waits for no longer
                await at.rest(answer, "responses")
            status, _ = await whole
            assert status == expected
