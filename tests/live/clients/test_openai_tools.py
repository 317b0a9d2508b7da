from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest
from openai.types.responses import Response

PYTHON: Any = {"type": "code_interpreter", "container": {"type": "auto"}}
SHELL: Any = {"type": "shell", "environment": {"type": "container_auto"}}
INCLUDED: Any = ["code_interpreter_call.outputs", "web_search_call.action.sources"]


@pytest.fixture
def tools(documents: str) -> Any:
    server = {"type": "mcp", "server_url": documents, "require_approval": "never"}
    return [PYTHON, server | {"server_label": "docs"}, server | {"server_label": "calculator"}]


def request_body(question: Any, tools: Any, **more: Any) -> Any:
    return {"model": "tiny-gpt-oss", "input": question, "tools": tools, "temperature": 0, "include": INCLUDED} | more


def did(response: Response) -> list[Any]:
    """All items except reasoning and messages."""
    return [item for item in response.output if item.type not in ("reasoning", "message")]


def response_by(client: openai.OpenAI, way: str, body: Any) -> Response:
    """Create a response as an object, as a stream, in the background, or both; return it at its end."""
    match way:
        case "object":
            return client.responses.create(**body)
        case "stream":
            with client.responses.stream(**body) as stream:
                return stream.get_final_response()
        case "background":
            response = client.responses.create(**body, background=True)
            while response.status in ("queued", "in_progress"):
                time.sleep(0.1)
                response = client.responses.retrieve(response.id, include=INCLUDED)
            return response
        case _:
            with client.responses.create(**body, background=True, stream=True) as stream:
                first = next(stream)
            *_, last = client.responses.retrieve(first.response.id, stream=True, starting_after=0)
            return last.response


@pytest.mark.parametrize("way", ["object", "stream", "background", "background_stream"])
def test_tool_items_are_the_same_in_every_mode(client: openai.OpenAI, tools: Any, way: str) -> None:
    response = response_by(client, way, request_body("Set x to 20 in Python, then double it.", tools))
    assert (response.status, response.output_text) == ("completed", "Twice 20 is 40.")
    *listings, first, second = did(response)
    assert [listing.server_label for listing in listings] == ["docs", "calculator"]
    assert (first.code, second.code, second.outputs[0].logs) == ("x = 20", "print(x * 2)", "40\n")
    response = response_by(client, way, request_body("Ask the docs server about penstock.", tools))
    assert (response.status, response.output_text) == ("completed", "The docs say what a penstock is.")
    call = did(response)[-1]
    assert (call.name, call.output) == ("search", "penstock: a pipe that leads water to a turbine")


def test_stream_helper_passes_on_each_step(client: openai.OpenAI, tools: Any) -> None:
    with client.responses.stream(**request_body("Add 2 and 3 with the calculator server.", tools)) as stream:
        events = list(stream)
        response = stream.get_final_response()
    steps = [event.type.removeprefix("response.mcp_call") for event in events if ".mcp_call" in event.type]
    assert [step for step in steps if not step.endswith(".delta")] == [".in_progress", "_arguments.done", ".completed"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done[:-1]] == [item.to_dict() for item in response.output[:-1]]
    assert client.responses.retrieve(response.id).output_text == response.output_text == "2 plus 3 is 5."


def test_approved_call_is_made(client: openai.OpenAI, documents: str) -> None:
    tools = [{"type": "mcp", "server_label": "calculator", "server_url": documents}]
    first = client.responses.create(**request_body("Add 2 and 3 with the calculator server.", tools))
    request = did(first)[-1]
    assert (request.type, request.name) == ("mcp_approval_request", "add")
    approval = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": True}
    second = client.responses.create(**request_body([approval], tools, previous_response_id=first.id))
    assert (did(second)[0].output, second.output_text) == ("5", "2 plus 3 is 5.")


@pytest.mark.usefixtures("shell")
def test_shell_call_has_its_output(client: openai.OpenAI) -> None:
    response = client.responses.create(**request_body("Make a note in the container.", [SHELL]))
    call, output = did(response)
    assert (call.type, output.call_id, output.output[0].stdout) == ("shell_call", call.call_id, "note\n")


def test_web_search_has_real_addresses(client: openai.OpenAI) -> None:
    response = client.responses.create(**request_body("Search the web for vLLM.", [{"type": "web_search"}]))
    search, page = did(response)
    assert [source.url for source in search.action.sources] == [page.action.url]
    message: Any = response.output[-1]
    assert [cited.url for cited in message.content[0].annotations] == [page.action.url]


def test_server_side_items_can_be_sent_back(client: openai.OpenAI, tools: Any) -> None:
    context: Any = [{"role": "user", "content": "Set x to 20 in Python, then double it."}]
    first = client.responses.create(**request_body(context, tools, store=False))
    context += [*first.output, {"role": "user", "content": "Add 2 and 3 with the calculator server."}]
    second = client.responses.create(**request_body(context, tools, store=False))
    assert second.output_text == "2 plus 3 is 5."
    assert [item.type for item in did(second)] == ["mcp_call"]


TWICE = "Set x to 20 in Python, then double it."


def test_container_is_made_filled_used_and_deleted(client: openai.OpenAI) -> None:
    expires: Any = {"anchor": "last_active_at", "minutes": 5}
    container = client.containers.create(name="mine", expires_after=expires, memory_limit="1g")
    assert (container.status, container.memory_limit, container.network_policy) != ("expired", None, None)
    assert [found.id for found in client.containers.list(extra_query={"name": "mine"})] == [container.id]
    file = client.containers.files.create(container.id, file=("a.csv", b"1,2"))
    assert (file.bytes, file.source, file.path.rpartition("/")[2]) == (3, "user", "a.csv")
    found = client.containers.files.retrieve(file.id, container_id=container.id)
    assert found.to_dict() == file.to_dict()
    content = client.containers.files.content.retrieve(file.id, container_id=container.id)
    assert content.read() == b"1,2"
    tools = [{"type": "code_interpreter", "container": container.id}]
    first, second = did(client.responses.create(**request_body(TWICE, tools)))
    assert (first.container_id, second.container_id, second.outputs[0].logs) == (container.id, container.id, "40\n")
    assert [found.id for found in client.containers.files.list(container.id)] == [file.id]
    client.containers.files.delete(file.id, container_id=container.id)
    assert list(client.containers.files.list(container.id)) == []
    client.containers.delete(container.id)
    with pytest.raises(openai.NotFoundError):
        client.containers.retrieve(container.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**request_body(TWICE, tools))


def test_conversation_keeps_its_container(client: openai.OpenAI) -> None:
    first = client.responses.create(**request_body(TWICE, [PYTHON]))
    second = client.responses.create(**request_body(TWICE, [PYTHON], previous_response_id=first.id))
    assert {call.container_id for call in did(first)} == {call.container_id for call in did(second)}
    other = client.responses.create(**request_body(TWICE, [PYTHON]))
    assert {call.container_id for call in did(other)}.isdisjoint({call.container_id for call in did(first)})


WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
BLOCK = 128
"""The tokens of a block of vLLM's prefix cache on a CPU: a part of one is not cached."""
SEARCHING: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "tool_search"}]}


def test_server_search_has_items_and_a_stream(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "tool_search"}, {**WEATHER, "defer_loading": True}]
    body = request_body("How is the weather in Paris?", tools, tool_choice=SEARCHING, max_output_tokens=600)
    with client.responses.stream(**body) as stream:
        done = [event.item.type for event in stream if event.type == "response.output_item.done"]
    assert [kind for kind in done if kind.startswith("tool_search")][:2] == ["tool_search_call", "tool_search_output"]


def test_tools_that_the_client_finds_can_be_called(client: openai.OpenAI) -> None:
    tools: Any = [
        {
            "type": "tool_search",
            "execution": "client",
            "description": "Finds tools.",
            "parameters": {
                "type": "object",
                "properties": {"topic": {"type": "string", "enum": ["weather"]}},
                "required": ["topic"],
                "additionalProperties": False,
            },
        }
    ]
    long: Any = {"instructions": "Be brief. " * 300}
    first = client.responses.create(**request_body("How is the weather?", tools, tool_choice=SEARCHING, **long))
    (search,) = did(first)
    assert (search.type, search.execution, search.arguments) == ("tool_search_call", "client", {"topic": "weather"})
    found: Any = {"type": "tool_search_output", "call_id": search.call_id, "execution": "client", "tools": [WEATHER]}
    choice: Any = {"type": "function", "name": "get_weather"}
    more = request_body([found], tools, tool_choice=choice, previous_response_id=first.id)
    second = client.responses.create(**more, **long)
    (call,) = did(second)
    assert (call.type, call.name) == ("function_call", "get_weather")
    before, after = first.usage, second.usage
    assert before
    assert after
    assert after.input_tokens_details.cached_tokens > before.input_tokens - BLOCK  # the prefix stays


@pytest.mark.parametrize("kind", ["shell", "local_shell", "apply_patch"])
def test_required_calls_of_the_client_have_an_action(client: openai.OpenAI, kind: str) -> None:
    body = request_body("List the files in this folder.", [{"type": kind}], tool_choice="required")
    response = client.responses.create(**body, max_output_tokens=400)
    calls = did(response)
    assert len(calls) == 1 or response.status == "incomplete"  # a text that the tiny model does not end is no call
    assert {(call.type, call.status) for call in calls} <= {(f"{kind}_call", "completed")}


PROGRAM = """\
found = await asyncio.gather(*(look(number=number) for number in range(3)))
print(sum(found), await look(number=sum(found)))
"""
LOOK: Any = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    "strict": False,
    "allowed_callers": ["programmatic"],
}


@pytest.mark.parametrize("way", ["object", "stream", "background", "background_stream"])
def test_rounds_of_a_program_are_answered(programming: str, way: str) -> None:
    body: Any = {"model": "agent", "tools": [{"type": "programmatic_tool_calling"}, LOOK]}
    given: Any = [{"role": "user", "content": f"run {json.dumps(PROGRAM)}\nsay {{result}}"}]
    rounds: list[int] = []
    with openai.OpenAI(base_url=f"{programming}/v1", api_key="none", max_retries=0) as client:
        while given:
            response = response_by(client, way, body | {"input": given})
            calls = [item for item in response.output if item.type == "function_call"]
            assert all(call.caller and call.caller.type == "program" for call in calls)
            given = [
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": str(7 * json.loads(call.arguments)["number"]),
                    "caller": call.caller and call.caller.to_dict(),
                }
                for call in calls
            ]
            rounds.append(len(calls))
            body["previous_response_id"] = response.id
    assert (rounds, response.output_text.strip()) == ([3, 1, 0], "21 147")
    (ended,) = [item for item in response.output if item.type == "program_output"]
    assert (ended.result, ended.status) == ("21 147\n", "completed")
