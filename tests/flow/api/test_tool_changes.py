"""System messages of Messages that change the tools and the effort in the middle of a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import PATH
from tests.support.server import HELLO, PacedServer, script
from tests.support.tool_servers import serving_everything

Json = dict[str, Any]

HI: Json = {"role": "user", "content": "Hi"}
HELLO_BACK: Json = {"role": "assistant", "content": "Hello."}


def tool(name: str, **fields: Any) -> Json:
    return {"name": name, "input_schema": {"type": "object", "properties": {}}, **fields}


def system(*blocks: Json, **fields: Any) -> Json:
    return {"role": "system", "content": list(blocks), **fields}


def addition(name: str) -> Json:
    return {"type": "tool_addition", "tool": {"type": "tool_reference", "name": name}}


def definition(of_tool: Json) -> Json:
    return {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": of_tool}}


def removal(name: str) -> Json:
    return {"type": "tool_removal", "tool": {"type": "tool_reference", "name": name}}


async def asked(served: PacedServer, *changes: Json, **fields: Any) -> tuple[int, Json]:
    messages = [HI, HELLO_BACK, *changes, HI]
    return await served.post({"model": "tiny", "max_tokens": 50, "messages": messages, **fields}, PATH)


async def callable_tools(served: PacedServer, *changes: Json, **fields: Any) -> list[str]:
    """Return the names of the tools that the model may call, which the grammar of the engine holds it to."""
    assert (await asked(served, *changes, **fields))[0] == 200
    prompt = served.engine.prompts[-1]
    tools = prompt.facts.tools
    if tools.choice == "none":
        return []
    assert (prompt.grammar is None) == (tools.allowed is None)
    return [name for _, name in tools.allowed] if tools.allowed is not None else [each.name for each in tools.tools]


async def test_added_tool_stands_where_it_was_added(served: PacedServer) -> None:
    await asked(served, tools=[tool("near")])
    plain = served.prompt_text()
    assert await callable_tools(served, system(definition(tool("far"))), tools=[tool("near")]) == ["near", "far"]
    head, added = plain[: plain.rindex("<|start|>user")], served.prompt_text()
    assert added.startswith(head)
    assert "type far = " in added[len(head) :]


async def test_deferred_tool_is_loaded_by_a_message(served: PacedServer) -> None:
    tools = [tool("near"), {"type": "bash_20250124", "name": "bash", "defer_loading": True}]
    assert await callable_tools(served, tools=tools) == ["near"]
    assert "type bash = " not in served.prompt_text()
    assert await callable_tools(served, system(addition("bash")), tools=tools) == ["near", "bash"]
    assert "type bash = " in served.prompt_text()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([removal("a")], ["b"]),
        ([removal("a"), removal("b")], []),
        ([removal("a"), addition("a")], ["a", "b"]),
        ([removal("a"), definition(tool("a"))], ["a", "b"]),
        ([definition(tool("c")), removal("c")], ["a", "b"]),
        ([definition(tool("c")), removal("a")], ["b", "c"]),
        ([addition("a")], ["a", "b"]),
    ],
)
async def test_model_calls_the_tools_that_are_left(
    served: PacedServer, changes: list[Json], expected: list[str]
) -> None:
    tools = [tool("a"), tool("b")]
    assert await callable_tools(served, system(*changes), tools=tools) == expected
    assert ("type a = " in served.prompt_text()) == bool(expected)  # the engine has the prompt's beginning in its cache
    assert await callable_tools(served, *map(system, changes), tools=tools) == expected
    cleared = system({"type": "text", "text": "NOTE"}, *changes, clear_at="next_user_message")
    assert await callable_tools(served, cleared, tools=tools) == expected
    assert "NOTE" not in served.prompt_text()


async def test_model_reads_that_a_tool_was_withdrawn(served: PacedServer) -> None:
    for changes in ([removal("a")], [removal("a"), addition("a")]):
        await asked(served, system(*changes), tools=[tool("a")])
        text = served.prompt_text()
        assert ("The tool a is not available" in text, "The tool a is available again" in text) == (
            True,
            len(changes) == 2,
        )


async def test_choice_of_a_withdrawn_tool_is_refused(served: PacedServer) -> None:
    gone = system(removal("a"))
    tools = [tool("a"), tool("b")]
    status, answer = await asked(served, gone, tools=tools, tool_choice={"type": "tool", "name": "a"})
    assert (status, answer["error"]["message"]) == (400, "The tool 'a' was withdrawn (at tool_choice.name)")
    assert await callable_tools(served, gone, tools=tools, tool_choice={"type": "tool", "name": "b"}) == ["b"]
    assert await callable_tools(served, gone, tools=tools, tool_choice={"type": "any"}) == ["b"]
    assert await callable_tools(served, gone, tools=tools, tool_choice={"type": "none"}) == []
    status, _ = await asked(served, gone, tools=tools[:1], tool_choice={"type": "any"})
    assert status == 400


async def test_tool_of_the_server_is_chosen_by_its_name(tmp_path: Path) -> None:
    search, program = (
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "code_execution_20250825", "name": "code_execution"},
    )
    async with serving_everything(tmp_path) as served:
        served.engine.script = script(HELLO)
        for each, namespace in ((search, "browser"), (program, "python")):
            choice = {"type": "tool", "name": each["name"]}
            body = {
                "model": "tiny",
                "max_tokens": 9,
                "messages": [HI],
                "tools": [search, program],
                "tool_choice": choice,
            }
            assert (await served.post(body, PATH))[0] == 200
            allowed = served.engine.prompts[-1].facts.tools.allowed
            assert {owner for owner, _ in allowed or ()} == {namespace}


@pytest.mark.parametrize(
    ("block", "place"),
    [
        (addition("x"), "tool.name"),
        (removal("x"), "tool.name"),
        (definition({"name": "x"}), "tool.definition.input_schema"),
        (definition(tool("x", type="web_fetch_20250910")), ""),
        ({"type": "tool_removal", "tool": {"type": "mcp_toolset_reference", "server_name": "x"}}, "tool.type"),
    ],
)
async def test_wrong_change_of_tools_is_refused_at_its_place(served: PacedServer, block: Json, place: str) -> None:
    status, answer = await asked(served, system({"type": "text", "text": "So:"}, block), tools=[tool("a")])
    at = f"messages[2].content[1].{place}".rstrip(".")
    assert (status, answer["error"]["message"].endswith(f"(at {at})")) == (400, True)


async def test_tools_are_counted_as_they_are_read(served: PacedServer) -> None:
    messages = [HI, HELLO_BACK, system(definition(tool("far")), removal("near")), HI]
    body = {"model": "tiny", "messages": messages, "tools": [tool("near")]}
    _, counted = await served.post(body, f"{PATH}/count_tokens")
    await served.post({**body, "max_tokens": 50}, PATH)
    assert counted["input_tokens"] == len(served.engine.prompts[-1].token_ids)


async def test_effort_of_a_message_lasts_until_the_next(served: PacedServer) -> None:
    low, high = (system(output_config={"effort": effort}) for effort in ("low", "high"))
    for changes, expected in (([low], "low"), ([low, high], "high"), ([low, HELLO_BACK, HI], "low"), ([], "medium")):
        assert (await asked(served, *changes, output_config={"effort": "medium"}))[0] == 200
        assert f"Reasoning: {expected}" in served.prompt_text()
        assert served.prompt_text().count("<|start|>developer") == 0
    for kind in ("disabled", "between_tools"):  # the model is not to think at all
        _, answer = await asked(served, high, thinking={"type": kind})
        assert "Reasoning: low" in served.prompt_text()
        assert [block["type"] for block in answer["content"]] == ["text"]
