"""What is promised of the output of a model with a chat template, held by the real engine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from pipeline.protocol.items import FunctionCall, Reasoning
from pipeline.protocol.response import Response
from stages.chat.load import ChatOptions, load_chat_model
from stages.chat.model import ChatModel
from stages.generate.vllm import VllmEngine, plan_vllm
from stages.persist.database import Nowhere
from stages.persist.live import LiveResponses
from stages.persist.store import Store
from stages.responses import chat_responses
from tests.chat_models import TINY_QWEN
from tests.engine.asking import answer
from tests.streams import final, run

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports warn
]

ARGUMENTS = (
    "--served-model-name=tiny-qwen",
    "--dtype=bfloat16",
    "--enforce-eager",
    "--max-model-len=8192",
    "--kv-cache-memory-bytes=67108864",
)
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


@dataclass
class Asked:
    """A model, and the whole pipeline around it."""

    engine: VllmEngine
    chat: ChatModel

    async def respond(self, question: str, /, *, thinking: bool = True, **body: Any) -> Response:
        """The response, every event of it checked."""
        pipeline = chat_responses(self.engine.models, self.engine, self.chat, LiveResponses(Store(Nowhere())))
        asked = {"input": question, "temperature": 0, "max_output_tokens": 400}
        return final(await run(pipeline, asked | {"chat_template_kwargs": {"enable_thinking": thinking}} | body))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tiny() -> AsyncGenerator[Asked, None]:
    plan = plan_vllm(str(TINY_QWEN), ARGUMENTS)
    chat = load_chat_model(plan.config, ChatOptions())
    engine = plan.start()
    await engine.warm_up()
    yield Asked(engine, chat)
    await engine.close()


def calls(response: Response) -> list[tuple[str, Any]]:
    assert response.status == "completed"
    return [(item.name, json.loads(item.arguments)) for item in response.output if isinstance(item, FunctionCall)]


def thinks(response: Response) -> bool:
    return any(isinstance(item, Reasoning) for item in response.output)


@pytest.mark.parametrize("thinking", [True, False])
async def test_row22_row25_a_schema_holds_the_answer_alone(tiny: Asked, thinking: bool) -> None:
    """The model thinks as it likes, or not at all, and none of it is in the answer."""
    response = await tiny.respond("Say hello.", thinking=thinking, text=FORMAT)
    assert response.status == "completed"
    said = json.loads(answer(response))
    assert said.keys() == {"age", "city"}
    assert said["city"] in {"Rome", "Oslo"}
    assert thinks(response) is thinking


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
async def test_row35_structured_outputs_hold_the_answer(
    tiny: Asked, structured: Any, fits: Any, thinking: bool
) -> None:
    """All the ways of vLLM, thinking or not."""
    response = await tiny.respond("Say hello.", thinking=thinking, structured_outputs=structured)
    assert response.status == "completed"
    assert fits(answer(response))
    assert thinks(response) is thinking


async def test_row23_a_tool_is_called_beside_a_format(tiny: Asked) -> None:
    """The model may call where it would, and its answer is in the format."""
    response = await tiny.respond(QUESTION, text=FORMAT, tools=[WEATHER])
    assert calls(response) == [("get_weather", {"city": "Paris"})]
    response = await tiny.respond("Say hello.", text=FORMAT, tools=[WEATHER])
    assert calls(response) or json.loads(answer(response)).keys() == {"age", "city"}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "lookup"}),
        ({"type": "function", "name": "lookup"}, {"lookup"}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "lookup"}]},
            {"lookup"},
        ),
    ],
    ids=["required", "named", "allowed"],
)
@pytest.mark.parametrize("thinking", [True, False])
async def test_tools_are_called_where_they_must_be(tiny: Asked, choice: Any, names: set[str], thinking: bool) -> None:
    """Whatever the question, and with arguments that fit."""
    response = await tiny.respond(
        "Say hello.", thinking=thinking, tools=[WEATHER, LOOKUP], tool_choice=choice, parallel_tool_calls=False
    )
    ((name, arguments),) = calls(response)
    assert name in names
    assert arguments["city"] in {"Paris", "Rome"}


async def test_free_models_call_and_answer_as_they_like(tiny: Asked) -> None:
    """Strict functions beside an answer that is free."""
    assert calls(await tiny.respond(QUESTION, tools=[WEATHER])) == [("get_weather", {"city": "Paris"})]
    assert calls(await tiny.respond("Say hello.", tools=[WEATHER], tool_choice="none")) == []
