"""Programs that call tools, in the words of the Messages API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.dialects.messages.dialect import read
from penstock.extensions.dialects.messages.writer import MessageEvents, whole_message
from penstock.pipeline.core import source_of
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol import events, items
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.items import InputItem
from tests.support.stored_responses import response

Json = dict[str, Any]

CODE: Json = {"type": "code_execution_20260120", "name": "code_execution"}
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALLERS = ["code_execution_20260120"]
ADD: Json = {"name": "add", "input_schema": SCHEMA, "allowed_callers": CALLERS}
BOTH = ["direct", *CALLERS]
HI: Json = {"role": "user", "content": "Hi"}


def asked(*messages: Json, **fields: Any) -> Any:
    body = {"model": "tiny", "max_tokens": 1, "messages": [HI, *messages], "tools": [CODE, ADD], **fields}
    return read(json.dumps(body).encode()).request


@pytest.mark.parametrize(
    ("tool", "sent"),
    [
        (ADD, {"type": "function", "name": "add", "parameters": SCHEMA, "allowed_callers": ["programmatic"]}),
        ({**ADD, "allowed_callers": BOTH}, {"allowed_callers": ["direct", "programmatic"]}),
        ({**ADD, "allowed_callers": ["direct"]}, {"allowed_callers": None}),
        (
            {**ADD, "allowed_callers": ["code_execution_20250825", *BOTH]},
            {"allowed_callers": ["direct", "programmatic"]},
        ),
        ({**ADD, "strict": True}, {"allowed_callers": ["programmatic"], "strict": True}),
        (
            {"type": "bash_20250124", "name": "bash", "allowed_callers": CALLERS},
            {"type": "function", "name": "bash", "allowed_callers": ["programmatic"]},
        ),
        (
            {"type": "web_search_20260209", "name": "web_search", "allowed_callers": CALLERS},
            {"type": "web_search_20260209", "allowed_callers": ["programmatic"]},
        ),
        ({"type": "web_search_20260209", "name": "web_search"}, {"allowed_callers": None}),
    ],
)
def test_tools_have_the_callers_of_responses(tool: Json, sent: Json) -> None:
    _, found = asked(tools=[CODE, tool]).tools
    assert sent == {key: found.sent.get(key) for key in sent}


@pytest.mark.parametrize(
    ("code", "callers", "found"),
    [
        ("code_execution_20250825", CALLERS, ("programmatic_tool_calling", "code_execution_20250825")),
        ("code_execution_20260120", CALLERS, ("programmatic_tool_calling", "code_execution_20260120")),
        ("code_execution_20260521", CALLERS, ("programmatic_tool_calling", "code_execution_20260120")),
        ("code_execution_20260120", BOTH, ("programmatic_tool_calling", "code_execution_20260120")),
        ("code_execution_20260120", ["direct"], ("code_interpreter", None)),
        ("code_execution_20260120", None, ("code_interpreter", None)),
    ],
)
def test_code_execution_calls_tools_if_it_may(code: str, callers: list[str] | None, found: Any) -> None:
    """Of the types of callers, anthropic-python knows two."""
    tools = [{**ADD, "allowed_callers": callers}, {**CODE, "type": code}]
    tool = asked(tools=tools).tools[1]
    assert (tool.type, tool.sent.get("caller")) == found
    chosen = asked(tools=tools, tool_choice={"type": "tool", "name": "code_execution"}).tool_choice
    assert chosen.type == tool.type


def system(change: str, **tool: Any) -> Json:
    return {"messages": [HI, {"role": "system", "content": [{"type": change, "tool": tool}]}, HI]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [ADD]}, "tools[0].allowed_callers"),
        ({"tools": [{**ADD, "allowed_callers": []}, CODE]}, "tools[0].allowed_callers"),
        ({"tools": [{**ADD, "allowed_callers": ["code_execution"]}, CODE]}, "tools[0].allowed_callers[0]"),
        ({"tools": [{**CODE, "allowed_callers": CALLERS}]}, "tools[0].allowed_callers"),
        ({"tools": [CODE, {**ADD, "defer_loading": True}]}, "tools[1].defer_loading"),
        ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice.name"),
        (system("tool_removal", type="tool_reference", name="add"), "messages[1].content[0].tool.name"),
        (
            system("tool_addition", type="tool_definition", definition={**ADD, "name": "late"}),
            "messages[1].content[0].tool.definition.allowed_callers",
        ),
        ({"container": "container_1"}, "container"),
        ({"container": {"id": "container_1"}}, "container"),
        ({"container": {"id": f"container_{'0' * 36}", "skills": [{"type": "custom"}]}}, "container.skills"),
    ],
)
def test_what_cannot_be_is_refused_at_its_place(fields: Json, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize("container", [None, f"container_{'0' * 36}", {"id": f"container_{'a' * 36}", "skills": []}])
def test_container_of_an_answer_is_taken(container: Any) -> None:
    assert asked(container=container).input_items == asked().input_items


def test_choice_of_all_tools_leaves_out_those_of_programs() -> None:
    more = {"name": "b", "input_schema": SCHEMA}
    tools = [CODE, ADD, more, {**more, "name": "gone"}]
    choice = asked(tools=tools, **system("tool_removal", type="tool_reference", name="gone")).tool_choice
    assert [tool.model_dump(include={"type", "name"}) for tool in choice.tools] == [
        {"type": "programmatic_tool_calling"},
        {"type": "function", "name": "b"},
    ]


# Histories

KEYS = (f"{number:036x}" for number in range(10**9))
TEXTS = st.text(st.characters(codec="utf-8"), max_size=9)
INPUTS = st.dictionaries(TEXTS, TEXTS | st.integers() | st.booleans() | st.none(), max_size=2)
ACTIONS = st.one_of(
    st.builds(lambda text: {"type": "search", "query": text, "sources": [{"type": "url", "url": text}]}, TEXTS),
    st.builds(lambda text: {"type": "open_page", "url": text}, TEXTS),
    st.builds(lambda text: {"type": "find_in_page", "url": "", "pattern": text}, TEXTS),
)
SEARCHES = st.lists(st.tuples(ACTIONS, st.booleans()), max_size=2)
ROUNDS = st.lists(st.tuples(SEARCHES, st.lists(st.tuples(INPUTS, TEXTS), min_size=1, max_size=3)), max_size=3)
"""What each round of a program does on the web, the inputs of its calls to the client, and their results."""


TOOLS: tuple[Json, ...] = ({"type": "programmatic_tool_calling", "caller": "code_execution_20250825"},)


def answer(output: Sequence[items.OutputItem], tools: tuple[Json, ...]) -> list[ResponseEvent]:
    """Return the events of a response with these items."""
    done = response(output=tuple(output), tools=tools)
    found: list[ResponseEvent] = [events.ResponseCreated(0, done)]
    for item in output:
        found.append(events.OutputItemAdded(0, 0, item))
        if isinstance(item, items.FunctionCall):
            found.append(events.FunctionCallArgumentsDelta(0, item_id=item.id, output_index=0, delta=item.arguments))
        found.append(events.OutputItemDone(0, 0, item))
    return [*found, events.ResponseCompleted(0, done)]


async def written(output: Sequence[items.OutputItem], tools: tuple[Json, ...] = TOOLS) -> Json:
    """Return the message of a response with these items."""
    return dict(json.loads(msgspec.json.encode(await whole_message(MessageEvents()(source_of(answer(output, tools)))))))


def program(code: str = "print(1)") -> items.Program:
    key = next(KEYS)
    return items.Program(f"prog_{key}", call_id=f"call_{key}", code=code, fingerprint=items.fingerprint_of(code))


def call(caller: str, arguments: str = "{}") -> items.FunctionCall:
    key, by = next(KEYS), items.caller_named(caller)
    return items.FunctionCall(
        f"fc_{key}", call_id=f"call_{key}", name="add", arguments=arguments, status="completed", caller=by
    )


def search(caller: str, action: Json, has_failed: bool) -> items.WebSearchCall:
    action = {**action, "sources": []} if has_failed and "sources" in action else action
    return items.WebSearchCall(
        f"ws_{next(KEYS)}",
        status="failed" if has_failed else "completed",
        action=action,
        caller=items.caller_named(caller),
    )


def results(message: Json, texts: Sequence[str]) -> Json:
    """Return the message of a client that has run the calls of a message."""
    calls = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    blocks = [
        {"type": "tool_result", "tool_use_id": use_id, "content": text}
        for use_id, text in zip(calls, texts, strict=True)
    ]
    return {"role": "user", "content": blocks}


def output(of: items.FunctionCall, text: str) -> items.FunctionCallOutput:
    return items.FunctionCallOutput("", call_id=of.call_id, output=text, status="completed", caller=of.caller)


def essence(item: InputItem) -> Any:
    """Return what tells items apart, whatever the ids of calls of functions are."""
    match item:
        case items.FunctionCall(id=item_id, name=name, arguments=arguments):
            return "call", item_id, name, json.loads(arguments), items.caller_of(item)
        case items.FunctionCallOutput(output=output):
            return "output", output, items.caller_of(item)
        case items.WebSearchCall(id=item_id, status=status, action=action):
            return "search", item_id, status, action, items.caller_of(item)
        case items.Program(id=item_id, call_id=call_id, code=code, fingerprint=fingerprint):
            return "program", item_id, call_id, code, fingerprint
        case items.ProgramOutput(call_id=call_id, result=result, status=status):
            return "result", call_id, result, status
        case _:
            raise AssertionError(item)


@given(TEXTS, ROUNDS, TEXTS, st.sampled_from(["completed", "incomplete"]))
async def test_history_has_all_that_a_program_needs(code: str, rounds: Any, printed: str, status: Any) -> None:
    begun = program(code)
    pending: list[items.OutputItem] = [begun]
    messages, wanted = list[Json](), list[InputItem]([begun])
    for searches, calls in rounds:
        searched = [search(begun.call_id, action, has_failed) for action, has_failed in searches]
        nested = [call(begun.call_id, json.dumps(given, ensure_ascii=False)) for given, _ in calls]
        found = [text for _, text in calls]
        message = await written([*pending, *searched, *nested])
        assert message["stop_reason"] == "tool_use"
        messages += [{"role": "assistant", "content": message["content"]}, results(message, found)]
        wanted += [*searched, *nested, *map(output, nested, found)]
        pending = []
    ended = items.ProgramOutput("progo_1", begun.call_id, printed, status)
    message = await written([*pending, ended])
    assert message["stop_reason"] == "end_turn"
    messages.append({"role": "assistant", "content": message["content"]})
    again = asked(*messages, HI).input_items[1:-1]
    assert [essence(item) for item in again] == [essence(item) for item in (*wanted, ended)]


async def test_blocks_name_their_caller_if_the_request_has_programs() -> None:
    begun = program()
    message = await written([begun, call(begun.call_id), call("")])
    used, nested, direct = message["content"]
    assert (used["type"], used["name"], used["input"]) == ("server_tool_use", "code_execution", {"code": begun.code})
    assert used["caller"] == direct["caller"] == {"type": "direct"}
    assert nested["caller"] == {"type": "code_execution_20250825", "tool_id": used["id"]}
    assert message["container"] == {
        "id": f"container_{begun.call_id.removeprefix('call_')}",
        "expires_at": "2027-01-15T08:05:02Z",
    }
    plain = await written([call("")], tools=())
    assert "container" not in plain
    assert "caller" not in plain["content"][0]


async def test_failure_of_a_tool_is_one_for_the_program() -> None:
    begun = program()
    message = await written([begun, call(begun.call_id), call(begun.call_id)])
    answered = results(message, ["No.", "Yes."])
    answered["content"][0]["is_error"] = True
    outputs = asked({"role": "assistant", "content": message["content"]}, answered).input_items[-2:]
    assert [(item.output, item.status) for item in outputs] == [
        ("Error: No.", "incomplete"),
        ("Yes.", "completed"),
    ]


async def test_message_with_results_for_a_program_has_nothing_else() -> None:
    begun = program()
    message = await written([begun, call(begun.call_id)])
    answered = results(message, ["1"])
    answered["content"].append({"type": "text", "text": "And now?"})
    with pytest.raises(InvalidRequest) as refused:
        asked({"role": "assistant", "content": message["content"]}, answered)
    assert refused.value.param == "messages[2].content[1]"
    direct = await written([call("")])
    answered["content"][0] = results(direct, ["1"])["content"][0]
    assert asked({"role": "assistant", "content": direct["content"]}, answered).input_items


async def test_conversation_is_summarized_once_its_programs_have_ended() -> None:
    begun = program()
    message = await written([begun, call(begun.call_id)])
    told: list[Json] = [{"role": "assistant", "content": message["content"]}, results(message, ["1"])]
    with pytest.raises(InvalidRequest) as refused:
        asked(*told, compaction={"type": "summarize"})
    assert refused.value.param == "compaction"
    ended = await written([items.ProgramOutput("progo_1", begun.call_id, "1", "completed")])
    assert asked(*told, {"role": "assistant", "content": ended["content"]}, HI, compaction={"type": "summarize"})


async def test_calls_and_results_of_a_program_that_was_cut_off_are_the_models() -> None:
    begun = program()
    first = await written([begun, call(begun.call_id)])
    nested = {"role": "assistant", "content": first["content"][1:]}
    ended = await written([items.ProgramOutput("progo_1", begun.call_id, "1", "completed")])
    result = {"role": "assistant", "content": ended["content"]}
    made, out = asked(nested, results(first, ["1"]), result, HI).input_items[1:-1]
    assert (items.caller_of(made), items.caller_of(out)) == ("", "")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (
            {"type": "code_execution_result", "stdout": "1", "stderr": "", "return_code": 0, "content": []},
            ("1", "completed"),
        ),
        (
            {"type": "code_execution_result", "stdout": "1", "stderr": "", "return_code": 1, "content": []},
            ("1", "incomplete"),
        ),
        (
            {"type": "code_execution_tool_result_error", "error_code": "execution_time_exceeded"},
            ("execution_time_exceeded", "incomplete"),
        ),
        ({"type": "encrypted_code_execution_result", "encrypted_stdout": "x", "return_code": 0}, ("", "incomplete")),
        ([], ("", "incomplete")),
    ],
)
async def test_result_of_a_program_is_read(content: Any, found: Any) -> None:
    begun = program()
    (used,) = (await written([begun]))["content"]
    result = {"type": "code_execution_tool_result", "tool_use_id": used["id"], "content": content}
    (again,) = items.of_type(
        asked({"role": "assistant", "content": [used, result]}, HI).input_items, items.ProgramOutput
    )
    assert (again.result, again.status) == found
