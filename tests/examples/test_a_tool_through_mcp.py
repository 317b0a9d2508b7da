from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.services.mcp_config import read_servers
from tests.examples import a_tool_of_your_own, a_tool_through_mcp
from tests.support.tool_servers import answer_markup, call_markup, respond, tool_server

pytestmark = pytest.mark.io


@pytest.mark.parametrize(
    ("arguments", "output", "error"),
    [({"article": "lamp"}, "12", None), ({"article": "bed"}, None, "the articles are lamp, chair")],
)
async def test_model_calls_the_tool_of_the_page(
    tmp_path: Path, arguments: Any, output: str | None, error: str | None
) -> None:
    [config] = re.findall(r"```json\n(.*?)```", a_tool_through_mcp.__doc__ or "", re.DOTALL)
    [request] = re.findall(r"```json\n(.*?)```", a_tool_of_your_own.__doc__ or "", re.DOTALL)
    body = json.loads(request) | {"model": "tiny"}
    [label] = [tool["server_label"] for tool in body["tools"]]
    turns = [call_markup(f"{label}.pieces_left", arguments), answer_markup("There.")]
    file = tmp_path / "tools.json"
    here = str(Path(__file__).with_name("a_tool_through_mcp.py"))
    file.write_text(config.replace("venv/bin/python", sys.executable).replace("a_tool_through_mcp.py", here))
    async with tool_server(tmp_path, turns, servers=read_servers(file)) as served:
        answered = await respond(served, "whole", body)
    assert answered.types == ["mcp_list_tools", "mcp_call", "message"]
    call = answered.output[1]
    assert (call["output"], error is None) == (output, call["error"] is None)
    assert (error or "") in json.dumps(call["error"])
