"""Going on from a token of an answer, on real engines: the new answer begins with the old tokens, and ends as any."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from penstock.services.engines.vllm import VllmEngine
from tests.support.engine_requests import ON_SHARED_ENGINE, ChatEngine, stoppable
from tests.support.live_server import Events, bearer, live_server, of, read_events, tokens, watched
from tests.support.server import Server

pytestmark = ON_SHARED_ENGINE

ASKING: dict[str, Any] = {"input": "Say hello.", "temperature": 0, "store": False, "max_output_tokens": 200}


async def recorded(server: Server[Any]) -> Events:
    """Return the events of the latest recording; none while it is still written."""
    async with server.client.get(f"{server.url}/live/recordings", headers=bearer()) as answer:
        if not (saved := (await answer.json())["data"]):
            return []
    async with server.client.get(f"{server.url}/live/recordings/{saved[0]['id']}", headers=bearer()) as answer:
        return read_events(await answer.text())


async def check_going_on(server: Server[Any], before: Events) -> None:
    """Go on from tokens of an answer; also with a sampled continuation, which may be another one."""
    (prompt,) = of(before, "Prompt")
    ids = tokens(before)
    assert len(ids) > 4
    for count in (1, len(ids) // 2, len(ids) - 1):
        go_on = {"prompt": prompt["token_ids"], "tokens": ids[:count]}
        again = await watched(server, ASKING | {"go_on": go_on})
        assert tokens(again) == ids
        assert answered(again)["status"] == "completed"
        assert "".join(each["text"] for each in of(again, "ItemDelta")) == "".join(
            each["text"] for each in of(before, "ItemDelta")
        )
        other = await watched(server, ASKING | {"go_on": go_on, "temperature": 2, "seed": count})
        assert tokens(other)[:count] == ids[:count]
        response = answered(other)
        assert response["usage"]["output_tokens"] == len(tokens(other)) > count
        assert (response["usage"]["input_tokens"], response["error"]) == (len(prompt["token_ids"]), None)


def answered(events: Events) -> dict[str, Any]:
    """Return the response of the one terminal event."""
    (end,) = of(events, "response.completed", "response.incomplete", "response.failed")
    response: dict[str, Any] = end["response"]
    return response


async def test_answer_of_gpt_oss_goes_on(engine: VllmEngine, tmp_path: Path) -> None:
    async with live_server(stoppable(engine), tmp_path, record=True) as server:
        before = await watched(server, ASKING)
        while tokens(kept := await recorded(server)) != tokens(before):  # the recorder writes behind
            await asyncio.sleep(0.1)
        await check_going_on(server, before)
        await check_going_on(server, kept)


async def test_answer_of_a_chat_model_goes_on(model: ChatEngine, tmp_path: Path) -> None:
    async with live_server(stoppable(model.engine), tmp_path, model=model.chat) as server:
        await check_going_on(server, await watched(server, ASKING))
