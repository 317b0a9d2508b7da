"""Sealed thoughts over HTTP: what a client can do with them, on any server, and what it cannot."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from io import BytesIO
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.api.http.auth import Keys
from penstock.pipeline.protocol.events import OutputItemAdded, OutputItemDone
from penstock.pipeline.protocol.items import Reasoning
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.sealing import MOST_CHARACTERS, PREFIX, Sealer
from penstock.stages.responses import sealing
from tests.support.api_clients import JSON, openai_client
from tests.support.event_streams import final, read_sse
from tests.support.server import CALL, WEATHER, ScriptedServer, running_server, script

Json = dict[str, Any]

THOUGHT = "Look it up."
ASKED: Json = {"role": "user", "content": "How is Paris?"}
INCLUDE = {"include": ["reasoning.encrypted_content"]}
KEYS = ("sk-alice-0123456789", "sk-bob-0123456789ab")


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[ScriptedServer, None]:
    async with running_server(ScriptedEngine(script(CALL)), tmp_path, max_body_bytes=2 * MOST_CHARACTERS) as served:
        yield served


async def thought_of(served: ScriptedServer, **fields: Any) -> tuple[Json, list[Json]]:
    """Return the thought of a response that calls a function, and all items to go on with."""
    status, response = await served.post({"input": [ASKED], "tools": [WEATHER], "store": False, **fields})
    assert status == 200
    thought, call = response["output"]
    return thought, [ASKED, thought, call, output_of(call)]


def output_of(call: Json) -> Json:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny"}


def without_thought(thought: Json) -> Json:
    return {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}


async def post_large(served: ScriptedServer, body: Json) -> tuple[int, Json]:
    """Post a body that aiohttp's client sends only from a file."""
    data = BytesIO(json.dumps(body).encode())
    async with served.client.post(f"{served.url}/v1/responses", data=data, headers=JSON) as answer:
        return answer.status, await answer.json()


def is_read(served: ScriptedServer) -> bool:
    return f"<|channel|>analysis<|message|>{THOUGHT}<|end|>" in served.prompt_text()


@pytest.mark.parametrize("path", ["/v1/responses", "/openresponses/v1/responses"])
async def test_stream_seals_a_thought_when_it_is_done(served: ScriptedServer, path: str) -> None:
    body = await served.stream({"input": [ASKED], "tools": [WEATHER], "store": False}, path)
    assert body.count(b'"encrypted_content":"pst1.') == 2
    if path != "/v1/responses":  # its events have names of their own
        return
    events = read_sse(body)
    added, done = [
        next(each.item for each in events if isinstance(each, kind)) for kind in (OutputItemAdded, OutputItemDone)
    ]
    assert isinstance(added, Reasoning)
    assert not added.encrypted_content
    assert final(events).output[0] == done


async def test_thought_outlives_its_server(tmp_path: Path) -> None:
    async with running_server(ScriptedEngine(script(CALL)), tmp_path) as served:
        thought, (asked, _, *rest) = await thought_of(served)
    async with running_server(ScriptedEngine(script()), tmp_path) as later:
        assert (await later.post({"input": [asked, without_thought(thought), *rest], "store": False}))[0] == 200
        assert is_read(later)


async def test_servers_with_one_key_need_no_common_store(tmp_path: Path) -> None:
    def keyed(*keys: bytes) -> Any:
        return lambda pipeline: sealing(pipeline, Sealer(keys))

    old, new = b"old-0123456789abc", b"new-0123456789abc"
    engine = ScriptedEngine(script(CALL))
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    async with (
        running_server(engine, folders[0], edit=keyed(old)) as first,
        running_server(engine, folders[1], edit=keyed(new, old)) as rotated,
        running_server(engine, folders[2], edit=keyed(new)) as last,
    ):
        thought, (asked, _, *rest) = await thought_of(first)
        body = {"input": [asked, without_thought(thought), *rest]}
        assert [(await each.post(body))[0] for each in (first, rotated, last)] == [200, 200, 400]
        assert is_read(rotated)
        thought, (asked, _, *rest) = await thought_of(rotated)
        assert (await last.post({"input": [asked, without_thought(thought), *rest]}))[0] == 200


async def test_thought_of_another_owner_is_refused(tmp_path: Path) -> None:
    engine = ScriptedEngine(script(CALL))
    async with (
        running_server(engine, tmp_path, keys=Keys(None, KEYS)) as served,
        openai_client(served.url, KEYS[0]) as alice,
        openai_client(served.url, KEYS[1]) as bob,
    ):
        response = await alice.responses.create(model="tiny", input="Hi", store=False)
        sent: Any = [ASKED, response.output[0].to_dict()]
        assert (await alice.responses.create(model="tiny", input=sent)).status == "completed"
        with pytest.raises(openai.BadRequestError) as refused:
            await bob.responses.create(model="tiny", input=sent)
        assert (refused.value.code, refused.value.param) == (
            "invalid_encrypted_content",
            "input[1].encrypted_content",
        )


@pytest.mark.parametrize(
    "changed",
    [
        lambda text: text[:-9],
        lambda text: text[:20] + chr(ord(text[20]) ^ 1) + text[21:],
        lambda text: text + "A" * 10_000_000,
        lambda _: PREFIX + "A" * 10_000_000,
        lambda _: PREFIX + "A" * MOST_CHARACTERS,
        lambda text: text.replace(".", ".\u00e9\x00\ud800"),
    ],
    ids=["truncated", "a flipped bit", "10 MB longer", "10 MB", "over the bound", "no base64"],
)
async def test_changed_thought_is_refused(
    served: ScriptedServer, changed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    thought, items = await thought_of(served)
    items[1] = {**thought, "encrypted_content": changed(thought["encrypted_content"])}
    with caplog.at_level(logging.DEBUG):
        status, answer = await post_large(served, {"input": items})
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "invalid_encrypted_content", "input[1].encrypted_content")
    assert len(error["message"]) < 200
    assert len(caplog.text) < 10_000


async def test_long_foreign_thought_is_left_out(served: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    _, (asked, thought, *rest) = await thought_of(served)
    foreign = {**thought, "encrypted_content": "gAAAA" + "B" * 10_000_000}
    with caplog.at_level(logging.DEBUG):
        assert (await post_large(served, {"input": [asked, foreign, *rest]}))[0] == 200
    assert is_read(served)
    assert sum("1 reasoning item" in record.getMessage() for record in caplog.records) == 1
    assert "BBBB" not in caplog.text


async def test_nothing_of_a_thought_is_in_the_log(served: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        thought, (asked, _, *rest) = await thought_of(served, include=INCLUDE["include"])
        sealed = without_thought(thought)
        for body in ({"store": False}, {"stream": True}, {"background": True}):
            await served.ask("POST", "/v1/responses/input_tokens", {"input": [asked, sealed, *rest]})
            if body == {"stream": True}:
                await served.stream({"input": [asked, sealed, *rest]})
            else:
                assert (await served.post({"input": [asked, sealed, *rest], **body}))[0] == 200
            assert is_read(served)
        sealed["encrypted_content"] += "AAAA"
        assert (await served.post({"input": [asked, sealed, *rest]}))[0] == 400
    assert THOUGHT not in caplog.text
    assert thought["encrypted_content"][:40] not in caplog.text


async def test_stored_response_has_its_sealed_thought_if_it_is_included(served: ScriptedServer) -> None:
    _, plain = await served.post({"input": "Hi"})
    assert "encrypted_content" not in plain["output"][0]
    response_id = await served.start_background(INCLUDE)
    thought = (await served.wait_for_end(response_id))["output"][0]
    assert thought["encrypted_content"].startswith(PREFIX)
    assert (await served.get(f"/v1/responses/{response_id}"))[1]["output"][0] == thought


async def test_carried_thought_is_stored_with_the_conversation_that_it_joins(served: ScriptedServer) -> None:
    thought, (asked, _, *rest) = await thought_of(served)
    _, stored = await served.post({"input": [asked, without_thought(thought), *rest], "tools": [WEATHER]})
    tokens = served.engine.prompts[-1].token_ids
    body = {"input": [output_of(stored["output"][1])], "previous_response_id": stored["id"], "tools": [WEATHER]}
    assert (await served.post(body))[0] == 200
    assert served.engine.prompts[-1].token_ids[: len(tokens) - 2] == tokens[:-2]
    _, conversation = await served.post({"items": [asked, without_thought(thought), *rest]}, "/v1/conversations")
    assert (await served.post({"input": "And?", "conversation": conversation["id"]}))[0] == 200
    assert is_read(served)


async def test_client_sends_back_what_it_received(served: ScriptedServer, sdk: openai.AsyncOpenAI) -> None:
    """The SDK's items hold a null for each field that a server leaves out."""
    given: list[Any] = [ASKED]
    tools: Any = [WEATHER]
    for _ in range(3):
        response = await sdk.responses.create(model="tiny", input=given, tools=tools, store=False)
        given += [item.model_dump() for item in response.output]
        given.append(output_of(given[-1]))
    assert served.prompt_text().count(THOUGHT) == 2
