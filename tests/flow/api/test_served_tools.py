from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.extensions.tools.sandbox.probe import Sandbox
from tests.support.api_clients import wait_until
from tests.support.mcp_servers import HttpServers
from tests.support.tool_servers import (
    CODE_TOOL,
    MODES,
    SEARCH_TOOL,
    ClientResponse,
    Json,
    Site,
    answer_markup,
    browser_markup,
    call_markup,
    expect_silence,
    join_calls,
    mcp_tool,
    play_turns,
    prompts_read,
    python_markup,
    respond,
    running_site,
    tool_server,
)

OUTPUTS = "code_interpreter_call.outputs"
SOURCES = "web_search_call.action.sources"
RESULTS = "web_search_call.results"
THOUGHT = "<|channel|>analysis<|message|>Let me see.<|end|>"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as site:
        yield site


# Code


@pytest.mark.defect("V7", "V8")
@pytest.mark.parametrize("mode", MODES)
async def test_code_call_is_one_item_with_outputs(tmp_path: Path, sandbox: Sandbox, mode: str) -> None:
    turns = [join_calls(THOUGHT, python_markup("n = 6\nprint(n * 7)")), python_markup("print(n)"), answer_markup("42.")]
    async with tool_server(tmp_path, turns, sandbox=sandbox) as served:
        received = await respond(served, mode, {"tools": [CODE_TOOL], "include": [OUTPUTS]})
        _, second, third = prompts_read(served)
    assert received.types == ["reasoning", "code_interpreter_call", "code_interpreter_call", "message"]
    assert received.response["status"] == "completed"
    assert [item["outputs"] for item in received.output[1:3]] == [
        [{"type": "logs", "logs": "42\n"}],
        [{"type": "logs", "logs": "6\n"}],
    ]
    assert [item["code"] for item in received.output[1:3]] == ["n = 6\nprint(n * 7)", "print(n)"]
    assert len({item["container_id"] for item in received.output[1:3]}) == 1
    assert received.ladder(1) == [
        "output_item.added",
        "code_interpreter_call.in_progress",
        "code_interpreter_call_code.delta",
        "code_interpreter_call_code.done",
        "code_interpreter_call.interpreting",
        "code_interpreter_call.completed",
        "output_item.done",
    ]
    assert second.endswith("<|start|>python to=assistant<|channel|>analysis<|message|>42\n<|end|><|start|>assistant")
    assert third.endswith("<|message|>6\n<|end|><|start|>assistant")


@pytest.mark.defect("V7")
@pytest.mark.parametrize("way", [{}, {"background": True}], ids=str)
async def test_running_code_has_not_completed(tmp_path: Path, sandbox: Sandbox, way: Json) -> None:
    async with (
        tool_server(tmp_path, [python_markup("while True: pass")], sandbox=sandbox) as served,
        served.open_stream({"tools": [CODE_TOOL], "include": [OUTPUTS], **way}) as stream,
    ):
        response_id = await stream.response_id()
        await stream.upto(b"code_interpreter_call.interpreting")
        await expect_silence(stream)
        assert (await served.cancel(response_id))[0] == 200
        received = ClientResponse({}, await stream.rest(), [])
    assert received.ladder(0)[-2:] == ["code_interpreter_call.interpreting", "output_item.done"]
    assert received.bodies[-1]["response"]["output"][0]["status"] == "incomplete"
    assert received.bodies[-1]["response"]["output"][0]["outputs"] is None


@pytest.mark.parametrize("mode", MODES)
async def test_outputs_and_sources_are_optional(tmp_path: Path, sandbox: Sandbox, site: Site, mode: str) -> None:
    turns = [join_calls(python_markup("print(1)"), browser_markup("search", {"query": "gates"})), answer_markup()]
    async with tool_server(tmp_path, turns, sandbox=sandbox, search=site.url) as served:
        body = {"tools": [CODE_TOOL, SEARCH_TOOL]}
        plain = await respond(served, mode, body)
        full = await respond(served, mode, {**body, "include": [OUTPUTS, SOURCES, RESULTS]})
        _, first, _, second = prompts_read(served)
    assert first == second
    assert "results" not in plain.output[1]
    hit = {"type": "url", "url": f"{site.url}/gates", "title": "Gates", "snippet": "All about gates."}
    assert full.output[1]["results"] == [hit]
    assert [item["type"] for item in full.output] == ["code_interpreter_call", "web_search_call", "message"]
    assert (plain.output[0]["outputs"], full.output[0]["outputs"]) == (None, [{"type": "logs", "logs": "1\n"}])
    assert "sources" not in plain.output[1]["action"]
    assert full.output[1]["action"].pop("sources") == [{"type": "url", "url": f"{site.url}/gates"}]
    assert full.output[1]["action"] == plain.output[1]["action"]


# The browser


@pytest.mark.defect("V9", "V10", "B12")
@pytest.mark.parametrize("mode", MODES)
async def test_page_is_found_opened_and_cited(tmp_path: Path, site: Site, mode: str) -> None:
    turns = [
        browser_markup("search", {"query": "gates"}),
        browser_markup("open", {"id": 0}),
        browser_markup("find", {"pattern": "closes"}),
        answer_markup("It closes【1†L1-L2】."),
    ]
    async with tool_server(tmp_path, turns, search=site.url) as served:
        received = await respond(served, mode, {"tools": [SEARCH_TOOL]})
    page = f"{site.url}/gates"
    assert received.types == ["web_search_call"] * 3 + ["message"]
    assert [item["action"] for item in received.output[:3]] == [
        {"type": "search", "query": "gates", "queries": ["gates"]},
        {"type": "open_page", "url": page},
        {"type": "find_in_page", "url": page, "pattern": "closes"},
    ]
    for index in range(3):
        assert received.output[index]["status"] == "completed"
        assert received.ladder(index) == [
            "output_item.added",
            "web_search_call.in_progress",
            "web_search_call.searching",
            "web_search_call.completed",
            "output_item.done",
        ]
    (part,) = received.output[3]["content"]
    (note,) = part["annotations"]
    assert (note["type"], note["url"], note["title"]) == ("url_citation", page, "Gates")
    assert "【" not in part["text"]


@pytest.mark.defect("V7")
@pytest.mark.parametrize("way", [{}, {"background": True}], ids=str)
async def test_page_being_fetched_has_not_completed(tmp_path: Path, site: Site, way: Json) -> None:
    site.gate.clear()
    turns = [browser_markup("open", {"id": f"{site.url}/gates"}), answer_markup()]
    async with (
        tool_server(tmp_path, turns, search=site.url) as served,
        served.open_stream({"tools": [SEARCH_TOOL], **way}) as stream,
    ):
        read = await stream.upto(b"web_search_call.searching")
        assert ClientResponse({}, read, []).ladder(0)[-1] == "web_search_call.searching"
        await expect_silence(stream)
        assert served.engine.running == 0
        site.gate.set()
        received = ClientResponse({}, await stream.rest(), [])
    assert received.ladder(0)[-3:] == ["web_search_call.searching", "web_search_call.completed", "output_item.done"]


@pytest.mark.defect("B12")
@pytest.mark.parametrize("mode", MODES)
async def test_broken_arguments_fail_their_call(tmp_path: Path, site: Site, mode: str) -> None:
    async with tool_server(tmp_path, search=site.url) as served:
        for arguments in ('{"query":', "cursor:3", "[]", "{}", ""):
            play_turns(served.engine, browser_markup("search", arguments), answer_markup())
            received = await respond(served, mode, {"tools": [SEARCH_TOOL]})
            assert received.types == ["web_search_call", "message"], arguments
            assert (received.response["status"], received.output[0]["status"]) == ("completed", "failed")
            assert received.output[0]["action"] == {"type": "search", "query": "", "queries": []}
            assert received.ladder(0)[-2:] == ["web_search_call.searching", "output_item.done"]
            result = prompts_read(served)[-1].rpartition("<|call|>")[2]
            assert "browser.search to=assistant<|channel|>analysis<|message|>Invalid function arguments" in result
    assert site.queries == []


# Resumed


async def test_stream_with_tools_can_be_resumed_anywhere(
    tmp_path: Path, http: HttpServers, sandbox: Sandbox, site: Site
) -> None:
    turns = [
        join_calls(
            THOUGHT,
            python_markup("print(1)"),
            call_markup("docs.echo", {"text": "é"}),
            browser_markup("search", {"query": "gates"}),
        ),
        answer_markup("A gate【0†L0】."),
    ]
    body: Any = {"tools": [CODE_TOOL, SEARCH_TOOL, mcp_tool(url=http.url())], "include": [OUTPUTS, SOURCES]}
    async with tool_server(tmp_path, turns, sandbox=sandbox, search=site.url) as served:
        received = await respond(served, "stream", body)
        frames = received.raw.split(b"\n\n")
        await wait_until(lambda: len(served.scheduler.runs) == 0)
        for number in range(len(received.bodies) - 1):
            path = f"/v1/responses/{received.response['id']}?stream=true&starting_after={number}"
            assert await served.again(path) == b"\n\n".join(frames[number + 1 :])
    assert received.types == [
        "mcp_list_tools",
        "reasoning",
        "code_interpreter_call",
        "mcp_call",
        "web_search_call",
        "message",
    ]
