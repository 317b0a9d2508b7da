"""Steering over a WebSocket: a response that runs ends at a safe place, and a successor goes on with new input."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest
from openai.types.responses import (
    ResponseSteerAcceptedEvent,
    ResponseSteerFailedEvent,
    ResponseSteerPendingEvent,
)

from penstock.api.socket.steers import MOST_PENDING
from penstock.pipeline.errors import EngineOverloaded
from penstock.pipeline.protocol.response import IncompleteDetails, Response
from penstock.services.engines.scripted import Script
from tests.support.event_streams import event_of_json, final, read_sse
from tests.support.server import CALL, WEATHER, PacedServer, script
from tests.support.socket_client import Lane, SocketClient, connected

Json = dict[str, Any]

STEERED = IncompleteDetails("steered")
KINDS: dict[str, Any] = {
    "response.steer.accepted": ResponseSteerAcceptedEvent,
    "response.steer.pending": ResponseSteerPendingEvent,
    "response.steer.failed": ResponseSteerFailedEvent,
}


@pytest.fixture
async def client(served: PacedServer) -> AsyncGenerator[SocketClient, None]:
    async with connected(served) as client:
        yield client


async def steer(client: SocketClient, response_id: Any, given: Any = "Stop.", **fields: Any) -> None:
    event = {"type": "response.steer", "previous_response_id": response_id, "input": given, **fields}
    await client.socket.send_str(json.dumps(event))


async def began(client: SocketClient, lane: Lane = None) -> str:
    """Read the first two events of a response; return its id."""
    frames = [await client.frame(lane) for _ in range(2)]
    assert [frame["type"] for frame in frames] == ["response.created", "response.in_progress"]
    response_id: str = frames[0]["response"]["id"]
    return response_id


async def steering_event(client: SocketClient, lane: Lane = None) -> Json:
    """Return the next event about steering; events of the response before it are dropped."""
    while (frame := await client.frame(lane))["type"] not in KINDS:
        pass
    if "id" in frame["steer"]:  # else the input was wrong, and is returned as it was
        KINDS[frame["type"]].model_validate(frame, strict=False)
    return frame


async def next_ended(client: SocketClient, lane: Lane = None) -> Response:
    """Return the response that ends next; events before its end are dropped."""
    while (frame := await client.frame(lane))["type"] not in ("response.completed", "response.incomplete"):
        assert frame["type"] not in KINDS
        assert frame["type"] != "error"
    event: Any = event_of_json(frame)
    return event.response  # type: ignore[no-any-return]


async def paused(
    served: PacedServer, client: SocketClient, *, lane: Lane = None, chunks: int = 4, **fields: Any
) -> str:
    """Begin a response that pauses in the text of its first item; return its id."""
    served.engine.hold(chunks)
    await client.send(lane=lane, input="Hi", **fields)
    response_id = await began(client, lane)
    while not (await client.frame(lane))["type"].endswith(".delta"):
        pass
    return response_id


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("lane", [None, "a"])
async def test_successor_goes_on_with_the_new_input(
    served: PacedServer, client: SocketClient, lane: Lane, store: bool
) -> None:
    first = await paused(served, client, lane=lane, store=store, instructions="Be brief.", tools=[WEATHER])
    await steer(client, first, [{"role": "user", "content": "In French."}])
    accepted = await steering_event(client, lane)
    assert accepted["steer"] == {"id": accepted["steer"]["id"], "previous_response_id": first}
    served.engine.hold(1_000)
    served.engine.say_all()
    steered = await next_ended(client, lane)
    assert (steered.id, steered.incomplete_details) == (first, STEERED)
    assert [item.__struct_config__.tag for item in steered.output] == ["reasoning"]
    successor = final(await client.stream(lane))
    assert (successor.status, successor.previous_response_id, successor.instructions) == (
        "completed",
        first,
        "Be brief.",
    )
    assert (successor.store, successor.tools) == (store, steered.tools)
    prompt = served.prompt_text()
    texts = ("Hi", "A greeting.", "In French.")
    places = [prompt.index(text) for text in texts]
    assert places == sorted(places)
    assert "Hello!" not in prompt


async def test_every_input_is_read_in_order(served: PacedServer, client: SocketClient) -> None:
    first = await paused(served, client)
    parts = [{"type": "input_text", "text": "Two."}]
    for given in ("One.", [{"type": "message", "role": "user", "content": parts}], "Three."):
        await steer(client, first, given)
    ids = {(await steering_event(client))["steer"]["id"] for _ in range(3)}
    assert len(ids) == 3
    served.engine.hold(1_000)
    served.engine.say_all()
    await next_ended(client)
    await client.stream()
    prompt = served.prompt_text()
    places = [prompt.index(text) for text in ("One.", "Two.", "Three.")]
    assert places == sorted(places)


async def test_successor_is_steered_too(served: PacedServer, client: SocketClient) -> None:
    chain = [await paused(served, client)]
    for _ in range(3):
        await steer(client, chain[-1])
        await steering_event(client)
        served.engine.say_all()
        assert (await next_ended(client)).incomplete_details == STEERED
        chain.append(await began(client))
    served.engine.say_all()
    last = await next_ended(client)
    assert (last.id, last.previous_response_id, last.status) == (chain[-1], chain[-2], "completed")


async def test_response_at_its_last_item_is_completed_and_succeeded(served: PacedServer, client: SocketClient) -> None:
    served.engine.script = script("<|channel|>final<|message|>Hello, you!<|return|>")
    first = await paused(served, client)
    await steer(client, first)
    await steering_event(client)
    served.engine.hold(1_000)
    served.engine.say_all()
    assert (await next_ended(client)).status == "completed"
    assert final(await client.stream()).previous_response_id == first


async def steered_call(served: PacedServer, client: SocketClient) -> tuple[str, Response, Json]:
    """Steer a response that ends in a call of the client's; return its id, its end, and the event that accepts."""
    served.engine.script = script(CALL.partition("<|start|>assistant")[2])
    first = await paused(served, client, tools=[WEATHER], chunks=14)
    await steer(client, first, "In French.")
    accepted = await steering_event(client)
    served.engine.hold(1_000)
    served.engine.say_all()
    return first, await next_ended(client), accepted


async def test_input_waits_for_the_outputs_of_the_client(served: PacedServer, client: SocketClient) -> None:
    first, called, accepted = await steered_call(served, client)
    (call,) = [item for item in called.output if item.__struct_config__.tag == "function_call"]
    pending = await steering_event(client)
    assert pending["steer"] == accepted["steer"]
    (required,) = pending["required_input"]
    assert required == {"type": "function_call_output", "call_id": getattr(call, "call_id", ""), "name": "get_weather"}
    served.engine.script = script()
    await client.send(previous_response_id=first, input=[{**required, "output": "Rain."}])
    answer = final(await client.stream())
    assert (answer.status, answer.tools) == ("completed", ())
    prompt = served.prompt_text()
    assert prompt.index("Paris") < prompt.index("Rain.") < prompt.index("In French.")


async def test_input_is_returned_if_its_lane_goes_on_without_it(served: PacedServer, client: SocketClient) -> None:
    _, _, accepted = await steered_call(served, client)
    await steering_event(client)
    await client.send(input="Another thing.")
    failed = await steering_event(client)
    assert failed["error"]["code"] == "response_not_active"
    assert failed["steer"] == {**accepted["steer"], "input": "In French."}


WRONG: list[Json] = [
    {"given": []},
    {"given": 5},
    {"given": [{"role": "developer", "content": "x"}]},
    {"given": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
    {"given": [{"role": "user", "content": [{"type": "output_text", "text": "x"}]}]},
    {"stream_id": "a"},
    {"tools": []},
]


async def test_wrong_input_is_returned(served: PacedServer, client: SocketClient) -> None:
    first = await paused(served, client)
    for fields in WRONG:
        await steer(client, first, **fields)
        failed = await steering_event(client)
        assert (failed["error"]["code"], failed["error"]["type"]) == ("invalid_input", "invalid_request_error")
        assert failed["steer"] == {"previous_response_id": first, "input": fields.get("given", "Stop.")}
    served.engine.say_all()
    assert (await next_ended(client)).status == "completed"


async def test_unknown_and_ended_responses_are_not_steered(served: PacedServer, client: SocketClient) -> None:
    completed = await client.create(input="Hi")
    cut = await client.create(input="Hi", max_output_tokens=16, lane="b")
    assert cut.status == "completed"
    for response_id, code in (("resp_x", "response_not_found"), (completed.id, "response_already_completed")):
        await steer(client, response_id)
        assert (await steering_event(client))["error"]["code"] == code
    await steer(client, 5)
    error = await client.error()
    assert (error["status"], error["error"]["param"]) == (400, "previous_response_id")


@pytest.mark.parametrize(
    "fields",
    [{"generate": False}, {"context_management": [{"type": "compaction", "compact_threshold": 100_000}]}],
    ids=str,
)
async def test_responses_of_other_modes_are_not_steered(
    served: PacedServer, client: SocketClient, fields: Json
) -> None:
    served.engine.hold()
    await client.send(input="Hi", **fields)
    first = await began(client)
    await steer(client, first)
    assert (await steering_event(client))["error"]["code"] == "steering_not_supported"
    served.engine.say_all()
    assert (await next_ended(client)).status == "completed"


async def test_pending_inputs_have_a_bound(served: PacedServer, client: SocketClient) -> None:
    first = await paused(served, client)
    for _ in range(MOST_PENDING + 1):
        await steer(client, first)
    types = [(await steering_event(client))["type"] for _ in range(MOST_PENDING + 1)]
    assert types == ["response.steer.accepted"] * MOST_PENDING + ["response.steer.failed"]
    served.engine.hold(1_000)
    served.engine.say_all()
    await next_ended(client)
    assert final(await client.stream()).status == "completed"


async def test_pending_input_has_a_bound_in_bytes(served: PacedServer, client: SocketClient) -> None:
    first = await paused(served, client)
    types = []
    for _ in range(3):
        await steer(client, first, "x" * 40_000)
        types.append((await steering_event(client))["type"])
    assert types == ["response.steer.accepted", "response.steer.accepted", "response.steer.failed"]


async def test_input_without_a_successor_is_returned(served: PacedServer, client: SocketClient) -> None:
    first = await paused(served, client)
    await steer(client, first)
    accepted = await steering_event(client)
    served.engine.script = Script(refusal=EngineOverloaded("It is full."))
    served.engine.hold(1_000)
    served.engine.say_all()
    assert (await next_ended(client)).incomplete_details == STEERED
    failed = await steering_event(client)
    assert (failed["error"]["code"], failed["steer"]["id"]) == ("successor_creation_failed", accepted["steer"]["id"])
    assert (failed["error"]["message"], failed["steer"]["input"]) == ("It is full.", "Stop.")
    served.engine.script = script()
    assert (await client.create(input="Hi")).status == "completed"


async def test_cancelled_response_returns_its_input(served: PacedServer, client: SocketClient) -> None:
    first = await paused(served, client)
    await steer(client, first)
    await steering_event(client)
    assert (await served.cancel(first))[0] == 200
    failed = await steering_event(client)
    assert failed["error"]["code"] == "successor_creation_failed"
    await steer(client, first)
    assert (await steering_event(client))["error"]["code"] == "response_not_active"


async def test_streams_of_steered_responses_keep_all_rules(served: PacedServer, client: SocketClient) -> None:
    served.engine.hold(4)
    await client.send(input="Hi")
    first = await began(client)
    frames: list[Json] = []
    await steer(client, first)
    while (frame := await client.frame())["type"] != "response.steer.accepted":
        frames.append(frame)
    served.engine.hold(1_000)
    served.engine.say_all()
    while not frames or frames[-1]["type"] != "response.incomplete":
        frames.append(await client.frame())
    stored = (await served.get(f"/v1/responses/{first}"))[1]
    assert stored["incomplete_details"] == {"reason": "steered"}
    stored_events = read_sse(await served.again(f"/v1/responses/{first}?stream=true"))
    assert [event.__struct_config__.tag for event in stored_events[2:]] == [frame["type"] for frame in frames]
    assert final(await client.stream()).status == "completed"


async def test_sdk_steers_a_response(served: PacedServer, sdk: openai.AsyncOpenAI) -> None:
    served.engine.hold(4)
    ended_as: list[tuple[str, str | None]] = []
    response_id = ""
    async with sdk.responses.connect() as connection:
        await connection.response.create(model="tiny", input="Hi", store=False)
        async for event in connection:
            match event.type:
                case "response.created":
                    response_id = event.response.id
                case "response.reasoning_text.delta" if not ended_as and served.engine.initial == 4:
                    served.engine.hold(1_000)
                    await connection.response.steer(previous_response_id=response_id, input="Stop.")
                case "response.steer.accepted":
                    served.engine.say_all()
                case "response.incomplete" | "response.completed":
                    details = event.response.incomplete_details
                    ended_as.append((event.type, details.reason if details else None))
                    if event.type == "response.completed":
                        break
                case _:
                    pass
    assert ended_as == [("response.incomplete", "steered"), ("response.completed", None)]
    assert served.prompt_text().count("Stop.") == 1
