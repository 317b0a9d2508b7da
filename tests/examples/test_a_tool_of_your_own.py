"""A tool of one's own, from the command line to the items that a client sees."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic_settings import CliApp

from penstock.api.limits.admission import Admission
from penstock.api.settings import Settings
from penstock.api.start.assembly import keys_of, toolbox
from penstock.pipeline.core import source_of
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.server import pipeline
from tests.examples import a_tool_of_your_own
from tests.support.event_streams import checked, final
from tests.support.fixture_cases import item_texts
from tests.support.statements import run_block
from tests.support.tool_servers import MODES, answer_markup, call_markup, respond, tool_server

PAGE = a_tool_of_your_own.__doc__ or ""
[REQUEST] = map(json.loads, re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TOOL = f"{Path(__file__).with_name('a_tool_of_your_own.py')}:warehouse"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("arguments", "output", "error"),
    [({"article": "lamp"}, "12", None), ({"article": "bed"}, None, "the articles are lamp, chair")],
)
async def test_model_calls_the_tool_of_the_page(
    tmp_path: Path, mode: str, arguments: Any, output: str | None, error: str | None
) -> None:
    body = REQUEST | {"model": "tiny"}
    [label] = [tool["server_label"] for tool in body["tools"]]
    settings = CliApp.run(Settings, cli_args=["--no-sandbox", "--tool", TOOL])
    turns = [call_markup(f"{label}.pieces_left", arguments), answer_markup("There.")]
    tools = await toolbox(settings, keys_of(settings, Admission()))
    async with tool_server(tmp_path, turns, toolbox=tools) as served:
        answered = await respond(served, mode, body)
    assert answered.types == ["mcp_list_tools", "mcp_call", "message"]
    call = answered.output[1]
    assert (call["output"], error is None) == (output, call["error"] is None)
    assert (error or "") in json.dumps(call["error"])


async def test_check_of_the_page_passes() -> None:
    await run_block(next(code for code in CODE if "check_host" in code), vars(a_tool_of_your_own))


async def test_backend_of_the_page_calls_it(tmp_path: Path) -> None:
    [caller] = [code for code in CODE if code.startswith("# caller.py\n")]
    (tmp_path / "caller.py").write_text(caller)
    options: dict[str, Any] = {"engine": [f"{tmp_path / 'caller.py'}:engine"], "store": "none", "sandbox": False}
    request = CreateResponse.model_validate(REQUEST | {"model": "caller"})
    async with pipeline(Settings(tool=[TOOL], **options)) as responses, responses.open(source_of([request])) as events:
        response = final(checked([event async for event in events]))
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "message"]
    assert item_texts(response)[-1] == "It said: 12"
