"""The search for deferred tools, by this server and by the client."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from openai.types.responses import ResponseToolSearchCall, ResponseToolSearchOutputItem

from penstock.extensions.tools.mcp.mcp_servers import McpServers
from penstock.services.tools import Toolbox
from tests.support.api_clients import openai_client
from tests.support.mcp_servers import LOCAL, HttpServers
from tests.support.tool_servers import (
    MODES,
    answer_markup,
    call_markup,
    join_calls,
    mcp_tool,
    play_turns,
    prompts_read,
    respond,
    tool_server,
)

Json: TypeAlias = Any

USER = {"role": "user", "content": "Hi"}
SEARCH = {"type": "tool_search"}
OF_CLIENT = {"type": "tool_search", "execution": "client"}


def function(name: str, description: str, *, deferred: bool = True) -> Json:
    parameters = {"type": "object", "properties": {"id": {"type": "integer"}}}
    tool = {"type": "function", "name": name, "description": description, "parameters": parameters, "strict": False}
    return {**tool, "defer_loading": True} if deferred else tool


INVOICES = function("list_invoices", "Lists the invoices of a customer.")
WEATHER = function("get_weather", "Tells the weather of a city.")
CRM = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [INVOICES, function("close_account", "Closes an account.")],
}
SAY = {"type": "custom", "name": "say", "description": "Says a text aloud.", "defer_loading": True}
TOOLS = [SEARCH, CRM, WEATHER, SAY, function("ask", "Asks the user.", deferred=False)]


def search_markup(query: str) -> str:
    return call_markup("functions.tool_search", {"query": query})


@pytest.mark.parametrize("mode", MODES)
async def test_server_finds_and_loads_tools(tmp_path: Path, mode: str) -> None:
    turns = [search_markup("invoices"), call_markup("crm.list_invoices", {"id": 3})]
    async with tool_server(tmp_path, turns) as served:
        received = await respond(served, mode, {"tools": TOOLS})
        first, second = prompts_read(served)
    assert received.types == ["tool_search_call", "tool_search_output", "function_call"]
    search, found, call = received.output
    assert search == {
        "type": "tool_search_call",
        "id": search["id"],
        "call_id": search["call_id"],
        "execution": "server",
        "status": "completed",
        "arguments": {"query": "invoices"},
    }
    assert found == {
        "type": "tool_search_output",
        "id": found["id"],
        "call_id": search["call_id"],
        "execution": "server",
        "status": "completed",
        "tools": [{**CRM, "tools": [INVOICES]}],
    }
    assert (call["namespace"], call["name"], call["arguments"]) == ("crm", "list_invoices", '{"id": 3}')
    if received.events:
        assert received.ladder(0) == received.ladder(1) == ["output_item.added", "output_item.done"]
    assert "type ask =" in first
    assert "type tool_search =" in first
    assert "- crm: Customers." in first
    assert "- get_weather" in first
    assert "type list_invoices" not in first
    assert second.startswith(first)  # the prefix stays
    loaded = second.removeprefix(first)
    assert "<|start|>functions.tool_search to=assistant<|channel|>commentary<|message|># Tools\n\n## crm" in loaded
    assert "type list_invoices" in loaded
    assert "type close_account" not in second
    assert received.response["tools"] == TOOLS


async def test_loaded_tools_stay_loaded_and_in_their_place(tmp_path: Path) -> None:
    """Also for a client that keeps the conversation itself."""
    async with tool_server(tmp_path, [search_markup("weather"), answer_markup("I can.")]) as served:
        first = await respond(served, "whole", {"tools": TOOLS, "input": [USER]})
        for input_items in ({"previous_response_id": first.response["id"]}, {}):
            play_turns(served.engine, call_markup("functions.get_weather", {"id": 1}))
            served.engine.prompts.clear()
            given = [USER] if input_items else [USER, *first.output, USER]
            second = await respond(served, "whole", {"tools": TOOLS, "input": given, **input_items})
            (prompt,) = prompts_read(served)
            head, _, rest = prompt.partition("functions.tool_search to=assistant")
            assert ("type get_weather" in head, "type get_weather" in rest) == (False, True)
            assert second.types == ["function_call"]


async def test_search_without_a_match_lets_the_model_try_again(tmp_path: Path) -> None:
    turns = [search_markup("quantum"), call_markup("functions.tool_search", "{}"), search_markup("say aloud")]
    async with tool_server(tmp_path, turns) as served:
        received = await respond(served, "stream", {"tools": TOOLS})
        prompts = prompts_read(served)
    assert received.types[:6] == ["tool_search_call", "tool_search_output"] * 3
    assert [item["tools"] for item in received.output[1:6:2]] == [[], [], [SAY]]
    assert "No tool that is not loaded yet matches" in prompts[1]
    assert "do not have the form" in prompts[2]
    assert all(after.startswith(before) for before, after in itertools.pairwise(prompts))


async def test_several_searches_of_a_turn_are_answered_one_by_one(tmp_path: Path) -> None:
    turn = join_calls(search_markup("weather").removesuffix("<|call|>") + "<|call|>", search_markup("invoices"))
    async with tool_server(tmp_path, [turn]) as served:
        received = await respond(served, "stream", {"tools": TOOLS})
    kinds = [(item["type"], item["call_id"]) for item in received.output[:4]]
    assert [kind for kind, _ in kinds] == ["tool_search_call", "tool_search_output"] * 2
    assert kinds[0][1] == kinds[1][1] != kinds[2][1] == kinds[3][1]


async def test_search_beyond_the_most_calls_is_refused(tmp_path: Path) -> None:
    async with tool_server(tmp_path, [search_markup("weather"), search_markup("say"), answer_markup()]) as served:
        received = await respond(served, "stream", {"tools": TOOLS, "max_tool_calls": 1})
        assert "all 1 calls of tools" in prompts_read(served)[-1]
    assert [item["tools"] for item in received.output[1:4:2]] == [[WEATHER], []]
    assert received.response["status"] == "completed"


async def test_tools_of_mcp_servers_are_deferred(tmp_path: Path, http: HttpServers) -> None:
    tool = mcp_tool(url=http.url(), defer_loading=True, server_description="Speaks.")
    turns = [search_markup("echo"), call_markup("docs.echo", {"text": "hello"}), answer_markup()]
    toolbox = Toolbox(mcp=McpServers({}, LOCAL))
    async with tool_server(tmp_path, turns, toolbox=toolbox) as served:
        received = await respond(served, "stream", {"tools": [SEARCH, tool]})
        first, *_ = prompts_read(served)
        given = [USER, *received.output, USER]
        play_turns(served.engine, call_markup("docs.echo", {"text": "again"}), answer_markup())
        again = await respond(served, "whole", {"tools": [SEARCH, tool], "input": given})
    assert received.types == ["mcp_list_tools", "tool_search_call", "tool_search_output", "mcp_call", "message"]
    (namespace,) = received.output[2]["tools"]
    assert (namespace["type"], namespace["name"], namespace["description"]) == ("namespace", "docs", "Speaks.")
    assert received.output[3]["output"] == "hello"
    assert "- docs: Speaks." in first
    assert "type echo" not in first
    assert again.output[0]["output"] == "again"


async def test_client_searches(tmp_path: Path) -> None:
    """The tools of its output can be called, and stand where they were found."""
    found = function("book_table", "Books a table.")
    async with tool_server(tmp_path, [search_markup("table")]) as served:
        first = await respond(served, "stream", {"tools": [OF_CLIENT], "input": [USER]})
        (call,) = first.output
        assert call == {
            "type": "tool_search_call",
            "id": call["id"],
            "call_id": call["call_id"],
            "execution": "client",
            "status": "completed",
            "arguments": {"query": "table"},
        }
        assert first.ladder(0) == ["output_item.added", "output_item.done"]
        output = {
            "type": "tool_search_output",
            "call_id": call["call_id"],
            "execution": "client",
            "status": "completed",
            "tools": [found, {**CRM, "tools": [INVOICES]}],
        }
        for body in (
            {"previous_response_id": first.response["id"], "input": [output]},
            {"input": [USER, call, output]},
        ):
            play_turns(served.engine, join_calls(call_markup("functions.book_table", "{}")))
            second = await respond(served, "stream", {"tools": [OF_CLIENT], **body})
            assert (second.types, second.output[0]["name"]) == (["function_call"], "book_table")
            before, after = prompts_read(served)[0], prompts_read(served)[-1]
            assert after.startswith(before)
            assert "type book_table" in after
            answered = {"type": "function_call_output", "call_id": second.output[0]["call_id"], "output": "Done."}
            play_turns(served.engine, call_markup("crm.list_invoices", "{}"))
            more = {"previous_response_id": second.response["id"], "input": [answered]}
            third = await respond(served, "whole", {"tools": [OF_CLIENT], **more})
            assert third.output[0]["namespace"] == "crm"
            assert prompts_read(served)[-1].startswith(after)


async def test_client_describes_its_search(tmp_path: Path) -> None:
    parameters = {"type": "object", "properties": {"goal": {"type": "string"}}, "required": ["goal"]}
    tool = {**OF_CLIENT, "description": "Finds anything.", "parameters": parameters}
    async with tool_server(tmp_path, [call_markup("functions.tool_search", {"goal": "x"})]) as served:
        received = await respond(served, "whole", {"tools": [tool]})
        (prompt,) = prompts_read(served)
    assert received.output[0]["arguments"] == {"goal": "x"}
    assert "// Finds anything.\ntype tool_search = (_: {\ngoal: string,\n}) => any;" in prompt


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [WEATHER]}, "tools[0].defer_loading"),
        ({"tools": [function("f", "", deferred=False), CRM]}, "tools[1].tools[0].defer_loading"),
        ({"tools": [mcp_tool(url="https://mcp.invalid", defer_loading=True)]}, "tools[0].defer_loading"),
        ({"tools": [{**SEARCH, "parameters": {"type": "object"}}]}, "tools[0].parameters"),
        ({"tools": [SEARCH, WEATHER, WEATHER]}, "tools[2].name"),
        ({"tools": [SEARCH, function("tool_search", "")]}, "tools[1].name"),
        ({"tools": [*TOOLS], "tool_choice": {"type": "function", "name": "get_weather"}}, "tool_choice"),
        ({"input": [USER, {"type": "tool_search_output", "call_id": "c", "tools": []}]}, "input[1].call_id"),
        ({"input": [USER, {"type": "tool_search_call", "call_id": "c", "arguments": {}}]}, "input"),
        (
            {
                "input": [
                    {"type": "tool_search_call", "call_id": "c", "arguments": {}},
                    *[{"type": "tool_search_output", "call_id": "c", "tools": []}] * 2,
                ]
            },
            "input[2].call_id",
        ),
        (
            {
                "input": [
                    {"type": "tool_search_call", "call_id": "c", "arguments": {}},
                    {"type": "tool_search_output", "call_id": "c", "tools": [{"type": "image_generation"}]},
                ]
            },
            "input[1].tools[0].type",
        ),
    ],
)
async def test_wrong_searches_are_refused(tmp_path: Path, body: Json, param: str) -> None:
    async with tool_server(tmp_path) as served:
        status, answer = await served.post({"input": "Hi", **body})
    assert (status, answer["error"]["param"]) == (400, param)


async def test_choice_may_require_the_search_and_allow_deferred_tools(tmp_path: Path) -> None:
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "tool_search"}, {"type": "function", "name": "get_weather"}],
    }
    turns = [search_markup("weather invoices say"), call_markup("functions.get_weather", "{}")]
    async with tool_server(tmp_path, turns) as served:
        received = await respond(served, "whole", {"tools": TOOLS, "tool_choice": choice})
        assert received.output[1]["tools"] == [WEATHER]
        assert received.types[2] == "function_call"
        play_turns(served.engine, search_markup("weather"), answer_markup())
        forced_choice = {**choice, "mode": "required", "tools": [{"type": "tool_search"}]}
        forced = await respond(served, "whole", {"tools": TOOLS, "tool_choice": forced_choice})
        assert forced.types == ["tool_search_call", "tool_search_output", "message"]


async def test_hosted_searches_of_openai_are_read(tmp_path: Path) -> None:
    """Their items have no ``call_id``."""
    items = [
        {"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {"paths": ["crm"]}},
        {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": [CRM]},
    ]
    async with tool_server(tmp_path, [call_markup("crm.list_invoices", "{}")]) as served:
        received = await respond(served, "whole", {"tools": TOOLS, "input": [USER, *items, *items, USER]})
        (prompt,) = prompts_read(served)
    assert received.types == ["function_call"]
    assert '{"paths":["crm"]}' in prompt


async def test_openai_python_reads_the_items(tmp_path: Path) -> None:
    async with (
        tool_server(tmp_path, [search_markup("invoices"), answer_markup()]) as served,
        openai_client(served.url) as sdk,
        sdk.responses.stream(model="tiny", input="Hi", tools=TOOLS) as stream,
    ):
        added = [event.item.type async for event in stream if event.type == "response.output_item.added"]
        final = await stream.get_final_response()
    assert added == ["tool_search_call", "tool_search_output", "message"]
    search, found, _ = final.output
    assert isinstance(search, ResponseToolSearchCall)
    assert isinstance(found, ResponseToolSearchOutputItem)
    ResponseToolSearchCall.model_validate_json(search.to_json(), strict=True)
    ResponseToolSearchOutputItem.model_validate_json(found.to_json(), strict=True)
    assert json.loads(found.to_json())["tools"][0]["tools"] == [INVOICES]


async def test_deferred_tools_of_the_history_may_lack_a_search(tmp_path: Path) -> None:
    """What was accepted once is never refused."""
    added = {"type": "additional_tools", "role": "developer", "tools": [WEATHER]}
    async with tool_server(tmp_path, [answer_markup()]) as served:
        first = await respond(served, "whole", {"tools": [SEARCH], "input": [added, USER]})
        second = await respond(served, "whole", {"previous_response_id": first.response["id"]})
        assert "type get_weather" not in served.prompt_text()
        status, answer = await served.post({"input": [added, USER]})
    assert second.types == ["message"]
    assert (status, answer["error"]["param"]) == (400, "input[0].tools[0].defer_loading")


async def test_additional_tools_stand_in_their_place(tmp_path: Path) -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [function("later", "x", deferred=False)]}
    ask = function("ask", "Asks.", deferred=False)
    async with tool_server(tmp_path, [answer_markup("Hello.")]) as served:
        first = await respond(served, "whole", {"tools": [ask], "input": [USER]})
        more = {"previous_response_id": first.response["id"], "input": [added, USER]}
        await respond(served, "whole", {"tools": [ask], **more})
        leading = await respond(served, "whole", {"tools": [ask], "input": [added, USER]})
        before, after, at_the_head = prompts_read(served)
    begun = before.removesuffix("<|start|>assistant")
    assert after.startswith(begun)
    assert "type later" in after.removeprefix(begun)
    assert at_the_head.index("type later") < at_the_head.index("Hi")
    assert leading.types == ["message"]
