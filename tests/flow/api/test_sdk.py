from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.support.server import CALL, WEATHER, ScriptedServer, script


async def test_function_call_makes_the_round(served: ScriptedServer, sdk: openai.AsyncOpenAI) -> None:
    served.engine.script = script(CALL)
    tools: Any = [WEATHER]
    first = await sdk.responses.create(model="tiny", input="Weather?", tools=tools)
    call = first.output[-1]
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Paris"}
    served.engine.script = script()
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}]
    second = await sdk.responses.create(model="tiny", previous_response_id=first.id, input=output, tools=tools)
    assert second.output_text == "Hello!"
    prompt = served.prompt_text()
    assert prompt.endswith(
        "<|start|>user<|message|>Weather?<|end|><|start|>assistant"
        + CALL
        + "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>18 degrees<|end|>"
        "<|start|>assistant"
    )


async def test_errors_become_sdk_exceptions(served: ScriptedServer, sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.retrieve("resp_0")
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.responses.create(model="tiny", input="Hi", previous_response_id="resp_0")
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
