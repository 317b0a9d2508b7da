"""Which responses can be continued, and under which ids they are known."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from stages.harmony import HarmonyEncoding
from tests.api.scripts import ENDLESS, Scripted, script
from tests.streams import final, read_sse


@pytest.mark.parametrize("stream", [False, True])
async def test_v16_b19_what_still_runs_cannot_be_continued(
    served: Scripted, encoding: HarmonyEncoding, stream: bool
) -> None:
    """Nobody reads half of a response: until it has ended it is unknown, and then all of it is there."""
    served.engine.script = script(encoding, latency=0.02)
    async with served.client.post(f"{served.url}/v1/responses", json={"input": "Hi", "stream": True}) as answer:
        first = await answer.content.readuntil(b"\n\n")
        running = json.loads(first.decode().partition("data: ")[2])["response"]["id"]
        following = {"input": "Go on", "previous_response_id": running, "stream": stream}
        status, error = await served.post(following)
        assert (status, error["error"]["code"]) == (400, "previous_response_not_found")
        response = final(read_sse(first + await answer.content.read()))
    assert response.status == "completed"
    assert (await served.post(following | {"stream": False}))[0] == 200
    prompt = encoding.decode(served.engine.prompts[-1].token_ids)
    assert prompt.endswith(
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|end|>"
        "<|start|>user<|message|>Go on<|end|><|start|>assistant"
    )


async def test_v16_what_was_left_cannot_be_continued(served: Scripted, encoding: HarmonyEncoding) -> None:
    """A response whose client left has not ended, and leaves no half of itself behind."""
    served.engine.script = script(encoding, ENDLESS, endless=True, latency=0.005)
    async with served.client.post(f"{served.url}/v1/responses", json={"input": "Hi", "stream": True}) as answer:
        left = json.loads((await answer.content.readuntil(b"\n\n")).decode().partition("data: ")[2])["response"]["id"]
        await answer.content.readuntil(b"output_text.delta")
        answer.close()
    async with asyncio.timeout(1):
        while served.engine.running:
            await asyncio.sleep(0.005)
    status, error = await served.post({"input": "Go on", "previous_response_id": left})
    assert (status, error["error"]["code"]) == (400, "previous_response_not_found")
    assert (await served.get(f"/v1/responses/{left}"))[0] == 404


async def test_b30_an_id_is_never_the_clients(served: Scripted) -> None:
    """Whatever ids a request brings, its response has one of the server's own: none takes another's place."""
    _, first = await served.post({"input": "one"})
    own: dict[str, Any] = {"request_id": first["id"], "id": first["id"], "response_id": first["id"]}
    headers = {"X-Request-Id": first["id"]}
    async with served.client.post(f"{served.url}/v1/responses", json={"input": "two"} | own, headers=headers) as answer:
        assert answer.status == 200
        second = await answer.json()
    assert second["id"].startswith("resp_")
    assert second["id"] != first["id"]
    assert await served.get(f"/v1/responses/{first['id']}") == (200, first)
    assert await served.get(f"/v1/responses/{second['id']}") == (200, second)
    items = [{item["id"] for item in response["output"]} for response in (first, second)]
    assert not items[0] & items[1]
