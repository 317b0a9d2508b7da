"""A kind of tool that another package brings: all that the server knows of it stands in one folder."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from penstock.api.cli.command_line import read_settings
from penstock.api.limits.admission import Admission
from penstock.api.start.assembly import keys_of, toolbox
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.plugins import WrongPlugin
from penstock.stages.models.harmony.vocabulary import hosted_tools
from penstock.testing import ExampleCalls, check_host
from tests.support.server import ScriptedServer
from tests.support.tool_servers import answer_markup, call_markup, play_turns, prompts_read, tool_server

FOLDER = Path(__file__).parent / "scales"
ASKED: dict[str, Any] = {"tools": [{"type": "scales", "unit": "kg"}]}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the folder as pip would install its package."""
    monkeypatch.syspath_prepend(FOLDER)
    for known in (kinds, hosted_tools):
        known.cache_clear()
    yield
    for known in (kinds, hosted_tools):
        known.cache_clear()


@pytest.fixture
async def served(installed: None, store_at: str) -> AsyncGenerator[ScriptedServer, None]:
    settings = read_settings(["--no-sandbox", "--tool", "scales"])
    opened = await toolbox(settings, keys_of(settings, Admission()))
    async with tool_server(store_at, toolbox=opened) as served:
        yield served


async def answered(served: ScriptedServer, body: dict[str, Any]) -> dict[str, Any]:
    """Return the completed response to a body; the SDK's types know no tool of this type."""
    status, response = await served.post({"input": "Hi"} | body)
    assert (status, response["status"]) == (200, "completed")
    return dict(response)


def items_of(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


async def test_call_has_an_item_and_its_result_is_read_and_cited(served: ScriptedServer) -> None:
    play_turns(served.engine, call_markup("scales.weigh", {"thing": "melon"}), answer_markup("1.4【50†L0】"))
    response = await answered(served, ASKED)
    call, message = response["output"]
    assert (call["type"], message["type"]) == ("mcp_call", "message")
    assert (call["server_label"], call["name"], call["output"]) == ("scales", "weigh", "[50] 1.4 kg")
    (annotation,) = message["content"][0]["annotations"]
    assert (annotation["type"], annotation["url"]) == ("url_citation", "https://scales.example/1")
    assert response["tools"] == ASKED["tools"]
    first, second = prompts_read(served)
    assert "## scales\n\n// Scales for fruit. Cite a weight as 【50†L0】.\nnamespace scales {" in first
    assert "type weigh = (_: {" in first
    assert "Give weights in kilograms." in first
    assert "[50] 1.4 kg" in second


async def test_later_response_cites_what_an_earlier_one_weighed(served: ScriptedServer) -> None:
    play_turns(served.engine, call_markup("scales.weigh", {"thing": "apple"}), answer_markup())
    first = await answered(served, {"tools": [{"type": "scales"}]})
    assert first["output"][0]["output"] == "[50] 182 g"
    play_turns(served.engine, answer_markup("So it is【50†L0】."))
    again = {"previous_response_id": first["id"], "input": "Sure?", "tools": [{"type": "scales"}]}
    response = await answered(served, again)
    (annotation,) = response["output"][0]["content"][0]["annotations"]
    assert annotation["url"] == "https://scales.example/1"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "scales", "unit": "stone"}], "tools[0].unit"),
        ([{"type": "scales", "colour": "red"}], "tools[0].colour"),
        ([{"type": "scales"}, {"type": "scales", "unit": "kg"}], "tools[1]"),
        ([{"type": "scales"}, {"type": "namespace", "name": "scales", "tools": []}], "tools[1].name"),
    ],
)
async def test_wrong_options_are_refused_with_their_place(
    served: ScriptedServer, tools: list[dict[str, Any]], param: str
) -> None:
    status, answer = await served.post({"input": "Hi", "tools": tools})
    assert (status, answer["error"]["param"]) == (400, param)


async def test_its_host_keeps_the_rules(installed: None) -> None:
    host: Any = import_module("scales").host(None)
    await check_host(host, ExampleCalls(quick=("weigh", '{"thing": "apple"}'), wrong=("weigh", '{"thing": "bed"}')))


@pytest.mark.parametrize("choice", [{"type": "scales"}, {"type": "mcp", "server_label": "scales"}])
async def test_choice_may_name_the_kind(served: ScriptedServer, choice: dict[str, Any]) -> None:
    play_turns(served.engine, call_markup("scales.weigh", {"thing": "apple"}), answer_markup())
    assert items_of(await answered(served, ASKED | {"tool_choice": choice})) == ["mcp_call", "message"]


@pytest.mark.parametrize("options", [[], ["--tool", "scales", "--allow-tool", "none"]])
async def test_kind_runs_only_if_it_is_named_and_allowed(installed: None, store_at: str, options: list[str]) -> None:
    settings = read_settings(["--no-sandbox", *options])
    opened = await toolbox(settings, keys_of(settings, Admission()))
    async with tool_server(store_at, toolbox=opened) as served:
        status, answer = await served.post({"input": "Hi"} | ASKED)
    assert (status, answer["error"]["param"]) == (400, "tools[0].type")


async def test_raw_messages_of_a_call_become_its_item(served: ScriptedServer) -> None:
    play_turns(served.engine, call_markup("scales.weigh", {"thing": "apple"}), answer_markup())
    first = await answered(served, ASKED | {"enable_response_messages": True})
    said = [*first["input_messages"], *first["output_messages"]]
    play_turns(served.engine, answer_markup("Yes."))
    await answered(served, {"previous_input_messages": said, "input": "Sure?"})
    assert "to=scales.weigh" in served.prompt_text()


LOST = """
from dataclasses import replace
from scales import SCALES, host
LOST = replace(SCALES, namespace="lost", api_type="lost", labels=())
nowhere = lambda settings: None
"""


@pytest.mark.parametrize(
    ("entry_points", "problem"),
    [
        ("[penstock.kinds]\nlost = lost:LOST", "nor an entry point of penstock.hosts"),
        ("[penstock.kinds]\nlost = lost:LOST\n[penstock.hosts]\nlost = no_such_library:host", "there is no module"),
        ("[penstock.kinds]\nlost = lost:LOST\n[penstock.hosts]\nlost = careless:host", "no_such_library"),
        ("[penstock.kinds]\nlost = lost:LOST\n[penstock.hosts]\nlost = lost:nowhere", "its host cannot run here"),
        ("[penstock.hosts]\nlost = lost:host", "give penstock.kinds an entry point of that name"),
    ],
)
async def test_named_kind_that_cannot_run_ends_the_start(
    installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry_points: str, problem: str
) -> None:
    package = tmp_path / "lost-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: lost\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(entry_points)
    (tmp_path / "lost.py").write_text(LOST)
    (tmp_path / "careless.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    kinds.cache_clear()
    settings = read_settings(["--no-sandbox", "--tool", "lost"])
    with pytest.raises(WrongPlugin, match=problem):
        await toolbox(settings, keys_of(settings, Admission()))
