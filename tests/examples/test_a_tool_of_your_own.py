"""A tool of one's own, from the command line to the items that a client sees."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic_settings import CliApp

from penstock.api.assembly import keys_of, toolbox
from penstock.api.settings import Settings
from penstock.stages.services.tools import HostSettings
from penstock.testing import ExampleCalls, check_host
from tests.examples import a_tool_of_your_own
from tests.support.tool_servers import MODES, answer_markup, call_markup, respond, tool_server

TOOL = f"{Path(__file__).with_name('a_tool_of_your_own.py')}:warehouse"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("arguments", "output", "error"),
    [({"article": "lamp"}, "12", None), ({"article": "bed"}, None, "the articles are lamp, chair")],
)
async def test_model_calls_the_tool_of_the_page(
    tmp_path: Path, mode: str, arguments: Any, output: str | None, error: str | None
) -> None:
    [request] = re.findall(r"```json\n(.*?)```", a_tool_of_your_own.__doc__ or "", re.DOTALL)
    body = json.loads(request) | {"model": "tiny"}
    [label] = [tool["server_label"] for tool in body["tools"]]
    settings = CliApp.run(Settings, cli_args=["--no-sandbox", "--tool", TOOL])
    turns = [call_markup(f"{label}.pieces_left", arguments), answer_markup("There.")]
    tools = await toolbox(settings, keys_of(settings))
    async with tool_server(tmp_path, turns, toolbox=tools) as served:
        answered = await respond(served, mode, body)
    assert answered.types == ["mcp_list_tools", "mcp_call", "message"]
    call = answered.output[1]
    assert (call["output"], error is None) == (output, call["error"] is None)
    assert (error or "") in json.dumps(call["error"])


async def test_it_keeps_all_rules() -> None:
    name = "pieces_left"
    calls = ExampleCalls(quick=(name, '{"article": "lamp"}'), wrong=(name, '{"article": "bed"}'))
    await check_host(a_tool_of_your_own.warehouse(HostSettings()), calls)
