"""The rules of the Open Responses specification of 2026-04-24 for WebSockets and compaction, under both base URLs."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.pipeline.protocol.events import TERMINAL_TYPES
from tests.support.api_clients import PATIENCE
from tests.support.event_streams import checked, event_of_json
from tests.support.openapi import in_responses_names
from tests.support.server import PacedServer, script
from tests.support.socket_client import connected

Json = dict[str, Any]


@dataclass
class Turns:
    """A connection without lanes, which sends requests and reads the answers in turns."""

    socket: Any
    is_renamed: bool

    async def send(self, **fields: Any) -> None:
        await self.socket.send_str(json.dumps({"type": "response.create", "model": "tiny", "store": False, **fields}))

    async def read(self) -> Json:
        """Return the response of the next turn, whose events are checked, or the one frame of its error."""
        frames: list[Json] = []
        while not frames or frames[-1]["type"] not in (*TERMINAL_TYPES, "error"):
            text = await self.socket.receive_str(timeout=PATIENCE)
            frames.append(json.loads(in_responses_names(text.encode()) if self.is_renamed else text))
        if frames[0]["type"] == "error":
            return frames[0]
        checked(map(event_of_json, frames))
        response: Json = frames[-1]["response"]
        return response

    async def create(self, **fields: Any) -> Json:
        await self.send(**fields)
        return await self.read()


@pytest.fixture(params=["/v1", "/openresponses/v1"])
def base(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def turns(served: PacedServer, base: str) -> AsyncGenerator[Turns, None]:
    async with connected(served, base) as client:
        yield Turns(client.socket, base != "/v1")


def not_found(response_id: str) -> Json:
    message = f"Previous response with id '{response_id}' not found."
    error = {"type": "invalid_request_error", "code": "previous_response_not_found", "message": message}
    return {"type": "error", "status": 400, "error": {**error, "param": "previous_response_id"}}


async def test_turns_on_one_connection_run_one_after_another(served: PacedServer, turns: Turns) -> None:
    """`Turns.read` would find the events of two turns that overlap."""
    for number in range(3):
        await turns.send(input=f"Reply {number}.")
    responses = [await turns.read() for _ in range(3)]
    assert [response["status"] for response in responses] == ["completed"] * 3
    assert ["Reply 0." in served.prompt_text(0), "Reply 2." in served.prompt_text(2)] == [True, True]


async def test_turn_continues_a_response_that_is_not_stored(served: PacedServer, turns: Turns, base: str) -> None:
    first = await turns.create(input="The code word is cobalt.")
    second = await turns.create(input="What is the code word?", previous_response_id=first["id"])
    assert (second["status"], second["previous_response_id"]) == ("completed", first["id"])
    assert "cobalt" in served.prompt_text()
    async with connected(served, base) as later:
        reconnected = Turns(later.socket, turns.is_renamed)
        assert await reconnected.create(input="Go on.", previous_response_id=second["id"]) == not_found(second["id"])
        assert (await reconnected.create(input="Hi"))["status"] == "completed"


async def test_missing_response_is_not_found(turns: Turns) -> None:
    assert await turns.create(input="Hi", previous_response_id="resp_missing") == not_found("resp_missing")


async def test_turn_that_fails_evicts_the_response_that_it_continues(turns: Turns) -> None:
    first = await turns.create(input="The code word is ember.")
    output = {"type": "function_call_output", "call_id": "call_missing", "output": "No call has this id."}
    failed = await turns.create(input=[output], previous_response_id=first["id"])
    assert (failed["type"], failed["status"]) == ("error", 400)
    assert await turns.create(input="Go on.", previous_response_id=first["id"]) == not_found(first["id"])


REFUSED: dict[str, Json] = {
    "a model that is not served": {"model": "absent"},
    "a wrong type": {"input": 5},
    "no input": {"input": []},
    "a wrong event": {"type": "response.append"},
    "an output without a call": {"input": [{"type": "function_call_output", "call_id": "call_1", "output": ""}]},
    "an unsealed compaction": {"input": [{"type": "compaction", "encrypted_content": "gAAAA"}]},
}


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED.keys())
async def test_every_error_has_a_status_and_a_code(turns: Turns, fields: Json) -> None:
    frame = await turns.create(**{"input": "Hi", **fields})
    assert frame["type"] == "error"
    assert 400 <= frame["status"] < 500
    assert isinstance(frame["error"]["code"], str)


COMPACTED: list[Json] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "The code word is slate."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "OK."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Compress this conversation."}]},
]
SUMMARY = "<|channel|>final<|message|>A word was agreed on."


async def test_compacted_window_begins_a_new_chain(served: PacedServer, turns: Turns, base: str) -> None:
    served.engine.script = script(SUMMARY)
    body = {"model": "tiny", "input": COMPACTED, "prompt_cache_key": "rules"}
    status, compacted = await served.post(body, f"{base}/responses/compact")
    assert (status, compacted["object"]) == (200, "response.compaction")
    assert compacted.keys() == {"id", "object", "created_at", "output", "usage"}
    assert [item["type"] for item in compacted["output"]] == ["message", "message", "compaction"]
    served.engine.script = script()
    go_on = {"type": "message", "role": "user", "content": "Continue from here."}
    response = await turns.create(input=[*compacted["output"], go_on], tools=[])
    assert response["status"] == "completed"
    prompt = served.prompt_text()
    assert "A word was agreed on." in prompt
    assert prompt.endswith("<|start|>user<|message|>Continue from here.<|end|><|start|>assistant")


async def test_compaction_needs_a_model(served: PacedServer, base: str) -> None:
    status, answer = await served.post({"input": COMPACTED}, f"{base}/responses/compact")
    assert (status, answer["error"]["param"]) == (400, "model")


async def test_history_may_name_its_phases(turns: Turns) -> None:
    said = {"type": "message", "role": "assistant", "content": "The number is four."}
    history = [{**said, "phase": phase} for phase in ("commentary", "final_answer")]
    asked = {"type": "message", "role": "user", "content": "Repeat only the number."}
    assert (await turns.create(input=[*history, asked]))["status"] == "completed"
