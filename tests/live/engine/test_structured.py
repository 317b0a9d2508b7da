from __future__ import annotations

import asyncio
import re
from typing import Annotated, Any, Literal

import msgspec
import pytest

from penstock.pipeline.protocol.items import CustomToolCall, FunctionCall, Reasoning
from penstock.pipeline.protocol.response import Response
from penstock.services.engines.vllm import VllmEngine
from penstock.services.tools import Toolbox
from tests.support.engine_requests import ON_SHARED_ENGINE, answer, respond, spoken

pytestmark = ON_SHARED_ENGINE


class Person(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(max_length=12)]
    age: Annotated[int, msgspec.Meta(ge=0, le=150)]
    city: Literal["Rome", "Oslo"]


class City(msgspec.Struct, forbid_unknown_fields=True):
    city: Literal["Paris", "Rome"]


class Lookup(msgspec.Struct, forbid_unknown_fields=True):
    key: Annotated[str, msgspec.Meta(max_length=12)]
    n: Annotated[int, msgspec.Meta(ge=0, le=9)]


def schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON schema of ``kind`` without references, as clients write it."""
    _, definitions = msgspec.json.schema_components([kind])
    return {key: value for key, value in definitions[kind.__name__].items() if key != "title"}


def function(name: str, arguments: type[msgspec.Struct]) -> dict[str, Any]:
    return {"type": "function", "name": name, "strict": True, "parameters": schema(arguments)}


def custom(name: str, syntax: str, definition: str) -> dict[str, Any]:
    return {"type": "custom", "name": name, "format": {"type": "grammar", "syntax": syntax, "definition": definition}}


PERSON = {"format": {"type": "json_schema", "name": "person", "strict": True, "schema": schema(Person)}}
WEATHER, LOOKUP = function("get_weather", City), function("lookup", Lookup)
WEATHER_QUESTION = "What is the weather in Paris?"


def calls(response: Response) -> list[FunctionCall | CustomToolCall]:
    return [item for item in response.output if isinstance(item, FunctionCall | CustomToolCall)]


def the_call(response: Response) -> FunctionCall:
    assert response.status == "completed"
    (call,) = calls(response)
    assert call is response.output[-1]
    assert isinstance(call, FunctionCall)
    return call


def reasoned(response: Response) -> str:
    return "".join(item.text for item in response.output if isinstance(item, Reasoning))


@pytest.mark.defect("22", "25")
@pytest.mark.parametrize("text", ["Describe a person as JSON.", "Describe a person in typed JSON.", "Say hello."])
async def test_schema_binds_the_answer_and_not_the_reasoning(engine: VllmEngine, text: str) -> None:
    response = await respond(engine, text, text=PERSON)
    assert response.status == "completed"
    msgspec.json.decode(answer(response), type=Person)
    assert reasoned(response)
    assert "{" not in reasoned(response)
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0


@pytest.mark.defect("22")
async def test_schema_binds_an_answer_without_reasoning(engine: VllmEngine) -> None:
    response = await respond(engine, "Answer directly.", text=PERSON)
    msgspec.json.decode(answer(response), type=Person)
    assert "{" not in reasoned(response)


async def test_json_object_is_enforced(engine: VllmEngine) -> None:
    response = await respond(engine, "Describe a person in plain JSON.", text={"format": {"type": "json_object"}})
    assert msgspec.json.decode(answer(response), type=dict[str, Any]) == {"name": "Ada", "age": 36}


@pytest.mark.defect("23")
async def test_schema_and_tools_work_together(engine: VllmEngine) -> None:
    called = the_call(await respond(engine, WEATHER_QUESTION, text=PERSON, tools=[WEATHER]))
    assert msgspec.json.decode(called.arguments, type=City) == City("Paris")
    answered = await respond(engine, "Describe a person as JSON.", text=PERSON, tools=[WEATHER])
    assert calls(answered) == []
    msgspec.json.decode(answer(answered), type=Person)


async def test_optional_strict_tool_is_called_or_not(engine: VllmEngine) -> None:
    called = the_call(await respond(engine, WEATHER_QUESTION, tools=[WEATHER, LOOKUP]))
    assert msgspec.json.decode(called.arguments, type=City) == City("Paris")
    answered = await respond(engine, "Say hello.", tools=[WEATHER, LOOKUP])
    assert answer(answered) == "Hello! How can I help you today?"


async def test_strict_arguments_override_the_model(engine: VllmEngine) -> None:
    for text in ("Call the tool with broken arguments.", "What is the weather on Mars?"):
        called = the_call(await respond(engine, text, tools=[WEATHER]))
        msgspec.json.decode(called.arguments, type=City)


async def test_required_tool_is_called(engine: VllmEngine) -> None:
    response = await respond(engine, "Say hello.", tools=[WEATHER, LOOKUP], tool_choice="required")
    (call, *_) = calls(response)
    assert isinstance(call, FunctionCall)
    msgspec.json.decode(call.arguments, type={"get_weather": City, "lookup": Lookup}[call.name])


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "lookup"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "lookup"}]},
    ],
    ids=["named", "allowed"],
)
async def test_chosen_tool_is_called(engine: VllmEngine, choice: dict[str, Any]) -> None:
    response = await respond(
        engine, WEATHER_QUESTION, tools=[WEATHER, LOOKUP], tool_choice=choice, parallel_tool_calls=False
    )
    called = the_call(response)
    assert called.name == "lookup"
    msgspec.json.decode(called.arguments, type=Lookup)


async def test_allowed_tools_are_a_hard_limit(engine: VllmEngine) -> None:
    only: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "lookup"}]}
    response = await respond(engine, WEATHER_QUESTION, tools=[WEATHER, LOOKUP], tool_choice=only)
    assert {call.name for call in calls(response)} <= {"lookup"}


async def test_parallel_calls_work_under_a_grammar(engine: VllmEngine) -> None:
    tools = [function("get_weather", type("City", (msgspec.Struct,), {"__annotations__": {"city": str}}))]
    request_fields: dict[str, Any] = {"tools": tools, "tool_choice": "required"}
    both = await respond(engine, "Compare London and Tokyo.", **request_fields)
    assert [call.arguments for call in calls(both) if isinstance(call, FunctionCall)] == [
        '{"city":"London"}',
        '{"city":"Tokyo"}',
    ]
    one = await respond(engine, "Compare London and Tokyo.", parallel_tool_calls=False, **request_fields)
    assert the_call(one).arguments == '{"city":"London"}'


@pytest.mark.parametrize(
    ("syntax", "definition", "pattern"),
    [
        ("regex", r"\d{4}-\d{2}-\d{2}", r"\d{4}-\d{2}-\d{2}"),
        (
            "lark",
            'start: "move " DIRECTION (" " DIGIT)?\nDIRECTION: "up" | "down"\nDIGIT: /[0-9]/',
            r"move (up|down)( \d)?",
        ),
    ],
    ids=["regex", "lark"],
)
async def test_custom_tool_input_matches_its_grammar(
    engine: VllmEngine, syntax: str, definition: str, pattern: str
) -> None:
    tool = custom("act", syntax, definition)
    response = await respond(engine, "Say hello.", tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = calls(response)
    assert isinstance(call, CustomToolCall)
    assert re.fullmatch(pattern, call.input)


async def test_constraints_hold_at_any_temperature(engine: VllmEngine) -> None:
    wild: dict[str, Any] = {"temperature": 1.6, "max_output_tokens": 4000, "parallel_tool_calls": False}
    request_fields = [
        respond(engine, WEATHER_QUESTION, tools=[WEATHER, LOOKUP], tool_choice="required", seed=seed, **wild)
        for seed in range(8)
    ]
    for response in await asyncio.gather(*request_fields):
        if response.status == "completed":
            call = the_call(response)
            msgspec.json.decode(call.arguments, type={"get_weather": City, "lookup": Lookup}[call.name])


async def test_broken_grammar_fails_the_response(engine: VllmEngine) -> None:
    """If the matcher fails in mid-generation, the response fails, and its partial output is no answer.

    The pattern can match a word in very many ways, which takes more fuel than the matcher has for one step.  So the
    matcher fails as soon as the string begins, before the model writes into it.
    """
    words = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": r"^(\w{1,30} ?){500}$"}},
        "required": ["a"],
    }
    text = {"format": {"type": "json_schema", "name": "words", "strict": True, "schema": words}}
    response = await respond(engine, "Describe a person as JSON.", text=text)
    assert response.status == "failed"
    assert response.error is not None
    assert response.error.code == "server_error"
    assert spoken(response.output[-1]).endswith('"')


async def test_level_holds_calls_of_clients_that_send_no_strict(engine: VllmEngine) -> None:
    level = Toolbox(strict_level=lambda _: "parameter")
    tools = [{**tool, "strict": strict} for tool, strict in ((WEATHER, None), (LOOKUP, False))]
    wild: dict[str, Any] = {"temperature": 1.0, "max_output_tokens": 400, "tools": tools}
    answers = [await respond(engine, WEATHER_QUESTION, level, seed=seed, **wild) for seed in range(8)]
    made = [call for response in answers for call in calls(response) if call.status == "completed"]
    assert made
    for call in made:
        assert isinstance(call, FunctionCall)
        msgspec.json.decode(call.arguments, type={"get_weather": City, "lookup": Lookup}[call.name])
