from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.pipeline.protocol.items import FunctionCall, Reasoning
from penstock.pipeline.protocol.response import Response
from penstock.services.tools import Toolbox
from tests.support.engine_requests import ON_SHARED_ENGINE, ChatEngine, answer

pytestmark = ON_SHARED_ENGINE

PERSON: Any = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}, "city": {"enum": ["Rome", "Oslo"]}},
    "required": ["age", "city"],
    "additionalProperties": False,
}
FORMAT = {"format": {"type": "json_schema", "name": "person", "strict": True, "schema": PERSON}}
CITY: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "get_weather", "strict": True, "parameters": CITY}
LOOKUP = {**WEATHER, "name": "lookup"}
QUESTION = "What is the weather in Paris?"


def calls(response: Response) -> list[tuple[str, Any]]:
    assert response.status == "completed"
    return [(item.name, json.loads(item.arguments)) for item in response.output if isinstance(item, FunctionCall)]


def thinks(response: Response) -> bool:
    return any(isinstance(item, Reasoning) for item in response.output)


@pytest.mark.defect("22", "25")
@pytest.mark.parametrize("thinking", [True, False])
async def test_schema_holds_for_the_answer_only(model: ChatEngine, thinking: bool) -> None:
    response = await model.respond("Say hello.", thinking=thinking, text=FORMAT)
    assert response.status == "completed"
    values = json.loads(answer(response))
    assert values.keys() == {"age", "city"}
    assert values["city"] in {"Rome", "Oslo"}
    assert thinks(response) is thinking


@pytest.mark.defect("35")
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(
    ("structured", "fits"),
    [
        ({"regex": r"[A-Z]{2}-\d{3}"}, lambda text: len(text) == 6 and text[2] == "-"),
        ({"choice": ["yes", "no"]}, lambda text: text in {"yes", "no"}),
        ({"grammar": 'start: "<" /[a-c]{3}/ ">"'}, lambda text: len(text) == 5 and text[0] + text[-1] == "<>"),
        ({"json": CITY}, lambda text: json.loads(text)["city"] in {"Paris", "Rome"}),
    ],
    ids=["regex", "choice", "grammar", "json"],
)
async def test_structured_outputs_hold_for_the_answer(
    model: ChatEngine, structured: Any, fits: Any, thinking: bool
) -> None:
    response = await model.respond("Say hello.", thinking=thinking, structured_outputs=structured)
    assert response.status == "completed"
    assert fits(answer(response))
    assert thinks(response) is thinking


@pytest.mark.defect("23")
async def test_tool_is_called_beside_a_format(model: ChatEngine) -> None:
    response = await model.respond(QUESTION, text=FORMAT, tools=[WEATHER])
    assert calls(response) == [("get_weather", {"city": "Paris"})]
    response = await model.respond("Say hello.", text=FORMAT, tools=[WEATHER])
    assert calls(response) or json.loads(answer(response)).keys() == {"age", "city"}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "lookup"}),
        ({"type": "function", "name": "lookup"}, {"lookup"}),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "lookup"}]}, {"lookup"}),
    ],
    ids=["required", "named", "allowed"],
)
@pytest.mark.parametrize("thinking", [True, False])
async def test_required_tool_is_called(model: ChatEngine, choice: Any, names: set[str], thinking: bool) -> None:
    response = await model.respond(
        "Say hello.", thinking=thinking, tools=[WEATHER, LOOKUP], tool_choice=choice, parallel_tool_calls=False
    )
    ((name, arguments),) = calls(response)
    assert name in names
    assert arguments["city"] in {"Paris", "Rome"}


async def test_optional_strict_tool_is_called_or_not(model: ChatEngine) -> None:
    assert calls(await model.respond(QUESTION, tools=[WEATHER])) == [("get_weather", {"city": "Paris"})]
    assert calls(await model.respond("Say hello.", tools=[WEATHER], tool_choice="none")) == []


async def test_level_holds_calls_of_clients_that_send_no_strict(model: ChatEngine) -> None:
    level = Toolbox(strict_level=lambda _: "parameter")
    tools = [{**WEATHER, "strict": None}, {**LOOKUP, "strict": False}]
    wild: dict[str, Any] = {"temperature": 1.0, "max_output_tokens": 400, "tools": tools}
    answers = [await model.respond(QUESTION, toolbox=level, seed=seed, **wild) for seed in range(8)]
    made = [call for response in answers if response.status == "completed" for call in calls(response)]
    assert made
    assert {city["city"] for _, city in made} <= {"Paris", "Rome"}
