"""A long body is read in a thread, whichever way it comes, so that the event loop goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock.api.http.request_body import LONG
from penstock.api.socket.events import read_event
from penstock.pipeline.protocol.params.json_body import read_json
from tests.support.server import PacedServer
from tests.support.socket_client import connected

WORDS = "x" * LONG
MESSAGE = {"role": "user", "content": WORDS}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """For each body and event that is read: if it is long, and if the thread is that of the event loop."""
    seen = list[tuple[bool, bool]]()

    def watched(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        def reading(body: bytes) -> Any:
            seen.append((len(body) > LONG, threading.current_thread() is threading.main_thread()))
            return read(body)

        return reading

    monkeypatch.setattr("penstock.pipeline.protocol.params.validation.read_json", watched(read_json))
    monkeypatch.setattr("penstock.api.socket.connection.read_event", watched(read_event))
    return seen


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": [MESSAGE]}),
        ("/v1/responses/input_tokens", {"input": WORDS}),
        ("/v1/responses/compact", {"model": "tiny", "input": WORDS}),
        ("/openresponses/v1/responses", {"input": WORDS}),
        ("/v1/chat/completions", {"messages": [MESSAGE]}),
        ("/v1/completions", {"prompt": WORDS}),
        ("/v1/decisions", {"input": WORDS, "questions": [{"type": "predicate", "instructions": "It is long."}]}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 1, "messages": [MESSAGE]}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": [MESSAGE]}),
        ("/tokenize", {"prompt": WORDS, "model": "unknown"}),
        ("/detokenize", {"tokens": [1] * LONG, "model": "unknown"}),
        ("/v1/conversations", {"items": [MESSAGE]}),
        ("/v1/conversations/{conversation}", {"metadata": {}, "more": WORDS}),
        ("/v1/conversations/{conversation}/items", {"items": [MESSAGE]}),
    ],
)
async def test_long_body_is_read_off_the_loop(
    served: PacedServer, reads: list[tuple[bool, bool]], path: str, body: dict[str, Any]
) -> None:
    _, conversation = await served.post({}, "/v1/conversations")
    assert reads == [(False, True)]
    await served.post(body, path.format(conversation=conversation["id"]))
    assert reads[1:] == [(True, False)]


async def test_long_event_of_a_socket_is_read_off_the_loop(served: PacedServer, reads: list[tuple[bool, bool]]) -> None:
    async with connected(served) as client:
        await client.create(input="Hi")
        assert reads == [(False, True)] * 2
        await client.create(input=[MESSAGE])
        assert reads[2:] == [(True, False)] * 2
        await client.socket.send_json({"type": "response.steer", "previous_response_id": "resp_1", "input": WORDS})
        assert (await client.frame())["type"] == "response.steer.failed"
        assert reads[4:] == [(True, False)] * 2
