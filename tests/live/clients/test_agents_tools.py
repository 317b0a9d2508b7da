from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    CodeInterpreterTool,
    HostedMCPTool,
    MCPToolApprovalFunction,
    MCPToolApprovalRequest,
    ModelSettings,
    OpenAIResponsesModel,
    ProgrammaticToolCallingTool,
    Runner,
    SQLiteSession,
    Tool,
    WebSearchTool,
    function_tool,
    set_tracing_disabled,
)
from agents.items import RunItem
from pydantic import BaseModel

set_tracing_disabled(disabled=True)  # traces would go to OpenAI

PYTHON = CodeInterpreterTool({"type": "code_interpreter", "container": {"type": "auto"}})
SUM = "Add 2 and 3 with the calculator server."
TWICE = "Set x to 20 in Python, then double it."


@pytest.fixture
def model(url: str) -> OpenAIResponsesModel:
    return OpenAIResponsesModel("tiny-gpt-oss", openai.AsyncOpenAI(base_url=url, api_key="none"))


def agent(model: OpenAIResponsesModel, *tools: Tool, **settings: Any) -> Agent[Any]:
    return Agent("Worker", model=model, model_settings=ModelSettings(temperature=0, **settings), tools=[*tools])


def server(
    label: str, url: str, approval: Any = "never", requested: MCPToolApprovalFunction | None = None
) -> HostedMCPTool:
    """An MCP server, which the model knows by its label."""
    return HostedMCPTool(
        {"type": "mcp", "server_label": label, "server_url": url, "require_approval": approval},
        on_approval_request=requested,
    )


def did(items: list[RunItem]) -> list[str]:
    """The types of all items except reasoning."""
    raw: list[Any] = [item.raw_item for item in items if item.type != "reasoning_item"]
    return [item["type"] if isinstance(item, dict) else item.type for item in raw]


async def test_agent_uses_mcp_server_and_interpreter(model: OpenAIResponsesModel, documents: str) -> None:
    worker = agent(model, server("calculator", documents), PYTHON, response_include=["code_interpreter_call.outputs"])
    added = await Runner.run(worker, SUM)
    assert added.final_output == "2 plus 3 is 5."
    assert did(added.new_items) == ["mcp_list_tools", "mcp_call", "message"]
    [call] = [item.raw_item for item in added.new_items if item.type == "tool_call_item"]
    assert (call.name, call.arguments, call.output) == ("add", '{"a":2,"b":3}', "5")
    doubled = await Runner.run(worker, TWICE)
    assert doubled.final_output == "Twice 20 is 40."
    ran = [item.raw_item for item in doubled.new_items if item.type == "tool_call_item"]
    assert [call.code for call in ran] == ["x = 20", "print(x * 2)"]
    assert ran[1].outputs[0].logs == "40\n"


async def test_session_of_an_agent_keeps_its_container(model: OpenAIResponsesModel) -> None:
    worker, session = agent(model, PYTHON), SQLiteSession("container")
    containers = set()
    for _ in range(2):
        result = await Runner.run(worker, TWICE, session=session)
        assert result.final_output == "Twice 20 is 40."
        containers |= {item.raw_item.container_id for item in result.new_items if item.type == "tool_call_item"}
    assert len(containers) == 1


async def test_agent_runs_code_in_a_named_container(model: OpenAIResponsesModel, url: str) -> None:
    client = openai.AsyncOpenAI(base_url=url, api_key="none")
    container = await client.containers.create(name="of an agent")
    tool = CodeInterpreterTool({"type": "code_interpreter", "container": container.id})
    result = await Runner.run(agent(model, tool), TWICE)
    ran = [item.raw_item for item in result.new_items if item.type == "tool_call_item"]
    assert {call.container_id for call in ran} == {container.id}
    await client.containers.delete(container.id)


async def test_agent_streams_mcp_and_interpreter_calls(model: OpenAIResponsesModel, documents: str) -> None:
    worker = agent(model, server("docs", documents), PYTHON)
    for question, did_what, answer in (
        ("Ask the docs server about penstock.", ["mcp_call"], "The docs say what a penstock is."),
        (TWICE, ["code_interpreter_call"] * 2, "Twice 20 is 40."),
    ):
        result = Runner.run_streamed(worker, question)
        streamed_items = [event.item async for event in result.stream_events() if event.type == "run_item_stream_event"]
        assert [kind for kind in did(streamed_items) if kind.endswith("_call")] == did_what
        assert result.final_output == answer


async def test_session_keeps_server_side_calls(model: OpenAIResponsesModel, documents: str) -> None:
    worker = agent(model, server("calculator", documents), PYTHON)
    session = SQLiteSession("one")
    for question, answer in ((SUM, "2 plus 3 is 5."), (TWICE, "Twice 20 is 40."), (SUM, "2 plus 3 is 5.")):
        assert (await Runner.run(worker, question, session=session)).final_output == answer


@pytest.mark.parametrize("streamed", [False, True], ids=["object", "stream"])
@pytest.mark.parametrize("by_id", [False, True], ids=["replayed", "by_id"])
async def test_approved_call_is_made(model: OpenAIResponsesModel, documents: str, by_id: bool, streamed: bool) -> None:
    requested = []

    def approve(request: MCPToolApprovalRequest) -> Any:
        requested.append((request.data.server_label, request.data.name, request.data.arguments))
        return {"approve": True}

    worker = agent(model, server("calculator", documents, "always", approve))
    if streamed:
        result: Any = Runner.run_streamed(worker, SUM, auto_previous_response_id=by_id)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(worker, SUM, auto_previous_response_id=by_id)
    assert requested == [("calculator", "add", '{"a":2,"b":3}')]
    assert result.final_output == "2 plus 3 is 5."
    kinds = [kind for kind in did(result.new_items) if kind != "mcp_list_tools"]
    assert kinds == ["mcp_approval_request", "mcp_approval_response", "mcp_call", "message"]
    [call] = [item.raw_item for item in result.new_items if item.type == "tool_call_item"]
    assert call.output == "5"


async def test_refused_call_is_not_made(model: OpenAIResponsesModel, documents: str) -> None:
    worker = agent(
        model, server("calculator", documents, "always", lambda _: {"approve": False, "reason": "Not on Sundays."})
    )
    result = await Runner.run(worker, SUM)
    assert "mcp_call" not in did(result.new_items)
    assert result.final_output


async def test_approval_by_hand_resumes_the_run(model: OpenAIResponsesModel, documents: str) -> None:
    worker = agent(model, server("calculator", documents, "always"))
    paused = await Runner.run(worker, SUM)
    [interruption] = paused.interruptions
    state = paused.to_state()
    state.approve(interruption)
    assert (await Runner.run(worker, state)).final_output == "2 plus 3 is 5."


async def test_web_search_cites_its_page(model: OpenAIResponsesModel) -> None:
    result = await Runner.run(agent(model, WebSearchTool()), "Search the web for vLLM.")
    assert did(result.new_items) == ["web_search_call", "web_search_call", "message"]
    [cited] = result.new_items[-1].raw_item.content[0].annotations
    assert (cited.type, cited.title) == ("url_citation", "vLLM")
    assert result.final_output[cited.start_index : cited.end_index].endswith(f"]({cited.url}))")


class Found(BaseModel):
    number: int


@function_tool(allowed_callers=["programmatic"])
def look(number: int) -> Found:
    """Look a number up."""
    return Found(number=7 * number)


PROGRAM = """\
found = await asyncio.gather(*(look(number=number) for number in range(3)))
total = sum(each["number"] for each in found)
print(total, (await look(number=total))["number"])
"""
DICTATED = f"run {json.dumps(PROGRAM)}\nsay {{result}}"


@pytest.mark.parametrize("streamed", [False, True], ids=["object", "stream"])
@pytest.mark.parametrize("way", ["replayed", "by_id", "unstored"])
async def test_agent_runs_the_calls_of_programs(programming: str, way: str, streamed: bool) -> None:
    """Unchanged: it checks who calls, and that the program of a call is there and has not ended."""
    model = OpenAIResponsesModel("agent", openai.AsyncOpenAI(base_url=f"{programming}/v1", api_key="none"))
    settings = ModelSettings(store=way != "unstored", tool_choice="programmatic_tool_calling")
    worker = Agent("Worker", model=model, model_settings=settings, tools=[ProgrammaticToolCallingTool(), look])
    if streamed:
        result: Any = Runner.run_streamed(worker, DICTATED, auto_previous_response_id=way == "by_id")
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(worker, DICTATED, auto_previous_response_id=way == "by_id")
    assert result.final_output.strip() == "21 147"
    called = [*["function_call"] * 3, *["function_call_output"] * 3, "function_call", "function_call_output"]
    assert did(result.new_items) == ["program", *called, "program_output", "message"]
