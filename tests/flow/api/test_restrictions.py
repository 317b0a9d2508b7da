"""A restriction of an answer that cannot be obeyed is refused at every door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.services.engines.scripted import ScriptedEngine
from tests.support.request_bodies import WEATHER
from tests.support.requests import additional_tools
from tests.support.server import running_server
from tests.support.socket_client import connected

USER = {"role": "user", "content": "Hi"}
UNSERVED: dict[str, Any] = {"type": "of_tomorrow"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": "Hi", "max_tokens": 5}, "max_tokens"),
    ({"input": "Hi", "tools": [WEATHER, UNSERVED]}, "tools[1].type"),
    ({"input": [USER, additional_tools(UNSERVED)]}, "input[1].tools[0].type"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=str)
async def test_restriction_is_refused_at_every_door(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async with running_server(ScriptedEngine(), tmp_path) as served:
        doors = ["/v1/responses", "/v1/responses/input_tokens", "/openresponses/v1/responses"]
        if "tools" not in body:
            doors.append("/v1/responses/compact")
        for door in doors:
            status, answer = await served.post(body | {"model": served.engine.models[0]}, door)
            assert (door, status, answer["error"]["param"]) == (door, 400, param)
        async with connected(served) as socket:
            await socket.send(**body)
            assert (await socket.error())["error"]["param"] == param
        if isinstance(items := body["input"], list):
            status, answer = await served.post({"items": items}, "/v1/conversations")
            assert (status, answer["error"]["param"]) == (400, param.replace("input", "items"))
        assert served.engine.prompts == []
