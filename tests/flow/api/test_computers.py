"""Computers that the client controls for a model that sees images."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from openai.types.responses import ResponseComputerToolCall
from openai.types.responses.response_computer_tool_call_output_item import ResponseComputerToolCallOutputItem

from tests.support.api_clients import openai_client
from tests.support.server import ScriptedServer
from tests.support.tool_servers import MODES, call_markup, data_url, play_turns, png, respond, tool_server

Json: TypeAlias = Any

COMPUTER: Json = {"type": "computer"}
PREVIEW: Json = {
    "type": "computer_use_preview",
    "display_width": 800,
    "display_height": 600,
    "environment": "browser",
}
CLICK: Json = {"type": "click", "button": "left", "x": 3, "y": 4}
TYPE: Json = {"type": "type", "text": "penstock"}
SCREEN: Json = {"type": "computer_screenshot", "image_url": data_url(png())}
CHECK: Json = {"id": "check_1", "code": "malicious", "message": "Look twice."}


@asynccontextmanager
async def computer_server(where: Path, *actions: Json) -> AsyncGenerator[ScriptedServer, None]:
    markup = [call_markup("functions.computer", action) for action in actions]
    async with tool_server(where, markup, sees_images=True) as served:
        yield served


@pytest.mark.parametrize("mode", MODES)
async def test_computer_call_has_actions(tmp_path: Path, mode: str) -> None:
    async with computer_server(tmp_path, {"actions": [CLICK, TYPE]}) as served:
        received = await respond(served, mode, {"tools": [COMPUTER]})
    (call,) = received.output
    assert call == {
        "type": "computer_call",
        "id": call["id"],
        "call_id": call["call_id"],
        "status": "completed",
        "pending_safety_checks": [],
        "actions": [CLICK, TYPE],
    }
    ResponseComputerToolCall.model_validate(call, strict=True)
    assert received.response["tools"] == [COMPUTER]
    if received.events:
        assert received.ladder(0) == ["output_item.added", "output_item.done"]


async def test_preview_has_one_action_and_describes_the_screen(tmp_path: Path) -> None:
    async with computer_server(tmp_path, {"action": CLICK}) as served:
        received = await respond(served, "stream", {"tools": [PREVIEW], "truncation": "auto"})
        assert "The screen has 800 x 600 pixels. It is a computer of the kind browser." in served.prompt_text()
    (call,) = received.output
    assert (call["action"], "actions" in call) == (CLICK, False)
    ResponseComputerToolCall.model_validate(call, strict=True)


async def test_screenshots_and_acknowledged_checks_come_back(tmp_path: Path) -> None:
    async with computer_server(tmp_path, {"actions": [CLICK]}) as served, openai_client(served.url) as sdk:
        first = await sdk.responses.create(model="tiny", input="Go on.", tools=[COMPUTER])
        (call,) = first.output
        assert isinstance(call, ResponseComputerToolCall)
        output: Json = {
            "type": "computer_call_output",
            "call_id": call.call_id,
            "output": SCREEN,
            "acknowledged_safety_checks": [CHECK],
        }
        play_turns(served.engine, call_markup("functions.computer", {"actions": [TYPE]}))
        second = await sdk.responses.create(
            model="tiny", previous_response_id=first.id, input=[output], tools=[COMPUTER]
        )
        assert second.output[0].type == "computer_call"
        (listed, *_) = (await sdk.responses.input_items.list(second.id)).data
        assert isinstance(listed, ResponseComputerToolCallOutputItem)
        kept = listed.to_dict()
        assert kept == {**output, "id": kept["id"], "status": "completed"}
        whole: Json = [{"role": "user", "content": "Go on."}, call.to_dict(), output]
        await sdk.responses.create(model="tiny", input=whole, tools=[COMPUTER])
        assert served.prompt_text().count("to=functions.computer") == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [COMPUTER, PREVIEW]}, "tools[1].type"),
        ({"tools": [{**PREVIEW, "display_width": 0}]}, "tools[0].display_width"),
        ({"input": [{"type": "computer_call_output", "call_id": "c", "output": SCREEN}]}, "input[0].call_id"),
        *(
            (
                {
                    "input": [
                        {"type": "computer_call", "call_id": "c", "actions": [CLICK]},
                        {"type": "computer_call_output", "call_id": "c", "output": screen},
                    ]
                },
                f"input[1].output{end}",
            )
            for screen, end in (
                ({"type": "computer_screenshot"}, ".image_url"),
                ({"type": "computer_screenshot", "file_id": "file_1"}, ".file_id"),
                ({"type": "input_text", "text": "x"}, ".type"),
            )
        ),
    ],
)
async def test_wrong_computers_are_refused(tmp_path: Path, body: Json, param: str) -> None:
    async with computer_server(tmp_path) as served:
        status, answer = await served.post({"input": "Hi", **body})
    assert (status, answer["error"]["param"]) == (400, param)


async def test_model_that_reads_text_controls_no_computer(tmp_path: Path) -> None:
    async with tool_server(tmp_path) as served:
        status, answer = await served.post({"input": "Hi", "tools": [COMPUTER]})
        assert (status, answer["error"]["param"]) == (400, "tools[0].type")
        assert "reads text only" in answer["error"]["message"]
        call = {"type": "computer_call", "call_id": "c", "actions": [CLICK]}
        output = {"type": "computer_call_output", "call_id": "c", "output": SCREEN}
        for screen in (SCREEN, {"type": "computer_screenshot", "image_url": "ftp://a.example"}):
            assert (await served.post({"input": [call, output | {"output": screen}]}))[0] == 200
            assert "[The image cannot be shown: this model reads text only.]" in served.prompt_text()
