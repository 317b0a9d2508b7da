"""Programs of the model that call tools, as clients of the Responses API meet them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.extensions.programs.host import ProgramHost
from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.pipeline.protocol.items import FunctionCall, caller_of, fingerprint_of
from penstock.services.slots import Slots
from penstock.services.tools import ToolAccess, Toolbox
from tests.support.api_clients import conversation_id
from tests.support.mcp_servers import HttpServers
from tests.support.server import ScriptedServer
from tests.support.socket_client import connected
from tests.support.tool_servers import (
    CODE_TOOL,
    MODES,
    SEARCH_TOOL,
    ClientResponse,
    Json,
    answer_markup,
    mcp_tool,
    play_turns,
    prompts_read,
    python_markup,
    respond,
    running_site,
    tool_server,
)

USER: Json = {"role": "user", "content": "Where is it warm?"}
PROGRAMS: Json = {"type": "programmatic_tool_calling"}
ALONE: Json = {"allowed_callers": ["programmatic"]}
LOOK: Json = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    **ALONE,
}
CODE = """
found = await asyncio.gather(look(city="Oslo"), look(city="Rome"))
warmest = max(found, key=lambda each: each["degrees"])
print((await look(city=warmest["near"]))["degrees"])
"""
WEATHER: dict[str, Json] = {
    "Oslo": {"degrees": 3, "near": "Bergen"},
    "Rome": {"degrees": 21, "near": "Naples"},
    "Naples": {"degrees": 4711},
}
WAYS = ["previous_response_id", "conversation", "stateless"]
"""Ways in which a client continues."""


def outputs(items: Sequence[Json], **fields: Any) -> list[Json]:
    """The outputs of all calls among items."""
    return [
        {
            "type": "function_call_output",
            "call_id": item["call_id"],
            "output": json.dumps(WEATHER[json.loads(item["arguments"])["city"]]),
            **fields,
        }
        for item in items
        if item["type"] == "function_call"
    ]


async def begun(served: ScriptedServer, way: str) -> Json:
    return {"conversation": conversation_id(await served.create_conversation())} if way == "conversation" else {}


def followed(way: str, before: Sequence[Json], latest: ClientResponse, items: Sequence[Json]) -> Json:
    """The fields of a request that goes on after the latest response, and after all ``before`` it."""
    match way:
        case "previous_response_id":
            return {"previous_response_id": latest.response["id"], "input": items}
        case "conversation":
            return {"input": items}
        case _:
            return {"input": [*before, *latest.output, *items], "store": latest.response["background"]}


def forget(host: ProgramHost, call_id: str) -> None:
    """End the process of a program that waits, as if another server went on."""
    assert len(host.sleeping) == 1
    host.sleeping.drop(("", call_id))
    assert len(host.sleeping) == 0


@pytest.fixture
def programs(program_sandbox: Sandbox) -> ProgramHost:
    return ProgramHost(program_sandbox, Slots(8))


@pytest.fixture(params=["asleep", "run again"])
def is_kept(request: pytest.FixtureRequest) -> bool:
    """True if the process of a program waits for its client; otherwise another one has its calls again."""
    return str(request.param) == "asleep"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
async def test_client_answers_the_rounds_of_a_program(
    tmp_path: Path, programs: ProgramHost, mode: str, way: str, is_kept: bool
) -> None:
    async with tool_server(tmp_path, [python_markup(CODE)], programs=programs) as served:
        body = {"tools": [PROGRAMS, LOOK]} | await begun(served, way)
        first = await respond(
            served, mode, body | {"input": [USER], "store": way != "stateless" or "background" in MODES[mode]}
        )
        assert first.types == ["program", "function_call", "function_call"]
        program, *calls = first.output
        assert (program["code"], program["fingerprint"]) == (CODE, fingerprint_of(CODE))
        caller = {"type": "program", "caller_id": program["call_id"]}
        assert [(call["caller"], json.loads(call["arguments"])) for call in calls] == [
            (caller, {"city": "Oslo"}),
            (caller, {"city": "Rome"}),
        ]
        assert first.response["status"] == "completed"
        before, latest, turns = [USER], first, [first]
        for expected in (["function_call"], ["program_output", "message"]):
            if not is_kept:
                forget(programs, program["call_id"])
            given = list(reversed(outputs(latest.output)))
            play_turns(served.engine, answer_markup())
            following = body | followed(way, before, latest, given)
            before = [*before, *latest.output, *given]
            latest = await respond(served, mode, following)
            turns.append(latest)
            assert latest.types == expected
        second, third = turns[1:]
        assert second.output[0]["caller"] == caller
        assert second.response["usage"]["output_tokens"] == 0
        ended = third.output[0]
        assert (ended["call_id"], ended["result"], ended["status"]) == (program["call_id"], "4711\n", "completed")
        if third.raw:
            assert third.ladder(0) == ["output_item.added", "output_item.done"]
        read = prompts_read(served)
    assert len(read) == 2
    assert "4711" in read[1]
    assert "degrees" not in read[1].replace(CODE, "")


async def test_socket_answers_the_rounds_of_a_program(tmp_path: Path, programs: ProgramHost, is_kept: bool) -> None:
    async with tool_server(tmp_path, [python_markup(CODE)], programs=programs) as served, connected(served) as socket:
        tools: Json = {"tools": [PROGRAMS, LOOK], "store": False}
        latest = await socket.create(input=[USER], **tools)
        types = [[item.type for item in latest.output]]
        while isinstance(latest.output[-1], FunctionCall):
            if not is_kept:
                forget(programs, caller_of(latest.output[-1]))
            play_turns(served.engine, answer_markup())
            given = outputs([json.loads(msgspec.json.encode(item)) for item in latest.output])
            latest = await socket.create(previous_response_id=latest.id, input=given, **tools)
            types.append([item.type for item in latest.output])
    assert types == [["program", "function_call", "function_call"], ["function_call"], ["program_output", "message"]]


ADDING = "print(await docs.add(a=1, b=2) + await docs.add(a=3, b=4))"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("callers", [["programmatic"], ["direct", "programmatic"]], ids=["programs", "both"])
async def test_servers_are_called_by_programs(
    tmp_path: Path, http: HttpServers, programs: ProgramHost, mode: str, callers: list[str]
) -> None:
    tools = [PROGRAMS, mcp_tool(url=http.url(), allowed_callers=callers)]
    async with tool_server(tmp_path, [python_markup(ADDING), answer_markup()], programs=programs) as served:
        done = await respond(served, mode, {"tools": tools})
        assert done.types == ["mcp_list_tools", "program", "mcp_call", "mcp_call", "program_output", "message"]
        _, program, *calls, ended, _ = done.output
        assert [(call["output"], call["caller"]["caller_id"]) for call in calls] == [
            ("3", program["call_id"]),
            ("7", program["call_id"]),
        ]
        assert ended["result"] == "10\n"
        first, second = prompts_read(served)
    assert ("namespace docs" in first) == ("direct" in callers)
    assert "docs" in first
    assert "<|message|>10\n<|end|>" in second
    assert "to=docs.add" not in second


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("approve", [True, False])
async def test_calls_of_programs_are_approved(
    tmp_path: Path, http: HttpServers, programs: ProgramHost, way: str, approve: bool, is_kept: bool
) -> None:
    code = "try:\n    print(await docs.add(a=1, b=2))\nexcept ToolError as error:\n    print(error)"
    tools = [PROGRAMS, mcp_tool(url=http.url(), require_approval="always", **ALONE)]
    async with tool_server(tmp_path, [python_markup(code)], programs=programs) as served:
        body = {"tools": tools} | await begun(served, way)
        asking = await respond(served, "whole", body | {"input": [USER], "store": way != "stateless"})
        assert asking.types == ["mcp_list_tools", "program", "mcp_approval_request"]
        _, program, request = asking.output
        assert request["caller"] == {"type": "program", "caller_id": program["call_id"]}
        if not is_kept:
            forget(programs, program["call_id"])
        play_turns(served.engine, answer_markup())
        given = {
            "type": "mcp_approval_response",
            "approval_request_id": request["id"],
            "approve": approve,
            "reason": None if approve else "Too dear.",
        }
        done = await respond(served, "stream", body | followed(way, [USER], asking, [given]))
        read = prompts_read(served)[-1]
    if approve:
        assert done.types == ["mcp_call", "program_output", "message"]
        made = done.output[0]
        assert (made["output"], made["approval_request_id"]) == ("3", request["id"])
        assert made["caller"]["caller_id"] == program["call_id"]
    else:
        assert done.types == ["program_output", "message"]
    assert ("3" if approve else "Too dear.") in done.output[-2]["result"]
    assert "Too dear." not in read.partition("to=assistant")[0]


async def test_tools_of_the_server_are_called_by_programs(
    tmp_path: Path, programs: ProgramHost, sandbox: Sandbox
) -> None:
    code = """
found, ran = await asyncio.gather(web_search.search(query="gates"), code_interpreter.python(code="print(6 * 7)"))
print("Gates" in str(found), ran)
"""
    async with running_site() as site:
        tools = [PROGRAMS, {**SEARCH_TOOL, **ALONE}, {**CODE_TOOL, **ALONE}]
        turns = [python_markup(code), answer_markup()]
        async with tool_server(tmp_path, turns, programs=programs, sandbox=sandbox, search=site.url) as served:
            done = await respond(served, "stream", {"tools": tools, "include": ["code_interpreter_call.outputs"]})
    assert done.types == ["program", "web_search_call", "code_interpreter_call", "program_output", "message"]
    program, search, ran, ended, _ = done.output
    assert search["caller"] == ran["caller"] == {"type": "program", "caller_id": program["call_id"]}
    assert (ran["code"], ended["result"]) == ("print(6 * 7)", "True 42\n")


async def test_calls_of_programs_count(tmp_path: Path, http: HttpServers, programs: ProgramHost) -> None:
    code = """
for at in range(3):
    try:
        print(await docs.add(a=at, b=1))
    except ToolError as error:
        print(error)
"""
    turns = [python_markup(code), answer_markup()]
    async with tool_server(tmp_path, turns, programs=programs) as served:
        tools = [PROGRAMS, mcp_tool(url=http.url(), **ALONE)]
        done = await respond(served, "whole", {"tools": tools, "max_tool_calls": 3})
    assert done.types == ["mcp_list_tools", "program", *["mcp_call"] * 3, "program_output", "message"]
    assert [call["output"] for call in done.output[2:5]] == ["1", "2", None]
    first, second, third = done.output[-2]["result"].splitlines()
    assert (first, second) == ("1", "2")
    assert "3 calls" in third


async def test_calls_come_one_by_one_without_parallel_calls(tmp_path: Path, programs: ProgramHost) -> None:
    async with tool_server(tmp_path, [python_markup(CODE)], programs=programs) as served:
        body = {"tools": [PROGRAMS, LOOK], "parallel_tool_calls": False}
        latest = await respond(served, "whole", body | {"input": [USER]})
        asked = [latest.types]
        while latest.types[-1] == "function_call":
            play_turns(served.engine, answer_markup())
            following = followed("previous_response_id", [], latest, outputs(latest.output))
            latest = await respond(served, "whole", body | following)
            asked.append(latest.types)
    assert asked == [["program", "function_call"], *[["function_call"]] * 2, ["program_output", "message"]]
    assert latest.output[0]["result"] == "4711\n"


async def test_round_is_answered_whole(tmp_path: Path, programs: ProgramHost) -> None:
    async with tool_server(tmp_path, [python_markup(CODE)], programs=programs) as served:
        first = await respond(served, "whole", {"tools": [PROGRAMS, LOOK], "input": [USER]})
        one, other = outputs(first.output)
        body = {"tools": [PROGRAMS, LOOK], "previous_response_id": first.response["id"]}
        for given in ([one], [USER]):
            status, refused = await served.post(body | {"input": given})
            assert (status, refused["error"]["param"]) == (400, "input")
            assert "No tool output found for function call" in refused["error"]["message"]
        status, refused = await served.post(body | {"input": [one, other, other]})
        assert (status, refused["error"]["param"]) == (400, "input[2].call_id")


async def test_model_is_made_to_write_a_program(tmp_path: Path, programs: ProgramHost) -> None:
    async with tool_server(tmp_path, [python_markup("print(1)"), answer_markup()], programs=programs) as served:
        done = await respond(served, "whole", {"tools": [PROGRAMS, LOOK], "tool_choice": PROGRAMS})
        assert done.types == ["program", "program_output", "message"]
        assert (done.response["tool_choice"], done.response["tools"][0]) == (PROGRAMS, PROGRAMS)
        assert done.response["tools"][1]["allowed_callers"] == ["programmatic"]
        choice = {"type": "function", "name": "look"}
        status, refused = await served.post({"input": "Hi", "tools": [PROGRAMS, LOOK], "tool_choice": choice})
        assert (status, refused["error"]["param"]) == (400, "tool_choice")


async def test_choice_of_programs_is_met_by_one_in_all_of_its_responses(tmp_path: Path, programs: ProgramHost) -> None:
    """A client sends its choice again with what a program waits for."""
    code = 'print((await look(city="Rome"))["degrees"])'
    async with tool_server(tmp_path, [python_markup(code)], programs=programs) as served:
        body = {"tools": [PROGRAMS, LOOK], "tool_choice": PROGRAMS}
        first = await respond(served, "whole", body)
        play_turns(served.engine, answer_markup())
        following = followed("previous_response_id", [], first, outputs(first.output))
        await respond(served, "whole", body | following)
        assert [prompt.facts.tools.choice for prompt in served.engine.prompts] == ["required", "auto"]


@pytest.mark.parametrize("code", ["while True: pass", "await docs.hang()"], ids=["loops", "waits"])
async def test_program_is_cancelled(tmp_path: Path, http: HttpServers, programs: ProgramHost, code: str) -> None:
    tools = [PROGRAMS, mcp_tool(url=http.url(), **ALONE)]
    async with tool_server(tmp_path, [python_markup(code)], programs=programs) as served:
        async with served.open_stream({"tools": tools, "background": True}) as stream:
            await stream.upto(b'"program"')
            await stream.upto(b"mcp_call" if "docs" in code else b"response.output_item.done")
            response_id = await stream.response_id()
            status, _ = await served.cancel(response_id)
            assert status == 200
            await stream.rest()
        response = await served.wait_for_end(response_id)
        assert response["status"] == "cancelled"
        assert [item["type"] for item in response["output"]][:2] == ["mcp_list_tools", "program"]
        assert "program_output" not in [item["type"] for item in response["output"]]
        assert len(programs.sleeping) == 0
        play_turns(served.engine, answer_markup())
        after = await respond(served, "whole", {"input": [*response["output"], USER], "tools": tools})
        assert (after.types, after.response["status"]) == (["message"], "completed")


async def test_conversation_with_an_open_program_is_counted_and_compacted(
    tmp_path: Path, programs: ProgramHost
) -> None:
    async with tool_server(tmp_path, [python_markup(CODE)], programs=programs) as served:
        tools = [PROGRAMS, LOOK]
        first = await respond(served, "whole", {"tools": tools, "input": [USER]})
        given = [USER, *first.output, *outputs(first.output)]
        count = [
            (await served.post({"input": items, "tools": tools}, "/v1/responses/input_tokens"))[1]["input_tokens"]
            for items in ([USER], given)
        ]
        assert count[0] == count[1]
        play_turns(served.engine, answer_markup("They asked for the weather."))
        status, compacted = await served.post({"model": "tiny", "input": given}, "/v1/responses/compact")
        assert status == 200, compacted
        play_turns(served.engine, answer_markup())
        following = await respond(served, "whole", {"input": compacted["output"], "tools": tools})
    assert [item["type"] for item in compacted["output"]] == [
        "message",
        *[item["type"] for item in given[1:]],
        "compaction",
    ]
    assert following.types == ["function_call"]


async def test_key_without_programs_gets_none(tmp_path: Path, programs: ProgramHost) -> None:
    access = ToolAccess(frozenset({"python"}))
    toolbox = Toolbox({"program": programs}, access=access)
    async with tool_server(tmp_path, toolbox=toolbox) as served:
        status, refused = await served.post({"input": "Hi", "tools": [PROGRAMS, LOOK]})
    assert (status, refused["error"]["param"]) == (400, "tools[0].type")
    assert "programmatic_tool_calling" in refused["error"]["message"]


async def test_program_goes_on_only_in_a_request_with_programs(tmp_path: Path, programs: ProgramHost) -> None:
    """A client may have written all items itself, with a key that may have no programs."""
    code = "print(6 * 7)"
    call, caller = {"call_id": "call_1", "name": "look", "arguments": "{}"}, {"type": "program", "caller_id": "call_p"}
    items = [
        {"type": "program", "id": "prog_1", "call_id": "call_p", "code": code, "fingerprint": fingerprint_of(code)},
        {"type": "function_call", "id": "fc_1", "status": "completed", **call, "caller": caller},
        {"type": "function_call_output", "call_id": "call_1", "output": "1"},
    ]
    toolbox = Toolbox({"program": programs}, access=ToolAccess(frozenset({"python"})))
    async with tool_server(tmp_path, [answer_markup()], toolbox=toolbox) as served:
        body = {"input": [USER, *items], "tools": [{**LOOK, "allowed_callers": ["direct"]}]}
        done = await respond(served, "whole", body)
    assert done.types == ["program_output", "message"]
    assert (done.output[0]["result"], done.output[0]["status"]) == ("This request has no programs.", "incomplete")


@pytest.mark.parametrize(
    "code",
    [
        "found, ran = await asyncio.gather({search}, {run})\nseen = await {look}",
        "seen, found, ran = await asyncio.gather({look}, {search}, {run})",
    ],
    ids=["round by round", "at once"],
)
async def test_program_goes_on_without_a_store_after_calls_of_the_server(
    tmp_path: Path, programs: ProgramHost, sandbox: Sandbox, code: str, is_kept: bool
) -> None:
    """Its process knows what they returned; another one has no way to learn it, and says so."""
    calls = {
        "search": 'web_search.search(query="gates")',
        "run": 'code_interpreter.python(code="print(6 * 7)")',
        "look": 'look(city="Rome")',
    }
    written = code.format_map(calls) + '\nprint("Gates" in str(found), ran, seen["degrees"])'
    async with running_site() as site:
        tools = [PROGRAMS, LOOK, {**SEARCH_TOOL, **ALONE}, {**CODE_TOOL, **ALONE}]
        turns = [python_markup(written)]
        async with tool_server(tmp_path, turns, programs=programs, sandbox=sandbox, search=site.url) as served:
            first = await respond(served, "whole", {"tools": tools, "input": [USER], "store": False})
            assert sorted(first.types) == ["code_interpreter_call", "function_call", "program", "web_search_call"]
            if not is_kept:
                forget(programs, first.output[0]["call_id"])
            play_turns(served.engine, answer_markup())
            following = followed("stateless", [USER], first, outputs(first.output))
            done = await respond(served, "whole", {"tools": tools, **following})
    assert done.types == ["program_output", "message"]
    result = done.output[0]["result"]
    assert result == "True 42 21\n" if is_kept else "is no longer known" in result


async def test_conversation_takes_items_of_programs_that_fit(tmp_path: Path, programs: ProgramHost) -> None:
    """A program goes on in a conversation that its client has copied."""
    async with tool_server(tmp_path, [python_markup(CODE)], programs=programs) as served:
        tools = [PROGRAMS, LOOK]
        first = await respond(served, "whole", {"tools": tools, "input": [USER]})
        program, *calls = first.output
        for items, param in (
            (calls, "items[0].caller.caller_id"),
            ([{**program, "code": "print(1)"}, *calls], "items[0].fingerprint"),
        ):
            status, refused = await served.post({"items": items}, "/v1/conversations")
            assert (status, refused["error"]["param"]) == (400, param)
        forget(programs, program["call_id"])
        path = await served.create_conversation(USER, *first.output)
        latest = first
        while latest.types[-1] == "function_call":
            play_turns(served.engine, answer_markup())
            body = {"conversation": conversation_id(path), "tools": tools, "input": outputs(latest.output)}
            latest = await respond(served, "whole", body)
        kept = await served.conversation_items(path)
    assert latest.output[0]["result"] == "4711\n"
    given = ["function_call_output"]
    assert [item["type"] for item in kept] == [
        *["message", *first.types, *given * 2],
        *["function_call", *given, "program_output", "message"],
    ]


async def test_steps_of_a_program_count_for_its_owner(tmp_path: Path, program_sandbox: Sandbox) -> None:
    """A key's limit of sandboxes holds while a program is at work, and not while it waits."""
    at_work = list[str]()

    @asynccontextmanager
    async def limit(owner: str) -> AsyncIterator[None]:
        at_work.append("begins")
        yield
        at_work.append("waits")

    programs = ProgramHost(program_sandbox, Slots(1), limit)
    async with tool_server(tmp_path, [python_markup(CODE)], programs=programs) as served:
        latest = await respond(served, "whole", {"tools": [PROGRAMS, LOOK], "input": [USER]})
        assert at_work == ["begins", "waits"]
        while latest.types[-1] == "function_call":
            play_turns(served.engine, answer_markup())
            following = followed("previous_response_id", [], latest, outputs(latest.output))
            latest = await respond(served, "whole", {"tools": [PROGRAMS, LOOK], **following})
    assert at_work == ["begins", "waits"] * 3
