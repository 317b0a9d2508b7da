from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline.protocol.items import FunctionCall, Message, Reasoning
from tests.support import engine_requests
from tests.support.event_streams import final, run_request
from tests.support.stores import open_store

pytestmark = engine_requests.ON_SHARED_ENGINE


async def test_reasoning_and_answer_are_two_items(model: engine_requests.ChatEngine) -> None:
    response = await model.respond("Say hello.")
    thought, message = response.output
    assert isinstance(thought, Reasoning)
    assert isinstance(message, Message)
    assert message.text == engine_requests.HELLO
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


@pytest.mark.parametrize(
    "body", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning": {"effort": "none"}}]
)
async def test_thinking_can_be_switched_off(model: engine_requests.ChatEngine, body: dict[str, Any]) -> None:
    response = await model.respond("Say hello.", **body)
    assert not any(isinstance(item, Reasoning) for item in response.output)
    assert engine_requests.answer(response) == engine_requests.HELLO


@pytest.mark.parametrize("budget", [0, 1, 20])
async def test_thought_ends_after_its_budget(model: engine_requests.ChatEngine, budget: int) -> None:
    response = await model.respond("Keep thinking without end.", thinking_token_budget=budget, max_output_tokens=100)
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == budget
    assert isinstance(response.output[-1], Message)
    free = await model.respond("Say hello.", thinking_token_budget=500)
    assert engine_requests.answer(free) == engine_requests.HELLO


async def test_function_is_called_and_answered(model: engine_requests.ChatEngine, tmp_path: Path) -> None:
    async with open_store(str(tmp_path / "responses.sqlite3")) as store:
        pipeline = model.pipeline(store)
        body = {"tools": [engine_requests.WEATHER_TOOL], "temperature": 0, "max_output_tokens": 400}
        called = final(await run_request(pipeline, body | {"input": "What is the weather in Paris?"}))
        call = called.output[-1]
        assert isinstance(call, FunctionCall)
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
        output = {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature":18,"unit":"C"}'}
        answered = final(await run_request(pipeline, body | {"input": [output], "previous_response_id": called.id}))
        assert engine_requests.answer(answered) == "It is 18 °C in Paris right now."


async def test_cut_thought_goes_on_as_if_it_had_not_been_cut(model: engine_requests.ChatEngine, tmp_path: Path) -> None:
    question = "Think hard about the answer."
    whole = await model.respond(question)
    async with open_store(str(tmp_path / "responses.sqlite3")) as store:
        pipeline = model.pipeline(store)
        body: dict[str, Any] = {"input": question}
        thoughts = list[str]()
        for tokens in (16, 40, 400):
            response = final(await run_request(pipeline, body | {"temperature": 0, "max_output_tokens": tokens}))
            thought, *answers = response.output
            assert isinstance(thought, Reasoning)
            thoughts.append(thought.text)
            body = {"previous_response_id": response.id}
    assert ["".join(thoughts), *map(engine_requests.spoken, answers)] == [*map(engine_requests.spoken, whole.output)]
    assert len(answers) == 1
