"""Texts of `stop`: the parser finds them in a message, and the engine then stops, though it was not told of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import api_clients
from tests.support.event_streams import final, read_sse
from tests.support.server import ScriptedServer, script

THOUGHT = "<|channel|>analysis<|message|>one END two<|end|><|start|>assistant"
MESSAGE = "<|channel|>final<|message|>three END four"
ENDED = {"input": "Count.", "stop": "END"}


def texts(items: list[dict[str, Any]]) -> list[str]:
    return [part["text"] for item in items for part in item["content"]]


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
async def test_engine_stops_at_a_stop_text(served: ScriptedServer, chunk_size: int) -> None:
    served.engine.script = script(THOUGHT + MESSAGE, endless=True, chunk_size=chunk_size)
    _, answer = await served.post(ENDED)
    assert (answer["status"], texts(answer["output"])) == ("completed", ["one END two", "three "])
    assert answer["stop_reason"] == "END"
    assert answer["usage"]["output_tokens"] == len(script(f"{THOUGHT}{MESSAGE[: -len(' four')]}").token_ids)
    await api_clients.wait_until(lambda: not served.engine.running)
    assert served.engine.aborted == 1


async def test_text_after_a_stop_text_is_never_streamed(served: ScriptedServer) -> None:
    served.engine.script = script(THOUGHT + MESSAGE, endless=True)
    async with served.open_stream(ENDED) as stream:
        answered = await stream.rest()
    assert b"four" not in answered
    response = final(read_sse(answered))
    assert response.status == "completed"
    stored = await served.get_response(response.id)
    assert texts(stored["output"]) == ["one END two", "three "]


async def test_call_before_a_stop_text_is_the_clients(served: ScriptedServer) -> None:
    call = "<|channel|>commentary to=functions.f<|message|>{}<|call|><|start|>assistant"
    served.engine.script = script(call + MESSAGE, endless=True)
    _, answer = await served.post({**ENDED, "tools": [{"type": "function", "name": "f", "parameters": {}}]})
    assert [item["type"] for item in answer["output"]] == ["function_call", "message"]
