from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.services.engines.scripted import Script, ScriptedEngine
from tests.support.server import Server, running_server

Json = dict[str, Any]

CANARY = "canary4711"
IN_URL = f"{CANARY}-url"
IN_HEADERS = f"{CANARY}-header"
TOOL: Json = {
    "type": "mcp",
    "server_label": "docs",
    "server_url": f"https://docs.invalid/{IN_URL}/mcp?key={IN_URL}",
    "headers": {"X-Key": IN_HEADERS, "Cookie": f"a={IN_HEADERS}"},
    "authorization": IN_HEADERS,
}
REFUSED: list[Json] = [
    {"headers": {"X-Key": f"{CANARY}\n"}},
    {"headers": {"Authorization": CANARY}},
    {"authorization": [CANARY]},
    {"server_url": f"ftp://docs.invalid/{CANARY}"},
    {"server_url": f"https://u:{CANARY}@docs.invalid"},
    {"server_url": None},
]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[Server[ScriptedEngine], None]:
    engine = ScriptedEngine(Script(load_encoding().encode_markup("<|channel|>final<|message|>Hi.<|return|>")))
    async with running_server(engine, tmp_path) as served:
        yield served


async def ended(served: Server[ScriptedEngine], response: Json) -> Json:
    while response["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.02)
        _, response = await served.get(f"/v1/responses/{response['id']}")
    return response


def files(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_responses_never_have_tool_secrets(
    served: Server[ScriptedEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture, background: bool, streams: bool
) -> None:
    body = {"input": "Hi", "tools": [TOOL], "tool_choice": "none", "background": background}
    with caplog.at_level(logging.DEBUG):
        if streams:
            seen = (await served.stream(body)).decode()
            assert "docs.invalid" in seen
        else:
            _, response = await served.post(body)
            response = await ended(served, response)
            assert response["tools"] == [
                {"type": "mcp", "server_label": "docs", "server_url": "https://docs.invalid/<redacted>"}
            ]
            _, items = await served.get(f"/v1/responses/{response['id']}/input_items")
            seen = json.dumps([response, items])
    assert CANARY not in seen
    assert CANARY not in caplog.text
    assert IN_HEADERS.encode() not in files(tmp_path)


@pytest.mark.parametrize("fields", REFUSED, ids=str)
async def test_errors_never_have_tool_secrets(
    served: Server[ScriptedEngine], caplog: pytest.LogCaptureFixture, fields: Json
) -> None:
    with caplog.at_level(logging.DEBUG):
        status, answer = await served.post({"input": "Hi", "tools": [TOOL | fields]})
    assert (status, answer["error"]["param"].startswith("tools[0].")) == (400, True)
    assert CANARY not in json.dumps(answer)
    assert CANARY not in caplog.text
